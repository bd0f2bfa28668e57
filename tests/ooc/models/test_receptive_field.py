"""How many hops a model's outputs depend on: tried, against what its layers are known to read."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import APPNP, GAT, GCN, GIN, ChebConv, GraphNorm, GraphSAGE, SAGEConv

from ooc.models.receptive_field import hops_of
from ooc.stores.errors import ConfigError


class Chebyshev(nn.Module):
    """Divides by how many edges leave a source: in a neighborhood they are not all there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ChebConv(4, 3, K=4)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x, edge_index)
        return out


class Propagated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.steps = SAGEConv(4, 3), APPNP(4, 0.1)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.steps(self.conv(x, edge_index).relu(), edge_index)
        return out


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = SAGEConv(4, 3), GraphNorm(3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.conv(x, edge_index))
        return out


class OnBlocks(nn.Module):
    def forward(self, x: torch.Tensor, blocks: list[object]) -> torch.Tensor:
        return x


with torch.random.fork_rng():
    torch.manual_seed(0)  # weights by chance may cut a ReLU off
    MODELS = [
        (GraphSAGE(4, 8, 2, 3), 2),
        (GIN(4, 8, 3, 3), 3),
        (GAT(4, 8, 2, 3, heads=2), 2),
        (GCN(4, 8, 2, 3), 3),  # divides by the degrees of sources
        (GCN(4, 8, 12, 3), 13),
        (GCN(4, 8, 2, 3, normalize=False), 2),
        (GCN(4, 8, 2, 3, norm="batch", jk="cat", dropout=0.5), 3),
        (Propagated(), 5),
    ]


@pytest.mark.parametrize(("model", "hops"), MODELS)
@pytest.mark.parametrize("weighted", [False, True])
def test_hops_are_found_by_trying(model: nn.Module, hops: int, weighted: bool) -> None:
    model.train()
    assert hops_of(model, 4, weighted) == hops
    assert model.training
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("model", [Normed(), Chebyshev()])
def test_what_no_neighborhood_gives_exactly_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=f"{type(model).__name__} for a node depends on nodes more than 64 hops away"):
        hops_of(model, 4)


def test_blocks_must_be_counted() -> None:
    with pytest.raises(ConfigError, match="give num_layers"):
        hops_of(OnBlocks(), 4)
    assert hops_of(OnBlocks(), 4, num_layers=3) == 3


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.gnn = nn.Embedding(20, 4), GraphSAGE(4, 8, 2, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gnn(self.table(x[:, 1].long()), edge_index)
        return out


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_an_embedding_is_tried_on_values_that_it_has(dtype: torch.dtype) -> None:
    rows = torch.tensor([[10**6, 0], [7, 19], [7, 3]], dtype=dtype)
    assert hops_of(Lookup(), 2, rows=lambda: rows) == 2


def test_a_forward_that_fails_is_named() -> None:
    with pytest.raises(ConfigError, match="Lookup fails on a small graph: IndexError"):
        hops_of(Lookup(), 2, rows=lambda: torch.tensor([[0, 20]]))
    broken = GraphSAGE(4, 8, 2, 3)
    nn.init.constant_(broken.convs[0].lin_l.weight, torch.nan)
    with pytest.raises(ConfigError, match="GraphSAGE gives infinite numbers or NaN"):
        hops_of(broken, 4)

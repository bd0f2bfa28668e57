"""Modules that are not ours in exact training: random numbers are replayed, and norms over all nodes see all of them."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphNorm, LayerNorm, PairNorm, SAGEConv

from ooc.fullgraph import step as fullgraph
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.graph.blocks import Block
from ooc.layerwise import layerwise_pass as layerwise
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.models.builders import full_blocks
from ooc.models.convs import BlockSAGEConv
from ooc.models.layers import Layer, run_layers
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import CLASSES, FEATURES, NODES, LossOf, agree, cut_into, gradients, inputs, store_of

WIDTH = 16


class Model(nn.Module):
    """A list of layers, perhaps with an encoder."""

    def __init__(self, layers: list[nn.Module], encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if encoder is not None:
            self.encoder = encoder


class Own(nn.Module):
    """A user's layer, which gathers."""

    def __init__(self, width: int, out: int, *more: nn.Module) -> None:
        super().__init__()
        self.conv, self.more = SAGEConv(width, out), nn.Sequential(*more)

    def forward(self, x: Tensor, block: Block) -> Tensor:
        h = self.conv((x, x[: block.num_dst]), block.edge_index, size=(block.num_src, block.num_dst))
        found: Tensor = self.more(h)
        return found


class Thrice(Layer):
    """One of ours with a forward of its own."""

    def forward(self, x: Any, block: Block, initial: Tensor | None = None) -> Tensor:
        return 3 * super().forward(x, block, initial)


def ours(width: int, out: int, made: type[Layer] = Layer, **settings: Any) -> Layer:
    return made(BlockSAGEConv(width, out), width, out, **settings)


def encoded() -> nn.Module:
    encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Dropout(0.5))
    return Model([ours(WIDTH, WIDTH, dropout=0.2, activation=nn.ReLU()), ours(WIDTH, CLASSES)], encoder)


def activated() -> nn.Module:
    return Model(
        [ours(FEATURES, WIDTH, activation=nn.Sequential(nn.ReLU(), nn.Dropout(0.5))), ours(WIDTH, CLASSES, dropout=0.3)]
    )


def gathering() -> nn.Module:
    return Model([Own(FEATURES, WIDTH, nn.RReLU(), nn.Dropout(0.5)), Own(WIDTH, CLASSES)])


def step(ds: Dataset, folder: Path, make: Callable[[], nn.Module], where: TensorPlacement) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(1)
    model = make()
    with closing(FullGraph(model, ds, folder, room=10**6)) as full:
        full.placement = Placement(
            {v.name: where if where in v.placements else TensorPlacement.DISK for v in full.program.values}
        )
        torch.manual_seed(5)
        return full.step(LossOf(ds)), gradients(model)


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [encoded, activated, gathering])
def test_torchs_own_dropout_is_replayed_where_rows_are_computed_again(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    cut_into(5, monkeypatch)
    with Dataset.open(store_of(make_store)) as ds:
        value, expected = step(ds, tmp_path / "retained", make, TensorPlacement.RETAINED)
        for where in (TensorPlacement.RECOMPUTED, TensorPlacement.DISK):
            again, found = step(ds, tmp_path / where, make, where)
            assert again == value
            agree(found, expected, 1e-6)


def test_a_layer_of_ours_with_a_forward_of_its_own_is_taken_as_it_is(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds:
        torch.manual_seed(1)
        model = Model([ours(FEATURES, WIDTH, Thrice, norm="batch", activation=nn.ReLU()), ours(WIDTH, CLASSES)])
        x, edge_index, weight, _ = inputs(ds, torch.float32)
        expected = LossOf(ds)(0, run_layers(model.layers, x, full_blocks(edge_index, NODES, 2, weight)))
        assert expected is not None
        with closing(FullGraph(model, ds, tmp_path / "full", room=10**7)) as full:
            assert full.step(LossOf(ds)) == pytest.approx(float(expected.detach()), rel=1e-5)


NORMS: list[Callable[[], nn.Module]] = [
    lambda: GraphNorm(WIDTH),
    PairNorm,
    lambda: LayerNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
]


@pytest.mark.parametrize("norm", NORMS)
def test_norms_over_all_nodes_are_refused_where_they_would_see_some(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: Callable[[], nn.Module]
) -> None:
    within = ours(FEATURES, WIDTH)
    within.norm = nn.Sequential(norm(), nn.Linear(WIDTH, WIDTH))
    cut_into(5, monkeypatch)
    for module in (fullgraph, layerwise):
        monkeypatch.setattr(module, "CHUNK_ROWS", 50)
    with Dataset.open(store_of(make_store)) as ds:
        for first in (Own(FEATURES, WIDTH, norm()), within):
            model = Model([first, ours(WIDTH, CLASSES)])
            with pytest.raises(ConfigError, match=f"layer 0 has a {type(norm()).__name__} inside, which sees all nodes"):
                FullGraph(model, ds, tmp_path / "full", room=500_000)
            if not isinstance(norm(), nn.BatchNorm1d):  # in evaluation it sees none
                with pytest.raises(ConfigError, match="score it on sampled batches"):
                    LayerwisePass(model, ds, tmp_path / "sweep")
        with pytest.raises(ConfigError, match="would see only those"):
            FullGraph(Model([ours(WIDTH, CLASSES)], nn.Sequential(nn.Linear(FEATURES, WIDTH), norm())), ds, tmp_path / "full")

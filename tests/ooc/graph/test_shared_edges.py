"""Layers that share a block make its order by source once, with the bits of layers that do not."""

import pytest
import torch
from torch import Tensor

from ooc.graph import shared_edges
from ooc.graph.blocks import sorted_by_source
from ooc.graph.shared_edges import SharedEdges, edges_by_source
from ooc.models.builders import build_model, full_blocks
from ooc.models.convs import BlockGATConv, BlockGCNConv, BlockSAGEConv, mean_share
from ooc.models.reversible import NAMES
from tests.ooc.graphs import hub_graph

NODES, WIDTH = 60, 16


def gradients(layers: torch.nn.ModuleList, x: Tensor, shared: SharedEdges | None) -> list[Tensor]:
    (block,) = full_blocks(hub_graph(), NODES, 1)
    block, rows = block._replace(shared=shared), x.clone().requires_grad_()
    out = rows
    for layer in layers:
        out = layer(out, block).tanh()
    return [out, *torch.autograd.grad(out.square().sum(), [rows, *layers.parameters()])]


@pytest.mark.parametrize("conv", [BlockSAGEConv, BlockGCNConv, BlockGATConv])
def test_layers_that_share_have_the_bits_of_layers_that_do_not(conv: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    options = {"heads": 4} if conv is BlockGATConv else {}
    layers = torch.nn.ModuleList(conv(WIDTH, WIDTH // options.get("heads", 1), **options) for _ in range(3))
    x = torch.randn(NODES, WIDTH)
    for a, b in zip(gradients(layers, x, SharedEdges()), gradients(layers, x, None), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("columns", [None, 1, 3])
def test_edges_by_source_are_sorted_and_their_values_their_own(columns: int | None) -> None:
    edge_index, shared = hub_graph(), SharedEdges()
    for _ in range(2):  # a second value after the first
        value = None if columns is None else torch.randn(edge_index.size(1), columns).squeeze(1)
        indptr, target, ordered = edges_by_source(edge_index, NODES, value, shared)
        order = torch.sort(edge_index[0], stable=True).indices
        assert torch.equal(indptr.diff(), torch.bincount(edge_index[0], minlength=NODES))
        assert torch.equal(target, edge_index[1][order])
        assert (ordered is None) == (value is None)
        if value is not None and ordered is not None:
            assert torch.equal(ordered, value[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_a_mean_are_one_over_the_edges_of_a_destination(dtype: torch.dtype) -> None:
    (block,) = full_blocks(hub_graph(), NODES, 1)
    count = torch.bincount(block.edge_index[1], minlength=NODES)
    assert count.min() == 0
    share = mean_share(block, dtype)
    assert torch.equal(share, count.to(dtype)[block.edge_index[1]].reciprocal())


@pytest.mark.parametrize("name", NAMES)
def test_a_reversible_model_sorts_edges_once_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sorts = 0

    def counted(source: Tensor, size: int) -> tuple[Tensor, Tensor]:
        nonlocal sorts
        sorts += 1
        return sorted_by_source(source, size)

    model = build_model(name, 12, 32, 3, 5, 0.2, "layer", heads=4)
    blocks, x = full_blocks(hub_graph(), NODES, 1), torch.randn(NODES, 12)
    monkeypatch.setattr(shared_edges, "sorted_by_source", counted)
    for step in (1, 2):
        model(x, blocks).sum().backward()
        assert sorts == step
    assert blocks[0].shared is None

"""What exact steps rest on: the edges turned round, and dropout of a few rows of a matrix."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.layerwise import edge_tiles as sweepedges
from ooc.layerwise.edge_tiles import SOURCE_BITS, EdgeTiles, Tiles, out_edges
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.row_files import Files
from ooc.models.dropout import DropoutKeys, dropout
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import NODES, store_of


def listed(tiles: Tiles) -> list[tuple[int, int, float]]:
    """(piece's own node, the other end, weight) of every edge, as the tiles have them."""
    found = []
    for piece, low, high in tiles.spans(0, NODES):
        entry, weight, _ = tiles.read(low, high)
        own = piece * tiles.grid.piece_rows + (entry & ((1 << SOURCE_BITS) - 1))
        found += list(zip(own.tolist(), (entry >> SOURCE_BITS).tolist(), weight.tolist(), strict=True))
    return found


@pytest.mark.parametrize("part", [1 << 21, 150, 7])
def test_edges_turned_round(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """In memory at once, by a few sources, and with sources that have more edges than are sorted at a time."""
    monkeypatch.setattr(sweepedges, "_PART", part)
    with Dataset.open(store_of(make_store, weighted=True)) as ds:
        edges = EdgeTiles(ds, Files(None, "auto", in_ram=True), 32, 32, IoStats(), weighted=True)
        forth = edges.open(lambda done: None)
        back = edges.open(lambda done: None, forth)
        graph = ds.graph
        target = np.repeat(np.arange(NODES), np.diff(graph.indptr)).tolist()
        real = list(zip(graph.indices.tolist(), target, graph.columns["weight"].tolist(), strict=True))
        assert sorted(listed(forth)) == sorted(real)
        turned = listed(back)
        assert sorted((src, dst, weight) for dst, src, weight in turned) == sorted(real)
        in_order = [(dst // 32, src, dst) for dst, src, _ in turned]
        assert in_order == sorted(in_order)
        sources = [first for first, indptr, _, _ in out_edges(forth) if indptr[-1]]
        assert sources == sorted(sources)


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    some=st.lists(st.integers(0, 39), max_size=20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_rows_are_dropped_as_in_the_whole_matrix(rows: int, width: int, seed: int, some: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    x = torch.rand(rows, width, dtype=dtype) + 1
    torch.manual_seed(seed)
    first, second = dropout(x, 0.4, True), dropout(x, 0.7, True)
    torch.manual_seed(seed)
    draws, node = DropoutKeys(), np.array([each % rows for each in some], np.int64)
    for at in (node, np.arange(rows), node[::-1].copy()):  # any rows, in any order, and again
        with draws.part("layer", {"sources": at}):
            assert torch.equal(dropout(x[at], 0.4, True), first[at])
            assert torch.equal(dropout(x[at], 0.7, True), second[at])


def test_the_way_down_of_dropped_rows_drops_the_same() -> None:
    draws, at = DropoutKeys(), np.array([5, 2, 9])
    x = torch.ones(3, 8, requires_grad=True)
    with draws.part("layer", {"sources": at}):
        out = dropout(x, 0.5, True)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())

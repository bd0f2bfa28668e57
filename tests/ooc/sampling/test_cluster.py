"""Cutting ranges of nodes out of the CSC, against a plain loop over all edges."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.sampling import cluster
from ooc.sampling.cluster import Edges, cut, parts_of, ranges_of
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.stores.graph import Graph
from tests.conftest import MakeStore


def plain(graph: Graph, ranges: np.ndarray, halo: bool) -> dict[str, list[Any]]:
    """The same, edge by edge."""
    own = [v for first, last in ranges.tolist() for v in range(first, last)]
    kept: list[tuple[int, int, int]] = []
    for v in own:
        first, last = graph.slots(v)
        kept += [(int(graph.indices[s]), v, s) for s in range(first, last) if halo or int(graph.indices[s]) in own]
    outside = sorted({u for u, _, _ in kept} - set(own))
    return {"node": own + outside, "edges": [(u, v) for u, v, _ in kept], "slot": [s for _, _, s in kept], "own": own}


def check(graph: Graph, ranges: np.ndarray, halo: bool, edges: Edges | None = None) -> None:
    found, want = cut(graph, ranges, halo, edges).subgraph, plain(graph, ranges, halo)
    assert found.node.tolist() == want["node"]
    assert found.slot.tolist() == want["slot"]
    assert len(found.indptr) == len(want["own"]) + 1
    target = np.repeat(np.arange(len(found.indptr) - 1), np.diff(found.indptr))
    assert list(zip(found.node[found.source].tolist(), found.node[target].tolist(), strict=True)) == want["edges"]
    assert (sum(found.num_nodes), sum(found.num_edges)) == (len(want["node"]), len(want["edges"]))
    assert found.num_nodes[0] == len(want["own"])


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Graph, np.ndarray]:
    """A graph with hubs, isolated nodes, self-loops and equal edges, and ascending ranges of its nodes, some empty."""
    count = draw(st.integers(1, 150))
    node = st.one_of(st.integers(0, count - 1), st.just(0), st.just(count - 1))
    edges = draw(st.lists(st.tuples(node, node), max_size=80))
    loops = draw(st.lists(node, max_size=3))
    src, dst = [u for u, _ in edges] + loops, [v for _, v in edges] + loops
    bounds = sorted(draw(st.lists(st.integers(0, count), min_size=2, max_size=8).filter(lambda b: len(b) % 2 == 0)))
    return Graph.from_edges(src, dst, count), np.array(bounds, np.int64).reshape(-1, 2)


@settings(deadline=None)
@given(cuts(), st.booleans(), st.sampled_from([1, 3, 2**20]))
def test_a_cut_is_what_a_loop_over_all_edges_finds(example: tuple[Graph, np.ndarray], halo: bool, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "PIECE_SLOTS", piece)
        check(*example, halo)


@pytest.mark.parametrize("engine", ["pread", "mmap", "auto"])
@pytest.mark.parametrize("halo", [False, True])
def test_a_cut_from_disk_is_the_one_in_memory(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, engine: str, halo: bool
) -> None:
    monkeypatch.setattr(cluster, "PIECE_SLOTS", 1000)
    path = make_store(num_nodes=500, num_edges=20_000, weight=True)
    ranges = np.array([[7, 60], [60, 61], [300, 500]])
    with Dataset.open(path, engine=engine) as ds:
        edges = Edges(ds.edge_rows("indices"), {name: ds.edge_rows(name) for name in ("edge_id", "weight")})
        check(ds.graph, ranges, halo, edges)
        made = cut(ds.graph, ranges, halo, edges)
        for name in ("edge_id", "weight"):
            assert np.array_equal(made.subgraph.columns[name], ds.graph.columns[name][made.subgraph.slot])
        slots = sum(int(ds.graph.indptr[b] - ds.graph.indptr[a]) for a, b in ranges.tolist())
        assert made.nbytes >= slots * (4 + 8 + 4)
        assert cut(ds.graph, ranges, halo).nbytes == 0


def test_a_cut_over_its_bytes_is_refused_before_they_are_taken() -> None:
    graph = Graph.from_edges(np.arange(1000), np.roll(np.arange(1000), 1), 1000)
    ranges = np.array([[0, 500]])
    need = 500 * (16 + 100) + 499 * 16
    assert cut(graph, ranges, False, max_bytes=need, row_bytes=100).subgraph.num_nodes == (500,)
    with pytest.raises(BudgetError, match="use fewer parts per batch"):
        cut(graph, ranges, False, max_bytes=need - 1, row_bytes=100)
    halo = need + 16 + 116  # one edge comes in, with its source
    assert cut(graph, ranges, True, max_bytes=halo, row_bytes=100).subgraph.num_nodes == (500, 1)
    with pytest.raises(BudgetError, match="more memory"):
        cut(graph, ranges, True, max_bytes=halo - 1, row_bytes=100)


@pytest.mark.parametrize(
    ("indptr", "indices"), [([0, 2, 1, 3], [0, 1, 2]), ([0, 1, 2, 3], [0, 3, 2]), ([0, 1, 2, 3], [0, -1, 2])]
)
def test_a_damaged_topology_is_said(indptr: list[int], indices: list[int]) -> None:
    graph = Graph(np.array(indptr), np.array(indices, np.int32))
    with pytest.raises(StoreError, match="ooc verify"):
        cut(graph, np.array([[0, 3]]), False, Edges(ArrayRows(np.array(indices, np.int32)), {}))


def test_parts_of_a_store_and_equal_ones(make_store: MakeStore) -> None:
    src, dst = np.random.default_rng(1).integers(0, 50, (2, 300))
    given_parts = [0, 10, 11, 50]
    path = make_store(src=src, dst=dst)
    with Dataset.open(path) as ds:
        assert ds.graph.parts is None
        with pytest.raises(ConfigError, match="ingest it with `parts`, or give `num_parts`"):
            parts_of(ds.graph)
        assert parts_of(ds.graph, 3).tolist() == [0, 16, 33, 50]
        with pytest.raises(ConfigError, match="51 parts"):
            parts_of(ds.graph, 51)
    graph = Graph.from_edges(src, dst, 50, parts=given_parts)
    assert parts_of(graph).tolist() == given_parts
    assert parts_of(graph, 3).tolist() == given_parts
    with pytest.raises(ConfigError, match="has 3 parts, not 4"):
        parts_of(graph, 4)
    assert ranges_of(parts_of(graph), np.array([2, 0])).tolist() == [[0, 10], [11, 50]]

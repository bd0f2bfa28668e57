"""The parts of a graph that ranks compute, against the whole graph."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.fullgraph.halo.cuts import NODE_EDGES, balanced_cuts
from ooc.fullgraph.halo.exchange import drawn
from ooc.fullgraph.halo.local_graph import LocalDataset
from ooc.fullgraph.halo.reach import HaloEdges, reach_of, recompute_none
from ooc.fullgraph.halo.recompute import RankRows
from ooc.graph.aggregation import gcn_factors
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import NODES, store_of


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 8))
def test_cuts_balance_nodes_and_edges(degrees: list[int], count: int) -> None:
    count = min(count, len(degrees))
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    cuts = balanced_cuts(indptr, count)
    assert cuts[0] == 0
    assert cuts[-1] == len(degrees)
    assert (np.diff(cuts) >= 1).all()
    cost = indptr + NODE_EDGES * np.arange(len(indptr))
    if len(degrees) > 2 * count * (max(degrees) + 1):  # no node is as much as a range
        even = cost[-1] / count
        assert np.abs(np.diff(cost[cuts]) - even).max() <= max(degrees) + NODE_EDGES


@pytest.mark.parametrize("memory", [None, 10**5])
def test_a_part_has_the_edges_and_degrees_of_the_whole_graph(
    make_store: MakeStore, tmp_path: Path, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ooc.fullgraph.halo.local_graph._SLOTS_AT_ONCE", 50)
    if memory:
        monkeypatch.setattr("ooc.fullgraph.halo.local_graph.RANK_EDGES_SHARE", 10**9)  # edges are mapped from a file
    with Dataset.open(store_of(make_store, weighted=True), memory=memory and "2GB") as ds:
        whole, starts = ds.graph, balanced_cuts(ds.graph.indptr, 3)
        for rank in range(3):
            first, stop = starts[rank : rank + 2].tolist()
            edges = HaloEdges(ds)
            reach = reach_of(edges, first, stop, edges.outside(first, stop), 2, True, recompute_none)
            part = LocalDataset(ds, reach, tmp_path / f"{rank}")
            assert isinstance(part.graph.indices, np.memmap) is bool(memory)
            begin, end = whole.indptr[first], whole.indptr[stop]
            source = np.asarray(whole.indices[begin:end], np.int64)
            outside = np.unique(source[(source < first) | (source >= stop)])
            assert part.node.tolist() == [*range(first, stop), *outside]
            assert (part.num_nodes, part.num_edges) == (stop - first, end - begin)
            assert part.node[np.asarray(part.graph.indices)].tolist() == source.tolist()
            assert part.graph.columns["weight"].tolist() == whole.columns["weight"][begin:end].tolist()
            local = np.arange(len(part.node))
            for ours, theirs in ((part.graph.degree, whole.degree), (part.graph.loops, whole.loops)):
                assert ours(local).tolist() == theirs(part.node).tolist()
            assert gcn_factors(part.graph, local).tolist() == gcn_factors(whole, part.node).tolist()
            x, own = np.empty((NODES, ds.num_features), np.float32), np.empty((len(local), ds.num_features), np.float32)
            ds.stored("x").read(np.arange(NODES), x)
            part.stored("x").read(local, own)
            assert (own == x[part.node]).all()
            owners = np.searchsorted(starts, outside, side="right") - 1
            rows = RankRows.of(reach, edges, starts)
            assert rows.received == (tuple(np.bincount(owners, minlength=3).tolist()),) * 2


@settings(deadline=None)  # a kernel is compiled at first
@given(st.floats(0.01, 1.0), st.integers(0, 2**62))
def test_as_many_rows_are_drawn_as_asked_and_others_for_others(rate: float, key: int) -> None:
    node = np.arange(5000)
    first, again = (drawn(node[::2], key, 0, rate) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert first.tolist() == drawn(node, key, 0, rate)[::2].tolist(), "by the node alone"
    assert abs(drawn(node, key, 0, rate).mean() - rate) < 6 * np.sqrt(rate * (1 - rate) / len(node)) + 1e-9
    if 0.3 < rate < 0.7:
        assert (drawn(node, key, 0, rate) != drawn(node, key, 1, rate)).any()

"""Sampled edges in both directions, against sets of pairs."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.hetero import EdgeKey, HeteroSubgraph
from ooc.sampling import HeteroNeighborSampler
from ooc.sampling.bidirectional import bidirectional
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph
from tests.ooc.hetero_graphs import ABOUT, CITES, NUM_NODES, REV_WRITES, WRITES, bipartite, hetero_graphs

compiling = settings(deadline=None)  # the first example may compile a kernel
REVERSES = {CITES: CITES, WRITES: REV_WRITES, REV_WRITES: WRITES}


def sampled(graphs: Mapping[EdgeKey, Graph], key: int) -> HeteroSubgraph:
    fanout = {each: [3, 2] for each in graphs}
    return HeteroNeighborSampler(graphs, NUM_NODES, fanout).sample({"paper": np.arange(4)}, key)


def pairs(found: HeteroSubgraph, key: EdgeKey) -> list[tuple[int, int]]:
    """(source, destination) of every edge of a type, local numbers."""
    source, target = found.edges[key].edge_index().tolist()
    return list(zip(source, target, strict=True))


@compiling
@given(st.integers(0, 30), st.integers(0, 2**64 - 1))
def test_every_edge_has_its_reverse_once(graph_seed: int, key: int) -> None:
    graphs = hetero_graphs(graph_seed)
    both = WRITES, REV_WRITES
    if graph_seed % 2:  # else many edges have no reverse
        source, target = graphs[WRITES].indices, np.repeat(np.arange(NUM_NODES["paper"]), np.diff(graphs[WRITES].indptr))
        graphs[REV_WRITES] = bipartite(target, source, NUM_NODES["author"])
    before = sampled(graphs, key)
    found = bidirectional(graphs, REVERSES, before)
    drawn = {each: set(pairs(before, each)) for each in graphs}
    flipped = {each: {(u, v) for v, u in drawn[REVERSES[each]]} for each in REVERSES}
    there = {each: _edges_between(graphs[each], found, each) for each in both}
    expected = {each: drawn[each] | (flipped[each] & there[each]) for each in both}
    expected |= {CITES: drawn[CITES] | flipped[CITES]}
    for each, own in expected.items():
        assert pairs(found, each) == sorted(own, key=lambda pair: (pair[1], pair[0]))
        assert found.num_edges[each] == (len(own),)
    assert pairs(found, ABOUT) == pairs(before, ABOUT)  # has no reverse
    for each, edges in found.edges.items():
        assert len(edges.indptr) == len(found.node[each[2]]) + 1
        graph, (source, _, target) = graphs[each], each
        ends = np.searchsorted(graph.indptr, edges.slot, side="right") - 1
        for u, v, (i, j) in zip(graph.indices[edges.slot], ends, pairs(found, each), strict=True):
            is_pair = (u, v) == (found.node[source][i], found.node[target][j])
            is_reverse = each == CITES and (v, u) == (found.node[source][i], found.node[target][j])
            assert is_pair or (is_reverse and (i, j) not in drawn[each])


def _edges_between(graph: Graph, found: HeteroSubgraph, key: EdgeKey) -> set[tuple[int, int]]:
    """Local pairs of a batch's nodes that are edges of a graph."""
    local = {int(u): i for i, u in enumerate(found.node[key[0]])}
    return {
        (local[int(u)], j)
        for j, v in enumerate(found.node[key[2]])
        for u in graph.indices[slice(*graph.slots(int(v)))]
        if int(u) in local
    }


def test_a_limit_is_kept() -> None:
    graphs = hetero_graphs(3)
    before = sampled(graphs, 1)
    with pytest.raises(BudgetError, match=r"in both directions need .*; take a smaller batch size"):
        bidirectional(graphs, REVERSES, before, max_bytes=before.nbytes)

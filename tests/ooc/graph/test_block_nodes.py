"""What a block says of its nodes: the graph's own answers, and an error for nodes that it has not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.graph.blocks import graph_block
from ooc.stores.errors import StoreError
from ooc.stores.graph import Graph

NODES = 40
EDGES = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=150)


@given(EDGES, st.lists(st.integers(0, NODES - 1), max_size=60))
def test_degrees_and_loops_are_those_of_the_graph(edges: list[tuple[int, int]], ids: list[int]) -> None:
    src, dst = np.array(edges, np.int64).reshape(-1, 2).T
    graph, node = Graph.from_edges(src, dst, NODES), np.array(ids, np.int64)
    block = graph_block(graph, node, 0, np.empty((2, 0), np.int64), np.zeros(1, np.int64), None)
    np.testing.assert_array_equal(block.degree, graph.degree(node))
    if len(graph.self_loops):
        np.testing.assert_array_equal(block.loops, graph.loops(node))
    else:
        assert block.loops is None


@pytest.mark.parametrize("unknown", [-1, 3, 2**40])
def test_nodes_that_the_graph_has_not_are_refused(unknown: int) -> None:
    graph = Graph.from_edges(np.array([1, 2]), np.array([0, 0]), 3)
    with pytest.raises(StoreError, match=f"node {unknown} is not in the graph: the store is damaged"):
        graph_block(graph, np.array([0, unknown]), 0, np.empty((2, 0), np.int64), np.zeros(1, np.int64), None)

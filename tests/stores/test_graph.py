"""Graph: CSC arithmetic against brute force over the edge list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.stores.errors import InputError
from ooc.stores.graph import Graph, index_dtype


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray]:
    num_nodes = draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=40))
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    return num_nodes, edges[:, 0], edges[:, 1]


@given(edge_lists())
def test_every_edge_is_in_the_slots_of_its_destination(edges: tuple[int, np.ndarray, np.ndarray]) -> None:
    num_nodes, src, dst = edges
    weight = np.arange(len(src), dtype=np.float32) + 1
    graph = Graph.from_edges(src, dst, num_nodes, weight=weight)
    ids = np.arange(num_nodes)
    for v in range(num_nodes):
        first, last = graph.slots(v)
        mine = np.flatnonzero(dst == v)  # edge ids rise: the canonical order within a destination
        assert graph.indices[first:last].tolist() == src[mine].tolist()
        assert graph.edge_ids(np.arange(first, last)).tolist() == mine.tolist()
        assert graph.columns["weight"][first:last].tolist() == weight[mine].tolist()
        assert graph.weight_sum is not None
        assert graph.weight_sum[v] == weight[mine][src[mine] != v].sum()
    assert graph.degree(ids).tolist() == [int((dst == v).sum()) for v in ids]
    assert graph.loops(ids).tolist() == [int(((dst == v) & (src == v)).sum()) for v in ids]
    assert graph.self_loops.tolist() == sorted(dst[src == dst].tolist())


def test_an_unweighted_graph_has_no_weight_sum_and_numbers_edges_by_slot() -> None:
    graph = Graph.from_arrays([0, 1, 2], [1, 0])
    assert graph.weight_sum is None
    assert graph.edge_ids(np.array([1, 0])).tolist() == [1, 0]
    assert graph.indices.dtype == np.int32
    assert graph.topology_bytes == 3 * 8 + 2 * 4


def test_in_memory_copies_every_array() -> None:
    graph = Graph.from_edges([0, 1, 1], [1, 0, 1], 2, weight=[1.0, 2.0, 3.0])
    copy = graph.in_memory()
    for one, other in zip(graph._arrays(), copy._arrays(), strict=True):
        assert np.array_equal(one, other)
        assert not np.shares_memory(one, other)


def test_offsets_beyond_two_billion_edges_stay_exact() -> None:
    edges = 2**33 + 3
    indices = np.broadcast_to(np.int32(1), (edges,))  # one number seen 2**33 times: no memory
    graph = Graph(np.array([0, 2**31 + 7, edges]), indices)
    assert graph.num_edges == edges
    assert graph.slots(1) == (2**31 + 7, edges)
    assert graph.degree(np.array([1, 0])).tolist() == [edges - 2**31 - 7, 2**31 + 7]
    assert graph.edge_ids(np.array([edges - 1])).tolist() == [edges - 1]
    assert graph.topology_bytes == 3 * 8 + 4 * edges


def test_indices_widen_where_a_node_id_needs_it() -> None:
    assert index_dtype(2**31 - 1) == np.int32
    assert index_dtype(2**31) == np.int64


@pytest.mark.parametrize(
    ("indptr", "indices", "columns"),
    [
        ([0, 2, 1], [0], {}),
        ([1, 1], [], {}),
        ([0, 1], [1], {}),
        ([0, 1], [-1], {}),
        ([0, 1], [0.5], {}),
        ([0, 1], [0], {"weight": [1.0, 2.0]}),
    ],
)
def test_arrays_that_do_not_fit_are_refused(indptr: list[int], indices: list[float], columns: dict[str, list[float]]) -> None:
    with pytest.raises(InputError):
        Graph.from_arrays(np.array(indptr), np.array(indices), columns)


def test_edges_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match=r"0\.\.1"):
        Graph.from_edges([0], [2], 2)
    with pytest.raises(InputError):
        Graph.from_edges([0, 1], [1], 2)


def test_a_node_out_of_range_is_an_index_error() -> None:
    graph = Graph.from_arrays([0, 0], [])
    for v in (-1, 1):
        with pytest.raises(IndexError, match="out of range"):
            graph.slots(v)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0, 9, width=32)), max_size=40))
def test_last_loop_weight_is_that_of_the_last_slot(edges):
    src, dst, weight = ([edge[i] for edge in edges] for i in range(3))
    graph = Graph.from_edges(src, dst, 6, weight=weight)
    last = {v: w for u, v, w in edges if u == v}  # in input order, which is the slots' order within a node
    found = graph.last_loop_weight(np.array([5, 0, 1, 2, 3, 4, 5]))
    assert (found is None) == (not last)
    if found is not None:
        assert found.dtype == np.float32
        assert found.tolist() == [last.get(v, 1.0) for v in (5, 0, 1, 2, 3, 4, 5)]
    assert Graph.from_edges([0], [0], 1).last_loop_weight(np.array([0])) is None

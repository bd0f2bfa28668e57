"""Negatives of links: keyed, uniform or by weight, and exact where that is asked for."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.sampling.links import EdgeLookup, LinkNegatives, seeds_of_links, slots_of
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import InputError, StoreError
from ooc.stores.graph import Graph
from tests.ooc.sampling.test_neighbor import random_graph

NODES = 12
compiling = settings(deadline=None)


def pairs_of(graph: Graph) -> set[tuple[int, int]]:
    return set(zip(graph.indices.tolist(), np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr)).tolist(), strict=True))


@compiling
@given(st.integers(0, 150), st.booleans())
def test_edges_are_found_by_slot_and_by_their_ends(num_edges: int, on_disk: bool) -> None:
    graph = random_graph(NODES, num_edges, seed=num_edges)
    lookup = EdgeLookup(graph, ArrayRows(graph.indices) if on_disk else None)
    src, dst = lookup.ends(np.arange(num_edges))
    assert sorted(zip(src.tolist(), dst.tolist(), strict=True)) == sorted(
        zip(graph.indices.tolist(), np.repeat(np.arange(NODES), np.diff(graph.indptr)).tolist(), strict=True)
    )
    every = np.stack(np.divmod(np.arange(NODES**2), NODES))
    expected = pairs_of(graph)
    assert lookup.contain(*every).tolist() == [(u, v) in expected for u, v in every.T.tolist()]
    first = {pair: slot for slot, pair in reversed(list(enumerate(zip(src.tolist(), dst.tolist(), strict=True))))}
    repeated = np.random.default_rng(num_edges).permutation(np.tile(every, 2).T).T
    slots = slots_of(graph.indptr, graph.indices, *repeated)
    assert slots.tolist() == [first.get((u, v), -1) for u, v in repeated.T.tolist()]


def test_a_damaged_slot_is_named() -> None:
    graph = random_graph(NODES, 30, seed=0)
    damaged = ArrayRows(np.where(np.arange(30) == 4, -1, graph.indices))
    with pytest.raises(StoreError, match="slot 4 holds no valid node id"):
        EdgeLookup(graph, damaged).ends(np.arange(30))


@compiling
@given(st.sampled_from(["binary", "triplet"]), st.sampled_from([0.5, 1, 3]), st.integers(0, 2**64 - 1), st.booleans())
def test_a_negative_depends_on_its_link_alone(mode: str, amount: float, key: int, exact: bool) -> None:
    amount = max(1, int(amount)) if mode == "triplet" else amount
    graph = random_graph(NODES, 60, seed=1)
    negatives = LinkNegatives(mode, amount, NODES, edges=EdgeLookup(graph) if exact else None)
    src = np.arange(40) % NODES
    whole = np.stack(negatives.draw(src, np.arange(40), key))
    assert whole.shape == (2, int(np.ceil(40 * amount)))
    some = np.array([7, 3, 30])
    part = np.stack(negatives.draw(src[some], some, key))
    for turn in range(int(amount)):
        assert np.array_equal(part[:, turn * 3 : turn * 3 + 3], whole[:, turn * 40 + some])
    if mode == "triplet":
        assert np.array_equal(whole[0], np.tile(src, int(amount)))
    assert not np.array_equal(whole, np.stack(negatives.draw(src, np.arange(40), key ^ 1)))


@compiling
@given(st.integers(0, 400), st.sampled_from(["binary", "triplet"]), st.booleans(), st.integers(0, 2**64 - 1))
def test_exact_negatives_are_no_edges_and_no_links(num_edges: int, mode: str, on_disk: bool, key: int) -> None:
    graph = random_graph(NODES, num_edges, seed=num_edges)
    edges, link = pairs_of(graph), (3, 5)
    lookup = EdgeLookup(graph, ArrayRows(graph.indices) if on_disk else None)
    negatives = LinkNegatives(mode, 2, NODES, edges=lookup, links=np.array([link[0] * NODES + link[1]]))
    src = np.arange(24) % NODES
    full = {u for u in range(NODES) if all((u, v) in edges or (u, v) == link or u == v for v in range(NODES))}
    if mode == "triplet" and full:
        with pytest.raises(InputError, match=r"has edges to all other nodes, so there are no exact negatives"):
            negatives.draw(src, np.arange(24), key)
        src = np.array([u for u in src if u not in full], np.int64)
    drawn = list(zip(*map(np.ndarray.tolist, negatives.draw(src, np.arange(len(src)), key)), strict=True))
    assert len(drawn) == 2 * len(src)
    assert not [(u, v) for u, v in drawn if (u, v) in edges or (u, v) == link or u == v]


def test_the_only_exact_negative_is_found_and_a_complete_graph_has_none() -> None:
    every = [(u, v) for u in range(30) for v in range(30) if u != v]
    almost = [pair for pair in every if pair != (17, 4)]
    graph = Graph.from_edges(*np.array(almost).T, 30)
    assert not EdgeLookup(graph).are_all()
    found = LinkNegatives("binary", 1, 30, edges=EdgeLookup(graph)).draw(np.zeros(3, np.int64), np.arange(3), 9)
    assert np.array_equal(np.stack(found), [[17] * 3, [4] * 3])
    graph = Graph.from_edges(*np.array([*every, every[0]]).T, 30)
    assert EdgeLookup(graph).are_all()
    with pytest.raises(InputError, match="the graph has all possible edges"):
        LinkNegatives("binary", 1, 30, edges=EdgeLookup(graph)).draw(np.zeros(3, np.int64), np.arange(3), 9)


def test_nodes_are_drawn_by_weight() -> None:
    weight = np.array([0, 1, 0, 3, 4, 0])
    negatives = LinkNegatives("binary", 1, 6, (np.cumsum(weight), None))
    src, dst = negatives.draw(np.zeros(8000, np.int64), np.arange(8000), 5)
    count, uniform = Counter(src.tolist()), Counter(dst.tolist())
    assert {*count} == {1, 3, 4}
    assert all(abs(count[node] - 1000 * weight[node]) < 200 for node in count)
    assert all(abs(uniform[node] - 8000 / 6) < 200 for node in range(6))


def test_seeds_are_the_distinct_ends_in_ascending_order() -> None:
    src, dst, negative = np.array([9, 2, 9]), np.array([4, 4, 2]), (np.array([9, 2, 9]), np.array([0, 7, 4]))
    seeds = seeds_of_links(src, dst, negative, "triplet", True)
    assert seeds.node.tolist() == [0, 2, 4, 7, 9]
    assert np.array_equal(seeds.node[seeds.links.src], src)
    assert np.array_equal(seeds.node[seeds.links.dst], dst)
    assert np.array_equal(seeds.node[seeds.links.negative_dst], [[0], [7], [4]])
    left = seeds.left_out
    assert [left.node[first:last].tolist() for first, last in zip(left.indptr, left.indptr[1:])] == [  # noqa: B905
        [], [4, 9], [2, 9], [], [2, 4],
    ]  # fmt: skip
    assert seeds_of_links(src, dst, None, None, False).left_out is None

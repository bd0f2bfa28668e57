"""Edges left out of the draws at seeds, against brute force and exact probabilities."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.blocks import Subgraph
from ooc.sampling import NeighborSampler, OnDiskFrontier
from ooc.sampling.edge_split import EdgeSplit, HeldOut
from ooc.sampling.left_out import LeftOut
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.graph import Graph
from tests.ooc.sampling.test_neighbor import FANOUTS, KEYS, assert_same, random_graph
from tests.ooc.sampling.test_ondisk_neighbor import assert_all_same, off_disk

compiling = settings(deadline=None)  # the first example may compile a kernel
SPLITS = st.sampled_from([None, EdgeSplit(0.1, 0.2, seed=1), EdgeSplit(0.5, 0.45, seed=2), EdgeSplit(0, 0)])
PAIRS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=8)
NODES = 12


def between(pairs: list[tuple[int, int]], seeds: np.ndarray) -> LeftOut:
    """What is left out for pairs of positions among the seeds, in both directions."""
    a, b = np.array(pairs, np.int64).reshape(-1, 2).T
    return LeftOut.of(np.concatenate([a, b]), seeds[np.concatenate([b, a])], len(seeds))


def without(graph: Graph, pairs: set[tuple[int, int]], split: EdgeSplit | None = None) -> np.ndarray:
    """Which slots are of no pair, in either direction; with a split, of a pair in training."""
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edges = list(zip(graph.indices.tolist(), target.tolist(), strict=True))
    free = np.array([(u, v) not in pairs and (v, u) not in pairs for u, v in edges], bool)
    trained = np.array([split is None or split.parts(np.array([v]), np.array([u]))[0] == 0 for u, v in edges], bool)
    return free & trained


def held_out(split: EdgeSplit | None) -> HeldOut | None:
    return None if split is None else split.held_out


@compiling
@given(st.integers(0, 150), FANOUTS, st.booleans(), st.booleans(), KEYS, PAIRS, SPLITS)
def test_edges_between_pairs_are_left_out_and_fanouts_filled_from_the_others(
    num_edges: int,
    fanout: list[int],
    replace: bool,
    weighted: bool,
    key: int,
    pairs: list[tuple[int, int]],
    split: EdgeSplit | None,
) -> None:
    graph = random_graph(NODES, num_edges, seed=num_edges)
    seeds = np.arange(8) + 2
    linked = {(int(seeds[a]), int(seeds[b])) for a, b in pairs}
    kept = without(graph, linked, split)
    sampler = NeighborSampler(graph, fanout, replace, "weight" if weighted else None, held_out=held_out(split))
    found = sampler.sample(seeds, key, between(pairs, seeds))
    assert kept[found.slot].all()
    assert np.array_equal(found.node[found.source], graph.indices[found.slot])
    for i in range(len(found.indptr) - 1):
        slots = found.slot[found.indptr[i] : found.indptr[i + 1]]
        first, last = graph.slots(int(found.node[i]))
        assert ((slots >= first) & (slots < last)).all()
        assert (np.diff(slots) >= 0).all()
        count = fanout[int(np.searchsorted(np.cumsum(found.num_nodes), i, side="right"))]
        other = kept[first:last] & ((graph.columns["weight"][first:last] > 0) | (not weighted) | (count < 0))
        available = int(other.sum())
        if count < 0:
            assert len(slots) == available
        elif replace:
            assert len(slots) == (count if available else 0)
        else:
            assert len(slots) == len(set(slots.tolist())) == min(count, available)
    assert sum(found.num_edges) == len(found.slot) == len(found.source) == found.indptr[-1]


@compiling
@given(st.integers(0, 150), FANOUTS, st.booleans(), st.booleans(), st.lists(st.tuples(KEYS, PAIRS), max_size=4), SPLITS)
def test_edges_on_disk_give_the_same(
    num_edges: int,
    fanout: list[int],
    replace: bool,
    weighted: bool,
    batches: list[tuple[int, list[tuple[int, int]]]],
    split: EdgeSplit | None,
) -> None:
    graph = random_graph(NODES, num_edges, seed=num_edges)
    weight, seeds = "weight" if weighted else None, np.arange(8) + 2
    keys, left = [key for key, _ in batches], [between(pairs, seeds) for _, pairs in batches]
    columns = {"edge_id": ArrayRows(graph.columns["edge_id"])}
    blind = NeighborSampler(off_disk(graph), fanout, replace, weight, held_out=held_out(split))
    frontier = OnDiskFrontier(blind, ArrayRows(graph.indices), columns)
    found = frontier.sample([seeds] * len(keys), keys, left)
    sampler = NeighborSampler(graph, fanout, replace, weight, held_out=held_out(split))
    for batch, key, each in zip(found.batches, keys, left, strict=True):
        assert isinstance(batch, Subgraph), batch
        expected = sampler.sample(seeds, key, each)
        assert_same(batch, expected)
        assert np.array_equal(batch.columns["edge_id"], graph.columns["edge_id"][batch.slot])
        if weighted:
            assert np.array_equal(batch.stands_for, expected.stands_for)


@compiling
@given(st.integers(0, 150), FANOUTS, st.booleans(), st.booleans(), KEYS)
def test_where_nothing_is_left_out_the_draws_are_the_usual_ones(
    num_edges: int, fanout: list[int], replace: bool, weighted: bool, key: int
) -> None:
    graph = random_graph(NODES, num_edges, seed=num_edges)
    sampler = NeighborSampler(graph, fanout, replace, "weight" if weighted else None)
    nothing = LeftOut.of(np.empty(0, np.int64), np.empty(0, np.int64), NODES)
    found, expected = sampler.sample(np.arange(NODES), key, nothing), sampler.sample(np.arange(NODES), key)
    assert_same(found, expected)
    assert np.array_equal(found.stands_for, expected.stands_for) or not weighted
    assert_all_same(
        OnDiskFrontier(sampler, ArrayRows(graph.indices)).sample([np.arange(NODES)], [key], [nothing]),
        sampler, [np.arange(NODES)], [key],
    )  # fmt: skip


@pytest.mark.parametrize("replace", [False, True])
def test_weighted_draws_are_those_of_a_weight_of_zero(replace: bool) -> None:
    graph = random_graph(NODES, 150, seed=1)
    seeds, pairs = np.arange(8) + 2, [(0, 1), (3, 4), (6, 6), (2, 7)]
    kept = without(graph, {(int(seeds[a]), int(seeds[b])) for a, b in pairs})
    lighter = NeighborSampler(graph, [3], replace, np.where(kept, graph.columns["weight"], 0))
    for key in range(50):
        found = NeighborSampler(graph, [3], replace, "weight").sample(seeds, key, between(pairs, seeds))
        expected = lighter.sample(seeds, key)
        assert_same(found, expected)
        np.testing.assert_array_equal(found.stands_for, expected.stands_for)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("others", "duplicates", "fanout"),
    [(9, 1, 4), (9, 3, 4), (60, 1, 2), (30, 30, 3)],
    ids=["few edges", "several of a pair", "many edges", "half of them of the pair"],
)
def test_the_others_are_drawn_uniformly(others: int, duplicates: int, fanout: int, replace: bool) -> None:
    source = np.concatenate([np.arange(2, 2 + others), np.ones(duplicates, int)])
    source = np.random.default_rng(0).permutation(source)
    graph = Graph.from_edges(source, np.zeros(len(source), int), others + 2)
    sampler, seeds, draws = NeighborSampler(graph, [fanout], replace), np.array([0, 1]), 3000
    left = between([(0, 1)], seeds)
    count: Counter[int] = Counter()
    for key in range(draws):
        found = sampler.sample(seeds, key, left)
        assert len(found.source) == fanout
        count.update(found.node[found.source].tolist())
    assert set(count) == set(range(2, 2 + others))
    share = fanout / others
    spread = np.sqrt(draws * share * (1 - (0 if replace else share))) + 1
    assert all(abs(each - draws * share) < 5 * spread for each in count.values())


def test_a_hub_draws_uniformly_among_the_edges_that_are_not_held_out() -> None:
    degree, fanout, draws = 400, 3, 2500
    graph = Graph.from_edges(np.arange(1, degree + 1), np.zeros(degree, int), degree + 1)
    split = EdgeSplit(0.2, 0.1, seed=4)
    trained = set((1 + np.flatnonzero(split.parts(np.arange(1, degree + 1), np.zeros(degree, int)) == 0)).tolist())
    sampler, count = NeighborSampler(graph, [fanout], held_out=split.held_out), Counter[int]()
    for key in range(draws):
        found = sampler.sample(np.array([0]), key)
        assert len(set(found.node[1:].tolist())) == fanout
        count.update(found.node[1:].tolist())
    assert set(count) == trained
    share = draws * fanout / len(trained)
    assert all(abs(each - share) < 5.5 * np.sqrt(share) for each in count.values())

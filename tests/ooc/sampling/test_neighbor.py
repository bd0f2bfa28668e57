"""Neighbor sampling against a plain loop, PyG's k-hop subgraph and exact probabilities."""

import itertools
import math
import random
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch_geometric.utils import k_hop_subgraph

from ooc.graph.blocks import Subgraph
from ooc.sampling import NeighborSampler, kernels, neighbor
from ooc.sampling.node_table import STAMPS, TABLE_KEPT, Table
from ooc.stores.errors import BudgetError, ConfigError, InputError, StoreError
from ooc.stores.graph import Graph
from tests.ooc.sampling_reference import reference
from tests.waiting import in_threads

compiling = settings(deadline=None)  # the first example may compile a kernel
KEYS = st.integers(0, 2**64 - 1)
FANOUTS = st.lists(st.integers(-1, 7), min_size=1, max_size=3)


def random_graph(num_nodes: int, num_edges: int, seed: int) -> Graph:
    """A graph with duplicate edges, self-loops, isolated nodes, and a hub at node 0."""
    rng = np.random.default_rng(seed)
    dst = rng.integers(0, max(1, num_nodes - 2), num_edges)
    dst[: num_edges // 3] = 0
    weight = rng.exponential(size=num_edges) * (rng.random(num_edges) < 0.8)
    return Graph.from_edges(rng.integers(0, num_nodes, num_edges), dst, num_nodes, weight=weight)


def fan_graph(num_nodes: int, degree: int, weight: list[float] | None = None) -> Graph:
    """`num_nodes` nodes of `degree` in-edges each: expanding all of them is as many independent draws."""
    columns = None if weight is None else {"weight": np.tile(np.float32(weight), num_nodes)}
    indptr = np.arange(num_nodes + 1) * degree
    return Graph.from_arrays(indptr, np.arange(num_nodes * degree) % num_nodes, columns)


def assert_same(found: Subgraph, expected: Subgraph) -> None:
    for name in ("node", "indptr", "source", "slot"):
        assert getattr(found, name).dtype == np.int64
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert (found.num_nodes, found.num_edges) == (expected.num_nodes, expected.num_edges)


@compiling
@given(st.integers(1, 40), st.integers(0, 300), FANOUTS, st.booleans(), st.booleans(), KEYS, st.data())
def test_it_gives_what_the_plain_loop_gives(
    num_nodes: int, num_edges: int, fanout: list[int], replace: bool, weighted: bool, key: int, data: st.DataObject
) -> None:
    graph = random_graph(num_nodes, num_edges, seed=num_edges)
    seeds = data.draw(st.lists(st.integers(0, num_nodes - 1), max_size=8))
    weight = graph.columns["weight"] if weighted else None
    found = NeighborSampler(graph, fanout, replace, weight).sample(np.array(seeds, np.int64), key)
    assert_same(found, reference(graph, fanout, seeds, key, replace, weight))


@compiling
@given(st.integers(1, 40), st.integers(0, 300), FANOUTS, KEYS, st.data())
def test_laws_of_a_subgraph(num_nodes: int, num_edges: int, fanout: list[int], key: int, data: st.DataObject) -> None:
    graph = random_graph(num_nodes, num_edges, seed=num_edges)
    seeds = np.array(data.draw(st.lists(st.integers(0, num_nodes - 1), unique=True, max_size=8)), np.int64)
    found = NeighborSampler(graph, fanout).sample(seeds, key)
    assert np.array_equal(found.node[: len(seeds)], seeds)
    assert len(np.unique(found.node)) == len(found.node) == sum(found.num_nodes)
    assert len(found.indptr) == 1 + sum(found.num_nodes[:-1])
    target = np.repeat(np.arange(len(found.indptr) - 1), np.diff(found.indptr))
    slot_target = np.repeat(np.arange(num_nodes), np.diff(graph.indptr))
    assert np.array_equal(graph.indices[found.slot], found.node[found.source])
    assert np.array_equal(slot_target[found.slot], found.node[target])
    assert len(np.unique(found.slot)) == len(found.slot)
    hop = np.repeat(np.arange(len(found.num_nodes)), found.num_nodes)
    limit = np.array(fanout)[hop[: len(found.indptr) - 1]] if len(target) else np.empty(0, int)
    degree = graph.degree(found.node[: len(limit)])
    assert np.array_equal(np.diff(found.indptr)[: len(limit)], np.where(limit < 0, degree, np.minimum(degree, limit)))
    # A node stands in the hop after that of the first node to draw it.
    reached = np.full(len(found.node), len(fanout) + 1)
    np.minimum.at(reached, found.source, hop[target] + 1)
    assert np.array_equal(reached[len(seeds) :], hop[len(seeds) :])


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_all_neighbors_are_pygs_k_hop_subgraph(hops: int) -> None:
    graph = random_graph(200, 500, seed=1)
    seeds = np.array([5, 17, 80])
    found = NeighborSampler(graph, [-1] * hops).sample(seeds, 0)
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edge_index = torch.from_numpy(np.stack([graph.indices.astype(np.int64), target]))
    for depth in range(hops + 1):
        nodes, *_ = k_hop_subgraph(torch.from_numpy(seeds), depth, edge_index, num_nodes=graph.num_nodes)
        assert np.array_equal(np.sort(found.node[: sum(found.num_nodes[: depth + 1])]), nodes.numpy())
    expanded = found.node[: sum(found.num_nodes[:-1])]
    assert np.array_equal(np.sort(found.slot), np.flatnonzero(np.isin(target, expanded)))


def test_duplicate_seeds_keep_their_place_and_edges_point_to_the_first() -> None:
    graph = Graph.from_edges([1, 1, 0], [0, 2, 1], num_nodes=3)
    found = NeighborSampler(graph, [-1]).sample(np.array([1, 0, 1]), 0)
    assert found.node.tolist() == [1, 0, 1]
    assert found.indptr.tolist() == [0, 1, 2, 3]
    assert found.source.tolist() == [1, 0, 1]


def test_index_width_and_memory_maps_make_no_difference(tmp_path: Path) -> None:
    graph = random_graph(300, 4000, seed=2)
    np.save(tmp_path / "indices.npy", graph.indices)
    np.save(tmp_path / "indptr.npy", graph.indptr)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("indptr", "indices")]
    variants = [Graph(*mapped), Graph(graph.indptr, graph.indices.astype(np.int64))]
    expected = NeighborSampler(graph, [5, 3]).sample(np.arange(40), 9)
    for variant in variants:
        assert_same(NeighborSampler(variant, [5, 3]).sample(np.arange(40), 9), expected)


@pytest.mark.parametrize("weight", [None, "weight"])
def test_threads_make_no_difference(weight: str | None) -> None:
    graph = random_graph(2000, 30_000, seed=3)
    sampler = NeighborSampler(graph, [6, 4, 3], weight=weight)
    batches = [np.random.default_rng(i).integers(0, 2000, 1 + 3 * i) for i in range(40)]
    expected = [sampler.sample(seeds, key) for key, seeds in enumerate(batches)]
    found: list[dict[int, Subgraph]] = [{} for _ in range(4)]
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        order = list(range(40))
        random.Random(thread).shuffle(order)
        start.wait()
        found[thread] = {key: sampler.sample(batches[key], key) for key in order}

    in_threads(4, work)
    for results in found:
        assert len(results) == 40
        for key, result in results.items():
            assert_same(result, expected[key])


@pytest.mark.parametrize("weight", [None, "weight"])
def test_the_draw_at_a_node_depends_on_key_and_node_alone(weight: str | None) -> None:
    graph = random_graph(100, 3000, seed=4)
    alone = NeighborSampler(graph, [5], weight=weight)
    batch = NeighborSampler(graph, [5, 5], weight=weight).sample(np.array([3, 50, 9]), 77)
    for i in range(len(batch.indptr) - 1):
        expected = alone.sample(batch.node[i : i + 1], 77).slot
        assert np.array_equal(batch.slot[batch.indptr[i] : batch.indptr[i + 1]], expected)
    assert not np.array_equal(alone.sample(np.array([0]), 78).slot, alone.sample(np.array([0]), 77).slot)


def drawn_sets(graph: Graph, sampler: NeighborSampler, key: int = 12) -> np.ndarray:
    """int64[n, k]: the offsets drawn at each of the graph's n nodes."""
    found = sampler.sample(np.arange(graph.num_nodes), key)
    offsets = found.slot - np.repeat(graph.indptr[:-1], np.diff(found.indptr))
    return offsets.reshape(graph.num_nodes, -1)


def chi_square(drawn: np.ndarray, probability: dict[tuple[int, ...], float]) -> float:
    """p-value of the rows of `drawn` under the exact probability of every outcome."""
    outcomes, counts = np.unique(drawn, axis=0, return_counts=True)
    seen = dict(zip(map(tuple, outcomes.tolist()), counts.tolist(), strict=True))
    assert set(seen) <= {outcome for outcome, p in probability.items() if p > 0}
    possible = [outcome for outcome, p in probability.items() if p > 0]
    expected = np.array([probability[outcome] for outcome in possible]) * len(drawn)
    assert math.isclose(expected.sum(), len(drawn))
    assert expected.min() > 5
    return float(stats.chisquare([seen.get(outcome, 0) for outcome in possible], expected).pvalue)


@pytest.mark.parametrize(("degree", "count"), [(6, 3), (11, 10), (8, 2), (9, 2), (13, 3)])
def test_every_subset_is_equally_likely(degree: int, count: int) -> None:
    graph = fan_graph(20_000, degree)
    subsets = list(itertools.combinations(range(degree), count))
    drawn = drawn_sets(graph, NeighborSampler(graph, [count]))
    assert chi_square(drawn, dict.fromkeys(subsets, 1 / len(subsets))) > 1e-4


def test_keys_are_as_good_as_nodes() -> None:
    graph = fan_graph(8, 9)
    sampler = NeighborSampler(graph, [2])
    drawn = np.concatenate([drawn_sets(graph, sampler, key)[5:6] for key in range(3000)])
    subsets = list(itertools.combinations(range(9), 2))
    assert chi_square(drawn, dict.fromkeys(subsets, 1 / len(subsets))) > 1e-4


@pytest.mark.parametrize(("degree", "count"), [(300, 60), (100, 60), (250, 10)])
def test_inclusion_of_one_and_of_two(degree: int, count: int) -> None:
    nodes = 4000
    graph = fan_graph(nodes, degree)
    drawn = drawn_sets(graph, NeighborSampler(graph, [count]))
    assert (np.diff(drawn, axis=1) > 0).all()
    chosen = np.zeros((nodes, degree))
    np.put_along_axis(chosen, drawn, 1, axis=1)
    p = count / degree
    statistic = ((chosen.sum(0) - nodes * p) ** 2).sum() * (degree - 1) / (nodes * p * (1 - p) * degree)
    assert 1e-4 < stats.chi2.sf(statistic, degree - 1) < 1 - 1e-4
    both = (chosen.T @ chosen)[np.triu_indices(degree, 1)]
    q = p * (count - 1) / (degree - 1)
    assert np.abs(both - nodes * q).max() < 6 * math.sqrt(nodes * q)


def ordered(outcomes: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """Probabilities of sequences -> of their sorted outcomes."""
    found: dict[tuple[int, ...], float] = {}
    for outcome, p in outcomes.items():
        found[tuple(sorted(outcome))] = found.get(tuple(sorted(outcome)), 0.0) + p
    return found


def successive(weight: list[float], count: int) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of `count` draws without replacement, each by weight among those left."""
    return {
        draw: math.prod(weight[i] / (sum(weight) - sum(weight[j] for j in draw[:at])) for at, i in enumerate(draw))
        for draw in itertools.permutations([i for i, w in enumerate(weight) if w > 0], count)
    }


@pytest.mark.parametrize("count", [1, 2, 3])
def test_weighted_draws_without_replacement(count: int) -> None:
    weight = [0.5, 3.0, 0.0, 1.0, 1.5, 2.0]
    graph = fan_graph(20_000, len(weight), weight)
    drawn = drawn_sets(graph, NeighborSampler(graph, [count], weight="weight"))
    assert chi_square(drawn, ordered(successive(weight, count))) > 1e-4


def test_draws_with_replacement() -> None:
    for weight in (None, [0.5, 3.0, 0.0, 1.0, 1.5]):
        graph = fan_graph(20_000, 5, weight)
        share = np.array(weight or [1.0] * 5) / sum(weight or [1.0] * 5)
        pairs = {(i, j): float(share[i] * share[j]) for i in range(5) for j in range(5)}
        sampler = NeighborSampler(graph, [2], replace=True, weight=None if weight is None else "weight")
        assert chi_square(drawn_sets(graph, sampler), ordered(pairs)) > 1e-4


def test_edges_of_weight_zero_are_drawn_only_by_taking_all() -> None:
    graph = Graph.from_edges([1, 2, 3, 1], [0, 0, 0, 1], num_nodes=4, weight=[0.0, 2.0, 0.0, 0.0])
    seeds = np.array([0, 1])
    for replace in (False, True):
        found = NeighborSampler(graph, [3], replace, "weight").sample(seeds, 1)
        assert set(found.slot.tolist()) == {1}
        assert found.indptr.tolist() == ([0, 3, 3] if replace else [0, 1, 1])
    assert NeighborSampler(graph, [-1], weight="weight").sample(seeds, 1).slot.tolist() == [0, 1, 2, 3]


def test_weights_that_cannot_be_drawn_by_are_refused() -> None:
    graph = fan_graph(4, 3, [1.0, 1.0, 1.0])
    for bad in (-1.0, math.nan, math.inf):
        weight = np.ones(12)
        weight[7] = bad
        sampler = NeighborSampler(graph, [2], weight=weight)
        sampler.sample(np.array([0, 1, 3]), 0)
        with pytest.raises(InputError, match=f"slot 7 is {bad}"):
            sampler.sample(np.array([0, 2]), 0)
    with pytest.raises(ConfigError, match=r"no edge column 'w'.*\['weight'\]"):
        NeighborSampler(graph, [2], weight="w")
    with pytest.raises(ConfigError, match=r"12 edges, not float64\[3\]"):
        NeighborSampler(graph, [2], weight=np.ones(3))


def test_offsets_beyond_32_bits() -> None:
    indptr = np.array([0, 2**33, 2**33 + 5, 2**40])
    node = np.array([2, 0, 1])
    assert kernels.count_edges(indptr, node, 0, 3, -1, False) == (2**40, 2, 2**40 - 2**33 - 5)
    assert kernels.count_edges(indptr, node, 1, 3, 2**32, False) == (2**32 + 5, 0, 2**33)
    assert kernels.count_edges(indptr, np.zeros(2**12, np.int64), 0, 2**12, 2**30, True) == (2**42, 0, 2**33)
    slot, edge_indptr = np.empty(300, np.int64), np.zeros(4, np.int64)
    kernels.draw_uniform(indptr, node, 0, 3, 100, False, np.uint64(5), slot, edge_indptr)
    assert edge_indptr.tolist() == [0, 100, 200, 205]
    assert (np.diff(slot[:100]) > 0).all()
    assert indptr[2] <= slot[0]
    assert slot[99] < indptr[3]
    assert slot[:100].max() > 2**39
    assert 2**31 < slot[100:200].max() < 2**33
    assert slot[200:205].tolist() == list(range(2**33, 2**33 + 5))


def test_a_batch_over_budget_is_refused_before_it_is_allocated() -> None:
    hub = Graph(np.array([0, 2, 2**40]), np.array([1, 1], np.int32))  # its 2**40 edges exist in indptr alone
    sampler = NeighborSampler(hub, [2, -1], max_bytes=10**9)
    message = r"hop 2 of fan-out \[2, -1\] samples 1099511627774 edges.* of 1 GB; .*node 1 with 1099511627774 in-edges"
    with pytest.raises(BudgetError, match=message):
        sampler.sample(np.array([0]), 0)
    rows = NeighborSampler(fan_graph(1000, 10), [10], max_bytes=10**6, row_bytes=10_000)
    assert rows.sample(np.array([3]), 0).num_edges == (10,)
    with pytest.raises(BudgetError, match="batch size below 64"):
        rows.sample(np.arange(64), 0)


@compiling
@given(st.integers(1, 60), FANOUTS, st.integers(0, 64), st.integers(20_000, 60_000))
def test_a_batch_within_budget_is_within_budget(batch: int, fanout: list[int], row_bytes: int, limit: int) -> None:
    graph = random_graph(400, 3000, seed=6)
    try:
        found = NeighborSampler(graph, fanout, max_bytes=limit, row_bytes=row_bytes).sample(np.arange(batch), 1)
    except BudgetError:
        return
    assert found.nbytes + row_bytes * len(found.node) <= limit


@pytest.mark.parametrize("weight", [None, "weight"])
def test_the_bound_covers_the_peak_of_sampling(monkeypatch: pytest.MonkeyPatch, weight: str | None) -> None:
    graph = random_graph(50_000, 400_000, seed=9)
    seeds = np.arange(1, 800)

    def sample(limit: int | None) -> Subgraph:
        return NeighborSampler(graph, [7, 5, 3], weight=weight, max_bytes=limit).sample(seeds, 3)

    refused, accepted = 1, 10**9
    while accepted - refused > 1:
        middle = (accepted + refused) // 2
        try:
            sample(middle)
            accepted = middle
        except BudgetError:
            refused = middle
    monkeypatch.setattr(neighbor, "scratch", Table())
    tracemalloc.start()
    found = sample(accepted)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.nbytes < peak <= accepted < 4 * peak


def test_memory_follows_the_batch_not_the_graph() -> None:
    indptr = np.arange(3_000_001)
    graph = Graph(indptr, np.roll(np.arange(3_000_000, dtype=np.int32), 1))
    sampler = NeighborSampler(graph, [2, 2])
    sampler.sample(np.arange(10), 0)
    tracemalloc.start()
    sampler.sample(np.arange(0, 3000, 7), 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
    sampler.sample(np.arange(0, 3_000_000, 2), 1)
    assert neighbor.scratch.entries.nbytes <= TABLE_KEPT


def test_a_table_is_cleared_when_its_stamps_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(200, 2000, seed=7)
    sampler = NeighborSampler(graph, [4, 4])
    expected = [sampler.sample(np.arange(key, 50), key) for key in range(6)]
    monkeypatch.setattr(neighbor.scratch, "stamp", STAMPS - 3)
    for key, result in enumerate(expected):
        assert_same(sampler.sample(np.arange(key, 50), key), result)
    assert 0 < neighbor.scratch.stamp < 6


def test_damage_and_misuse_are_named() -> None:
    with pytest.raises(StoreError, match="slot 2 holds no valid node id"):
        NeighborSampler(Graph(np.array([0, 1, 3]), np.array([0, 1, 9], np.int32)), [-1]).sample(np.array([1]), 0)
    with pytest.raises(StoreError, match="slot 3 holds no valid node id"):
        NeighborSampler(Graph(np.array([0, 1, 9]), np.array([0, 1, 0], np.int32)), [-1]).sample(np.array([1]), 0)
    with pytest.raises(StoreError, match="indptr decreases at node 1"):
        NeighborSampler(Graph(np.array([0, 5, 3]), np.zeros(5, np.int32)), [-1]).sample(np.array([1]), 0)
    graph = random_graph(10, 30, seed=8)
    with pytest.raises(InputError, match=r"seed 10 at position 1 .* nodes 0\.\.9"):
        NeighborSampler(graph, [2]).sample(np.array([3, 10]), 0)
    with pytest.raises(InputError, match="float64"):
        NeighborSampler(graph, [2]).sample(np.array([0.5]), 0)
    for fanout in ([], [-2], [2.5]):
        with pytest.raises(ConfigError, match="fan-out"):
            NeighborSampler(graph, fanout)

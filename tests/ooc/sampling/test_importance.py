"""LABOR with importance: iterations and draws against plain loops, and estimates against the full aggregates."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

import ooc
from ooc.graph.aggregation import PreAggregation
from ooc.graph.blocks import Subgraph
from ooc.models.convs import BlockSAGEConv
from ooc.runtime.keyed_random import Purpose
from ooc.runtime.keyed_random import key as key_of
from ooc.sampling import NeighborSampler
from ooc.sampling.edge_split import HeldOut, pair_number
from ooc.sampling.importance import MOST_RISE, InEdges, importance_of
from ooc.sampling.labor import Labor
from ooc.sampling.left_out import LeftOut
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.graph import Graph
from tests.conftest import MakeStore
from tests.ooc.sampling.test_neighbor import KEYS, random_graph
from tests.ooc.sampling_reference import source_numbers

compiling = settings(deadline=None)  # the first example may compile a kernel


def root(function: Callable[[float], float], most: float) -> float:
    """Where a decreasing function is 0."""
    return float(brentq(function, 1e-12, most, xtol=1e-15, rtol=1e-14))


def plain_rate(weights: list[float], fanout: int) -> float:
    """c of a destination of more in-edges than the fan-out, by a search for the root."""
    return root(lambda c: fanout - sum(min(1, c * w) for w in weights), 1 / min(weights))


def plain_variance(weights: list[float], likely: list[float]) -> float:
    return sum(w**2 / p for w, p in zip(weights, likely, strict=True))


def plain_importance(edges: list[list[tuple[int, float]]], fanout: int, iterations: int) -> dict[int, float]:
    """edges: the (source, weight) of each destination's in-edges."""
    found: dict[int, float] = {}
    variance = []
    for own in edges:
        weights = [w for _, w in own]
        likely = [1.0] * len(own)
        if len(own) > fanout:
            c = plain_rate(weights, fanout)
            likely = [min(1, c * w) for w in weights]
        variance.append(plain_variance(weights, likely))
        for (u, _), p in zip(own, likely, strict=True):
            found[u] = max(found.get(u, 0), p)
    for _ in range(iterations - 1):
        following = dict.fromkeys(found, 0.0)
        for own, most in zip(edges, variance, strict=True):
            likely = [1.0] * len(own)
            if len(own) > fanout:
                weights, before = [w for _, w in own], [found[u] for u, _ in own]
                excess = partial(_excess, weights, before, most)
                least = 1 / min(before)
                c = root(excess, least) if excess(least) < 0 else least
                likely = [min(1, c * p) for p in before]
            for (u, _), p in zip(own, likely, strict=True):
                following[u] = max(following[u], p)
        found = following
    return found


def plain_priority(own: list[tuple[int, float]], fanout: int, importance: dict[int, float], weighted: bool) -> list[float]:
    """Of a destination's in-edges."""
    if not weighted:
        return [importance[u] for u, _ in own]
    c = plain_rate([w for _, w in own], fanout) if len(own) > fanout else math.inf
    return [math.inf if c * w >= 1 - 1e-9 else min(importance[u], MOST_RISE * c * w) for u, w in own]


def _excess(weights: list[float], before: list[float], most: float, c: float) -> float:
    """By how much the variance is too large."""
    return plain_variance(weights, [min(1, c * p) for p in before]) - most


@compiling
@given(st.integers(2, 30), st.integers(0, 250), st.integers(1, 6), st.integers(1, 3), KEYS, st.booleans(), st.booleans())
def test_it_gives_what_the_plain_loop_gives(
    num_nodes: int, num_edges: int, fanout: int, iterations: int, key: int, filtered: bool, weighted: bool
) -> None:
    """Samples of one hop, of in-edges that are neither left out nor held out, nor of weight 0."""
    graph = random_graph(num_nodes, num_edges, seed=num_edges)
    weight = np.asarray(graph.columns["weight"], np.float64) if weighted else np.ones(num_edges)
    nodes, out = np.arange(0, num_nodes, 2), 0 if filtered else -1
    left_out = LeftOut.of(np.arange(len(nodes)), np.full(len(nodes), 0), len(nodes)) if filtered else None
    held_out = HeldOut(np.uint64(5), 0.3 if filtered else 0.0)
    given: dict[str, Any] = {"weight": "weight" if weighted else None, "held_out": held_out}
    found = NeighborSampler(graph, [fanout], labor=Labor(importance=iterations), **given).sample(nodes, key, left_out)
    kept = []
    for v in nodes.tolist():
        ends = [(s, int(graph.indices[s])) for s in range(*graph.slots(v)) if weight[s] > 0]
        kept.append([s for s, u in ends if u != out and not pair_number(np.uint64(5), u, v) < held_out.share])
    edges = [[(int(graph.indices[s]), float(weight[s])) for s in own] for own in kept]
    importance = plain_importance(edges, fanout, iterations)
    share = share_of(found)
    for i, (v, own) in enumerate(zip(nodes.tolist(), kept, strict=True)):
        priority = plain_priority(edges[i], fanout, importance, weighted)
        by = dict(zip(own, priority, strict=True))
        ranked = sorted((number / by[s], s) for s, number in numbers_of(graph, v, own, key).items())
        tau = ranked[fanout][0] if len(ranked) > fanout else math.inf
        expected = sorted(s for _, s in ranked[:fanout])
        at = slice(found.indptr[i], found.indptr[i + 1])
        assert found.slot[at].tolist() == expected
        factors = np.array([1 / min(1, tau * by[s]) for s in expected])
        assert np.allclose(found.stands_for[at], factors, rtol=1e-5)
        assert np.allclose(share[at], factors * weight[expected] / max((factors * weight[expected]).sum(), 1e-300), rtol=1e-4)


def numbers_of(graph: Graph, v: int, kept: list[int], key: int) -> dict[int, float]:
    """LABOR's numbers of those of a node's slots that are kept."""
    own = Graph(np.array([0, len(kept)]), graph.indices[kept], sources=graph.num_nodes)
    return dict(zip(kept, source_numbers(own, 0, [key] * 4), strict=True))


def overlapping(num_nodes: int = 60) -> Graph:
    """Destinations of 10 to 59 in-edges, from sources that are common and from rare ones. With equal degrees all sources would
    be equally important."""
    rng = np.random.default_rng(2)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(10, 60, num_nodes))])
    return Graph.from_arrays(indptr, (num_nodes * rng.random(indptr[-1]) ** 3).astype(int))


def share_of(found: Subgraph) -> np.ndarray:
    share = found.share()
    assert share is not None
    return share


@pytest.mark.cases(1)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("importance", [1, "*"])
def test_the_expected_estimate_is_the_full_aggregate(importance: Any, weighted: bool) -> None:
    """Sums exactly, of values and of weights times values; means by weight, which are ratios, but for a small bias, far below
    their deviation; those of equal values always."""
    graph, rng = overlapping(), np.random.default_rng(3)
    value, weight = (rng.normal(size=60) + 1)[graph.indices], np.ones(graph.num_edges)
    if weighted:
        weight = rng.lognormal(size=graph.num_edges)
    sampler = NeighborSampler(graph, [8], labor=Labor(importance=importance), weight=weight if weighted else None)
    sums, weighted_sums, means = [], [], []
    for draw in range(3000):
        found = sampler.sample(np.arange(60), key_of(draw, Purpose.SAMPLE))
        at = np.repeat(np.arange(60), np.diff(found.indptr))
        sums.append(np.bincount(at, found.stands_for * value[found.slot], 60))
        weighted_sums.append(np.bincount(at, found.stands_for * (weight * value)[found.slot], 60))
        means.append(np.bincount(at, share_of(found) * value[found.slot], 60))
    target = np.repeat(np.arange(60), np.diff(graph.indptr))
    assert (found.stands_for > 1.01).any()
    assert len(np.unique(found.stands_for.round(3))) > 60  # unequal
    for estimates, full in ((sums, np.bincount(target, value)), (weighted_sums, np.bincount(target, weight * value))):
        error = np.std(estimates, 0) / np.sqrt(len(estimates))
        assert (np.abs(np.mean(estimates, 0) - full) < 4.5 * error).all()
    mean = np.bincount(target, weight * value) / np.bincount(target, weight)
    assert (np.abs(np.mean(means, 0) - mean) < (0.3 if weighted else 0.15) * np.std(means, 0)).all()
    assert abs((np.mean(means, 0) - mean).mean()) < 0.03 * mean.mean()
    assert np.allclose(np.bincount(at, share_of(found)), 1)


@pytest.mark.parametrize("weighted", [False, True])
def test_sources_are_fewer_with_every_iteration(weighted: bool) -> None:
    graph = overlapping(3000)
    weight = np.random.default_rng(4).lognormal(size=graph.num_edges) if weighted else None
    counts = []
    for importance in (0, 1, 3, "*"):
        sampler = NeighborSampler(graph, [5], weight=weight, labor=Labor(importance=importance))
        counts.append(np.mean([sampler.sample(np.arange(400), key).num_nodes[1] for key in range(20)]))
    assert counts[0] > 1.02 * counts[1] > 1.02 * counts[2] > counts[3]


def test_hops_of_all_in_edges_have_means_by_weight_too() -> None:
    """Where all of a node's edges have weight 0 they share nothing."""
    graph = random_graph(20, 100, 0)
    weight = np.where(np.arange(100) < graph.indptr[2], 0.0, np.asarray(graph.columns["weight"]))
    found = NeighborSampler(graph, [-1], weight=weight, labor=Labor(importance=1)).sample(np.arange(20), 1)
    target = np.repeat(np.arange(20), np.diff(graph.indptr))
    total = np.bincount(target, weight, 20)[target]
    assert np.array_equal(found.slot, np.arange(100))
    assert np.allclose(share_of(found), weight / np.where(total > 0, total, 1))


@pytest.mark.parametrize("wrong", [-1.0, np.inf, np.nan])
@pytest.mark.parametrize("fanout", [2, -1])
def test_invalid_weights_are_refused(wrong: float, fanout: int) -> None:
    graph = overlapping()
    weight = np.ones(graph.num_edges)
    weight[7] = wrong
    with pytest.raises(InputError, match=rf"weight of slot 7 is {wrong}; sampling needs finite weights"):
        NeighborSampler(graph, [fanout], weight=weight, labor=Labor(importance=1)).sample(np.arange(5), 1)


@pytest.mark.parametrize("iterations", [1, 2, None])
def test_no_rounding_raises_an_importance(iterations: int | None) -> None:
    """The squares of the light weights vanish in the variance, which leaves nothing for them but rounding."""
    edges = InEdges(np.array([0, 10]), np.arange(10), np.arange(10), np.arange(10), np.array([1e9] + [1.0] * 9))
    assert np.allclose(importance_of(edges, 2, iterations), [1] + [1 / 9] * 9)


@pytest.mark.parametrize("importance", [1, 3, "*"])
def test_a_destination_always_takes_its_own_heavy_edges(importance: Any) -> None:
    """However many of its light ones others need: destinations of at most 8 in-edges take all of these."""
    rng = np.random.default_rng(5)
    degree = np.concatenate([np.full(40, 8), np.full(20, 50)])
    graph = Graph.from_arrays(np.concatenate([[0], np.cumsum(degree)]), rng.integers(0, 60, degree.sum()))
    weight = np.ones(graph.num_edges)
    heavy = graph.indptr[40:60, None] + np.arange(0, 50, 10)
    weight[heavy] = rng.uniform(20, 80, heavy.shape)  # the lightest of them is taken with probability 1 by weight alone
    sampler = NeighborSampler(graph, [8], weight=weight, labor=Labor(importance=importance))
    for key in range(50):
        found = sampler.sample(np.arange(60), key)
        drawn = np.isin(found.slot, heavy)
        assert drawn.sum() == heavy.size
        assert (found.stands_for[drawn] == 1).all()


def test_whole_numbers_make_an_edge_certain_but_for_rounding() -> None:
    """Of these weights 5 edges are drawn, so that the heaviest has a probability of exactly 1, and less by floating point."""
    weight = np.array([5.0, 10, 3, 6, 4, 3])
    graph = Graph.from_arrays(np.array([0, 6] + [12] * 5), np.tile(np.arange(6), 2))
    sampler = NeighborSampler(graph, [5], weight=np.tile(weight, 2), labor=Labor(importance=1))
    found = [sampler.sample(np.array([0]), key) for key in range(300)]
    likely = np.mean([np.isin(np.arange(6), each.slot) for each in found], 0)
    c = plain_rate(weight.tolist(), 5)
    assert (likely[c * weight >= 1 - 1e-9] == 1).all()
    assert (c * weight >= 1 - 1e-9).any()


def test_importance_by_weight_keeps_estimates_accurate() -> None:
    """Relative to draws by weight alone, with weights that differ much: nodes are fewer, and means hardly vary more."""
    graph, rng = overlapping(2000), np.random.default_rng(6)
    weight, value = rng.lognormal(0, 2, graph.num_edges), rng.normal(size=2000)[graph.indices] + 1
    seeds, target = np.arange(300), np.repeat(np.arange(2000), np.diff(graph.indptr))
    mean = (np.bincount(target, weight * value) / np.bincount(target, weight))[seeds]
    counts, errors = [], []
    for importance in (0, 1):
        sampler = NeighborSampler(graph, [8], weight=weight, labor=Labor(importance=importance))
        found = [sampler.sample(seeds, key_of(draw, Purpose.SAMPLE)) for draw in range(30)]
        counts.append(np.mean([each.num_nodes[1] for each in found]))
        squares = []
        for each in found:
            at, factor = np.repeat(seeds, np.diff(each.indptr)), each.stands_for * weight[each.slot]
            squares.append((np.bincount(at, factor * value[each.slot]) / np.bincount(at, factor) - mean) ** 2)
        errors.append(np.sqrt(np.mean(squares)))
    assert counts[1] < 0.95 * counts[0]
    assert errors[1] < 1.4 * errors[0]


def test_weights_near_the_largest_number_have_shares() -> None:
    """And those of another destination of the batch, which are far smaller."""
    graph = overlapping()
    weight = np.where(np.arange(graph.num_edges) % 2, 1.7e308, 0.85e308)
    for factor in (1e-300, 1e-150):
        weight[: graph.indptr[30]] *= factor
    found = NeighborSampler(graph, [8], weight=weight, labor=Labor(importance=1)).sample(np.arange(60), 1)
    target = np.repeat(np.arange(60), np.diff(found.indptr))
    counts = found.stands_for * (weight[found.slot] * np.where(found.slot < graph.indptr[30], 1e150, 1e-300))
    assert np.allclose(share_of(found), counts / np.bincount(target, counts)[target])


@pytest.mark.parametrize("dtype", ["float16", ">f8"])
def test_weights_that_kernels_do_not_know_are_refused(dtype: Any) -> None:
    graph = overlapping()
    words = f"must be one float32, float64 or whole number for each of {graph.num_edges} edges, not {np.dtype(dtype)}"
    with pytest.raises(ConfigError, match=words):
        NeighborSampler(graph, [8], weight=np.ones(graph.num_edges, dtype))


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_only_the_ratios_of_weights_matter(scale: float) -> None:
    graph, weight = overlapping(), np.exp(np.random.default_rng(4).normal(0, 4, 3000))
    found = [
        NeighborSampler(graph, [5], weight=each, labor=Labor(importance="*")).sample(np.arange(60), 1)
        for each in (weight[: graph.num_edges], scale * weight[: graph.num_edges])
    ]
    assert np.array_equal(found[0].slot, found[1].slot)
    assert np.allclose(found[0].stands_for, found[1].stands_for)


@pytest.mark.parametrize("fanout", [[-1], [0], [60]])
def test_fan_outs_that_choose_nothing(fanout: list[int]) -> None:
    graph = overlapping()
    found = NeighborSampler(graph, fanout, labor=Labor(importance="*")).sample(np.arange(60), 1)
    assert np.array_equal(np.diff(found.indptr), np.diff(graph.indptr) * (fanout[0] != 0))
    assert (found.stands_for == 1).all()


def test_the_in_edges_of_a_hop_count_for_the_memory() -> None:
    graph = random_graph(50, 40_000, seed=0)
    bounds = {}
    for importance in (0, 1):
        for most in np.geomspace(2**14, 2**22, 60):
            sampler = NeighborSampler(graph, [2], labor=Labor(importance=importance), max_bytes=int(most))
            try:
                sampler.sample(np.arange(50), 1)
            except BudgetError:
                continue
            bounds[importance] = most
            break
    assert bounds[1] > bounds[0] + 16 * 40_000


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loader_weighs_means_whether_rows_are_aggregated_first_or_not(make_store: MakeStore, weighted: bool) -> None:
    store = make_store(num_nodes=80, num_edges=2000, **({"weight": True} if weighted else {}))
    given: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 1, "sampler": ooc.Labor(importance=1)}
    given |= {"weight_attr": "weight" if weighted else None, "edge_ids": True}
    first = BlockSAGEConv(8, 4)
    with ooc.open(store) as ds:
        plain = ooc.NeighborLoader(ds, [4, 3], "train", **given)
        summed = ooc.NeighborLoader(ds, [4, 3], "train", **given, pre_aggregation=PreAggregation("mean", 4))
        for one, other in zip(plain, summed, strict=True):
            share, block = one.blocks[0].share, one.blocks[0]
            assert torch.equal(one.edge_norm, share)
            assert share.unique().numel() > 5
            counts = block.stands_for * (block.weight if weighted else 1)
            total = torch.zeros(block.num_dst).index_add_(0, one.edge_index[1], counts)
            assert torch.allclose(share, counts / total[one.edge_index[1]])
            mean = torch.zeros(block.num_dst, 8).index_add_(0, one.edge_index[1], share[:, None] * one.x[one.edge_index[0]])
            assert torch.allclose(other.x.neighbor, mean, atol=1e-6)
            assert torch.allclose(first(one.x, one.blocks[0]), first(other.x, other.blocks[0]), atol=1e-5)


def test_what_does_not_fit_is_refused(make_store: MakeStore) -> None:
    for wrong in (-1, 65, 1.5, True, "all", np.array([1, 2])):
        with pytest.raises(ConfigError, match=r"importance must be a whole number from 0 to 64, or '\*', not"):
            Labor(importance=wrong)  # type: ignore[arg-type]
    words = "importance of Labor cannot be combined with subgraph_type"
    with ooc.open(make_store()) as ds, pytest.raises(ConfigError, match=words):
        ooc.NeighborLoader(ds, [2], sampler=Labor(importance=1), subgraph_type="induced")

"""LABOR with importance: iterations and draws against plain loops, and estimates against the full aggregates."""

import itertools
import math
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
from ooc.sampling.labor import Labor
from ooc.sampling.left_out import LeftOut
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.graph import Graph
from tests.conftest import MakeStore
from tests.ooc.sampling.test_neighbor import KEYS, random_graph
from tests.ooc.sampling_reference import source_numbers

compiling = settings(deadline=None)  # the first example may compile a kernel


def plain_scale(importance: list[float], fanout: int) -> float:
    """c, by a search for the root."""
    degree = len(importance)
    if degree <= fanout:
        return 1 / min(importance)
    target = degree**2 / fanout
    return float(brentq(lambda c: sum(1 / min(1, c * p) for p in importance) - target, 1e-9, 1 / min(importance), xtol=1e-14))


def plain_importance(sources: list[list[int]], fanout: int, iterations: int) -> dict[int, float]:
    found = dict.fromkeys(itertools.chain(*sources), 1.0)
    for _ in range(iterations):
        largest = dict.fromkeys(found, 0.0)
        for own in filter(None, sources):
            c = plain_scale([found[u] for u in own], fanout)
            for u in own:
                largest[u] = max(largest[u], c)
        found = {u: value * largest[u] for u, value in found.items()}
    return found


@compiling
@given(st.integers(2, 30), st.integers(0, 250), st.integers(1, 6), st.integers(1, 3), KEYS, st.booleans())
def test_it_gives_what_the_plain_loop_gives(
    num_nodes: int, num_edges: int, fanout: int, iterations: int, key: int, filtered: bool
) -> None:
    """Samples of one hop, of in-edges that are neither left out nor held out."""
    graph = random_graph(num_nodes, num_edges, seed=num_edges)
    nodes, out = np.arange(0, num_nodes, 2), 0 if filtered else -1
    left_out = LeftOut.of(np.arange(len(nodes)), np.full(len(nodes), 0), len(nodes)) if filtered else None
    held_out = HeldOut(np.uint64(5), 0.3 if filtered else 0.0)
    sampler = NeighborSampler(graph, [fanout], labor=Labor(importance=iterations), held_out=held_out)
    found = sampler.sample(nodes, key, left_out)
    kept = []
    for v in nodes.tolist():
        slots = range(*graph.slots(v))
        ends = [(s, int(graph.indices[s])) for s in slots]
        kept.append([s for s, u in ends if u != out and not pair_number(np.uint64(5), u, v) < held_out.share])
    importance = plain_importance([[int(graph.indices[s]) for s in own] for own in kept], fanout, iterations)
    for i, (v, own) in enumerate(zip(nodes.tolist(), kept, strict=True)):
        ranked = sorted((number / importance[int(graph.indices[s])], s) for s, number in numbers_of(graph, v, own, key).items())
        tau = ranked[fanout][0] if len(ranked) > fanout else math.inf
        expected = sorted(s for _, s in ranked[:fanout])
        at = slice(found.indptr[i], found.indptr[i + 1])
        assert found.slot[at].tolist() == expected
        factors = [1 / min(1, tau * importance[int(graph.indices[s])]) for s in expected]
        assert np.allclose(found.stands_for[at], factors, rtol=1e-5)


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
@pytest.mark.parametrize("importance", [1, "*"])
def test_the_expected_estimate_is_the_full_aggregate(importance: Any) -> None:
    """Sums exactly; means, which are ratios, but for a small bias, far below their deviation; those of equal values always."""
    graph, rng = overlapping(), np.random.default_rng(3)
    value = (rng.normal(size=60) + 1)[graph.indices]
    sampler = NeighborSampler(graph, [8], labor=Labor(importance=importance))
    degree = np.diff(graph.indptr)
    sums, means = [], []
    for draw in range(3000):
        found = sampler.sample(np.arange(60), key_of(draw, Purpose.SAMPLE))
        at = np.repeat(np.arange(60), np.diff(found.indptr))
        sums.append(np.bincount(at, found.stands_for * value[found.slot], 60))
        means.append(np.bincount(at, share_of(found) * value[found.slot], 60))
    full = np.bincount(np.repeat(np.arange(60), degree), value, 60)
    assert (found.stands_for > 1.01).any()
    assert len(np.unique(found.stands_for.round(3))) > 60  # unequal
    error = np.std(sums, 0) / np.sqrt(len(sums))
    assert (np.abs(np.mean(sums, 0) - full) < 4.5 * error).all()
    assert (np.abs(np.mean(means, 0) - full / degree) < 0.15 * np.std(means, 0)).all()
    assert abs((np.mean(means, 0) - full / degree).mean()) < 0.03 * (full / degree).mean()
    assert np.allclose(np.bincount(at, share_of(found)), 1)


def test_sources_are_fewer_with_every_iteration() -> None:
    graph = overlapping(3000)
    counts = []
    for importance in (0, 1, 3, "*"):
        sampler = NeighborSampler(graph, [5], labor=Labor(importance=importance))
        counts.append(np.mean([sampler.sample(np.arange(400), key).num_nodes[1] for key in range(20)]))
    assert counts[0] > 1.02 * counts[1] > 1.02 * counts[2] > counts[3]


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


def test_a_loader_weighs_means_whether_rows_are_aggregated_first_or_not(make_store: MakeStore) -> None:
    store = make_store(num_nodes=80, num_edges=2000)
    given: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 1, "sampler": ooc.Labor(importance=1)}
    first = BlockSAGEConv(8, 4)
    with ooc.open(store) as ds:
        plain = ooc.NeighborLoader(ds, [4, 3], "train", **given)
        summed = ooc.NeighborLoader(ds, [4, 3], "train", **given, pre_aggregation=PreAggregation("mean", 4))
        for one, other in zip(plain, summed, strict=True):
            share = one.blocks[0].share
            assert torch.equal(one.edge_norm, share)
            assert share.unique().numel() > 5
            sums = torch.zeros(one.blocks[0].num_dst).index_add_(0, one.edge_index[1], share)
            assert torch.allclose(sums[one.blocks[0].indptr.diff() > 0], torch.ones(()))
            mean = torch.zeros(len(sums), 8).index_add_(0, one.edge_index[1], share[:, None] * one.x[one.edge_index[0]])
            assert torch.allclose(other.x.neighbor, mean, atol=1e-6)
            assert torch.allclose(first(one.x, one.blocks[0]), first(other.x, other.blocks[0]), atol=1e-5)


def test_what_does_not_fit_is_refused(make_store: MakeStore) -> None:
    for wrong in (-1, 65, 1.5, True, "all", np.array([1, 2])):
        with pytest.raises(ConfigError, match=r"importance must be a whole number from 0 to 64, or '\*', not"):
            Labor(importance=wrong)  # type: ignore[arg-type]
    with ooc.open(make_store(weight=True)) as ds:
        for given in ({"weight_attr": "weight"}, {"subgraph_type": "induced"}):
            with pytest.raises(ConfigError, match=r"importance of Labor cannot be combined with (weight_attr|subgraph_type)"):
                ooc.NeighborLoader(ds, [2], sampler=Labor(importance=1), **given)

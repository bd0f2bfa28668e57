"""What a weighted sample's edges stand for: unbiased sums, and the closed form with replacement."""

import numpy as np
import pytest

from ooc.order import Purpose, key
from ooc.sampling import NeighborSampler
from ooc.sampling.expansion import stands_for
from stores.graph import Graph

RUNS = 3000


@pytest.fixture
def graph():
    """Node 0 has 9 in-edges of very different weights (one of zero), node 1 has two, node 2 none."""
    weight = np.array([0.01, 5, 1, 1, 0, 0.3, 2, 0.7, 0.1, 4, 1], np.float32)
    src = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3])
    return Graph.from_edges(src, np.array([0] * 9 + [1] * 2), 10, weight=weight)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [1, 3, 7])
def test_sums_over_samples_are_unbiased(graph, fanout, replace):
    weight = graph.columns["weight"]
    value = np.random.default_rng(0).random(graph.num_edges) * weight  # a weighted sum, as GCN takes
    sampler = NeighborSampler(graph, [fanout], replace, "weight")
    sums = np.zeros((RUNS, 2))
    for run in range(RUNS):
        draw = key(1, Purpose.SAMPLE, run)
        subgraph = sampler.sample(np.array([0, 1]), draw)
        expansion = stands_for(graph.indptr, weight, subgraph, sampler.fanout, replace, draw)
        parts = expansion * value[subgraph.slot]
        target = np.repeat([0, 1], np.diff(subgraph.indptr))
        sums[run] = np.bincount(target, parts, minlength=2)
    exact = value[:9].sum(), value[9:].sum()
    error = np.maximum(sums.std(0) / np.sqrt(RUNS), 1e-6)
    assert (np.abs(sums.mean(0) - exact) < 4 * error).all()


def test_with_replacement_it_is_total_over_count_times_weight(graph):
    weight = graph.columns["weight"]
    sampler = NeighborSampler(graph, [4], True, "weight")
    subgraph = sampler.sample(np.array([0]), 3)
    expected = weight[:9].astype(float).sum() / (4 * weight[subgraph.slot].astype(float))
    assert np.allclose(stands_for(graph.indptr, weight, subgraph, (4,), True, 3), expected)


def test_whole_neighborhoods_stand_for_themselves(graph):
    weight = graph.columns["weight"]
    for fanout in ((-1, -1), (8, 9)):
        subgraph = NeighborSampler(graph, fanout, weight="weight").sample(np.array([0, 1, 2]), 5)
        assert (stands_for(graph.indptr, weight, subgraph, fanout, False, 5) == 1).all()


def test_edges_of_later_hops_are_told_by_their_own_node(graph):
    weight = graph.columns["weight"]
    sampler = NeighborSampler(graph, [2, 1], weight="weight")
    for draw in range(20):
        subgraph = sampler.sample(np.array([0]), draw)
        got = stands_for(graph.indptr, weight, subgraph, (2, 1), False, draw)
        assert (got[: subgraph.num_edges[0]] >= 1).all()
        for i in np.flatnonzero(subgraph.node[: len(subgraph.indptr) - 1] == 1):
            alone = NeighborSampler(graph, [1], weight="weight").sample(np.array([1]), draw)
            edges = slice(subgraph.indptr[i], subgraph.indptr[i + 1])
            assert np.array_equal(got[edges], stands_for(graph.indptr, weight, alone, (1,), False, draw))

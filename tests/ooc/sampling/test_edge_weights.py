"""What the edges of a weighted sample stand for: against the definitions, and unbiased sums through GCN and GIN."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from ooc.graph.blocks import Block, blocks_of
from ooc.loading.collate import block_of, edge_index_of
from ooc.models.builders import full_blocks
from ooc.models.convs import BlockGCNConv, BlockGINConv
from ooc.runtime.keyed_random import Purpose, key
from ooc.sampling import NeighborSampler, kernels
from ooc.stores.graph import Graph
from tests.ooc.sampling_reference import Stream
from tests.waiting import in_threads

COPIES = 4000
"""independent draws: copies of one node, each drawn by its own stream"""
KEYS = 3
"""of the draws, each for all copies"""


def plain(graph: Graph, node: int, slots: list[int], count: int, replace: bool, draw: int) -> list[float]:
    """What the slots drawn at `node` stand for, by the definitions."""
    first, last = graph.slots(node)
    weight = graph.columns["weight"].astype(float)
    if count < 0:
        return [1.0] * len(slots)
    if replace:
        return [weight[first:last].sum() / (count * weight[s]) for s in slots]
    stream = Stream(draw, node)
    keys = sorted(-math.log(1 - stream(s - first)) / weight[s] for s in range(first, last) if weight[s] > 0)
    return [1 / -math.expm1(-weight[s] * keys[count]) if len(keys) > count else 1.0 for s in slots]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-1, 6), min_size=1, max_size=3), st.booleans(), st.integers(0, 2**64 - 1))
def test_it_is_what_the_definitions_say(fanout: list[int], replace: bool, draw: int) -> None:
    rng = np.random.default_rng(draw)
    weight = rng.exponential(size=300) ** 3 * (rng.random(300) < 0.8)
    graph = Graph.from_edges(rng.integers(0, 40, 300), rng.integers(0, 38, 300), 40, weight=weight)
    found = NeighborSampler(graph, fanout, replace, "weight").sample(np.arange(0, 40, 7), draw)
    assert found.stands_for is not None
    assert found.stands_for.dtype == np.float32
    hop = np.repeat(np.arange(len(fanout)), found.num_nodes[:-1])
    expected: list[float] = []
    for i, v in enumerate(found.node[: len(found.indptr) - 1]):
        slots = found.slot[found.indptr[i] : found.indptr[i + 1]].tolist()
        expected += plain(graph, int(v), slots, fanout[hop[i]], replace, draw)
    assert np.allclose(found.stands_for, expected, rtol=1e-6)
    assert replace or (found.stands_for >= 1).all()


def test_uniform_draws_have_none() -> None:
    graph = Graph.from_edges([1, 2, 3], [0, 0, 0], 4, weight=[1.0, 2.0, 3.0])
    assert NeighborSampler(graph, [2]).sample(np.array([0]), 1).stands_for is None
    weighted = NeighborSampler(graph, [2], weight="weight").sample(np.array([0]), 1)
    uniform = NeighborSampler(graph, [2]).sample(np.array([0]), 1)
    assert weighted.nbytes == uniform.nbytes + 4 * 2


def test_a_fan_out_of_none_draws_nothing() -> None:
    graph = Graph.from_edges([1, 2, 3], [0, 0, 0], 4, weight=[1.0, 2.0, 3.0])
    for replace in (False, True):
        found = NeighborSampler(graph, [0, 2], replace, "weight").sample(np.array([0, 0]), 1)
        assert found.num_edges == (0, 0)
        assert found.indptr.tolist() == [0, 0, 0]
        assert found.stands_for is not None
        assert len(found.stands_for) == 0
    rank, slot, out = np.full(1, np.inf), np.full(1, -1), np.zeros(1, np.float32)
    weight = graph.columns["weight"]
    assert kernels.draw_keys(weight, kernels.stream_of(np.uint64(1), 0), 0, 3, 0, rank, slot, 0, out) == 0
    assert (rank[0], slot[0], out[0]) == (np.inf, -1, 0)


def copied_graph(weight: list[float]) -> Graph:
    """Nodes 0..9 are sources; each of COPIES nodes has in-edges from 1, 2, ... and one from itself, weighted alike."""
    degree = len(weight)
    target = np.repeat(np.arange(10, 10 + COPIES), degree)
    source = np.tile(np.arange(1, degree + 1), COPIES)
    source[degree - 1 :: degree] = np.arange(10, 10 + COPIES)
    return Graph.from_edges(source, target, 10 + COPIES, weight=np.tile(np.array(weight, np.float32), COPIES))


def sampled_block(graph: Graph, fanout: int, replace: bool, draw: int) -> tuple[Block, np.ndarray]:
    """The block of the copies as destinations, and the node ids of its rows."""
    found = NeighborSampler(graph, [fanout], replace, "weight").sample(np.arange(10, graph.num_nodes), draw)
    return block_of(graph, found, torch.from_numpy(edge_index_of(found))), found.node


def far_off(rows: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """[f]: distance of the mean of independent `rows` [n, f] from `exact` [f], in standard errors of that mean."""
    distance: np.ndarray = np.abs(rows.mean(0) - exact) / np.maximum(rows.std(0, ddof=1) / math.sqrt(len(rows)), 1e-6)
    return distance


@pytest.mark.parametrize("name", ["gcn", "gin"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [1, 3, 8])
def test_sums_are_unbiased(name: str, replace: bool, fanout: int) -> None:
    """A layer's mean over draws is its value on all in-edges; rescaled as uniform draws are, it is far from it."""
    torch.manual_seed(0)
    graph = copied_graph([0.2, 5.0, 1.0, 1.0, 0.3, 2.0, 0.7, 0.4, 3.0])
    x = torch.rand(graph.num_nodes, 4, dtype=torch.float64)
    x[10:] = x[10]
    conv = (BlockGCNConv(4, 3) if name == "gcn" else BlockGINConv(4, 3)).double().eval()
    if name == "gin":
        conv.nn = nn.Linear(4, 3).double()
    found: list[np.ndarray] = []
    uniform: list[np.ndarray] = []
    for run in range(KEYS):
        block, node = sampled_block(graph, fanout, replace, key(0, Purpose.SAMPLE, run))
        found.append(conv(x[node], block).detach().numpy())
        uniform.append(conv(x[node], block._replace(stands_for=None)).detach().numpy())
    exact = conv(x, full_block(graph))[10].detach().numpy()
    chance = 1e-4 / exact.size  # of a false alarm in a case
    bound = stats.norm.isf(chance / 2)
    assert (far_off(np.concatenate(found), exact) < bound).all()
    assert (far_off(np.concatenate(uniform), exact) > bound).any()


def full_block(graph: Graph) -> Block:
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edge_index = torch.from_numpy(np.stack([graph.indices.astype(np.int64), target]))
    return full_blocks(edge_index, graph.num_nodes, 1, torch.from_numpy(graph.columns["weight"]))[0]


@pytest.mark.parametrize("replace", [False, True])
def test_edges_of_weight_zero_are_missing_from_unweighted_sums_alone(replace: bool) -> None:
    """The mean of what stands for is 1 for each edge of positive weight, in GCN's sum as in GIN's; 0 for the others."""
    weight = np.array([0.0, 5.0, 1.0, 0.0, 0.3])
    graph = copied_graph(weight.tolist())
    found = NeighborSampler(graph, [2], replace, "weight").sample(np.arange(10, graph.num_nodes), 4)
    target = np.repeat(np.arange(COPIES), np.diff(found.indptr))
    times = np.zeros((COPIES, 5))
    np.add.at(times, (target, found.slot % 5), found.stands_for)
    assert (times[:, weight == 0] == 0).all()
    assert (far_off(times[:, weight > 0], np.ones(3)) < stats.norm.isf(1e-4 / 6)).all()


def test_threads_make_no_difference() -> None:
    rng = np.random.default_rng(3)
    weight = rng.exponential(size=20_000)
    graph = Graph.from_edges(rng.integers(0, 2000, 20_000), rng.integers(0, 2000, 20_000), 2000, weight=weight)
    samplers = [NeighborSampler(graph, [6, -1, 3], replace, "weight") for replace in (False, True)]
    jobs = [(sampler, rng.integers(0, 2000, 1 + 3 * i), i) for i in range(20) for sampler in samplers]
    expected = [sampler.sample(seeds, draw).stands_for for sampler, seeds, draw in jobs]
    found: list[dict[int, np.ndarray | None]] = [{} for _ in range(4)]

    def work(thread: int) -> None:
        order = list(range(len(jobs)))
        random.Random(thread).shuffle(order)
        found[thread] = {j: jobs[j][0].sample(*jobs[j][1:]).stands_for for j in order}

    in_threads(4, work)
    for results in found:
        assert all(np.array_equal(results[j], expected[j]) for j in range(len(jobs)))


def test_every_layers_block_holds_the_values_of_its_edges() -> None:
    rng = np.random.default_rng(5)
    graph = Graph.from_edges(rng.integers(0, 30, 200), rng.integers(0, 30, 200), 30, weight=rng.exponential(size=200))
    found = NeighborSampler(graph, [3, 2], weight="weight").sample(np.arange(4), 6)
    first = block_of(graph, found, torch.from_numpy(edge_index_of(found)))
    for block in blocks_of(first, found.num_nodes, found.num_edges):
        assert found.stands_for is not None
        assert np.array_equal(block.stands_for, found.stands_for[: block.edge_index.size(1)])

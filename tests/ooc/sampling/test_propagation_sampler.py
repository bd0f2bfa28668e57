"""The links that LightGCN's sampled propagation draws, against those of the graph."""

import re

import numpy as np
import pytest

from ooc.sampling.propagation_sampler import PropagationSampler
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import parse_bytes

NODES = 60


def graph():
    draw = np.random.default_rng(0)
    ends = np.unique(draw.integers(0, (40, 18), (300, 2)), axis=0) + np.array([0, 40])  # nodes 58 and 59 have no links
    both = np.r_[ends, ends[:, ::-1]]
    both = both[np.argsort(both[:, 0], kind="stable")]
    indptr = np.r_[0, np.cumsum(np.bincount(both[:, 0], minlength=NODES))]
    degree = np.diff(indptr)
    weight = np.where(degree > 0, 1 / np.sqrt(np.maximum(degree, 1)), 0).astype(np.float32)
    return indptr, both[:, 1].astype(np.int32), weight


@pytest.mark.parametrize("fanout", [[3, 2, 4], [-1, 2, -1], [1, 1], [5]])
def test_links_are_distinct_ones_of_the_graph_and_as_many_as_the_fan_out(fanout):
    indptr, neighbor, weight = graph()
    seeds = np.array([7, 58, 41, 0, 50])
    sampled = PropagationSampler(indptr, neighbor, weight, fanout).sample(seeds, 5)
    np.testing.assert_array_equal(sampled.node[sampled.seed], seeds)
    assert (np.diff(sampled.node) > 0).all()
    degree = np.diff(indptr)
    assert len(sampled.layers) == len(fanout)
    for links, most in zip(sampled.layers[::-1], fanout, strict=True):
        drawn = np.diff(links.indptr)
        assert most < 0 or drawn.max() <= most
        for first, stop in zip(links.indptr, links.indptr[1:], strict=False):
            assert len(set(links.neighbor[first:stop])) == stop - first
        back = [(u, v) for u in range(len(links.weight)) for v in links.back[links.back_indptr[u] : links.back_indptr[u + 1]]]
        own = [(links.neighbor[j], v) for v in range(len(drawn)) for j in range(links.indptr[v], links.indptr[v + 1])]
        assert back == sorted(own)
    if len(fanout) == 1:
        (links,) = sampled.layers
        for at, seed in enumerate(seeds):
            own = sampled.node[links.neighbor[links.indptr[at] : links.indptr[at + 1]]]
            there = neighbor[indptr[seed] : indptr[seed + 1]]
            assert set(own) <= set(there)
            assert len(own) == min(fanout[0], len(there))
            scaled = weight[seed] * degree[seed] / max(1, len(own))
            np.testing.assert_allclose(links.factor[at, 0], scaled, rtol=1e-6)
        np.testing.assert_array_equal(links.weight[:, 0], weight[sampled.node])


def test_a_sample_is_a_function_of_its_key_and_layers_draw_anew():
    indptr, neighbor, weight = graph()
    sampler = PropagationSampler(indptr, neighbor, weight, [1, 1, 1])
    seeds = np.arange(40)
    one, same, other = (sampler.sample(seeds, key) for key in (1, 1, 2))
    np.testing.assert_array_equal(one.node, same.node)
    for ours, theirs in zip(one.layers, same.layers, strict=True):
        np.testing.assert_array_equal(ours.neighbor, theirs.neighbor)
    assert any(
        len(ours.neighbor) != len(theirs.neighbor) or (ours.neighbor != theirs.neighbor).any()
        for ours, theirs in zip(one.layers, other.layers, strict=True)
    )


def test_what_is_too_large_is_refused_before_it_is_drawn():
    indptr, neighbor, weight = graph()
    sizes = {"row_bytes": 100, "table_bytes": 50}
    free = PropagationSampler(indptr, neighbor, weight, [4, 4], **sizes)
    need = free.nbytes(free.sample(np.arange(20), 3))
    with pytest.raises(BudgetError, match=r"hop 2 of fan-out 4,4 samples \d+ links, so the batch may need .* smaller `fanout`"):
        PropagationSampler(indptr, neighbor, weight, [4, 4], **sizes, max_bytes=need - 1).sample(np.arange(20), 3)
    assert PropagationSampler(indptr, neighbor, weight, [4, 4], **sizes, max_bytes=4 * need).sample(np.arange(20), 3)


@pytest.mark.parametrize("fanout", [[4, 4, 4], [2, -1, 3]])
def test_what_is_said_to_be_needed_is_enough_for_all_hops(fanout):
    indptr, neighbor, weight = graph()
    sizes = {"row_bytes": 1000, "table_bytes": 500}
    with pytest.raises(BudgetError) as refused:
        PropagationSampler(indptr, neighbor, weight, fanout, **sizes, max_bytes=1).sample(np.arange(20), 3)
    said = re.search(r"may need (.*?) of", str(refused.value))
    enough = int(1.01 * parse_bytes(said[1]))  # it is rounded
    for key in range(20):
        assert PropagationSampler(indptr, neighbor, weight, fanout, **sizes, max_bytes=enough).sample(np.arange(20), key)

"""LABOR against plain loops over its random numbers, and its laws: samples are uniform and shared; numbers change slowly."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ooc.runtime.keyed_random import Purpose, numbered
from ooc.runtime.keyed_random import key as key_of
from ooc.sampling import HeteroNeighborSampler, NeighborSampler
from ooc.sampling.edge_split import HeldOut, pair_number
from ooc.sampling.labor import KeptDraws, Labor, batch_key, place_of
from ooc.sampling.left_out import LeftOut
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.graph import Graph
from tests.ooc.hetero_graphs import NUM_NODES, hetero_graphs
from tests.ooc.sampling.test_neighbor import FANOUTS, KEYS, assert_same, random_graph
from tests.ooc.sampling_reference import by_source, reference

compiling = settings(deadline=None)  # the first example may compile a kernel


def plain_keys(labor: Labor, key: int | tuple[int, ...], number: int, hop: int) -> list[int]:
    """The keys of the quarters, as documented."""
    own = [key] * 4 if isinstance(key, int) else key
    return [numbered(numbered(each, number), 0 if labor.layer_dependency else hop) for each in own]


@compiling
@given(
    st.integers(1, 40),
    st.integers(0, 300),
    FANOUTS,
    st.booleans(),
    st.booleans(),
    st.one_of(KEYS, st.tuples(KEYS, KEYS, KEYS, KEYS)),
    st.data(),
)
def test_it_gives_what_the_plain_loop_gives(
    num_nodes: int,
    num_edges: int,
    fanout: list[int],
    weighted: bool,
    layers: bool,
    key: int | tuple[int, ...],
    data: st.DataObject,
) -> None:
    graph = random_graph(num_nodes, num_edges, seed=num_edges)
    nodes = st.lists(st.integers(0, num_nodes - 1), max_size=8)
    seeds = data.draw(nodes)
    out = data.draw(st.lists(nodes.map(set), min_size=len(seeds), max_size=len(seeds)))
    left_out = LeftOut.of(
        np.repeat(np.arange(len(seeds)), list(map(len, out))), np.array([*itertools.chain(*out)], int), len(seeds)
    )
    weight, labor = graph.columns["weight"] if weighted else None, Labor(layer_dependency=layers)
    found = NeighborSampler(graph, fanout, weight=weight, labor=labor).sample(np.array(seeds, np.int64), key, left_out)
    expected = reference(graph, fanout, seeds, 0, False, weight, lambda hop: plain_keys(labor, key, 0, hop), out)
    assert_same(found, expected)
    if weighted:
        assert found.stands_for is not None
        assert np.allclose(found.stands_for, expected.stands_for, rtol=1e-5)


@compiling
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=4),
    st.sampled_from([1, 2, 5, 10, 15, 63, 64, 65]),
    st.sampled_from([30, 3_000, 10**6]),
    st.sampled_from([np.int32, np.int64]),
    st.integers(0, 99),
)
def test_draws_at_hubs_are_those_of_the_plain_loop(
    degrees: list[int], fanout: int, num_sources: int, dtype: type[np.integer], seed: int
) -> None:
    """With few sources in common and with many, from both sides of a block's end and at the end of all edges."""
    indptr = np.concatenate([[0], np.cumsum(degrees), np.full(num_sources - len(degrees), sum(degrees))])
    indices = np.random.default_rng(seed).integers(0, num_sources, indptr[-1]).astype(dtype)
    graph, keys = Graph(indptr, indices), batch_key(seed, 0, 0, 4)
    found = NeighborSampler(graph, [fanout], labor=Labor()).sample(np.arange(len(degrees)), keys)
    for v in range(len(degrees)):
        expected, _ = by_source(graph, v, fanout, plain_keys(Labor(), keys, 0, 0), None)
        assert found.slot[found.indptr[v] : found.indptr[v + 1]].tolist() == expected


@compiling
@given(st.integers(0, 100), st.integers(0, 3), st.booleans(), KEYS)
def test_edge_types_share_the_numbers_of_their_sources(seed: int, fanout: int, layers: bool, key: int) -> None:
    graphs, labor = hetero_graphs(seed), Labor(layer_dependency=layers)
    seeds = {name: np.arange(0, count, 2) for name, count in NUM_NODES.items()}
    found = HeteroNeighborSampler(graphs, NUM_NODES, [fanout, 2], labor=labor).sample(seeds, key)
    for each, edges in found.edges.items():
        hop = np.repeat([0, 1], found.num_nodes[each[2]][:2])
        for i, node in enumerate(found.node[each[2]][: len(edges.indptr) - 1].tolist()):
            keys = plain_keys(labor, key, list(NUM_NODES).index(each[0]), int(hop[i]))
            expected, _ = by_source(graphs[each], node, (fanout, 2)[hop[i]], keys, None)
            assert edges.slot[edges.indptr[i] : edges.indptr[i + 1]].tolist() == expected


def copies(pattern: list[int], count: int) -> Graph:
    """`count` nodes whose in-edges come from sources of their own: pattern[j] is the source of the j-th."""
    own = max(pattern) + 1
    indptr = np.minimum(np.arange(count * own + 1), count) * len(pattern)
    return Graph.from_arrays(indptr, (np.array(pattern) + own * np.arange(count)[:, None]).ravel())


@pytest.mark.parametrize("pattern", [[0, 1, 2, 3, 4], [0, 0, 1, 2, 0], [0, 0, 0, 0, 1]])
def test_every_set_of_in_edges_is_equally_likely(pattern: list[int]) -> None:
    """Also where several come from one source."""
    count, chosen = 20_000, 2
    found = NeighborSampler(copies(pattern, count), [chosen], labor=Labor()).sample(np.arange(count), 7)
    sets = (found.slot.reshape(count, chosen) - len(pattern) * np.arange(count)[:, None]) @ [10, 1]
    expected = [10 * a + b for a, b in itertools.combinations(range(len(pattern)), chosen)]
    kinds, times = np.unique(sets, return_counts=True)
    assert kinds.tolist() == expected
    assert stats.chisquare(times).pvalue > 1e-4


def estimates(graph: Graph, fanout: int, value: np.ndarray, weight: str | None, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """(of means, of sums), [draws, N] each, of the in-neighbors' values at every node."""
    sampler = NeighborSampler(graph, [fanout], weight=weight, labor=Labor())
    degree, means, sums = np.diff(graph.indptr), [], []
    for draw in range(draws):
        found = sampler.sample(np.arange(graph.num_nodes), key_of(draw, Purpose.SAMPLE))
        target = np.repeat(np.arange(graph.num_nodes), np.diff(found.indptr))
        count = np.maximum(np.diff(found.indptr), 1)
        factor = (degree / count)[target] if found.stands_for is None else found.stands_for
        own = value[found.slot] * factor
        sums.append(np.bincount(target, own, graph.num_nodes))
        means.append(np.bincount(target, value[found.slot], graph.num_nodes) / count)
    return np.array(means), np.array(sums)


@pytest.mark.parametrize("weight", [None, "weight"])
def test_the_expected_estimate_is_the_full_aggregate(weight: str | None) -> None:
    """The means of uniform samples, and sums, at every node of a graph with duplicate edges and a hub."""
    graph = random_graph(50, 800, seed=3)
    x = np.random.default_rng(4).normal(size=50) + 1
    value = x[graph.indices] * (1 if weight is None else graph.columns["weight"])
    target = np.repeat(np.arange(50), np.diff(graph.indptr))
    full = np.bincount(target, value, 50)
    means, sums = estimates(graph, 4, value, weight, draws=3000)
    pairs = [(sums, full)] + [(means, full / np.maximum(np.diff(graph.indptr), 1))] * (weight is None)
    for found, expected in pairs:
        error = found.std(0) / np.sqrt(len(found))
        assert (np.abs(found.mean(0) - expected) <= 4.5 * error + 1e-6).all()
        assert (error > 0).sum() > 40


def test_destinations_share_neighbors() -> None:
    """Equal in-edges give equal samples; the expected number of sources of random ones falls."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 400, (2000, 30))
    source[1000:] = source[:1000]
    graph = Graph.from_arrays(np.arange(2001) * 30, source.ravel() % 2000)
    found, independent = (NeighborSampler(graph, [5], labor=labor).sample(np.arange(2000), 1) for labor in (Labor(), None))
    picked = (found.slot.reshape(2000, 5)) % 30
    assert np.array_equal(picked[:1000], picked[1000:])
    assert len(np.unique(graph.indices[found.slot])) < 0.75 * len(np.unique(graph.indices[independent.slot]))


@pytest.mark.parametrize("layers", [False, True])
def test_layers_share_numbers_if_they_depend(layers: bool) -> None:
    """A node has the same sample in any hop."""
    graph = random_graph(60, 3000, seed=1)
    sampler = NeighborSampler(graph, [4, 4], labor=Labor(layer_dependency=layers))
    found = sampler.sample(np.array([7]), 5)
    same = [
        np.array_equal(sampler.sample(found.node[i : i + 1], 5).slot[:4], found.slot[found.indptr[i] : found.indptr[i + 1]])
        for i in range(1, len(found.indptr) - 1)
    ]
    assert same == [layers] * (len(found.indptr) - 2)
    assert len(same) > 1


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(0, 3))
def test_a_quarter_of_the_numbers_changes_at_a_time(step: int, period: int, rank: int) -> None:
    """Every quarter's key is new every `period` steps; with 4 and more they change one after the other."""
    keys = [batch_key(1, rank, each, period) for each in range(step, step + 2 * period + 1)]
    for quarter in zip(*keys, strict=True):
        changes = [i for i, (a, b) in enumerate(itertools.pairwise(quarter)) if a != b]
        assert len(changes) == 2
        assert changes[1] - changes[0] == period
        assert len(set(quarter)) == 3
    at = [i for i, (a, b) in enumerate(itertools.pairwise(keys)) if a != b]
    gaps = {b - a for a, b in itertools.pairwise(at)}
    assert gaps <= ({period} if period < 4 else {period // 4, period // 4 + 1})


def test_numbers_of_other_quarters_stay() -> None:
    graph, sampler = random_graph(400, 20_000, seed=2), None
    sampler = NeighborSampler(graph, [3], labor=Labor())
    before, after = (sampler.sample(np.arange(400), batch_key(0, 0, step, 64)) for step in (15, 16))
    same = before.slot == after.slot if len(before.slot) == len(after.slot) else np.zeros(1)
    assert 0.3 < same.mean() < 0.95
    alike = [sampler.sample(np.arange(400), batch_key(0, 0, step, 64)).slot for step in (16, 20, 31)]
    assert np.array_equal(alike[0], alike[1])
    assert np.array_equal(alike[0], alike[2])


def test_held_out_edges_are_never_drawn() -> None:
    graph, held_out = random_graph(50, 2000, seed=5), HeldOut(np.uint64(3), 0.4)
    target = np.repeat(np.arange(50), np.diff(graph.indptr))
    out = np.array([pair_number(np.uint64(3), u, v) < 0.4 for u, v in zip(graph.indices, target, strict=True)])
    allowed = np.bincount(target, ~out, 50)
    for fanout in (-1, 4, 0):
        found = NeighborSampler(graph, [fanout], held_out=held_out, labor=Labor()).sample(np.arange(50), 9)
        assert not out[found.slot].any()
        assert np.array_equal(np.diff(found.indptr), allowed if fanout < 0 else np.minimum(allowed, fanout))


def test_invalid_arguments_and_damage_are_errors() -> None:
    for wrong in ({"batch_dependency": 0}, {"batch_dependency": 2.5}, {"batch_dependency": True}, {"layer_dependency": "yes"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Labor(**wrong)
    graph = random_graph(20, 200, seed=0)
    graph.columns["weight"][3] = np.nan
    with pytest.raises(InputError, match="weight of slot 3"):
        NeighborSampler(graph, [2], weight="weight", labor=Labor()).sample(np.arange(20), 1)
    damaged = Graph(np.array([0, 3, 3]), np.array([0, 1, 2**20]))
    with pytest.raises(StoreError, match="slot 2 "):
        NeighborSampler(damaged, [3], labor=Labor()).sample(np.array([0]), 1)
    long = Graph(np.where(np.arange(21) > 10, 10**6, graph.indptr), graph.indices)
    for importance in (0, 1):
        with pytest.raises(StoreError, match="damaged"):
            NeighborSampler(long, [2], labor=Labor(importance=importance)).sample(np.arange(5, 12), 1)


def test_the_number_of_sources_is_what_the_paper_expects() -> None:
    """By independent draws a source is taken by none of its destinations with the product of 1 - k / degree. By LABOR it is
    taken if its number is below the largest k / degree; samples of exactly k edges have some sources more."""
    rng, nodes, fanout = np.random.default_rng(1), 3000, 6
    indptr = np.concatenate([[0], np.cumsum(rng.integers(8, 80, nodes))])
    graph = Graph.from_arrays(indptr, rng.integers(0, nodes, indptr[-1]))
    seeds = np.arange(600)
    share = np.repeat(fanout / np.diff(indptr[: len(seeds) + 1]), np.diff(indptr[: len(seeds) + 1]))
    source, largest, none = graph.indices[: len(share)], np.zeros(nodes), np.ones(nodes)
    np.maximum.at(largest, source, share)
    np.multiply.at(none, source, 1 - share)
    for labor, expected in ((Labor(), largest.sum()), (None, (1 - none).sum())):
        sampler = NeighborSampler(graph, [fanout], labor=labor)
        counts = [len(np.unique(graph.indices[sampler.sample(seeds, key).slot])) for key in range(10)]
        assert expected * 0.98 < np.mean(counts) < expected * (1.02 if labor is None else 1.12)
    assert largest.sum() < 0.7 * (1 - none).sum()


@compiling
@given(st.integers(8, 40), st.booleans(), st.lists(st.sampled_from([2, 3, -1]), min_size=1, max_size=3), st.integers(0, 99))
def test_draws_that_batches_repeat_are_those_of_a_sampler_of_its_own(
    period: int, layers: bool, fanout: list[int], seed: int
) -> None:
    """One sampler for all batches, which keeps draws at hubs, and one for each; some with links left out at seeds."""
    graph, labor = random_graph(12, 900, seed=seed), Labor(layer_dependency=layers, batch_dependency=period)
    rng, sampler = np.random.default_rng(seed), NeighborSampler(graph, fanout, labor=labor)
    for step in range(0, 2 * period, 3):
        seeds, key = rng.choice(12, 3, replace=False), batch_key(seed, 0, step, period)
        out = LeftOut.of(np.array([1]), rng.integers(0, 12, 1), 3) if step % 2 else None
        expected = NeighborSampler(graph, fanout, labor=labor).sample(seeds, key, out)
        assert_same(sampler.sample(seeds, key, out), expected)


def test_batches_that_draw_alike_read_the_in_edges_of_a_hub_once() -> None:
    graph = random_graph(4, 4000, seed=1)
    indices = np.array(graph.indices)
    graph = Graph(graph.indptr, indices)
    labor, seeds = Labor(batch_dependency=64), np.array([0, 1])
    sampler = NeighborSampler(graph, [5], labor=labor)
    before, after = batch_key(0, 0, 0, 64), batch_key(0, 0, 16, 64)
    first = sampler.sample(seeds, before)
    indices[:] = indices[::-1].copy()
    assert np.array_equal(sampler.sample(seeds, before).slot, first.slot)
    assert not np.array_equal(NeighborSampler(graph, [5], labor=labor).sample(seeds, before).slot, first.slot)
    assert not np.array_equal(sampler.sample(seeds, after).slot, first.slot)


def test_consecutive_hubs_are_kept_at_places_of_their_own() -> None:
    kept = KeptDraws.empty(1024, 2)
    for first in (0, 5_000, 10**9):
        places = [place_of(kept, node, 10**5, 2) for node in range(first, first + 1024)]
        assert 0 <= min(places) <= max(places) < 1024
        assert len(set(places)) > 850  # random places would be 650
    assert place_of(kept, 1, 10, 2) == place_of(kept, 1, 2**31, 2) == -1

"""Layer-wise sampling: draws against plain loops, estimates against the full aggregates, and what a draw depends on."""

import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.runtime.keyed_random import Purpose, mix, numbered
from ooc.runtime.keyed_random import key as key_of
from ooc.sampling import NeighborSampler, layer_wise
from ooc.sampling.edge_split import HeldOut, pair_number
from ooc.sampling.layer_wise import LayerImportance, LayerWise, NodeImportance
from ooc.sampling.left_out import LeftOut
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.stores.graph import Graph
from tests.ooc.sampling.test_importance import overlapping, share_of
from tests.ooc.sampling.test_neighbor import KEYS, assert_same, random_graph

compiling = settings(deadline=None)  # the first example may compile a kernel
KINDS = get_args(LayerImportance)
HELD = np.uint64(5)
NORMS = NodeImportance("gradient", (0.2 + np.random.default_rng(8).pareto(2.0, 60)).astype(np.float32))
"""as gradients' norms are: most small, a few large"""


def plain_importance(graph: Graph, kind: str, kept: dict[int, list[int]]) -> dict[int, float]:
    """Of the sources of a hop's in-edges, by source. kept: the slots of each node that the hop expands."""
    found: dict[int, float] = {}
    if kind == "ladies":
        for own in kept.values():
            for s in own:
                u = int(graph.indices[s])
                found[u] = found.get(u, 0.0) + 1 / len(own) ** 2
        return found
    sources = {int(graph.indices[s]) for own in kept.values() for s in own}
    for v in range(graph.num_nodes):
        first, last = graph.slots(v)
        for s in range(first, last):
            u = int(graph.indices[s])
            if u in sources:
                found[u] = found.get(u, 0.0) + (1.0 if kind == "degree" else 1 / (last - first) ** 2)
    return found


def plain_sample(
    graph: Graph, budgets: list[int], seeds: list[int], how: LayerWise, key: int, out: int | None, share: float
) -> tuple[list[int], list[list[tuple[int, float]]], list[int]]:
    """(nodes in hop order, the slots drawn at each expanded node with what they stand for, new nodes of each hop)."""
    nodes, drawn, new, expanding = list(seeds), [], [len(seeds)], list(seeds)
    local = {v: i for i, v in reversed(list(enumerate(seeds)))}
    for hop, budget in enumerate(budgets):
        kept: dict[int, list[int]] = {}
        rows = []
        for v in expanding:
            own = [s for s in range(*graph.slots(v)) if not (hop == 0 and out == int(graph.indices[s]))]
            kept[v] = [s for s in own if not (share and pair_number(HELD, int(graph.indices[s]), v) < share)]
            rows.append(v)
        importance = plain_importance_of_rows(graph, how.importance, kept, rows)
        numbers = {u: uniform_of(numbered(key, hop), u) / q for u, q in importance.items()}
        ranked = sorted(numbers, key=lambda u: numbers[u])
        chosen = ranked if budget < 0 else ranked[:budget]
        tau = numbers[ranked[budget]] if 0 <= budget < len(ranked) else math.inf
        factor = {u: 1 / min(1.0, tau * importance[u]) for u in chosen}
        for v in rows:
            own = [(s, factor[int(graph.indices[s])]) for s in kept[v] if int(graph.indices[s]) in factor]
            if how.normalize and own:
                scale = len(kept[v]) / sum(f for _, f in own)
                own = [(s, f * scale) for s, f in own]
            drawn.append(own)
        expanding = []
        for own in drawn[-len(rows) :] if rows else []:
            for s, _ in own:
                u = int(graph.indices[s])
                if u not in local:
                    local[u] = len(nodes)
                    nodes.append(u)
                    expanding.append(u)
        new.append(len(expanding))
    return nodes, drawn, new


def plain_importance_of_rows(graph: Graph, kind: str, kept: dict[int, list[int]], rows: list[int]) -> dict[int, float]:
    """With a node that is a seed twice counted twice."""
    if kind != "ladies":
        return plain_importance(graph, kind, kept)
    found: dict[int, float] = {}
    for v in rows:
        for u, q in plain_importance(graph, kind, {v: kept[v]}).items():
            found[u] = found.get(u, 0.0) + q
    return found


def uniform_of(key: int, source: int) -> float:
    return float((mix(key ^ mix(source)) >> 11) * 2.0**-53)


@compiling
@given(
    st.integers(1, 30),
    st.integers(0, 250),
    st.lists(st.integers(-1, 12), min_size=1, max_size=3),
    st.sampled_from(KINDS),
    st.booleans(),
    KEYS,
    st.booleans(),
    st.data(),
)
def test_it_gives_what_the_plain_loop_gives(
    num_nodes: int,
    num_edges: int,
    budgets: list[int],
    kind: LayerImportance,
    normalize: bool,
    key: int,
    filtered: bool,
    data: st.DataObject,
) -> None:
    graph, how = random_graph(num_nodes, num_edges, seed=num_edges), LayerWise(kind, normalize)
    seeds = data.draw(st.lists(st.integers(0, num_nodes - 1), max_size=6))
    left_out = LeftOut.of(np.arange(len(seeds)), np.zeros(len(seeds), int), len(seeds)) if filtered else None
    share = 0.3 if filtered else 0.0
    sampler = NeighborSampler(graph, budgets, layer_wise=how, held_out=HeldOut(HELD, share))
    found = sampler.sample(np.array(seeds, np.int64), key, left_out)
    nodes, drawn, new = plain_sample(graph, budgets, seeds, how, key, 0 if filtered else None, share)
    assert found.node.tolist() == nodes
    assert list(found.num_nodes) == new
    assert found.stands_for is not None
    for i, own in enumerate(drawn):
        at = slice(found.indptr[i], found.indptr[i + 1])
        assert found.slot[at].tolist() == [s for s, _ in own]
        assert np.allclose(found.stands_for[at], [f for _, f in own], rtol=1e-4)
    assert np.array_equal(found.node[found.source], graph.indices[found.slot])


def sums_and_means(found: Subgraph, value: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Estimates at the nodes that the first hop expands, of the values of slots."""
    count = found.num_nodes[0]
    last = found.indptr[count]
    at = np.repeat(np.arange(count), np.diff(found.indptr[: count + 1]))
    assert found.stands_for is not None
    own = value[found.slot[:last]]
    return np.bincount(at, found.stands_for[:last] * own, count), np.bincount(at, share_of(found)[:last] * own, count)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", [*KINDS, NORMS], ids=[*KINDS, "gradient"])
@pytest.mark.parametrize("several", [False, True])
def test_the_expected_estimate_is_the_full_aggregate(kind: LayerImportance | NodeImportance, several: bool) -> None:
    """Sums and means at every destination, without normalization; with it they are biased, and vary less. several: edges
    between a pair of nodes."""
    graph = overlapping()
    if not several:
        pairs = np.unique(np.stack([np.repeat(np.arange(60), np.diff(graph.indptr)), graph.indices]), axis=1)
        graph = Graph.from_edges(pairs[1], pairs[0], 60)
    rng, seeds, degree = np.random.default_rng(3), np.arange(0, 60, 2), np.diff(graph.indptr)
    value = (rng.normal(size=60) + 1)[graph.indices]
    full = np.bincount(np.repeat(np.arange(60), degree), value, 60)[seeds]
    deviations, biases = [], []
    for normalize in (False, True):
        sampler, sums, means = NeighborSampler(graph, [15], layer_wise=LayerWise(kind, normalize)), [], []
        for draw in range(3000):
            found = sampler.sample(seeds, key_of(draw, Purpose.SAMPLE))
            for estimates, each in zip((sums, means), sums_and_means(found, value), strict=True):
                estimates.append(each)
        assert np.allclose(np.array(sums) / degree[seeds], means, atol=1e-4)
        error = np.std(sums, 0) / np.sqrt(len(sums))
        biases.append(np.abs(np.mean(sums, 0) - full) / error)
        deviations.append(np.std(means, 0).mean())
    assert (biases[0] < 4.5).all()
    assert (biases[1] > 4.5).any()
    assert deviations[1] < deviations[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_depends_on_the_key_the_hop_and_the_source_alone(kind: LayerImportance) -> None:
    """A smaller budget draws some of the sources that a larger one does."""
    graph = random_graph(50, 900, seed=1)
    sampler = NeighborSampler(graph, [10, 10], layer_wise=LayerWise(kind))
    seeds = np.arange(12)
    first = sampler.sample(seeds, 7)
    sampler.sample(np.arange(30, 40), 8)
    again = NeighborSampler(graph, [10, 10], layer_wise=LayerWise(kind)).sample(seeds, 7)
    assert_same(first, again)
    assert np.array_equal(first.stands_for, again.stands_for)
    turned = sampler.sample(seeds[::-1].copy(), 7)  # LADIES's sums of the importance may differ in the last bit
    assert {*turned.node[: sum(turned.num_nodes[:2])].tolist()} == {*first.node[: sum(first.num_nodes[:2])].tolist()}
    assert not np.array_equal(first.slot, sampler.sample(seeds, 9).slot)
    one, two = (NeighborSampler(graph, [b], layer_wise=LayerWise(kind)).sample(seeds, 7) for b in (5, 10))
    assert {*one.node.tolist()} < {*two.node.tolist()}


def test_a_hop_has_at_most_its_budget_of_new_nodes() -> None:
    graph = random_graph(400, 20_000, seed=2)
    found = NeighborSampler(graph, [30, 50], layer_wise=LayerWise()).sample(np.arange(40), 3)
    assert 20 < found.num_nodes[1] <= 30
    assert 30 < found.num_nodes[2] <= 50
    drawn = {*graph.indices[found.slot[: found.num_edges[0]]].tolist()}
    assert len(drawn) == 30


def test_sources_of_many_edges_are_drawn_more_often() -> None:
    graph, times = overlapping(), np.zeros(60)
    degree = np.bincount(graph.indices, minlength=60)
    for draw in range(300):
        found = NeighborSampler(graph, [15], layer_wise=LayerWise("degree")).sample(np.arange(60), draw)
        times[np.unique(graph.indices[found.slot])] += 1
    assert np.corrcoef(times, np.minimum(degree, 100))[0, 1] > 0.8


def test_memory_is_checked_before_it_is_allocated() -> None:
    """New nodes count up to the budget, not up to the edges that are read for them."""
    graph = overlapping(5000)
    how: dict[str, Any] = {"layer_wise": LayerWise(), "row_bytes": 4000}
    with pytest.raises(BudgetError, match="hop 1 of fan-out"):
        NeighborSampler(graph, [100], max_bytes=10**5, **how).sample(np.arange(100), 1)
    NeighborSampler(graph, [100], max_bytes=1_500_000, **how).sample(np.arange(100), 1)


def test_a_pass_over_the_edges_in_pieces_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(300, 5000, seed=4)
    for kind in ("fastgcn", "degree"):
        given_arrays = np.asarray(graph.indptr), np.asarray(graph.indices), 300
        whole = layer_wise.importance_of_nodes(kind, *given_arrays)
        monkeypatch.setattr(layer_wise, "SCANNED_BYTES", 64)
        assert np.array_equal(whole, layer_wise.importance_of_nodes(kind, *given_arrays))
        monkeypatch.undo()


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_edges_are_reported(kind: LayerImportance) -> None:
    graph = Graph(np.array([0, 2, 2]), np.array([1, 7]))
    with pytest.raises(StoreError, match=r"slot 1 holds no valid node id.*ooc verify"):
        NeighborSampler(graph, [1], layer_wise=LayerWise(kind)).sample(np.array([0]), 1)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="importance must be one of ladies, fastgcn, degree, not 'saint'"):
        LayerWise("saint")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="normalize must be True or False, not 2"):
        LayerWise(normalize=2)  # type: ignore[arg-type]

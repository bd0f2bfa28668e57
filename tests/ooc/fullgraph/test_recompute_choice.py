"""Which rows of the halo are recomputed: what a rank then needs, against sets, and what the choice costs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.fullgraph.halo.cuts import balanced_cuts
from ooc.fullgraph.halo.reach import HaloEdges, Reach, reach_of, recompute_all, recompute_first, recompute_none
from ooc.fullgraph.halo.recompute import (
    ByCost,
    HaloRows,
    LayerCost,
    RankRows,
    Way,
    WayName,
    cheapest,
    compare_ways,
    layer_costs,
    way_of,
)
from ooc.fullgraph.placement.op_costs import OpCost, Speed, StepProfile
from ooc.fullgraph.program import TensorPlacement, build
from ooc.layerwise.pass_plan import LayerShape, ModelShape
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from tests.ooc.fullgraph.test_recompute import AnyRows

NODES = 24


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """In-edges of each node."""
    sources = draw(st.lists(st.lists(st.integers(0, NODES - 1), max_size=6), min_size=NODES, max_size=NODES))
    indptr = np.concatenate([[0], np.cumsum([len(each) for each in sources])]).astype(np.int64)
    return Graph.from_arrays(indptr, np.array([node for each in sources for node in each], np.int64))


seconds = st.floats(0.01, 10)
costs_of = st.lists(st.builds(LayerCost, seconds, seconds, seconds), min_size=1, max_size=4).map(tuple)


def in_memory(graph: Graph) -> Dataset:
    return cast(Dataset, SimpleNamespace(graph=graph))


def reached(graph: Graph, rank: int, ranks: int, layers: int, mapped: bool, choose: Any) -> Reach:
    edges, (first, stop) = HaloEdges(in_memory(graph)), balanced_cuts(graph.indptr, ranks)[rank : rank + 2].tolist()
    return reach_of(edges, first, stop, edges.outside(first, stop), layers, mapped, choose)


@settings(deadline=None)
@given(graphs(), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.floats(0, 1), st.integers(0, 99))
def test_every_row_that_a_layer_reads_is_computed_or_received(
    graph: Graph, ranks: int, layers: int, mapped: bool, share: float, seed: int
) -> None:
    for rank in range(ranks):
        reach = reached(graph, rank, ranks, layers, mapped, AnyRows(share, seed))
        own, node = set(range(reach.first, reach.stop)), reach.node.tolist()
        assert node[: reach.count] == sorted(own)
        assert len(set(node)) == len(node)
        assert list(reach.recomputed) == sorted(reach.recomputed, reverse=True), "of all earlier layers too"
        computed = [set(node[: reach.count + count]) for count in (*reach.recomputed, 0)]
        for layer in range(layers):
            targets, received = computed[layer + 1], {node[at] for at in reach.received[layer].tolist()}
            sources = {int(s) for v in targets for s in graph.indices[graph.indptr[v] : graph.indptr[v + 1]]}
            if layer > 0 or mapped:
                assert received == (targets | sources) - computed[layer], "what is read, but for what is computed"
            else:
                assert not received, "features are in the store"
            assert targets | sources <= set(node)
            assert reach.received[layer].tolist() == sorted(reach.received[layer].tolist())
        assert reach.edges == sum(int(graph.indptr[v + 1] - graph.indptr[v]) for v in computed[1])
        assert set(reach.with_edges.tolist()) == computed[1] - own


def additive(rows: RankRows, costs: Sequence[LayerCost]) -> float:
    """Seconds of a rank's halo, those of rows that are sent to it included."""
    sent = sum(cost.sent * sum(received) for cost, received in zip(costs, rows.received, strict=True))
    parts = zip(costs, rows.recomputed, rows.edges, strict=True)
    return sent + sum(cost.row * count + cost.edge * edges for cost, count, edges in parts)


@settings(deadline=None)
@given(graphs(), st.integers(2, 4), costs_of)
def test_rows_are_recomputed_only_where_that_takes_less(graph: Graph, ranks: int, costs: tuple[LayerCost, ...]) -> None:
    edges, starts = HaloEdges(in_memory(graph)), balanced_cuts(graph.indptr, ranks)
    for rank in range(ranks):
        taken = [
            additive(RankRows.of(reached(graph, rank, ranks, len(costs), True, choose), edges, starts), costs)
            for choose in (ByCost(costs), recompute_none, recompute_first)
        ]
        assert taken[0] <= min(taken[1:]) * (1 + 1e-9)


def test_low_degrees_are_recomputed_and_hubs_sent() -> None:
    """Node 0 has one in-edge, node 1 has many; nodes from 2 on read both."""
    sources = [[2], list(range(2, 12)), *[[0, 1]] * 10]
    indptr = np.concatenate([[0], np.cumsum([len(each) for each in sources])]).astype(np.int64)
    graph = Graph.from_arrays(indptr, np.array([node for each in sources for node in each], np.int64))
    edges = HaloEdges(in_memory(graph))
    costs = (LayerCost(0.1, 0.0, 10.0), LayerCost(1.0, 1.0, 5.0))
    reach = reach_of(edges, 2, 12, edges.outside(2, 12), 2, True, ByCost(costs))
    assert reach.node[10:].tolist() == [0, 1]
    assert reach.recomputed == (2, 1), "the first layer's rows of both, the second's of node 0"
    assert [each.tolist() for each in reach.received] == [[], [11]]


@settings(deadline=None)
@given(graphs(), st.integers(2, 4), costs_of, st.booleans())
def test_all_rows_are_looked_at_as_far_as_they_take_no_longer_than_they_may(
    graph: Graph, ranks: int, costs: tuple[LayerCost, ...], mapped: bool
) -> None:
    layer = LayerShape(8, 8, "sum", (4, 0) if mapped else None)
    shape = ModelShape(NODES, len(graph.indices), 32, True, 8, 8 * mapped, 8, (layer,) * len(costs), 8)
    starts = balanced_cuts(graph.indptr, ranks)
    for rank in range(ranks):
        halo = HaloRows(in_memory(graph), starts, rank, shape)
        rows = halo.of("all", costs)
        assert rows is not None
        parts = zip(costs, rows.recomputed, rows.edges, strict=True)
        taken = sum(cost.row * count + cost.edge * edges for cost, count, edges in parts)
        assert halo.of("all", costs, taken * (1 + 1e-6)) is not None
        assert taken == 0 or halo.of("all", costs, taken * (1 - 1e-6)) is None


@settings(deadline=None)
@given(graphs(), st.integers(2, 4), costs_of, st.lists(seconds, min_size=4, max_size=4), st.booleans())
def test_no_way_is_chosen_that_takes_longer(
    graph: Graph, ranks: int, costs: tuple[LayerCost, ...], base: list[float], mapped: bool
) -> None:
    layer = LayerShape(8, 8, "sum", (4, 0) if mapped else None)
    shape = ModelShape(NODES, len(graph.indices), 32, True, 8, 8 * mapped, 8, (layer,) * len(costs), 8)
    assert shape.mapped is mapped
    bandwidth = 7.0
    costs = tuple(LayerCost(each.row, each.edge, each.sent, (each.sent * 5, each.sent * 2)) for each in costs)
    starts = balanced_cuts(graph.indptr, ranks)
    halos = [HaloRows(in_memory(graph), starts, rank, shape) for rank in range(ranks)]

    def rows_of(name: WayName, limit: float) -> list[RankRows] | None:
        found = [each.of(name, costs, limit - base[rank]) for rank, each in enumerate(halos)]
        whole = [rows for rows in found if rows is not None]
        return whole if len(whole) == ranks else None

    ways = compare_ways(rows_of, costs, base, bandwidth)
    best = cheapest(ways)
    by_name: dict[str, Way] = {way.name: way for way in ways}
    every = [rows for each in halos if (rows := each.of("all", costs)) is not None]
    by_name["all"] = way_of("all", every, costs, base, bandwidth)
    assert best.seconds == min(way.seconds for way in by_name.values())
    assert by_name["all"].nbytes == 0
    assert by_name["none"].recomputed == (0 if mapped else by_name["none"].recomputed)
    assert by_name["none"].nbytes >= by_name["first"].nbytes >= by_name["all"].nbytes


def test_costs_are_those_of_the_ops_that_make_rows() -> None:
    layers = (LayerShape(8, 4, "gcn", (4, 0), trains=True, norm=4), LayerShape(4, 3, "gcn", (3, 0), trains=True))
    shape = ModelShape(100, 1000, 400, True, 100, 0, 8, layers, 3)
    program = build(shape)
    one = {op.name: OpCost(1.0, 10.0 * bool(op.summed)) for op in program.ops}
    profile = StepProfile(one, {TensorPlacement.DISK: Speed(read=1e3, written=1e3)}, 0.0)
    first, second = layer_costs(shape, program, profile, bandwidth=1e3, share=0.5, on_disk=True)
    maps = sum(op.kind == "map" for op in program.ops)
    assert maps == 2
    assert first == LayerCost(0.01 * maps + 0.4 * maps, 0.0, 0.5 * 32 / 1e3, (8.0, 8.0))
    made = [op.name for op in program.ops if op.layer == 0 and op.kind in ("sum", "norm")]
    assert sorted(made) == ["back-norm0", "back0", "layer0", "norm0"]
    assert second == LayerCost(0.01 * len(made), 10.0 / 1000 * 2, 0.5 * 24 / 1e3, (6.0, 6.0))
    assert layer_costs(shape, program, profile, 1e3, 1.0, on_disk=False)[0].row == 0.01 * maps


def test_ways_are_the_named_choices() -> None:
    graph = Graph.from_arrays(np.arange(NODES + 1), np.roll(np.arange(NODES), 1))
    for choose, recomputed in ((recompute_none, (0, 0)), (recompute_first, (1, 0)), (recompute_all, (2, 1))):
        assert reached(graph, 1, 2, 2, True, choose).recomputed == recomputed

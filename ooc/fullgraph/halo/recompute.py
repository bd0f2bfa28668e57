"""Which rows of the halo are sent and which are recomputed, whichever takes less time (NeutronStar, Wang et al., SIGMOD
2022).

A row that is sent costs its bytes, and those of its gradient, at the bandwidth of a process. One that is recomputed costs the
row-wise part of the layer that makes it, its in-edges, and the rows of in-neighbors that are not here yet, which are sent or
recomputed in turn. So what counts of a node is its in-degree, and how many of its in-neighbors the rank has anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.halo.reach import (
    Choose,
    HaloCandidates,
    HaloEdges,
    Ints,
    Mask,
    Reach,
    reach_of,
    recompute_all,
    recompute_first,
    recompute_none,
)
from ooc.fullgraph.placement.op_costs import StepProfile
from ooc.fullgraph.program import Program, TensorPlacement, build
from ooc.layerwise.pass_plan import ModelShape, ValueRef
from ooc.stores.dataset import Dataset

WayName = Literal["none", "first", "by cost", "all"]
WAYS: tuple[WayName, ...] = ("none", "first", "by cost", "all")


@dataclass(frozen=True)
class LayerCost:
    """Seconds of an epoch for what a layer reads of a node of the halo.

    row, edge: to compute the row in the forward and backward pass, without sums, and for an in-edge of the node. sent: to send
    the row and its gradient. nbytes: bytes sent forward and backward.
    """

    row: float
    edge: float
    sent: float
    nbytes: tuple[float, float] = (0.0, 0.0)


def layer_costs(
    shape: ModelShape, program: Program, profile: StepProfile, bandwidth: float, share: float, on_disk: bool
) -> tuple[LayerCost, ...]:
    """The costs of what each layer reads.

    Args:
        shape: Of the graph that `program` is of and `profile` was measured on.
        program: A step; of one process, or of a rank.
        profile: Of its ops and of the disk.
        bandwidth: Bytes a second that a process sends.
        share: Of the rows that are sent in an epoch.
        on_disk: Whether features are read in every epoch.
    """
    found, shared = [], build(shape, shared=True)
    for layer in range(len(shape.layers)):
        forward, backward = shared.exchanged_bytes(layer)
        sent = share * (forward + backward) / bandwidth
        if layer == 0:
            row, edge = _map_cost(shape, program, profile, on_disk), 0.0
            sent = sent if shape.mapped else np.inf
        else:
            row, edge = _layer_cost(shape, program, profile, layer - 1)
        found.append(LayerCost(row, edge, sent, (share * forward, share * backward)))
    return tuple(found)


def _map_cost(shape: ModelShape, program: Program, profile: StepProfile, on_disk: bool) -> float:
    """Seconds of a row that follows from a node's features."""
    rows = sum(profile.op(op.name).rows_s for op in program.ops if op.kind == "map")
    disk = profile.tiers.get(TensorPlacement.DISK)
    read = shape.x_bytes / disk.read if on_disk and disk is not None else 0.0
    return rows / max(1, program.num_nodes) + read * (1 + any(op.kind == "map" and op.backward for op in program.ops))


def _layer_cost(shape: ModelShape, program: Program, profile: StepProfile, layer: int) -> tuple[float, float]:
    """Seconds of a row that a layer makes, and of an in-edge of it."""
    ops = [op for op in program.ops if op.layer == layer and op.kind in ("sum", "gather", "norm")]
    rows = sum(profile.op(op.name).rows_s for op in ops)
    if not shape.sums(layer):
        each = rows / max(1, program.num_nodes + program.num_edges)
        return each, each
    constant = any(value.constant and value.name == ValueRef("sums", layer).name for value in program.values)
    forward = 0.0 if constant else sum(profile.op(op.name).sums_s for op in ops if not op.backward)
    back = ValueRef("sums", layer, gradient=True).name
    backward = sum(profile.op(op.name).sums_s for op in program.backward if op.summed == back)
    return rows / max(1, program.num_nodes), (forward + backward) / max(1, program.num_edges)


def step_seconds(program: Program, profile: StepProfile) -> float:
    """Seconds that a step computes, all else aside."""
    costs = [profile.op(op.name) for op in program.ops]
    return sum(cost.rows_s + cost.sums_s for cost in costs)


@dataclass(frozen=True)
class ByCost:
    """Recomputes a row where that takes less time than to have it sent, by `costs` of each layer.

    A later layer's row needs all earlier ones of the node, and rows of its in-neighbors for all earlier layers: those that are
    not here are counted once for each node that needs them, so the choice never takes more time than to have all rows sent.
    """

    costs: tuple[LayerCost, ...]

    def __call__(self, rows: HaloCandidates) -> Mask:
        """See `Choose`."""
        cost, earlier = self.costs[rows.level], self.costs[: rows.level]
        if not earlier:
            return np.full(len(rows.node), cost.row < cost.sent)
        own = cost.row + cost.edge * rows.degree
        for each in earlier:  # which would else be had for less
            own = own + np.maximum(0.0, each.row + each.edge * rows.degree - each.sent)
        neighbor = min(earlier[0].row, earlier[0].sent) + sum(each.sent for each in earlier[1:])
        likely = own < cost.sent
        found: Mask = likely & (own + neighbor * rows.missing(likely) < cost.sent)
        return found


CHOICES: dict[WayName, Choose] = {"none": recompute_none, "first": recompute_first, "all": recompute_all}
"""those that need no costs"""


@dataclass(frozen=True)
class RankRows:
    """What a rank has of the halo. count: its nodes; recomputed, edges: by layer, the rows computed for it to read, and their
    in-edges; received: by layer, the rows that come from each rank."""

    count: int
    recomputed: tuple[int, ...]
    edges: tuple[int, ...]
    received: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, reach: Reach, edges: HaloEdges, starts: Ints) -> "RankRows":
        """Of the nodes that a rank computes on. starts: int64[K + 1], the ranges of nodes."""
        most = max(reach.recomputed, default=0)
        before = np.concatenate([[0], np.cumsum(edges.degree(reach.node[reach.count : reach.count + most]))])
        sums = [int(before[count]) * (layer > 0) for layer, count in enumerate(reach.recomputed)]
        ranks = len(starts) - 1
        owners = (np.searchsorted(starts, reach.node[at], side="right") - 1 for at in reach.received)
        received = tuple(tuple(np.bincount(each, minlength=ranks).tolist()) for each in owners)
        return cls(len(reach.node) - reach.count, reach.recomputed, tuple(sums), received)


@dataclass(frozen=True)
class Way:
    """A way to have the halo's rows, and what an epoch takes with it. nbytes: that all ranks send; recomputed: rows that ranks
    compute, of all layers together."""

    name: WayName
    seconds: float
    nbytes: int
    recomputed: int


def way_of(
    name: WayName, ranks: Sequence[RankRows], costs: Sequence[LayerCost], base: Sequence[float], bandwidth: float
) -> Way:
    """What an epoch takes: the slowest rank, and the bytes of the one that sends or receives most. base: seconds of each rank
    without the halo's rows."""
    slowest = 0.0
    out, come = np.zeros(len(ranks)), np.zeros(len(ranks))
    for rank, each in enumerate(ranks):
        extra = sum(c.row * rows + c.edge * edges for c, rows, edges in zip(costs, each.recomputed, each.edges, strict=True))
        slowest = max(slowest, base[rank] + extra)
        for cost, received in zip(costs, each.received, strict=True):
            rows: NDArray[np.float64] = np.asarray(received, np.float64)
            forward, backward = cost.nbytes
            come[rank] += forward * rows.sum()
            out[rank] += backward * rows.sum()
            out += forward * rows
            come += backward * rows
    busiest = float(np.maximum(out, come).max())
    recomputed = sum(sum(each.recomputed) for each in ranks)
    return Way(name, slowest + busiest / bandwidth, round(float(out.sum())), recomputed)


def cheapest(ways: Sequence[Way]) -> Way:
    """The way that takes the least time; of ways that take as much the first."""
    return min(ways, key=lambda way: way.seconds)


class _Exceeded(Exception):
    """Rows take more seconds than they may."""


class _AllWithin:
    """Recomputes all rows, as long as that takes less than so many seconds: else nothing more is read for it."""

    def __init__(self, costs: Sequence[LayerCost], seconds: float) -> None:
        self._costs, self._left = costs, seconds

    def __call__(self, rows: HaloCandidates) -> Mask:
        upto = self._costs[: rows.level + 1]  # a row is computed for this layer to read, and for all earlier ones
        per_row, per_edge = sum(cost.row for cost in upto), sum(cost.edge for cost in upto[1:])  # the first reads no edges
        self._left -= per_row * len(rows.node) + per_edge * float(rows.degree.sum())
        if self._left < 0:
            raise _Exceeded
        return recompute_all(rows)


class HaloRows:
    """What a rank has of the halo, whichever rows are recomputed. starts: int64[K + 1], the ranges of nodes."""

    def __init__(self, dataset: Dataset, starts: Ints, rank: int, shape: ModelShape) -> None:
        self._edges, self._starts = HaloEdges(dataset), starts
        self._first, self._stop = starts[rank : rank + 2].tolist()
        self._halo = self._edges.outside(self._first, self._stop)
        self._layers, self._mapped = len(shape.layers), shape.mapped

    def of(self, name: WayName, costs: tuple[LayerCost, ...], seconds: float = np.inf) -> RankRows | None:
        """See `RankRows`; None where rows that are recomputed would take more than so many seconds to compute."""
        within = _AllWithin(costs, seconds) if name == "all" else None
        choose = within or choice_of(name, costs)
        found = self._first, self._stop, self._halo, self._layers, self._mapped
        try:
            return RankRows.of(reach_of(self._edges, *found, choose), self._edges, self._starts)
        except _Exceeded:
            return None


def choice_of(name: WayName, costs: tuple[LayerCost, ...]) -> Choose:
    """Which rows are recomputed in a way."""
    return ByCost(costs) if name == "by cost" else CHOICES[name]


RowsOf = Callable[[WayName, float], list[RankRows] | None]
"""what each rank has of the halo in a way; None where it takes more than so many seconds on some rank, beside what that
computes anyway"""


def compare_ways(rows_of: RowsOf, costs: Sequence[LayerCost], base: Sequence[float], bandwidth: float) -> list[Way]:
    """What an epoch takes in each way, the last of which is left out where it takes too long to be looked at. base: seconds of
    each rank without the halo's rows."""
    ways = list[Way]()
    for name in WAYS:
        limit = cheapest(ways).seconds if name == "all" else np.inf
        found = rows_of(name, limit)
        if found is not None:
            ways.append(way_of(name, found, costs, base, bandwidth))
    return ways

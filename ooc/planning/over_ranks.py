"""PURE: what several processes take in place of one, and what they send to each other.

A rank of exact training has a part of the ops that one process was profiled with, by its nodes and edges, and exchanges rows
meanwhile with the others; ranks of other modes exchange the gradients of the parameters alone.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ooc.fullgraph.halo.part import HaloSettings
from ooc.fullgraph.halo.recompute import HaloRows, RankRows, Way, WayName, cheapest, compare_ways, layer_costs, way_of
from ooc.fullgraph.placement.op_costs import OpCost, StepProfile
from ooc.fullgraph.placement.step_plan import StepPlan, TierRoom, plan_step
from ooc.fullgraph.program import Program, build
from ooc.layerwise.pass_plan import ModelShape

POSITION_BYTES = 4
"""sent with a row of a stale halo: where it stands"""


@dataclass(frozen=True)
class Exchange:
    """How rows of the halo are exchanged, and what that takes: nbytes: an epoch, all ranks' together; seconds: of an epoch."""

    halo: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class RanksPlan:
    """What a run takes in several processes.

    nproc; bandwidth: bytes a second that one process sends. gradient_bytes: of the parameters, that each process sends in a
    step; gradient_seconds: of a step, for these. Of exact training, peak: bytes of values and aggregates of a rank, at most;
    halo: rows of all ranks' halos; exchanges: where all rows are sent in every epoch, and where less is; ways: with the halo as
    configured, which rows are recomputed instead, of which `chosen` takes the least time. Of histories, push_bytes: of the rows
    that each process sends in an optimizer step; push_memory: what those of all processes take in each.
    """

    nproc: int
    bandwidth: int
    gradient_bytes: int
    gradient_seconds: float
    peak: int = 0
    halo: int = 0
    exchanges: tuple[Exchange, ...] = ()
    ways: tuple[Way, ...] = ()
    push_bytes: int = 0
    push_memory: int = 0

    @property
    def chosen(self) -> str:
        """The name of the way that takes the least time, "" in other modes."""
        return cheapest(self.ways).name if self.ways else ""

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "chosen": self.chosen}


def gradients_over_ranks(parameter_bytes: int, nproc: int, bandwidth: int) -> RanksPlan:
    """What data parallelism sends: in a step each process gets the sum of all gradients by a ring.

    >>> gradients_over_ranks(8_000_000, nproc=4, bandwidth=10**9).gradient_bytes
    12000000
    """
    sent = 2 * (nproc - 1) * parameter_bytes // nproc
    return RanksPlan(nproc, bandwidth, sent, sent / bandwidth)


def plan_over_ranks(
    shape: ModelShape,
    single: Program,
    profile: StepProfile,
    room: TierRoom,
    halos: Sequence[HaloRows],
    sizes: Sequence[tuple[int, int]],
    alone: RanksPlan,
    options: Sequence[HaloSettings],
    asked: HaloSettings,
    on_disk: bool,
) -> RanksPlan:
    """What exact training takes.

    Args:
        shape: The model on the whole graph, of which `single` is the program and `profile` the costs.
        room: Of each process.
        halos: Of each rank.
        sizes: (nodes, edges) of each rank.
        alone: The gradients, as of `gradients_over_ranks`.
        options: How rows may be exchanged.
        asked: How they are, for the ways to recompute some.
        on_disk: Whether features are read in every epoch.

    Raises:
        BudgetError: If a rank's part does not fit its memory.
    """
    free = layer_costs(shape, single, profile, alone.bandwidth, 1.0, on_disk)
    sent = [rows for each in halos if (rows := each.of("none", free)) is not None]
    plans = [_plan_of(shape, single, profile, room, *each) for each in zip(sizes, (rows.count for rows in sent), strict=True)]
    base = [plan.seconds + alone.gradient_seconds for plan in plans]
    exchanges = []
    for option in options:
        costs = layer_costs(shape, single, profile, alone.bandwidth, share_sent(option, shape), on_disk)
        way = way_of("none", sent, costs, base, alone.bandwidth)
        exchanges.append(Exchange(text_of(option), way.nbytes, way.seconds))
    costs = layer_costs(shape, single, profile, alone.bandwidth, share_sent(asked, shape), on_disk)

    def rows_of(name: WayName, limit: float) -> list[RankRows] | None:
        return [rows for each in halos if (rows := each.of(name, costs)) is not None]

    ways = compare_ways(rows_of, costs, base, alone.bandwidth)
    peak, count = max(plan.peak[0] for plan in plans), sum(rows.count for rows in sent)
    return replace(alone, peak=peak, halo=count, exchanges=tuple(exchanges), ways=tuple(ways))


def share_sent(option: HaloSettings, shape: ModelShape) -> float:
    """Of the bytes of the halo's rows, the share that an epoch sends, with what goes along; of stale ones without those that
    drift."""
    if option.kind != "stale":
        return option.rate if option.kind == "sampled" else 1.0
    program = build(shape, shared=True)
    nbytes = sum(sum(program.exchanged_bytes(layer)) for layer in range(len(shape.layers)))
    return (1 + POSITION_BYTES * len(program.exchanged) / max(1, nbytes)) / option.every


def text_of(option: HaloSettings) -> str:
    """The setting, for people."""
    return {"exact": "exact", "sampled": f"sampled, {option.rate:g}", "stale": f"stale, every {option.every}"}[option.kind]


def _plan_of(
    shape: ModelShape, single: Program, profile: StepProfile, room: TierRoom, size: tuple[int, int], halo: int
) -> StepPlan:
    """The plan of one rank's part."""
    nodes, edges = size
    part = replace(shape, num_nodes=nodes, num_edges=edges, halo=halo)
    program = build(part, shared=True)
    rows, sums = nodes / max(1, shape.num_nodes), edges / max(1, shape.num_edges)
    summed = {op.summed: profile.op(op.name) for op in single.backward if op.summed}
    costs = {}
    for op in program.ops:
        cost = profile.op(op.name)
        if op.kind == "add":  # of its own here: in one process it is part of the op that needs the sums
            cost = OpCost(0.0, summed[op.summed].sums_s, summed[op.summed].pass_s)
        costs[op.name] = replace(cost, rows_s=cost.rows_s * rows, sums_s=cost.sums_s * sums, pass_s=cost.pass_s * rows)
    kept = {name: int(nbytes * rows) for name, nbytes in profile.nbytes.items()}
    return plan_step(program, replace(profile, ops=costs, nbytes=kept), room)

"""PURE: what several processes take in place of one, and what they send to each other.

A rank of exact training has a part of the ops that one process was profiled with, by its nodes and edges, and exchanges rows
meanwhile with the others; ranks of other modes exchange the gradients of the parameters alone.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.halo.part import HaloSettings
from ooc.fullgraph.placement.costs import OpCost, StepProfile
from ooc.fullgraph.placement.step_plan import StepPlan, TierRoom, plan_step
from ooc.fullgraph.program import Program, build
from ooc.layerwise.pass_plan import ModelShape

Ints = NDArray[np.int64]
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
    halo: rows of all ranks' halos; exchanges: for all rows in every epoch, and for less.
    """

    nproc: int
    bandwidth: int
    gradient_bytes: int
    gradient_seconds: float
    peak: int = 0
    halo: int = 0
    exchanges: tuple[Exchange, ...] = ()

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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
    counts: Ints,
    sizes: Sequence[tuple[int, int]],
    alone: RanksPlan,
    options: Sequence[HaloSettings],
) -> RanksPlan:
    """What exact training takes.

    Args:
        shape: The model on the whole graph, of which `single` is the program and `profile` the costs.
        room: Of each process.
        counts: int64[K, K], rows of a rank's halo (first index) that another one computes.
        sizes: (nodes, edges) of each rank.
        alone: The gradients, as of `gradients_over_ranks`.
        options: How rows may be exchanged.

    Raises:
        BudgetError: If a rank's part does not fit its memory.
    """
    plans = [_plan_of(shape, single, profile, room, size, int(counts[rank].sum())) for rank, size in enumerate(sizes)]
    program = build(shape, shared=True)
    forth, back = program.exchanged_bytes
    taken, given = counts.sum(1), counts.sum(0)
    busiest = int(np.maximum(taken * forth + given * back, given * forth + taken * back).max())
    compute = max(plan.seconds for plan in plans) + alone.gradient_seconds
    exchanges = []
    for option in options:
        share = share_sent(option)
        extra = 1 + (POSITION_BYTES * len(program.exchanged) / max(1, forth + back) if option.kind == "stale" else 0)
        nbytes = int(share * extra * int(taken.sum()) * (forth + back))
        exchanges.append(Exchange(text_of(option), nbytes, compute + share * extra * busiest / alone.bandwidth))
    return replace(alone, peak=max(plan.peak[0] for plan in plans), halo=int(taken.sum()), exchanges=tuple(exchanges))


def share_sent(option: HaloSettings) -> float:
    """Of the halo's rows, the share that an epoch sends; of stale ones without those that drift."""
    return {"exact": 1.0, "sampled": option.rate, "stale": 1 / option.every}[option.kind]


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

"""PURE: program + profile + room by tier -> where every intermediate of an exact step goes, and what a step then takes.

`plan_step` finds the placements that take the least time (`ooc.fullgraph.placement.search`) and `predict` says what any
placements take, run by run (`ooc.fullgraph.placement.costs`). The placements are FlexGNN's four, chosen by dynamic
programming as in Checkmate's and Capuchin's line of work, but over nested lifetimes, where it is exact and fast. A fifth, what
autograd keeps in RAM in fewer bits (as in GACT), is compared with them where it is allowed, as it changes gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ooc.fullgraph.placement.costs import Ranges, RunLoad, StepCosts
from ooc.fullgraph.placement.op_costs import MOVED, TIERS, Bytes, StepProfile
from ooc.fullgraph.placement.op_runs import OpRun
from ooc.fullgraph.placement.search import search
from ooc.fullgraph.program import Placement, Program, TensorPlacement
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_bytes

STATIC = {
    "all on the GPU": (TensorPlacement.DEVICE, TensorPlacement.RETAINED),
    "all retained": (TensorPlacement.RETAINED,),
    "all on disk": (TensorPlacement.DISK, TensorPlacement.RETAINED),
    "all recomputed": (
        TensorPlacement.RECOMPUTED,
        TensorPlacement.INVERTED,
        TensorPlacement.DISK,
        TensorPlacement.RETAINED,
    ),
    "all compressed": (TensorPlacement.COMPRESSED, TensorPlacement.RETAINED),
    "all inverted": (TensorPlacement.INVERTED, TensorPlacement.RETAINED),
}
"""Plans that treat all values alike: the first of these placements that a value may have; what autograd keeps of layers whose
rows are INVERTED is RECOMPUTED. Of plans as fast the first is taken"""
TIER_NAMES = {TensorPlacement.RETAINED: "memory", TensorPlacement.DEVICE: "GPU memory", TensorPlacement.DISK: "disk"}
_TRIES, _ALIKE = 4, 1.02
"""of `settled`: plans made, and by how much a value may be larger than it was planned with"""
_CLOSE = 0.01
"""of what is there: how precise the bytes of a fix are"""


@dataclass(frozen=True)
class TierRoom:
    """Bytes that values and sums may take, by tier, beside what computing takes anyway. device: of a GPU, 0 where the CPU
    computes."""

    memory: int
    device: int
    disk: int

    @property
    def bytes(self) -> Bytes:
        """As of `TIERS`."""
        return self.memory, self.device, self.disk


@dataclass(frozen=True)
class PlannedRun:
    """A run as predicted. again: in the backward pass, an op of the forward pass once more; backward: whether the op is one of
    the backward pass. start, stop: seconds; parts: seconds of computing, of the bus to a GPU and of the disk, which go on at
    once; passes: scans over what is added; memory: bytes by tier (`TIERS`), the sums' included; read, written: bytes by tier
    of `MOVED`."""

    op: str
    again: bool
    backward: bool
    start: float
    stop: float
    parts: tuple[float, float, float]
    passes: int
    memory: Bytes
    read: tuple[int, int]
    written: tuple[int, int]

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.op} again" if self.again else self.op


@dataclass(frozen=True)
class StepPlan:
    """Where everything goes, and what a step, an epoch, is to take; frozen, printed by `ooc plan`, JSON by `asdict`.

    placement: also has the bytes of a range of the ops that gather. sizes: bytes by value. static: seconds of the plans that
    treat all values alike, None where one does not fit. exact: whether no placement is faster by these costs; else there were
    too many to compare.
    """

    placement: Placement
    room: TierRoom
    runs: tuple[PlannedRun, ...]
    sizes: dict[str, int]
    static: dict[str, float | None]
    exact: bool = True

    def __str__(self) -> str:
        """The prediction in one line."""
        memory, device, _ = map(format_bytes, self.peak)
        there = f", and {device} on the GPU" if self.peak[1] else ""
        return f"{self.seconds:.3g} s an epoch, {memory} of values and aggregates in memory at most{there}"

    @property
    def seconds(self) -> float:
        """Of an epoch, but for the first, which makes what is constant."""
        return self.runs[-1].stop if self.runs else 0.0

    @property
    def peak(self) -> Bytes:
        """The most bytes by tier."""
        memory, device, disk = (max((run.memory[tier] for run in self.runs), default=0) for tier in range(len(TIERS)))
        return memory, device, disk

    def moved(self, tier: TensorPlacement) -> tuple[int, int]:
        """(bytes read, bytes written) of an epoch: from and to RAM by a GPU, or the disk."""
        at = MOVED.index(tier)
        return sum(run.read[at] for run in self.runs), sum(run.written[at] for run in self.runs)

    def asdict(self) -> dict[str, Any]:
        """For JSON, with what follows from the fields."""
        moved = {str(tier): self.moved(tier) for tier in MOVED}
        return {**asdict(self), "seconds": self.seconds, "peak": self.peak, "moved": moved}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "StepPlan":
        """From what `asdict` gave, and JSON made of it."""
        placed = data["placement"]
        first = "placements" if "placements" in placed else "fates"  # of plans of earlier versions
        placements, passing = (
            {name: TensorPlacement(where) for name, where in placed[each].items()} for each in (first, "passing")
        )
        runs: list[dict[str, Any]] = [
            {name: tuple(each) if isinstance(each, list) else each for name, each in run.items()} for run in data["runs"]
        ]
        placement = Placement(placements, passing, placed["ranges"])
        made = tuple(PlannedRun(**run) for run in runs)
        room = TierRoom(*data["room"].values())  # by place: the tiers had other names once
        return cls(placement, room, made, dict(data["sizes"]), dict(data["static"]), data["exact"])


def predict(program: Program, profile: StepProfile, placement: Placement, room: TierRoom) -> StepPlan:
    """What a step takes under given placements. Raises BudgetError, naming the op, where something does not fit `room`."""
    assert program.allows(placement)
    costs, now, found = StepCosts(program, profile), 0.0, []
    asked = [_asked(costs, run, placement, room) for run in costs.runs(placement)]
    cut, range_bytes = dict[str, int](), dict[str, int]()
    for each in filter(lambda each: each.layer, asked):
        # The backward pass of a layer takes the ranges of what autograd kept.
        cut[each.layer] = max(cut.get(each.layer, 1), int(each.load.ranges.passes(each.left)))
        memory = each.range_bytes(costs)
        range_bytes[each.layer] = min(memory, range_bytes.get(each.layer, memory))
    for each in asked:
        (run, load, alive, left), ranges = each, each.load.ranges
        passes = max(int(ranges.passes(left)), cut.get(each.layer, 1))
        meetings, traffic = float(ranges.meetings(passes)), costs.traffic(run, placement)
        seconds = float(load.seconds(left, profile.hidden, passes))
        taken = round(float(ranges.taken(-(-ranges.units // passes))))
        compute, bus, disk = map(float, load.parts(passes))
        made = PlannedRun(
            op=run.op.name,
            again=run.again,
            backward=run.op.backward,
            start=now,
            stop=now + seconds,
            parts=(compute, bus, disk),
            passes=passes,
            memory=(room.memory - left + taken, *alive[1:]),
            read=traffic.whole(passes, meetings, way=0),
            written=traffic.whole(passes, meetings, way=1),
        )
        found.append(made)
        now = made.stop
    sizes = {value.name: profile.size(value) for value in program.values}
    for run in costs.runs(placement, first=True):  # which makes what is constant
        _asked(costs, run, placement, room)
    return StepPlan(replace(placement, ranges=range_bytes), room, tuple(found), sizes, {})


class _Asked(NamedTuple):
    """What a run asks for, bytes by tier that stand meanwhile, bytes of RAM that are left."""

    run: OpRun
    load: RunLoad
    alive: Bytes
    left: int

    @property
    def layer(self) -> str:
        """The op in the forward pass of a layer that gathers, "" for other runs."""
        return (self.run.op.repeats or self.run.op.name) if self.run.op.kind == "gather" else ""

    def range_bytes(self, costs: StepCosts) -> int:
        """Of a layer that gathers, bytes of memory for its ranges, beside what autograd keeps of them."""
        ranges, memory = self.load.ranges, self.left // 2
        if ranges.unit:  # it was measured
            rows = ranges.fits(self.left)
            memory = int(self.left - ranges.taken(rows) + costs.gathered(self.run.op, 0).taken(rows))
        return max(memory, costs.profile.op(self.layer).hub)


def _asked(costs: StepCosts, run: OpRun, placement: Placement, room: TierRoom) -> _Asked:
    """See `_Asked`. Raises BudgetError where it does not fit."""
    load, alive = costs.load(run, placement), costs.standing_bytes(run.alive, placement)
    left = room.memory - alive[0]
    needs = left - max(load.ranges.unit, load.ranges.least)
    for tier, has, need in zip(TIERS, room.bytes, (room.memory - needs, *alive[1:]), strict=True):
        if need > has:
            raise BudgetError(
                f"{run.op.name} needs {format_bytes(need)} of {TIER_NAMES[tier]}, and {format_bytes(has)} are there: "
                f"give {format_bytes(need - has)} more"
            )
    return _Asked(run, load, alive, left)


def settled(program: Program, profile: StepProfile, plan_of: Callable[[StepProfile], StepPlan]) -> StepPlan:
    """A plan whose ranges of layers that gather are those by which it counts what autograd keeps: of every source in every
    range. profile: by one range each."""
    plan = plan_of(profile)
    for tried in range(_TRIES):
        cut = {run.op: run.passes for run in plan.runs}
        sizes = _kept_sizes(program, profile, cut if tried < _TRIES - 1 else {})
        if all(size <= _ALIKE * profile.nbytes.get(name, 0) for name, size in sizes.items()):
            return plan
        larger = {name: max(size, profile.nbytes.get(name, 0)) for name, size in sizes.items()}
        profile = replace(profile, nbytes={**profile.nbytes, **larger})
        plan = plan_of(profile)
    return plan


def _kept_sizes(program: Program, profile: StepProfile, cut: Mapping[str, int]) -> dict[str, int]:
    """What autograd keeps of layers that gather, in so many ranges; where those are not known, as many as there are nodes."""
    found, met = {}, program.num_edges / max(1, program.num_nodes)
    for op in program.forward:
        saved = next((name for name in op.writes if program.value(name).kind == "saved"), "")
        if op.kind == "gather" and saved in profile.nbytes:
            meetings = float(Ranges(program.num_nodes, 1.0, met=met).meetings(cut.get(op.name, program.num_nodes)))
            found[saved] = profile.op(op.name).kept_bytes(program.num_nodes, meetings)
    return found


def static_placements(program: Program, profile: StepProfile) -> dict[str, Placement]:
    """The plans that treat all values alike, by name; those only that the tiers there are allow."""
    tiers, disk = {*profile.places, *[TensorPlacement.COMPRESSED] * bool(profile.packed)}, TensorPlacement.DISK
    tiers |= {TensorPlacement.INVERTED} if program.undone_by else set()
    needed = {name: {disk if disk in wanted else wanted[0]} for name, wanted in STATIC.items()}
    return {name: alike(program, *wanted) for name, wanted in STATIC.items() if needed[name] <= tiers}


def alike(program: Program, *wanted: TensorPlacement) -> Placement:
    """The first of some placements that a value may have, for each. What passes, of values that are made again, stands on disk
    where that is among them."""
    where = {v.name: next((w for w in wanted if w in v.placements), v.placements[0]) for v in program.values}
    passing = {}
    for op in program.backward:
        rows = program.inverted(op, Placement(where))
        if rows is not None:
            where[program.saved_of(op)] = TensorPlacement.RECOMPUTED
            passing[rows.name] = TensorPlacement.DISK if TensorPlacement.DISK in wanted else TensorPlacement.RETAINED
    return Placement(where, passing)


def plan_step(program: Program, profile: StepProfile, room: TierRoom) -> StepPlan:
    """The placements that take the least time in `room`.

    Never slower than a plan that treats all values alike. Raises BudgetError, naming how much more memory or disk is enough,
    where nothing fits.
    """
    static = {name: _predicted(program, profile, each, room) for name, each in static_placements(program, profile).items()}
    seconds = {name: None if plan is None else plan.seconds for name, plan in static.items()}
    fitting = [plan for plan in static.values() if plan is not None]
    known = min((plan.seconds for plan in fitting), default=float("inf"))
    found = search(program, profile, room.bytes, known)
    if found is not None:
        fitting.append(predict(program, profile, found.placement, room))
    if not fitting:
        raise BudgetError(_fix(program, profile, room))
    best = min(fitting, key=lambda plan: plan.seconds)
    again = any(run.again and program.op(run.op).kind == "gather" for run in best.runs)
    exact = found is None or (found.exact and not again)  # rows gathered again: the search thinks of ranges of their own
    return replace(best, static=seconds, exact=exact)


def _predicted(program: Program, profile: StepProfile, placement: Placement, room: TierRoom) -> StepPlan | None:
    try:
        return predict(program, profile, placement, room)
    except BudgetError:
        return None


def _fix(program: Program, profile: StepProfile, room: TierRoom) -> str:
    """What would make a plan fit, in words: more of one tier, where that is enough."""
    total = 2 * sum(profile.size(value) for value in program.values)
    more = []
    for name, words in (("disk", "more room on the disk"), ("memory", "more memory")):
        most = replace(room, **{name: getattr(room, name) + total})
        if _fits(program, profile, most):
            more.append((_least(program, profile, room, most, name) - getattr(room, name), words))
    there = f"{format_bytes(room.memory)} of memory and {format_bytes(room.disk)} of disk"
    if more:
        return f"no plan of exact training fits {there}: give {' or '.join(f'{format_bytes(n)} {words}' for n, words in more)}"
    most = TierRoom(room.memory, room.device, room.disk + total)
    most = replace(most, memory=_least(program, profile, most, replace(most, memory=most.memory + total), "memory"))
    disk = _least(program, profile, replace(most, disk=room.disk), most, "disk") - room.disk
    memory = f"{format_bytes(most.memory - room.memory)} more memory"
    return f"no plan of exact training fits {there}: give {memory} and {format_bytes(disk)} more room on the disk"


def _fits(program: Program, profile: StepProfile, room: TierRoom) -> bool:
    static = static_placements(program, profile).values()
    return any(_predicted(program, profile, each, room) for each in static) or bool(search(program, profile, room.bytes))


def _least(program: Program, profile: StepProfile, room: TierRoom, most: TierRoom, name: str) -> int:
    """Bytes of a tier that are enough, between those of `room`, which are not, and of `most`, which are."""
    low, high = getattr(room, name), getattr(most, name)
    while high - low > _CLOSE * high:
        middle = (low + high) // 2
        if _fits(program, profile, replace(room, **{name: middle})):
            high = middle
        else:
            low = middle
    return int(high)

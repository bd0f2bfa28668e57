"""PURE: what a run of an exact step costs: seconds by what the memory that is left allows, and bytes by tier."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.fates import Fate, Op, Placement, Program, Value
from ooc.fullgraph.schedule import Run, Schedule

TIERS = (Fate.RETAINED, Fate.HOST, Fate.DISK)
"""Where bytes can stand; in this order in all tuples of bytes by tier"""
MOVED = TIERS[1:]
Bytes = tuple[int, int, int]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OpCost:
    """Seconds of an op, all nodes once. rows_s: of the row-wise part (on the way down, of its gradients alone); sums_s: to add
    rows along the edges. unit_bytes: of "gather", what a destination takes with its sources on average; workspace: bytes that
    it takes whatever the ranges are."""

    rows_s: float = 0.0
    sums_s: float = 0.0
    unit_bytes: float = 0.0
    workspace: int = 0


@dataclass(frozen=True)
class Speed:
    """Bytes a second, to and from a tier."""

    read: float
    written: float


@dataclass(frozen=True)
class Profile:
    """What ops cost and how fast tiers are. nbytes: of values, where that was measured; hidden: share of the shorter of
    computing and moving that goes on behind the longer, 0 to 1.

    >>> Profile({"up0": OpCost(1.0, 2.0)}, {Fate.DISK: Speed(2e9, 1e9)}, hidden=0.9)
    """

    ops: Mapping[str, OpCost]
    tiers: Mapping[Fate, Speed]
    hidden: float
    nbytes: Mapping[str, int] = field(default_factory=dict)

    def op(self, name: str) -> OpCost:
        """Of an op; nothing where it was not measured."""
        return self.ops.get(name, OpCost())

    def size(self, value: Value) -> int:
        """Bytes of a value."""
        return self.nbytes.get(value.name, value.nbytes)

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Load(NamedTuple):
    """What a run asks for. compute_s: seconds; moved_s: moving what is read and written once, by tier of `MOVED`; pass_s: what
    is read once a pass. units: destinations come in so many pieces, and a pass takes any number of them, `unit_bytes` of memory
    each (0: one pass, without memory of its own). Fields may be arrays."""

    compute_s: Any
    moved_s: tuple[Any, Any]
    pass_s: tuple[Any, Any]
    units: int
    unit_bytes: Any

    def passes(self, left: Any) -> Any:
        """Passes in `left` bytes; infinite where not one piece fits."""
        bare = np.asarray(self.unit_bytes) <= 0
        fits = np.where(bare, self.units, np.minimum(np.floor(left / np.where(bare, 1.0, self.unit_bytes)), self.units))
        return np.where((fits > 0) & (np.asarray(left) >= 0), np.ceil(self.units / np.maximum(fits, 1)), np.inf)

    def rows(self, left: int, program: Program) -> int:
        """Destinations of a pass, equal ones."""
        passes = int(self.passes(left))
        return -(-self.units // passes) * program.cell_rows

    def parts(self, passes: Any) -> tuple[Any, Any, Any]:
        """Seconds of computing and of either tier, each alone."""
        host, disk = (once + passes * each for once, each in zip(self.moved_s, self.pass_s, strict=True))
        return self.compute_s, host, disk

    def seconds(self, left: Any, hidden: float) -> Any:
        """In `left` bytes of memory: the longest part, and of the others what is not hidden behind it."""
        passes = self.passes(left)
        fits = np.isfinite(passes)
        compute, host, disk = self.parts(np.where(fits, passes, 1.0))
        longest = np.maximum(np.maximum(compute, host), disk)
        return np.where(fits, longest + (1 - hidden) * (compute + host + disk - longest), np.inf)


class Traffic(NamedTuple):
    """Bytes (read, written), by tier of `MOVED`. once: whatever the passes; each: a pass."""

    once: tuple[tuple[int, int], tuple[int, int]]
    each: tuple[tuple[int, int], tuple[int, int]]


def _pair(values: list[int]) -> tuple[int, int]:
    return values[0], values[1]


class Costs:
    """Loads of runs, in a program with a profile."""

    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.profile, self.schedule = program, profile, Schedule(program)
        self.values = {value.name: value for value in program.values}
        self.ops = {op.name: op for op in program.ops}
        self.edges = next((value.name for value in program.values if value.name == "edges"), "")
        self.units = max(1, -(-program.num_nodes // program.cell_rows))

    def size(self, name: str) -> int:
        """Bytes of a value."""
        return self.profile.size(self.values[name])

    def move_s(self, nbytes: tuple[float, float], tier: Fate) -> float:
        """Seconds to (read, write) so much; none within the device's own memory."""
        if not any(nbytes):
            return 0.0
        speed = self.profile.tiers[tier]
        return nbytes[0] / speed.read + nbytes[1] / speed.written

    def width(self, name: str) -> int:
        """Bytes of the sums of a destination."""
        return self.values[name].columns * self.program.itemsize

    def compute_s(self, run: Run) -> float:
        """Seconds that a run computes."""
        own, ops = self.profile.op(run.op.name), self.profile.ops
        seconds = own.rows_s
        if run.gathers or (run.op.summed and run.op.summed in run.adds[:1]):
            seconds += own.sums_s
        if run.op.backward:
            seconds += ops.get(run.repeated, OpCost()).rows_s
            again = run.adds[1:] if run.op.summed else run.adds
            seconds += sum(self.sums_s(name) for name in again)
        return seconds

    def sums_s(self, added: str) -> float:
        """Seconds of adding a value along the edges on the way up."""
        return next(self.profile.op(op.name).sums_s for op in self.program.forward if op.summed == added)

    def traffic(self, run: Run, placement: Placement) -> Traffic:
        """Bytes that a run moves, by tier of `MOVED`."""
        once, each = [[0, 0], [0, 0]], [[0, 0], [0, 0]]
        for number, tier in enumerate(MOVED):
            for found, way, names in ((once, 0, run.reads), (once, 1, run.writes), (each, 0, (*run.adds, *run.gathers))):
                found[number][way] += sum(self.size(name) for name in names if placement.standing(name) is tier)
            if run.op.scatters and placement.standing(run.op.scatters) is tier:
                each[number] = [nbytes + self.size(run.op.scatters) for nbytes in each[number]]
            if self.edges and placement.standing(self.edges) is tier:
                once[number][0] += len(run.adds) * self.size(self.edges) // 2
        return Traffic((_pair(once[0]), _pair(once[1])), (_pair(each[0]), _pair(each[1])))

    def load(self, run: Run, placement: Placement) -> Load:
        """What a run asks for."""
        traffic = self.traffic(run, placement)
        moved, each = (tuple(self.move_s(nbytes, tier) for nbytes, tier in zip(found, MOVED, strict=True)) for found in traffic)
        unit = sum(self.width(name) for name in run.adds[len(self._into(run, placement)) :]) + self.gathered(run.op)
        unit *= self.program.cell_rows
        return Load(self.compute_s(run), (moved[0], moved[1]), (each[0], each[1]), self.units, float(unit))

    def gathered(self, op: Op) -> float:
        """Bytes of a destination's sources and edges, of an op that gathers."""
        return self.profile.op(op.name).unit_bytes if op.kind == "gather" else 0.0

    def _into(self, run: Run, placement: Placement) -> tuple[str, ...]:
        """Sums that are made where they are to stand: they need no memory of their own."""
        if run.op.backward or not run.adds:
            return ()
        return tuple(
            name for name in run.writes if self.values[name].kind == "sums" and placement.standing(name) is Fate.RETAINED
        )

    def standing_bytes(self, names: tuple[str, ...], placement: Placement) -> Bytes:
        """Bytes of values by the tier they stand in; the store's features take none more on disk."""
        found = [0, 0, 0]
        for name in names:
            tier = placement.standing(name)
            if self.values[name].kind != "features" or tier is not Fate.DISK:
                found[TIERS.index(tier)] += self.size(name)
        return found[0], found[1], found[2]

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
    rows along the edges, and pass_s: to go through all rows for that, once a range of destinations; 0 of "gather".
    unit_bytes: of "gather", what a destination takes with its sources on average; workspace: bytes that it takes whatever the
    ranges are."""

    rows_s: float = 0.0
    sums_s: float = 0.0
    pass_s: float = 0.0
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
    """What a run asks for, range of destinations by range: their sums are added up, then their rows are computed.

    rows, adds: seconds of either, (computing, moving to and from the host tier, the disk), whatever the ranges are; row_pass,
    add_pass: the same, once a range. units: destinations come in so many pieces, and a range has
    any number of them, `unit_bytes` of memory each (0: one range, without memory of its own). Fields may be arrays.
    """

    rows: tuple[Any, Any, Any]
    adds: tuple[Any, Any, Any]
    row_pass: tuple[Any, Any, Any]
    add_pass: tuple[Any, Any, Any]
    units: int
    unit_bytes: Any

    def passes(self, left: Any) -> Any:
        """Ranges in `left` bytes; infinite where not one piece fits."""
        bare = np.asarray(self.unit_bytes) <= 0
        fits = np.where(bare, self.units, np.minimum(np.floor(left / np.where(bare, 1.0, self.unit_bytes)), self.units))
        return np.where((fits > 0) & (np.asarray(left) >= 0), np.ceil(self.units / np.maximum(fits, 1)), np.inf)

    def parts(self, passes: Any) -> tuple[Any, Any, Any]:
        """Seconds of computing and of either tier, each alone."""
        adding, computing = self._phase(self.adds, self.add_pass, passes), self._phase(self.rows, self.row_pass, passes)
        return adding[0] + computing[0], adding[1] + computing[1], adding[2] + computing[2]

    @staticmethod
    def _phase(once: tuple[Any, Any, Any], each: tuple[Any, Any, Any], passes: Any) -> tuple[Any, Any, Any]:
        return once[0] + passes * each[0], once[1] + passes * each[1], once[2] + passes * each[2]

    def seconds(self, left: Any, hidden: float) -> Any:
        """In `left` bytes of memory: of either phase the longest part, and of the others what is not hidden behind it."""
        passes = self.passes(left)
        fits = np.isfinite(passes)
        times, taken = np.where(fits, passes, 1.0), 0.0
        for once, each in ((self.adds, self.add_pass), (self.rows, self.row_pass)):
            compute, host, disk = self._phase(once, each, times)
            longest = np.maximum(np.maximum(compute, host), disk)
            taken = taken + longest + (1 - hidden) * (compute + host + disk - longest)
        return np.where(fits, taken, np.inf)


Moved = tuple[tuple[int, int], tuple[int, int]]
"""bytes (read, written), by tier of `MOVED`"""


class Traffic(NamedTuple):
    """Bytes of a run. rows: for its rows, once; adds: the edges of its sums; row_pass, add_pass: once a range more."""

    rows: Moved
    adds: Moved
    row_pass: Moved
    add_pass: Moved

    def whole(self, passes: int, way: int) -> tuple[int, int]:
        """Bytes read (way 0) or written (1) in so many ranges, by tier of `MOVED`."""
        host, disk = (
            self.rows[tier][way] + self.adds[tier][way] + passes * (self.row_pass[tier][way] + self.add_pass[tier][way])
            for tier in range(len(MOVED))
        )
        return host, disk


class Costs:
    """Loads of runs, in a program with a profile."""

    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.profile, self.schedule = program, profile, Schedule(program)
        self.values = {value.name: value for value in program.values}
        self.ops = {op.name: op for op in program.ops}
        self.edges = next((value.name for value in program.values if value.name == "edges"), "")
        self._added = program.added_to
        self.units = max(1, -(-program.num_nodes // program.cell_rows))

    def size(self, name: str) -> int:
        """Bytes of a value."""
        return self.profile.size(self.values[name])

    def space(self, name: str, tier: Fate) -> int:
        """Bytes that a value takes of a tier; see `Program.added_to`."""
        return self.size(name) * (1 + (tier is Fate.DISK and name in self._added))

    def move_s(self, nbytes: tuple[float, float], tier: Fate) -> float:
        """Seconds to (read, write) so much; none within the device's own memory."""
        if not any(nbytes):
            return 0.0
        speed = self.profile.tiers[tier]
        return nbytes[0] / speed.read + nbytes[1] / speed.written

    def width(self, name: str) -> int:
        """Bytes of the sums of a destination."""
        return self.values[name].columns * self.program.itemsize

    def compute_s(self, run: Run) -> tuple[float, float, float]:
        """Seconds that a run computes: its rows, its sums, and for these once a range."""
        own, ops = self.profile.op(run.op.name), self.profile.ops
        if not run.op.backward:
            return own.rows_s, own.sums_s * bool(run.adds), own.pass_s * bool(run.adds)
        adding = [self.adding_s(name) for name in (run.adds[1:] if run.op.summed else run.adds)]
        adding += [(own.sums_s, own.pass_s)] * bool(run.op.summed)
        rows_s = own.rows_s + ops.get(run.repeated, OpCost()).rows_s
        return rows_s, sum(sums_s for sums_s, _ in adding), sum(pass_s for _, pass_s in adding)

    def adding_s(self, added: str) -> tuple[float, float]:
        """Seconds of adding a value along the edges on the way up, once in all and once a range."""
        cost = next(self.profile.op(op.name) for op in self.program.forward if op.summed == added)
        return cost.sums_s, cost.pass_s

    def traffic(self, run: Run, placement: Placement) -> Traffic:
        """Bytes that a run moves, by tier of `MOVED`."""
        standing, size = placement.standing, self.size

        def moved(names: tuple[str, ...], tier: Fate) -> int:
            return sum(size(name) for name in names if standing(name) is tier)

        scattered = (run.op.scatters,) * bool(run.op.scatters)
        host, disk = (
            (
                (moved(run.reads, tier), moved(run.writes, tier)),
                (len(run.adds) * moved((self.edges,) * bool(self.edges), tier) // 2, 0),
                (moved((*run.gathers, *scattered), tier), moved(scattered, tier)),
                (moved(run.adds, tier), 0),
            )
            for tier in MOVED
        )
        return Traffic(*zip(host, disk, strict=True))

    def load(self, run: Run, placement: Placement) -> Load:
        """What a run asks for."""
        rows, adds, row_pass, add_pass = (
            (self.move_s(host, Fate.HOST), self.move_s(disk, Fate.DISK)) for host, disk in self.traffic(run, placement)
        )
        rows_s, sums_s, pass_s = self.compute_s(run)
        unit = sum(self.width(name) for name in run.adds[len(self._into(run, placement)) :]) + self.gathered(run.op)
        unit_bytes = float(unit * self.program.cell_rows)
        return Load((rows_s, *rows), (sums_s, *adds), (0.0, *row_pass), (pass_s, *add_pass), self.units, unit_bytes)

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
                found[TIERS.index(tier)] += self.space(name, tier)
        return found[0], found[1], found[2]

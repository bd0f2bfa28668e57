"""PURE: the runs of a step + a profile -> what a run costs: seconds by what memory is left, and bytes by tier."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ooc.fullgraph.placement.op_costs import MOVED, TIERS, Bytes, PackCost, StepProfile
from ooc.fullgraph.placement.op_runs import NamedOps, OpRun, RunOrder
from ooc.fullgraph.program import Placement, Program, TensorPlacement
from ooc.layerwise.pass_plan import Op
from ooc.stores.io.pages import PAGE_BYTES


class Ranges(NamedTuple):
    """How destinations are taken together, as memory allows; fields may be arrays.

    units: destinations come in so many pieces, and a range has any number of them, `unit` bytes of memory each (0: one range,
    without memory of its own); source: of a unit's, those of its sources, which are `most` bytes for all nodes at most; least:
    bytes without which it cannot be; met: rows that a destination brings with it, beside its own, on average.
    """

    units: Any
    unit: Any
    source: Any = 0.0
    most: Any = 0.0
    least: Any = 0.0
    met: Any = 0.0

    def fits(self, left: Any) -> Any:
        """Units of a range in `left` bytes, as if each source were another one, or all sources were among them."""
        own = np.asarray(self.unit - self.source)
        apart = np.floor(left / np.where(np.asarray(self.unit) <= 0, 1.0, self.unit))
        more = np.asarray(left - self.most)
        shared = np.where(own <= 0, self.units * (more >= 0), np.floor(more / np.where(own <= 0, 1.0, own)))
        fits = np.where(np.asarray(self.unit) <= 0, self.units, np.minimum(np.maximum(apart, shared), self.units))
        return np.where((np.asarray(left) >= self.least) & (np.asarray(left) >= 0), np.maximum(fits, 0), 0)

    def passes(self, left: Any) -> Any:
        """Ranges in `left` bytes; infinite where not one unit fits."""
        fits = self.fits(left)
        return np.where(fits > 0, np.ceil(self.units / np.maximum(fits, 1)), np.inf)

    def taken(self, units: Any) -> Any:
        """Bytes of a range of so many units."""
        return np.minimum(units * self.source, self.most) + units * (self.unit - self.source)

    def meetings(self, passes: Any) -> Any:
        """How often a row is gathered in so many ranges, where sources lie anywhere: in the range of its own, and in those
        others that have a destination of it."""
        return 1 + (passes - 1) * -np.expm1(-self.met / passes)


class RunLoad(NamedTuple):
    """What a run asks for, range of destinations by range: their sums are added up, then their rows are computed.

    rows, adds: seconds of either, (computing, moving between RAM and a GPU, the disk), whatever the ranges are; add_pass:
    the same, once a range; row_pass: once a meeting with all rows that are gathered. Fields may be arrays.
    """

    rows: Sequence[Any]
    adds: Sequence[Any]
    row_pass: Sequence[Any]
    add_pass: Sequence[Any]
    ranges: Ranges

    @classmethod
    def of(cls, cells: Any) -> "RunLoad":
        """From `CELLS` numbers along the last axis, in the order of the fields."""
        cells = np.moveaxis(cells, -1, 0)
        return cls(cells[:3], cells[3:6], cells[6:9], cells[9:12], Ranges(*cells[12:CELLS]))

    @property
    def cells(self) -> list[float]:
        """See `of`."""
        return [*self.rows, *self.adds, *self.row_pass, *self.add_pass, *self.ranges]

    def _phases(self, passes: Any) -> list[list[Any]]:
        """Seconds of computing and of either tier while sums are added up, and while rows are computed."""
        repeated = (self.adds, self.add_pass, passes), (self.rows, self.row_pass, self.ranges.meetings(passes))
        return [[a + times * b for a, b in zip(once, each, strict=True)] for once, each, times in repeated]

    def parts(self, passes: Any) -> tuple[Any, Any, Any]:
        """Seconds of computing and of either tier, each alone."""
        compute, bus, disk = (adding + computing for adding, computing in zip(*self._phases(passes), strict=True))
        return compute, bus, disk

    def seconds(self, left: Any, hidden: float, least: Any = 1) -> Any:
        """In `left` bytes of memory: of either phase the longest part, and of the others what is not hidden behind it. least:
        ranges at least."""
        passes = np.maximum(self.ranges.passes(left), least)
        fits = np.isfinite(passes)
        taken = 0.0
        for compute, bus, disk in self._phases(np.where(fits, passes, 1.0)):
            longest = np.maximum(np.maximum(compute, bus), disk)
            taken = taken + longest + (1 - hidden) * (compute + bus + disk - longest)
        return np.where(fits, taken, np.inf)


CELLS = 18
"""Numbers of a `RunLoad`"""
Moved = Sequence[tuple[int, int]]
"""bytes (read, written), by tier of `MOVED`"""


class RunBytes(NamedTuple):
    """Bytes of a run. rows: for its rows, once; adds: the edges of its sums; row_pass, add_pass: as in `RunLoad`."""

    rows: Moved
    adds: Moved
    row_pass: Moved
    add_pass: Moved

    def whole(self, passes: int, meetings: float, way: int) -> tuple[int, int]:
        """Bytes read (way 0) or written (1) in so many ranges, by tier of `MOVED`; meetings: see `Ranges`."""
        memory, disk = (
            rows[way] + adds[way] + round(meetings * row_pass[way]) + passes * add_pass[way]
            for rows, adds, row_pass, add_pass in zip(*self, strict=True)
        )
        return memory, disk


class StepCosts(NamedOps):
    """The runs of a program and their loads, by a profile."""

    def __init__(self, program: Program, profile: StepProfile) -> None:
        super().__init__(program)
        self.profile = profile
        self.edges = next((value.name for value in program.values if value.name == "edges"), "")
        self._added = program.added_to
        self.met = program.num_edges / max(1, program.num_nodes)
        """sources of a destination, beside itself, on average"""

    def runs(self, placement: Placement, first: bool = False) -> list[OpRun]:
        """The runs of a step. first: of the first epoch, which makes what is constant."""
        return list(RunOrder(self, placement, first).runs())

    def size(self, name: str) -> int:
        """Bytes of a value."""
        return self.profile.size(self.values[name])

    def size_as(self, name: str, where: TensorPlacement) -> int:
        """Bytes of a value with that placement."""
        size = self.size(name)
        return round(self.packing(name).share * size) if where is TensorPlacement.COMPRESSED else size

    def packing(self, name: str) -> PackCost:
        """What it takes to compress a value; nothing of what that is not known of."""
        return self.profile.packed.get(name, PackCost())

    def space(self, name: str, tier: TensorPlacement, where: TensorPlacement) -> int:
        """Bytes that a value takes of a tier; see `Program.added_to`."""
        return self.size_as(name, where) * (1 + (tier is TensorPlacement.DISK and name in self._added))

    def move_s(self, nbytes: tuple[float, float], tier: TensorPlacement) -> float:
        """Seconds to (read, write) so much."""
        if not any(nbytes):
            return 0.0
        speed = self.profile.tiers[tier]
        return nbytes[0] / speed.read + nbytes[1] / speed.written

    def moves(self, name: str, tier: TensorPlacement) -> bool:
        """Whether a value that stands in a tier is moved there and back by what its placement decides: rows and gradients cross
        the bus to a GPU wherever they stand."""
        if tier is TensorPlacement.RETAINED:
            return tier in self.profile.tiers and self.values[name].kind == "saved"
        return tier in MOVED

    def width(self, name: str) -> int:
        """Bytes of the sums of a destination."""
        return self.values[name].columns * self.program.itemsize

    def compute_s(self, run: OpRun) -> tuple[float, float, float]:
        """Seconds that a run computes: its rows, its sums, and for these once a range."""
        own = self.profile.op(run.op.name)
        if not run.op.backward:
            return own.rows_s, own.sums_s * bool(run.adds), own.pass_s * bool(run.adds)
        adding = [self.adding_s(name) for name in (run.adds[1:] if run.op.summed else run.adds)]
        adding += [(own.sums_s, own.pass_s)] * bool(run.op.summed)
        rows_s = own.rows_s + self.profile.op(run.repeated).rows_s
        return rows_s, sum(sums_s for sums_s, _ in adding), sum(pass_s for _, pass_s in adding)

    def packing_s(self, run: OpRun, placement: Placement) -> float:
        """Seconds of a run that compresses what autograd keeps, or undoes it."""
        there = TensorPlacement.COMPRESSED
        packed = sum(self.packing(name).pack_s for name in run.writes if placement.of(name) is there)
        return packed + sum(self.packing(name).unpack_s for name in run.reads if placement.of(name) is there)

    def adding_s(self, added: str) -> tuple[float, float]:
        """Seconds of adding a value along the edges in the forward pass, once in all and once a range."""
        cost = next(self.profile.op(op.name) for op in self.program.forward if op.summed == added)
        return cost.sums_s, cost.pass_s

    def traffic(self, run: OpRun, placement: Placement) -> RunBytes:
        """Bytes that a run moves, by tier of `MOVED`."""
        standing, size = placement.standing, self.size

        def moved(names: tuple[str, ...], tier: TensorPlacement) -> int:
            return sum(size(name) for name in names if standing(name) is tier and self.moves(name, tier))

        scattered = (run.op.scatters,) * bool(run.op.scatters)
        cleared = tuple(name for name in scattered if self.values[name].made_by == run.op.name)
        memory, disk = (
            (
                (moved(run.reads, tier), moved(run.writes, tier) + moved(cleared, tier)),
                (len(run.adds) * moved((self.edges,) * bool(self.edges), tier) // 2, 0),
                (moved((*run.gathers, *scattered), tier), moved(scattered, tier)),
                (moved(run.adds, tier), 0),
            )
            for tier in MOVED
        )
        return RunBytes(*zip(memory, disk, strict=True))

    def load(self, run: OpRun, placement: Placement) -> RunLoad:
        """What a run asks for."""
        rows, adds, row_pass, add_pass = (
            (self.move_s(memory, TensorPlacement.RETAINED), self.move_s(disk, TensorPlacement.DISK))
            for memory, disk in self.traffic(run, placement)
        )
        rows_s, sums_s, pass_s = self.compute_s(run)
        rows_s += self.packing_s(run, placement)
        return RunLoad((rows_s, *rows), (sums_s, *adds), (0.0, *row_pass), (pass_s, *add_pass), self.ranges(run, placement))

    def ranges(self, run: OpRun, placement: Placement) -> Ranges:
        """How the destinations of a run are taken together."""
        op, values = run.op, self.values
        if op.kind == "gather":
            saved = [] if run.again else [name for name in (*op.reads, *op.writes) if values[name].kind == "saved"]
            return self.gathered(op, self.kept_of(op, placement.of(saved[0])) if saved else int(op.computes_loss))
        sums = [] if op.backward else [name for name in run.writes if values[name].kind == "sums"]
        # Sums that are made where they are to stand need no memory of their own, and those on a GPU none of the host's.
        into = placement.resident or any(placement.standing(name) is TensorPlacement.RETAINED for name in sums)
        unit = 0 if into else sum(self.width(name) for name in run.adds)
        return Ranges(self.units(op), float(unit * self.program.cell_rows), met=self.met)

    def units(self, op: Op) -> int:
        """See `Ranges`: destinations whose sources are gathered come one by one, others in cells of the grid."""
        return self.program.num_nodes if op.kind == "gather" else -(-self.program.num_nodes // self.program.cell_rows)

    @staticmethod
    def kept_of(op: Op, where: TensorPlacement) -> int:
        """Of how many ranges what autograd keeps is in memory, beside what stands there as a value, by its placement: in the
        backward pass it is there for the range under way and, where it is read, for the next one; in the forward pass until it
        is written, or compressed."""
        if where is TensorPlacement.RECOMPUTED:
            return int(op.backward)
        if where is TensorPlacement.COMPRESSED:
            return 1
        return 1 + op.backward if where is TensorPlacement.DISK else 0

    def gathered(self, op: Op, kept: int) -> Ranges:
        """Of an op that gathers; kept: ranges of which what autograd keeps is in memory beside the values."""
        cost = self.profile.op(op.name)
        (bare, bare_own), rows = cost.gathered, min(1 + self.met, self.program.num_nodes)
        source, own = bare + kept * cost.kept.source, bare_own + kept * cost.kept.own
        hub = cost.hub * (rows * source + own) / max(1.0, rows * bare + bare_own)
        return Ranges(self.units(op), rows * source + own, rows * source, self.program.num_nodes * source, hub, self.met_of(op))

    def met_of(self, op: Op) -> float:
        """See `Ranges`: sources bring those rows with them that share a page."""
        gathered = self.ops[op.repeats or op.name].summed if op.kind == "gather" else ""
        return self.met * max(1, PAGE_BYTES // max(1, self.width(gathered))) if gathered else self.met

    def standing_bytes(self, names: tuple[str, ...], placement: Placement) -> Bytes:
        """Bytes of values by the tier they stand in; the store's features take none more on disk."""
        found = [0, 0, 0]
        for name in names:
            tier = placement.standing(name)
            if self.values[name].kind != "features" or tier is not TensorPlacement.DISK:
                found[TIERS.index(tier)] += self.space(name, tier, placement.of(name))
        return found[0], found[1], found[2]


def bytes_alone(program: Program) -> StepCosts:
    """Costs of what was not measured: bytes, as the program has them."""
    return StepCosts(program, StepProfile({}, {}, 0.0))

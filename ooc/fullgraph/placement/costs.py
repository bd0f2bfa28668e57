"""PURE: program + placement -> the runs of a step, in order, what stands in memory or on disk meanwhile, and what a run costs:
seconds by what the memory that is left allows, and bytes by tier."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.program import GONE, Placement, Program, TensorPlacement, Value
from ooc.layerwise.pass_plan import Op
from ooc.stores.io.pages import PAGE_BYTES

TIERS = (TensorPlacement.RETAINED, TensorPlacement.DEVICE, TensorPlacement.DISK)
"""Where bytes can stand; in this order in all tuples of bytes by tier"""
MOVED = (TensorPlacement.RETAINED, TensorPlacement.DISK)
"""Where bytes are moved to and from: RAM by a GPU, and the disk"""
Bytes = tuple[int, int, int]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RangeBytes(NamedTuple):
    """Bytes of a range of destinations. source: a source, each counted once; own: a destination, with its edges on average."""

    source: float = 0.0
    own: float = 0.0


NOTHING = RangeBytes()


@dataclass(frozen=True)
class OpCost:
    """Seconds of an op, all nodes once, and bytes.

    rows_s: of the row-wise part (in the backward pass, of its gradients alone); sums_s: to add rows along the edges, and
    pass_s: to go through all rows for that, once a range of destinations; 0 of "gather". Of "gather", gathered: what the ranges
    in memory at a time take; kept: what autograd keeps of one range; hub: bytes of the node with the most edges.
    """

    rows_s: float = 0.0
    sums_s: float = 0.0
    pass_s: float = 0.0
    gathered: RangeBytes = NOTHING
    kept: RangeBytes = NOTHING
    hub: int = 0

    def kept_bytes(self, nodes: int, meetings: float = 1.0) -> int:
        """Bytes that autograd keeps for all nodes; meetings: see `Ranges`, of an op that gathers."""
        return round(nodes * (self.kept.own + self.kept.source * meetings))


class PackCost(NamedTuple):
    """Of a value that autograd keeps, COMPRESSED: its bytes, as a share of the others, and seconds to do so and to undo it."""

    share: float = 1.0
    pack_s: float = 0.0
    unpack_s: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Bytes a second, to and from a tier."""

    read: float
    written: float


@dataclass(frozen=True)
class StepProfile:
    """What ops cost and how fast tiers are. tiers: of the disk, where values may stand there, and of RAM, where a GPU moves
    there and back what autograd keeps; nbytes: of values, where that was measured; hidden: share of the shorter of computing
    and moving that goes on behind the longer, 0 to 1; packed: by value that may be COMPRESSED."""

    ops: Mapping[str, OpCost]
    tiers: Mapping[TensorPlacement, Speed]
    hidden: float
    nbytes: Mapping[str, int] = field(default_factory=dict)
    packed: Mapping[str, PackCost] = field(default_factory=dict)

    def op(self, name: str) -> OpCost:
        """Of an op; nothing where it was not measured."""
        return self.ops.get(name, OpCost())

    @property
    def places(self) -> tuple[TensorPlacement, ...]:
        """Where values can stand."""
        memory, device, disk = TIERS
        return (memory, *([device] if memory in self.tiers else []), *([disk] if disk in self.tiers else []))

    def size(self, value: Value) -> int:
        """Bytes of a value."""
        return self.nbytes.get(value.name, value.nbytes)


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


@dataclass(frozen=True)
class OpRun:
    """A scan of an op. Names of values.

    again: in the backward pass, an op of the forward pass once more. adds: whose rows are added along the edges; gathers: whose
    rows are gathered; reads: read once; writes: made; repeated: the op whose row-wise part is computed again for its gradients,
    "" where what autograd kept is read. alive: all that stands somewhere meanwhile, what is read and written included.
    """

    op: Op
    again: bool
    adds: tuple[str, ...]
    gathers: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    repeated: str
    alive: tuple[str, ...]


def inputs_of(op: Op, sums: str, made: bool) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """(what an op of the forward pass adds, gathers, reads). sums: its sums; made: whether they are there."""
    if op.kind == "gather":
        return (), (op.summed,), op.reads
    if made:
        return (), (), (*op.reads, sums)
    return (op.summed,) * bool(op.summed), (), op.reads


class _RunOrder:
    """The runs of the forward pass and of the backward pass, where an op finds what it reads where the placement has it.

    Rows that are RECOMPUTED are made again before the first op that needs them, from the nearest that is kept, and stand until
    the last one is through. Sums that are RECOMPUTED are added up once more beside the op that wants them, and never stand
    anywhere. Rows that are INVERTED are written by the op of their layer, and stand until the one of the layer below is
    through. last: by value the last op in the backward pass that needs it, or something that is RECOMPUTED of it; -1 where none
    does.
    """

    def __init__(self, costs: "StepCosts", placement: Placement, first: bool) -> None:
        self.program, self.placement, self.first = costs.program, placement, first
        self.values, self.ops, self.at, self.sums = costs.values, costs.ops, costs.at, costs.sums
        self.made_at = {value.name: self.at.get(value.made_by, -1) for value in self.program.values}
        self.last = {name: self.at[ops[-1]] if ops else -1 for name, ops in self.program.uses(placement).items()}
        self.again: list[str] = []

    def runs(self) -> Iterator[OpRun]:
        for op in self.program.forward:
            run = self._run_forward(op)
            if run.writes or op.computes_loss:
                yield run
        for op in self.program.backward:
            yield from self._run_backward(op)

    def _recomputed(self, name: str) -> bool:
        return self.placement.of(name) is TensorPlacement.RECOMPUTED

    def _stays(self, value: Value) -> bool:
        """Whether a value stands from when it is made until it is needed in the backward pass."""
        return self.placement.of(value.name) not in GONE and (self.last[value.name] >= 0 or value.constant)

    def _there(self, name: str) -> bool:
        """Whether it was made in an earlier epoch, or is the store's."""
        value = self.values[name]
        return not value.made_by or (value.constant and not self.first and self._stays(value))

    def _stands(self, value: Value, moment: int) -> bool:
        """Whether a value, as it was made first or INVERTED, is somewhere while op number `moment` runs."""
        stays = self._stays(value)
        if moment >= len(self.program.forward) and self.placement.of(value.name) is TensorPlacement.INVERTED:
            return self.at[value.backward[0]] <= moment <= self.last[value.name]
        if not value.made_by or (value.constant and stays):
            return not self.first or self.made_at[value.name] <= moment
        if value.kind in ("sums", "saved") and not stays:
            return False
        last = self.last[value.name] if stays else self.at.get(value.last_forward, -1)
        return self.made_at[value.name] <= moment <= last

    def _alive(self, moment: int) -> list[str]:
        return [value.name for value in self.program.values if self._stands(value, moment)]

    def _run_forward(self, op: Op) -> OpRun:
        moment, sums = self.at[op.name], self.sums[op.name]
        adds, gathers, reads = inputs_of(op, sums, bool(sums) and self._there(sums))
        writes = tuple(name for name in op.writes if not self._there(name) and self._stands(self.values[name], moment))
        return OpRun(op, False, adds, gathers, reads, writes, "", tuple(self._alive(moment)))

    def _run_backward(self, op: Op) -> Iterator[OpRun]:
        moment, values = self.at[op.name], self.values
        saved = [name for name in op.reads if values[name].kind == "saved"]
        lost = [name for name in op.reads if self._recomputed(name) and values[name].kind in ("sums", "saved")]
        sums = [self.ops[values[name].made_by].summed for name in lost if values[name].kind == "sums"]
        inverted, source = self.program.inverted(op, self.placement), self.ops[op.repeats].summed if op.repeats else ""
        gathers = (source,) if op.kind == "gather" and source in op.reads else ()
        added = [name for name in op.writes if values[name].made_by != op.name]  # to what is there
        reads = (*(name for name in op.reads if name not in (*lost, *gathers)), *added)
        made: tuple[str, ...] = ()
        if inverted is not None:
            gathers = (inverted.output,)
            made = (inverted.name,) if self.last[inverted.name] >= 0 else ()
        adds = tuple(name for name in (op.summed, *sums) if name)
        standing = self._alive(moment)
        before = [name for name in standing if values[name].made_by != op.name and name not in made]
        for name in self._ordered((*reads, *adds, *gathers)):
            yield from self._make(name, before)
        repeated = "" if saved and not self._recomputed(saved[0]) else op.repeats
        alive = tuple(dict.fromkeys((*standing, *self.again)))
        yield OpRun(op, False, adds, gathers, reads, (*op.writes, *made), repeated, alive)
        self.again = [name for name in self.again if self.last[name] > moment]

    def _ordered(self, names: tuple[str, ...]) -> list[str]:
        """Each once, those that are made first before the others."""
        return sorted(dict.fromkeys(names), key=self.made_at.__getitem__)

    def _make(self, wanted: str, before: list[str]) -> Iterator[OpRun]:
        """Rows that are gone, from those that are there, with all rows that are gone of the same op."""
        if wanted in before or wanted in self.again:
            return
        op = self.ops[self.values[wanted].made_by]
        sums = self.sums[op.name]
        adds, gathers, reads = inputs_of(op, sums, sums in before)
        for name in self._ordered((*reads, *adds, *gathers)):
            yield from self._make(name, before)
        writes = tuple(n for n in op.writes if self._recomputed(n) and self.values[n].kind == "rows" and self.last[n] >= 0)
        self.again += writes
        yield OpRun(op, True, adds, gathers, reads, writes, "", tuple(dict.fromkeys((*before, *self.again))))


class StepCosts:
    """The runs of a program and their loads, by a profile. at: an op's number in the step; sums: by op of the forward pass, the
    sums that it makes, "" where they have no name."""

    def __init__(self, program: Program, profile: StepProfile) -> None:
        self.program, self.profile = program, profile
        self.values, self.ops = {value.name: value for value in program.values}, {op.name: op for op in program.ops}
        self.at = {name: number for number, name in enumerate(self.ops)}
        self.sums = {
            op.name: next((name for name in op.writes if self.values[name].kind == "sums"), "") for op in program.forward
        }
        self.edges = next((value.name for value in program.values if value.name == "edges"), "")
        self._added = program.added_to
        self.met = program.num_edges / max(1, program.num_nodes)
        """sources of a destination, beside itself, on average"""

    def runs(self, placement: Placement, first: bool = False) -> list[OpRun]:
        """The runs of a step. first: of the first epoch, which makes what is constant."""
        return list(_RunOrder(self, placement, first).runs())

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

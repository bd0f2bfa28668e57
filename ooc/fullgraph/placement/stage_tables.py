"""PURE: what each choice for each value adds to the loads of the ops that meet it: a step, taken apart for the search.

The ops of the forward pass are stages. A stage decides the placements of what its op makes, and of the gradients that its ops
in the backward pass read last. All that these ops ask for is a sum over values, so a table of all options is a sum of small
ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.ir import TensorPlacement, Value
from ooc.fullgraph.placement.costs import MOVED, TIERS, Floats, Ranges, RunLoad, StepCosts
from ooc.fullgraph.placement.schedule import sums_of
from ooc.layerwise.ir import Op

ALIVE, ROWS, ADDS, ROW_PASS, ADD_PASS = slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12), slice(12, 15)
UNIT, SOURCE, ALL_SOURCES, LEAST, BEFORE = 15, 16, 17, 18, slice(19, 22)
_COLUMNS = 22
"""Of a scan: bytes that stand meanwhile by tier; of its `RunLoad` the seconds; of its `Ranges` the bytes, the least being
those of a unit's sums in the first epoch (infinite: what cannot be); bytes that stand just before it"""


class ValueChoice(NamedTuple):
    """A value's placement, and the tier it stands in while it is used. needed: whether the backward pass needs it; where that
    hangs on sums that a later stage decides, both are tried, and the later stage refuses what it is not."""

    where: TensorPlacement
    standing: TensorPlacement
    needed: bool = True


Ints = NDArray[np.int64]
Known = Mapping[str, ValueChoice]


@dataclass(frozen=True)
class PlacementStage:
    """An op of the forward pass with those of the backward pass that undo it, in order. sums: what it sums up; decides: values;
    known: names of those decided before that its ops meet, or later ones do."""

    number: int
    op: Op
    backwards: tuple[Op, ...]
    sums: str
    decides: tuple[Value, ...]
    known: tuple[str, ...]
    own: frozenset[str]
    """names of what it decides"""


class Tables(NamedTuple):
    """Of all options of a stage, given what is known. node_scans: float64[options, 1 + backwards, columns]; kept:
    float64[options, 3], bytes that stand from now on."""

    node_scans: Floats
    kept: Floats

    def load(self, scan: int, units: int, met: float) -> RunLoad:
        """Of scan 0, the forward pass, or of an op of the backward pass; arrays by option. units, met: see `Ranges`."""
        found = self.node_scans[:, scan].T
        ranges = Ranges(units, found[UNIT], found[SOURCE], found[ALL_SOURCES], found[LEAST], met)
        return RunLoad(
            (found[3], found[4], found[5]),
            (found[6], found[7], found[8]),
            (found[9], found[10], found[11]),
            (found[12], found[13], found[14]),
            ranges,
        )


class Stages:
    """The stages of a program, and their tables."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs, self.program, self.values = costs, costs.program, costs.values
        self.at = {op.name: number for number, op in enumerate(self.program.ops)}
        self._stage_of, number = {op.name: number for number, op in enumerate(self.program.forward)}, 0
        for op in reversed(self.program.backward):  # one that repeats none is for the one behind it
            number = self._stage_of[op.repeats] if op.repeats else number
            self._stage_of[op.name] = number
        self.decided = {value.name: self._decided_at(value) for value in self.program.values}
        self.stages = [self._stage(number) for number in range(len(self.program.forward))]
        self._choices = {value.name: self._choices_of(value) for value in self.program.values}

    def _decided_at(self, value: Value) -> int:
        """The stage that decides a value; -1 of the store's own."""
        if value.kind == "gradient" and value.backward:
            return self._stage_of[value.backward[-1]]
        return self._stage_of[value.made_by] if value.made_by else -1

    def _stage(self, number: int) -> PlacementStage:
        op = self.program.forward[number]
        backwards = tuple(each for each in self.program.backward if self._stage_of[each.name] == number)
        decides = tuple(value for value in self.program.values if self.decided[value.name] == number)
        known = tuple(v.name for v in self.program.values if self.decided[v.name] < number <= self._last(v))
        own = frozenset(value.name for value in decides)
        return PlacementStage(number, op, backwards, sums_of(self.program, op), decides, known, own)

    def _last(self, value: Value) -> int:
        """The last stage whose ops meet a value."""
        if value.name == self.costs.edges:
            return len(self.program.forward)
        met = [op for op in self.program.ops if value.name in (*op.reads, *op.writes, op.summed, op.scatters)]
        return max((self._stage_of[op.name] for op in met), default=-1)

    # --- choices ---

    def choices(self, value: Value) -> list[ValueChoice]:
        """What can become of a value, in a machine with these tiers."""
        return self._choices[value.name]

    def _choices_of(self, value: Value) -> list[ValueChoice]:
        """See `choices`.

        Rows that are needed all through the backward pass, or at once, are not made again where they can be kept: once made
        they would stand as long, so nothing would be won.
        """
        tiers = (TensorPlacement.RETAINED, *self.costs.profile.tiers)
        found = [ValueChoice(where, where) for where in value.placements if where in tiers]
        again = TensorPlacement.RECOMPUTED in value.placements
        if value.kind != "rows":
            found += [ValueChoice(TensorPlacement.RECOMPUTED, TensorPlacement.DISK)] * again
            waits = value.kind not in ("sums", "saved") or value.backward or value.constant
            return found if waits else found[-1:]  # else it is not kept anyway
        if again and not (found and self._in_vain(value)):
            found += [
                ValueChoice(TensorPlacement.RECOMPUTED, tier)
                for tier in (TensorPlacement.RETAINED, TensorPlacement.DISK)
                if tier in tiers
            ]
        if value.backward or value.constant:
            return found
        return [choice._replace(needed=False) for choice in found] + found * self._summed_again(value)

    def _in_vain(self, value: Value) -> bool:
        """Whether a value would stand as long as if it were kept."""
        needed, made = [self._stage_of[name] for name in value.backward], self.decided[value.name]
        return bool(needed) and (needed[0] <= made or max(needed) > made + 1)

    def _summed_again(self, value: Value) -> bool:
        """Whether there are sums of a value that the backward pass may make again."""
        found = [sums_of(self.program, op) for op in self.program.forward if op.summed == value.name]
        return any(sums and self.values[sums].backward for sums in found)

    def kept(self, value: Value, choice: ValueChoice) -> bool:
        """Whether a value stands from when it is made until it is needed in the backward pass."""
        if value.kind == "features":
            return choice.standing is not TensorPlacement.DISK
        if choice.where is TensorPlacement.RECOMPUTED or value.kind == "gradient":
            return False
        return value.constant or (choice.needed if value.kind == "rows" else bool(value.backward))

    def made_again(self, value: Value, choice: ValueChoice) -> bool:
        """Whether these are rows that the backward pass makes again."""
        return value.kind == "rows" and choice.where is TensorPlacement.RECOMPUTED and choice.needed

    # --- tables ---

    def tables(self, stage: PlacementStage, known: Known) -> Tables:
        """Of all options of a stage, in the order of `options`."""
        fixed, count = self._anyway(stage), len(stage.decides)
        for name in stage.known:
            fixed = fixed + self._cells(stage, self.values[name], known[name], known)
        node_scans, kept, shape = fixed[(None,) * count], np.zeros((1,) * count + (3,)), []
        for axis, value in enumerate(stage.decides):
            choices = self.choices(value)
            at = (None,) * axis + (slice(None),) + (None,) * (count - axis - 1)
            node_scans = node_scans + np.stack([self._cells(stage, value, choice, known) for choice in choices])[at]
            kept = kept + np.stack([self.kept_bytes(value, choice) for choice in choices])[at]
            shape.append(len(choices))
        node_scans = np.broadcast_to(node_scans, (*shape, *fixed.shape)).reshape((-1, *fixed.shape)).copy()
        kept = np.broadcast_to(kept, (*shape, 3)).reshape((-1, 3))
        self._skip(stage, node_scans)
        return Tables(node_scans, kept)

    def options(self, stage: PlacementStage) -> Ints:
        """What each option of a stage picks: int64[options, values it decides], places in their `choices`."""
        counts = [len(self.choices(value)) for value in stage.decides]
        return np.array(list(np.ndindex(*counts)), np.int64).reshape(-1, len(counts)) if counts else np.zeros((1, 0), np.int64)

    def picked(self, stage: PlacementStage, option: Ints) -> dict[str, ValueChoice]:
        """The choices of an option: of values by name."""
        return {v.name: self.choices(v)[at] for v, at in zip(stage.decides, option, strict=True)}

    def kept_bytes(self, value: Value, choice: ValueChoice) -> Floats:
        found = np.zeros(3)
        if self.kept(value, choice):
            found[TIERS.index(choice.standing)] = self.costs.size(value.name)
        return found

    def _skip(self, stage: PlacementStage, node_scans: Floats) -> None:
        """An op is left out where all that it makes is there from an earlier epoch."""
        made = [value for value in stage.decides if value.name in stage.op.writes]
        if stage.op.turns or not all(value.constant for value in made):
            return
        for number, option in enumerate(self.options(stage)):
            picked = self.picked(stage, option)
            if all(picked[value.name].where is not TensorPlacement.RECOMPUTED for value in made):
                node_scans[number, 0, ROWS.start : LEAST] = 0

    def _anyway(self, stage: PlacementStage) -> Floats:
        """What the ops of a stage ask for whatever is chosen."""
        cells, profile = np.zeros((1 + len(stage.backwards), _COLUMNS)), self.costs.profile
        for own, op in zip(cells, (stage.op, *stage.backwards), strict=True):
            own[ROWS.start] = profile.op(op.name).rows_s
            own[ALIVE.start] = profile.op(op.name).workspace
            if op.kind == "gather":
                self._gather(own, self.costs.gathered(op, int(op.turns)))
            if op.backward and not any(self.values[name].kind == "saved" for name in op.reads):
                own[ROWS.start] += profile.op(op.repeats).rows_s
            if op.summed and (op.backward or (not stage.sums and op.kind != "gather")):
                own[ADDS.start] += profile.op(op.name).sums_s
                own[ADD_PASS.start] += profile.op(op.name).pass_s
                own[UNIT] += self.costs.width(op.summed) * self.program.cell_rows
            own[LEAST] = max(own[LEAST], own[UNIT])
        return cells

    @staticmethod
    def _gather(cells: Floats, ranges: Ranges) -> None:
        cells[[UNIT, SOURCE, ALL_SOURCES, LEAST]] = ranges[1:5]

    def _keep(self, cells: Floats, op: Op, where: TensorPlacement) -> None:
        """What autograd keeps of ranges that are gathered, beside what stands as a value."""
        more, bare = self.costs.gathered(op, self.costs.kept_of(op, where)), self.costs.gathered(op, 0)
        for column, own, known in zip((UNIT, SOURCE, ALL_SOURCES, LEAST), more[1:5], bare[1:5], strict=True):
            cells[column] += own - known

    def _cells(self, stage: PlacementStage, value: Value, choice: ValueChoice, known: Known) -> Floats:
        """What a value adds to each scan of a stage."""
        cells = np.zeros((1 + len(stage.backwards), _COLUMNS))
        self._run_forward(stage, value, choice, known, cells[0])
        for number, op in enumerate(stage.backwards, 1):
            self._run_backward(stage, op, value, choice, known, cells[number])
        return cells

    def _move(self, cells: Floats, columns: slice, name: str, tier: TensorPlacement, read: float, written: float) -> None:
        if tier in MOVED:
            size = self.costs.size(name)
            at = columns.stop - len(MOVED) + MOVED.index(tier)
            cells[at] += self.costs.move_s((read * size, written * size), tier)

    def _adds(self, cells: Floats, source: str, known: Known) -> None:
        """Sums of a value of the forward pass along the edges."""
        sums_s, pass_s = self.costs.adding_s(source)
        self._move(cells, ADD_PASS, source, known[source].standing, 1, 0)
        if self.costs.edges:
            self._move(cells, ADDS, self.costs.edges, known[self.costs.edges].standing, 0.5, 0)
        cells[UNIT] += self.costs.width(source) * self.program.cell_rows
        cells[ADDS.start] += sums_s
        cells[ADD_PASS.start] += pass_s

    def _run_forward(self, stage: PlacementStage, value: Value, choice: ValueChoice, known: Known, cells: Floats) -> None:
        """What a value adds to the forward pass."""
        name, tier, op, size = value.name, choice.standing, stage.op, self.costs.space(value.name, choice.standing)
        kept, moment = self.kept(value, choice), stage.number
        fresh = kept and name in stage.own
        passes = not kept and value.kind == "rows" and self.at[value.made_by] <= moment <= self.at.get(value.last_forward, -1)
        turned = value.kind == "gradient" and value.made_by == op.name
        if fresh or passes or turned:
            cells[TIERS.index(tier)] += size
        if name in op.reads:
            self._move(cells, ROWS, name, tier, 1, 0)
        if name in op.writes and (passes or turned or (fresh and not value.constant)):
            self._move(cells, ROWS, name, tier, 0, 1)
        if name == op.summed and (op.kind == "gather" or not stage.sums):
            self._move(cells, ROW_PASS if op.kind == "gather" else ADD_PASS, name, tier, 1, 0)
        if name == op.scatters:
            self._move(cells, ROW_PASS, name, tier, 1, 1)
            self._move(cells, ROWS, name, tier, 0, value.made_by == op.name)  # it begins with zeros
        if value.name == self.costs.edges and op.summed and op.kind == "sum" and not stage.sums:
            self._move(cells, ADDS, name, tier, 0.5, 0)
        if name in op.writes and op.kind == "gather" and value.kind == "saved":
            self._keep(cells, op, choice.where)
        if name == stage.sums:
            self._sums_forward(stage, value, choice, known, cells)

    def _sums_forward(self, stage: PlacementStage, value: Value, choice: ValueChoice, known: Known, cells: Floats) -> None:
        """What the sums of a stage's op, or their being there, add to its forward pass."""
        kept, source = self.kept(value, choice), stage.op.summed
        width = self.costs.width(source) * self.program.cell_rows
        cells[LEAST] = 0 if kept and choice.standing is TensorPlacement.RETAINED else width
        if kept and value.constant:
            self._move(cells, ROWS, value.name, choice.standing, 1, 0)
        else:
            self._adds(cells, source, known)
            cells[UNIT] = cells[LEAST]
        own = self.values[source]
        if own.kind == "rows" and not (own.backward or own.constant):
            wanted = bool(value.backward) and choice.where is TensorPlacement.RECOMPUTED
            cells[LEAST] = np.inf if wanted != known[source].needed else cells[LEAST]

    def _run_backward(
        self, stage: PlacementStage, op: Op, value: Value, choice: ValueChoice, known: Known, cells: Floats
    ) -> None:
        """What a value adds to a scan of the backward pass."""
        name, tier, costs = value.name, choice.standing, self.costs
        moment, gone = self.at[op.name], choice.where is TensorPlacement.RECOMPUTED
        last = self.at[value.backward[-1]] if value.backward else -1
        if value.kind == "gradient":
            stands = self.at[value.made_by] <= moment <= last
        else:
            again = self.made_again(value, choice) and last >= moment
            stands = name in stage.own and (again or (self.kept(value, choice) and (value.constant or last >= moment)))
        if stands:
            cells[TIERS.index(tier)] += costs.space(name, tier)
            if value.made_by != op.name:
                cells[BEFORE.start + TIERS.index(tier)] += costs.space(name, tier)
        gathers = op.kind == "gather" and name == stage.op.summed
        if name in op.reads and not gathers and not (gone and value.kind in ("sums", "saved")):
            self._move(cells, ROWS, name, tier, 1, 0)
        if name in op.writes:
            self._move(cells, ROWS, name, tier, value.made_by != op.name, 1)
        if name == op.summed:
            self._move(cells, ADD_PASS, name, tier, 1, 0)
        if gathers and name in op.reads:
            self._move(cells, ROW_PASS, name, tier, 1, 0)
        if name == op.scatters:
            self._move(cells, ROW_PASS, name, tier, 1, 1)
            self._move(cells, ROWS, name, tier, 0, value.made_by == op.name)  # it begins with zeros
        if value.name == self.costs.edges and op.summed:
            self._move(cells, ADDS, name, tier, 0.5, 0)
        if name in op.reads and op.kind == "gather" and value.kind == "saved":
            self._keep(cells, op, choice.where)
        if name in op.reads and gone and value.kind == "saved":
            cells[ROWS.start] += costs.profile.op(op.repeats).rows_s
        if name in op.reads and gone and value.kind == "sums":
            self._adds(cells, costs.ops[value.made_by].summed, known)

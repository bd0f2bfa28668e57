"""PURE: what each choice for each value adds to the loads of the ops that meet it: a step, taken apart for the search.

The ops of the forward pass are stages. A stage decides the placements of what its op makes, and of the gradients that its ops
in the backward pass read last. All that these ops ask for is a sum over values, so a table of all options is a sum of small
ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ooc.fullgraph.placement.costs import CELLS, StepCosts
from ooc.fullgraph.placement.op_costs import MOVED, TIERS, Floats, Ints
from ooc.fullgraph.program import GONE, TensorPlacement, Value
from ooc.layerwise.pass_plan import Op

ROWS, ADDS, ROW_PASS, ADD_PASS = slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12)
UNITS, UNIT, SOURCE, _, LEAST, MET = range(12, CELLS)
ALIVE, BEFORE, _COLUMNS = slice(CELLS, CELLS + 3), slice(CELLS + 3, CELLS + 6), CELLS + 6
"""Of a scan: the `cells` of its `RunLoad`, the least being the bytes of a unit's sums in the first epoch (infinite: what cannot
be); bytes by tier that stand meanwhile, and just before it"""


class ValueChoice(NamedTuple):
    """A value's placement, and the tier it stands in while it is used. needed: whether the backward pass needs it; where that
    depends on sums that a later stage decides, or on whether rows are INVERTED from it, both are tried, and the stage that
    knows refuses what it is not."""

    where: TensorPlacement
    standing: TensorPlacement
    needed: bool = True


Known = Mapping[str, ValueChoice]


def _depends(value: Value, choice: ValueChoice) -> bool:
    """Whether the backward pass needs a value only if it makes sums of it again."""
    stays = value.constant and choice.where is not TensorPlacement.RECOMPUTED
    return value.kind == "rows" and not value.backward and not stays


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


class Tables(NamedTuple):
    """Of all options of a stage, given what is known. node_scans: float64[options, 1 + backwards, columns], the forward pass
    first; kept: float64[options, 3], bytes that stand from now on."""

    node_scans: Floats
    kept: Floats


class Stages:
    """The stages of a program, and their tables."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs, self.program, self.values = costs, costs.program, costs.values
        self.at = costs.at
        self._stage_of, number = {op.name: number for number, op in enumerate(self.program.forward)}, 0
        for op in reversed(self.program.backward):  # one that repeats none is for the one behind it
            number = self._stage_of[op.repeats] if op.repeats else number
            self._stage_of[op.name] = number
        self.decided = {value.name: self._decided_at(value) for value in self.program.values}
        """by value the stage that decides it, -1 of the store's own"""
        self.stages = [self._stage(number) for number in range(len(self.program.forward))]
        self._undone = self.program.undone_by
        self._made_of = {value.output: value.name for value in self._undone.values()}
        """by the output of a reversible layer its rows, which may be INVERTED"""
        self.choices = {value.name: self._choices_of(value) for value in self.program.values}

    def _decided_at(self, value: Value) -> int:
        if value.kind == "gradient" and value.backward:
            return self._stage_of[value.backward[-1]]
        return self._stage_of[value.made_by] if value.made_by else -1

    def _stage(self, number: int) -> PlacementStage:
        op = self.program.forward[number]
        backwards = tuple(each for each in self.program.backward if self._stage_of[each.name] == number)
        decides = tuple(value for value in self.program.values if self.decided[value.name] == number)
        known = tuple(v.name for v in self.program.values if self.decided[v.name] < number <= self._last(v))
        return PlacementStage(number, op, backwards, self.costs.sums[op.name], decides, known)

    def _last(self, value: Value) -> int:
        """The last stage whose ops meet a value."""
        if value.name == self.costs.edges:
            return len(self.program.forward)
        met = [op for op in self.program.ops if value.name in (*op.reads, *op.writes, op.summed, op.scatters)]
        return max((self._stage_of[op.name] for op in met), default=-1)

    def _choices_of(self, value: Value) -> list[ValueChoice]:
        """What can become of a value, in a machine with these tiers.

        Rows that are needed all through the backward pass, or at once, are not made again where they can be kept: once made
        they would stand as long, so nothing would be won.
        """
        tiers = self.costs.profile.places
        found = [ValueChoice(where, where) for where in value.placements if where in tiers]
        if TensorPlacement.COMPRESSED in value.placements and value.name in self.costs.profile.packed:
            found.append(ValueChoice(TensorPlacement.COMPRESSED, TensorPlacement.RETAINED))
        again = TensorPlacement.RECOMPUTED in value.placements
        if value.kind != "rows":
            found += [ValueChoice(TensorPlacement.RECOMPUTED, TensorPlacement.DISK)] * again
            waits = value.kind not in ("sums", "saved") or value.backward or value.constant
            return found if waits else found[-1:]  # else it is not kept anyway
        needed, made = [self._stage_of[name] for name in value.backward], self.decided[value.name]
        in_vain = bool(needed) and (needed[0] <= made or max(needed) > made + 1)
        if again and not (found and in_vain):
            found += [
                ValueChoice(TensorPlacement.RECOMPUTED, tier)
                for tier in (TensorPlacement.RETAINED, TensorPlacement.DISK)
                if tier in tiers
            ]
        below = value.name in self._made_of
        if TensorPlacement.INVERTED in value.placements:
            passing = [tier for tier in (TensorPlacement.RETAINED, TensorPlacement.DISK) if tier in tiers]
            ways = [True] * below + [False]
            found += [ValueChoice(TensorPlacement.INVERTED, tier, needed) for tier in passing for needed in ways]
        if value.backward:
            return found
        if below:
            return [*found, *(choice._replace(needed=False) for choice in found)]
        sums = [self.costs.sums[op.name] for op in self.program.forward if op.summed == value.name]
        summed_again = any(name and self.values[name].backward for name in sums)
        open_yet = [choice for choice in found if _depends(value, choice)]
        unneeded = [choice._replace(needed=False) if choice in open_yet else choice for choice in found]
        return unneeded + open_yet * summed_again

    def kept(self, value: Value, choice: ValueChoice) -> bool:
        """Whether a value stands from when it is made until it is needed in the backward pass."""
        if value.kind == "features":
            return choice.standing is not TensorPlacement.DISK
        if choice.where in GONE or value.kind == "gradient":
            return False
        return value.constant or (choice.needed if value.kind == "rows" else bool(value.backward))

    def made_again(self, value: Value, choice: ValueChoice) -> bool:
        """Whether these are rows that the backward pass makes again."""
        return value.kind == "rows" and choice.where is TensorPlacement.RECOMPUTED and choice.needed

    def tables(self, stage: PlacementStage, known: Known) -> Tables:
        """Of all options of a stage, in the order of `options`."""
        fixed, count = self._anyway(stage), len(stage.decides)
        for name in stage.known:
            fixed = fixed + self._cells(stage, self.values[name], known[name], known)
        node_scans, kept, shape = fixed[(None,) * count], np.zeros((1,) * count + (3,)), []
        for axis, value in enumerate(stage.decides):
            choices = self.choices[value.name]
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
        counts = [len(self.choices[value.name]) for value in stage.decides]
        return np.array(list(np.ndindex(*counts)), np.int64).reshape(-1, len(counts)) if counts else np.zeros((1, 0), np.int64)

    def picked(self, stage: PlacementStage, option: Ints) -> dict[str, ValueChoice]:
        """The choices of an option: of values by name."""
        return {v.name: self.choices[v.name][at] for v, at in zip(stage.decides, option, strict=True)}

    def kept_bytes(self, value: Value, choice: ValueChoice) -> Floats:
        found = np.zeros(3)
        if self.kept(value, choice):
            found[TIERS.index(choice.standing)] = self.costs.size_as(value.name, choice.where)
        return found

    def _skip(self, stage: PlacementStage, node_scans: Floats) -> None:
        """An op is left out where all that it makes is there from an earlier epoch."""
        made = [value for value in stage.decides if value.name in stage.op.writes]
        if stage.op.computes_loss or not all(value.constant for value in made):
            return
        for number, option in enumerate(self.options(stage)):
            picked = self.picked(stage, option)
            if all(picked[value.name].where is not TensorPlacement.RECOMPUTED for value in made):
                node_scans[number, 0, ROWS.start : ADD_PASS.stop] = 0
                node_scans[number, 0, UNIT:LEAST] = 0

    def _anyway(self, stage: PlacementStage) -> Floats:
        """What the ops of a stage ask for whatever is chosen."""
        cells, profile = np.zeros((1 + len(stage.backwards), _COLUMNS)), self.costs.profile
        for own, op in zip(cells, (stage.op, *stage.backwards), strict=True):
            own[ROWS.start] = profile.op(op.name).rows_s
            own[UNITS], own[MET] = self.costs.units(op), self.costs.met_of(op)
            if op.kind == "gather":
                own[UNIT:MET] = self.costs.gathered(op, int(op.computes_loss))[1:5]
            if op.backward and not any(self.values[name].kind == "saved" for name in op.reads):
                own[ROWS.start] += profile.op(op.repeats).rows_s
            if op.summed and (op.backward or (not stage.sums and op.kind != "gather")):
                own[ADDS.start] += profile.op(op.name).sums_s
                own[ADD_PASS.start] += profile.op(op.name).pass_s
                own[UNIT] += self.costs.width(op.summed) * self.program.cell_rows
            own[LEAST] = max(own[LEAST], own[UNIT])
        return cells

    def _move(self, cells: Floats, columns: slice, name: str, tier: TensorPlacement, read: float, written: float) -> None:
        if self.costs.moves(name, tier):
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

    def _cells(self, stage: PlacementStage, value: Value, choice: ValueChoice, known: Known) -> Floats:
        """What a value adds to each scan of a stage."""
        cells = np.zeros((1 + len(stage.backwards), _COLUMNS))
        for own, op in zip(cells, (stage.op, *stage.backwards), strict=True):
            self._met(stage, op, value, choice, own)
            if op.backward and value.name in op.reads and choice.where is TensorPlacement.RECOMPUTED:
                if value.kind == "saved":
                    own[ROWS.start] += self.costs.profile.op(op.repeats).rows_s
                elif value.kind == "sums":
                    self._adds(own, self.costs.ops[value.made_by].summed, known)
        if value.name == stage.sums:
            self._sums_forward(stage, value, choice, known, cells[0])
        for own, op in zip(cells[1:], stage.backwards, strict=True):
            if op.name in self._undone:
                cells[0, LEAST] += self._undoes(op, value, choice, known.get(self._undone[op.name].name, choice), own)
        return cells

    def _undoes(self, op: Op, value: Value, choice: ValueChoice, rows: ValueChoice, cells: Floats) -> float:
        """What a value adds to an op where the rows of its layer (chosen: `rows`) are INVERTED; infinite: what cannot be."""
        undone, inverted = self._undone[op.name], rows.where is TensorPlacement.INVERTED
        tier = slice(ALIVE.start + TIERS.index(choice.standing), None, len(TIERS))  # while it runs, and before
        if value.kind == "saved":
            return np.inf if inverted and value.name in op.reads and choice.where is not TensorPlacement.RECOMPUTED else 0.0
        if value is undone and inverted and choice.needed:
            cells[tier.start] += self.costs.size(value.name)
            self._move(cells, ROWS, value.name, choice.standing, 0, 1)
        elif value.name == undone.output and inverted:
            cells[tier] += self.costs.size(value.name)
            self._move(cells, ROW_PASS, value.name, choice.standing, 1, 0)
        optional = value.name == undone.output and (choice.where is TensorPlacement.INVERTED or not value.backward)
        return np.inf if optional and choice.needed != inverted else 0.0

    def _met(self, stage: PlacementStage, op: Op, value: Value, choice: ValueChoice, cells: Floats) -> None:
        """What a value, where it is met, adds to the scan of an op."""
        name, tier, back, costs = value.name, choice.standing, op.backward, self.costs
        stands, written = self._stands_backward(stage, op, value, choice) if back else self._stands(op, value, choice)
        if stands:
            cells[ALIVE.start + TIERS.index(tier)] += costs.space(name, tier, choice.where)
            if value.made_by != op.name:
                cells[BEFORE.start + TIERS.index(tier)] += costs.space(name, tier, choice.where)
        if choice.where is TensorPlacement.COMPRESSED:
            cells[ROWS.start] += costs.packing(name).pack_s if name in op.writes and written else 0.0
            cells[ROWS.start] += costs.packing(name).unpack_s if name in op.reads else 0.0
        gathered = op.kind == "gather" and name == stage.op.summed and not (back and choice.where is TensorPlacement.INVERTED)
        gone = choice.where is TensorPlacement.RECOMPUTED and value.kind in ("sums", "saved")
        gone |= choice.where is TensorPlacement.INVERTED
        if name in op.reads and not (back and (gathered or gone)):
            self._move(cells, ROWS, name, tier, 1, 0)
        if name in op.writes and written:
            self._move(cells, ROWS, name, tier, value.made_by != op.name, 1)
        if gathered and (not back or name in op.reads):
            self._move(cells, ROW_PASS, name, tier, 1, 0)
        elif name == op.summed and (back or not stage.sums):
            self._move(cells, ADD_PASS, name, tier, 1, 0)
        if name == op.scatters:
            self._move(cells, ROW_PASS, name, tier, 1, 1)
            self._move(cells, ROWS, name, tier, 0, value.made_by == op.name)  # it begins with zeros
        if name == costs.edges and op.summed and (back or (op.kind == "sum" and not stage.sums)):
            self._move(cells, ADDS, name, tier, 0.5, 0)
        if value.kind == "saved" and op.kind == "gather" and name in (*op.reads, *op.writes):
            # What autograd keeps of ranges that are gathered, beside what stands as a value.
            cells[UNIT:MET] += np.subtract(costs.gathered(op, costs.kept_of(op, choice.where)), costs.gathered(op, 0))[1:5]

    def _stands(self, op: Op, value: Value, choice: ValueChoice) -> tuple[bool, bool]:
        """(whether a value that is not counted before stands while an op of the forward pass runs, whether that writes it)."""
        kept, moment = self.kept(value, choice), self.at[op.name]
        fresh = kept and self.decided[value.name] == moment
        passes = not kept and value.kind == "rows" and self.at[value.made_by] <= moment <= self.at.get(value.last_forward, -1)
        turned = value.kind == "gradient" and value.made_by == op.name
        return fresh or passes or turned, passes or turned or (fresh and not value.constant)

    def _stands_backward(self, stage: PlacementStage, op: Op, value: Value, choice: ValueChoice) -> tuple[bool, bool]:
        """The same of an op of the backward pass, which writes all that it names."""
        moment, last = self.at[op.name], self.at[value.backward[-1]] if value.backward else -1
        if value.kind == "gradient":
            return self.at[value.made_by] <= moment <= last, True
        again = self.made_again(value, choice) and last >= moment
        kept = self.kept(value, choice) and (value.constant or last >= moment)
        return self.decided[value.name] == stage.number and (again or kept), True

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
        if _depends(self.values[source], known[source]):
            wanted = bool(value.backward) and choice.where is TensorPlacement.RECOMPUTED
            cells[LEAST] = np.inf if wanted != known[source].needed else cells[LEAST]

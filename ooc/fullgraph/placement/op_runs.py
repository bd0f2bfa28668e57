"""PURE: program + placement -> the runs of a step, in order, and what stands in memory or on disk meanwhile."""

from collections.abc import Iterator
from dataclasses import dataclass

from ooc.fullgraph.program import GONE, Placement, Program, TensorPlacement, Value
from ooc.layerwise.pass_plan import Op


class NamedOps:
    """A program's values and ops by name. at: an op's number in the step; sums: by op of the forward pass, the sums that it
    makes, "" where they have no name."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values, self.ops = {value.name: value for value in program.values}, {op.name: op for op in program.ops}
        self.at = {name: number for number, name in enumerate(self.ops)}
        self.sums = {
            op.name: next((name for name in op.writes if self.values[name].kind == "sums"), "") for op in program.forward
        }


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


class RunOrder:
    """The runs of the forward pass and of the backward pass, where an op finds what it reads where the placement has it.

    Rows that are RECOMPUTED are made again before the first op that needs them, from the nearest that is kept, and stand until
    the last one is through. Sums that are RECOMPUTED are added up once more beside the op that wants them, and never stand
    anywhere. Rows that are INVERTED are written by the op of their layer, and stand until the one of the layer below is
    through. last: by value the last op in the backward pass that needs it, or something that is RECOMPUTED of it; -1 where none
    does.
    """

    def __init__(self, named: NamedOps, placement: Placement, first: bool) -> None:
        self.program, self.placement, self.first = named.program, placement, first
        self.values, self.ops, self.at, self.sums = named.values, named.ops, named.at, named.sums
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

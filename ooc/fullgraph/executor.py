"""One exact step, op by op: the forward pass, the loss, and the backward pass."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.fullgraph.activation_offload import OffloadFile, PendingChunk, PendingChunks
from ooc.fullgraph.gradients import SUMMED_GRADIENT, arriving, before_norm, inputs_of, wanted_of
from ooc.fullgraph.ir import Placement, Program, TensorPlacement, ValueKind
from ooc.fullgraph.ops import Moments, StepModules
from ooc.fullgraph.program import FullShape
from ooc.fullgraph.resume import StepLog, StepPosition, statistics_of
from ooc.fullgraph.shape import hidden_norms, norm_of
from ooc.fullgraph.value_store import ValueStore, nothing
from ooc.layerwise.executor import ForwardExecutor
from ooc.layerwise.io_stats import COMPUTE, IoStats
from ooc.layerwise.ir import Op, ValueRef
from ooc.layerwise.ops import RangeOfNodes, Tensors
from ooc.layerwise.scans import NodeChunk, NodeScans, SumRequest, sum_rows
from ooc.models.layers import recording_nothing
from stores.errors import BudgetError, StoreError

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]
"""progress(what, nodes or edges done, in all)"""
LossOf = Callable[[int, Tensor], Tensor | None]
"""loss(first, logits [n, C]) -> the share of nodes first, first + 1, ... in the loss, None where none of them counts"""


class Executor(ForwardExecutor):
    """Carries out a program's ops. parts: with this step's draws; room: bytes for values and sums; constant: values that an
    earlier step made and that are good still, added to.

    >>> Executor(program, placement, shape, parts, store, node_scans, spool, traffic, room, constant).run(loss)
    0.693
    """

    def __init__(
        self,
        program: Program,
        placement: Placement,
        shape: FullShape,
        parts: StepModules,
        store: ValueStore,
        node_scans: NodeScans,
        spool: OffloadFile | None,
        traffic: IoStats,
        room: int,
        constant: set[str],
        log: StepLog | None = None,
        progress: Progress = lambda what, done, total: None,
    ) -> None:
        super().__init__(parts, store, node_scans, traffic)
        self.program, self.placement, self.shape, self.parts = program, placement, shape, parts
        self.store, self.spool, self.traffic = store, spool, traffic
        self.room, self.constant = room, constant
        self.loss = 0.0
        self._log, self._progress = log, progress
        self._number, self._resumed_op = 0, ""
        self._made = {*constant, *(v.name for v in program.values if v.kind in ("features", "edges"))}
        self._begun: set[str] = set()
        self._adds: set[str] = set()
        """gradients that this op adds to what others left, chunk by chunk"""
        self._waiting = PendingChunks()
        self._uses = program.uses(placement)
        self._values = {value.name: value for value in program.values}
        self._own = {p.untyped_storage().data_ptr() for module in parts.present for p in module.parameters()}

    def run(self, loss: LossOf) -> float:
        """The whole step: gradients are added to the parameters'; the loss."""
        state = self._resumed()
        self._resumed_op = self.program.ops[state.op].name if state.next else ""
        self.store.left = self._left
        try:
            for number, op in list(enumerate(self.program.ops))[state.op :]:
                self._number, start = number, state.next if number == state.op else 0
                self._adds = {name for name in op.writes if name in self._begun}
                with self.traffic.op(op.name):
                    if op.backward:
                        self._run_backward(op, start)
                    else:
                        moments = state.moments if number == state.op else None
                        self._run_forward(op, self._of(op.writes, "rows", "sums", "gradient"), loss, start, moments)
                    self._drain()
                self._let_go(op)
            return self.loss
        finally:
            self._release()

    def _resumed(self) -> StepPosition:
        """Where to begin: at a note of this very step, with what it speaks of."""
        state = None if self._log is None else self._log.found()
        self.store.halves.clear()
        if state is None:
            if self._log is not None:
                self._log.forget()
            return StepPosition()
        self.loss = state.loss
        self._made |= set(state.made)
        self._begun |= set(state.begun)
        self.store.halves.update(state.halves)
        state.put_back(self.parts)
        return state

    def _record(self, op: Op, chunk: NodeChunk, moments: Moments | None = None) -> None:
        """Tell that an op came so far, and note it, where everything that is needed to go on outlives the process."""
        self.store.tidy()
        self._progress(op.name, chunk.place.stop, self.shape.model.num_nodes)
        if self._log is None or not chunk.ends or op.scatters or not self._log.due():
            return
        later = self.program.ops[self._number :]
        named = (name for each in later for name in (each.summed, *each.reads, *each.writes, each.scatters))
        needed = set(self._of(named, "gradient"))
        begun = [name for name in (*self._begun, *op.writes) if name in needed]
        if not all(self.store.on_disk(name) for name in begun):
            return
        rows = [name for name in op.writes if self._comes(name)]
        if chunk.place.stop < self.shape.model.num_nodes and not all(map(self.store.on_disk, rows)):
            return  # what is in memory alone is made again from its first row on
        made = [name for name in self._of(self._made, "rows", "sums", "gradient") if self.store.on_disk(name)]
        self._drain()
        self.store.sync([*rows, *made, *begun])
        state = StepPosition(
            self._number,
            chunk.place.stop,
            self.loss,
            made,
            sorted(self._begun),
            self.parts.draws.keys,
            statistics_of(self.parts),
            None if moments is None else moments.state,
            dict(self.store.halves),
        )
        self._log.keep(state)

    def _drain(self) -> None:
        self.store.drain()
        if self.spool is not None:
            self.spool.drain()

    # --- forward ---

    def _run_forward(
        self, op: Op, writes: list[str], loss: LossOf | None, start: int = 0, state: list[Any] | None = None
    ) -> None:
        """Run an op for the values `writes`, from node `start` on; loss: None where they were made before, and are made again;
        state: of the moments gathered before `start`."""
        inputs = inputs_of(self.shape, op)
        for name in self._of(inputs.values(), "features", "rows"):
            self._ensure(name)
        if loss is not None:
            self._begin(op)
        sums = inputs.get("sums", "")
        rows = self._of(writes, "rows")
        for name in rows:
            self.store.open(name)
        before = ValueRef("pre_norm", op.layer).name
        moments = Moments(state) if loss is not None and before in rows else None

        def compute(chunk: NodeChunk) -> Tensors:
            given = self._given(inputs, chunk)
            if op.turns and loss is not None:
                self._turn(op, chunk, given, loss)
                return {}
            return self._forward(op, chunk.place, given, loss is None)

        chunks = self._scan(op, inputs, sums in writes and self._stored(sums), [], {}, start)
        for chunk, outputs in self.forward(chunks, compute, rows):
            if moments is not None:
                moments.add(outputs[before])
            if loss is not None:
                self._record(op, chunk, moments)
        if moments is not None:
            self._normed(op.layer, moments)
        if loss is not None:
            self._added(op)
        done = [*rows, *([sums] if sums in writes and self._stored(sums) else [])]
        self._made |= {name for name in done if not start or self.store.on_disk(name)}

    def _comes(self, name: str) -> bool:
        """Whether an op's value is put anywhere, for later ops or for the backward pass."""
        kind = self._values[name].kind
        return kind != "saved" and (kind != "sums" or self._stored(name))

    def _stored(self, name: str) -> bool:
        """Whether a value is kept for the backward pass."""
        return self.placement.of(name) is not TensorPlacement.RECOMPUTED and bool(self._uses[name])

    def _forward(self, op: Op, place: RangeOfNodes, given: Tensors, again: bool) -> Tensors:
        saved = next(iter(self._of(op.writes, "saved")), "")
        if again or not saved or not self._stored(saved):
            with torch.no_grad(), self._quiet(op, again):
                return self._function(op, place)(given)
        spool = self.spool if self.placement.of(saved) is TensorPlacement.DISK else None
        live = PendingChunk(self._function(op, place), given, wanted_of(self.shape, op), self._own, spool)
        self._waiting.add(op.name, place.first, live)
        self.store.trim(self._left())
        outputs, live.outputs = live.outputs, {}
        return outputs

    def _turn(self, op: Op, chunk: NodeChunk, given: Tensors, loss: LossOf) -> None:
        """A chunk of the last op: up to the loss, and down at once."""
        live = PendingChunk(self._function(op, chunk.place), given, wanted_of(self.shape, op), self._own, None)
        out, grads = live.outputs["out"].requires_grad_(), {}
        value = loss(chunk.place.first, out)
        if value is not None:
            self.loss += float(value.detach())
            (gradient,) = torch.autograd.grad(value, out)
            grads = {"out": gradient}
        self._leave(op, chunk, live.backward(given, grads))

    def _normed(self, index: int, moments: Moments) -> None:
        dtype = torch.float64 if self.shape.itemsize == 8 else torch.float32
        self.parts.statistics[index] = moments.statistics(dtype)
        moments.record(norm_of(self.parts.layers[index]))

    # --- backward ---

    def _run_backward(self, op: Op, start: int) -> None:
        if op.kind == "add":
            self._add(op, start)
            return
        up = self.program.op(op.repeats)
        lives = self._waiting.of(up.name)
        whole = lives and up.name != self._resumed_op  # of an op that was gone on with, the first chunks are computed again
        needed = set().union(*(live.needed_inputs for live in lives.values())) if whole else None
        inputs = {part: name for part, name in inputs_of(self.shape, up).items() if needed is None or part in needed}
        more = self._of(op.reads, "gradient")
        if before_norm(self.shape, op):
            more.append(ValueRef("pre_norm", op.layer).name)
        for name in self._of([*inputs.values(), *more], "features", "rows"):
            self._ensure(name)
        self._begin(op)
        try:
            for chunk in self._scan(up, inputs, False, more, lives, start, op):
                with self.traffic.timed(COMPUTE):
                    given = self._given(inputs, chunk)
                    live = chunk.live
                    if live is not None:
                        self._waiting.begin_backward(live)
                    else:
                        with self._quiet(up, True):
                            live = PendingChunk(
                                self._function(up, chunk.place), given, wanted_of(self.shape, up), self._own, None
                            )
                    caught = live.backward(given, arriving(self.shape, self.parts, op, chunk.read))
                self._leave(op, chunk, caught)
                self._record(op, chunk)
                del chunk, given, live, caught  # before the next one comes
        finally:
            self._waiting.end(up.name)
        self._added(op)

    def _add(self, op: Op, start: int) -> None:
        """Sums of gradients alone."""
        (name,) = op.writes
        for chunk in self._scan(op, {}, False, [], {}, start, op):
            self.store.put(name, chunk.place.first, chunk.read[SUMMED_GRADIENT])
            self._record(op, chunk)
        self._added(op)

    def _begin(self, op: Op) -> None:
        """Zeros to add to, where an op is the first to add to any row of a gradient; to what is there it can be added once."""
        if not op.scatters:
            return
        if op.scatters not in self._begun:
            self.store.clear(op.scatters)
        elif self._log is not None:
            self._log.forget()

    def _added(self, op: Op) -> None:
        """An op's gradients stand there."""
        for name in self._adds:
            self.store.halves[name] = self.store.other_half(name)
        self._begun |= set(self._of((*op.writes, op.scatters), "gradient"))

    def _leave(self, op: Op, chunk: NodeChunk, caught: Tensors) -> None:
        """Put the gradients of a chunk's inputs where the ops below find them."""
        index, place = op.layer, chunk.place
        if op.scatters and "rows" in caught:
            self.store.add(op.scatters, place.at["sources"], caught["rows"].numpy())
        own = self.shape.own_gradient(index)
        refs = {
            "sums": ValueRef("sums", index, gradient=True),
            "self": own,
            "initial": ValueRef("initial", gradient=True),
            "pre_norm": ValueRef("pre_norm", index, gradient=True),
        }
        for part, ref in refs.items():
            name = "" if ref is None else ref.name
            if name not in op.writes:
                continue
            gradient = caught.get(part)
            if gradient is None:
                shape = (place.stop - place.first, self._values[name].columns)
                gradient = torch.zeros(shape, dtype=torch.float64 if self.shape.itemsize == 8 else torch.float32)
            if part == "sums" and self.shape.model.layers[index].kind == "mean":
                gradient = gradient * torch.from_numpy(self.node_scans.inverse_degree(place.first, place.stop))[:, None]
            if name in self._adds:
                gradient = gradient + torch.from_numpy(self.store.read(name, place.first, place.stop))
                self.store.put(name, place.first, gradient.numpy(), self.store.other_half(name))
            else:
                self.store.put(name, place.first, gradient.numpy())

    # --- both passes ---

    def _scan(
        self,
        up: Op,
        inputs: dict[str, str],
        keep: bool,
        more: list[str],
        lives: dict[int, PendingChunk],
        start: int,
        down: Op | None = None,
    ) -> Iterator[NodeChunk]:
        """The chunks of an op from node `start` on, and what it reads; keep: whether its sums become a value."""
        summed, model = [], self.shape.model
        kind = model.layers[up.layer].kind
        sums = inputs.get("sums", "")
        if sums and sums not in self._made:
            assert kind is not None
            self._ensure(up.summed)
            summed.append(SumRequest(sums, up.summed, kind, False, keep))
        if down is not None and down.summed:
            above = model.layers[down.layer + (down.kind not in ("map", "add"))].kind
            assert above is not None
            summed.append(SumRequest(SUMMED_GRADIENT, down.summed, "sum" if above == "mean" else above, True, False))
        made = {each.name for each in summed}
        names = list(dict.fromkeys(name for name in (*inputs.values(), *more) if name not in made))
        self.store.trim(0 if up.kind == "gather" else self._left())
        if up.kind == "gather":
            memory = self.placement.ranges.get(up.name, self.room // 2)  # the rest is for what autograd keeps
            others = [name for part, name in inputs.items() if part != "rows"]
            ranges = self.node_scans.ranges(up.layer, memory, start)
            if ranges not in ([], [(0, model.num_nodes)]) and hidden_norms(self.parts.layers[up.layer]):
                raise BudgetError(f"layer {up.layer} normalises over all nodes inside, and memory holds only some: give more")
            return self.node_scans.gathered(up.summed, [*others, *more], ranges, lives)
        stay = [
            each for each in summed if each.keep and self.placement.of(each.name) is not TensorPlacement.DISK
        ]  # made where they are
        columns = sum(self.store.rows(each.source).shape[1] for each in summed if each not in stay)
        rows = model.num_nodes
        if columns:
            rows = sum_rows(self._left(), columns, self.shape.itemsize, self.program.cell_rows)
        return self.node_scans.rows(names, summed, rows, lives, start, edges=up.kind == "sum")

    def _left(self) -> int:
        """Bytes for sums, and for arrays that wait for their next use."""
        return self.room - self.store.memory_bytes - self._waiting.nbytes - self.node_scans.sum_bytes

    def _of(self, names: Iterable[str], *kinds: ValueKind) -> list[str]:
        """Those of some values that are of these kinds."""
        return [name for name in names if name and self._values[name].kind in kinds]

    def _given(self, inputs: dict[str, str], chunk: NodeChunk) -> Tensors:
        spooled = 0 if self.spool is None else self.spool.nbytes
        self.traffic.sample(
            self.store.memory_bytes + self._waiting.nbytes + self.node_scans.sum_bytes, self.store.disk.nbytes + spooled
        )
        return self.given(inputs, chunk)

    def _function(self, op: Op, place: RangeOfNodes) -> Callable[[Tensors], Tensors]:
        def function(given: Tensors) -> Tensors:
            with self.parts.draws.fixed(op.name, place.first):
                return self.parts.norm(op.layer, given, place) if op.kind == "norm" else self.compute(op, place, given)

        return function

    def _quiet(self, op: Op, again: bool) -> Any:
        """Running statistics stay as they are where rows are computed a second time."""
        return recording_nothing(self.parts.layers[op.layer]) if again and op.kind == "gather" else nullcontext()

    def _ensure(self, name: str) -> None:
        """Make a value again that is gone."""
        if name in self._made:
            return
        op = self.program.op(self.program.value(name).made_by)
        wanted = [each for each in self._of(op.writes, "rows") if each not in self._made]
        with self.traffic.op(f"{op.name} again"):
            self._run_forward(op, wanted, None)
            self._drain()

    def _let_go(self, op: Op) -> None:
        """Values whose last use this op was."""
        for value in self.program.values:
            name, uses = value.name, self._uses[value.name]
            if value.kind in ("features", "edges", "saved"):
                continue
            kept = bool(uses) and (op.backward or self.placement.of(name) is not TensorPlacement.RECOMPUTED)
            last = uses[-1] if kept else value.last_forward
            if last == op.name and not (value.constant and self._stored(name)):
                self.store.drop(name)
                self._made.discard(name)
        self.constant |= {v.name for v in self.program.values if v.constant and v.name in self._made and v.kind == "sums"}

    def _release(self) -> None:
        """Let all go but what the next step can use."""
        self.store.left = nothing
        with suppress(StoreError):  # of a step that failed: no write may outlive its file, nor tell the next step
            self._drain()
        self._waiting.end_all()
        for value in self.program.values:
            if value.kind in ("rows", "sums", "gradient") and value.name not in self.constant:
                self.store.drop(value.name)
        if self.spool is not None:
            self.spool.clear()

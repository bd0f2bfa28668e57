"""One exact step, op by op: the forward pass, the loss, and the backward pass."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ooc.fullgraph.activation_offload import CompressedMemory, OffloadFile, OffloadMemory, PendingChunk
from ooc.fullgraph.halo.exchange import HaloExchange
from ooc.fullgraph.ops import SUMMED_GRADIENT, Moments, StepModules, before_norm, wanted_of
from ooc.fullgraph.program import GONE, Program, TensorPlacement, ValueKind
from ooc.fullgraph.resume import StepLog, StepPosition, statistics_of
from ooc.fullgraph.value_store import ValueStore
from ooc.layerwise.aggregator import mean_factors
from ooc.layerwise.executor import ForwardExecutor, NodeChunk, NodeScans, SumRequest, sum_rows
from ooc.layerwise.io_stats import COMPUTE, EXCHANGE
from ooc.layerwise.layerwise_pass import Progress
from ooc.layerwise.ops import RangeOfNodes, Tensors, inputs_of
from ooc.layerwise.pass_plan import Op, ValueRef
from ooc.layerwise.shape import gather_ranges, hidden_norms, norm_of
from ooc.models.compression import step_key
from ooc.models.layers import recording_nothing
from ooc.models.quantization import Compression
from ooc.runtime.keyed_random import numbered
from ooc.runtime.memory_plan import gathered_share
from ooc.runtime.ranks import ALONE
from ooc.runtime.transfer import HostCopy
from ooc.stores.errors import BudgetError, StoreError

LossOf = Callable[[int, Tensor], Tensor | None]
"""loss(first, logits [n, C]) -> the share of nodes first, first + 1, ... in the loss, None where none of them counts"""


class Executor(ForwardExecutor):
    """Carries out a program's ops, as the store places their values. modules: with this step's draws; offload: None without a
    disk; room: bytes for values and sums; constant: values that an earlier step made and that are still valid, added to; halo:
    rows that other ranks compute, None where one process computes all."""

    modules: StepModules
    store: ValueStore

    def __init__(
        self,
        program: Program,
        modules: StepModules,
        store: ValueStore,
        scans: NodeScans,
        offload: OffloadFile | None,
        room: int,
        constant: set[str],
        log: StepLog | None = None,
        progress: Progress = lambda what, done, total: None,
        halo: HaloExchange | None = None,
        compress: Compression | None = None,
    ) -> None:
        super().__init__(modules, store, scans)
        self._compress, self._step_key = compress, step_key()
        self._halo, self._ranks = halo, ALONE if halo is None else halo.ranks
        self.program, self.shape, self.placement = program, modules.shape, store.placement
        self.offload, self.room, self.constant = offload, room, constant
        self._loss = 0.0
        self._losses: list[Tensor] = []
        """of chunks, which were not read yet"""
        self._log, self._progress = log, progress
        self._logged: set[str] = set()
        """values that the log's last entry relies on"""
        self._number, self._resumed_op = 0, ""
        self._made = {*constant, *(v.name for v in program.values if v.kind in ("features", "edges"))}
        self._begun: set[str] = set()
        self._adds: set[str] = set()
        """gradients that this op adds to what others left, chunk by chunk"""
        self._pending: dict[str, dict[int, PendingChunk]] = {}
        """chunks between their forward and their backward, by op and first destination"""
        self.pending_bytes = 0
        """of memory that they take"""
        self._uses = program.uses(self.placement)
        self._values = {value.name: value for value in program.values}
        self._own = {p.untyped_storage().data_ptr() for module in modules.present for p in module.parameters()}

    def run(self, loss: LossOf) -> float:
        """The whole step: gradients are added to the parameters'; the loss."""
        position = self._resumed()
        self._resumed_op = self.program.ops[position.op].name if position.next else ""
        self.store.left = self._left
        try:
            for number, op in list(enumerate(self.program.ops))[position.op :]:
                resumed = number == position.op
                self._number, start = number, position.next if resumed else 0
                self._adds = {name for name in op.writes if name in self._begun}
                with self.stats.op(op.name):
                    if op.backward:
                        self._run_backward(op, start)
                    else:
                        writes = self._of(op.writes, "rows", "sums", "gradient")
                        self._run_forward(op, writes, loss, start, position.moments if resumed else None)
                    self._drain()
                    self._share(op)
                self._drop_unused(op)
                if op.scatters and self._log is not None and self._log.due():
                    self._keep(number + 1)
            return self.loss
        finally:
            self._release()

    @property
    def loss(self) -> float:
        """So far; on a GPU it is waited for."""
        if self._losses:
            (values,) = HostCopy([torch.stack(self._losses)]).tensors()
            self._loss = sum(values.tolist(), self._loss)
            self._losses.clear()
        return self._loss

    def _resumed(self) -> StepPosition:
        """Where to begin: where a log of this very step ends, with what it says is made."""
        position = None if self._log is None else self._log.found()
        self.store.halves.clear()
        if position is None:
            self._forget()
            return StepPosition()
        self._loss = position.loss
        self._made |= set(position.made)
        self._begun |= set(position.begun)
        self.store.halves.update(position.halves)
        position.put_back(self.modules)
        self._logged = {*position.made, *position.begun, *self.program.ops[position.op].writes}
        return position

    def _forget(self) -> None:
        """End the log, before what it relies on is changed otherwise."""
        self._logged = set()
        if self._log is not None:
            self._log.forget()

    def _record(self, op: Op, chunk: NodeChunk, moments: Moments | None = None) -> None:
        """Report how far an op came, and log it, where everything that is needed to go on outlives the process."""
        self.store.tidy()
        self._progress(op.name, chunk.place.stop, self.shape.destinations(op))
        if self._log is None or not chunk.ends or op.scatters or not self._log.due():
            return
        rows = [name for name in op.writes if self._kept(name)]
        if chunk.place.stop >= self.shape.num_nodes or all(map(self.store.on_disk, rows)):
            self._keep(self._number, chunk.place.stop, rows, moments)  # rows in memory alone are made again from the first on

    def _keep(self, number: int, stop: int = 0, writes: Iterable[str] = (), moments: Moments | None = None) -> bool:
        """Log that the step came to node `stop` of op `number`, which has put rows of `writes`; False where it could not go on
        from there, as another process has not what it needs."""
        assert self._log is not None
        later = self.program.ops[number:]
        named = (name for each in later for name in (each.summed, *each.reads, *each.writes, each.scatters))
        needed = set(self._of(named, "gradient"))
        begun = [name for name in (*self._begun, *writes) if name in needed]
        inverted = [v.name for v in self.program.undone_by.values() if self.placement.of(v.name) is TensorPlacement.INVERTED]
        if not later or not all(self.store.on_disk(name) for name in (*begun, *inverted)):
            return False
        made = [name for name in self._of(self._made, "rows", "sums", "gradient") if self.store.on_disk(name)]
        self._drain()
        self.store.sync([*writes, *made, *begun])
        reached, halves = (number, stop, self.loss), dict(self.store.halves)
        state = self.modules.draws.keys, statistics_of(self.modules), None if moments is None else moments.state
        self._logged |= {*writes, *made, *begun}  # and what the entry before relies on, until this one stands
        self._log.keep(StepPosition(*reached, made, sorted(self._begun), *state, halves))
        self._logged = {*writes, *made, *begun}
        return True

    def _share(self, op: Op) -> None:
        """With the other ranks, once an op is done: gradients of the halo's rows, and of statistics over all nodes."""
        if self._halo is None:
            return
        gradient = op.scatters or (op.writes[0] if op.kind == "add" else "")
        if gradient:
            with self.stats.timed(EXCHANGE):
                self._halo.push(self.store, gradient, op.layer)
        if op.kind == "norm" and (op.backward or op.computes_loss):
            self.modules.statistics[op.layer].share(self._ranks)

    def _pull(self, names: Iterable[str]) -> None:
        """The halo's rows of those of some values that layers read along edges, once their own rows are made."""
        if self._halo is None:
            return
        along = {op.summed: op.layer for op in self.program.forward}
        self._drain()
        with self.stats.timed(EXCHANGE):
            for name in names:
                if name in along:
                    self._halo.pull(self.store, name, along[name])

    def _drain(self) -> None:
        self.store.drain()
        if self.offload is not None:
            self.offload.drain()

    # --- forward ---

    def _run_forward(
        self, op: Op, writes: list[str], loss: LossOf | None, start: int = 0, state: list[Any] | None = None
    ) -> None:
        """Run an op for the values `writes`, from node `start` on. loss: None where they were made before, and are made again;
        state: of the moments gathered before `start`."""
        inputs = inputs_of(self.shape, op)
        self._ensure(inputs.values())
        if loss is not None:
            self._begin(op)
        sums, rows = inputs.get("sums", ""), self._of(writes, "rows")
        for name in rows:
            self.store.open(name)
        before = ValueRef("pre_norm", op.layer).name
        moments = Moments(state) if loss is not None and before in rows else None

        def compute(chunk: NodeChunk) -> Tensors:
            given = self.given(inputs, chunk)
            if op.computes_loss and loss is not None:
                self._end_forward(op, chunk, given, loss)
                return {}
            return self._forward(op, chunk.place, given, loss is None)

        keeps = sums in writes and self._stored(sums)
        for chunk in self._scan(op, inputs, start, keep=keeps):
            outputs = self.run_chunk(chunk, compute, rows)
            if moments is not None and chunk.place.first < self.shape.num_nodes:  # each node once, at the rank that it is of
                moments.add(outputs[before][: self.shape.num_nodes - chunk.place.first])
            if loss is not None:
                self._record(op, chunk, moments)
        self._pull(rows)
        if moments is not None:
            moments.share(self._ranks)
            self.modules.statistics[op.layer] = moments.statistics(self._dtype)
            moments.record(norm_of(self.modules.layers[op.layer]))
        if loss is not None:
            self._added(op)
        self._made |= {name for name in (*rows, *([sums] if keeps else [])) if not start or self.store.on_disk(name)}

    def _kept(self, name: str) -> bool:
        """Whether an op's value is put anywhere, for later ops or for the backward pass."""
        kind = self._values[name].kind
        return kind != "saved" and (kind != "sums" or self._stored(name))

    def _stored(self, name: str) -> bool:
        """Whether a value is kept for the backward pass."""
        return self.placement.of(name) not in GONE and bool(self._uses[name])

    def _forward(self, op: Op, place: RangeOfNodes, given: Tensors, repeated: bool) -> Tensors:
        saved = next(iter(self._of(op.writes, "saved")), "")
        if repeated or not saved or not self._stored(saved):
            with torch.no_grad(), self._quiet(op, repeated):
                return self._function(op, place)(given)
        where = self.placement.of(saved)
        pending = self._run_pending(op, place, given, where)
        if where is TensorPlacement.DEVICE:
            pending.nbytes = 0  # of RAM
        self._pending.setdefault(op.name, {})[place.first] = pending
        self.pending_bytes += pending.nbytes
        self.store.trim(self._left())
        outputs, pending.outputs = pending.outputs, {}
        return outputs

    def _end_forward(self, op: Op, chunk: NodeChunk, given: Tensors, loss: LossOf) -> None:
        """A chunk of the last op: the loss, and its gradients at once."""
        pending = self._run_pending(op, chunk.place, given)
        out, grads = pending.outputs["out"].requires_grad_(), {}
        value = loss(_first_of(chunk.place), out)
        if value is not None:
            self._losses.append(value.detach())
            (gradient,) = torch.autograd.grad(value, out)
            grads = {"out": gradient}
        self._put_gradients(op, chunk, pending.backward(given, grads))

    def _run_pending(
        self, op: Op, place: RangeOfNodes, given: Tensors, where: TensorPlacement = TensorPlacement.DEVICE
    ) -> PendingChunk:
        """Run the forward of a chunk whose backward follows. where: what autograd keeps goes; it stays where it is computed
        if that is at once."""
        offload: OffloadFile | OffloadMemory | CompressedMemory | None = None
        if where is TensorPlacement.DISK:
            offload = self.offload
        elif where is TensorPlacement.COMPRESSED:
            assert self._compress is not None, "allowed"
            own = numbered(numbered(self._step_key, 1 + self.program.forward.index(op)), 1 + place.first)
            offload = CompressedMemory(self._compress, own)
        elif where is TensorPlacement.RETAINED and self.modules.device.type != "cpu":
            offload = OffloadMemory()
        return PendingChunk(self._function(op, place), given, wanted_of(self.shape, op), self._own, offload)

    # --- backward ---

    def _run_backward(self, op: Op, start: int) -> None:
        if op.kind == "add":  # sums of gradients alone
            for chunk in self._scan(op, {}, start, backward=op):
                self.store.put(op.writes[0], chunk.place.first, chunk.read[SUMMED_GRADIENT])
                self._record(op, chunk)
            self._added(op)
            return
        forward, inputs, made = self._undone(op)
        more = self._of(op.reads, "gradient")
        if before_norm(self.shape, op):
            more.append(ValueRef("pre_norm", op.layer).name)
        self._ensure([*inputs.values(), *more])
        self._begin(op)
        try:
            for chunk in self._scan(forward, inputs, start, more=more, backward=op):
                with self.stats.timed(COMPUTE):
                    given = self.given(inputs, chunk)
                    pending = self._computed(forward, chunk, given)
                self._put_inverted(made, chunk.place.first, pending.outputs)
                with self.stats.timed(COMPUTE):
                    caught = pending.backward(given, self.modules.arriving(op, chunk.place, chunk.read))
                self._put_gradients(op, chunk, caught)
                self._record(op, chunk)
                del chunk, given, pending, caught  # before the next one comes
        finally:
            self._end_pending(forward.name)
        self._made |= {*made}
        self._added(op)

    def _put_inverted(self, names: list[str], first: int, outputs: Tensors) -> None:
        """Put the rows of a chunk that its op makes again; they are taken from `outputs`."""
        for name, rows in zip(names, self.store.computed([outputs.pop(name) for name in names]), strict=True):
            self.store.put(name, first, rows)

    def _undone(self, op: Op) -> tuple[Op, dict[str, str], list[str]]:
        """(the forward op that an op undoes, which of its inputs are read for that, which rows are made again meanwhile)."""
        forward, inverted = self.program.op(op.repeats), self.program.inverted(op, self.placement)
        inputs, kept = inputs_of(self.shape, forward), self._pending.get(forward.name, {})
        if inverted is not None:
            made = [inverted.name] if self._uses[inverted.name] else []
            return replace(forward, summed=inverted.output), {**inputs, "rows": inverted.output}, made
        if kept and forward.name != self._resumed_op:  # of an op that was resumed, the first chunks are computed again
            needed = set().union(*(each.needed_inputs for each in kept.values()))
            inputs = {part: name for part, name in inputs.items() if part in needed}
        return forward, inputs, []

    def _computed(self, forward: Op, chunk: NodeChunk, given: Tensors) -> PendingChunk:
        """A chunk whose forward is done, once more where nothing was kept of it."""
        pending: PendingChunk | None = chunk.fetched
        if pending is not None:
            self.pending_bytes -= pending.nbytes
            pending.nbytes = 0
        else:
            with self._quiet(forward, True):
                pending = self._run_pending(forward, chunk.place, given)
        return pending

    def _end_pending(self, op: str) -> None:
        """Drop an op's chunks, those too whose backward did not begin."""
        for pending in self._pending.pop(op, {}).values():
            self.pending_bytes -= pending.nbytes
            pending.end()

    def _begin(self, op: Op) -> None:
        """Zeros to add to, where an op is the first to add to any row of a gradient; to what is there it can be added once."""
        if not op.scatters:
            return
        if op.scatters not in self._begun:
            self.store.clear(op.scatters)
        else:
            self._forget()

    def _added(self, op: Op) -> None:
        """All gradients of an op are put."""
        for name in self._adds:
            self.store.halves[name] = self.store.other_half(name)
        self._clear_rest(op)
        self._begun |= set(self._of((*op.writes, op.scatters), "gradient"))

    def _clear_rest(self, op: Op) -> None:
        """Zeros behind the destinations of an op in gradients that have more rows: of nodes of earlier layers alone."""
        if self._halo is None or op.kind == "add":
            return
        rest = [name for name in self._of(op.writes, "gradient") if self._values[name].rows > self.shape.destinations(op)]
        if rest:
            self._drain()
        for name in rest:
            self.store.clear(name, self.shape.destinations(op))

    def _put_gradients(self, op: Op, chunk: NodeChunk, caught: Tensors) -> None:
        """Put the gradients of a chunk's inputs where later ops read them."""
        index, place, store = op.layer, chunk.place, self.store
        caught = dict(zip(caught, store.computed([*caught.values()]), strict=True))
        if op.scatters and "rows" in caught:
            assert place.sources is not None
            store.add(op.scatters, place.sources, caught["rows"])
        refs = {
            "sums": ValueRef("sums", index, gradient=True),
            "self": self.shape.own_gradient(index),
            "initial": ValueRef("initial", gradient=True),
            "pre_norm": ValueRef("pre_norm", index, gradient=True),
        }
        for part, ref in refs.items():
            name = "" if ref is None else ref.name
            if name not in op.writes:
                continue
            gradient = caught.get(part)
            if gradient is None:
                gradient = store.tensor(np.zeros((place.stop - place.first, self._values[name].columns), store.dtype))
            if part == "sums" and self.shape.layers[index].kind == "mean":
                factor = mean_factors(self.scans.graph, place.first, place.stop, store.dtype)
                gradient = gradient * store.tensor(factor)[:, None]
            half = None
            if name in self._adds:
                gradient = gradient + store.tensor(store.read(name, place.first, place.stop))
                half = store.other_half(name)
            store.put(name, place.first, gradient, half)

    # --- both passes ---

    def _scan(
        self,
        forward: Op,
        inputs: dict[str, str],
        start: int,
        *,
        keep: bool = False,
        more: Iterable[str] = (),
        backward: Op | None = None,
    ) -> Iterator[NodeChunk]:
        """The chunks of an op from node `start` on, with its inputs and `more`; keep: whether its sums become a value."""
        summed, layers = [], self.shape.layers
        kind, sums = layers[forward.layer].kind, inputs.get("sums", "")
        if sums and sums not in self._made:
            assert kind is not None
            self._ensure([forward.summed])
            summed.append(SumRequest(sums, forward.summed, kind, False, keep))
        if backward is not None and backward.summed:
            above = layers[backward.layer + (backward.kind not in ("map", "add"))].kind
            assert above is not None
            summed.append(SumRequest(SUMMED_GRADIENT, backward.summed, "sum" if above == "mean" else above, True, False))
        self.store.trim(0 if forward.kind == "gather" else self._left())
        room = self._ranges(forward, start) if forward.kind == "gather" else self._sum_rows(summed)
        chunks = {} if backward is None or backward.kind == "add" else self._pending.get(forward.name, {})

        def fetch(first: int) -> PendingChunk | None:
            if first in chunks:
                chunks[first].fetch()
            return chunks.get(first)

        return self.chunks(forward, inputs, summed, room, start, more, fetch)

    def _ranges(self, op: Op, start: int) -> int:
        """Bytes for two ranges of an op that gathers; the rest is for what autograd keeps."""
        memory = self.placement.ranges.get(op.name, gathered_share(self.room))
        if hidden_norms(self.modules.layers[op.layer]):
            layer, stop = self.shape.layers[op.layer], self.shape.destinations(op)
            ranges = list(gather_ranges(self.scans.graph, layer, memory, start, stop))
            if ranges not in ([], [(0, stop)]):
                raise BudgetError(f"layer {op.layer} normalises over all nodes inside, and memory holds only some: give more")
        return memory

    def _sum_rows(self, sums: list[SumRequest]) -> int:
        """Destinations whose sums fit the memory at a time, but those that are made where they stay."""
        if self.placement.resident:  # they are made chunk by chunk
            return self.shape.num_nodes
        made = [each for each in sums if not each.keep or self.placement.of(each.name) is TensorPlacement.DISK]
        columns = sum(self.store.rows(each.source).shape[1] for each in made)
        if not columns:
            return self.program.num_nodes
        return sum_rows(self._left(), columns, self.shape.itemsize, self.program.cell_rows)

    @property
    def _memory_bytes(self) -> int:
        """Of values, of what autograd keeps, and of sums."""
        return self.store.memory_bytes + self.pending_bytes + self.scans.sum_bytes

    def _left(self) -> int:
        """Bytes for sums, and for arrays that wait for their next use."""
        return self.room - self._memory_bytes

    def _of(self, names: Iterable[str], *kinds: ValueKind) -> list[str]:
        """Those of some values that are of these kinds."""
        return [name for name in names if name and self._values[name].kind in kinds]

    def given(self, inputs: dict[str, str], chunk: NodeChunk) -> Tensors:
        """See `ForwardExecutor.given`; takes a sample of the memory and disk in use."""
        offloaded = 0 if self.offload is None else self.offload.nbytes
        self.stats.sample(self._memory_bytes, self.store.disk.nbytes + offloaded)
        return super().given(inputs, chunk)

    def _function(self, op: Op, place: RangeOfNodes) -> Callable[[Tensors], Tensors]:
        def function(given: Tensors) -> Tensors:
            with self.modules.draws.fixed(op.name, _first_of(place)):
                if op.kind == "gather" and op.summed != self.shape.rows(op.layer).name:  # see `_undone`
                    return self.modules.undone(op.layer, given, place)
                return self.modules.norm(op.layer, given, place) if op.kind == "norm" else self.compute(op, place, given)

        return function

    def _quiet(self, op: Op, repeated: bool) -> Any:
        """Running statistics stay as they are where rows are computed a second time."""
        return recording_nothing(self.modules.layers[op.layer]) if repeated and op.kind == "gather" else nullcontext()

    def _ensure(self, names: Iterable[str]) -> None:
        """Recompute those of some features and rows that were dropped."""
        for name in self._of(names, "features", "rows"):
            if name in self._made:
                continue
            op = self.program.op(self.program.value(name).made_by)
            wanted = [each for each in self._of(op.writes, "rows") if each not in self._made]
            reads = [each for each in inputs_of(self.shape, op).values() if each not in self._made]
            passing = [each for each in reads if self.placement.of(each) is TensorPlacement.INVERTED]
            with self.stats.op(f"{op.name} again"):
                self._run_forward(op, wanted, None)
                self._drain()
            self._drop(passing)

    def _drop_unused(self, op: Op) -> None:
        """Values whose last use this op was. The log is not left relying on files that go."""
        unused = self._unused(op)
        self._made -= {*unused}
        if self.store.frees and not self._logged.isdisjoint(unused) and not self._keep(self._number + 1):
            self._forget()
        self._drop(unused)
        self.constant |= {v.name for v in self.program.values if v.constant and v.name in self._made and v.kind == "sums"}

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.store.drop(name)
            self._made.discard(name)

    def _unused(self, op: Op) -> list[str]:
        """Values that are not needed behind an op, and were until then."""
        found = []
        for value in self.program.values:
            name, uses = value.name, self._uses[value.name]
            if value.kind in ("features", "edges", "saved"):
                continue
            kept = bool(uses) and (op.backward or self.placement.of(name) not in GONE)
            last = uses[-1] if kept else value.last_forward
            if last == op.name and not (value.constant and self._stored(name)):
                found.append(name)
        return found

    def _release(self) -> None:
        """Drop everything but what the next step can use."""
        self.store.left = int
        with suppress(StoreError):  # of a step that failed: no write may outlive its file, nor fail the next step
            self._drain()
        for name in list(self._pending):
            self._end_pending(name)
        if self._logged:
            self.store.frees = False  # of a step that ended early files stay, as its log relies on them
        for value in self.program.values:
            if value.kind in ("rows", "sums", "gradient") and value.name not in self.constant:
                self.store.drop(value.name)
        if self.offload is not None:
            self.offload.clear()


def _first_of(place: RangeOfNodes) -> int:
    """The first destination of a range, as it is numbered in the whole graph."""
    return int(place.at["sources"][0])

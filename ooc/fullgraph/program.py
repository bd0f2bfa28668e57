"""PURE: the program of an exact training step: its values, its ops in order, and where each value is until it is needed.

A step runs its forward ops, layer by layer, then its backward ops in the opposite order. Most values are made in the
forward pass and needed again in the backward pass. In between a value is in RAM, in a GPU's memory, on disk, or recomputed
(the four placements of FlexGNN); what autograd keeps may be in RAM in fewer bits too, and the input of a reversible layer may
be made again from its output. Layer l reads its rows (layer 0 the
store's features, where nothing is done to them first) and, where it maps before it sums, what the destination adds beside. A
layer that sums makes sums of the rows; one with a norm over all nodes stops before it. In the backward pass there are gradients
of sums and of destinations' own rows, of the rows of a layer that gathers, of the input of a norm, and of the first rows, which
later layers return to. (See `ooc.layerwise.pass_plan.ValueRef`.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal

from ooc.layerwise.pass_plan import FEATURES, ModelShape, Op, ValueRef, layer_op, summed_rows


class TensorPlacement(StrEnum):
    """Where a value is from its last use in the forward pass to its use in the backward pass."""

    RETAINED = "retained"
    """in RAM"""
    DEVICE = "device"
    """in the memory of a GPU that computes; absent where the CPU does"""
    DISK = "disk"
    RECOMPUTED = "recomputed"
    """gone, and made again by its op from what that reads"""
    COMPRESSED = "compressed"
    """in RAM, in 8, 4 or 2 bits a number; only what autograd keeps, and only where that is allowed"""
    INVERTED = "inverted"
    """gone; the backward op of the reversible layer that reads it reads the layer's output instead, and makes it again from
    there where the layer below needs it so"""


ValueKind = Literal["features", "edges", "rows", "sums", "saved", "gradient"]


@dataclass(frozen=True)
class Value:
    """Something with a row for every node that an op writes and others read.

    kind: "features" (the store's own: on disk already, never written), "edges" (in the two orders that sums need; made once),
    "rows" (what a layer reads), "sums" (over neighbors), "saved" (what autograd keeps of an op's row-wise part beside its
    inputs; nbytes is an estimate until it is measured), "gradient" (of rows or sums; only within the backward pass). columns:
    of a row, 0 for "saved" and "edges". nbytes: of all rows. made_by: op, "" for features and edges. last_forward: the last op
    in the forward pass that reads it, "" for gradients and saved. backward: ops in the backward pass that read it, in order;
    without any it is gone after `last_forward`. constant: the same in every epoch, so it is made once. placements: allowed.
    rows: how many there are, 0 for "saved" and "edges". output: of rows that may be INVERTED, what the reversible layer that
    reads them makes of them.
    """

    name: str
    kind: ValueKind
    columns: int
    nbytes: int
    made_by: str
    last_forward: str
    backward: tuple[str, ...]
    placements: tuple[TensorPlacement, ...]
    constant: bool = False
    rows: int = 0
    output: str = ""


@dataclass(frozen=True)
class Program:
    """A training step. num_nodes: whose rows any op computes; itemsize: bytes of a number; cell_rows: ranges of destinations
    are multiples of it, but the last; all nodes, the halo's too, where they are fewer than a cell of the edges' grid."""

    num_nodes: int
    num_edges: int
    itemsize: int
    cell_rows: int
    values: tuple[Value, ...]
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]

    def value(self, name: str) -> Value:
        """The value of that name. Raises KeyError."""
        return {value.name: value for value in self.values}[name]

    def op(self, name: str) -> Op:
        """The op of that name. Raises KeyError."""
        return {op.name: op for op in (*self.forward, *self.backward)}[name]

    def inputs(self, name: str) -> tuple[str, ...]:
        """The values that one is made of, by its op."""
        value = self.value(name)
        if not value.made_by:
            return ()
        op = self.op(value.made_by)
        if value.kind == "sums":
            return (op.summed, "edges")
        own = (ValueRef("sums", op.layer).name,) if op.kind == "sum" else (op.summed,) if op.kind == "gather" else ()
        return (*own, *op.reads)

    def uses(self, placement: "Placement") -> dict[str, tuple[str, ...]]:
        """By value the ops in the backward pass that need it, in order: that read it, or something that is RECOMPUTED of it."""
        order = {op.name: number for number, op in enumerate(self.ops)}
        found = {value.name: set(value.backward) for value in self.values}
        inverted = [value for value in self.values if placement.of(value.name) is TensorPlacement.INVERTED]
        for value in inverted:  # its op reads the output in its place
            found[value.name] -= set(value.backward)
        for value in inverted:
            found[value.output] |= set(value.backward)
        for value in reversed(self.values):  # each after those that it is made of
            if placement.of(value.name) is TensorPlacement.RECOMPUTED and value.kind in ("rows", "sums"):
                for name in self.inputs(value.name):
                    found[name] |= found[value.name]
        return {name: tuple(sorted(ops, key=order.__getitem__)) for name, ops in found.items()}

    @cached_property
    def undone_by(self) -> Mapping[str, Value]:
        """By op of the backward pass the rows that may be INVERTED, which it makes again from what its layer made of them."""
        return {value.backward[0]: value for value in self.values if value.output}

    def inverted(self, op: Op, placement: "Placement") -> Value | None:
        """The rows that an op of the backward pass is to make again from its layer's output."""
        value = self.undone_by.get(op.name)
        return value if value is not None and placement.of(value.name) is TensorPlacement.INVERTED else None

    def allows(self, placement: "Placement") -> bool:
        """Whether rows are INVERTED only where what autograd keeps of their layer is RECOMPUTED: it comes from the output."""
        saved = [self.saved_of(op) for op in self.backward if self.inverted(op, placement)]
        return all(placement.of(name) is TensorPlacement.RECOMPUTED for name in saved if name)

    def saved_of(self, op: Op) -> str:
        """What autograd keeps for an op of the backward pass, "" for one without."""
        kinds = {value.name: value.kind for value in self.values}
        return next((name for name in op.reads if kinds[name] == "saved"), "")

    @property
    def added_to(self) -> frozenset[str]:
        """Gradients that an op adds to after another made them: on disk they take their place twice, what was added last and
        what was there before, so that an op that was killed can add once more."""
        made_by = {value.name: value.made_by for value in self.values}
        return frozenset(name for op in self.ops for name in op.writes if made_by[name] != op.name)

    @property
    def exchanged(self) -> tuple[tuple[int, str], ...]:
        """Of a part of a graph, (layer that reads it, the value or gradient) whose halo is exchanged with other ranks."""
        along = {(op.layer, op.summed) for op in self.forward if op.summed not in (FEATURES.name, "")}
        gradients = {
            (op.layer, op.scatters or op.writes[0])
            for op in self.backward + self.forward
            if op.scatters or (op.backward and op.kind == "add")
        }
        return (*sorted(along), *sorted(gradients))

    def exchanged_bytes(self, layer: int) -> tuple[int, int]:
        """Bytes of a row that a layer reads, forward, and of its gradient, backward."""
        columns = [0, 0]
        for value in (self.value(name) for reads, name in self.exchanged if reads == layer):
            columns[value.kind == "gradient"] += value.columns
        return self.itemsize * columns[0], self.itemsize * columns[1]

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of a step, in order."""
        return (*self.forward, *self.backward)


@dataclass(frozen=True)
class Placement:
    """A placement for every value that has a choice. passing: where a RECOMPUTED or INVERTED value is while it is used,
    RETAINED or DISK (DISK where it is not named). ranges: bytes for the two ranges of a "gather" op that are in memory at a
    time, without what autograd keeps of them, by op; where an op is not named, see `gathered_share`."""

    placements: Mapping[str, TensorPlacement]
    passing: Mapping[str, TensorPlacement] = field(default_factory=dict)
    ranges: Mapping[str, int] = field(default_factory=dict)

    def of(self, name: str) -> TensorPlacement:
        """Of a value; RETAINED where none is given."""
        return self.placements.get(name, TensorPlacement.RETAINED)

    @property
    def resident(self) -> bool:
        """Whether features, edges, rows, sums and gradients are on the GPU: all of them or none, as sums are made there."""
        return self.of(FEATURES.name) is TensorPlacement.DEVICE

    def standing(self, name: str) -> TensorPlacement:
        """The tier that a value is in while it is used: RETAINED, DEVICE or DISK."""
        where = self.of(name)
        if where is TensorPlacement.COMPRESSED:
            return TensorPlacement.RETAINED
        return self.passing.get(name, TensorPlacement.DISK) if where in GONE else where


GONE = (TensorPlacement.RECOMPUTED, TensorPlacement.INVERTED)
"""placements of what does not stand between the forward pass and the backward pass"""
KEPT = (TensorPlacement.RETAINED, TensorPlacement.DISK)
ANY = (*KEPT, TensorPlacement.RECOMPUTED)


def build(shape: ModelShape, on_gpu: bool = False, shared: bool = False, compresses: bool = False) -> Program:
    """The program of a step. on_gpu: whether a GPU computes, whose memory can hold what autograd keeps. Rows stay with the
    host, which adds them up along the edges. shared: whether other ranks compute the rows of the halo: gradients are added up
    for these too, by an op of its own, before they are sent there. compresses: whether what autograd keeps may be
    COMPRESSED."""
    builder = _Builder(shape, on_gpu, shared, compresses)
    forward, backward = builder.forward(), builder.backward()
    values = builder.values((*forward, *backward))
    return Program(shape.computed(0), shape.num_edges, shape.itemsize, summed_rows(shape), values, forward, backward)


class _Builder:
    """Makes a program's ops, and collects the values that they name."""

    def __init__(self, shape: ModelShape, on_gpu: bool, shared: bool, compresses: bool) -> None:
        self.shape, self._last, self._shared = shape, len(shape.layers) - 1, shared
        self._saved = (*ANY, *[TensorPlacement.DEVICE] * on_gpu, *[TensorPlacement.COMPRESSED] * compresses)
        self._refs: dict[str, ValueRef] = {}

    def _names(self, *refs: ValueRef | None) -> tuple[str, ...]:
        """The names of values, each once."""
        found = {ref.name: ref for ref in refs if ref is not None}
        self._refs |= found
        return tuple(found)

    def _name(self, ref: ValueRef | None) -> str:
        return "".join(self._names(ref))

    def _to_initial(self, index: int) -> list[ValueRef | None]:
        """The gradient of the first rows, where a layer takes them."""
        return [self.shape.initial_gradient] if self.shape.layers[index].needs_initial else []

    def _to_residual(self, index: int) -> ValueRef | None:
        """The gradient that a residual behind a norm gives to the layer's own rows."""
        return self.shape.own_gradient(index) if self.shape.layers[index].residual else None

    def _has_backward(self, index: int) -> bool:
        """Whether a layer's op has a backward: where it or anything below it has parameters, or it maps for the next."""
        following = index < self._last and self.shape.narrows(index + 1) and not self.shape.layers[index].norm
        return self.shape.layers[index].trains or self.shape.trained(index) or following

    # --- forward ---

    def forward(self) -> tuple[Op, ...]:
        shape, ops = self.shape, []
        if shape.mapped:
            saved = [ValueRef("saved_map")] if shape.trained(0) else []
            ops.append(Op("map", "map", 0, reads=self._names(FEATURES), writes=self._names(*shape.made(0), *saved)))
        for index, layer in enumerate(shape.layers):
            ops.append(self._layer(index))
            if layer.norm:
                ops.append(self._norm(index))
        return tuple(ops)

    def _layer(self, index: int) -> Op:
        shape, layer = self.shape, self.shape.layers[index]
        sums = [ValueRef("sums", index)] if shape.sums(index) else []
        saved = [ValueRef("saved", index)] if self._has_backward(index) else []
        if layer.norm:
            return self._forward_op(index, [*sums, ValueRef("pre_norm", index), *saved])
        if index < self._last:
            return self._forward_op(index, [*sums, *shape.made(index + 1), *saved])
        op = self._forward_op(index, [*sums, *(shape.gradients(index) if sums else []), *self._to_initial(index)])
        return replace(op, scatters="" if sums else self._name(shape.own_gradient(index)), computes_loss=True)

    def _forward_op(self, index: int, writes: Sequence[ValueRef | None]) -> Op:
        self._names(self.shape.rows(index), self.shape.self_rows(index), self.shape.initial)
        return layer_op(self.shape, index, self._names(*writes))

    def _norm(self, index: int) -> Op:
        last, before = index == self._last, ValueRef("pre_norm", index)
        own = self.shape.self_rows(index) if self.shape.layers[index].residual else None
        after: list[ValueRef | None] = [*self.shape.made(index + 1), ValueRef("saved_norm", index)]
        if last:
            after = [before._replace(gradient=True), self._to_residual(index)]
        return Op(f"norm{index}", "norm", index, reads=self._names(before, own), writes=self._names(*after), computes_loss=last)

    # --- backward ---

    def backward(self) -> tuple[Op, ...]:
        shape, ops = self.shape, list[Op]()
        for index in range(self._last, -1, -1):
            norm, (summed, given) = shape.layers[index].norm, self._given(index + 1)
            before = ValueRef("pre_norm", index)
            if summed is not None and (self._shared or (not norm and self._has_backward(index) and not shape.sums(index))):
                ops.append(self._add(index + 1, summed))
                summed, given = None, [ValueRef("rows", index + 1, gradient=True), *given]
            if norm and index < self._last:
                ops.append(self._norm_backward(index, summed, given))
            if norm:
                summed, given = None, [before._replace(gradient=True), before]
            elif index == self._last:
                continue
            if not self._has_backward(index):
                continue
            ops.append(self._layer_backward(index, summed, given))
        if shape.mapped and shape.trained(0):
            summed, given = self._given(0)
            if summed is not None and self._shared:
                ops.append(self._add(0, summed))
                summed, given = None, [ValueRef("rows", 0, gradient=True), *given]
            reads = self._names(FEATURES, ValueRef("saved_map"), *given, shape.initial_gradient)
            ops.append(Op("back-map", "map", 0, True, self._name(summed), reads, (), repeats="map"))
        return tuple(ops)

    def _add(self, index: int, summed: ValueRef) -> Op:
        """The op that adds up the gradient of the rows that a layer reads."""
        added = self._names(ValueRef("rows", index, gradient=True))
        return Op(f"add{index}", "add", index, True, self._name(summed), (), added)

    def _given(self, index: int) -> tuple[ValueRef | None, list[ValueRef | None]]:
        """(what is summed, what is read) for the gradient of what a layer reads; of nothing beyond the last."""
        own = None if index > self._last else self.shape.own_gradient(index)
        if own is None:
            return None, []
        return ValueRef("sums", index, gradient=True) if self.shape.sums(index) else None, [own]

    def _norm_backward(self, index: int, summed: ValueRef | None, given: Sequence[ValueRef | None]) -> Op:
        before = ValueRef("pre_norm", index)
        own = self.shape.self_rows(index) if self.shape.layers[index].residual else None
        reads = self._names(before, own, ValueRef("saved_norm", index), *given)
        writes = self._names(before._replace(gradient=True), self._to_residual(index))
        return Op(f"back-norm{index}", "norm", index, True, self._name(summed), reads, writes, repeats=f"norm{index}")

    def _layer_backward(self, index: int, summed: ValueRef | None, given: Sequence[ValueRef | None]) -> Op:
        shape, forward = self.shape, self._forward_op(index, ())
        gathered = self._name(shape.own_gradient(index)) if forward.kind == "gather" else ""
        source = self._names(ValueRef("sums", index)) if forward.kind == "sum" else (forward.summed,)
        reads = tuple(dict.fromkeys((*source, *forward.reads, *self._names(ValueRef("saved", index), *given))))
        writes = self._names(*([] if gathered else shape.gradients(index)), *self._to_initial(index))
        name = self._name(summed)
        return Op(f"back{index}", forward.kind, index, True, name, reads, writes, gathered, f"layer{index}")

    # --- values ---

    def values(self, ops: Sequence[Op]) -> tuple[Value, ...]:
        names = dict.fromkeys(name for op in ops for name in (op.summed, *op.reads, *op.writes, op.scatters) if name)
        found = [self._value(self._refs[name], ops) for name in names]
        summing = [op for op in ops if op.summed and (op.backward or op.kind == "sum")]
        if summing:
            forward, backward = ([op.name for op in summing if op.backward == way] for way in (False, True))
            nbytes = 2 * self.shape.num_edges * self.shape.slot_bytes
            found.append(Value("edges", "edges", 0, nbytes, "", forward[-1], tuple(backward), KEPT, True))
        return tuple(found)

    def _value(self, ref: ValueRef, ops: Iterable[Op]) -> Value:
        name, shape = ref.name, self.shape
        made = next((op for op in ops if name in (*op.writes, op.scatters)), None)
        readers = [op for op in ops if name in (op.summed, *op.reads)]
        forward = [op for op in readers if not op.backward]
        backward = tuple(op.name for op in readers if op.backward)
        last, own = forward[-1].name if forward else "", "" if made is None else made.name
        if ref == FEATURES:
            rows = shape.rows_of(ref)
            return Value(name, "features", shape.x_width, rows * shape.x_bytes, own, last, backward, KEPT, True, rows)
        if made is not None and ref.role in ("saved_map", "saved", "saved_norm"):
            return Value(name, "saved", 0, shape.destinations(made) * self._saved_bytes(made), own, last, backward, self._saved)
        columns, rows = shape.columns(ref), shape.rows_of(ref)
        nbytes = rows * columns * shape.itemsize
        if ref.gradient:
            return Value(name, "gradient", columns, nbytes, own, last, backward, KEPT, rows=rows)
        kind: ValueKind = "sums" if ref.role == "sums" else "rows"
        constant = ref == ValueRef("sums", 0) and not shape.mapped
        output = self._output(ref)
        allowed: tuple[TensorPlacement, ...] = ANY
        if output:
            allowed = (*KEPT, TensorPlacement.INVERTED)
        elif ref.role == "rows" and ref.layer and self._output(ValueRef("rows", ref.layer - 1)):
            allowed = KEPT  # what is made of it goes back to the rows below
        return Value(name, kind, columns, nbytes, own, last, backward, allowed, constant, rows, output)

    def _output(self, ref: ValueRef) -> str:
        """What a reversible layer makes of the rows that it alone reads, as it is put for the next one; "" of others."""
        shape, index = self.shape, ref.layer
        if ref.role != "rows" or self._shared or index >= self._last or not shape.layers[index].reversible:
            return ""
        alone = shape.initial != ref or not shape.needs_initial
        plain = not shape.layers[index].norm and not shape.sums(index + 1) and self._has_backward(index)
        return ValueRef("rows", index + 1).name if alone and plain else ""

    def _saved_bytes(self, op: Op) -> int:
        """Of a row, about: what an activation keeps (a byte a number), and the rows that a map before the next sum takes."""
        shape = self.shape
        if op.kind == "map":
            return shape.itemsize * (shape.encoded or shape.x_width)
        layer, following = shape.layers[op.layer], op.layer < self._last and shape.narrows(op.layer + 1)
        gathered = layer.source_bytes + layer.edge_bytes * shape.num_edges // max(1, shape.num_nodes)
        return layer.out * (1 + shape.itemsize * following) + gathered

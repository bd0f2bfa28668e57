"""PURE: a model's shape on a graph -> the program of an exact step: its values, and its ops in order.

Layer l reads its rows (layer 0 the store's features, where nothing is to be done to them first) and, where it maps before it
sums, what the destination adds beside. A layer that sums makes sums of the rows. A layer with a norm over all nodes stops
before it. In the backward pass there are gradients of sums and of destinations' own rows, of the rows of a layer that gathers,
of the input of a norm, and of the first rows, which later layers return to. (See `ooc.layerwise.ir.ValueRef`.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ooc.fullgraph.ir import Program, TensorPlacement, Value, ValueKind
from ooc.layerwise.ir import FEATURES, Op, OpKind, ValueRef
from ooc.layerwise.pass_plan import ModelShape, cell_rows
from ooc.layerwise.program import layer_op

KEPT = (TensorPlacement.RETAINED, TensorPlacement.DISK)
ANY = (*KEPT, TensorPlacement.RECOMPUTED)


@dataclass(frozen=True)
class FullLayer:
    """What training needs to know of a layer beside its `LayerShape`. norm: columns of its norm over all nodes, 0 without one;
    residual: whether the destination's row is added; trains: whether it has parameters."""

    norm: int
    residual: bool
    trains: bool


@dataclass(frozen=True)
class FullShape:
    """A model in training on a graph. itemsize: bytes of a number; encoder_trains: whether the encoder has parameters."""

    model: ModelShape
    layers: tuple[FullLayer, ...]
    itemsize: int
    encoder_trains: bool

    def sums(self, layer: int) -> bool:
        """Whether a layer sums its neighbors' rows; else it gathers them."""
        return self.model.layers[layer].kind is not None

    def columns(self, ref: ValueRef) -> int:
        """Columns of rows, sums or their gradients."""
        return self.layers[ref.layer].norm if ref.role == "pre_norm" else self.model.columns(ref)

    def trained(self, layer: int) -> bool:
        """Whether anything below a layer has parameters: whether its rows need a gradient."""
        if layer == 0:
            return self.model.mapped and (self.encoder_trains or self.model.narrows(0))
        own = self.layers[layer - 1]
        return own.trains or self.model.narrows(layer) or self.trained(layer - 1)

    def own_gradient(self, layer: int) -> ValueRef | None:
        """The gradient of a layer's own rows, without what comes by edges where it sums; None where none is needed."""
        if not self.trained(layer):
            return None
        return ValueRef("self" if self.sums(layer) else "rows", layer, gradient=True)

    def gradients(self, layer: int) -> list[ValueRef]:
        """The gradients that a layer's op leaves to the ops below."""
        own = self.own_gradient(layer)
        if own is None:
            return []
        return [ValueRef("sums", layer, gradient=True), own] if self.sums(layer) else [own]

    @property
    def initial_gradient(self) -> ValueRef | None:
        """The gradient of the first rows, where a layer returns to them and something below them has parameters."""
        return ValueRef("initial", gradient=True) if self.model.needs_initial and self.trained(0) else None


def build(shape: FullShape) -> Program:
    """The program of a step.

    >>> [op.name for op in build(shape).forward]
    ['layer0', 'layer1', 'layer2']
    """
    return _Builder(shape).program()


class _Builder:
    """Makes a program's ops, and notes the values that they name."""

    def __init__(self, shape: FullShape) -> None:
        self.shape, self.model, self._last = shape, shape.model, len(shape.layers) - 1
        self._refs: dict[str, ValueRef] = {}

    def program(self) -> Program:
        forward, backward = self._forward(), self._backward()
        model, values = self.model, self._values((*forward, *backward))
        return Program(
            model.num_nodes,
            model.num_edges,
            self.shape.itemsize,
            model.slot_bytes,
            cell_rows(model),
            values,
            forward,
            backward,
        )

    def _names(self, *refs: ValueRef | None) -> tuple[str, ...]:
        """The names of values, each once."""
        found = {ref.name: ref for ref in refs if ref is not None}
        self._refs |= found
        return tuple(found)

    def _name(self, ref: ValueRef | None) -> str:
        return "".join(self._names(ref))

    # --- forward ---

    def _forward(self) -> tuple[Op, ...]:
        shape, ops = self.shape, []
        if self.model.mapped:
            saved = [ValueRef("saved_map")] if shape.trained(0) else []
            ops.append(Op("map", "map", 0, reads=self._names(FEATURES), writes=self._names(*self.model.made(0), *saved)))
        for index, layer in enumerate(shape.layers):
            ops.append(self._layer(index))
            if layer.norm:
                ops.append(self._norm(index))
        return tuple(ops)

    def _layer(self, index: int) -> Op:
        shape, layer = self.shape, self.shape.layers[index]
        sums = [ValueRef("sums", index)] if shape.sums(index) else []
        if layer.norm:
            saved = [ValueRef("saved", index)] if shape.trained(index) or layer.trains else []
            return self._forward_op(index, [*sums, ValueRef("pre_norm", index), *saved], False)
        turns = index == self._last
        if turns:
            after = [*(shape.gradients(index) if sums else []), *self._to_initial(index)]
        else:
            saved = [ValueRef("saved", index)] if self._has_backward(index) else []
            after = [*self.model.made(index + 1), *saved]
        return self._forward_op(index, [*sums, *after], turns)

    def _forward_op(self, index: int, writes: Sequence[ValueRef | None], turns: bool) -> Op:
        model, op = self.model, layer_op(self.model, index)
        self._names(model.rows(index), model.self_rows(index), model.initial)
        scattered = self._name(self.shape.own_gradient(index)) if turns and op.kind == "gather" else ""
        return replace(op, writes=self._names(*writes), scatters=scattered, turns=turns)

    def _norm(self, index: int) -> Op:
        turns, before = index == self._last, ValueRef("pre_norm", index)
        root = self.model.self_rows(index) if self.shape.layers[index].residual else None
        if turns:
            after = [before._replace(gradient=True), self._to_residual(index)]
        else:
            after = [*self.model.made(index + 1), ValueRef("saved_norm", index)]
        return Op(f"norm{index}", "norm", index, reads=self._names(before, root), writes=self._names(*after), turns=turns)

    def _kind(self, index: int) -> OpKind:
        return "sum" if self.shape.sums(index) else "gather"

    def _to_initial(self, index: int) -> list[ValueRef | None]:
        """The gradient of the first rows, where a layer takes them."""
        return [self.shape.initial_gradient] if self.model.layers[index].needs_initial else []

    def _to_residual(self, index: int) -> ValueRef | None:
        """The gradient that a residual behind a norm gives to the layer's own rows."""
        return self.shape.own_gradient(index) if self.shape.layers[index].residual else None

    def _has_backward(self, index: int) -> bool:
        """Whether a layer's op has a backward: where it or anything below it has parameters, or it maps for the next."""
        following = index < self._last and self.model.narrows(index + 1)
        return self.shape.layers[index].trains or self.shape.trained(index) or following

    # --- backward ---

    def _backward(self) -> tuple[Op, ...]:
        shape, ops = self.shape, []
        for index in range(self._last, -1, -1):
            layer, kind = shape.layers[index], self._kind(index)
            summed, given = (None, []) if index == self._last else self._given(index + 1)
            before = ValueRef("pre_norm", index)
            if layer.norm and index < self._last:
                ops.append(self._norm_backward(index, summed, given))
            if layer.norm:
                summed, given = None, [before._replace(gradient=True), before]
            elif index == self._last:
                continue
            if (layer.trains or shape.trained(index)) if layer.norm else self._has_backward(index):
                if summed is not None and kind == "gather":
                    added = ValueRef("rows", index + 1, gradient=True)
                    name = f"add{index + 1}"
                    ops.append(Op(name, "add", index + 1, True, self._name(summed), (), self._names(added)))
                    summed, given = None, [added, *given]
                ops.append(self._layer_backward(index, summed, given))
        if self.model.mapped and shape.trained(0):
            summed, given = self._given(0)
            reads = self._names(FEATURES, ValueRef("saved_map"), *given, shape.initial_gradient)
            ops.append(Op("back-map", "map", 0, True, self._name(summed), reads, (), repeats="map"))
        return tuple(ops)

    def _given(self, index: int) -> tuple[ValueRef | None, list[ValueRef | None]]:
        """(what is summed, what is read) for the gradient of what a layer reads."""
        own = self.shape.own_gradient(index)
        if own is None:
            return None, []
        return ValueRef("sums", index, gradient=True) if self.shape.sums(index) else None, [own]

    def _norm_backward(self, index: int, summed: ValueRef | None, given: Sequence[ValueRef | None]) -> Op:
        before = ValueRef("pre_norm", index)
        root = self.model.self_rows(index) if self.shape.layers[index].residual else None
        reads = self._names(before, root, ValueRef("saved_norm", index), *given)
        writes = self._names(before._replace(gradient=True), self._to_residual(index))
        return Op(f"back-norm{index}", "norm", index, True, self._name(summed), reads, writes, repeats=f"norm{index}")

    def _layer_backward(self, index: int, summed: ValueRef | None, given: Sequence[ValueRef | None]) -> Op:
        shape, kind, forward = self.shape, self._kind(index), self._forward_op(index, (), False)
        gathered = self._name(shape.own_gradient(index)) if kind == "gather" else ""
        source = self._names(ValueRef("sums", index)) if kind == "sum" else (forward.summed,)
        reads = (*source, *forward.reads, *self._names(ValueRef("saved", index), *given))
        writes = self._names(*([] if gathered else shape.gradients(index)), *self._to_initial(index))
        reads = tuple(dict.fromkeys(reads))
        return Op(f"back{index}", kind, index, True, self._name(summed), reads, writes, gathered, f"layer{index}")

    # --- values ---

    def _values(self, ops: Sequence[Op]) -> tuple[Value, ...]:
        names = dict.fromkeys(name for op in ops for name in (op.summed, *op.reads, *op.writes, op.scatters) if name)
        found = [self._value(self._refs[name], ops) for name in names]
        summing = [op for op in ops if op.summed and (op.backward or op.kind == "sum")]
        if summing:
            forward, backward = ([op.name for op in summing if op.backward == way] for way in (False, True))
            nbytes = 2 * self.model.num_edges * self.model.slot_bytes
            found.append(Value("edges", 0, "edges", 0, nbytes, "", forward[-1], tuple(backward), KEPT, True))
        return tuple(found)

    def _value(self, ref: ValueRef, ops: Iterable[Op]) -> Value:
        name, nodes, model = ref.name, self.model.num_nodes, self.model
        made = next((op for op in ops if name in (*op.writes, op.scatters)), None)
        readers = [op for op in ops if name in (op.summed, *op.reads)]
        forward = [op for op in readers if not op.backward]
        backward = tuple(op.name for op in readers if op.backward)
        last, own, index = forward[-1].name if forward else "", "" if made is None else made.name, made.layer if made else 0
        if ref == FEATURES:
            return Value(name, 0, "features", model.x_width, nodes * model.x_bytes, own, last, backward, KEPT, True)
        if made is not None and ref.role in ("saved_map", "saved", "saved_norm"):
            return Value(name, index, "saved", 0, nodes * self._saved_bytes(made), own, last, backward, ANY)
        columns = self.shape.columns(ref)
        nbytes = nodes * columns * self.shape.itemsize
        if ref.gradient:
            return Value(name, index, "gradient", columns, nbytes, own, last, backward, KEPT)
        kind: ValueKind = "sums" if ref.role == "sums" else "rows"
        layer = forward[0].layer if forward else index
        constant = ref == ValueRef("sums", 0) and not model.mapped
        return Value(name, layer, kind, columns, nbytes, own, last, backward, ANY, constant)

    def _saved_bytes(self, op: Op) -> int:
        """Of a row, about: what an activation keeps (a byte a number), and the rows that a map before the next sum takes."""
        model, itemsize = self.model, self.shape.itemsize
        if op.kind == "map":
            return itemsize * (model.encoded or model.x_width)
        layer, following = model.layers[op.layer], op.layer < self._last and model.narrows(op.layer + 1)
        gathered = layer.source_bytes + layer.edge_bytes * model.num_edges // max(1, model.num_nodes)
        return layer.out * (1 + itemsize * following) + gathered

"""PURE: a model's shape on a graph -> the program of an exact step: its values, and its ops in order.

Layer l reads "rows<l>" (from the store "x", where nothing is to be done to the features first), and where it maps before it
sums, what the destination adds beside, "root<l>". A layer that sums makes "near<l>" of the rows. A layer with a norm over all
nodes stops before it, at "z<l>". On the way down the gradients of sums and of destinations' own rows stand as "gnear<l>" and
"groot<l>", of the rows of a layer that gathers as "grows<l>", of what stands before a norm as "gz<l>", and of the first rows,
which later layers return to, as "ginitial".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ooc.fullgraph.ir import Op, OpKind, Program, TensorPlacement, Value, ValueKind
from ooc.layerwise.plan import ModelShape, cell_rows, narrows, needs_initial

KEPT = (TensorPlacement.RETAINED, TensorPlacement.DISK)
ANY = (*KEPT, TensorPlacement.RECOMPUTED)


@dataclass(frozen=True)
class FullLayer:
    """What training asks of a layer beside its `LayerShape`. norm: columns of its norm over all nodes, 0 without one;
    residual: whether the destination's row follows; trains: whether it has parameters; drops: whether its input passes
    dropout."""

    norm: int
    residual: bool
    trains: bool
    drops: bool


@dataclass(frozen=True)
class FullShape:
    """A model in training on a graph. itemsize: bytes of a number; encoder_trains: whether the encoder has parameters."""

    sweep: ModelShape
    layers: tuple[FullLayer, ...]
    itemsize: int
    encoder_trains: bool

    @property
    def mapped(self) -> bool:
        """Whether the features pass a map of their own before the first layer reads them."""
        sums = self.sweep.layers[0].kind is not None
        return bool(self.sweep.encoded) or self.narrow(0) or (sums and (not self.sweep.x_plain or self.layers[0].drops))

    @property
    def initial_apart(self) -> bool:
        """Whether the first rows are kept for later layers in another form than the first layer reads."""
        first = self.sweep.layers[0].kind is not None and self.layers[0].drops
        return needs_initial(self.sweep) and (self.narrow(0) or first)

    def narrow(self, layer: int) -> bool:
        """Whether a layer maps before it sums."""
        return narrows(self.sweep, layer)

    def rows(self, layer: int) -> str:
        """The value whose rows a layer sums or gathers."""
        return "x" if layer == 0 and not self.mapped else f"rows{layer}"

    def root(self, layer: int) -> str:
        """The value that has a layer's destinations' own rows."""
        narrow = self.sweep.layers[layer].narrow
        return f"root{layer}" if self.narrow(layer) and narrow is not None and narrow[1] else self.rows(layer)

    def initial(self) -> str:
        """The value that has the first rows."""
        return "initial" if self.initial_apart else self.rows(0)

    def columns(self, name: str) -> int:
        """Columns of rows, sums or their gradients."""
        if name in ("x", "initial", "ginitial"):
            return self.sweep.encoded if name != "x" and self.sweep.encoded else self.sweep.x_width
        index = int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
        layer = self.sweep.layers[index]
        narrow = layer.narrow if self.narrow(index) else None
        if name.startswith(("z", "gz")):
            return self.layers[index].norm
        if narrow is None:
            return layer.width
        return narrow[1] or narrow[0] if name.startswith(("root", "groot")) else narrow[0]

    def made(self, layer: int) -> list[str]:
        """The values that are made for a layer to read."""
        names = list(dict.fromkeys([self.rows(layer), self.root(layer)]))
        return [*names, "initial"] if layer == 0 and self.initial_apart else names

    def trained(self, layer: int) -> bool:
        """Whether anything below a layer has parameters: whether its rows need a gradient."""
        if layer == 0:
            return self.mapped and (self.encoder_trains or self.narrow(0))
        own = self.layers[layer - 1]
        return own.trains or self.narrow(layer) or self.trained(layer - 1)

    def gradients(self, layer: int) -> list[str]:
        """The values of the gradients that a layer's op leaves on its way down."""
        if not self.trained(layer):
            return []
        if self.sweep.layers[layer].kind is None:
            return [f"grows{layer}"]
        return [f"gnear{layer}", f"groot{layer}"]

    def own_gradient(self, layer: int) -> str:
        """The value of the gradient that a layer's own rows have, but for what comes by edges; "" where none is needed."""
        named = "grows" if self.sweep.layers[layer].kind is None else "groot"
        return f"{named}{layer}" if self.trained(layer) else ""


def build(shape: FullShape) -> Program:
    """The program of a step.

    >>> [op.name for op in build(shape).forward]
    ['layer0', 'layer1', 'layer2']
    """
    forward, backward = _forward(shape), _backward(shape)
    values = _values(shape, (*forward, *backward))
    sweep = shape.sweep
    return Program(
        sweep.num_nodes, sweep.num_edges, shape.itemsize, sweep.slot_bytes, cell_rows(sweep), values, forward, backward
    )


def _forward(shape: FullShape) -> tuple[Op, ...]:
    ops, last = [], len(shape.layers) - 1
    if shape.mapped:
        saved = ["saved-map"] if shape.trained(0) else []
        ops.append(Op("map", "map", 0, reads=("x",), writes=(*shape.made(0), *saved)))
    for index, layer in enumerate(shape.layers):
        turns = index == last
        near = [f"near{index}"] * (shape.sweep.layers[index].kind is not None)
        kind: OpKind = "sum" if near else "gather"
        down = [*(shape.gradients(index) if near else []), *_more_gradients(shape, index)]
        after = down if turns else shape.made(index + 1)
        kept = [] if turns else [f"saved{index}"] * _goes_down(shape, index)
        if not layer.norm:
            ops.append(_up(shape, kind, index, [*near, *after, *kept], turns))
            continue
        below = shape.trained(index) or layer.trains
        saved = [f"saved{index}"] * below
        ops.append(_up(shape, kind, index, [*near, f"z{index}", *saved], False))
        root = [shape.root(index)] * layer.residual
        after = [f"gz{index}", *_passed_on(shape, index)] if turns else shape.made(index + 1)
        saved = [] if turns else [f"saved-norm{index}"]
        ops.append(Op(f"norm{index}", "norm", index, reads=(f"z{index}", *root), writes=(*after, *saved), turns=turns))
    return tuple(ops)


def _up(shape: FullShape, kind: OpKind, index: int, writes: Sequence[str], turns: bool) -> Op:
    own = [shape.root(index)] if kind == "sum" else []
    own += [shape.initial()] if shape.sweep.layers[index].needs_initial else []
    scattered = "".join(shape.gradients(index)) if turns and kind == "gather" else ""
    name = f"layer{index}"
    return Op(name, kind, index, False, shape.rows(index), tuple(own), tuple(writes), scattered, turns=turns)


def _more_gradients(shape: FullShape, index: int) -> list[str]:
    """The gradient of the first rows, where a layer takes them and something below them has parameters."""
    return ["ginitial"] if shape.sweep.layers[index].needs_initial and shape.trained(0) else []


def _passed_on(shape: FullShape, index: int) -> list[str]:
    """The gradient that a residual behind a norm gives to the layer's own rows."""
    return [shape.own_gradient(index)] if shape.layers[index].residual and shape.trained(index) else []


def _goes_down(shape: FullShape, index: int) -> bool:
    """Whether a layer's op is met on the way down: where it or anything below it has parameters, or it maps for the next."""
    following = index + 1 < len(shape.layers) and shape.narrow(index + 1)
    return shape.layers[index].trains or shape.trained(index) or following


def _backward(shape: FullShape) -> tuple[Op, ...]:
    ops, last = [], len(shape.layers) - 1
    for index in range(last, -1, -1):
        layer = shape.layers[index]
        kind: OpKind = "gather" if shape.sweep.layers[index].kind is None else "sum"
        summed, given = ("", []) if index == last else _given(shape, index + 1)
        if layer.norm and index < last:
            root = [shape.root(index), f"saved-norm{index}"] if layer.residual else [f"saved-norm{index}"]
            reads, writes = (f"z{index}", *root, *given), (f"gz{index}", *_passed_on(shape, index))
            ops.append(Op(f"back-norm{index}", "norm", index, True, summed, reads, writes, repeats=f"norm{index}"))
        if layer.norm:
            summed, given = "", [f"gz{index}", f"z{index}"]
        elif index == last:
            continue
        if (layer.trains or shape.trained(index)) if layer.norm else _goes_down(shape, index):
            if summed and kind == "gather":
                ops.append(Op(f"add{index + 1}", "add", index + 1, True, summed, (), (f"grows{index + 1}",)))
                summed, given = "", [f"grows{index + 1}", *given]
            ops.append(_down(shape, kind, index, summed, given))
    if shape.mapped and shape.trained(0):
        summed, given = _given(shape, 0)
        initial = ["ginitial"] if _returns(shape) else []
        ops.append(Op("back-map", "map", 0, True, summed, ("x", "saved-map", *given, *initial), (), repeats="map"))
    return tuple(ops)


def _returns(shape: FullShape) -> bool:
    return needs_initial(shape.sweep) and shape.trained(0)


def _given(shape: FullShape, index: int) -> tuple[str, list[str]]:
    """(what is summed, what is read) for the gradient of what a layer reads."""
    if not shape.trained(index):
        return "", []
    if shape.sweep.layers[index].kind is None:
        return "", [f"grows{index}"]
    return f"gnear{index}", [f"groot{index}"]


def _down(shape: FullShape, kind: OpKind, index: int, summed: str, given: Sequence[str]) -> Op:
    up = _up(shape, kind, index, (), False)
    near = [f"near{index}"] if kind == "sum" else []
    gathered = "" if kind == "sum" or not shape.trained(index) else f"grows{index}"
    writes = [] if gathered else shape.gradients(index)
    writes += _more_gradients(shape, index)
    reads = (*near, *([up.summed] if kind == "gather" else []), *up.reads, f"saved{index}", *given)
    reads = tuple(dict.fromkeys(reads))
    return Op(f"back{index}", kind, index, True, summed, reads, tuple(writes), gathered, f"layer{index}")


def _values(shape: FullShape, ops: Sequence[Op]) -> tuple[Value, ...]:
    names = dict.fromkeys(name for op in ops for name in (op.summed, *op.reads, *op.writes, op.scatters) if name)
    found = [_value(shape, name, ops) for name in names]
    pre_aggregation = [op for op in ops if op.summed and (op.backward or op.kind == "sum")]
    if pre_aggregation:
        up, down = ([op.name for op in pre_aggregation if op.backward == way] for way in (False, True))
        nbytes = 2 * shape.sweep.num_edges * shape.sweep.slot_bytes
        found.append(Value("edges", 0, "edges", 0, nbytes, "", up[-1], tuple(down), KEPT, True))
    return tuple(found)


def _value(shape: FullShape, name: str, ops: Sequence[Op]) -> Value:
    made = next((op for op in ops if name in (*op.writes, op.scatters)), None)
    readers = [op for op in ops if name in (op.summed, *op.reads)]
    up = [op for op in readers if not op.backward]
    down = tuple(op.name for op in readers if op.backward)
    last = up[-1].name if up else ""
    nodes, own = shape.sweep.num_nodes, "" if made is None else made.name
    if name == "x":
        return Value(name, 0, "features", shape.sweep.x_width, nodes * shape.sweep.x_bytes, own, last, down, KEPT, True)
    if name.startswith("saved"):
        assert made is not None
        return Value(name, made.layer, "saved", 0, nodes * _saved_bytes(shape, made), own, last, down, ANY)
    columns = shape.columns(name)
    nbytes = nodes * columns * shape.itemsize
    if name.startswith("g"):
        return Value(name, made.layer if made else 0, "gradient", columns, nbytes, own, last, down, KEPT)
    kind: ValueKind = "sums" if name.startswith("near") else "rows"
    layer = up[0].layer if up else (made.layer if made else 0)
    constant = name == "near0" and not shape.mapped
    return Value(name, layer, kind, columns, nbytes, own, last, down, ANY, constant)


def _saved_bytes(shape: FullShape, op: Op) -> int:
    """Of a row, about: what an activation keeps (a byte a number), and the rows that a map before the next sum takes."""
    layer = shape.sweep.layers[op.layer]
    if op.kind == "map":
        return shape.itemsize * (shape.sweep.encoded or shape.sweep.x_width)
    following = op.layer + 1 < len(shape.layers) and shape.narrow(op.layer + 1)
    gathered = layer.source_bytes + layer.edge_bytes * shape.sweep.num_edges // max(1, shape.sweep.num_nodes)
    return layer.out * (1 + shape.itemsize * following) + gathered

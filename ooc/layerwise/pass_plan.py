"""PURE: a model's widths, the graph's size and the memory -> the values and ops of a pass over all nodes, and how each layer is
computed.

A layer that sums over neighbors has its sums made while its input is read once in file order, for as many destinations as
memory has sums for; the input is read again for the next ones. Where sums are wide, it is cheaper to keep the input by blocks
of columns: a pass over one block makes its sums for many more destinations, which wait on disk until all blocks are done. A
layer that maps to fewer columns may map before it sums. A layer that needs the rows themselves (attention, the user's own)
gets them for a range of destinations at a time. Every choice is by bytes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ooc.graph.aggregation import Kind
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_bytes

CHUNK_ROWS = 8192
"""Destinations whose rows are computed together: ranges end at multiples, so that a row's bits do not depend on the memory"""
_MOST_CELLS = 1024
_FLOAT = 4
_LEAST_BLOCK = 16
"""columns of a block at least: a cache line of sums"""
_NEARLY = 0.97
"""Blocks must save that much to be chosen: they meet every edge once each"""
ValueRole = Literal[
    "features", "edges", "rows", "self", "sums", "initial", "pre_norm", "out", "saved_map", "saved", "saved_norm"
]
OpKind = Literal["map", "sum", "gather", "norm", "add"]
_NAMES: dict[ValueRole, str] = {
    "features": "x",
    "edges": "edges",
    "rows": "rows{}",
    "self": "root{}",
    "sums": "near{}",
    "initial": "initial",
    "pre_norm": "z{}",
    "out": "out",
    "saved_map": "saved-map",
    "saved": "saved{}",
    "saved_norm": "saved-norm{}",
}
"""As they stand in plans, in step logs and as files: they stay as they are"""


_LABELS: dict[ValueRole, str] = {
    "features": "features",
    "self": "self rows {}",
    "sums": "neighbor sums {}",
    "initial": "initial rows",
    "pre_norm": "rows before norm {}",
    "out": "output",
    "saved_map": "saved by the map",
    "saved": "saved by layer {}",
    "saved_norm": "saved by norm {}",
    "rows": "rows {}",
}
"""what people read for them"""


def label_of(name: str) -> str:
    """What people read for the name of a value.

    >>> label_of("gnear1")
    'gradient of neighbor sums 1'
    """
    for role, label in _LABELS.items():
        if found := re.fullmatch("(g?)" + re.escape(_NAMES[role]).replace(r"\{\}", r"(\d+)"), name):
            return ("gradient of " if found[1] else "") + label.format(*found.groups()[1:])
    return name


class ValueRef(NamedTuple):
    """A value by its role.

    role: "features" (the store's own), "edges", "rows" (that a layer sums or gathers), "self" (what its destinations add
    beside, where it maps before it sums), "sums" (over neighbors), "initial" (the first rows, which later layers return to),
    "pre_norm" (rows before a norm over all nodes), "out" (the model's), "saved..." (what autograd keeps of a map, a layer, a
    norm). layer: that reads it, or of "sums", "pre_norm" and "saved" that makes it; gradient: whether it is that one's
    gradient.
    """

    role: ValueRole
    layer: int = 0
    gradient: bool = False

    @property
    def name(self) -> str:
        """The text that stands for it in plans and files."""
        return "g" * self.gradient + _NAMES[self.role].format(self.layer)


FEATURES = ValueRef("features")


def names_of(refs: Iterable[ValueRef]) -> tuple[str, ...]:
    """The names of some values."""
    return tuple(ref.name for ref in refs)


@dataclass(frozen=True)
class Op:
    """A scan over all destinations, chunk by chunk. Values go by their names.

    kind: "map" (row by row), "sum" (the sums of a range of destinations, then row by row), "gather" (from the rows of a range's
    sources), "norm" (row by row, with statistics over all nodes that the op before it gathered), "add" (only the sums: of a
    block of columns, or of gradients for a "gather", whose ranges are others). summed: value whose rows are added along the
    edges, in the backward pass along the transposed ones: it is read whole once a range of destinations, the edges once in all.
    Of a "gather" it is the value whose rows are gathered, in the backward pass again where they are needed. reads, writes:
    values read and written once, in order; sums that are RECOMPUTED are not written. scatters: gradient whose rows a "gather"
    adds to in any order. repeats: in the backward pass the op whose row-wise part is run again where its "saved" is RECOMPUTED.
    computes_loss: whether it is the last op of the forward pass, which computes the loss and its gradients at once.

    In the backward pass `summed` is the gradient of the sums of the layer above, and the sums go into this op's row-wise part
    as gradients of what it wrote.
    """

    name: str
    kind: OpKind
    layer: int
    backward: bool = False
    summed: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    scatters: str = ""
    repeats: str = ""
    computes_loss: bool = False


@dataclass(frozen=True)
class LayerShape:
    """width, out: columns in and out; kind: of its sum over neighbors, None for a layer that needs the rows; narrow: columns of
    what is summed, and of what the destination adds beside it (0: the same rows), where the layer can map first, else None;
    source_bytes, edge_bytes: what a source's row and an edge take in memory while rows are computed (kind None). Of exact
    training, norm: columns of its norm over all nodes, 0 without one; residual: whether the destination's row is added;
    trains: whether it has parameters; reversible: whether its input follows from its output. itemsize: bytes of a number that
    it computes with."""

    width: int
    out: int
    kind: Kind | None
    narrow: tuple[int, int] | None = None
    needs_initial: bool = False
    source_bytes: int = 0
    edge_bytes: int = 0
    norm: int = 0
    residual: bool = False
    trains: bool = False
    reversible: bool = False
    itemsize: int = 4


@dataclass(frozen=True)
class ModelShape:
    """A model on a graph. x_bytes: of a row of features on disk; x_plain: whether sums can be made of it as it is; encoded:
    columns after the encoder, 0 without one; slot_bytes: of an edge in the tiles; out: columns of the result, after any
    decoder. halo: sources behind the nodes, whose rows other ranks compute; recomputed: by layer, how many of these are
    computed here too for it to read, those that stand first, no more for a later layer than for one before. Of exact training,
    drops: whether the first layer's input passes dropout; itemsize: bytes of a number; encoder_trains: whether the encoder has
    parameters."""

    num_nodes: int
    num_edges: int
    x_bytes: int
    x_plain: bool
    x_width: int
    encoded: int
    slot_bytes: int
    layers: tuple[LayerShape, ...]
    out: int
    drops: bool = False
    itemsize: int = 4
    encoder_trains: bool = False
    halo: int = 0
    recomputed: tuple[int, ...] = ()

    def computed(self, layer: int) -> int:
        """Nodes whose rows are computed here for a layer to read; beyond the last, for the result."""
        return self.num_nodes + (self.recomputed[layer] if layer < len(self.recomputed) else 0)

    def destinations(self, op: Op) -> int:
        """Nodes that an op goes through: of gradients that are added up along the edges those of all the halo too."""
        if op.backward and op.kind == "add":
            return self.num_nodes + self.halo
        return self.computed(0 if op.kind == "map" else op.layer + 1)

    def rows_of(self, ref: ValueRef) -> int:
        """Rows of a value: what layers read along edges, and its gradient, has rows of all the halo. Gradients of sums are
        added up along all edges that are here, and have zeros for destinations that their layer does not compute."""
        if ref.role == "rows" or (ref == FEATURES and not self.mapped):
            return self.num_nodes + self.halo
        if ref.role == "sums" and ref.gradient:
            return self.computed(1)
        return self.computed(ref.layer + (ref.role in ("sums", "pre_norm")))

    @property
    def chunk_rows(self) -> int:
        """Rows that are computed together at most: those of a chunk, or of all nodes, the halo's too."""
        return min(CHUNK_ROWS, self.num_nodes + self.halo)

    @property
    def chunk_columns(self) -> int:
        """Columns of the rows of a chunk that one op reads and makes, at most."""
        first = self.x_width + sum(map(self.columns, self.made(0))) if self.mapped else 0
        return max([first, self.layers[-1].out + self.out, *[layer.width + layer.out for layer in self.layers]])

    @property
    def widest(self) -> int:
        """Columns of its widest rows."""
        return max([self.x_width, self.encoded, self.out, *[max(layer.width, layer.out) for layer in self.layers]])

    @property
    def has_sums(self) -> bool:
        """Whether any layer sums, and needs the edges in tiles."""
        return any(layer.kind for layer in self.layers)

    @property
    def mapped(self) -> bool:
        """Whether the features pass a map of their own before the first layer reads them: an encoder, a narrowing, or a dtype
        that is not summed."""
        sums = self.layers[0].kind is not None
        return bool(self.encoded) or self.narrows(0) or (sums and (not self.x_plain or self.drops))

    @property
    def needs_initial(self) -> bool:
        """Whether a layer returns to the first rows."""
        return any(layer.needs_initial for layer in self.layers)

    @property
    def initial_apart(self) -> bool:
        """Whether the first rows are kept for later layers in another form than the first layer reads."""
        return self.needs_initial and (self.narrows(0) or (self.layers[0].kind is not None and self.drops))

    def narrows(self, index: int) -> bool:
        """Whether a layer maps before it sums: where fewer columns pass; of the features as they are, half the bytes."""
        layer = self.layers[index]
        if layer.narrow is None:
            return False
        if index == 0 and self.x_plain and not self.encoded:
            return 2 * sum(layer.narrow) * _FLOAT <= self.x_bytes
        return sum(layer.narrow) < layer.width

    def rows(self, layer: int) -> ValueRef:
        """The value whose rows a layer sums or gathers."""
        return FEATURES if layer == 0 and not self.mapped else ValueRef("rows", layer)

    def self_rows(self, layer: int) -> ValueRef:
        """The value that has a layer's destinations' own rows."""
        narrow = self.layers[layer].narrow
        return ValueRef("self", layer) if self.narrows(layer) and narrow is not None and narrow[1] else self.rows(layer)

    @property
    def initial(self) -> ValueRef:
        """The value that has the first rows."""
        return ValueRef("initial") if self.initial_apart else self.rows(0)

    def made(self, layer: int) -> list[ValueRef]:
        """The values that are made for a layer to read; beyond the last the result."""
        if layer == len(self.layers):
            return [ValueRef("out", layer)]
        refs = list(dict.fromkeys([self.rows(layer), self.self_rows(layer)]))
        return [*refs, self.initial] if layer == 0 and self.initial_apart else refs

    def columns(self, ref: ValueRef) -> int:
        """Columns of rows, sums or their gradients."""
        if ref.role == "features":
            return self.x_width
        if ref.role == "initial":
            return self.encoded or self.x_width
        if ref.role == "out":
            return self.out
        layer = self.layers[ref.layer]
        if ref.role == "pre_norm":
            return layer.norm
        narrow = layer.narrow if self.narrows(ref.layer) else None
        if narrow is None:
            return layer.width
        return narrow[1] or narrow[0] if ref.role == "self" else narrow[0]

    def sums(self, layer: int) -> bool:
        """Whether a layer sums its neighbors' rows; else it gathers them."""
        return self.layers[layer].kind is not None

    def trained(self, layer: int) -> bool:
        """Whether anything below a layer has parameters: whether its rows need a gradient."""
        if layer == 0:
            return self.mapped and (self.encoder_trains or self.narrows(0))
        return self.layers[layer - 1].trains or self.narrows(layer) or self.trained(layer - 1)

    def own_gradient(self, layer: int) -> ValueRef | None:
        """The gradient of a layer's own rows, without what comes by edges where it sums; None where none is needed."""
        return ValueRef("self" if self.sums(layer) else "rows", layer, gradient=True) if self.trained(layer) else None

    def gradients(self, layer: int) -> list[ValueRef]:
        """The gradients that a layer's op leaves to the ops below."""
        own = self.own_gradient(layer)
        return [] if own is None else [ValueRef("sums", layer, gradient=True), own] if self.sums(layer) else [own]

    @property
    def initial_gradient(self) -> ValueRef | None:
        """The gradient of the first rows, where a layer returns to them and something below them has parameters."""
        return ValueRef("initial", gradient=True) if self.needs_initial and self.trained(0) else None


@dataclass(frozen=True)
class LayerPlan:
    """narrow: whether the layer's map comes before its sum. blocks: of columns that the input is kept in. rows: destinations
    that memory has sums for at a time, of one block; 0 for a layer that gathers. read, written: bytes, the edges' included."""

    narrow: bool
    blocks: int
    rows: int
    read: int
    written: int


@dataclass(frozen=True)
class LayerwisePlan:
    """How a pass goes. memory: bytes for sums, or for the rows of a gathering layer; in_ram: everything stays in memory;
    mapped: as of `ModelShape`; map_bytes, tile_bytes: read and written by the map, and to put the edges in order."""

    memory: int
    in_ram: bool
    mapped: bool
    layers: tuple[LayerPlan, ...]
    map_bytes: int
    tile_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes read and written in all."""
        return self.map_bytes + self.tile_bytes + sum(layer.read + layer.written for layer in self.layers)

    def moved(self, shape: ModelShape) -> tuple[int, int]:
        """(bytes read, bytes written): of a pass in memory the features, and twice the sources of all edges."""
        if self.in_ram:
            return shape.num_nodes * shape.x_bytes + 2 * 4 * shape.num_edges * shape.has_sums, 0
        tiles = shape.num_edges * shape.slot_bytes * shape.has_sums
        features = shape.num_nodes * shape.x_bytes * self.mapped
        read = features + self.tile_bytes - tiles + sum(layer.read for layer in self.layers)
        return read, self.nbytes - read

    @classmethod
    def of(cls, data: dict[str, Any]) -> "LayerwisePlan":
        """From its `dataclasses.asdict`, as JSON has it."""
        return cls(**{**data, "layers": tuple(LayerPlan(**layer) for layer in data["layers"])})


def plan_layerwise(shape: ModelShape, memory: int, may_keep: bool = True) -> LayerwisePlan:
    """The cheapest pass in `memory` bytes, beside what reading and writing need anyway. Which layers narrow first does not
    depend on the memory, nor does any result of layers that sum. may_keep: whether rows may stay in memory, which no other
    process sees. Raises BudgetError where not even the sums of a cell fit."""
    layers = range(len(shape.layers))
    if may_keep and ram_bytes(shape) <= memory:
        every = -(-max(1, shape.num_nodes) // cell_rows(shape)) * cell_rows(shape)
        plans = tuple(LayerPlan(shape.narrows(at), 1, every if shape.layers[at].kind else 0, 0, 0) for at in layers)
        return LayerwisePlan(memory, True, shape.mapped, plans, 0, 0)
    map_bytes = shape.num_nodes * (shape.x_bytes + _stored(shape, 0) * _FLOAT) if shape.mapped else 0
    plans = tuple(_plan_layer(shape, memory, index) for index in layers)
    tiles = shape.num_edges * (2 * 8 + shape.slot_bytes) if shape.has_sums else 0
    return LayerwisePlan(memory, False, shape.mapped, plans, map_bytes, tiles)


def cell_rows(shape: ModelShape) -> int:
    """`cell_rows_of` a model's graph."""
    return cell_rows_of(shape.num_nodes)


def cell_rows_of(num_nodes: int) -> int:
    """Ranges of destinations begin at multiples of it, where the edges of a piece can be cut: a multiple of `CHUNK_ROWS`."""
    return max(1, -(-num_nodes // (_MOST_CELLS * CHUNK_ROWS))) * CHUNK_ROWS


def summed_rows(shape: ModelShape) -> int:
    """Destinations whose sums are made at a time at least: those of a cell, or all where they are fewer."""
    return min(cell_rows(shape), max(1, shape.num_nodes + shape.halo))


def least_sums(shape: ModelShape) -> int:
    """Bytes for sums with which there is a plan of a pass: of all columns of the store's rows, and of a block of others."""
    rows = [shape.rows(at) for at in range(len(shape.layers)) if shape.sums(at)]
    columns = [shape.x_width if ref == FEATURES else min(shape.columns(ref), 2 * _LEAST_BLOCK) for ref in rows]
    return summed_rows(shape) * max(columns, default=0) * shape.itemsize


def ram_bytes(shape: ModelShape) -> int:
    """Bytes of a pass that keeps everything in memory: sums, two layers' rows, the features, the edges."""
    kept = shape.num_nodes * _FLOAT * 4 * shape.widest
    rows = max([shape.num_nodes * layer.source_bytes + shape.num_edges * layer.edge_bytes for layer in shape.layers])
    return kept + rows + shape.num_nodes * shape.x_bytes + 3 * shape.num_edges * shape.slot_bytes


def _plan_layer(shape: ModelShape, memory: int, index: int) -> LayerPlan:
    layer, nodes, stored = shape.layers[index], shape.num_nodes, shape.rows(index) == FEATURES
    columns, narrow = shape.columns(shape.rows(index)), shape.narrows(index)
    row = shape.x_bytes if stored else columns * _FLOAT
    beside = nodes * shape.columns(ValueRef("initial")) * _FLOAT if layer.needs_initial else 0
    written = nodes * _stored(shape, index + 1) * _FLOAT
    if layer.kind is None:
        passes = -(-nodes // max(1, memory // max(1, layer.source_bytes)))
        return LayerPlan(False, 1, 0, passes * nodes * row + shape.num_edges * 8 + beside, written)
    own = row if shape.self_rows(index) == shape.rows(index) else shape.columns(shape.self_rows(index)) * _FLOAT
    blocks, rows, read, summed = _cheapest(shape, memory, columns, row, stored)
    return LayerPlan(narrow, blocks, rows, read + nodes * own + beside, written + summed)


def _stored(shape: ModelShape, index: int) -> int:
    """Columns that are written for layer `index` to read; the result's beyond the last."""
    return sum(shape.columns(ref) for ref in shape.made(index))


def _cheapest(shape: ModelShape, memory: int, width: int, row_bytes: int, theirs: bool) -> tuple[int, int, int, int]:
    """(blocks, destinations at a time, bytes read for the sums, bytes of sums written) of a layer; theirs: the store's rows."""
    nodes, best = shape.num_nodes, None
    cell = summed_rows(shape)
    most = 1 if theirs else max(1, width // _LEAST_BLOCK)
    for blocks in range(1, most + 1):
        columns = -(-width // blocks)
        if blocks > 1 and columns * (blocks - 1) >= width:
            continue  # as many columns in fewer blocks
        rows = memory // (columns * _FLOAT) // cell * cell
        if rows == 0:
            continue
        passes = -(-nodes // rows)
        rows = -(-nodes // (passes * cell)) * cell  # equal ones
        summed = nodes * width * _FLOAT if blocks > 1 else 0
        read = passes * nodes * row_bytes + blocks * shape.num_edges * shape.slot_bytes + summed
        if best is None or read + summed < _NEARLY * (best[2] + best[3]):
            best = blocks, rows, read, summed
    if best is None:
        least = _LEAST_BLOCK if not theirs else width
        raise BudgetError(
            f"{format_bytes(memory)} of memory hold no sums of {cell:,} nodes in {width} columns: "
            f"give at least {format_bytes(cell * least * _FLOAT - memory)} more"
        )
    return best


def layer_op(shape: ModelShape, index: int, writes: Sequence[str] = ()) -> Op:
    """The op of a layer: it reads what the layer reads."""
    sums, initial = shape.sums(index), [shape.initial] if shape.layers[index].needs_initial else []
    reads = names_of([shape.self_rows(index), *initial] if sums else initial)
    kind: OpKind = "sum" if sums else "gather"
    return Op(f"layer{index}", kind, index, summed=shape.rows(index).name, reads=reads, writes=tuple(writes))


def forward_ops(shape: ModelShape, plan: LayerwisePlan) -> tuple[Op, ...]:
    """The ops of a pass, in order: "map", "layer0", "layer1"... A layer whose rows are kept in blocks of columns has its sums
    made before it, block by block."""
    ops = []
    if shape.mapped:
        ops.append(Op("map", "map", 0, reads=names_of([FEATURES]), writes=names_of(shape.made(0))))
    for index, layer in enumerate(plan.layers):
        for block in range(layer.blocks if layer.blocks > 1 else 0):
            rows, sums = (files_of(shape, plan, ref)[block][0] for ref in (shape.rows(index), ValueRef("sums", index)))
            ops.append(Op(f"sums{index}.{block}", "add", index, summed=rows, writes=(sums,)))
        op = layer_op(shape, index, names_of(shape.made(index + 1)))
        if layer.blocks > 1:  # the sums are read
            op = replace(op, summed="", reads=(*names_of([ValueRef("sums", index)]), *op.reads))
        ops.append(op)
    return tuple(ops)


def files_of(shape: ModelShape, plan: LayerwisePlan, ref: ValueRef) -> list[tuple[str, int]]:
    """(name, columns) of the files that a value is kept in, one a block of columns, as even as they can be. The names stay as
    they are."""
    width = shape.columns(ref)
    if ref.role not in ("rows", "sums"):
        return [(ref.name, width)]
    name, columns = "near" if ref.role == "rows" else "sum", -(-width // plan.layers[ref.layer].blocks)
    return [(f"{name}{ref.layer}.{number}", min(columns, width - at)) for number, at in enumerate(range(0, width, columns))]

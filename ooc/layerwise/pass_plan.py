"""PURE: a model's widths, the graph's size and the memory -> how each layer of a pass over all nodes is computed.

A layer that sums over neighbors can have its sums made while its input goes by once in file order, for as many destinations as
memory has sums for; the input is read again for the next ones. Where sums are wide that is many passes, and then it is
cheaper to keep the input by blocks of columns: a pass over one block makes that block's sums for many more destinations, which
wait on disk until all blocks are done. A layer that maps to fewer columns may map before it sums. A layer that needs the rows
themselves (attention, the user's own) gets them for a range of destinations at a time. Every choice is by bytes.
"""

from dataclasses import asdict, dataclass
from typing import Any

from ooc.graph.aggregation import Kind
from ooc.layerwise.edge_tiles import cell_rows_of
from ooc.layerwise.ir import FEATURES, ValueRef
from stores.errors import BudgetError
from stores.sizes import format_bytes

CHUNK_ROWS = 8192
"""Destinations whose rows are computed together: ranges end at multiples, so that a row's bits do not depend on the memory"""
_FLOAT = 4
_LEAST_BLOCK = 16
"""columns of a block at least: a cache line of sums"""
_NEARLY = 0.97
"""Blocks must save that much to be chosen: they meet every edge once each"""


@dataclass(frozen=True)
class LayerShape:
    """What a layer takes and gives. width: columns in; out: columns out.

    kind: of its sum over neighbors, None for a layer that needs the rows. narrow: columns of what is summed, and of what the
    destination adds beside it (0: the same rows), where the layer can map first, else None.
    source_bytes, edge_bytes: what a source's row and an edge take in memory while rows are computed (kind None).
    """

    width: int
    out: int
    kind: Kind | None
    narrow: tuple[int, int] | None = None
    needs_initial: bool = False
    source_bytes: int = 0
    edge_bytes: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A model on a graph. x_bytes: of a row of features on disk; x_plain: whether sums can be made of it as it is; encoded:
    columns after the encoder, 0 without one; slot_bytes: of an edge in the tiles (`ooc.layerwise.edge_tiles`)."""

    num_nodes: int
    num_edges: int
    x_bytes: int
    x_plain: bool
    x_width: int
    encoded: int
    slot_bytes: int
    layers: tuple[LayerShape, ...]
    out: int
    """columns of the result: after the decoder, where there is one"""
    drops: bool = False
    """whether the first layer's input passes dropout, as it does in training"""

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
        narrow = layer.narrow if self.narrows(ref.layer) else None
        if narrow is None:
            return layer.width
        return narrow[1] or narrow[0] if ref.role == "self" else narrow[0]


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
    mapped: the features pass a map of their own first (encoder, narrowing, or a dtype that is not summed)."""

    memory: int
    in_ram: bool
    mapped: bool
    layers: tuple[LayerPlan, ...]
    map_bytes: int
    """read and written by the map"""
    tile_bytes: int
    """read and written to put the edges in the pass's order"""

    @property
    def nbytes(self) -> int:
        """Bytes read and written in all."""
        return self.map_bytes + self.tile_bytes + sum(layer.read + layer.written for layer in self.layers)

    def moved(self, shape: "ModelShape") -> tuple[int, int]:
        """(bytes read, bytes written): of a pass in memory the features, and twice the sources of all edges."""
        summed = any(layer.kind for layer in shape.layers)
        if self.in_ram:
            return shape.num_nodes * shape.x_bytes + 2 * 4 * shape.num_edges * summed, 0
        tiles = shape.num_edges * shape.slot_bytes * summed
        features = shape.num_nodes * shape.x_bytes * self.mapped
        read = features + self.tile_bytes - tiles + sum(layer.read for layer in self.layers)
        return read, self.nbytes - read

    def asdict(self) -> dict[str, Any]:
        """For JSON; `of` reads it back."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> "LayerwisePlan":
        """From what `asdict` gave."""
        return cls(**{**data, "layers": tuple(LayerPlan(**layer) for layer in data["layers"])})


def plan_layerwise(shape: ModelShape, memory: int) -> LayerwisePlan:
    """The cheapest pass in `memory` bytes, beside what reading and writing need anyway.

    Which layers narrow first does not depend on the memory, nor does any result of layers that sum. Raises BudgetError where
    not even the sums of a few thousand nodes fit.

    >>> plan_layerwise(shape, memory=10**9).nbytes
    """
    layers = range(len(shape.layers))
    if ram_bytes(shape) <= memory:
        every = -(-max(1, shape.num_nodes) // cell_rows(shape)) * cell_rows(shape)
        plans = tuple(LayerPlan(shape.narrows(at), 1, every if shape.layers[at].kind else 0, 0, 0) for at in layers)
        return LayerwisePlan(memory, True, shape.mapped, plans, 0, 0)
    map_bytes = shape.num_nodes * (shape.x_bytes + _stored(shape, 0) * _FLOAT) if shape.mapped else 0
    plans = tuple(_plan_layer(shape, memory, index) for index in layers)
    tiles = shape.num_edges * (2 * 8 + shape.slot_bytes) if any(layer.kind for layer in shape.layers) else 0
    return LayerwisePlan(memory, False, shape.mapped, plans, map_bytes, tiles)


def cell_rows(shape: ModelShape) -> int:
    """Ranges of destinations begin at multiples of it."""
    return cell_rows_of(shape.num_nodes, CHUNK_ROWS)


def ram_bytes(shape: ModelShape) -> int:
    """Bytes of a pass that keeps everything in memory: sums, two layers' rows, the features, the edges."""
    widest = max([shape.x_width, shape.encoded, shape.out, *[max(layer.width, layer.out) for layer in shape.layers]])
    kept = shape.num_nodes * _FLOAT * 4 * widest
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
    nodes, cell, best = shape.num_nodes, cell_rows(shape), None
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


def columns_of(width: int, blocks: int) -> list[slice]:
    """The columns of each of so many blocks, as even as they can be.

    >>> columns_of(10, 3)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    columns = -(-width // blocks)
    return [slice(at, min(at + columns, width)) for at in range(0, width, columns)]

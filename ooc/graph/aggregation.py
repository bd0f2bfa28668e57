"""First-layer pre-aggregation: neighbor sums of the features, computed while loading.

GraphSAGE, GIN and GCN use the features of the outermost nodes only in sums over neighbors, and these sums have no parameters. A
batch then has two rows per destination of the first layer (neighbor sum and own row) instead of one per sampled node, a tenth
of the memory at fan-out [10, 10]. (SIGN and SGC do the same before training, over all neighbors.)

Rows are added in ascending order of the source node, ties in edge order, so gathering from memory (`gather_aggregates`) and
scanning in file order (`scatter_aggregates`) give bit-identical results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from numba import types
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from ooc.graph.blocks import Subgraph
from ooc.stores.arrays.encoding import Encoding, of_bfloat16, of_float16, of_int8
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel, overload
from ooc.stores.prefetch import prefetch

Floats = NDArray[np.float32]
Kind = Literal["mean", "sum", "expanded", "gcn"]
_NONE = np.empty(0, np.float32)
_FEW = 64
"""destinations with at most this many edges are sorted by insertion"""
_AHEAD, _LINE = 8, 16
"""entries between prefetching a sum and adding to it; float32 per cache line"""
_ROWS_AHEAD, _OWN_AHEAD, _LINE_BYTES = 24, 8, 64
"""edges between prefetching a source's row and adding it; destinations between prefetching rows and filling them; bytes of a
cache line"""


class FirstLayerAggregates(NamedTuple):
    """Replaces a batch's x: arrays while loading, tensors in the batch. d: destinations of the first layer."""

    neighbor: Any
    """float32[d, f]: weighted sum of each destination's sampled neighbors; read-only like `self_row`"""
    self_row: Any
    """float32[d, f]: each destination's own row; read-only, batches of a shared scan may share it"""

    def size(self, dim: int) -> int:
        """Size of a dimension, as of a tensor [d, f]."""
        return int(self.self_row.shape[dim])


class TypedAggregates(NamedTuple):
    """The first layer's aggregates of a batch of several types, while it is loaded, in place of its rows by node type."""

    neighbor: Any
    """edge type -> float32[d, f]: the mean of each destination's sampled neighbors"""
    self_rows: Any
    """node type -> [d, f]: the rows of its destinations"""


FirstInput = Tensor | FirstLayerAggregates
"""what a first layer accepts"""


class Factors(NamedTuple):
    """Factors of a sum; an empty array means ones."""

    edge: Floats
    """float32[e] or [0]: per edge"""
    target: Floats
    """float32[d] or [0]: per destination, applied to the whole sum"""


@dataclass(frozen=True)
class PreAggregation:
    """The neighbor sum of a model's first layer; see `ooc.models.convs`."""

    kind: Kind
    """in "expanded" each edge is weighted by the edges it represents, "gcn" is the symmetric normalization"""
    channels: int
    """width of the layer's output"""
    more_rows: float = 0.0
    """rows of that width a step allocates per destination besides `step_bytes`, for example by norms"""

    def step_bytes(self, num_nodes: Sequence[int], in_channels: int) -> int:
        """Bytes of activations and gradients in a training step, besides the batch (measured).

        That is 2.5 rows per destination of every layer, one more for GIN's perceptron and, except for the mean, one row as wide
        as the features. `num_nodes` is per hop.
        """
        rows = 2.5 + (self.kind in ("sum", "expanded")) + self.more_rows
        destinations = sum(accumulate(num_nodes[:-1]))
        added_up = 0 if self.kind == "mean" else in_channels * sum(num_nodes[:-1])
        return 4 * (round(rows * self.channels * destinations) + added_up)

    def weighs_edges(self, subgraph: Subgraph) -> bool:
        if self.kind == "mean":
            return subgraph.unequal
        return self.kind == "gcn" or (self.kind == "expanded" and subgraph.stands_for is not None)

    def factors(self, graph: Graph, subgraph: Subgraph) -> Factors:
        """Return the factors of a sampled batch's edges and destinations."""
        share = subgraph.share() if self.kind == "mean" else None
        if share is not None:
            return Factors(share, _NONE)
        if self.kind == "mean":
            return Factors(_NONE, _inverse_counts(subgraph.indptr))
        if self.kind == "sum":
            return Factors(_NONE, _NONE)
        count = np.diff(subgraph.indptr)
        if subgraph.stands_for is not None:
            expansion = Factors(subgraph.stands_for, _NONE)
        else:
            degree = graph.degree(subgraph.node[: len(count)])
            expansion = Factors(_NONE, (degree / np.maximum(count, 1)).astype(np.float32))
        return expansion if self.kind == "expanded" else _normalised(graph, subgraph, expansion)


@kernel
def _inverse_counts(indptr: NDArray[np.int64]) -> Floats:
    """1 / the edges of each destination, 1 where it has none."""
    inverse = np.empty(len(indptr) - 1, np.float32)
    for i in range(len(inverse)):
        inverse[i] = 1 / max(indptr[i + 1] - indptr[i], 1)
    return inverse


def _normalised(graph: Graph, subgraph: Subgraph, expansion: Factors) -> Factors:
    """GCN's factors of edges and destinations; see `gcn_factors`."""
    node, count = subgraph.node, np.diff(subgraph.indptr)
    inverse = gcn_factors(graph, node)
    edge = inverse[subgraph.source]
    if "weight" in graph.columns:
        loaded = subgraph.columns.get("weight")
        weight = np.asarray(graph.columns["weight"][subgraph.slot] if loaded is None else loaded, np.float32)
        with np.errstate(invalid="ignore"):
            edge = finite_or_zero(edge * weight)
    if len(graph.self_loops):
        edge[subgraph.source == np.repeat(np.arange(len(count)), count)] = 0
    if len(expansion.edge):
        edge = edge * expansion.edge
    target = inverse[: len(count)]
    return Factors(edge, target * expansion.target if len(expansion.target) else target)


def gcn_factors(graph: Graph, ids: NDArray[np.int64], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Return the factors of nodes `ids` (int64[n]) in GCN's symmetric normalization by the whole graph, [n] of `dtype`.

    This is the one rule for degrees that have no inverse root. A node's factor is 1 / sqrt(degree), its degree the sum of its
    in-weights with a self-loop. Where the degree is zero, negative, infinite or not a number, the factor is 0: the node neither
    gives nor takes anything. (PyG says so for zero and gives NaN for the others.) A weight that is infinite or not a number
    makes its destination's degree so; such an edge counts for 0 too.
    """
    dtype = np.dtype(dtype)
    loop: Any = graph.last_loop_weight(ids)
    loop = dtype.type(1) if loop is None else loop
    if graph.weight_sum is not None:
        degree = np.asarray(graph.weight_sum[ids], dtype) + loop
    else:
        degree = (graph.degree(ids) - (graph.loops(ids) if len(graph.self_loops) else 0)).astype(dtype) + loop
    with np.errstate(divide="ignore", invalid="ignore"):
        return finite_or_zero((1 / np.sqrt(degree)).astype(dtype))


def finite_or_zero(values: NDArray[Any]) -> NDArray[Any]:
    """In place: 0 for what is infinite or not a number."""
    values[~np.isfinite(values)] = 0
    return values


def without_last_hop(subgraph: Subgraph) -> Subgraph:
    """Return a copy of the subgraph without its last hop, whose edges are in the aggregates."""
    num_nodes, num_edges = subgraph.num_nodes[:-1], subgraph.num_edges[:-1]
    nodes, edges, expanded = sum(num_nodes), sum(num_edges), sum(num_nodes[:-1])
    return Subgraph(
        subgraph.node[:nodes].copy(),
        subgraph.indptr[: expanded + 1].copy(),
        subgraph.source[:edges].copy(),
        subgraph.slot[:edges].copy(),
        num_nodes,
        num_edges,
        None if subgraph.stands_for is None else subgraph.stands_for[:edges].copy(),
        {name: column[:edges].copy() for name, column in subgraph.columns.items()},
        None if subgraph.tree is None else subgraph.tree[:nodes].copy(),
        subgraph.unequal,
        None if subgraph.in_edges is None else subgraph.in_edges[:expanded].copy(),
        None if subgraph.counts_for is None else subgraph.counts_for[:edges].copy(),
        subgraph.score,
    )


class RowDecoder(NamedTuple):
    """How a kernel converts stored values to float32; see `ooc.stores.arrays.encoding.Encoding`."""

    tag: NDArray[Any]
    """empty; its dtype selects the encoding, so kernels are compiled per encoding (a branch in the inner loop halves speed)"""
    scale: Floats
    """float32[f] for int8, else empty"""

    @classmethod
    def of(cls, encoding: Encoding) -> "RowDecoder":
        """The decoder of an encoding with float32 values."""
        return cls(np.empty(0, np.int64 if encoding.as_float else _TAGS[encoding.name]), encoding.scale)


_TAGS: dict[str, Any] = {"float32": np.float32, "float16": np.uint8, "bfloat16": np.uint16, "int8": np.int8}


def value(stored: Any, j: int, tag: NDArray[Any], scale: Floats) -> np.float32:
    """Decode a number of column j; for kernels only, see `_value`."""
    raise NotImplementedError


@overload(value, inline="always", strict=False)  # strict would compare the annotations too
def _value(stored: Any, j: Any, tag: Any, scale: Any) -> Any:
    if tag.dtype == types.uint8:
        return lambda stored, j, tag, scale: of_float16(stored)
    if tag.dtype == types.uint16:
        return lambda stored, j, tag, scale: of_bfloat16(stored)
    if tag.dtype == types.int8:
        return lambda stored, j, tag, scale: of_int8(stored, scale[j])
    if tag.dtype == types.int64:
        return lambda stored, j, tag, scale: np.float32(stored)
    return lambda stored, j, tag, scale: stored


def gathered(
    rows: NDArray[Any],
    decoder: RowDecoder,
    at: NDArray[Any],
    subgraph: Subgraph,
    factors: Factors,
    neighbor: Floats,
    self_row: Floats,
) -> None:
    """Aggregate the batch's rows from memory: node i's row is rows[at[i]] (rows [m, f] as stored, at int[n]).

    Fills `neighbor` and `self_row`, float32[d, f], with the neighbor sums and the destinations' rows.
    """
    rows = rows.view(np.uint16) if rows.dtype == np.float16 else rows
    gather_aggregates(rows, *decoder, at, subgraph.node, subgraph.indptr, subgraph.source, *factors, neighbor, self_row)


def line_of(rows: NDArray[Any]) -> int:
    """How many numbers of an array a cache line has; for kernels only, where it is a constant."""
    raise NotImplementedError


@overload(line_of, inline="always", strict=False)
def _line_of(rows: Any) -> Any:
    line = _LINE_BYTES * 8 // rows.dtype.bitwidth
    return lambda rows: line


@kernel
def prefetch_row(rows: NDArray[Any], row: int) -> None:
    """Start loading a row of `rows`, [m, f]."""
    width = rows.shape[1]
    for f in range(0, width, line_of(rows)):
        prefetch(rows, row * width + f)


@kernel
def take_rows(rows: Floats, at: NDArray[Any], out: Floats) -> None:
    """Set out[i] to rows[at[i]]: `np.take` of rows that lie far apart, while the next ones are on their way from memory."""
    width = rows.shape[1]
    for i in range(len(at)):
        if i + _ROWS_AHEAD < len(at):
            coming = np.int64(at[i + _ROWS_AHEAD]) * width
            for f in range(0, width, _LINE):
                prefetch(rows, coming + f)
        row = at[i]
        for f in range(width):
            out[i, f] = rows[row, f]


@kernel
def gather_aggregates(
    rows: NDArray[Any],
    tag: NDArray[Any],
    scale: Floats,
    at: NDArray[Any],
    node: NDArray[np.int64],
    indptr: NDArray[Any],
    source: NDArray[Any],
    edge: Floats,
    target: Floats,
    neighbor: Floats,
    self_row: Floats,
) -> None:
    """Kernel of `gathered`. Numbers are read by row and column: a view of each row takes longer than the line it is in."""
    width, edges = rows.shape[1], indptr[len(indptr) - 1]
    most, sums = most_edges(indptr), np.empty(width, np.float32)
    order, ids = np.empty(most, np.int64), np.empty(most, np.int64)
    for i in range(len(indptr) - 1):
        if i + _OWN_AHEAD + 1 < len(indptr):
            prefetch_row(rows, at[i + _OWN_AHEAD])
            prefetch_row(self_row, i + _OWN_AHEAD)
            prefetch_row(neighbor, i + _OWN_AHEAD)
        own = at[i]
        for f in range(width):
            self_row[i, f] = value(rows[own, f], f, tag, scale)
            sums[f] = 0
        put_ascending(node, source, indptr[i], indptr[i + 1], order, ids)
        for k in range(indptr[i + 1] - indptr[i]):
            if indptr[i] + k + _ROWS_AHEAD < edges:  # in the order of the edges: near enough to the order of the sum
                prefetch_row(rows, at[source[indptr[i] + k + _ROWS_AHEAD]])
            row = at[source[order[k]]]
            if len(edge) == 0:
                for f in range(width):
                    sums[f] += value(rows[row, f], f, tag, scale)
            else:
                factor = edge[order[k]]
                for f in range(width):
                    sums[f] += factor * value(rows[row, f], f, tag, scale)
        times = target[i] if len(target) > 0 else np.float32(1)
        for f in range(width):
            neighbor[i, f] = sums[f] * times


@kernel
def gather_neighbors(
    rows: NDArray[Any],
    tag: NDArray[Any],
    scale: Floats,
    at: NDArray[Any],
    node: NDArray[np.int64],
    indptr: NDArray[Any],
    source: NDArray[Any],
    target: Floats,
    neighbor: Floats,
) -> None:
    """Fill `neighbor` (float32[d, f]) with each destination's sum over its in-edges, times its factor `target` (float32[d]).

    Source i's row is rows[at[i]], and its id node[i]. The sums are those of `gather_aggregates`, without factors of edges.
    """
    width, edges = rows.shape[1], indptr[len(indptr) - 1]
    most = most_edges(indptr)
    order, ids = np.empty(most, np.int64), np.empty(most, np.int64)
    for i in range(len(indptr) - 1):
        for f in range(width):
            neighbor[i, f] = 0
        put_ascending(node, source, indptr[i], indptr[i + 1], order, ids)
        for k in range(indptr[i + 1] - indptr[i]):
            if indptr[i] + k + _ROWS_AHEAD < edges:  # in the order of the edges: near enough to the order of the sum
                prefetch_row(rows, at[source[indptr[i] + k + _ROWS_AHEAD]])
            row = at[source[order[k]]]
            for f in range(width):
                neighbor[i, f] += value(rows[row, f], f, tag, scale)
        for f in range(width):
            neighbor[i, f] *= target[i]


def ascending_edges(subgraph: Subgraph, edge: Floats) -> tuple[NDArray[np.int32], Floats]:
    """(int32[e]: the sources, those of a destination in ascending order of the node; float32[e]: `edge` in that order)."""
    source, factor = np.empty(len(subgraph.source), np.int32), np.empty(len(edge), np.float32)
    _in_ascending_order(subgraph.node, subgraph.indptr, subgraph.source, edge, source, factor)
    return source, factor


@kernel
def _in_ascending_order(
    node: NDArray[np.int64],
    indptr: NDArray[Any],
    source: NDArray[Any],
    edge: Floats,
    out_source: NDArray[np.int32],
    out_edge: Floats,
) -> None:
    """Kernel of `ascending_edges`."""
    most = most_edges(indptr)
    order, ids = np.empty(most, np.int64), np.empty(most, np.int64)
    for i in range(len(indptr) - 1):
        put_ascending(node, source, indptr[i], indptr[i + 1], order, ids)
        for k in range(indptr[i + 1] - indptr[i]):
            out_source[indptr[i] + k] = source[order[k]]
            if len(edge):
                out_edge[indptr[i] + k] = edge[order[k]]


@kernel
def most_edges(indptr: NDArray[Any]) -> int:
    """Edges of the destination with the most."""
    most = 0
    for i in range(len(indptr) - 1):
        most = max(most, indptr[i + 1] - indptr[i])
    return most


@kernel
def put_ascending(
    node: NDArray[np.int64],
    source: NDArray[Any],
    first: int,
    stop: int,
    order: NDArray[np.int64],
    ids: NDArray[np.int64],
) -> None:
    """Set `order` to edges first:stop by ascending source node, ties in order. ids: memory for as many nodes."""
    if stop - first > _FEW:
        for k in range(stop - first):
            ids[k] = node[source[first + k]]
        found = np.argsort(ids[: stop - first], kind="mergesort")
        for k in range(stop - first):
            order[k] = found[k] + first
        return
    for k in range(stop - first):
        own = node[source[first + k]]
        place = k
        while place > 0 and ids[place - 1] > own:
            order[place], ids[place] = order[place - 1], ids[place - 1]
            place -= 1
        order[place], ids[place] = first + k, own


@kernel
def scatter_aggregates(
    rows: NDArray[Any],
    tag: NDArray[Any],
    scale: Floats,
    row_at: NDArray[np.int64],
    first: NDArray[np.int64],
    target: NDArray[np.int32],
    edge: Floats,
    neighbor: Floats,
    self_row: Floats,
) -> None:
    """Add rows read in file order to the sums of the destinations that use them.

    Row p of `rows` ([m] values) begins at row_at[p] and has entries first[p]:first[p + 1]. Entry k adds it to destination
    target[k] with factor edge[k] (empty for ones), or is the self row of destination ~target[k]. Fills float32[d, f].
    """
    width, flat = neighbor.shape[1], neighbor.reshape(-1)
    for p in range(len(row_at)):
        row = rows[row_at[p] : row_at[p] + width]
        for k in range(first[p], first[p + 1]):
            coming = target[min(k + _AHEAD, len(target) - 1)]
            if coming >= 0:
                for f in range(0, width, _LINE):
                    prefetch(flat, np.int64(coming) * width + f)
            to = target[k]
            if to < 0:
                for f in range(width):
                    self_row[~to, f] = value(row[f], f, tag, scale)
            elif len(edge) == 0:
                for f in range(width):
                    neighbor[to, f] += value(row[f], f, tag, scale)
            else:
                factor = edge[k]
                for f in range(width):
                    neighbor[to, f] += factor * value(row[f], f, tag, scale)


@kernel
def scale_rows(neighbor: Floats, target: Floats) -> None:
    """neighbor[i] *= target[i], for float32[d, f] and float32[d]."""
    for i in range(len(target)):
        for f in range(neighbor.shape[1]):
            neighbor[i, f] *= target[i]

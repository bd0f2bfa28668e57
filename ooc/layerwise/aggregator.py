"""Sums over all in-edges of a range of destinations, made while the rows are read once in file order.

Memory has one row of sums for each destination of the range, a few pieces of rows, and the edges between the two
(`ooc.layerwise.edge_tiles`). Threads share a piece's edges by destination: every sum is one thread's, in one order.
"""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ooc.graph.aggregation import Floats, Kind, RowDecoder, gcn_factors, value
from ooc.layerwise.edge_tiles import SOURCE_BITS, Ints, Tiles
from ooc.layerwise.io_stats import Noted, unnoted
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import ahead, read_range
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.arrays.segment_rows import SegmentRows
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel

AHEAD = 3
"""Pieces that are read while one is added"""
_ONES: Floats = np.empty(0, np.float32)
_SPARSE = 2
"""A piece is read whole where at least one in so many of its rows is wanted"""


class RowPiece(NamedTuple):
    """Rows in memory. value: their elements, as stored; row_at: int64[piece_rows], where each row begins among them."""

    first: int
    value: NDArray[Any]
    row_at: Ints
    entry: Ints
    weight: Floats


class SumKernel:
    """Adds rows to the sums of their out-neighbors. kind: as of `ooc.graph.aggregation.PreAggregation`; threads: that add;
    dtype: of the sums, float32 or float64; read: is called with what was read, in the threads that read."""

    def __init__(
        self, tiles: Tiles, graph: Graph, kind: Kind, threads: int, dtype: DTypeLike = np.float32, read: Noted = unnoted
    ) -> None:
        self._tiles, self._graph, self.kind, self._noted = tiles, graph, kind, read
        self._dtype = np.dtype(dtype)
        self._weighted = kind == "gcn" and tiles.weight is not None
        self._threads = threads
        self._buffers = Buffers(kept=AHEAD + 1, direct=True, least_bytes=1)
        self._readers = ThreadPoolExecutor(AHEAD, thread_name_prefix="ooc-piece")
        self._adders = ThreadPoolExecutor(threads, thread_name_prefix="ooc-add")

    def add(self, rows: Rows, code: RowDecoder, first: int, stop: int, sums: NDArray[Any]) -> None:
        """Fill sums [stop - first, f] with the sums of destinations first:stop over `rows` [N, f], before `scale`. first: a
        multiple of the grid's cells."""
        sums[:] = 0
        spans = self._tiles.spans(first, stop)
        for piece in ahead(self._readers, lambda span: self._read(rows, *span), spans, AHEAD):
            factor: NDArray[Any] = _ONES
            if self.kind == "gcn":
                factor = self._factors(piece.first, min(piece.first + self._tiles.grid.piece_rows, rows.shape[0]))
            self._scatter(piece, code, factor, first, stop, sums)

    def scale(self, first: int, sums: NDArray[Any]) -> None:
        """The factor of each destination first, first + 1, ... onto its sum ([d, f]): its mean, or GCN's."""
        if self.kind == "mean":
            sums *= mean_factors(self._graph, first, first + len(sums), sums.dtype)[:, None]
        elif self.kind == "gcn":
            factor = self._factors(first, first + len(sums))
            with np.errstate(invalid="ignore"):
                sums *= factor[:, None]
            sums[factor == 0] = 0  # also where an infinite weight was added

    def _factors(self, first: int, stop: int) -> NDArray[Any]:
        """GCN's factors of nodes first:stop."""
        return gcn_factors(self._graph, np.arange(first, stop), self._dtype)

    def _read(self, rows: Rows, number: int, low: int, high: int) -> RowPiece:
        """A piece of rows, or those of it that the edges low:high want."""
        piece_rows, width = self._tiles.grid.piece_rows, rows.shape[1]
        began, begin, end = perf_counter(), number * piece_rows, min((number + 1) * piece_rows, rows.shape[0])
        entry, weight, edge_bytes = self._tiles.read(low, high)
        if len(entry) * _SPARSE < end - begin:
            offset = np.unique(entry & ((1 << SOURCE_BITS) - 1))
            values, at, nbytes = self._some(rows, offset + begin)
            row_at = np.zeros(piece_rows, np.int64)
            row_at[offset] = at
        else:
            stored, nbytes = read_range(rows, begin, end, self._buffers)
            values, row_at = stored.reshape(-1), np.arange(piece_rows) * width
        self._noted(nbytes + edge_bytes, began)
        if values.dtype == np.float16:  # kernels know it by its bits only
            values = values.view(np.uint16)
        return RowPiece(begin, values, row_at, entry, weight if self._weighted else _ONES)

    def _some(self, rows: Rows, ids: Ints) -> tuple[AnyArray, Ints, int]:
        """(elements, where each of the rows `ids` begins among them, bytes read)."""
        if isinstance(rows, SegmentRows):
            plan = rows.plan(ids)
            buffer = self._buffers.empty((plan.nbytes,), np.dtype(np.uint8))
            nbytes = rows.engine.read(plan, buffer)
            return buffer.view(rows.dtype), plan.row_at // rows.dtype.itemsize, nbytes
        values = np.empty((len(ids), rows.shape[1]), rows.dtype)
        nbytes = rows.read(ids, values)
        return values.reshape(-1), np.arange(len(ids)) * rows.shape[1], nbytes

    def _scatter(
        self, piece: RowPiece, code: RowDecoder, factor: NDArray[Any], first: int, stop: int, sums: NDArray[Any]
    ) -> None:
        """Add a piece along its edges to destinations below `stop`, which threads share out."""
        count = int(np.searchsorted(piece.entry, stop << SOURCE_BITS))  # the last cell may have others beyond
        entry, weight = piece.entry[:count], piece.weight[:count]
        if not count:
            return
        cuts = [_cut(entry, len(entry) * k // self._threads) for k in range(self._threads)] + [len(entry)]

        def run(k: int) -> None:
            part = slice(cuts[k], cuts[k + 1])
            own = weight[part] if len(weight) else weight
            scatter_entries(piece.value, *code, piece.row_at, entry[part], own, factor, piece.first, first, sums)

        for future in [self._adders.submit(run, k) for k in range(self._threads) if cuts[k] < cuts[k + 1]]:
            future.result()

    def close(self) -> None:
        """End the threads; idempotent."""
        self._readers.shutdown(cancel_futures=True)
        self._adders.shutdown(cancel_futures=True)


def mean_factors(graph: Graph, first: int, stop: int, dtype: DTypeLike) -> NDArray[Any]:
    """What an in-edge counts for in the mean of each of nodes first:stop."""
    return (1 / np.maximum(np.diff(graph.indptr[first : stop + 1]), 1)).astype(dtype)


def _cut(entry: Ints, at: int) -> int:
    """The first entry of the destination that entry number `at` belongs to."""
    return int(np.searchsorted(entry, entry[at] >> SOURCE_BITS << SOURCE_BITS))


@kernel
def scatter_entries(
    values: NDArray[Any],
    tag: NDArray[Any],
    scale: Floats,
    row_at: Ints,
    entry: Ints,
    weight: Floats,
    factor: Floats,
    piece_first: int,
    first: int,
    sums: Floats,
) -> None:
    """sums[destination - first] += weight * factor * row, for every entry (see `ooc.layerwise.edge_tiles`) in order.

    values, tag, scale: see `ooc.graph.aggregation.scatter_aggregates`; weight: float32[k] or [0] for ones; factor:
    float32[piece rows], a source's of GCN's sum, which leaves self-loops and factors of 0 out, or [0] for ones.
    """
    width = sums.shape[1]
    mask = (1 << SOURCE_BITS) - 1
    for k in range(len(entry)):
        offset = entry[k] & mask
        to = (entry[k] >> SOURCE_BITS) - first
        row = values[row_at[offset] : row_at[offset] + width]
        if len(factor) == 0:
            for f in range(width):
                sums[to, f] += value(row[f], f, tag, scale)
        elif to + first != piece_first + offset and factor[offset] != 0:
            by = factor[offset]
            if len(weight) > 0:
                by = by * weight[k]
            for f in range(width):
                sums[to, f] += by * value(row[f], f, tag, scale)

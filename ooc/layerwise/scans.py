"""Scans of all destinations: sums made range by range, chunks read ahead, or the rows of a range's sources gathered."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.graph.aggregation import Kind, RowDecoder
from ooc.graph.blocks import gathered_block
from ooc.layerwise.aggregator import SumKernel
from ooc.layerwise.edge_tiles import Tiles, rows_over
from ooc.layerwise.io_stats import ADD, IoStats
from ooc.layerwise.ops import RangeOfNodes, own_place
from ooc.layerwise.pass_plan import CHUNK_ROWS, ModelShape, cell_rows
from ooc.layerwise.row_files import Kept
from ooc.layerwise.shape import gather_ranges
from ooc.models.dropout import Of
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import MemoryRows, ahead, one_ahead, read_range
from stores.arrays.encoding import Encoding
from stores.arrays.rows import Rows
from stores.dataset import Dataset
from stores.errors import BudgetError
from stores.sizes import format_bytes

Array = NDArray[Any]
UNIT_CELLS = 64
"""Cells of the grid between two nodes that a scan without sums can begin at"""
MOST_KEPT = 64 * 2**20
"""of a buffer that waits for its next use, as those of chunks do; those of gathered ranges take what memory there is"""
_DEPTH = 2
"""Chunks whose inputs are read ahead"""


class RowStore(Protocol):
    """Where values are read and put, by name; see `ooc.layerwise.pass_store` and `ooc.fullgraph.value_store`."""

    dtype: np.dtype[Any]

    def rows(self, name: str) -> Rows: ...
    def open(self, name: str) -> Kept: ...
    def read(self, name: str, first: int, stop: int) -> Array: ...
    def gather(self, name: str, node: NDArray[np.int64]) -> Array: ...
    def put(self, name: str, first: int, values: Array) -> None: ...
    def take(self, shape: tuple[int, ...]) -> Array: ...
    def give(self, array: Array) -> None: ...


class Pending(Protocol):
    """A chunk between its forward and its backward."""

    def fetch(self) -> None:
        """Read what of it is on disk; in any thread."""


class SumRequest(NamedTuple):
    """Sums to be made: `name` for the chunks, of the rows of `source`; back: along the edges turned round; keep: as a value."""

    name: str
    source: str
    kind: Kind
    back: bool
    keep: bool


class NodeChunk(NamedTuple):
    """Destinations, what was read for them by names of values, and what waits for its backward. ends: whether a scan can begin
    behind it."""

    place: RangeOfNodes
    read: dict[str, Array]
    live: Any
    ends: bool


class NodeScans:
    """Goes through the nodes.

    tiles: the edges, of a graph whose layers sum; and the transposed ones, where sums go back. keyed: whether dropout needs to
    know which edges a range has.
    """

    def __init__(
        self,
        dataset: Dataset,
        shape: ModelShape,
        store: RowStore,
        tiles: Sequence[Tiles],
        traffic: IoStats,
        device: torch.device,
        *,
        keyed: bool = False,
    ) -> None:
        self._dataset, self._graph, self._shape, self._store = dataset, dataset.graph, shape, store
        self._tiles, self._traffic, self._device, self._keyed = tiles, traffic, device, keyed
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="ooc-chunk")
        self._buffers = Buffers(kept=4, direct=True, least_bytes=1, most_kept=MOST_KEPT)
        self._threads = torch.get_num_threads()
        self._whole: dict[str, Any] = {}
        self.sum_bytes = 0
        """of memory that the sums of the range under way take, beside values"""

    def close(self) -> None:
        """End the threads; idempotent."""
        self._readers.shutdown(cancel_futures=True)

    def inverse_degree(self, first: int, stop: int) -> Array:
        """[stop - first]: what a node's in-edges count for in their mean."""
        degree = np.diff(self._graph.indptr[first : stop + 1])
        return (1 / np.maximum(degree, 1)).astype(self._store.dtype)

    # --- row by row ---

    def rows(
        self, names: list[str], sums: list[SumRequest], rows: int, live: Mapping[int, Pending], start: int, *, edges: bool
    ) -> Iterator[NodeChunk]:
        """Destinations from `start` on, chunk by chunk. names: values to read; rows: destinations that memory has sums for at a
        time; live: what waits, by first destination; edges: whether the layer needs what the graph says of its nodes."""
        nodes = self._shape.num_nodes
        if not sums:
            yield from self._chunks(names, {}, start, nodes, live, edges)
            return
        cell = cell_rows(self._shape)
        step = max(cell, min(rows // cell * cell, -(-nodes // cell) * cell))
        step = -(-nodes // (-(-nodes // step) * cell)) * cell  # equal ranges
        adders = [self._adder(each) for each in sums]
        own: list[Array] = []
        try:
            buffers = [self._buffer(each, min(step, nodes), own) for each in sums]
            stay = [not any(buffer is one for one in own) for buffer in buffers]  # made where they are to stand
            put = [each for each, stays in zip(sums, stay, strict=True) if each.keep and not stays]
            for first in range(start, nodes, step):
                stop = min(first + step, nodes)
                made = {}
                for each, adder, buffer in zip(sums, adders, buffers, strict=True):
                    made[each.name] = self._sum(each, adder, buffer, first, stop)
                for chunk in self._chunks(names, made, first, stop, live, edges):
                    for each in put:
                        self._store.put(each.name, chunk.place.first, chunk.read[each.name])
                    yield chunk
        finally:
            for adder in adders:
                adder.close()
            for buffer in own:
                self.sum_bytes -= buffer.nbytes
                self._store.give(buffer)

    def _adder(self, sums: SumRequest) -> SumKernel:
        tiles = self._tiles[sums.back]
        return SumKernel(tiles, self._graph, sums.kind, self._threads, self._store.dtype, self._traffic.read)

    def _buffer(self, sums: SumRequest, count: int, own: list[Array]) -> Array:
        """Room for a range's sums: where they are to stand, if that is memory, else one that is added to `own`."""
        if sums.keep:
            kept = self._store.open(sums.name)
            if isinstance(kept, MemoryRows):
                return kept.array
        own.append(self._store.take((count, self._store.rows(sums.source).shape[1])))
        self.sum_bytes += own[-1].nbytes
        return own[-1]

    def _sum(self, sums: SumRequest, adder: SumKernel, buffer: Array, first: int, stop: int) -> Array:
        whole = len(buffer) == self._shape.num_nodes
        made: Array = buffer[first:stop] if whole else buffer[: stop - first]
        encoding = self._dataset.encoding("x") if sums.source == "x" else Encoding.plain(np.dtype(np.float32))
        with self._traffic.timed(ADD):
            adder.add(self._store.rows(sums.source), RowDecoder.of(encoding), first, stop, made)
            adder.scale(first, made)
        return made

    def _chunks(
        self, names: list[str], made: dict[str, Array], first: int, stop: int, live: Mapping[int, Pending], edges: bool
    ) -> Iterator[NodeChunk]:
        cell = cell_rows(self._shape)

        def read(at: int) -> NodeChunk:
            end = min(at + CHUNK_ROWS, stop)
            found = {name: self._store.read(name, at, end) for name in names}
            found |= {name: sums[at - first : end - first] for name, sums in made.items()}
            waiting = live.get(at)
            if waiting is not None:
                waiting.fetch()
            ends = end == stop or (not made and end % (UNIT_CELLS * cell) == 0)
            return NodeChunk(own_place(self._graph, at, end, self._device, edges=edges), found, waiting, ends)

        return ahead(self._readers, read, range(first, stop, CHUNK_ROWS), _DEPTH)

    # --- from the rows of all sources ---

    def ranges(self, layer: int, memory: int, start: int) -> list[tuple[int, int]]:
        """Ranges of destinations whose sources' rows fit; see `ooc.layerwise.shape.gather_ranges`."""
        return list(gather_ranges(self._graph, self._shape.layers[layer], memory, start))

    def gathered(
        self, source: str, names: list[str], ranges: list[tuple[int, int]], live: Mapping[int, Pending]
    ) -> Iterator[NodeChunk]:
        """Range by range, with the rows of all sources under "rows". source: value; names: others to read."""

        def read(own: tuple[int, int]) -> NodeChunk:
            first, stop = own
            whole = stop - first == self._shape.num_nodes  # not the last range alone, where a step goes on
            place = self.place(first, stop, whole)
            found = {name: self._store.read(name, first, stop) for name in names}
            if whole:
                found["rows"] = self._store.read(source, first, stop)
            else:
                found["rows"] = self._store.gather(source, place.at["sources"])
            waiting = live.get(first)
            if waiting is not None:
                waiting.fetch()
            return NodeChunk(place, found, waiting, True)

        return one_ahead(self._readers, read, ranges)

    def place(self, first: int, stop: int, whole: bool) -> RangeOfNodes:
        """A range with its edges; exact steps cache that of the whole graph."""
        if whole and "place" in self._whole:
            place: RangeOfNodes = self._whole["place"]
            return place
        graph = self._graph
        node, block = gathered_block(graph, first, stop, *self._slots(first, stop), self._device)
        at: dict[Of, NDArray[np.int64]] = {"sources": node}
        if self._keyed:
            slots = np.arange(int(graph.indptr[first]), int(graph.indptr[stop]))
            at["edges"] = np.concatenate([slots, graph.num_edges + np.arange(first, stop)])
        place = RangeOfNodes(first, stop, at, block)
        if whole and self._keyed:  # a step meets it again; a pass needs its memory for the next layer
            self._whole["place"] = place
        return place

    def _slots(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
        """(sources, weights) of the in-edges of destinations first:stop."""
        graph, found = self._graph, []
        for name in ["indices", *(["weight"] if "weight" in graph.columns else [])]:
            column, began = graph.indices if name == "indices" else graph.columns[name], perf_counter()
            rows = rows_over(column, lambda name=name: self._dataset.edge_rows(name))  # type: ignore[misc]
            values, nbytes = read_range(rows, int(graph.indptr[first]), int(graph.indptr[stop]), self._buffers)
            self._traffic.read(nbytes, began)
            found.append(values)
        return found[0].astype(np.int64), found[1] if len(found) > 1 else None


def sum_rows(left: int, columns: int, itemsize: int, cell: int) -> int:
    """Destinations whose sums fit `left` bytes. Raises BudgetError where those of one cell of the grid do not."""
    rows = left // (columns * itemsize) // cell * cell
    if rows < cell:
        need = cell * columns * itemsize
        raise BudgetError(
            f"{format_bytes(max(0, left))} of memory hold no sums of {cell:,} nodes in {columns} columns: give at least "
            f"{format_bytes(need - left)} more"
        )
    return rows

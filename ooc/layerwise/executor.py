"""Carries out the ops of a forward pass by scans of all destinations, with nothing kept for a backward pass.

A scan has sums made range by range, chunks read ahead, or the rows of a range's sources gathered.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.graph.aggregation import Kind, RowDecoder
from ooc.graph.blocks import gathered_block
from ooc.layerwise.aggregator import SumKernel
from ooc.layerwise.device_sums import DeviceSums
from ooc.layerwise.edge_tiles import Tiles, rows_over
from ooc.layerwise.io_stats import ADD, COMPUTE, IoStats
from ooc.layerwise.node_ranges import NodeRange
from ooc.layerwise.numbering import WHOLE, Numbering
from ooc.layerwise.ops import LayerModules, RangeOfNodes, Tensors, inputs_of, own_place
from ooc.layerwise.pass_plan import CHUNK_ROWS, LayerwisePlan, ModelShape, Op, cell_rows
from ooc.layerwise.row_files import MOST_KEPT, Array, RowStore
from ooc.layerwise.shape import gather_ranges
from ooc.models.dropout import Of
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import MemoryRows, ahead, read_range
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.bounds import check_nodes
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_bytes

GATHERED_ROWS = "rows"
"""name of a range's sources' rows among what is read for it"""
UNIT_CELLS = 64
"""Cells of the grid between two nodes that a scan without sums can begin at"""
_DEPTH = 2
"""Chunks whose inputs are read ahead"""
Fetch = Callable[[int], Any]
"""fetch(first destination of a chunk) -> what else the chunk needs; called in a thread that reads ahead"""


class SumRequest(NamedTuple):
    """Sums to be made: `name` for the chunks, of the rows of `source`; back: along the edges turned round; keep: as a value."""

    name: str
    source: str
    kind: Kind
    back: bool
    keep: bool


class NodeChunk(NamedTuple):
    """Destinations, what was read for them by names of values, and what was fetched besides. ends: whether a scan can begin
    behind it."""

    place: RangeOfNodes
    read: dict[str, Array | Tensor]
    fetched: Any
    ends: bool


class NodeScans:
    """Scans of all nodes. tiles: the edges, of a graph whose layers sum; and the transposed ones, where sums go back. keyed:
    whether dropout needs to know which edges a range has. numbering: of the nodes in the whole graph. there: given where the
    store has all rows on the device: the edges are there too, both ways, without tiles, and sums are made there. It is told how
    many edges were copied."""

    def __init__(
        self,
        dataset: Dataset,
        shape: ModelShape,
        store: RowStore,
        tiles: Sequence[Tiles],
        stats: IoStats,
        device: torch.device,
        *,
        keyed: bool = False,
        numbering: Numbering = WHOLE,
        there: Callable[[int], None] | None = None,
    ) -> None:
        self._numbering = numbering
        self._dataset, self.graph, self._shape, self._store = dataset, dataset.graph, shape, store
        self._tiles, self.stats, self._device, self._keyed = tiles, stats, device, keyed
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="ooc-chunk")
        self._buffers = Buffers(kept=4, direct=True, least_bytes=1, most_kept=MOST_KEPT)
        self._whole: dict[int, RangeOfNodes] = {}
        self.sum_bytes = 0
        """of memory that the sums of the range under way take, beside values"""
        self._there = self._copied_edges(there) if there is not None and shape.has_sums else None

    def _copied_edges(self, copied: Callable[[int], None]) -> DeviceSums:
        def slots(first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
            copied(int(self.graph.indptr[first]))
            return self._slots(first, stop)

        kinds = {layer.kind for layer in self._shape.layers if layer.kind is not None}
        made = self._store.dtype, self._device, CHUNK_ROWS
        return DeviceSums(self.graph, slots, kinds, *made, undirected=self._dataset.manifest.undirected)

    def close(self) -> None:
        """End the threads; idempotent."""
        self._readers.shutdown(cancel_futures=True)

    def rows(
        self,
        names: list[str],
        sums: list[SumRequest],
        rows: int,
        fetch: Fetch,
        start: int,
        *,
        edges: bool,
        nodes: NodeRange | None = None,
    ) -> Iterator[NodeChunk]:
        """Destinations from `start` on, chunk by chunk. names: values to read; rows: destinations that memory has sums for at a
        time; edges: whether the layer needs what the graph says of its nodes; nodes: those that are computed, None: all."""
        begin, end = nodes or (0, self._shape.num_nodes)
        if not sums or self._there is not None:
            for chunk in self._chunks(names, {}, start, end, fetch, edges):
                self._sum_there(sums, chunk)
                yield chunk
            return
        cell, count = cell_rows(self._shape), end - begin
        step = max(cell, min(rows // cell * cell, -(-count // cell) * cell))
        step = -(-count // (-(-count // step) * cell)) * cell  # equal ranges
        threads, dtype, read = torch.get_num_threads(), self._store.dtype, self.stats.read
        adders = [SumKernel(self._tiles[each.back], self.graph, each.kind, threads, dtype, read) for each in sums]
        own: list[Array] = []
        try:
            buffers = [self._buffer(each, min(step, count), own) for each in sums]
            stay = [not any(buffer is one for one in own) for buffer in buffers]  # made where they are to stand
            put = [each for each, stays in zip(sums, stay, strict=True) if each.keep and not stays]
            for first in range(start, end, step):
                stop = min(first + step, end)
                made = {}
                for each, adder, buffer in zip(sums, adders, buffers, strict=True):
                    made[each.name] = self._sum(each, adder, buffer, first, stop, whole=len(buffer) == end)
                for chunk in self._chunks(names, made, first, stop, fetch, edges):
                    for each in put:
                        self._store.put(each.name, chunk.place.first, chunk.read[each.name])
                    yield chunk
        finally:
            for adder in adders:
                adder.close()
            for buffer in own:
                self.sum_bytes -= buffer.nbytes
                self._store.give(buffer)

    def _sum_there(self, sums: list[SumRequest], chunk: NodeChunk) -> None:
        """Make a chunk's sums on the device."""
        place = chunk.place
        for each in sums:
            assert self._there is not None
            made = self._there.sum(self._store.device_rows(each.source), each.kind, each.back, place.first, place.stop)
            chunk.read[each.name] = made
            if each.keep:
                self._store.put(each.name, place.first, made)

    def _buffer(self, sums: SumRequest, count: int, own: list[Array]) -> Array:
        """Room for a range's sums: where they are to stand, if that is memory, else one that is added to `own`."""
        if sums.keep:
            kept = self._store.open(sums.name)
            if isinstance(kept, MemoryRows):
                return kept.array
        own.append(self._store.take((count, self._store.rows(sums.source).shape[1])))
        self.sum_bytes += own[-1].nbytes
        return own[-1]

    def _sum(self, sums: SumRequest, adder: SumKernel, buffer: Array, first: int, stop: int, *, whole: bool) -> Array:
        made: Array = buffer[first:stop] if whole else buffer[: stop - first]
        encoding = self._dataset.encoding("x") if sums.source == "x" else Encoding.plain(np.dtype(np.float32))
        with self.stats.timed(ADD):
            adder.add(self._store.rows(sums.source), RowDecoder.of(encoding), first, stop, made)
            adder.scale(first, made)
        return made

    def _chunks(
        self, names: list[str], made: dict[str, Array], first: int, stop: int, fetch: Fetch, edges: bool
    ) -> Iterator[NodeChunk]:
        unit = UNIT_CELLS * cell_rows(self._shape)

        def read(at: int) -> NodeChunk:
            end = min(at + CHUNK_ROWS, stop)
            found: dict[str, Array | Tensor] = {name: self._store.read(name, at, end) for name in names}
            found |= {name: sums[at - first : end - first] for name, sums in made.items()}
            ends = end == stop or (not made and end % unit == 0)
            place = own_place(self.graph, at, end, self._device, edges=edges, numbering=self._numbering)
            return NodeChunk(place, found, fetch(at), ends)

        return ahead(self._readers, read, range(first, stop, CHUNK_ROWS), _DEPTH)

    def gathered(
        self, source: str, names: list[str], ranges: list[tuple[int, int]], fetch: Fetch, count: int
    ) -> Iterator[NodeChunk]:
        """Range by range, with the rows of all sources as `GATHERED_ROWS`. source: value; names: others to read; count: nodes
        that are computed in all."""

        def read(own: tuple[int, int]) -> NodeChunk:
            first, stop = own
            whole = stop - first == count  # not the last range alone, where a step goes on
            place = self.place(first, stop, whole)
            found: dict[str, Array | Tensor] = {name: self._store.read(name, first, stop) for name in names}
            assert place.sources is not None
            if whole and len(place.sources) == int(place.sources[-1]) + 1:  # which ascend
                found[GATHERED_ROWS] = self._store.read(source, 0, len(place.sources))
            else:
                found[GATHERED_ROWS] = self._store.gather(source, place.sources)
            return NodeChunk(place, found, fetch(first), True)

        return ahead(self._readers, read, ranges, 2, concurrent=False)

    def place(self, first: int, stop: int, whole: bool) -> RangeOfNodes:
        """A range with its edges; exact steps cache that of the whole graph."""
        if whole and stop in self._whole:
            return self._whole[stop]
        graph = self.graph
        node, block = gathered_block(graph, first, stop, *self._slots(first, stop), self._device)
        at: dict[Of, NDArray[np.int64]] = {"sources": self._numbering.nodes_at(node)}
        if self._keyed:
            at["edges"] = self._numbering.edges(graph, first, stop)
        place = RangeOfNodes(first, stop, at, block, node)
        if whole and self._keyed:  # a step meets it again; a pass needs its memory for the next layer
            self._whole[stop] = place
        return place

    def _slots(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
        """(sources, weights) of the in-edges of destinations first:stop."""
        graph, found = self.graph, []
        for name in ["indices", *(["weight"] if "weight" in graph.columns else [])]:
            column, began = graph.indices if name == "indices" else graph.columns[name], perf_counter()
            rows = rows_over(column, lambda name=name: self._dataset.edge_rows(name))  # type: ignore[misc]
            values, nbytes = read_range(rows, int(graph.indptr[first]), int(graph.indptr[stop]), self._buffers)
            self.stats.read(nbytes, began)
            if name == "indices":
                check_nodes("graph/indices", int(graph.indptr[first]), values, graph.num_nodes)
            found.append(values)
        return found[0].astype(np.int64), found[1] if len(found) > 1 else None


class ForwardExecutor:
    """Computes chunks of nodes and puts what they give into a store."""

    def __init__(self, modules: LayerModules, store: RowStore, scans: NodeScans) -> None:
        self.modules, self.store, self.scans, self.stats = modules, store, scans, scans.stats
        self._dtype = torch.float64 if store.dtype == np.float64 else torch.float32

    def run_op(self, op: Op, plan: LayerwisePlan, start: int, nodes: NodeRange | None = None) -> Iterator[int]:
        """Run an op of a pass from node `start` on; yields how far it came, where it can go on from there later. nodes: those
        that are computed, None: all."""
        inputs = {} if op.kind == "add" else inputs_of(self.modules.shape, op)
        kind, sums = self.modules.shape.layers[op.layer].kind, []
        if kind is not None and op.summed:  # else there are none, or they were made by blocks
            sums.append(SumRequest(op.writes[0] if op.kind == "add" else inputs["sums"], op.summed, kind, False, False))
        room = plan.memory if op.kind == "gather" else plan.layers[op.layer].rows

        def compute(chunk: NodeChunk) -> Tensors:
            if op.kind == "add":
                return {op.writes[0]: self.store.tensor(chunk.read[op.writes[0]])}
            return self.compute(op, chunk.place, self.given(inputs, chunk))

        for chunk in self.chunks(op, inputs, sums, room, start, nodes=nodes):
            self.run_chunk(chunk, compute, op.writes)
            if chunk.ends:
                yield chunk.place.stop

    def chunks(
        self,
        op: Op,
        inputs: dict[str, str],
        sums: list[SumRequest],
        room: int,
        start: int,
        more: Iterable[str] = (),
        fetch: Fetch = lambda first: None,
        nodes: NodeRange | None = None,
    ) -> Iterator[NodeChunk]:
        """The chunks of an op from node `start` on, with its inputs, the sums that are made meanwhile, and `more` values. room:
        destinations whose sums fit the memory at a time; of an op that gathers, bytes for two of its ranges; nodes: those that
        are computed, None: all."""
        made = {each.name for each in sums}
        names = [name for role, name in inputs.items() if not (op.kind == "gather" and role == "rows")]
        names = list(dict.fromkeys(name for name in (*names, *more) if name not in made))
        nodes = nodes or (0, self.modules.shape.destinations(op))
        if op.kind == "gather":
            layer = self.modules.shape.layers[op.layer]
            ranges = list(gather_ranges(self.scans.graph, layer, room, start, nodes[1]))
            return self.scans.gathered(op.summed, names, ranges, fetch, self.modules.shape.destinations(op))
        return self.scans.rows(names, sums, room, fetch, start, edges=op.kind == "sum", nodes=nodes)

    def run_chunk(self, chunk: NodeChunk, compute: Callable[[NodeChunk], Tensors], writes: Iterable[str]) -> Tensors:
        """A chunk's outputs by the names of values, once those of `writes` are put."""
        with self.stats.timed(COMPUTE):
            outputs = compute(chunk)
        names = list(writes)
        for name, rows in zip(names, self.store.computed([outputs[name].to(self._dtype) for name in names]), strict=True):
            self.store.put(name, chunk.place.first, rows)
        return outputs

    def given(self, inputs: dict[str, str], chunk: NodeChunk) -> Tensors:
        """A chunk's inputs by role."""
        tensor = self.modules.tensor
        return {role: tensor(chunk.read[GATHERED_ROWS if role == "rows" else name]) for role, name in inputs.items()}

    def compute(self, op: Op, place: RangeOfNodes, given: Tensors) -> Tensors:
        """The row-wise part of an op."""
        return self.modules.map(given, place) if op.kind == "map" else self.modules.layer(op.layer, given, place)


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

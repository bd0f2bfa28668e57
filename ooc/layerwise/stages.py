"""The stages of a sweep over all nodes, each a walk through the destinations that can begin anywhere it once stopped.

`Runner.run(stage, start)` yields the node up to which the stage's rows are written. A layer's input stands as `near` (what is
summed, by blocks of columns), perhaps `root` (what the destination adds, where the layer narrowed first), and `initial`; what
comes out of layer l is written as layer l + 1 wants it.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.graph.aggregation import FirstLayerAggregates, Floats, Kind, RowDecoder
from ooc.graph.range_blocks import columns_of, gathered_block, own_block
from ooc.layerwise.aggregator import SumKernel
from ooc.layerwise.edge_tiles import Tiles, rows_over
from ooc.layerwise.plan import CHUNK_ROWS, LayerwisePlan, ModelShape
from ooc.layerwise.row_files import Files, Kept, RowWriter
from ooc.layerwise.shape import gather_ranges
from ooc.models.layers import as_input
from ooc.runtime.buffers import Buffers
from ooc.runtime.prefetch import ahead
from ooc.runtime.range_io import read_range
from stores.arrays.encoding import Encoding
from stores.arrays.rows import Rows
from stores.dataset import Dataset

UNIT_CHUNKS = 64
"""Chunks between two notes of progress, where no pass over the input is at stake"""
_DEPTH = 2
"""Chunks whose inputs are read ahead"""
_FLOAT32 = Encoding.plain(np.dtype(np.float32))


class LayerStage(NamedTuple):
    """kind: "map" (features), "sum" (of one block of columns, onto disk), "layer" (rows from sums), "gather" (rows from
    sources); layer: of the model; block: of columns."""

    kind: str
    layer: int
    block: int = 0

    @property
    def text(self) -> str:
        """For people."""
        named = {"map": "features", "sum": f"layer {self.layer}, sums {self.block}"}
        return named.get(self.kind, f"layer {self.layer}")


class LayerObserver(Protocol):
    """Is shown what every layer gives, as it is made: each layer's rows in ascending order, chunk by chunk."""

    def rows(self, layer: int, first: int, values: Floats) -> None:
        """Rows first, first + 1, ... of a layer: float32[n, width]."""

    def note(self) -> None:
        """Before a sweep notes how far it came: what was shown up to here is not shown again after a crash."""


class StoredSource(NamedTuple):
    """Rows by columns, as they are stored."""

    rows: list[Rows]
    encoding: Encoding


class ChunkInputs(NamedTuple):
    """Inputs of destinations first:stop; float32[stop - first, ...], None for what is not needed or in memory already."""

    first: int
    stop: int
    near: Floats | None
    root: Floats | None
    initial: Floats | None


class Runner:
    """Carries out the stages. encoder, layers, decoder: in evaluation mode; tiles: None where no layer sums."""

    def __init__(
        self,
        parts: tuple[nn.Module | None, list[nn.Module], nn.Module | None],
        shape: ModelShape,
        plan: LayerwisePlan,
        dataset: Dataset,
        files: Files,
        tiles: Tiles | None,
        tap: LayerObserver | None = None,
    ) -> None:
        self.tap = tap
        self.encoder, layers, self.decoder = parts
        self.layers: list[Any] = list(layers)
        self.shape, self.plan, self.dataset, self.files, self.tiles = shape, plan, dataset, files, tiles
        present = [part for part in (self.encoder, *self.layers, self.decoder) if part is not None]
        self._present = present
        parameter = next((p for part in present for p in part.parameters()), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        self._writer = RowWriter(self._note_written)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="ooc-chunk")
        self._buffers = Buffers(kept=4 * _DEPTH, direct=True, least_bytes=1)
        self._threads = torch.get_num_threads()
        self._lock = threading.Lock()
        self.bytes_read = self.bytes_written = self.edge_bytes_read = 0

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    def _note_written(self, nbytes: int, began: float) -> None:
        with self._lock:
            self.bytes_written += nbytes

    def close(self) -> None:
        """End the threads; idempotent."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.close()

    def run(self, stage: LayerStage, start: int) -> Iterator[int]:
        """Go on with a stage from node `start`; yields how far its rows are written (not yet synced)."""
        walk = {"map": self._map, "sum": self._sum, "layer": self._layer, "gather": self._gather}[stage.kind]
        for stop in walk(stage, start):
            self._writer.drain()
            yield stop

    # --- what stands where ---

    def names(self, stage: LayerStage) -> list[str]:
        """The rows that a stage writes."""
        if stage.kind == "sum":
            return [f"sum{stage.layer}.{stage.block}"]
        following = 0 if stage.kind == "map" else stage.layer + 1
        own = ["initial"] if stage.kind == "map" and self._initial_apart else []
        return own + [name for name, _ in self._kept(following)]

    def wanted(self, stage: LayerStage) -> set[str]:
        """The rows that a stage and those after it read, and what it writes."""
        names = {"out", *self.names(stage)}
        names |= {f"sum{stage.layer}.{block}" for block in range(self.plan.layers[stage.layer].blocks)}
        names |= {name for name, _ in self._kept(stage.layer)} if stage.kind != "map" else set()
        if any(layer.needs_initial for layer in self.shape.layers[stage.layer :]):
            names |= {"initial", *(name for name, _ in self._kept(0))}
        return names

    @property
    def _initial_apart(self) -> bool:
        """Whether the first rows are kept for later layers in another form than the first layer reads."""
        return any(layer.needs_initial for layer in self.shape.layers) and self.plan.layers[0].narrow

    def _kept(self, index: int) -> list[tuple[str, int]]:
        """(name, columns) of the rows that layer `index` reads; of the result beyond the last."""
        if index == len(self.layers):
            return [("out", self.shape.out)]
        layer, plan = self.shape.layers[index], self.plan.layers[index]
        near, root = layer.narrow if plan.narrow and layer.narrow is not None else (layer.width, 0)
        blocks = [(f"near{index}.{b}", own.stop - own.start) for b, own in enumerate(columns_of(near, plan.blocks))]
        return blocks + ([(f"root{index}", root)] if root else [])

    def open(self, name: str, columns: int) -> Kept:
        """Rows of that name, made where there are none."""
        return self.files.rows(name, (self.shape.num_nodes, columns))

    def _source(self, index: int, part: str) -> StoredSource:
        """What layer `index` reads as its `near` or `root`."""
        if index == 0 and not self.plan.mapped:
            return StoredSource([self.dataset.stored("x")], self.dataset.encoding("x"))
        named = [(name, columns) for name, columns in self._kept(index) if name.startswith(part)]
        return StoredSource([self.open(*each) for each in named], _FLOAT32) if named else self._source(index, "near")

    def _initial(self) -> StoredSource:
        if self._initial_apart:
            return StoredSource([self.open("initial", self.shape.encoded or self.shape.x_width)], _FLOAT32)
        return self._source(0, "near")

    # --- chunks ---

    def _floats(self, source: StoredSource, first: int, stop: int) -> Floats:
        """float32[stop - first, columns of all its rows]."""
        parts = []
        for rows in source.rows:
            values, nbytes = read_range(rows, first, stop, self._buffers)
            self._count(nbytes)
            if source.encoding.is_short:
                held = values
                values = self._buffers.empty(held.shape, np.dtype(np.float32))
                source.encoding.gather(held, np.arange(len(held)), values)
            parts.append(values.astype(np.float32, copy=False))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _chunks(self, index: int, first: int, stop: int, near: StoredSource | None) -> Iterator[ChunkInputs]:
        """Inputs of layer `index` for destinations first:stop, chunk by chunk, read ahead; near: sums on disk."""
        root = self._source(index, "root")
        initial = self._initial() if self.shape.layers[index].needs_initial else None

        def read(at: int) -> ChunkInputs:
            end = min(at + CHUNK_ROWS, stop)
            own = [None if each is None else self._floats(each, at, end) for each in (near, root, initial)]
            return ChunkInputs(at, end, *own)

        return ahead(self._readers, read, range(first, stop, CHUNK_ROWS), _DEPTH)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor: Tensor = as_input(torch.from_numpy(array).to(self._device), *self._present)
        return tensor

    def _computed(self, index: int, chunk: ChunkInputs, near: Floats) -> Tensor:
        """Rows of layer `index` from its destinations' sums."""
        layer = self.layers[index]
        assert chunk.root is not None, "a layer that sums has its destinations' rows too"
        block = own_block(self.dataset.graph, chunk.first, chunk.stop, self._device)
        neighbor_rows, root = self._tensor(near), self._tensor(chunk.root)
        out: Tensor
        if self.plan.layers[index].narrow:
            out = layer.joined(neighbor_rows, root, block)
        else:
            extra = () if chunk.initial is None else (self._tensor(chunk.initial),)
            out = layer(FirstLayerAggregates(neighbor_rows, root), block, *extra)
        return out

    def _put(self, following: int, first: int, h: Tensor) -> None:
        """Write rows as layer `following` reads them; the result, through the decoder, beyond the last."""
        parts: list[tuple[str, Tensor]]
        if self.tap is not None and following:
            self.tap.rows(following - 1, first, h.float().cpu().numpy())
        if following == len(self.layers):
            parts = [("out", h if self.decoder is None else self.decoder(h))]
        else:
            plan, near, root = self.plan.layers[following], h, None
            if plan.narrow:
                near, root = self.layers[following].conv.narrowed(h)
            blocks = enumerate(columns_of(near.size(1), plan.blocks))
            parts = [(f"near{following}.{block}", near[:, own]) for block, own in blocks]
            parts += [(f"root{following}", root)] if root is not None and root is not near else []
        for name, rows in parts:
            values = rows.float().cpu().numpy()
            self._writer.put(self.open(name, values.shape[1]), first, values)

    # --- stages ---

    def _map(self, stage: LayerStage, start: int) -> Iterator[int]:
        """The features through the encoder, and as the first layer reads them."""
        source, nodes = StoredSource([self.dataset.stored("x")], self.dataset.encoding("x")), self.shape.num_nodes

        def read(at: int) -> tuple[int, Floats]:
            return at, self._floats(source, at, min(at + CHUNK_ROWS, nodes))

        starts = range(start, nodes, CHUNK_ROWS)
        for number, (first, x) in enumerate(ahead(self._readers, read, starts, _DEPTH), 1):
            rows = self._tensor(x)
            rows = rows if self.encoder is None else self.encoder(rows)
            if self._initial_apart:
                self._writer.put(self.open("initial", rows.size(1)), first, rows.float().cpu().numpy())
            self._put(0, first, rows)
            if number % UNIT_CHUNKS == 0 or first + len(x) == nodes:
                yield first + len(x)

    def _sum(self, stage: LayerStage, start: int) -> Iterator[int]:
        """The sums of one block of columns, range by range, onto disk."""
        source = self._source(stage.layer, "near")
        rows = source.rows[stage.block]
        out = self.open(f"sum{stage.layer}.{stage.block}", rows.shape[1])
        for first, stop, near in self._passes(stage, start, rows, _FLOAT32):
            for at in range(first, stop, CHUNK_ROWS):
                self._writer.put(out, at, near[at - first : min(at + CHUNK_ROWS, stop) - first])
            yield stop

    def _layer(self, stage: LayerStage, start: int) -> Iterator[int]:
        """Rows of a layer from its sums: made here, or on disk."""
        index, nodes, plan = stage.layer, self.shape.num_nodes, self.plan.layers[stage.layer]
        source = self._source(index, "near")
        if plan.blocks > 1:
            summed = [self.open(f"sum{index}.{block}", rows.shape[1]) for block, rows in enumerate(source.rows)]
            unit = UNIT_CHUNKS * CHUNK_ROWS
            for chunk in self._chunks(index, start, nodes, StoredSource(list(summed), _FLOAT32)):
                assert chunk.near is not None
                self._put(index + 1, chunk.first, self._computed(index, chunk, chunk.near))
                if chunk.stop % unit == 0 or chunk.stop == nodes:
                    yield chunk.stop
            return
        for first, stop, near in self._passes(stage, start, source.rows[0], source.encoding):
            for chunk in self._chunks(index, first, stop, None):
                sums = near[chunk.first - first : chunk.stop - first]
                self._put(index + 1, chunk.first, self._computed(index, chunk, sums))
            yield stop

    def _passes(self, stage: LayerStage, start: int, rows: Rows, encoding: Encoding) -> Iterator[tuple[int, int, Floats]]:
        """(first, stop, the finished sums of destinations first:stop over `rows`), range by range."""
        kind: Kind | None = self.shape.layers[stage.layer].kind
        assert self.tiles is not None
        assert kind is not None
        nodes, step = self.shape.num_nodes, self.plan.layers[stage.layer].rows
        adder = SumKernel(self.tiles, self.dataset.graph, kind, self._threads)
        buffer = np.empty((min(step, nodes), rows.shape[1]), np.float32)
        try:
            for first in range(start, nodes, step):
                stop = min(first + step, nodes)
                near = buffer[: stop - first]
                adder.add(rows, RowDecoder.of(encoding), first, stop, near)
                adder.scale(first, near)
                yield first, stop, near
        finally:
            adder.close()
            self._count(adder.bytes_read + adder.edge_bytes_read)
            self.edge_bytes_read += adder.edge_bytes_read

    def _gather(self, stage: LayerStage, start: int) -> Iterator[int]:
        """Rows of a layer from those of all its sources, for as many destinations as memory has sources' rows for."""
        index, shape = stage.layer, self.shape.layers[stage.layer]
        source, graph = self._source(index, "near"), self.dataset.graph
        initial = self._initial() if shape.needs_initial else None
        ranges = gather_ranges(graph, shape, self.plan.memory, start)

        def read(own: tuple[int, int]) -> tuple[int, int, Any, Floats, Floats | None]:
            first, stop = own
            node, block = gathered_block(graph, first, stop, *self._slots(first, stop), self._device)
            values = np.empty((len(node), source.rows[0].shape[1]), source.rows[0].dtype)
            self._count(source.rows[0].read(node, values))
            x = np.empty(values.shape, np.float32)
            source.encoding.gather(values, np.arange(len(node)), x) if source.encoding.is_short else np.copyto(x, values)
            return first, stop, block, x, None if initial is None else self._floats(initial, first, stop)

        for first, stop, block, x, rows in ahead(self._readers, read, ranges, 1):
            extra = () if rows is None else (self._tensor(rows),)
            self._put(index + 1, first, self.layers[index](self._tensor(x), block, *extra))
            yield stop

    def _slots(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
        """(sources, weights) of the in-edges of destinations first:stop."""
        graph, dataset = self.dataset.graph, self.dataset
        begin, end = int(graph.indptr[first]), int(graph.indptr[stop])
        columns = ["indices", *(["weight"] if "weight" in graph.columns else [])]
        found = []
        for name in columns:
            held = graph.indices if name == "indices" else graph.columns[name]
            values, nbytes = read_range(rows_over(held, partial(dataset.edge_rows, name)), begin, end, self._buffers)
            self._count(nbytes)
            found.append(values)
        return found[0].astype(np.int64), found[1] if len(found) > 1 else None

"""Edges in the order in which a pass meets them, by piece of source rows, within it by destination: found in its folder, or
dealt out once.

A pass reads rows in file order, a piece at a time, and adds each to the sums of its out-neighbors. The store has the edges by
destination; here they are by (piece of sources, destination, source), dealt out in bounded memory: in the order of
destinations, every edge goes to the end of its source's piece. So a destination's sum is in ascending order of the source,
equal ones by slot, whatever the size of a piece (but at millions of edges, whose parts are sorted each by itself).
(GridGraph's and X-Stream's streaming partitions: Zhu et al., ATC 2015; Roy et al., SOSP 2013.)
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats
from ooc.layerwise.io_stats import IoStats, Noted, unnoted
from ooc.layerwise.node_ranges import NodeRange
from ooc.layerwise.pass_plan import ModelShape, cell_rows
from ooc.layerwise.row_files import Files
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import ahead, read_range, write_range
from ooc.stores.arrays.rows import ArrayRows, Rows
from ooc.stores.bounds import check_nodes
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from ooc.stores.io.atomic import sync_dir, write_file
from ooc.stores.jit import kernel

Ints = NDArray[np.int64]
SOURCE_BITS = 16
"""of an entry, int64: its destination shifted left by so many bits, and the source's offset in its piece"""
MOST_PIECE_ROWS = 1 << SOURCE_BITS
ENTRIES_AT_ONCE = 1 << 21
"""Entries in memory at a time: a hub's piece may have any number"""
_SLOTS_AT_ONCE = 1 << 20
_BUFFER_BYTES = 64 * 2**20
_STEP = 1024
"""entries: pieces begin at multiples, so that they are whole pages in the file"""
_FEW = 32
_READERS = 2
FORTH = ("tiles", "tile-weights")
BACK = ("tiles-back", "tile-weights-back")
_PART = 1 << 21
"""entries that are sorted at a time"""
PIECE_BYTES = 16 * 2**20
"""of a piece's widest rows"""
_LEAST_PIECE_ROWS = 1024
_Names = tuple[str, str]
NO_WEIGHT: Floats = np.empty(0, np.float32)


@dataclass(frozen=True)
class TileGrid:
    """Where the entries of each piece and range of destinations are. piece_rows: sources of a piece, a power of two; cell_rows:
    destinations of a cell of the grid; first: int64[pieces, cells + 1], where piece p's entries of destinations cell_rows * g
    and beyond begin."""

    piece_rows: int
    cell_rows: int
    first: Ints

    @property
    def num_pieces(self) -> int:
        return len(self.first)

    @property
    def size(self) -> int:
        """Entries that the pieces take, with the room between them."""
        return int(self.first[-1, -1]) + _STEP if len(self.first) else 0

    def span(self, piece: int, first: int, stop: int) -> tuple[int, int]:
        """Entries of a piece whose destinations are first:stop, both multiples of `cell_rows` (or stop beyond the last)."""
        assert first % self.cell_rows == 0
        last = min(-(-stop // self.cell_rows), self.first.shape[1] - 1)
        return int(self.first[piece, first // self.cell_rows]), int(self.first[piece, last])


EdgePart = tuple[int, Ints, Ints, Floats]
"""(first node, indptr of it and the following ones from 0 on, their edges' other ends int64[e], weights float32[e] or [0])"""


class SlotReader:
    """The graph's slots read front to back. weight: where sums are weighted; nodes: destinations whose slots are read, None for
    all."""

    def __init__(
        self, graph: Graph, indices: Rows, weight: Rows | None, read: Noted = unnoted, nodes: NodeRange | None = None
    ) -> None:
        self.graph, self._indices, self._weight, self._noted = graph, indices, weight, read
        self._nodes = nodes or (0, graph.num_nodes)
        self._buffers = Buffers(kept=2, direct=True)

    def parts(self, ordered: bool = True) -> Iterator[EdgePart]:
        """Edges by ascending destination; `ordered`, each one's sources ascend, and weights are read. A destination of more
        than a million edges comes in several parts, each sorted by itself, so that memory stays bounded."""
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ooc-slots") as readers:
            yield from ahead(readers, lambda part: self._read(*part, ordered), self._ranges(), _READERS)

    def _ranges(self) -> Iterator[tuple[int, int, Ints]]:
        """(first destination, first slot, indptr from 0 on)."""
        indptr, (first, last) = self.graph.indptr, self._nodes
        while first < last:
            begin = int(indptr[first])
            stop = min(last, int(np.searchsorted(indptr, begin + _SLOTS_AT_ONCE, side="right")) - 1)
            if stop > first:
                yield first, begin, np.asarray(indptr[first : stop + 1]) - begin
                first = stop
                continue
            for low in range(begin, int(indptr[first + 1]), _SLOTS_AT_ONCE):
                yield first, low, np.array([0, min(_SLOTS_AT_ONCE, int(indptr[first + 1]) - low)])
            first += 1

    def _read(self, first: int, begin: int, indptr: Ints, ordered: bool) -> EdgePart:
        began, end, weight = perf_counter(), begin + int(indptr[-1]), NO_WEIGHT
        values, nbytes = read_range(self._indices, begin, end, self._buffers)
        check_nodes("graph/indices", begin, values, self.graph.num_nodes)
        source = values.astype(np.int64)
        if self._weight is not None and ordered:
            values, more = read_range(self._weight, begin, end, self._buffers)
            weight, nbytes = np.array(values, np.float32), nbytes + more
        self._noted(nbytes, began)
        if ordered:
            sort_slots(indptr, source, weight)
        return first, indptr, source, weight


def count_entries(slots: SlotReader, piece_rows: int, cell_rows: int, reverse: bool = False) -> TileGrid:
    """One reading of the slots: how many entries each piece and cell has. reverse: of the edges turned round."""
    num_nodes = slots.graph.num_nodes
    counts = np.zeros((-(-num_nodes // piece_rows), -(-num_nodes // cell_rows)), np.int64)
    shift = piece_rows.bit_length() - 1
    for first, indptr, source, _ in slots.parts(ordered=False):
        _count(first, indptr, source, shift, cell_rows, reverse, counts)
    first_entry = np.zeros((len(counts), counts.shape[1] + 1), np.int64)
    np.cumsum(counts, axis=1, out=first_entry[:, 1:])
    room = -(-first_entry[:, -1] // _STEP) * _STEP
    first_entry += (np.cumsum(room) - room)[:, None]
    return TileGrid(piece_rows, cell_rows, first_entry)


class Tiles:
    """Entries on disk or in memory, by piece; see `TileGrid` and `SOURCE_BITS`."""

    def __init__(self, grid: TileGrid, entry: Any, weight: Any | None) -> None:
        self.grid, self.entry, self.weight = grid, entry, weight
        self._buffers = Buffers(kept=8, direct=True, least_bytes=1)

    def fill(self, parts: Iterable[EdgePart], progress: Callable[[int], None]) -> int:
        """Deal all edges out, which come by ascending node; returns the bytes written. progress: of edges done."""
        pieces = self.grid.num_pieces
        wide = 12 if self.weight is not None else 8
        size = max(_STEP, min(16 * _STEP, _BUFFER_BYTES // (wide * max(1, pieces)) // _STEP * _STEP))
        buffers = self._buffers.empty((pieces, size), np.dtype(np.int64))
        weights = self._buffers.empty((pieces if self.weight is not None else 0, size), np.dtype(np.float32))
        filled, put = np.zeros(pieces, np.int64), np.array(self.grid.first[:, 0])
        shift, written, done = self.grid.piece_rows.bit_length() - 1, 0, 0
        for first, indptr, source, weight in parts:
            at = np.zeros(2, np.int64)  # destination and slot to go on from
            while (full := _deal(first, indptr, source, weight, shift, at, filled, buffers, weights)) >= 0:
                written += self._flush(full, size, put, buffers, weights)
                filled[full] = 0
            progress(done := done + len(source))
        for piece in np.flatnonzero(filled).tolist():
            count = -(-int(filled[piece]) // _STEP) * _STEP
            buffers[piece, filled[piece] : count] = 0
            written += self._flush(piece, count, put, buffers, weights)
        return written

    def _flush(self, piece: int, count: int, put: Ints, buffers: Ints, weights: Floats) -> int:
        first = int(put[piece])
        written = write_range(self.entry, first, buffers[piece, :count])
        if self.weight is not None:
            written += write_range(self.weight, first, weights[piece, :count])
        put[piece] += count
        return written

    def spans(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(piece, its first entry, one past its last) of the edges to destinations first:stop, in order; a piece of more than
        two million entries comes several times."""
        for piece in range(self.grid.num_pieces):
            begin, end = self.grid.span(piece, first, stop)
            for low in range(begin, end, ENTRIES_AT_ONCE):
                yield piece, low, min(low + ENTRIES_AT_ONCE, end)

    def read(self, low: int, high: int) -> tuple[Ints, Floats, int]:
        """(entries low:high, their weights or none, bytes read). Thread-safe."""
        entry, nbytes = read_range(self.entry, low, high, self._buffers)
        if self.weight is None:
            return entry, NO_WEIGHT, nbytes
        weight, more = read_range(self.weight, low, high, self._buffers)
        return entry, weight, nbytes + more


def tile_names(names: _Names, rank: int) -> _Names:
    """The names of the files of a rank's own tiles.

    >>> tile_names(FORTH, 1)
    ('tiles-1', 'tile-weights-1')
    """
    return (f"{names[0]}-{rank}", f"{names[1]}-{rank}") if rank else names


def rows_over(array: Any, rows: Callable[[], Rows]) -> Rows:
    """A slot column as Rows: the array itself where it is in memory, else `rows()`."""
    from ooc.stores.io.segments import mapping_of

    return ArrayRows(array) if mapping_of(array) is None else rows()


def piece_rows_of(shape: ModelShape) -> int:
    """Sources of a piece: a power of two."""
    widest = max([shape.x_bytes, 4 * shape.encoded, *[4 * layer.width for layer in shape.layers]])
    rows = 1 << max(0, PIECE_BYTES // widest).bit_length() >> 1
    return min(max(rows, _LEAST_PIECE_ROWS), MOST_PIECE_ROWS)


def open_tiles(
    dataset: Dataset,
    files: Files,
    shape: ModelShape,
    stats: IoStats,
    progress: Callable[[str, int, int], None],
    back: bool,
    share: tuple[int, NodeRange] | None = None,
) -> tuple[Tiles, ...]:
    """The edges of a pass in tiles, by piece of sources; with `back` by piece of destinations too. None where no layer sums.
    share: as of `EdgeTiles`."""
    if not shape.has_sums:
        return ()
    edges = EdgeTiles(dataset, files, piece_rows_of(shape), cell_rows(shape), stats, weighted=shape.slot_bytes > 8, share=share)

    def done(count: int) -> None:
        progress("edges", count, shape.num_edges)

    forth = edges.open(done)
    if not back:
        return (forth,)
    return forth, forth if dataset.manifest.undirected else edges.open(done, forth)


class EdgeTiles:
    """Opens tiles in `files`. piece_rows, cell_rows: of the grid; weighted: with the edges' weights; share: of one rank of
    several, (rank, the nodes whose in-edges its tiles have)."""

    def __init__(
        self,
        dataset: Dataset,
        files: Files,
        piece_rows: int,
        cell_rows: int,
        stats: IoStats,
        *,
        weighted: bool,
        share: tuple[int, NodeRange] | None = None,
    ) -> None:
        self._dataset, self._files, self._stats, self._weighted = dataset, files, stats, weighted
        self._piece_rows, self._cell_rows, self._share = piece_rows, cell_rows, share

    def open(self, progress: Callable[[int], None], forth: Tiles | None = None) -> Tiles:
        """Edges by piece of sources, for sums over in-edges, or by piece of destinations, from the tiles `forth`, for sums over
        out-edges: those an earlier process left in the folder, or made now. progress: of edges done."""
        rank = 0 if self._share is None else self._share[0]
        names, folder = tile_names(FORTH if forth is None else BACK, rank), self._files.folder
        about: dict[str, Any] = {"store": self._dataset.fingerprint, "piece_rows": self._piece_rows, "weighted": self._weighted}
        if self._share is not None:
            about["nodes"] = list(self._share[1])
        note, firsts = f"{names[0]}.json", f"{names[0]}.npy"
        if folder is not None and (folder / note).exists():
            if (folder / names[0]).is_dir() and json.loads((folder / note).read_bytes()) == about:
                return self._tiles(names, TileGrid(self._piece_rows, self._cell_rows, np.load(folder / firsts)))
            (folder / note).unlink()  # those that are there are overwritten
            sync_dir(folder)
        tiles = self._make(names, forth, progress)
        if folder is not None:
            for rows in map(self._files.opened, names):
                if rows is not None:
                    rows.sync()
            content = io.BytesIO()
            np.save(content, tiles.grid.first)
            write_file(folder / firsts, content.getvalue())
            write_file(folder / note, json.dumps(about).encode())
        return tiles

    def _make(self, names: tuple[str, str], forth: Tiles | None, progress: Callable[[int], None]) -> Tiles:
        """Put the edges in order: one reading of the slots to count, one of them or of `forth`."""
        graph, dataset, read = self._dataset.graph, self._dataset, self._stats.read
        weight = rows_over(graph.columns["weight"], lambda: dataset.edge_rows("weight")) if self._weighted else None
        nodes = None if self._share is None else self._share[1]
        slots = SlotReader(graph, rows_over(graph.indices, lambda: dataset.edge_rows("indices")), weight, read, nodes)
        grid = count_entries(slots, self._piece_rows, self._cell_rows, reverse=forth is not None)
        tiles = self._tiles(names, grid)
        self._stats.bytes_written += tiles.fill(slots.parts() if forth is None else out_edges(forth, read), progress)
        return tiles

    def _tiles(self, names: tuple[str, str], grid: TileGrid) -> Tiles:
        entry = self._files.rows(names[0], (grid.size,), "int64")
        return Tiles(grid, entry, self._files.rows(names[1], (grid.size,), "float32") if self._weighted else None)


def out_edges(tiles: Tiles, read: Noted = unnoted) -> Iterator[EdgePart]:
    """The edges by ascending source, each one's destinations ascending, from tiles by piece of sources. A piece's entries are
    sorted in memory, as many sources at a time as have two million."""
    grid = tiles.grid

    def entries(low: int, high: int) -> tuple[Ints, Floats]:
        began = perf_counter()
        entry, weight, nbytes = tiles.read(low, high)
        read(nbytes, began)
        return entry, weight

    for piece in range(grid.num_pieces):
        begin, end = int(grid.first[piece, 0]), int(grid.first[piece, -1])
        spans = [(low, min(low + _PART, end)) for low in range(begin, end, _PART)]
        counts = np.zeros(grid.piece_rows, np.int64)
        for span in spans if len(spans) > 1 else []:
            _count_sources(entries(*span)[0], counts)
        first = 0
        while first < grid.piece_rows and spans:
            stop = first + max(1, int(np.searchsorted(np.cumsum(counts[first:]), _PART, side="right")))
            yield from _sources(piece * grid.piece_rows, first, stop, [partial(entries, *span) for span in spans])
            first = stop


def _sources(base: int, first: int, stop: int, spans: Sequence[Callable[[], tuple[Ints, Floats]]]) -> Iterator[EdgePart]:
    """Sources first:stop of a piece that begins at `base`; one alone comes in as many parts as there are spans."""
    found = []
    for entries in spans:
        entry, weight = entries()
        if len(spans) > 1:
            offset = entry & ((1 << SOURCE_BITS) - 1)
            own = (offset >= first) & (offset < stop)
            entry, weight = entry[own], weight[own] if len(weight) else weight
        found.append((entry, weight))
        if stop - first == 1:
            yield base + first, np.array([0, len(entry)]), entry >> SOURCE_BITS, weight
    if stop - first > 1:
        entry = np.concatenate([each[0] for each in found])
        weight = np.concatenate([each[1] for each in found])
        target, weights = np.empty(len(entry), np.int64), np.empty(len(weight), np.float32)
        indptr = _by_source(entry, weight, first, stop, target, weights)
        yield base + first, indptr, target, weights


@kernel
def sort_slots(indptr: Ints, source: Ints, weight: Floats) -> None:
    """Each destination's slots by ascending source, equal ones in their order; in place."""
    weighted = len(weight) > 0
    for v in range(len(indptr) - 1):
        first, stop = indptr[v], indptr[v + 1]
        if stop - first > _FEW:
            order = np.argsort(source[first:stop], kind="mergesort")
            source[first:stop] = source[first:stop][order]
            if weighted:
                weight[first:stop] = weight[first:stop][order]
            continue
        for k in range(first + 1, stop):
            own, place = source[k], k
            own_weight = weight[k] if weighted else np.float32(0)
            while place > first and source[place - 1] > own:
                source[place] = source[place - 1]
                if weighted:
                    weight[place] = weight[place - 1]
                place -= 1
            source[place] = own
            if weighted:
                weight[place] = own_weight


@kernel
def _count(first: int, indptr: Ints, source: Ints, shift: int, cell_rows: int, reverse: bool, counts: Ints) -> None:
    for v in range(len(indptr) - 1):
        cell, piece = (first + v) // cell_rows, (first + v) >> shift
        for k in range(indptr[v], indptr[v + 1]):
            if reverse:
                counts[piece, source[k] // cell_rows] += 1
            else:
                counts[source[k] >> shift, cell] += 1


@kernel
def _deal(
    first: int, indptr: Ints, source: Ints, weight: Floats, shift: int, at: Ints, filled: Ints, buffers: Ints, weights: Floats
) -> int:
    """Go on from destination at[0] and slot at[1]: entries into their pieces' buffers. The piece whose buffer is full, or
    -1."""
    mask = (1 << shift) - 1
    k = at[1]
    for v in range(at[0], len(indptr) - 1):
        while k < indptr[v + 1]:
            piece = source[k] >> shift
            place = filled[piece]
            buffers[piece, place] = ((first + v) << SOURCE_BITS) | (source[k] & mask)
            if len(weight) > 0:
                weights[piece, place] = weight[k]
            filled[piece] = place + 1
            k += 1
            if place + 1 == buffers.shape[1]:
                at[0], at[1] = v, k
                return piece
    at[0], at[1] = len(indptr) - 1, k
    return -1


@kernel
def _count_sources(entry: Ints, counts: Ints) -> None:
    mask = (1 << SOURCE_BITS) - 1
    for k in range(len(entry)):
        counts[entry[k] & mask] += 1


@kernel
def _by_source(entry: Ints, weight: Floats, first: int, stop: int, target: Ints, weights: Floats) -> Ints:
    """Sort entries by their source, those of each in their order: a counting sort. Returns the pointers, from 0 on."""
    mask = (1 << SOURCE_BITS) - 1
    indptr = np.zeros(stop - first + 1, np.int64)
    for k in range(len(entry)):
        indptr[(entry[k] & mask) - first + 1] += 1
    for v in range(stop - first):
        indptr[v + 1] += indptr[v]
    put = indptr[:-1].copy()
    for k in range(len(entry)):
        v = (entry[k] & mask) - first
        target[put[v]] = entry[k] >> SOURCE_BITS
        if len(weight) > 0:
            weights[put[v]] = weight[k]
        put[v] += 1
    return indptr

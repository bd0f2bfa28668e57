"""The edges of a pass, in the order in which it meets them, both ways: found in its folder, or dealt out once."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter

import numpy as np

from ooc.graph.aggregation import Floats
from ooc.layerwise.edge_tiles import (
    SOURCE_BITS,
    EdgePart,
    Ints,
    Noted,
    SlotReader,
    TileGrid,
    Tiles,
    count_entries,
    rows_over,
    unnoted,
)
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.pass_plan import ModelShape, cell_rows
from ooc.layerwise.row_files import Files
from ooc.layerwise.shape import piece_rows_of
from stores.dataset import Dataset
from stores.io.atomic import sync_dir, write_file
from stores.jit import kernel

FORTH = ("tiles", "tile-weights")
BACK = ("tiles-back", "tile-weights-back")
_PART = 1 << 21
"""entries that are sorted at a time"""


def open_tiles(
    dataset: Dataset, files: Files, shape: ModelShape, stats: IoStats, progress: Callable[[str, int, int], None], back: bool
) -> tuple[Tiles, ...]:
    """The edges of a pass in tiles, by piece of sources; with `back` by piece of destinations too. None where no layer sums."""
    if not shape.has_sums:
        return ()
    edges = EdgeTiles(dataset, files, piece_rows_of(shape), cell_rows(shape), stats, weighted=shape.slot_bytes > 8)

    def done(count: int) -> None:
        progress("edges", count, shape.num_edges)

    forth = edges.open(done)
    if not back:
        return (forth,)
    return forth, forth if dataset.manifest.undirected else edges.open(done, forth)


class EdgeTiles:
    """Opens tiles (see `ooc.layerwise.edge_tiles`) in `files`. piece_rows, cell_rows: of the grid; weighted: with the edges'
    weights."""

    def __init__(
        self, dataset: Dataset, files: Files, piece_rows: int, cell_rows: int, stats: IoStats, *, weighted: bool
    ) -> None:
        self._dataset, self._files, self._stats, self._weighted = dataset, files, stats, weighted
        self._piece_rows, self._cell_rows = piece_rows, cell_rows

    def open(self, progress: Callable[[int], None], forth: Tiles | None = None) -> Tiles:
        """Edges by piece of sources, for sums over in-edges, or by piece of destinations, from the tiles `forth`, for sums over
        out-edges: those an earlier process left in the folder, or made now. progress: of edges done."""
        names, folder = FORTH if forth is None else BACK, self._files.folder
        about = {"store": self._dataset.fingerprint, "piece_rows": self._piece_rows, "weighted": self._weighted}
        note, firsts = f"{names[0]}.json", f"{names[0]}.npy"
        if folder is not None and (folder / note).exists():
            if json.loads((folder / note).read_bytes()) == about:
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
        slots = SlotReader(graph, rows_over(graph.indices, lambda: dataset.edge_rows("indices")), weight, read)
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
            _count(entries(*span)[0], counts)
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
def _count(entry: Ints, counts: Ints) -> None:
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

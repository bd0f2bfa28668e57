"""The edges of a pass, in the order in which it meets them, both ways: found in its folder, or dealt out once."""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ooc.graph.aggregation import Floats
from ooc.layerwise.edge_tiles import (
    NO_WEIGHT,
    SOURCE_BITS,
    EdgesInOrder,
    Ints,
    SlotReader,
    TileGrid,
    Tiles,
    count_entries,
    rows_over,
)
from ooc.layerwise.row_files import Files
from stores.dataset import Dataset
from stores.io.atomic import sync_dir, write_file
from stores.jit import kernel

FORTH = ("tiles", "tile-weights")
BACK = ("tiles-back", "tile-weights-back")
_PART = 1 << 21
"""entries that are sorted at a time"""


class EdgeTiles:
    """Opens tiles (see `ooc.layerwise.edge_tiles`) in `files`. piece_rows, cell_rows: of the grid; weighted: with the edges'
    weights.

    >>> edges = EdgeTiles(dataset, files, 16384, 8192, weighted=False)
    >>> forth, back = edges.forth(print), edges.back(print)
    """

    def __init__(self, dataset: Dataset, files: Files, piece_rows: int, cell_rows: int, *, weighted: bool) -> None:
        self._dataset, self._files, self._weighted = dataset, files, weighted
        self._piece_rows, self._cell_rows = piece_rows, cell_rows
        self._forth: Tiles | None = None
        self.bytes_read = self.bytes_written = 0

    def forth(self, progress: Callable[[int], None]) -> Tiles:
        """Edges by piece of sources, for sums over in-edges. progress: of edges done. StoreError where the disk is full."""
        if self._forth is None:
            self._forth = self._open(FORTH, lambda slots: slots, progress)
        return self._forth

    def back(self, progress: Callable[[int], None]) -> Tiles:
        """Edges by piece of destinations, for sums over out-edges; of an undirected graph the same."""
        forth = self.forth(progress)
        if self._dataset.manifest.undirected:
            return forth
        return self._open(BACK, lambda slots: OutEdges(forth), progress)

    def _open(
        self, names: tuple[str, str], order: Callable[[SlotReader], EdgesInOrder], progress: Callable[[int], None]
    ) -> Tiles:
        folder = self._files.folder
        about: dict[str, Any] = {
            "store": self._dataset.fingerprint,
            "piece_rows": self._piece_rows,
            "weighted": self._weighted,
        }
        note, firsts = f"{names[0]}.json", f"{names[0]}.npy"
        if folder is not None and (folder / note).exists() and json.loads((folder / note).read_bytes()) == about:
            return self._tiles(names, TileGrid(self._piece_rows, self._cell_rows, np.load(folder / firsts)))
        if folder is not None and (folder / note).exists():  # those that are there are overwritten
            (folder / note).unlink()
            sync_dir(folder)
        tiles = self._deal(names, order, progress)
        if folder is not None:
            for rows in map(self._files.opened, names):
                if rows is not None:
                    rows.sync()
            content = io.BytesIO()
            np.save(content, tiles.grid.first)
            write_file(folder / firsts, content.getvalue())
            write_file(folder / note, json.dumps(about).encode())
        return tiles

    def _deal(
        self, names: tuple[str, str], order: Callable[[SlotReader], EdgesInOrder], progress: Callable[[int], None]
    ) -> Tiles:
        """Put the edges in order: one reading of the slots to count, one of `order`."""
        graph, dataset = self._dataset.graph, self._dataset
        weight = rows_over(graph.columns["weight"], lambda: dataset.edge_rows("weight")) if self._weighted else None
        slots = SlotReader(graph, rows_over(graph.indices, lambda: dataset.edge_rows("indices")), weight)
        ordered = order(slots)
        grid = count_entries(slots, self._piece_rows, self._cell_rows, reverse=ordered is not slots)
        tiles = self._tiles(names, grid)
        self.bytes_written += tiles.fill(ordered, progress)
        self.bytes_read += slots.bytes_read + (ordered.bytes_read if isinstance(ordered, OutEdges) else 0)
        return tiles

    def _tiles(self, names: tuple[str, str], grid: TileGrid) -> Tiles:
        entry = self._files.rows(names[0], (grid.size,), "int64")
        return Tiles(grid, entry, self._files.rows(names[1], (grid.size,), "float32") if self._weighted else None)


class OutEdges:
    """The edges by source, each one's destinations ascending: what `ooc.layerwise.edge_tiles` deals out by destination, turned
    round.

    A piece's entries are sorted in memory, as many sources at a time as have two million.

    >>> for first, indptr, target, weight in OutEdges(tiles).parts(): ...
    """

    def __init__(self, tiles: Tiles) -> None:
        self._tiles = tiles
        self.bytes_read = 0

    def parts(self) -> Iterator[tuple[int, Ints, Ints, Floats]]:
        """(first source, indptr of it and the following ones from 0 on, destinations int64[e], weights float32[e] or [0])."""
        grid = self._tiles.grid
        for piece in range(grid.num_pieces):
            begin, end = int(grid.first[piece, 0]), int(grid.first[piece, -1])
            spans = [(low, min(low + _PART, end)) for low in range(begin, end, _PART)]
            counts = np.zeros(grid.piece_rows, np.int64)
            for low, high in spans if len(spans) > 1 else []:
                _count(self._read(low, high)[0], counts)
            first = 0
            while first < grid.piece_rows and spans:
                stop = first + max(1, int(np.searchsorted(np.cumsum(counts[first:]), _PART, side="right")))
                yield from self._sources(piece * grid.piece_rows, first, stop, spans)
                first = stop

    def _sources(
        self, base: int, first: int, stop: int, spans: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Ints, Ints, Floats]]:
        """Sources first:stop of a piece; one alone comes in as many parts as there are spans."""
        found = []
        for low, high in spans:
            entry, weight = self._read(low, high)
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

    def _read(self, low: int, high: int) -> tuple[Ints, Floats]:
        entry, weight, nbytes = self._tiles.read(low, high)
        self.bytes_read += nbytes
        return entry, weight if self._tiles.weight is not None else NO_WEIGHT


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

"""The values of a step: rows by name, in memory or on disk as they are placed, written behind and read ahead."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.row_files import MOST_KEPT, Files, Kept, RowStore, as_array
from ooc.runtime.buffers import PAGE_BYTES, Buffers
from ooc.runtime.memory import Tidy, return_freed
from ooc.runtime.range_io import MemoryRows, read_range, write_range
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset

_BUFFERS = 6
_HALVES = ("{}", "{}.1")
"""files of a value"""
_ADDED_ROWS = 8192
"""read, added to and written at a time: whole pages"""


class ValueStore(RowStore):
    """Values in memory or on disk, as they are placed. dtype: of rows, sums and gradients; tidy: to be called now and then, see
    `ooc.runtime.memory.Tidy`."""

    def __init__(
        self,
        folder: Path | None,
        engine: str,
        dataset: Dataset,
        columns: dict[str, int],
        dtype: np.dtype[Any],
        stats: IoStats,
        tidy: Tidy,
        count: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        buffers = Buffers(kept=_BUFFERS, direct=True, least_bytes=1, most_kept=MOST_KEPT)
        super().__init__(dataset, dtype, columns, stats, buffers, count)
        self.memory = Files(None, engine, in_ram=True)
        self.disk = Files(folder, engine)
        self.placement = Placement({})
        self.halves: dict[str, int] = {}
        """of gradients on disk that ops add to chunk by chunk: the one of two files that holds what was added last, so that an
        op that was killed can add once more to what was there before"""
        self.frees = False
        """whether files go with their values: where the disk has no room for all of a step, and where rows are INVERTED, which
        are not to fill it layer by layer"""
        self._tidy, self._x_read = tidy, False
        self._spare: list[NDArray[np.uint8]] = []
        self.left: Callable[[], int] = int
        """of a step under way: bytes of arrays that may wait for their next use; between steps 0"""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the rows that stand in memory, features that were read for it among them."""
        return self.memory.nbytes + (self._x.array.nbytes if isinstance(self._x, ArrayRows) and self._x_read else 0)

    def place(self, placement: Placement) -> None:
        """Where values are put from now on."""
        self.placement = placement
        retained = placement.placements.get("x", TensorPlacement.DISK) is not TensorPlacement.DISK
        stored = self._dataset.stored("x")
        if retained and not isinstance(self._x, ArrayRows):  # else it is in the data set's memory already
            self.trim()
            values, nbytes = read_range(stored, 0, self.count("x"), self._buffers)
            self._stats.read(nbytes, perf_counter())
            self._x, self._x_read = ArrayRows(values), True
        elif not retained:
            self._x, self._x_read = stored, False

    def files(self, name: str) -> Files:
        """The tier that a value is in."""
        return self.disk if self.placement.standing(name) is TensorPlacement.DISK else self.memory

    def open(self, name: str, half: int | None = None) -> Kept:
        """See `RowStore.open`. half: of a gradient that is added to, see `halves`."""
        named = _HALVES[self.halves.get(name, 0) if half is None else half].format(name)
        shape, files = (self.count(name), self._columns[name]), self.files(name)
        if files is self.memory and files.opened(named) is None:
            files.add_rows(named, MemoryRows(self.take(shape)))
        return files.rows(named, shape, str(self.dtype))

    def take(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """See `RowStore.take`; in memory that `give` was given where it fits: fresh one costs a page fault every 4 KiB."""
        nbytes = math.prod(shape) * self.dtype.itemsize
        waiting = next((number for number, each in enumerate(self._spare) if each.nbytes == nbytes), None)
        if waiting is None:
            self.trim(self.left() - nbytes)
            self.tidy(nbytes)
            return np.empty(shape, self.dtype)
        return self._spare.pop(waiting).view(self.dtype).reshape(shape)

    def give(self, array: NDArray[Any]) -> None:
        """See `RowStore.give`; the array waits for its next use."""
        self._spare.append(array.reshape(-1).view(np.uint8))

    @property
    def spare_bytes(self) -> int:
        """Bytes of the arrays that wait."""
        return sum(each.nbytes for each in self._spare)

    def trim(self, most: int = 0) -> None:
        """Let the arrays that wait go, the longest first, until they take `most` bytes."""
        while self._spare and self.spare_bytes > most:
            self._spare.pop(0)

    def tidy(self, coming: int = 0) -> None:
        """See `ooc.runtime.memory.Tidy`; where that is not enough, arrays that wait go too."""
        if self._tidy(coming) and self._spare:
            self.trim()
            return_freed()

    def drop(self, name: str) -> None:
        """Let a value go: from memory; files stay, to be overwritten by the next step, but where the store `frees`."""
        rows = self.memory.opened(name)
        self.memory.drop(name)
        if self.frees:
            for half in _HALVES:
                self.disk.drop(half.format(name))
        if isinstance(rows, MemoryRows) and rows.dtype == self.dtype:
            self.give(rows.array)

    def put(self, name: str, first: int, values: NDArray[Any] | Tensor, half: int | None = None) -> None:
        """See `RowStore.put`. half: as of `open`."""
        self._writer.put(self.open(name, half), first, as_array(values))

    def other_half(self, name: str) -> int:
        """Where sums go on that are added to what stands there; in memory it is the same place."""
        return 1 - self.halves.get(name, 0) if self.on_disk(name) else 0

    def on_disk(self, name: str) -> bool:
        """Whether a value outlives the process."""
        return name == "x" or (self.files(name) is self.disk and self.disk.folder is not None)

    def sync(self, names: Iterable[str]) -> None:
        """Make values that were written durable."""
        self.drain()
        for name in names:
            if name not in ("x", "edges") and self.on_disk(name):
                for rows in (self.disk.opened(half.format(name)) for half in _HALVES):
                    if rows is not None:
                        rows.sync()

    def gather(self, name: str, node: NDArray[np.int64]) -> NDArray[Any]:
        """See `RowStore.gather`."""
        self._tidy(len(node) * self.rows(name).row_bytes)
        return super().gather(name, node)

    def add(self, name: str, node: NDArray[np.int64], values: NDArray[Any] | Tensor) -> None:
        """Add to the rows of some nodes, each named once; done when it returns."""
        rows, began, values = self.open(name), perf_counter(), as_array(values)
        if isinstance(rows, MemoryRows):
            rows.array[node] += values
            return
        if _dense(node, rows.row_bytes):
            self._add_through(rows, node, values)
            return
        stored = np.empty(values.shape, rows.dtype)
        self._stats.read(rows.read(node, stored), began)
        stored += values
        began = perf_counter()
        self._stats.written(rows.write(node, stored), began)

    def _add_through(self, rows: Kept, node: NDArray[np.int64], values: NDArray[Any]) -> None:
        """The same through all rows from the first of them to the last: one is written while the next ones are read."""
        order = np.argsort(node)
        node, last = node[order], int(node.max()) + 1
        for first in range(int(node[0]) // _ADDED_ROWS * _ADDED_ROWS, last, _ADDED_ROWS):
            stop = min(first + _ADDED_ROWS, rows.shape[0])
            low, high = np.searchsorted(node, (first, stop))
            if low < high:
                began = perf_counter()
                stored, nbytes = read_range(rows, first, stop, self._buffers)
                self._stats.read(nbytes, began)
                stored[node[low:high] - first] += values[order[low:high]]
                self._writer.put(rows, first, stored)
        self._writer.drain()

    def clear(self, name: str, start: int = 0) -> None:
        """Zeros in the rows of a value from `start` on."""
        rows, nodes = self.open(name), self.count(name)
        if isinstance(rows, MemoryRows):
            rows.array[start:] = 0
            return
        zeros = np.zeros((min(nodes, _ADDED_ROWS), *rows.shape[1:]), rows.dtype)
        for first in range(start, nodes, _ADDED_ROWS):
            if start:  # by one thread: pieces may share a page
                write_range(rows, first, zeros[: nodes - first])
            else:
                self.put(name, first, zeros[: nodes - first])
        self.drain()

    def make_room(self) -> None:
        """Give up all that stands in memory."""
        self.memory.close_rows()
        self.trim()
        self._x, self._x_read = self._dataset.stored("x"), False

    def close(self) -> None:
        """End the threads, and close all rows; idempotent."""
        super().close()
        self.make_room()
        self.memory.close()
        self.disk.close()


def _dense(node: NDArray[np.int64], row_bytes: int) -> bool:
    """Whether pages of some rows are at least half of those that `ValueStore._add_through` goes through."""
    pages = len(np.unique(node * row_bytes // PAGE_BYTES)) * max(PAGE_BYTES, row_bytes)
    return 2 * pages >= len(np.unique(node // _ADDED_ROWS)) * _ADDED_ROWS * row_bytes

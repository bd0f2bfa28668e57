"""The rows of packed batches: one pass over the features writes each batch's together, piece by piece.

A batch's rows are in the order of the features, in pieces of `PackBytes.piece_bytes`: as many whole rows as fit, so that every
piece begins on a page. While the rows go by in file order, one piece of each batch fills in memory.
"""

import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from ooc.loading.batch_bytes import PACKED_SPARE, PackBytes
from ooc.loading.packed_plan import PackedGroup
from ooc.loading.shared_scan_plan import ScanPiece, pieces
from ooc.runtime.clock import waiting as waits
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.io.pages import PAGE_BYTES, PageFile, page_buffer
from ooc.stores.jit import kernel


class GroupPass:
    """The pieces of the rows that a group wants, in file order."""

    def __init__(self, group: PackedGroup, rows: Rows, memory: PackBytes) -> None:
        self._group, self._rows, self._memory = group, rows, memory

    def __iter__(self) -> Iterator[ScanPiece]:
        for row in self.rows():
            yield from pieces(row, np.arange(len(row) + 1), self._rows, self._memory.scan.piece_bytes)

    def rows(self) -> Iterator[NDArray[np.int64]]:
        """The rows that are wanted, each once, in file order: those whose reads are planned together."""
        group, span = self._group, self._memory.span
        at, end = group.first[:-1].copy(), group.first[1:]
        used = np.empty(span, np.bool_)
        low = _next(group.row, at, end)
        while low >= 0:
            _mark(group.row, at, end, low, used)
            yield low + np.flatnonzero(used)
            low = _next(group.row, at, end)


class PackWriter:
    """Takes the rows of a group in file order, and writes each batch's to its place."""

    def __init__(self, group: PackedGroup, file: PageFile, memory: PackBytes, threads: ThreadPoolExecutor) -> None:
        count = len(group.batches)
        self._group, self._file, self._threads = group, file, threads
        self._row_bytes, self._piece_bytes = memory.row_bytes, memory.piece_bytes
        slots = count + PACKED_SPARE
        self._buffers = page_buffer(slots * memory.piece_bytes).reshape(slots, memory.piece_bytes)
        self._next, self._end = group.first[:-1].copy(), group.first[1:]
        self._at = np.array([each.rows_at for each in group.batches], np.int64)
        self._slot, self._filled = np.arange(count), np.zeros(count, np.int64)
        self._place = np.empty(memory.span, np.int32)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(count, slots):
            self._free.put(slot)
        self._writes: set[Future[None]] = set()
        self.nbytes = 0
        """written"""

    def add(self, piece: ScanPiece, values: AnyArray) -> None:
        """Give the rows of a piece to the batches that want them. values: as `ScanPiece.read` gives them."""
        low, last = int(piece.row[0]), int(piece.row[-1])
        _number(piece.row, low, self._place)
        given = values.view(np.uint8), piece.row_at * values.itemsize, self._place, low, last
        batch = 0
        while batch >= 0:
            wanted = self._group.row, self._next, self._end, batch
            batch = _spread(*given, *wanted, self._slot, self._filled, self._buffers, self._row_bytes)
            if batch >= 0:
                self._write(batch)
                with waits():
                    self._slot[batch] = self._free.get()

    def _write(self, batch: int) -> None:
        """Write a batch's piece; the first failure of an earlier one is raised."""
        for done in [write for write in self._writes if write.done()]:
            self._writes.remove(done)
            done.result()
        size = -(-int(self._filled[batch]) * self._row_bytes // PAGE_BYTES) * PAGE_BYTES
        at, slot = int(self._at[batch]), int(self._slot[batch])
        self._at[batch] += self._piece_bytes
        self._filled[batch] = 0
        self.nbytes += size
        self._writes.add(self._threads.submit(self._store, at, slot, size))

    def _store(self, at: int, slot: int, size: int) -> None:
        try:
            self._file.store(at, self._buffers[slot, :size])
        finally:
            self._free.put(slot)

    def finish(self) -> None:
        """Write what remains, and wait."""
        for batch in np.flatnonzero(self._filled).tolist():
            self._write(batch)
        with waits():
            for write in self._writes:
                write.result()

    def close(self) -> None:
        """Wait for what is being written; idempotent."""
        wait(self._writes)


@kernel
def _next(row: NDArray[np.int64], at: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """The lowest row that some batch still wants; -1 where none does."""
    low = np.int64(-1)
    for k in range(len(at)):
        if at[k] < end[k] and (low < 0 or row[at[k]] < low):
            low = np.int64(row[at[k]])
    return int(low)


@kernel
def _mark(row: NDArray[np.int64], at: NDArray[np.int64], end: NDArray[np.int64], low: int, used: NDArray[np.bool_]) -> None:
    """Which rows from `low` on are wanted; each batch goes on behind them."""
    used[:] = False
    for k in range(len(at)):
        i = at[k]
        while i < end[k] and row[i] - low < len(used):
            used[row[i] - low] = True
            i += 1
        at[k] = i


@kernel
def _number(row: NDArray[np.int64], low: int, place: NDArray[np.int32]) -> None:
    """place[row[i] - low] = i."""
    for i in range(len(row)):
        place[row[i] - low] = i


@kernel
def _spread(
    values: NDArray[np.uint8],
    row_at: NDArray[np.int64],
    place: NDArray[np.int32],
    low: int,
    last: int,
    row: NDArray[np.int64],
    at: NDArray[np.int64],
    end: NDArray[np.int64],
    begin: int,
    slot: NDArray[np.int64],
    filled: NDArray[np.int64],
    buffers: NDArray[np.uint8],
    row_bytes: int,
) -> int:
    """Copy rows up to `last` to the batches from `begin` on, until a batch's piece is full, which is returned; else -1."""
    most = buffers.shape[1] // row_bytes
    for k in range(begin, len(at)):
        i, own, count = at[k], buffers[slot[k]], filled[k]
        while i < end[k] and row[i] <= last and count < most:
            source, to = row_at[place[row[i] - low]], count * row_bytes
            own[to : to + row_bytes] = values[source : source + row_bytes]
            i += 1
            count += 1
        at[k], filled[k] = i, count
        if count == most:
            return k
    return -1

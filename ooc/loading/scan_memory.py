"""The memory of shared scans: the rows of the scan that serves batches, and of the next one, which is made meanwhile.

A scan's rows are fresh anonymous memory, which takes nothing until it is written. Destinations' own rows are kept in file
order, so they fill their memory as the file goes by. Aggregates are kept in the order in which batches are through with them,
so they are given back batch by batch. What one scan gives back, the next one fills: two scans take about three quarters of what
both hold.
"""

import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats
from ooc.loading.feature_cache import Stopped
from ooc.runtime.buffers import leased
from ooc.runtime.clock import waiting as waits

GRACE_SECONDS = 0.5
"""after which a consumer that asks for more, and has let go of nothing, is taken to keep its batches"""
ALIVE = 2
"""Scans whose rows are in memory at once"""
BLOCK_BYTES = 2 * 2**20
"""given back at once: a huge page, of which parts would stay"""


class _Taken:
    """Bytes that a scan's rows take now."""

    def __init__(self, sums: int) -> None:
        self.sums, self.self_rows = sums, 0


class ScanRows:
    """Rows of a scan: `neighbor`, float32[num_sums, f], zeros at first, and `self_rows`, float32[num_self_rows, f].

    turn: number of the scan; ends: int64[batches], batches up to k need no aggregates from ends[k] on.
    """

    def __init__(self, memory: "ScanMemory", shape: tuple[int, int, int], ends: NDArray[np.int64], turn: int) -> None:
        num_sums, num_self_rows, width = shape
        self._pages, self.neighbor = _fresh(num_sums, width)
        _, self.self_rows = _fresh(num_self_rows, width)
        self.turn, self.taken = turn, _Taken(self.neighbor.nbytes)
        self._memory, self._ends, self._row_bytes = memory, ends, 4 * width
        self._served: set[int] = set()
        self._next = self._given = 0

    def part(self, k: int, rows: slice) -> Floats:
        """Aggregates `rows` for batch k, the last one to need them; they are given back when it has let go of them."""
        found = self.neighbor[rows]
        if len(found) == 0:
            self.served(k)
            return found
        return leased(found, self.served, k)

    def served(self, k: int) -> None:
        """Batch k needs its aggregates no more; called from any thread, in a collection too."""
        with self._memory.changed:
            self._served.add(k)
            while self._next in self._served:
                self._served.remove(self._next)
                self._next += 1
            done = int(self._ends[self._next - 1]) * self._row_bytes if self._next else 0
            begin = self.neighbor.ctypes.data
            stop = max(0, (begin + done) // BLOCK_BYTES * BLOCK_BYTES - begin)  # blocks of the address space
            if stop > self._given:
                self._pages.madvise(mmap.MADV_DONTNEED, self._given, stop - self._given)
                self.taken.sums -= stop - self._given
                self._given = stop
                self._memory.changed.notify_all()


def _fresh(rows: int, width: int) -> tuple[mmap.mmap, Floats]:
    """Zeros that take no memory yet, float32[rows, width], and their pages."""
    pages = mmap.mmap(-1, max(1, 4 * rows * width), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages, np.frombuffer(pages, np.float32, rows * width).reshape(rows, width)


class ScanMemory:
    """Hands out the rows of scans, and holds up the one in the making where the one before has given back too little.

    A consumer that keeps its batches makes more memory necessary, and gets it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()  # over an RLock: rows may come back in a collection, in the middle of all
        self._taken: list[_Taken] = []
        self._requested = -1
        self._closed = self._kept = False

    def take(self, shape: tuple[int, int, int], ends: NDArray[np.int64], turn: int, fills: bool = False) -> ScanRows:
        """Rows of scan `turn`, whose batches nobody has requested yet; waits until one scan at most is alive beside it.

        shape: (num_sums, num_self_rows, f); ends: see `ScanRows`; fills: whether `fill` says how many own rows there are.
        Raises Stopped where the memory is closed, or gets closed meanwhile.
        """
        with self.changed:
            self._kept = False
            self._wait(turn, lambda: len(self._taken) < ALIVE)
            rows = ScanRows(self, shape, ends, turn)
            rows.taken.self_rows = 0 if fills else rows.self_rows.nbytes
            self._taken.append(rows.taken)
        weakref.finalize(rows, self._gone, rows.taken).atexit = False
        return rows

    def fill(self, rows: ScanRows, nbytes: int, most: int) -> None:
        """`nbytes` of self rows are about to be in memory; waits until these and what all scans take are `most` bytes.

        Raises Stopped as `take`.
        """
        mine = rows.taken

        def fits() -> bool:
            others = [taken.sums + taken.self_rows for taken in self._taken if taken is not mine]
            return not others or sum(others) + mine.sums + nbytes <= most

        with self.changed:
            self._wait(rows.turn, fits)
            mine.self_rows = nbytes

    def _wait(self, turn: int, ready: Callable[[], bool]) -> None:
        with waits():
            self.changed.wait_for(lambda: self._closed or ready() or self._requested >= turn)
            # Requested, and not ready: the consumer is about to let go of the batch before, or it keeps its batches.
            grace = 0.0 if self._kept else GRACE_SECONDS
            self._kept = not self.changed.wait_for(lambda: self._closed or ready(), grace)
        if self._closed:
            raise Stopped

    def _gone(self, taken: _Taken) -> None:
        with self.changed:
            self._taken = [each for each in self._taken if each is not taken]
            self.changed.notify_all()

    def request(self, turn: int) -> None:
        """The consumer is through with everything before what is made for `turn`, or keeps it."""
        with self.changed:
            self._requested = turn
            self.changed.notify_all()

    def close(self) -> None:
        """End all waiting, now and later; idempotent."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()


class RowCopies:
    """`count` float32 buffers for batches' own copies of rows; one is used again when nobody refers to an array over it.

    A consumer that keeps its batches makes more buffers necessary.
    """

    def __init__(self, count: int) -> None:
        self._free: list[Floats] = [np.empty(0, np.float32)] * count
        self._count, self._kept = count, False
        self._changed = threading.Condition()

    def take(self, shape: tuple[int, int]) -> Floats:
        """float32[shape], uninitialised: of a batch about as large as the one before."""
        size = shape[0] * shape[1]
        with self._changed:
            with waits():
                self._kept = not self._changed.wait_for(lambda: self._free, 0.0 if self._kept else GRACE_SECONDS)
            buffer = self._free.pop() if self._free else np.empty(0, np.float32)
        if len(buffer) < size:
            buffer = np.empty(size * 9 // 8, np.float32)
        return leased(buffer, self._give, buffer)[:size].reshape(shape)

    def _give(self, buffer: Floats) -> None:
        with self._changed:
            if len(self._free) < self._count:
                self._free.append(buffer)
            self._changed.notify_all()

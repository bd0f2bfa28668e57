"""Memory-mapped reads with MADV_RANDOM: the page cache serves what comes again, every miss is one page fault."""

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stores.engines.tasks import Gate, check_out, run_slices
from stores.files import Segments, forget, map_segments
from stores.jit import kernel
from stores.plan import ReadPlan
from stores.threads import READERS

MAPPED_BYTES = 64 * 2**20
"""Pages of the map that stay in the process at most, with those of the reads under way; as much as is allowed for buffers"""
_AROUND_BYTES = 64 * 1024  # what the kernel maps around a fault, of pages it holds
_STEP = 64  # extents between two looks at the bound


class MmapEngine:
    """Copies out of one map over all files; many threads, so that many page faults are in flight.

    Returned byte counts are the pages the plan touches, whether or not the page cache held them. A file that shrinks
    while mapped kills the process (SIGBUS), which is the price of a map; files are checked on opening. Past MAPPED_BYTES the
    pages are given back; the page cache keeps them.

    >>> MmapEngine(segments).gather(plan_reads(ids, 512, count=n), out)
    """

    name = "mmap"
    alignment = 4096
    reaches_device = False
    reason: str | None = None
    note: str | None = None

    def __init__(self, segments: Segments) -> None:
        self._map = map_segments(segments)
        self._pool = READERS.acquire()
        self._touched = 0
        self._lock = threading.Lock()
        self._gate = Gate(segments.paths[0] if segments.paths else "the array")

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        if buffer.dtype != np.uint8 or buffer.shape != (plan.nbytes,):
            raise ValueError(f"buffer must be uint8[{plan.nbytes}], not {buffer.dtype}{list(buffer.shape)}")
        at = np.cumsum(plan.length) - plan.length

        def work(begin: int, end: int) -> int:
            return int(_copy_extents(begin, end, self._map, plan.offset, plan.length, at, buffer))

        return self._run(plan, work)

    def gather(self, plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None = None) -> int:
        check_out(plan, out, at)
        begins = np.cumsum(plan.length) - plan.length
        rows = plan.row_at, plan.order, plan.first, np.arange(len(plan.order)) if at is None else at

        def work(begin: int, end: int) -> int:
            return int(_copy_rows(begin, end, self._map, plan.offset, plan.length, begins, *rows, plan.row_bytes, out))

        return self._run(plan, work)

    def _run(self, plan: ReadPlan, copy: Callable[[int, int], int]) -> int:
        def work(begin: int, end: int) -> int:
            total = 0
            for first in range(begin, end, _STEP):
                last = min(first + _STEP, end)
                total += copy(first, last)
                self._trim(plan.offset[first:last], plan.length[first:last])
            return total

        with self._gate.reading():
            return run_slices(self._pool, READERS.threads, plan, work)

    def _trim(self, offset: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        """After copying these extents (none is left uncounted so): give all pages back where they are too many."""
        low, high = offset // _AROUND_BYTES, (offset + length - 1) // _AROUND_BYTES
        parts = int((high - low + 1).sum()) - int(np.count_nonzero(low[1:] == high[:-1]))
        with self._lock:
            self._touched += parts * _AROUND_BYTES
            if min(self._touched, len(self._map)) <= MAPPED_BYTES:
                return
            self._touched = 0
            forget(self._map)

    def close(self) -> None:
        if self._gate.close():
            self._map = self._map[:0].copy()  # the map itself goes with the last array over it
            READERS.release()


@kernel
def _copy_extents(
    begin: int,
    end: int,
    mapped: NDArray[np.uint8],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    at: NDArray[np.int64],
    buffer: NDArray[np.uint8],
) -> int:
    total = 0
    for j in range(begin, end):
        n = min(length[j], len(mapped) - offset[j])
        for byte in range(n):
            buffer[at[j] + byte] = mapped[offset[j] + byte]
        total += n
    return total


@kernel
def _copy_rows(
    begin: int,
    end: int,
    mapped: NDArray[np.uint8],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    at: NDArray[np.int64],
    row_at: NDArray[np.int64],
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    place: NDArray[np.int64],
    row_bytes: int,
    out: NDArray[np.uint8],
) -> int:
    total = 0
    for j in range(begin, end):
        shift = offset[j] - at[j]
        for p in range(first[j], first[j + 1]):
            source = row_at[order[p]] + shift
            to = place[order[p]] * row_bytes
            for byte in range(row_bytes):
                out[to + byte] = mapped[source + byte]
        total += min(length[j], len(mapped) - offset[j])
    return total

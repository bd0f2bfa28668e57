"""Memory-mapped reads with MADV_RANDOM: repeated reads hit the page cache, every miss is a page fault."""

import threading

import numpy as np
from numpy.typing import NDArray

from ooc.stores.io.engines.deliver import Ints, Ranges, deliver
from ooc.stores.io.engines.tasks import Gate, rows_of, run_slices, whole_extents
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.io.segments import Segments, check_map, forget, map_segments
from ooc.stores.io.threads import READERS
from ooc.stores.jit import kernel

MAPPED_BYTES = 64 * 2**20
"""mapped pages the process keeps at most, besides those of reads in progress"""
_AROUND_BYTES = 64 * 1024  # what the kernel maps around a fault, of pages it holds
_STEP = 64  # extents between two looks at the bound


class MmapEngine:
    """Copies from one map over all files, in many threads so that many page faults are in flight.

    Returned byte counts are the pages the plan touches, cached or not. A page that cannot be read (the disk fails, the file has
    shrunk) is a StoreError (see `ooc.stores.io.bus_errors`). Beyond MAPPED_BYTES the pages are unmapped but stay in the
    page cache.

    >>> MmapEngine(segments).gather(plan_reads(ids, 512, count=n), out)
    """

    name = "mmap"
    alignment = 4096
    reaches_device = False
    reason: str | None = None
    note: str | None = None

    def __init__(self, segments: Segments) -> None:
        self._map = map_segments(segments, checked=True)
        self._pool = READERS.acquire()
        self._touched = 0
        self._lock = threading.Lock()
        self._gate = Gate(segments.paths[0] if segments.paths else "the array")

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        return self._run(plan, whole_extents(plan, buffer))

    def gather(self, plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None = None) -> int:
        return self._run(plan, rows_of(plan, out, at))

    def _run(self, plan: ReadPlan, ranges: Ranges) -> int:
        def work(begin: int, end: int) -> int:
            mapped, total = (self._map.ctypes.data, len(self._map)), 0
            for first in range(begin, end, _STEP):
                last = min(first + _STEP, end)
                total += int(_copy(first, last, *mapped, plan.offset, plan.length, ranges))
                self._trim(plan.offset[first:last], plan.length[first:last])
            return total

        with self._gate.reading():
            total = run_slices(self._pool, READERS.threads, plan, work)
            check_map(self._map)
        return total

    def _trim(self, offset: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        """Unmap all pages if too many are mapped after copying these extents."""
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
            self._map = self._map[:0].copy()  # the map is removed with the last array over it
            READERS.release()


@kernel
def _copy(begin: int, end: int, address: int, held: int, offset: Ints, length: Ints, ranges: Ranges) -> int:
    """Copy the ranges of extents begin:end from the `held` bytes mapped at `address`; returns the extents' bytes."""
    total = 0
    for j in range(begin, end):
        nbytes = min(length[j], held - offset[j])
        deliver(ranges, j, ranges.first[j], 0, nbytes, address + offset[j])
        total += nbytes
    return total

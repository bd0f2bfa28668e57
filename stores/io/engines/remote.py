"""Reads of an array far away: what the cache holds through an engine of the disk, the rest by many requests at once.

A chunk that is missing is requested whole, compared with its checksum, delivered from memory and written to the cache, so that
it is requested once; if the cache has no room for it, only the bytes between the first and the last wanted one are.
"""

from concurrent.futures import Future
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.stores.io.engines.deliver import Ints, Ranges, deliver, first_reaching
from ooc.stores.io.engines.mmap import MmapEngine
from ooc.stores.io.engines.pread import PreadEngine
from ooc.stores.io.engines.tasks import Begun, Gate, rows_of, settle, whole_extents
from ooc.stores.io.read_plan import ReadCost, ReadPlan
from ooc.stores.io.remote.array import POOL, Extent, RemoteArray
from ooc.stores.jit import kernel

_GROUP_BYTES = 8 * 2**20
"""pieces that the cache holds, read at a time when others are missing"""
_NONE = np.empty(0, np.int64)


class _Pieces(NamedTuple):
    """Parts of extents that lie in one chunk each, in ascending order; int64[k]."""

    chunk: Ints
    extent: Ints
    offset: Ints
    length: Ints

    def of(self, chosen: "NDArray[np.bool_] | slice") -> "_Pieces":
        return _Pieces(*(each[chosen] for each in self))


class RemoteEngine:
    """Carries out plans over an array far away; `inner` reads its files, which hold a part of it.

    >>> RemoteEngine(open_engine("auto", segments), array).read(plan, buffer)
    """

    name = "remote"
    reaches_device = False

    def __init__(self, inner: PreadEngine | MmapEngine, far: RemoteArray) -> None:
        self.inner, self.far = inner, far
        self.alignment = inner.alignment
        self.reason = inner.reason
        self.note: str | None = f"by ranges, with a cache read through {inner.name}"
        self._gate, self._pool = Gate(far.name), POOL.acquire()

    def cost_beside(self, local: ReadCost) -> ReadCost:
        """The cost of reads: that of requests, or of the disk if the cache holds the whole array."""
        return local if self.far.presence.complete else self.far.cost

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        with self._gate.reading():
            pieces = self._lacking(plan)
            if pieces is None:
                return self.inner.read(plan, buffer)
            return self._run(pieces, plan, whole_extents(plan, buffer))

    def gather(self, plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None = None) -> int:
        with self._gate.reading():
            pieces = self._lacking(plan)
            if pieces is None:
                return self.inner.gather(plan, out, at)
            return self._run(pieces, plan, rows_of(plan, out, at))

    def _lacking(self, plan: ReadPlan) -> _Pieces | None:
        """The plan's extents, cut at the borders of chunks; None if the cache holds all of them."""
        if not len(self.far.presence.missing(self.far.touched(plan.offset, plan.length))):
            return None
        size, end = self.far.chunk_bytes, np.minimum(plan.offset + plan.length, self.far.total)
        first, count = plan.offset // size, np.maximum(-(-end // size) - plan.offset // size, 0)
        extent = np.repeat(np.arange(len(count)), count)
        chunk = first[extent] + np.arange(len(extent)) - (np.cumsum(count) - count)[extent]
        offset = np.maximum(plan.offset[extent], chunk * size)
        return _Pieces(chunk, extent, offset, np.minimum(end[extent], (chunk + 1) * size) - offset)

    def _run(self, pieces: _Pieces, plan: ReadPlan, ranges: Ranges) -> int:
        """Deliver all pieces; a chunk that another thread is fetching is waited for, and then in the cache."""
        total = 0
        while len(pieces.chunk):
            chunks = np.unique(pieces.chunk)
            mine = np.array(self.far.claim(chunks), np.int64)
            fetched = np.isin(pieces.chunk, mine)
            total += self._fetch(pieces.of(fetched), mine.tolist(), plan, ranges)
            pieces = pieces.of(~fetched)
            lacking = np.isin(pieces.chunk, self.far.presence.missing(np.unique(pieces.chunk)))
            total += self._read_held(pieces.of(~lacking), plan, ranges)
            pieces = pieces.of(lacking)
            self.far.wait(np.unique(pieces.chunk).tolist())
        return total

    def _fetch(self, pieces: _Pieces, mine: list[int], plan: ReadPlan, ranges: Ranges) -> int:
        """Request claimed chunks and deliver their pieces; returns the bytes that came."""
        if not mine:
            return 0
        bounds = np.searchsorted(pieces.chunk, [*mine, mine[-1] + 1])
        begun = Begun()

        def one(number: int, first: int, last: int) -> int:
            with self.far.fetched(number):
                own = pieces.of(slice(first, last))
                low = int(own.offset[0])
                begin, data = self.far.fetch(Extent(number, low, int(own.offset[-1] + own.length[-1]) - low))
                _deliver(own.extent, own.offset, own.length, plan.offset, ranges, data.ctypes.data, own.offset - begin)
            return len(data)

        futures: list[Future[int]] = []
        try:
            for number, first, last in zip(mine, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                if len(futures) >= self.far.flying:
                    futures[len(futures) - self.far.flying].result()
                futures.append(self._pool.submit(begun.run, one, number, first, last))
            return sum(future.result() for future in futures)
        finally:
            begun.stop()
            for each in futures:
                each.cancel()
            settle([each for each in futures if not each.cancelled()])
            self.far.unclaim(mine)

    def _read_held(self, pieces: _Pieces, plan: ReadPlan, ranges: Ranges) -> int:
        """Read pieces that the cache holds, a group at a time, and deliver them."""
        group = (np.cumsum(pieces.length) - pieces.length) // _GROUP_BYTES
        bounds = [*np.flatnonzero(np.diff(group, prepend=-1)).tolist(), len(group)]
        return sum(self._read_group(pieces.of(slice(*each)), plan, ranges) for each in pairwise(bounds))

    def _read_group(self, own: _Pieces, plan: ReadPlan, ranges: Ranges) -> int:
        low = own.offset // self.alignment * self.alignment
        high = -(-(own.offset + own.length) // self.alignment) * self.alignment
        reads = ReadPlan(plan.row_bytes, low, high - low, _NONE, _NONE, np.zeros(len(low) + 1, np.int64))
        buffer = np.empty(reads.nbytes, np.uint8)
        nbytes = self.inner.read(reads, buffer)
        at = np.cumsum(reads.length) - reads.length + own.offset - low
        _deliver(own.extent, own.offset, own.length, plan.offset, ranges, buffer.ctypes.data, at)
        return nbytes

    def close(self) -> None:
        if self._gate.close():
            self.inner.close()
            self.far.sync()
            POOL.release()


@kernel
def _deliver(extent: Ints, offset: Ints, length: Ints, begins: Ints, ranges: Ranges, address: int, at: Ints) -> None:
    """Copy the ranges in pieces of extents, at address + at[i] each; extent j begins at begins[j]."""
    for i in range(len(extent)):
        j = extent[i]
        skipped = offset[i] - begins[j]
        deliver(ranges, j, first_reaching(ranges, j, ranges.first[j], skipped), skipped, length[i], address + at[i])

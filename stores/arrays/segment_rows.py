"""Rows stored consecutively in files, read by an engine according to a plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows, check_request
from ooc.stores.io.disk import profile_for
from ooc.stores.io.engines import Engine, open_engine
from ooc.stores.io.engines.checking import CheckingEngine
from ooc.stores.io.engines.pread import PreadEngine
from ooc.stores.io.engines.remote import RemoteEngine
from ooc.stores.io.engines.sharing import SharingEngine
from ooc.stores.io.read_plan import MAX_EXTENT_BYTES, ReadCost, ReadPlan, plan_by_cost, plan_ranges
from ooc.stores.io.segments import Segments, map_segments
from ooc.stores.io.shared_blocks import SharedBlocks
from ooc.stores.io.threads import Background

Empty = Callable[[int], NDArray[np.uint8]]
"""allocates memory of the given size with arbitrary content"""
_LEAST_PATIENCE = 2.0
"""seconds that a pass waits for processes behind it, which share its reads, if reading all of the array takes less: those that
train together are seldom further apart, and none goes on without the others anyway"""
_NO_ROWS = np.empty(0, np.int64)


def fresh(nbytes: int) -> NDArray[np.uint8]:
    """An `Empty` that allocates new memory every time."""
    return np.empty(nbytes, np.uint8)


class SegmentRows(Background):
    """Rows [count, *row shape] over `segments`: row r begins at virtual byte r * row_bytes.

    `engine.reason` says why a fallback is used; `cost` is the measured cost of reads on the files' device, or of requests for
    what is far away, which decides which rows share a read. Chunks with checksums are compared as they are read, and with
    `verify` before anything of them is; see `CheckingEngine`.

    >>> SegmentRows((1000, 64), np.dtype("float16"), segments).read(ids, out)
    """

    sharing: SharingEngine | None = None
    """the part of `engine` that shares reads with other processes"""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], segments: Segments, engine: str = "auto", verify: bool = False
    ) -> None:
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype
        self.segments = segments
        self.engine: Engine = open_engine(engine, segments)
        local = self.engine.inner if isinstance(self.engine, RemoteEngine) else self.engine
        try:
            profile = profile_for(segments.paths[0] if segments.paths else Path("/"), local.name)
        except BaseException:
            self.engine.close()
            raise
        self.cost: ReadCost = profile.cost
        if isinstance(local, PreadEngine):
            local.depth = profile.depth
        if isinstance(self.engine, RemoteEngine):
            self.cost = self.engine.cost_beside(profile.cost)
        if segments.sums is not None:
            self.engine = CheckingEngine(self.engine, segments, verify)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored."""
        return int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=np.int64))

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """Set out[i] to row ids[i]; see `Rows.read`. Returns the bytes read from disk."""
        check_request(self, ids, out, at)
        if len(ids) == 0:
            return 0
        plan = self.plan(ids)
        return self.engine.gather(plan, out.reshape(-1).view(np.uint8), at)

    def plan(self, ids: Ids) -> ReadPlan:
        """Return the reads for rows `ids` (int64[n]); they should take `rows.cost.seconds(plan.length)`.

        Raises IndexError if an id is out of range.

        >>> plan = rows.plan(np.arange(1000))
        >>> plan.nbytes, rows.cost.seconds(plan.length)
        """
        return plan_by_cost(ids, self.row_bytes, self.cost, count=self.shape[0], alignment=self.engine.alignment)

    def range_bytes(self, first: int, last: int) -> int:
        """Bytes of memory that `read_range` needs: the rows, extended to the engine's alignment."""
        begin, end = self._range(first, last)
        return end - begin

    def read_range(self, first: int, last: int, empty: Empty = fresh) -> tuple[AnyArray, int]:
        """Return rows first..last-1 and the bytes read, without a plan per row or a copy. Raises as `read` does.

        `empty` allocates the memory; io_uring reads directly into page-aligned memory.
        """
        check_range(self.shape[0], first, last)
        plan = self.range_plan(first, last)
        buffer = empty(plan.nbytes)
        nbytes = self.engine.read(plan, buffer) if len(plan.offset) else 0
        begin = first * self.row_bytes - self._range(first, last)[0]
        rows = buffer[begin : begin + (last - first) * self.row_bytes].view(self.dtype)
        return rows.reshape(last - first, *self.shape[1:]), nbytes

    def range_plan(self, first: int, last: int) -> ReadPlan:
        """The extents of rows first..last-1, one behind the other, without a place of each row."""
        low, high = self._range(first, last)
        offset = np.arange(low, high, MAX_EXTENT_BYTES // self.engine.alignment * self.engine.alignment)
        return ReadPlan(
            self.row_bytes, offset, np.diff(offset, append=high), _NO_ROWS, _NO_ROWS, np.zeros(len(offset) + 1, np.int64)
        )

    def share(self, blocks: SharedBlocks | None) -> None:
        """Share the passes over these rows with other processes from now on; None: no more. See `SharingEngine`."""
        own = self.engine
        inner = own.inner if isinstance(own, CheckingEngine) else own
        engine = inner.inner if isinstance(inner, SharingEngine) else inner
        self.sharing = None
        if blocks is not None:
            whole = self.cost.seconds(np.full(-(-self.segments.total // MAX_EXTENT_BYTES), MAX_EXTENT_BYTES))
            engine = self.sharing = SharingEngine(engine, self.segments, blocks, max(whole, _LEAST_PATIENCE))
        self.engine = CheckingEngine(engine, self.segments, own.all_chunks) if isinstance(own, CheckingEngine) else engine

    def checked(self, engine: Engine) -> Engine:
        """Another engine over the same segments, whose reads are compared with checksums as those of `engine` are."""
        own = self.engine
        return CheckingEngine(engine, self.segments, own.all_chunks) if isinstance(own, CheckingEngine) else engine

    def plan_ranges(self, first: Ids, last: Ids) -> tuple[ReadPlan, Ids]:
        """Return the reads for ranges of rows, and where each begins in them; see `ooc.stores.io.read_plan.plan_ranges`."""
        settings = {"alignment": self.engine.alignment, "gap_bytes": self.cost.gap_bytes}
        return plan_ranges(first, last, self.row_bytes, count=self.shape[0], **settings)

    def _range(self, first: int, last: int) -> tuple[int, int]:
        """Aligned virtual bytes of rows first..last-1; empty if there are no rows."""
        begin, end, page = first * self.row_bytes, last * self.row_bytes, self.engine.alignment
        low = begin // page * page
        return low, -(-end // page) * page if first < last else low

    def map(self, private: bool = False) -> AnyArray:
        """Return the array [count, *row shape] as one memory map over all files (MADV_RANDOM).

        It is read-only, or `private`: what is written to it stays in memory. It remains valid after `close`, until the last
        array over it is gone.
        """
        self.segments.fill()
        nbytes = self.shape[0] * self.row_bytes
        return map_segments(self.segments, private=private)[:nbytes].view(self.dtype).reshape(self.shape)

    def close(self) -> None:
        """Release descriptors, maps and threads; idempotent."""
        self._end_background()
        self.engine.close()


def read_range(rows: Rows, first: int, last: int, empty: Empty = fresh) -> tuple[AnyArray, int]:
    """Return rows first..last-1 of any Rows and the bytes read; a view for rows in memory, else in memory of `empty`.

    Raises IndexError if rows are out of range.

    >>> read_range(ds.edge_rows("indices"), 1_000_000, 2_000_000)[0].shape
    (1000000,)
    """
    if isinstance(rows, SegmentRows):
        return rows.read_range(first, last, empty)
    check_range(rows.shape[0], first, last)
    if isinstance(rows, ArrayRows):
        return rows.array[first:last], 0
    out = empty((last - first) * rows.row_bytes).view(rows.dtype).reshape(last - first, *rows.shape[1:])
    return out, rows.read(np.arange(first, last), out)


class Ranges(NamedTuple):
    """Ranges of rows in memory: range k begins at item at[k] of `items`, the rows' values one behind the other."""

    items: AnyArray
    """[m] of the rows' dtype, for rows of `width` items each"""
    at: Ids
    """int64[k]"""
    width: int
    nbytes: int
    """bytes read from disk"""


class RangePlan(NamedTuple):
    """Ranges of rows to read: `read` carries it out, in `nbytes` of memory."""

    rows: Rows
    first: Ids
    last: Ids
    """int64[k] each"""
    reads: ReadPlan | None
    """of rows stored one behind the other"""
    place: Ids
    """int64[k]: where each range begins, in bytes"""
    nbytes: int

    @classmethod
    def of(cls, rows: Rows, first: Ids, last: Ids) -> "RangePlan":
        """Plan the reading of rows first[k]..last[k]-1. Raises IndexError for a range that is not one of the rows'.

        >>> RangePlan.of(ds.edge_rows("indices"), np.array([0, 500]), np.array([100, 600])).read().at
        array([  0, 500])
        """
        if isinstance(rows, SegmentRows):
            reads, place = rows.plan_ranges(first, last)
            return cls(rows, first, last, reads, place, reads.nbytes)
        if len(first):
            check_range(rows.shape[0], int(first.min()), int(last.max()))
        if isinstance(rows, ArrayRows):
            return cls(rows, first, last, None, first * rows.row_bytes, 0)
        size = (last - first) * rows.row_bytes
        return cls(rows, first, last, None, np.cumsum(size) - size, int(size.sum()))

    def read(self, empty: Empty = fresh) -> Ranges:
        """Read the ranges into memory of `empty`. Raises StoreError as `Rows.read` does."""
        rows = self.rows
        itemsize, width = rows.dtype.itemsize, rows.row_bytes // rows.dtype.itemsize
        if isinstance(rows, ArrayRows):
            return Ranges(rows.array.reshape(-1), self.place // itemsize, width, 0)
        buffer = empty(self.nbytes)
        if self.reads is not None:
            assert isinstance(rows, SegmentRows)
            nbytes = rows.engine.read(self.reads, buffer) if len(self.reads.offset) else 0
        else:
            out = buffer.view(rows.dtype).reshape(-1, *rows.shape[1:])
            count = self.last - self.first
            begins = np.repeat(self.first - (np.cumsum(count) - count), count)
            nbytes = rows.read(begins + np.arange(len(begins)), out)
        whole = len(buffer) // itemsize * itemsize
        return Ranges(buffer[:whole].view(rows.dtype), self.place // itemsize, width, nbytes)


def check_range(count: int, first: int, last: int) -> None:
    """Raise IndexError unless rows first..last-1 exist among `count`."""
    if not 0 <= first <= last <= count:
        raise IndexError(f"rows {first} to {last - 1} are out of range: there are {count} rows")

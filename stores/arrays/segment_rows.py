"""Rows stored consecutively in files, read by an engine according to a plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows, check_request
from ooc.stores.io.disk import profile_for
from ooc.stores.io.engines import Engine, open_engine
from ooc.stores.io.engines.checking import CheckingEngine
from ooc.stores.io.engines.pread import PreadEngine
from ooc.stores.io.read_plan import MAX_EXTENT_BYTES, ReadCost, ReadPlan, plan_by_cost
from ooc.stores.io.segments import Segments, map_segments
from ooc.stores.io.threads import Background

Empty = Callable[[int], NDArray[np.uint8]]
"""allocates memory of the given size with arbitrary content"""
_NO_ROWS = np.empty(0, np.int64)


def fresh(nbytes: int) -> NDArray[np.uint8]:
    """An `Empty` that allocates new memory every time."""
    return np.empty(nbytes, np.uint8)


class SegmentRows(Background):
    """Rows [count, *row shape] over `segments`: row r begins at virtual byte r * row_bytes.

    `engine.reason` says why a fallback is used; `cost` is the measured cost of reads on the files' device, which decides which
    rows share a read. Chunks with checksums are compared as they are read, and with `verify` before anything of them is; see
    `CheckingEngine`.

    >>> SegmentRows((1000, 64), np.dtype("float16"), segments).read(ids, out)
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], segments: Segments, engine: str = "auto", verify: bool = False
    ) -> None:
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype
        self.segments = segments
        self.engine: Engine = open_engine(engine, segments)
        try:
            profile = profile_for(segments.paths[0] if segments.paths else Path("/"), self.engine.name)
        except BaseException:
            self.engine.close()
            raise
        self.cost: ReadCost = profile.cost
        if isinstance(self.engine, PreadEngine):
            self.engine.depth = profile.depth
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
        low, high = self._range(first, last)
        offset = np.arange(low, high, MAX_EXTENT_BYTES // self.engine.alignment * self.engine.alignment)
        plan = ReadPlan(
            self.row_bytes, offset, np.diff(offset, append=high), _NO_ROWS, _NO_ROWS, np.zeros(len(offset) + 1, np.int64)
        )
        buffer = empty(plan.nbytes)
        nbytes = self.engine.read(plan, buffer) if len(offset) else 0
        begin = first * self.row_bytes - low
        rows = buffer[begin : begin + (last - first) * self.row_bytes].view(self.dtype)
        return rows.reshape(last - first, *self.shape[1:]), nbytes

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


def check_range(count: int, first: int, last: int) -> None:
    """Raise IndexError unless rows first..last-1 exist among `count`."""
    if not 0 <= first <= last <= count:
        raise IndexError(f"rows {first} to {last - 1} are out of range: there are {count} rows")

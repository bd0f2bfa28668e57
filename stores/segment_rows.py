"""Rows whose bytes stand one behind the other in files: read by an engine, by plan, straight from them."""

from pathlib import Path
from typing import Any

import numpy as np

from stores.disk import profile_for
from stores.engines import Engine, open_engine
from stores.engines.pread import PreadEngine
from stores.files import Segments, map_segments
from stores.plan import MAX_EXTENT_BYTES, ReadCost, ReadPlan, plan_by_cost
from stores.rows import AnyArray, ArrayRows, Ids, Rows, check_request
from stores.threads import Background


class SegmentRows(Background):
    """Rows [count, *row shape] over `segments`: row r begins at virtual byte r * row_bytes.

    `segments` are the files; `engine.reason` tells of a fallback; `cost` is what reads take on the files' device, as measured,
    and decides which rows share one.

    >>> SegmentRows((1000, 64), np.dtype("float16"), segments).read(ids, out)
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], segments: Segments, engine: str = "auto") -> None:
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

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored."""
        return int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=np.int64))

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """Afterwards out[i] is row ids[i]; see `Rows.read`. Returns the bytes read from the disk."""
        check_request(self, ids, out, at)
        if len(ids) == 0:
            return 0
        plan = self.plan(ids)
        return self.engine.gather(plan, out.reshape(-1).view(np.uint8), at)

    def plan(self, ids: Ids) -> ReadPlan:
        """The reads that serve rows `ids` (int64[n]); `rows.cost.seconds(plan.length)` is what they should take.

        Raises IndexError for an id out of range.

        >>> plan = rows.plan(np.arange(1000))
        >>> plan.nbytes, rows.cost.seconds(plan.length)
        """
        return plan_by_cost(ids, self.row_bytes, self.cost, count=self.shape[0], alignment=self.engine.alignment)

    def read_range(self, first: int, last: int) -> tuple[AnyArray, int]:
        """(rows first..last-1, bytes read): neighbors need no plan row by row, nor a copy. Raises as `read` does."""
        _check_range(self.shape[0], first, last)
        begin, stop, page = first * self.row_bytes, last * self.row_bytes, self.engine.alignment
        low, high = begin // page * page, -(-stop // page) * page
        offset = np.arange(low, high, MAX_EXTENT_BYTES // page * page)
        length = np.diff(offset, append=high)
        none = np.empty(0, np.int64)
        plan = ReadPlan(self.row_bytes, offset, length, none, none, np.zeros(len(offset) + 1, np.int64))
        buffer = np.empty(plan.nbytes, np.uint8)
        nbytes = self.engine.read(plan, buffer) if len(offset) else 0
        rows = buffer[begin - low : stop - low].view(self.dtype)
        return rows.reshape(last - first, *self.shape[1:]), nbytes

    def map(self) -> AnyArray:
        """The whole array [count, *row shape] as one read-only memory map over all files (MADV_RANDOM).

        It stays valid after `close`, until the last array over it is gone.
        """
        nbytes = self.shape[0] * self.row_bytes
        return map_segments(self.segments)[:nbytes].view(self.dtype).reshape(self.shape)

    def close(self) -> None:
        """Give back descriptors, maps and threads; idempotent."""
        self._end_background()
        self.engine.close()


def read_range(rows: Rows, first: int, last: int) -> tuple[AnyArray, int]:
    """(rows first..last-1, bytes read) of any Rows; of rows in memory a view. Raises IndexError for rows out of range.

    >>> read_range(ds.edge_rows("indices"), 1_000_000, 2_000_000)[0].shape
    (1000000,)
    """
    if isinstance(rows, SegmentRows):
        return rows.read_range(first, last)
    _check_range(rows.shape[0], first, last)
    if isinstance(rows, ArrayRows):
        return rows.array[first:last], 0
    out = np.empty((last - first, *rows.shape[1:]), rows.dtype)
    return out, rows.read(np.arange(first, last), out)


def _check_range(count: int, first: int, last: int) -> None:
    if not 0 <= first <= last <= count:
        raise IndexError(f"rows {first} to {last - 1} are out of range: there are {count} rows")

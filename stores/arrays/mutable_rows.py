"""`DiskRows`: rows on disk that are overwritten in place: histories, and the layers' outputs of a sweep.

A directory of two files: `rows.bin`, the rows one behind the other, preallocated and padded to a page, and `rows.json`, which
says what they are. Read by plan through an engine, as every other array of rows; written by our own code, never through zarr,
in whole pages past the page cache: dirty pages would be taken off the memory, and written when it suits the kernel.
"""

import json
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike

from stores.arrays.rows import AnyArray, Ids, check_write
from stores.arrays.segment_rows import SegmentRows
from stores.errors import StoreError
from stores.io.atomic import check_absent, disk_errors, partial_path, publish, write_file
from stores.io.engines.tasks import settle
from stores.io.pages import PAGE_BYTES, Bytes, PageFile, page_buffer
from stores.io.segments import Segments
from stores.io.threads import SharedPool
from stores.io.write_plan import PIECE_BYTES, WritePlan, plan_writes

WRITERS = SharedPool("ooc-write", 4)
"""Writes in flight, through a buffer of a MiB each: a few keep a disk busy"""
DATA, ABOUT = "rows.bin", "rows.json"
_FORMAT = 1
_local = threading.local()


class Log(Protocol):
    """What commits and rolls back rows: `stores.arrays.undo_log.UndoLog`."""

    def write(self, writes: Sequence[tuple[Any, Ids, AnyArray]]) -> int:
        """Save what the rows hold, then overwrite them; returns the bytes written."""

    def commit(self) -> None:
        """Make all writes durable and final."""

    def rollback(self) -> None:
        """Undo every write since the last commit."""


class DiskRows(SegmentRows):
    """Mutable rows [count, *row shape] in the directory `path`; use `create` or `open`.

    Reads may run beside a write; one that wants a row which is being written gets its old or its new bytes, or of each a part.

    >>> rows = DiskRows.create("run/history/0", (num_nodes, 64), "float16")
    >>> rows.write(np.arange(1000), out)  # float16[1000, 64]
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], engine: str) -> None:
        self.path = path
        nbytes = _padded(shape, dtype)
        super().__init__(shape, dtype, Segments((path / DATA,), np.array([nbytes])), engine)
        try:  # a map is coherent with the page cache only
            self.file = PageFile(path / DATA, nbytes, direct=self.engine.name != "mmap")
        except BaseException:
            super().close()
            raise
        self.log: Log | None = None
        """see `stores.arrays.undo_log`; set by it"""
        self._writers = WRITERS.acquire()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, path: Path | str, shape: tuple[int, ...], dtype: DTypeLike, engine: str = "auto") -> Self:
        """Make rows of zeros, their room on the disk taken at once.

        Raises StoreError where `path` exists or the disk is too full; nothing is left then.
        """
        path, dtype = Path(path), np.dtype(dtype).newbyteorder("<")
        check_absent(path)
        partial = partial_path(path)
        about = {"format": _FORMAT, "shape": list(shape), "dtype": dtype.str}
        with disk_errors(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        try:
            PageFile.allocate(partial / DATA, _padded(shape, dtype))
            write_file(partial / ABOUT, json.dumps(about).encode() + b"\n")
            publish(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return cls.open(path, engine)

    @classmethod
    def open(cls, path: Path | str, engine: str = "auto") -> Self:
        """The rows in `path`. Raises StoreError where they are absent, damaged, or of a newer format.

        >>> DiskRows.open("run/history/0").shape
        (1000000, 64)
        """
        path = Path(path)
        return cls(path, *cls._about(path), engine)

    @staticmethod
    def _about(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """(shape, dtype) of the rows in `path`."""
        try:
            about = json.loads((path / ABOUT).read_bytes())
            shape, dtype = tuple(int(size) for size in about["shape"]), np.dtype(about["dtype"])
            known = about["format"] == _FORMAT
        except (OSError, ValueError, KeyError, TypeError) as error:
            advice = "put them back, or begin anew what they are kept for"
            raise StoreError(f"{path} holds no rows that can be opened ({error}): {advice}") from error
        if not known:
            raise StoreError(f"{path} has format {about['format']}, not {_FORMAT}: use the version of ooc that wrote it")
        return shape, dtype

    @classmethod
    def extend(cls, path: Path | str, count: int) -> None:
        """Give the rows in `path`, which are not open, `count` rows, the new ones zeros; nothing where they have as many.

        Killed in between, it is to be called again. Raises StoreError where they are absent or the disk is too full.
        """
        path = Path(path)
        shape, dtype = cls._about(path)
        if shape[0] >= count:
            return
        about = {"format": _FORMAT, "shape": [count, *shape[1:]], "dtype": dtype.str}
        PageFile.extend(path / DATA, _padded((count, *shape[1:]), dtype))
        write_file(path / ABOUT, json.dumps(about).encode() + b"\n")

    def write(self, ids: Ids, rows: AnyArray) -> int:
        """Afterwards row ids[i] is rows[i]; see `MutableRows.write`. Neighboring rows go to the disk together."""
        if self.log is not None:
            return self.log.write([(self, ids, rows)])
        check_write(self, ids, rows)
        return self.store(plan_writes(ids, self.row_bytes), as_bytes(rows, self.row_bytes))

    def store(self, plan: WritePlan, rows: Bytes) -> int:
        """Carry out a plan whose pages are saved, where there is a log: `write` is what callers want.

        Returns, or raises the first failure, when no piece is under way any more.
        """
        with self._lock:
            return self._store(plan, rows)

    def _store(self, plan: WritePlan, rows: Bytes) -> int:
        if self._closed:
            raise StoreError(f"{self.path} is closed: open it again to write to it")
        futures: list[Future[int]] = []
        try:
            futures.extend(self._writers.submit(self._put, plan, rows, j) for j in range(len(plan)))
        finally:
            settle(futures)
        for future in futures:
            future.result()
        return plan.nbytes

    def _put(self, plan: WritePlan, rows: Bytes, j: int) -> int:
        begin = int(plan.begin[j])
        piece = _scratch()[: int(plan.end[j]) - begin]
        for low, high in plan.partial(j):
            self.file.load(begin + low, piece[low:high])
        plan.fill(j, rows, piece)
        self.file.store(begin, piece)
        return len(piece)

    def sync(self) -> None:
        """Make what was written durable."""
        self.file.sync()

    def commit(self) -> None:
        """What was written is final, with that to all rows of the same log; without a log it is only made durable."""
        self.sync() if self.log is None else self.log.commit()

    def rollback(self) -> None:
        """Back to the last commit, with all rows of the same log. Raises StoreError without one: nothing was kept."""
        if self.log is None:
            raise StoreError(f"{self.path} has no undo log, so there is nothing to go back to: make these rows again")
        self.log.rollback()

    def close(self) -> None:
        """Give back descriptors, maps and threads; idempotent. What was written stays, without a `sync` of its own."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            super().close()
            WRITERS.release()
            self.file.close()


def _padded(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    nbytes = int(dtype.itemsize * np.prod(shape, dtype=np.int64))
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def as_bytes(rows: AnyArray, row_bytes: int) -> Bytes:
    """uint8[n, row_bytes] of the same memory where it is contiguous."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), row_bytes)


def _scratch() -> Bytes:
    """This thread's buffer for a piece, page-aligned."""
    if not hasattr(_local, "scratch"):
        _local.scratch = page_buffer(PIECE_BYTES)
    scratch: Bytes = _local.scratch
    return scratch

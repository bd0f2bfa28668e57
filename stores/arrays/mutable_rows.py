"""`DiskRows`: rows on disk overwritten in place, such as histories and outputs of layer-wise passes.

A directory with `rows.bin`, the rows in order, preallocated and padded to a page, and `rows.json`, which describes them. Reads
are planned and go through an engine; writes are whole pages past the page cache, since dirty pages would count as memory and be
written at the kernel's convenience.
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

from ooc.stores.arrays.rows import AnyArray, Ids, check_write
from ooc.stores.arrays.segment_rows import SegmentRows
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import check_absent, disk_errors, partial_path, publish, write_file
from ooc.stores.io.engines.tasks import settle
from ooc.stores.io.pages import PAGE_BYTES, Bytes, PageFile, page_buffer
from ooc.stores.io.segments import Segments
from ooc.stores.io.threads import SharedPool
from ooc.stores.io.write_plan import PIECE_BYTES, WritePlan, plan_writes

WRITERS = SharedPool("ooc-write", 4)
"""writes in flight, each through a buffer of 1 MiB; a few keep a disk busy"""
DATA, ABOUT = "rows.bin", "rows.json"
_FORMAT = 1
_local = threading.local()


class Log(Protocol):
    """Commits and rolls back rows; implemented by `ooc.stores.arrays.undo_log.UndoLog`."""

    def write(self, writes: Sequence[tuple[Any, Ids, AnyArray]]) -> int:
        """Save the rows' current contents, then overwrite them; returns the bytes written."""

    def commit(self) -> None:
        """Make all writes durable and final."""

    def rollback(self) -> None:
        """Undo every write since the last commit."""


class DiskRows(SegmentRows):
    """Mutable rows [count, *row shape] in the directory `path`; use `create` or `open`.

    Reads may run during a write; a row being written may then contain old and new bytes.

    >>> rows = DiskRows.create("run/history/0", (num_nodes, 64), "float16")
    >>> rows.write(np.arange(1000), out)  # float16[1000, 64]
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], engine: str) -> None:
        self.path = path
        nbytes = _padded(shape, dtype)
        super().__init__(shape, dtype, Segments((path / DATA,), np.array([nbytes])), engine)
        try:  # a map is coherent only with the page cache
            self.file = PageFile(path / DATA, nbytes, direct=self.engine.name != "mmap")
        except BaseException:
            super().close()
            raise
        self.log: Log | None = None
        """set by `ooc.stores.arrays.undo_log`"""
        self._writers = WRITERS.acquire()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, path: Path | str, shape: tuple[int, ...], dtype: DTypeLike, engine: str = "auto") -> Self:
        """Create rows of zeros with their disk space allocated. Raises StoreError, leaving nothing, if `path` exists or the
        disk is full."""
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
        """Open the rows in `path`. Raises StoreError if they are missing, damaged, or of a newer format.

        >>> DiskRows.open("run/history/0").shape
        (1000000, 64)
        """
        path = Path(path)
        return cls(path, *cls._about(path), engine)

    @staticmethod
    def _about(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return (shape, dtype) of the rows in `path`."""
        try:
            about = json.loads((path / ABOUT).read_bytes())
            shape, dtype = tuple(int(size) for size in about["shape"]), np.dtype(about["dtype"])
            known = about["format"] == _FORMAT
        except (OSError, ValueError, KeyError, TypeError) as error:
            advice = "restore them, or start again what they belong to"
            raise StoreError(f"{path} has no readable rows ({error}): {advice}") from error
        if not known:
            raise StoreError(f"{path} has format {about['format']}, not {_FORMAT}: use the version of ooc that wrote it")
        return shape, dtype

    @classmethod
    def extend(cls, path: Path | str, count: int) -> None:
        """Extend the rows in `path`, which must be closed, with zeros to `count` rows; repeat the call if it was interrupted.

        Raises StoreError if they are missing or the disk is full.
        """
        path = Path(path)
        shape, dtype = cls._about(path)
        if shape[0] >= count:
            return
        about = {"format": _FORMAT, "shape": [count, *shape[1:]], "dtype": dtype.str}
        PageFile.extend(path / DATA, _padded((count, *shape[1:]), dtype))
        write_file(path / ABOUT, json.dumps(about).encode() + b"\n")

    def write(self, ids: Ids, rows: AnyArray) -> int:
        """Set row ids[i] to rows[i]; see `MutableRows.write`. Neighboring rows are written together."""
        if self.log is not None:
            return self.log.write([(self, ids, rows)])
        check_write(self, ids, rows)
        return self.store(plan_writes(ids, self.row_bytes), as_bytes(rows, self.row_bytes))

    def store(self, plan: WritePlan, rows: Bytes) -> int:
        """Execute a write plan whose pages are saved in the log, if any; callers want `write`. Waits for all pieces."""
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
        """Make writes final, together with all rows of the same log; without a log, only make them durable."""
        self.sync() if self.log is None else self.log.commit()

    def rollback(self) -> None:
        """Return to the last commit, together with all rows of the same log. Raises StoreError without a log."""
        if self.log is None:
            raise StoreError(f"{self.path} has no undo log to roll back: create these rows again")
        self.log.rollback()

    def close(self) -> None:
        """Release descriptors, maps and threads; idempotent. Does not sync."""
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
    """View rows as uint8[n, row_bytes], without a copy if contiguous."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), row_bytes)


def _scratch() -> Bytes:
    """This thread's page-aligned buffer for a piece."""
    if not hasattr(_local, "scratch"):
        _local.scratch = page_buffer(PIECE_BYTES)
    scratch: Bytes = _local.scratch
    return scratch

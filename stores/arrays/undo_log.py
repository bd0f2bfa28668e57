"""The undo log: saves rows before they are overwritten, so that a crash leads back to the last commit.

Between commits, the first overwrite of a page saves its contents; the log is synced once per group of writes, before any of
their pages is overwritten. A record cut short by a crash (detected by its checksum) belongs to a page that is still unchanged.
(Undo logging by pages, as SQLite's rollback journal.)

A log belongs to a generation, the number of commits before it. Whatever commits together with it (a checkpoint) stores that
number: a log of an older generation belongs to a completed commit and is not rolled back.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.mutable_rows import WRITERS, DiskRows, as_bytes
from ooc.stores.arrays.rows import AnyArray, Ids, check_write
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import disk_errors, remove_leftovers, write_file
from ooc.stores.io.engines.tasks import settle
from ooc.stores.io.pages import PAGE_BYTES, Bytes, PageFile, page_buffer
from ooc.stores.io.write_plan import PIECE_BYTES, WritePlan, plan_writes

_RECORD = np.dtype(
    [("magic", "<u8"), ("generation", "<u8"), ("file", "<u8"), ("offset", "<u8"), ("nbytes", "<u8"), ("crc", "<u8")]
)
_MAGIC, _HEAD = int.from_bytes(b"ooc undo", "little"), int.from_bytes(b"ooc log1", "little")
_local = threading.local()
Write = tuple[DiskRows, Ids, AnyArray]


class UndoLog:
    """A log for several `DiskRows` that commit and roll back together; use `open`. Thread-safe.

    >>> log = UndoLog.open("run/history/undo.log", [rows, steps])
    >>> log.write([(rows, ids, values), (steps, ids, at)])  # one sync of the log for both
    >>> log.commit()
    """

    def __init__(self, path: Path, rows: Sequence[DiskRows], generation: int) -> None:
        self.path, self.generation = path, generation
        self.nbytes = 0
        """bytes saved since the last commit"""
        self.total = 0
        """bytes saved, each read and written once, since the log was opened"""
        self._rows = list(rows)
        self._saved = [np.zeros(each.file.nbytes // PAGE_BYTES, np.bool_) for each in rows]
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = WRITERS.acquire()
        self._file: PageFile | None = None
        for each in rows:
            each.log = self

    @classmethod
    def open(cls, path: Path | str, rows: Sequence[DiskRows], generation: int | None = None) -> "UndoLog":
        """Open or create the log at `path` over `rows` (always in the same order) and restore their state at the last commit.

        `generation` is the commit that counts if it is stored elsewhere; None uses the log's own. The log is rolled back unless
        it is of the previous generation, whose commit was completed except for the log. Raises StoreError if the log is of a
        later generation, or of other rows.

        >>> UndoLog.open("run/history/undo.log", rows, generation=checkpoint["history"])
        """
        path = Path(path)
        remove_leftovers(path.parent)
        head = _head_of(path) if path.exists() else None
        if head is not None and generation is not None and int(head["generation"]) not in (generation, generation - 1):
            raise StoreError(
                f"{path} is of commit {head['generation']}, but the checkpoint is of {generation}: "
                "one of them belongs to another run; start again"
            )
        if head is not None and int(head["file"]) != len(rows):
            raise StoreError(
                f"{path} is of {head['file']} arrays of rows, not {len(rows)}: it belongs to another run; start again"
            )
        log = cls(path, rows, int(head["generation"]) if head is not None else generation or 0)
        try:
            if head is not None and generation in (None, log.generation):
                log._put_back()
            log._begin(log.generation if generation is None else generation)
        except BaseException:
            log.close()
            raise
        return log

    def write(self, writes: Sequence[Write]) -> int:
        """Write to several rows as one group (`MutableRows.write` for each); returns the bytes written, without the log's.

        Raises as that does, and before any row is changed if the log cannot be written (a full disk).
        """
        plans = []
        for rows, ids, values in writes:
            check_write(rows, ids, values)
            plans.append(plan_writes(ids, rows.row_bytes))
        with self._lock:
            self._protect([(self._rows.index(rows), plan) for (rows, _, _), plan in zip(writes, plans, strict=True)])
            stored = [
                rows.store(plan, as_bytes(values, rows.row_bytes))
                for (rows, _, values), plan in zip(writes, plans, strict=True)
            ]
        return sum(stored)

    def sync(self) -> None:
        """Make all rows durable as they are."""
        for each in self._rows:
            each.file.sync()

    def commit(self) -> None:
        """Make the current rows the committed state: sync them and start the log's next generation.

        To commit together with something else: `sync`, save that with `generation + 1`, then `commit`, with no write in
        between; after a crash `open` decides by the number saved.
        """
        with self._lock:
            self.sync()
            self._begin(self.generation + 1)

    def rollback(self) -> None:
        """Return all rows to the last commit."""
        with self._lock:
            self._put_back()
            self._begin(self.generation)

    def close(self) -> None:
        """Release descriptor and threads without a commit; idempotent. The rows stay open."""
        with self._lock:
            file, self._file, pool, self._pool = self._file, None, self._pool, None
            if file is not None:
                file.close()
        if pool is not None:
            WRITERS.release()

    def _begin(self, generation: int) -> None:
        """Atomically replace the log by an empty one."""
        head = np.zeros(1, _RECORD)
        head["magic"], head["generation"], head["file"] = _HEAD, generation, len(self._rows)
        head["crc"] = _crc(head)
        write_file(self.path, head.tobytes().ljust(PAGE_BYTES, b"\0"))
        if self._file is not None:
            self._file.close()
        self._file = PageFile(self.path, PAGE_BYTES)
        self.generation, self.nbytes = generation, 0
        for saved in self._saved:
            saved[:] = False

    def _protect(self, plans: Sequence[tuple[int, WritePlan]]) -> None:
        """Save the pages of these plans that are not yet saved, and sync the log, before they are overwritten."""
        if self._file is None or self._pool is None:
            raise StoreError(f"{self.path} is closed: open it again to write to its rows")
        runs = [(number, *run) for number, plan in plans for run in _unsaved(self._saved[number], plan)]
        if not runs:
            return
        at = PAGE_BYTES + self.nbytes
        futures: list[Future[int]] = []
        try:
            for number, begin, end in runs:
                futures.append(self._pool.submit(self._save, self._file, at, number, begin, end))
                at += PAGE_BYTES + end - begin
        finally:
            settle(futures)
        for future in futures:
            future.result()
        self._file.sync()
        self.total += at - PAGE_BYTES - self.nbytes
        self.nbytes = at - PAGE_BYTES
        for number, begin, end in runs:
            self._saved[number][begin // PAGE_BYTES : end // PAGE_BYTES] = True

    def _save(self, file: PageFile, at: int, number: int, begin: int, end: int) -> int:
        """Append bytes begin:end of a file of rows as a record at byte `at` of the log."""
        record = _scratch()[: PAGE_BYTES + end - begin]
        self._rows[number].file.load(begin, record[PAGE_BYTES:])
        head = np.zeros(1, _RECORD)
        head["magic"], head["generation"], head["file"] = _MAGIC, self.generation, number
        head["offset"], head["nbytes"] = begin, end - begin
        head["crc"] = _crc(head, record[PAGE_BYTES:])
        record[:PAGE_BYTES] = 0
        record[: _RECORD.itemsize] = head.view(np.uint8)
        file.store(at, record)
        return len(record)

    def _put_back(self) -> None:
        for number, offset, pages in _records(self.path, self.generation):
            self._rows[number].file.store(offset, pages)
        self.sync()


def _crc(head: NDArray[np.void], payload: Bytes | None = None) -> int:
    """Checksum of a record with its `crc` field set to 0, and of its payload."""
    crc = google_crc32c.value(head.tobytes())
    return crc if payload is None else google_crc32c.extend(crc, payload)


def _unsaved(saved: NDArray[np.bool_], plan: WritePlan) -> Iterator[tuple[int, int]]:
    """Ranges (begin, end), in bytes, of unsaved pages of the plan's pieces."""
    for begin, end in zip(plan.begin.tolist(), plan.end.tolist(), strict=True):
        unsaved = ~saved[begin // PAGE_BYTES : end // PAGE_BYTES]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], unsaved, [False]]).astype(np.int8)))
        for low, high in edges.reshape(-1, 2).tolist():
            yield begin + low * PAGE_BYTES, begin + high * PAGE_BYTES


def _is_intact(head: NDArray[np.void], payload: Bytes | None = None) -> bool:
    """Whether the checksum of a record or of the log's head matches."""
    bare = head.copy()
    bare["crc"] = 0
    return int(head["crc"][0]) == _crc(bare, payload)


def _head_of(path: Path) -> np.void:
    with disk_errors(path), path.open("rb") as file:
        data = file.read(_RECORD.itemsize)
    head = np.frombuffer(data.ljust(_RECORD.itemsize, b"\0"), _RECORD)
    if int(head["magic"][0]) != _HEAD or not _is_intact(head):
        raise StoreError(f"{path} is not an undo log, or damaged: what it protected is lost; start again")
    head_record: np.void = head[0]
    return head_record


def _records(path: Path, generation: int) -> Iterator[tuple[int, int, Bytes]]:
    """(number of the rows, byte, old pages) of every record up to the first damaged one."""
    buffer = page_buffer(PIECE_BYTES)
    with disk_errors(path), path.open("rb", buffering=0) as file:
        file.seek(PAGE_BYTES)
        while len(page := file.read(PAGE_BYTES)) == PAGE_BYTES:
            head = np.frombuffer(page, _RECORD, 1)
            nbytes = int(head["nbytes"][0])
            if int(head["magic"][0]) != _MAGIC or int(head["generation"][0]) != generation or nbytes > PIECE_BYTES:
                return
            pages = buffer[:nbytes]
            if file.readinto(pages.data) != nbytes or not _is_intact(head, pages):
                return
            yield int(head["file"][0]), int(head["offset"][0]), pages


def _scratch() -> Bytes:
    """This thread's page-aligned buffer for a record."""
    if not hasattr(_local, "scratch"):
        _local.scratch = page_buffer(PAGE_BYTES + PIECE_BYTES)
    scratch: Bytes = _local.scratch
    return scratch

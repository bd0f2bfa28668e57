"""DuckDB for the ingest: bounded memory, streamed results, one-line errors.

DuckDB's memory limit is not its resident size: allocator slack, thread stacks, batches in flight, Python and its libraries come
on top. Results are streamed (`to_arrow_reader` on a relation), because a DB-API result would hold all rows.
"""

import errno
import glob
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import duckdb
import pyarrow as pa

from ooc.stores.errors import BudgetError, InputError, OocError, StoreError
from ooc.stores.ingest.lines import LINE_BYTES
from ooc.stores.io.atomic import write_error

if TYPE_CHECKING:
    from ooc.stores.ingest.lazy import EdgeStream

OUTSIDE_BYTES = 600_000_000
"""memory outside the engine's limit: Python, its libraries, batches in flight, allocator slack"""
LEAST_BYTES = 256_000_000
NEEDED_BYTES = OUTSIDE_BYTES + LEAST_BYTES
"""minimum memory of an ingest"""
THREAD_BYTES = 128_000_000
"""a sorting thread with less memory fails instead of spilling"""
BATCH_ROWS = 131_072
MOST_ROOM = 2**29


class Progress(Protocol):
    """Called during work: the step's name, units done, units in total (None if unknown), and the unit."""

    def __call__(self, step: str, done: int, total: int | None, unit: str = "rows") -> None: ...


def silent(step: str, done: int, total: int | None, unit: str = "rows") -> None:
    """A Progress that shows nothing."""


class Duck:
    """A private DuckDB connection that spills to `spill` and whose limit leaves space for the rest of the process.

    `memory` is that of the whole process, at least NEEDED_BYTES. Raises BudgetError for less, StoreError (disk full, memory too
    small for the data) and InputError (unreadable data).

    >>> with Duck(2 * 10**9, Path("spill")) as duck:
    ...     for batch in duck.stream("select * from range(10)"): ...
    """

    def __init__(self, memory: int, spill: Path) -> None:
        if memory < NEEDED_BYTES:
            given = f"{memory // 10**6} MB"
            raise BudgetError(
                f"an ingest needs at least {NEEDED_BYTES // 10**6} MB, not {given}: give `memory='{NEEDED_BYTES // 10**6}MB'`"
            )
        self.limit = memory - OUTSIDE_BYTES
        self._spill = spill
        threads = max(1, min(len(os.sched_getaffinity(0)), self.limit // THREAD_BYTES))
        config = {"memory_limit": f"{self.limit // 1000}KB", "threads": threads, "temp_directory": str(spill)}
        self._con = duckdb.connect(":memory:", config=config)
        with self._errors():
            self._con.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
            self._con.execute("SET TimeZone = 'UTC'")  # of timestamps as text that name none, on any machine
        self._streams: dict[str, EdgeStream] = {}

    def __enter__(self) -> "Duck":
        return self

    def __exit__(self, *_: object) -> None:
        for view in self._streams:
            with suppress(duckdb.Error):  # a query that failed or was interrupted still reads it
                self._con.unregister(view)
        self._con.close()

    def register(self, view: str, stream: "EdgeStream") -> None:
        """Let queries read a stream as `view`."""
        self._streams[view] = stream
        self._con.register(view, stream)

    @property
    def room(self) -> int:
        """Bytes for what is sorted outside the engine, which streams meanwhile."""
        return min(self.limit // 4, MOST_ROOM)

    def scratch(self, name: str) -> Path:
        """A file beside the engine's own."""
        self._spill.mkdir(parents=True, exist_ok=True)
        return self._spill / name

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return all rows of a query with a small result."""
        with self._errors():
            return list(self._con.execute(sql).fetchall())

    def one(self, sql: str) -> tuple[Any, ...]:
        """Return the only row of a query."""
        return self.rows(sql)[0]

    def one_beside(self, sql: str) -> tuple[Any, ...]:
        """Return the only row of a query while the rows of another one are streamed."""
        with self._errors():
            row: tuple[Any, ...] = self._con.cursor().execute(sql).fetchall()[0]
            return row

    def columns(self, sql: str) -> dict[str, str]:
        """Return the column names and types of a query."""
        return {name: kind for name, kind, *_ in self.rows(f"DESCRIBE {sql}")}

    def stream(self, sql: str, ordered: bool = True, batch_rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """Yield record batches of a query; `ordered` preserves the input's order without an ORDER BY."""
        with self._errors():
            self._con.execute(f"SET preserve_insertion_order = {str(ordered).lower()}")
            yield from self._con.sql(sql).to_arrow_reader(batch_rows)

    def copy(self, sql: str, path: Path, ordered: bool, progress: Progress = silent, step: str = "", total: int = 0) -> int:
        """Write a query as a Parquet file and return its rows; progress is DuckDB's estimate, scaled to `total` rows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors(), self._watch(progress, step, total):
            self._con.execute(f"SET preserve_insertion_order = {str(ordered).lower()}")
            settings = "FORMAT parquet, COMPRESSION snappy, ROW_GROUP_SIZE 122880"
            found = self._con.execute(f"COPY ({sql}) TO {text(path)} ({settings})").fetchall()
        return int(found[0][0])

    @contextmanager
    def _watch(self, progress: Progress, step: str, total: int) -> Iterator[None]:
        ended = threading.Event()

        def poll() -> None:
            while not ended.wait(0.25):
                share = self._con.query_progress()
                progress(step, int(total * min(max(share, 0.0), 100.0) / 100), total)

        watcher = threading.Thread(target=poll, name="ooc-ingest-progress", daemon=True)
        if step:
            watcher.start()
        try:
            yield
        finally:
            ended.set()
            if step:
                watcher.join()
                progress(step, total, total)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except duckdb.InterruptException as error:  # Ctrl-C in a query; not a data error, so finished work is kept
            raise KeyboardInterrupt from error
        except RuntimeError as error:  # how DuckDB reports Ctrl-C elsewhere
            if "interrupted" in str(error).lower():
                raise KeyboardInterrupt from error
            raise
        except duckdb.OutOfMemoryException as error:
            raise self._out_of_memory(str(error)) from error
        except duckdb.Error as error:
            failure = next((each.failure for each in self._streams.values() if each.failure is not None), None)
            raise (failure or self._translated(error)) from error

    def _out_of_memory(self, message: str) -> OocError:
        if "max_temp_directory_size" in message or "No space" in message:
            return self._full()
        return MemoryShort(f"the ingest does not fit its memory ({self.limit // 10**6} MB for sorting): raise `memory`")

    def _full(self) -> StoreError:
        return write_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self._spill)

    def _translated(self, error: duckdb.Error) -> OocError:
        message = " ".join(str(error).split())
        if "No space left" in message or "Disk quota" in message:
            return self._full()
        if os.strerror(errno.EFBIG) in message:
            return write_error(OSError(errno.EFBIG, os.strerror(errno.EFBIG)), self._spill)
        if isinstance(error, duckdb.IOException) and str(self._spill.parent) in message:
            return StoreError(f"cannot write: {message[:300]}; check the disk")
        return InputError(f"the data cannot be read: {message[:300]}; check the file")


class MemoryShort(StoreError):
    """A query needs more memory than it has; some callers then process the data in smaller parts."""


def text(value: object) -> str:
    """A SQL string literal."""
    return "'" + str(value).replace("'", "''") + "'"


def name(column: str) -> str:
    """A quoted SQL identifier."""
    return '"' + column.replace('"', '""') + '"'


def file(path: Path) -> str:
    """A file's path as a SQL string literal in which `*`, `?` and `[` mean themselves."""
    return text(glob.escape(str(path.absolute())))


def csv(path: Path, options: str) -> str:
    """SQL of the rows of a text file; see `parquet` for the names of folders."""
    return f"read_csv({file(path)}, {options}, max_line_size = {LINE_BYTES}, hive_partitioning = false)"


def parquet(paths: Iterable[Path], position: bool = False) -> str:
    """SQL of the rows of Parquet files; with `position` also the columns `file_row_number` and `file_index`.

    A folder named `year=2020` adds no column.
    """
    numbered = ", file_row_number = true" if position else ""
    return f"read_parquet([{', '.join(map(file, paths))}], hive_partitioning = false{numbered})"

"""Records sorted in bounded memory: runs that fit it are sorted and written, then read side by side and merged.

The external merge sort of every database (Knuth, TAOCP 3, 5.4). Why not DuckDB's, which an ingest has: that wants 600 MB beside
its limit, and a reader that merges what was appended may have been given less.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stores.arrays.rows import AnyArray
from stores.io.atomic import disk_errors
from stores.io.segments import Segments, map_segments

LEAST_ROOM, MOST_ROOM = 2**24, 2**28
"""bytes of records in memory at once"""
_COPIES = 3
"""of the records of a run, while it is sorted"""


def room_of(memory: int | None) -> int:
    """Bytes to sort in, of a process that may use `memory`: some, as more than a few runs make it no faster.

    >>> room_of(2 * 10**9)
    250000000
    """
    return MOST_ROOM if memory is None else min(max(memory // 8, LEAST_ROOM), MOST_ROOM)


@dataclass(frozen=True)
class Column:
    """A field of sorted records: [count, *shape] of dtype, in a file."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    count: int

    @property
    def row_bytes(self) -> int:
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))

    def read(self, first: int, last: int) -> AnyArray:
        """Rows first..last-1, in memory."""
        width = self.row_bytes // self.dtype.itemsize
        found = np.fromfile(self.path, self.dtype, (last - first) * width, offset=first * self.row_bytes)
        return found.reshape(last - first, *self.shape)

    def map(self) -> AnyArray:
        """All of it, mapped (see `stores.io.segments.forget`): [count, *shape]."""
        if not self.count:
            return np.empty((0, *self.shape), self.dtype)
        whole = map_segments(Segments((self.path,), np.array([self.count * self.row_bytes])))
        return whole.view(self.dtype).reshape(self.count, *self.shape)


class ColumnWriter:
    """A `Column` from its front to its end; a context manager, and `column` once it is closed."""

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.shape, self.count = path, np.dtype(dtype), shape, 0
        with disk_errors(path):
            self._file = path.open("wb")

    def append(self, rows: AnyArray) -> None:
        """Rows [b, *shape]."""
        with disk_errors(self.path):
            self._file.write(np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8).data)
        self.count += len(rows)

    @property
    def column(self) -> Column:
        return Column(self.path, self.dtype, self.shape, self.count)

    def __enter__(self) -> "ColumnWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with disk_errors(self.path):
            self._file.close()


class Sorter:
    """Records of `fields` (name -> dtype, shape of a record's value), sorted by one or two of them, `keys`.

    folder: for files, some twice the records' bytes; room: bytes in memory. last: of records alike in the first key, keep only
    the last by the second. Raises StoreError for a full disk.

    >>> sorter = Sorter(stage, "edges", {"dst": (np.int64, ()), "edge_id": (np.int64, ())}, ("dst", "edge_id"), 2**26)
    >>> sorter.add({"dst": dst, "edge_id": edge_id})  # again and again
    >>> sorter.finish()["dst"].read(0, 1000)
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        fields: Mapping[str, tuple[Any, tuple[int, ...]]],
        keys: Sequence[str],
        room: int,
        last: bool = False,
    ) -> None:
        self.folder, self.name, self.keys, self.room, self.last = folder, name, tuple(keys), room, last
        self.fields = {field: (np.dtype(dtype), shape) for field, (dtype, shape) in fields.items()}
        self.record = np.dtype([(field, dtype, shape) for field, (dtype, shape) in self.fields.items()])
        self._held: list[AnyArray] = []
        self._most = max(1, room // _COPIES // self.record.itemsize)
        self._count = 0
        self._runs: list[Path] = []

    def add(self, columns: Mapping[str, AnyArray]) -> None:
        """Further records: [k, *shape] of every field."""
        count = len(columns[self.keys[0]])
        for first in range(0, count, self._most):
            part = np.empty(min(count - first, self._most), self.record)
            for field in self.fields:
                part[field] = columns[field][first : first + len(part)]
            if self._count + len(part) > self._most:
                self._write_run()
            self._held.append(part)
            self._count += len(part)

    def finish(self) -> dict[str, Column]:
        """All records in order, field by field."""
        with ExitStack() as stack:
            writers = {
                field: stack.enter_context(ColumnWriter(self.folder / f"{self.name}-{at}", dtype, shape))
                for at, (field, (dtype, shape)) in enumerate(self.fields.items())
            }
            blocks = self._merge() if self._runs else iter([self._sorted()])
            for block in self._last_ones(blocks) if self.last else blocks:
                for field, writer in writers.items():
                    writer.append(block[field])
        for run in self._runs:
            run.unlink()
        return {field: writer.column for field, writer in writers.items()}

    def _sorted(self) -> AnyArray:
        records = np.concatenate([np.empty(0, self.record), *self._held])
        self._held, self._count = [], 0
        return records[np.lexsort([records[key] for key in reversed(self.keys)])]

    def _write_run(self) -> None:
        if not self._count:
            return
        path = self.folder / f"{self.name}-run{len(self._runs)}"
        self._runs.append(path)
        with disk_errors(path), path.open("wb") as file:
            file.write(self._sorted().view(np.uint8).data)

    def _merge(self) -> Iterator[AnyArray]:
        """The runs' records in order, block by block: each time what no run has anything before any more."""
        self._write_run()
        step = max(1, self._most // len(self._runs))
        with ExitStack() as stack:
            files: list[BinaryIO] = [stack.enter_context(run.open("rb")) for run in self._runs]
            held = [np.empty(0, self.record) for _ in files]
            while True:
                held = [
                    old if len(old) else np.fromfile(file, self.record, step) for old, file in zip(held, files, strict=True)
                ]
                ends = [tuple(each[-1][key] for key in self.keys) for each in held if len(each)]
                if not ends:
                    return
                stops = [self._until(each, min(ends)) for each in held]
                block = np.concatenate([each[:stop] for each, stop in zip(held, stops, strict=True)])
                held = [each[stop:] for each, stop in zip(held, stops, strict=True)]
                yield block[np.lexsort([block[key] for key in reversed(self.keys)])]

    def _until(self, records: AnyArray, end: tuple[Any, ...]) -> int:
        """How many of sorted records stand at `end` or before."""
        return until(*(records[key] for key in self.keys), end=end)

    def _last_ones(self, blocks: Iterator[AnyArray]) -> Iterator[AnyArray]:
        """Without those that another one of the same first key follows."""
        held = np.empty(0, self.record)
        for block in blocks:
            every = np.concatenate([held, block])
            if len(every):
                key = every[self.keys[0]]
                yield every[:-1][key[1:] != key[:-1]]
                held = every[-1:]
        yield held


def until(first: AnyArray, *second: AnyArray, end: tuple[Any, ...]) -> int:
    """How many of records sorted by one column, or by two ([n] each), stand at `end` or before. Pure.

    >>> until(np.array([1, 1, 2]), np.array([5, 7, 0]), end=(1, 6))
    1
    """
    low, high = (int(np.searchsorted(first, end[0], side)) for side in ("left", "right"))
    return high if not second else low + int(np.searchsorted(second[0][low:high], end[1], "right"))

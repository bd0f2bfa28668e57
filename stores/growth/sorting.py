"""External merge sort of records in bounded memory: sorted runs are written, then read together and merged.

(Knuth, TAOCP 3, 5.4.) DuckDB's sort, which an ingest uses, needs 600 MB besides its limit; a reader that merges appends may
have less.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ooc.stores.arrays.rows import AnyArray
from ooc.stores.io.atomic import disk_errors
from ooc.stores.io.segments import Segments, map_segments

LEAST_ROOM, MOST_ROOM = 2**24, 2**28
"""bytes of records in memory at once"""
_COPIES = 3
"""copies of a run's records while it is sorted"""


def room_of(memory: int | None) -> int:
    """Return the bytes to sort in, for a process that may use `memory`; more than a few runs are not slower.

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
        """Read rows first..last-1 into memory."""
        width = self.row_bytes // self.dtype.itemsize
        found = np.fromfile(self.path, self.dtype, (last - first) * width, offset=first * self.row_bytes)
        return found.reshape(last - first, *self.shape)

    def map(self) -> AnyArray:
        """Memory-map the column (see `ooc.stores.io.segments.forget`): [count, *shape]."""
        if not self.count:
            return np.empty((0, *self.shape), self.dtype)
        whole = map_segments(Segments((self.path,), np.array([self.count * self.row_bytes])))
        return whole.view(self.dtype).reshape(self.count, *self.shape)


class ColumnWriter:
    """Writes a `Column` sequentially; a context manager, with `column` available once it is closed."""

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        self.path, self.dtype, self.shape, self.count = path, np.dtype(dtype), shape, 0
        with disk_errors(path):
            self._file = path.open("wb")

    def append(self, rows: AnyArray) -> None:
        """Append rows [b, *shape]."""
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
    """Sorts records of `fields` (name -> dtype, shape) by one or two of them, `keys`.

    `folder` is for files (about twice the records' bytes), `room` the bytes in memory. With `last`, only the last record by the
    second key is kept for each first key. Raises StoreError for a full disk.

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
        """Add records: [k, *shape] of every field."""
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
        """Return all records in order, by field."""
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
        """Yield the runs' records in order, in blocks that no run has earlier records for."""
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
        """How many of the sorted records are at or before `end`."""
        return until(*(records[key] for key in self.keys), end=end)

    def _last_ones(self, blocks: Iterator[AnyArray]) -> Iterator[AnyArray]:
        """Drop records followed by another one with the same first key."""
        held = np.empty(0, self.record)
        for block in blocks:
            every = np.concatenate([held, block])
            if len(every):
                key = every[self.keys[0]]
                yield every[:-1][key[1:] != key[:-1]]
                held = every[-1:]
        yield held


def until(first: AnyArray, *second: AnyArray, end: tuple[Any, ...]) -> int:
    """Return how many of the records sorted by one or two columns ([n] each) are at or before `end`. Pure.

    >>> until(np.array([1, 1, 2]), np.array([5, 7, 0]), end=(1, 6))
    1
    """
    low, high = (int(np.searchsorted(first, end[0], side)) for side in ("left", "right"))
    return high if not second else low + int(np.searchsorted(second[0][low:high], end[1], "right"))

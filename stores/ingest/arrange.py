"""Reorders node arrays in bounded memory: rows are distributed to a few files by destination, and each file is sorted in memory
and appended. Every row is written and read once more, always sequentially."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.io.atomic import disk_errors

READ_BYTES = 2**24


class Sink(Protocol):
    """Receives an array's rows; a context manager that finishes the array if nothing was raised."""

    def append(self, rows: NDArray[Any]) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class MakeSink(Protocol):
    """Creates the sink of an array: `Appender`, or `Arranging.sink` for another order."""

    def __call__(
        self,
        group_path: Path,
        name: str,
        row_shape: tuple[int, ...],
        dtype: DTypeLike,
        attributes: Mapping[str, Any] | None = None,
        *,
        count: int,
    ) -> Sink: ...


class Arranging:
    """Appends rows that come in input order in the order of new ids.

    Args:
        new: [N], a permutation (possibly memory-mapped): the new row of each input row.
        folder: Folder for the files.
        max_bytes: Limit on an array's rows in memory.

    >>> with Arranging(new, stage, 2**28).sink(store, "node/node/x", (128,), "float32", count=len(new)) as x:
    ...     x.append(rows)  # row i of all that is appended becomes row new[i]
    """

    def __init__(self, new: NDArray[Any], folder: Path, max_bytes: int) -> None:
        self.new, self.folder, self.max_bytes = new, folder, max_bytes

    def sink(
        self,
        group_path: Path,
        name: str,
        row_shape: tuple[int, ...],
        dtype: DTypeLike,
        attributes: Mapping[str, Any] | None = None,
        *,
        count: int,
    ) -> Sink:
        """An `Appender` of the array behind the reordering."""
        assert count == len(self.new), "one row a node"
        appender = Appender(group_path, name, row_shape, dtype, attributes, count=count)
        return _Arranged(appender, self.new, self.folder / name.replace("/", "-"), self.max_bytes)


class _Arranged:
    """Reorders rows from input order to the order of `new` and appends them."""

    def __init__(self, appender: Appender, new: NDArray[Any], folder: Path, max_bytes: int) -> None:
        self._appender, self._new, self._folder = appender, new, folder
        self._row_bytes = int(appender.dtype.itemsize * np.prod(appender.row_shape, dtype=np.int64))
        self._span = max(1, max_bytes // (self._row_bytes + 8))
        """rows per file"""
        self._done = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Append rows [b, *row_shape] of the array's dtype, the next ones of the input."""
        new = np.asarray(self._new[self._done : self._done + len(rows)], np.int64)
        assert len(new) == len(rows), "more rows than announced"
        file = new // self._span
        order = np.argsort(file, kind="stable")
        numbers, first = np.unique(file[order], return_index=True)
        for number, part in zip(numbers.tolist(), np.split(order, first[1:]), strict=True):
            self._write(number, "at", new[part] - number * self._span)
            self._write(number, "rows", np.ascontiguousarray(rows[part], self._appender.dtype))
        self._done += len(rows)

    def _path(self, number: int, what: str) -> Path:
        return self._folder / f"{number:06d}.{what}"

    def _write(self, number: int, what: str, array: NDArray[Any]) -> None:
        path = self._path(number, what)
        with disk_errors(path), path.open("ab") as file:  # opened each time: there may be more files than descriptors
            file.write(array.reshape(-1).view(np.uint8).data)

    def _finish(self) -> None:
        count, shape, dtype = len(self._new), self._appender.row_shape, self._appender.dtype
        assert self._done == count, "fewer rows than announced"
        step = max(1, READ_BYTES // self._row_bytes)
        for number in range(-(-count // self._span)):
            held = np.empty((min(self._span, count - number * self._span), *shape), dtype)
            with self._path(number, "at").open("rb") as places, self._path(number, "rows").open("rb") as rows:
                for _ in range(0, len(held), step):
                    at = np.fromfile(places, np.int64, step)
                    held[at] = np.fromfile(rows, dtype, len(at) * (held.size // len(held))).reshape(len(at), *shape)
            self._appender.append(held)
            for what in ("at", "rows"):
                self._path(number, what).unlink()

    def __enter__(self) -> Self:
        with disk_errors(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)  # left by a killed step
            self._folder.mkdir(parents=True)
        self._appender.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException as failure:
            self._appender.__exit__(type(failure), failure, failure.__traceback__)
            raise
        self._appender.__exit__(kind, error, trace)


Training = Callable[[int, int], NDArray[np.bool_]]
"""which rows first..last-1 of the input are training rows"""


def in_input_order(training: Training, new: NDArray[Any]) -> Training:
    """Convert `training` from the new order to input order; keeps a byte per node in memory."""
    flags = training(0, len(new))
    return lambda first, last: flags[new[first:last]]

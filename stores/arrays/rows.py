"""`Rows`: the one storage primitive, an array on disk addressed by row.

Features, labels, edge columns and histories are all Rows, whatever holds them: a Zarr array (`stores.arrays.zarr_rows`),
records of an LMDB environment (`stores.arrays.lmdb_rows`), a file that is overwritten in place (`stores.arrays.mutable_rows`),
or plain memory (`ArrayRows`, the perfect double that every other implementation is tested against).
"""

from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
AnyArray = NDArray[Any]


@runtime_checkable
class Rows(Protocol):
    """`count` rows of one dtype and one row shape."""

    shape: tuple[int, ...]
    """(count, *row shape)"""
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored."""

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """Afterwards `out[i]` is row `ids[i]`, or `out[at[i]]`, the rest of `out` as it was; any order, duplicates allowed.

        ids: int64[n]; out: [n, *row shape] ([m, *row shape] with `at`) of the rows' dtype, C-contiguous, belonging to the
        caller; at: int64[n] of 0..m-1, distinct.
        Returns the bytes that were read from the disk for it (0 from memory). Thread-safe.
        Raises IndexError for an id out of range before any byte is read, StoreError where the disk holds less than it should.
        """

    def submit(self, ids: Ids, out: AnyArray) -> Future[int]:
        """`read` in the background; `out` must stay untouched until the future is done."""

    def close(self) -> None:
        """Give back descriptors, maps and threads; idempotent."""


def check_request(rows: Rows, ids: Ids, out: AnyArray, at: Ids | None = None) -> None:
    """Raise before any byte is read where a request does not fit: IndexError for an id, ValueError for `out` and `at`."""
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise ValueError(f"ids must be int64[n], not {ids.dtype}[{','.join(map(str, ids.shape))}]")
    places = len(ids) if at is None else len(out)
    if out.shape != (places, *rows.shape[1:]) or out.dtype != rows.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"out must be a C-contiguous {rows.dtype}{[places, *rows.shape[1:]]}, not {out.dtype}{list(out.shape)}"
        )
    if at is not None and (
        at.shape != ids.shape or at.dtype != np.int64 or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < places)
    ):
        raise ValueError(f"at must be int64[{len(ids)}] of 0..{places - 1}, not {at.dtype}{list(at.shape)}")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= rows.shape[0]):
        bad = ids[(ids < 0) | (ids >= rows.shape[0])][0]
        raise IndexError(f"row {bad} is out of range: there are {rows.shape[0]} rows")


@runtime_checkable
class MutableRows(Rows, Protocol):
    """Rows that a run overwrites in place, with a state to come back to: that of the last `commit`.

    What is written can be read at once. Between commits it is neither durable nor final: after a crash, `rollback` on opening
    gives the committed rows, byte for byte (see `stores.arrays.undo_log`).
    """

    def write(self, ids: Ids, rows: AnyArray) -> int:
        """Afterwards row ids[i] is rows[i]. ids: int64[n], distinct, any order; rows: [n, *row shape] of the rows' dtype.

        Returns the bytes written to the disk for it (0 in memory). One write at a time; reads may run beside it.
        Raises IndexError for an id out of range and ValueError for one given twice before any byte is written, StoreError where
        the disk is full or fails.
        """

    def sync(self) -> None:
        """Make what was written durable."""

    def commit(self) -> None:
        """Make what was written durable and final: the state that `rollback` gives from here on."""

    def rollback(self) -> None:
        """Back to the state of the last commit."""


def check_write(rows: Rows, ids: Ids, values: AnyArray) -> None:
    """Raise before any byte is written where a write does not fit: IndexError for an id, ValueError for `values`."""
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise ValueError(f"ids must be int64[n], not {ids.dtype}[{','.join(map(str, ids.shape))}]")
    if values.shape != (len(ids), *rows.shape[1:]) or values.dtype != rows.dtype:
        raise ValueError(f"rows must be {rows.dtype}{[len(ids), *rows.shape[1:]]}, not {values.dtype}{list(values.shape)}")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= rows.shape[0]):
        bad = ids[(ids < 0) | (ids >= rows.shape[0])][0]
        raise IndexError(f"row {bad} is out of range: there are {rows.shape[0]} rows")


class ArrayRows:
    """Rows in memory: a numpy array (`--in-memory`, small arrays, tests).

    >>> ArrayRows(np.eye(3)).read(np.array([2]), out)
    """

    def __init__(self, array: AnyArray) -> None:
        self.array = np.ascontiguousarray(array)
        self.shape: tuple[int, ...] = self.array.shape
        self.dtype = self.array.dtype

    @property
    def row_bytes(self) -> int:
        return int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=np.int64))

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        check_request(self, ids, out, at)
        if at is None:
            np.take(self.array, ids, axis=0, out=out, mode="clip")  # "clip" writes straight into out; ids are checked
        else:
            out[at] = self.array[ids]
        return 0

    def submit(self, ids: Ids, out: AnyArray) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(self.read(ids, out))
        return future

    def close(self) -> None:
        pass

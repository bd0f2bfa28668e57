"""`Rows`: the storage primitive, an array addressed by row.

Features, labels, edge columns and histories are Rows, stored as a Zarr array (`ooc.stores.arrays.zarr_rows`), LMDB records
(`ooc.stores.arrays.lmdb_rows`), a file overwritten in place (`ooc.stores.arrays.mutable_rows`), or in memory (`ArrayRows`, the
reference that the others are tested against).
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
        """Set `out[i]`, or `out[at[i]]`, to row `ids[i]`; the rest of `out` is unchanged. Thread-safe.

        Args:
            ids: int64[n], any order, duplicates allowed.
            out: [n, *row shape] ([m, *row shape] with `at`) of the rows' dtype, C-contiguous, owned by the caller.
            at: int64[n] of 0..m-1, distinct.

        Returns:
            Bytes read from disk (0 from memory).

        Raises:
            IndexError: If an id is out of range, before any byte is read.
            StoreError: If data is missing on disk.
        """

    def submit(self, ids: Ids, out: AnyArray) -> Future[int]:
        """`read` in the background; do not use `out` until the future is done."""

    def close(self) -> None:
        """Release descriptors, maps and threads; idempotent."""


def check_request(rows: Rows, ids: Ids, out: AnyArray, at: Ids | None = None) -> None:
    """Raise IndexError for an invalid id or ValueError for invalid `out` or `at`, before any byte is read."""
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
    """Rows that a run overwrites in place, with a last committed state.

    Writes are readable at once, but neither durable nor final before `commit`: after a crash, `rollback` on opening restores
    the committed rows byte for byte (see `ooc.stores.arrays.undo_log`).
    """

    def write(self, ids: Ids, rows: AnyArray) -> int:
        """Set row ids[i] to rows[i]. One write at a time; reads may run concurrently.

        Args:
            ids: int64[n], distinct, any order.
            rows: [n, *row shape] of the rows' dtype.

        Returns:
            Bytes written to disk (0 in memory).

        Raises:
            IndexError: If an id is out of range, before any byte is written; ValueError if one is given twice.
            StoreError: If the disk is full or fails.
        """

    def sync(self) -> None:
        """Make what was written durable."""

    def commit(self) -> None:
        """Make what was written durable and final, as the state that `rollback` restores."""

    def rollback(self) -> None:
        """Return to the state of the last commit."""


def check_write(rows: Rows, ids: Ids, values: AnyArray) -> None:
    """Raise IndexError for an invalid id or ValueError for invalid `values`, before any byte is written."""
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
            np.take(self.array, ids, axis=0, out=out, mode="clip")  # "clip" writes directly to out; ids are checked
        else:
            out[at] = self.array[ids]
        return 0

    def submit(self, ids: Ids, out: AnyArray) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(self.read(ids, out))
        return future

    def close(self) -> None:
        pass

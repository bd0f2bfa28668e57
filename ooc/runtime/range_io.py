"""Reading and writing contiguous row ranges, without copies if memory and file are aligned."""

from typing import Any

import numpy as np

from ooc.runtime.buffers import PAGE_BYTES, Buffers
from stores.arrays import segment_rows
from stores.arrays.mutable_rows import DiskRows
from stores.arrays.rows import AnyArray, ArrayRows, MutableRows, Rows


class MemoryRows(ArrayRows):
    """Mutable rows in memory, for layer-wise passes over small graphs.

    >>> MemoryRows.create((1000, 64), "float32").write(np.arange(10), values)
    """

    @classmethod
    def create(cls, shape: tuple[int, ...], dtype: Any) -> "MemoryRows":
        """Return rows of zeros."""
        return cls(np.zeros(shape, dtype))

    def write(self, ids: Any, rows: AnyArray) -> int:
        """See `MutableRows.write`."""
        self.array[ids] = rows
        return 0

    def sync(self) -> None:
        """Does nothing."""


def read_range(rows: Rows, first: int, stop: int, buffers: Buffers) -> tuple[AnyArray, int]:
    """Return rows first:stop as stored, [stop - first, *row shape], and the bytes read from disk.

    Rows in memory are returned as a view, others in aligned memory of `buffers` that an engine reads into directly.

    >>> values, nbytes = read_range(ds.stored("x"), 0, 8192, Buffers(kept=2, direct=True))
    """
    return segment_rows.read_range(rows, first, stop, lambda nbytes: buffers.empty((nbytes,), np.dtype(np.uint8)))


def write_range(rows: "MutableRows | DiskRows | MemoryRows", first: int, values: AnyArray) -> int:
    """Set rows first, first + 1, ... to `values` [n, *row shape]; returns the bytes written to disk.

    Writes directly from `values` if both it and the range in the file are page-aligned.
    """
    if isinstance(rows, MemoryRows):
        rows.array[first : first + len(values)] = values
        return 0
    if isinstance(rows, DiskRows) and len(values):
        data, begin = values.reshape(-1).view(np.uint8), first * rows.row_bytes
        if not (begin % PAGE_BYTES or len(data) % PAGE_BYTES or data.ctypes.data % PAGE_BYTES):
            rows.file.store(begin, data)
            return len(data)
    return rows.write(np.arange(first, first + len(values)), values)

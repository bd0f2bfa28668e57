"""Contiguous ranges of rows, read and written whole: no plan row by row, no copy where memory and file are aligned."""

from typing import Any

import numpy as np

from ooc.runtime.buffers import PAGE_BYTES, Buffers
from stores.arrays import segment_rows
from stores.arrays.mutable_rows import DiskRows
from stores.arrays.rows import AnyArray, ArrayRows, MutableRows, Rows


class MemoryRows(ArrayRows):
    """Rows in memory that are written as those on disk are: what a sweep keeps of a small graph.

    >>> MemoryRows.create((1000, 64), "float32").write(np.arange(10), values)
    """

    @classmethod
    def create(cls, shape: tuple[int, ...], dtype: Any) -> "MemoryRows":
        """Rows of zeros."""
        return cls(np.zeros(shape, dtype))

    def write(self, ids: Any, rows: AnyArray) -> int:
        """See `MutableRows.write`."""
        self.array[ids] = rows
        return 0

    def sync(self) -> None:
        """Nothing to do: memory lasts as long as it lasts."""


def read_range(rows: Rows, first: int, stop: int, buffers: Buffers) -> tuple[AnyArray, int]:
    """(rows first:stop as they are stored [stop - first, *row shape], bytes read from the disk for it).

    Rows in memory come as a view; others into memory of `buffers`, aligned, so that an engine reads straight into it.

    >>> values, nbytes = read_range(ds.stored("x"), 0, 8192, Buffers(kept=2, direct=True))
    """
    return segment_rows.read_range(rows, first, stop, lambda nbytes: buffers.empty((nbytes,), np.dtype(np.uint8)))


def write_range(rows: "MutableRows | DiskRows | MemoryRows", first: int, values: AnyArray) -> int:
    """Afterwards rows first, first + 1, ... are `values` [n, *row shape]; the bytes written to the disk.

    Straight from the memory where it and the rows' bytes in the file are whole pages.
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

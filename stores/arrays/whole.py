"""Rows as one array, in RAM or memory-mapped."""

from collections.abc import Callable, Iterator

import numpy as np

from ooc.stores.arrays.rows import AnyArray, ArrayRows, Rows
from ooc.stores.arrays.zarr_rows import ShardedRows

Look = Callable[[int, AnyArray], None]
"""takes (number of the first row, some rows); raises StoreError for invalid values"""
_LOAD_BYTES = 2**24
_LOOK_BYTES = 2**20


def load(rows: Rows) -> AnyArray:
    """Read all rows into RAM sequentially; contiguous shards are read as plain files and compared with their checksums."""
    out = np.empty(rows.shape, rows.dtype)
    step = max(1, _LOAD_BYTES // rows.row_bytes)
    for first in range(0, len(out), step):
        _read(rows, first, out[first : first + step])
    return out


def blocks(rows: Rows) -> Iterator[AnyArray]:
    """Yield all rows from front to back, some MiB at a time, compared with their checksums; none if there are no rows.

    A block is valid until the next one. Raises StoreError if the array is damaged.
    """
    step = max(1, _LOAD_BYTES // rows.row_bytes)
    scratch = np.empty((min(step, rows.shape[0]), *rows.shape[1:]), rows.dtype)
    for first in range(0, rows.shape[0], step):
        part = scratch[: rows.shape[0] - first]
        _read(rows, first, part)
        yield part


def loaded(rows: Rows) -> Rows:
    """Return the same rows in RAM and close `rows`."""
    try:
        return ArrayRows(load(rows))
    finally:
        rows.close()


def whole(rows: Rows, look: Look | None = None) -> AnyArray:
    """Return all rows as an array: memory-mapped if stored contiguously, else in RAM.

    An array on disk is read once for it, compared with its checksums, and shown to `look` from front to back. Raises StoreError
    if it cannot be read or is damaged.
    """
    if isinstance(rows, ShardedRows):
        rows.segments.fill()
        step = max(1, _LOOK_BYTES // rows.row_bytes)
        scratch = np.empty((min(step, rows.shape[0]), *rows.shape[1:]), rows.dtype)
        for first in range(0, rows.shape[0], step):
            part = scratch[: rows.shape[0] - first]
            _read(rows, first, part)
            if look is not None:
                look(first, part)
        return rows.map()
    array = rows.array if isinstance(rows, ArrayRows) else load(rows)
    if look is not None and len(array):
        look(0, array)
    return array


def _read(rows: Rows, first: int, out: AnyArray) -> None:
    """Set `out` to rows first, first + 1, ..."""
    if not isinstance(rows, ShardedRows):
        rows.read(np.arange(first, first + len(out)), out)
        return
    begin, data = first * rows.row_bytes, out.reshape(-1).view(np.uint8)
    rows.segments.read(begin, data)
    if rows.segments.sums is not None:
        rows.segments.sums.see(begin, data)

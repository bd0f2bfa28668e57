"""Rows as one array, in RAM or memory-mapped."""

import numpy as np

from ooc.stores.arrays.rows import AnyArray, ArrayRows, Rows
from ooc.stores.arrays.zarr_rows import ShardedRows
from ooc.stores.errors import StoreError
from ooc.stores.io.segments import Segments

_LOAD_BYTES = 2**24


def load(rows: Rows) -> AnyArray:
    """Read all rows into RAM sequentially; contiguous shards are read as plain files."""
    out = np.empty(rows.shape, rows.dtype)
    if isinstance(rows, ShardedRows):
        _read_files(rows.segments, out)
        return out
    step = max(1, _LOAD_BYTES // rows.row_bytes)
    for first in range(0, len(out), step):
        part = out[first : first + step]
        rows.read(np.arange(first, first + len(part)), part)
    return out


def _read_files(segments: Segments, out: AnyArray) -> None:
    left = out.reshape(-1).view(np.uint8).data
    for path, payload in zip(segments.paths, segments.payload.tolist(), strict=True):
        part = left[: min(payload, len(left))]
        left = left[len(part) :]
        with path.open("rb", buffering=0) as file:
            while len(part):
                got = file.readinto(part)
                if not got:
                    raise StoreError(f"{path} is truncated: {len(part)} bytes are missing; build the store again")
                part = part[got:]


def loaded(rows: Rows) -> Rows:
    """Return the same rows in RAM and close `rows`."""
    try:
        return ArrayRows(load(rows))
    finally:
        rows.close()


def whole(rows: Rows) -> AnyArray:
    """Return all rows as an array: memory-mapped if stored contiguously, else in RAM."""
    if isinstance(rows, ArrayRows):
        return rows.array
    return rows.map() if isinstance(rows, ShardedRows) else load(rows)

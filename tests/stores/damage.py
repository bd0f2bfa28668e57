"""Damage to stores: a flipped byte, and a changed number whose checksums fit."""

from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr

from ooc.stores.arrays.zarr_rows import open_zarr_rows


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip a bit of a file's byte `at`, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def shard(store: Path, name: str) -> Path:
    """The first file of an array."""
    return sorted(path for path in (store / name / "c").rglob("*") if path.is_file())[0]


def change(store: Path, name: str, row: int | slice, value: Any) -> None:
    """Set rows of an array of one chunk, and its checksum, as somebody who makes a store by hand would."""
    rows = open_zarr_rows(store, name, "mmap")
    nbytes, shape, dtype = rows.segments.total, rows.shape, rows.dtype
    rows.close()
    path, sums = shard(store, name), zarr.open_array(store / "checksums" / name, mode="r+")
    assert sums.shape == (1,)
    data = bytearray(path.read_bytes())
    np.frombuffer(data, dtype, int(np.prod(shape))).reshape(shape)[row] = value
    path.write_bytes(data)
    sums[0] = google_crc32c.value(bytes(data[:nbytes]))

"""Features that someone else wrote, outside the store: a Zarr array of any kind, or rows in LMDB."""

from pathlib import Path
from typing import Any

import numpy as np

from stores.arrays.lmdb_rows import LmdbRows, environment
from stores.arrays.rows import Rows
from stores.arrays.zarr_rows import open_zarr_rows
from stores.errors import InputError, StoreError


def open_features(
    source: Path | str,
    name: str,
    num_nodes: int,
    engine: str,
    dtype: Any = np.float32,
    row_shape: tuple[int, ...] | None = None,
) -> Rows:
    """The node array `name` from `source`: the directory of a Zarr array, or an LMDB environment.

    A Zarr array ([N, ...]) brings its dtype, and the scales beside it where its attributes name them
    (`stores.arrays.encoding`). In LMDB, row r is the record under r as a big-endian uint64; its values are taken as `dtype`:
    nothing in LMDB tells another one, so where the store has the array itself, `row_shape` must fit, and only where it has
    none (None) does the first record give the width. engine: see `Dataset.open`.
    Raises InputError where `source` is neither, has another number of rows, a dtype that is no number, or (LMDB) records that
    are not `row_shape` of `dtype`.

    >>> open_features("embeddings.zarr", "x", num_nodes=1000, engine="pread")
    """
    source = Path(source)
    rows: Rows
    if (source / "data.mdb").exists():
        rows = _open_lmdb(source, name, num_nodes, np.dtype(dtype), row_shape)
    elif (source / "zarr.json").exists() or (source / ".zarray").exists():
        rows = open_zarr_rows(source.parent, source.name, engine=engine)
    else:
        raise InputError(
            f"{name}={source} is neither a Zarr array (zarr.json) nor an LMDB directory (data.mdb): check the path"
        )
    wrong = None
    if rows.shape[0] != num_nodes:
        wrong = f"has {rows.shape[0]} rows; the store has {num_nodes} nodes, one row each is wanted"
    elif rows.dtype.kind not in "biuf":
        wrong = f"holds {rows.dtype}: numbers are wanted"
    if wrong:
        rows.close()
        raise InputError(f"{name}={source} {wrong}")
    return rows


def _open_lmdb(source: Path, name: str, num_nodes: int, dtype: np.dtype[Any], row_shape: tuple[int, ...] | None) -> LmdbRows:
    held = environment(source)
    try:
        with held.env.begin() as transaction:
            count = int(held.env.stat()["entries"])
            first = transaction.get((0).to_bytes(8))
    finally:
        held.close()
    wanted = None if row_shape is None else int(np.prod(row_shape, dtype=np.int64)) * dtype.itemsize
    if first is not None and row_shape is not None and len(first) != wanted:
        raise InputError(
            f"{name}={source} has {len(first)} bytes a record; a row of {dtype}{[num_nodes, *row_shape]}, as the store holds, "
            f"takes {wanted}: write the records so, or give a Zarr array, which brings its own dtype and width"
        )
    if first is None or len(first) == 0 or len(first) % dtype.itemsize:
        what = "has no record for row 0" if first is None else f"has {len(first)} bytes in row 0, no whole number of {dtype}"
        raise StoreError(f"{source} {what}: keys are rows as big-endian uint64, values the bytes of a row")
    return LmdbRows(source, dtype=dtype, shape=(count, *(row_shape or (len(first) // dtype.itemsize,))))

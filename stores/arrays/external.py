"""Node arrays written by others outside the store: any Zarr array, or rows in LMDB."""

from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.arrays.lmdb_rows import LmdbRows, environment
from ooc.stores.arrays.rows import Rows
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.errors import InputError, StoreError


def open_features(
    source: Path | str,
    name: str,
    num_nodes: int,
    engine: str,
    dtype: Any = np.float32,
    row_shape: tuple[int, ...] | None = None,
) -> Rows:
    """Open the node array `name` from `source`, the directory of a Zarr array or an LMDB environment.

    A Zarr array ([N, ...]) has its own dtype, and scales if its attributes name them (`ooc.stores.arrays.encoding`). In LMDB,
    row r is the record under r as a big-endian uint64.

    Args:
        source: The directory.
        name: Name of the node array.
        num_nodes: Number of nodes.
        engine: See `Dataset.open`.
        dtype: Dtype of LMDB records.
        row_shape: Row shape of LMDB records; None if the store has no such array, and the first record determines the width.

    Raises:
        InputError: If `source` is neither, or its rows, dtype or record sizes do not fit.

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
        wrong = f"has {rows.shape[0]} rows, but the store has {num_nodes} nodes with one row each"
    elif rows.dtype.kind not in "biuf":
        wrong = f"holds {rows.dtype}: it must hold numbers"
    if wrong:
        rows.close()
        raise InputError(f"{name}={source} {wrong}")
    return rows


def _open_lmdb(source: Path, name: str, num_nodes: int, dtype: np.dtype[Any], row_shape: tuple[int, ...] | None) -> LmdbRows:
    env = environment(source)
    try:
        with env.env.begin() as transaction:
            count = int(env.env.stat()["entries"])
            first = transaction.get((0).to_bytes(8))
    finally:
        env.close()
    expected = None if row_shape is None else int(np.prod(row_shape, dtype=np.int64)) * dtype.itemsize
    if first is not None and row_shape is not None and len(first) != expected:
        raise InputError(
            f"{name}={source} has {len(first)} bytes a record; a row of {dtype}{[num_nodes, *row_shape]}, as the store holds, "
            f"takes {expected}: write the records so, or give a Zarr array, which brings its own dtype and width"
        )
    if first is None or len(first) == 0 or len(first) % dtype.itemsize:
        what = "has no record for row 0" if first is None else f"has {len(first)} bytes in row 0, not a multiple of {dtype}"
        raise StoreError(f"{source} {what}: keys are rows as big-endian uint64, values the bytes of a row")
    return LmdbRows(source, dtype=dtype, shape=(count, *(row_shape or (len(first) // dtype.itemsize,))))

"""Rows read in the background: closed ones take no more requests, and keep no thread of the shared pool."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from ooc.stores.arrays.lmdb_rows import LmdbRows, write_lmdb_rows
from ooc.stores.arrays.rows import Rows
from ooc.stores.arrays.zarr_rows import ForeignRows, ShardedRows, open_zarr_rows
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.errors import StoreError
from ooc.stores.io.threads import BACKGROUND

ARRAY = np.random.default_rng(0).random((300, 5), np.float32)


def sharded(path: Path) -> Rows:
    write_array(path, "x", ARRAY)
    return open_zarr_rows(path, "x")


def foreign(path: Path) -> Rows:
    group = zarr.open_group(path, mode="w")
    group.create_array("x", shape=ARRAY.shape, chunks=(64, 5), dtype="f4", compressors=zarr.codecs.ZstdCodec())[:] = ARRAY
    return open_zarr_rows(path, "x")


def records(path: Path) -> Rows:
    write_lmdb_rows(path, ARRAY)
    return LmdbRows(path, dtype="float32", shape=ARRAY.shape)


KINDS = {ShardedRows: sharded, ForeignRows: foreign, LmdbRows: records}


def pool_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(BACKGROUND.name)]


def read(rows: Rows) -> None:
    ids, out = np.array([7, 299, 7]), np.empty((3, 5), np.float32)
    rows.submit(ids, out).result(timeout=60)
    np.testing.assert_array_equal(out, ARRAY[ids])


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize(("kind", "make"), KINDS.items(), ids=lambda value: value.__name__)
def test_closed_rows_take_no_request(kind: type[Rows], make: Callable[[Path], Rows], used: bool, tmp_path: Path) -> None:
    rows, other = make(tmp_path / "closed"), make(tmp_path / "open")
    assert isinstance(rows, kind)
    if used:
        read(rows)
    rows.close()
    rows.close()
    before = BACKGROUND._users
    for _ in range(3):
        with pytest.raises(StoreError, match=r"the rows float32\[300, 5\] are closed: open them again"):
            rows.submit(np.array([1]), np.empty((1, 5), np.float32))
    assert BACKGROUND._users == before
    read(other)  # closing is each one's own
    other.close()
    assert BACKGROUND._users == before
    assert before > 0 or not pool_threads()

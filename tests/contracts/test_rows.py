"""The contract of Rows, run over every implementation."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from ooc.stores.arrays.lmdb_rows import LmdbRows, write_lmdb_rows
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import ArrayRows, Rows
from ooc.stores.arrays.zarr_rows import ForeignRows, ShardedRows, open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from tests.contracts.rows_contract import Make, RowsContract

Array = np.ndarray[Any, Any]


class TestArrayRows(RowsContract):
    @pytest.fixture
    def make(self) -> Make:
        return ArrayRows


@pytest.mark.parametrize("engine", ["pread", "mmap"])
class TestShardedRows(RowsContract):
    @pytest.fixture
    def make(self, tmp_path: Path, engine: str) -> Make:
        names = count()

        def make(array: Array) -> Rows:
            name = f"x{next(names)}"
            sizes = {"chunk_bytes": 2**14, "shard_bytes": 2**16}  # several chunks, several shards
            with Appender(tmp_path / "s", name, array.shape[1:], array.dtype, **sizes) as appender:
                appender.append(array)
            rows = open_zarr_rows(tmp_path / "s", name, engine)
            assert isinstance(rows, ShardedRows)
            assert rows.engine.name == engine
            return rows

        return make

    def test_a_closed_array_is_an_error(self, make: Make) -> None:
        rows = make(np.zeros((10, 4), np.float32))
        rows.close()
        with pytest.raises(Exception, match="closed"):
            rows.read(np.array([1]), np.empty((1, 4), np.float32))


@pytest.mark.parametrize("shards", [None, 64], ids=["chunks", "shards"])
class TestForeignRows(RowsContract):
    @pytest.fixture
    def make(self, tmp_path: Path, shards: int | None) -> Make:
        names = count()

        def make(array: Array) -> Rows:
            name = f"x{next(names)}"
            tail = tuple(max(1, size - 1) for size in array.shape[1:])  # rows in two pieces as well
            zarr.open_group(tmp_path / "s", mode="a").create_array(
                name,
                shape=array.shape,
                chunks=(16, *tail),
                shards=None if shards is None else (shards, *tail),
                dtype=array.dtype,
                compressors=zarr.codecs.ZstdCodec(level=1),
            )[:] = array
            rows = open_zarr_rows(tmp_path / "s", name)
            assert isinstance(rows, ForeignRows)
            return rows

        return make


class TestLmdbRows(RowsContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        names = count()

        def make(array: Array) -> Rows:
            path = tmp_path / f"{next(names)}.lmdb"
            write_lmdb_rows(path, array, "rows")
            return LmdbRows(path, "rows", dtype=array.dtype, shape=array.shape)

        return make


@pytest.mark.parametrize("engine", ["uring", "pread", "mmap"])
class TestDiskRows(RowsContract):
    @pytest.fixture
    def make(self, tmp_path: Path, engine: str) -> Make:
        names = count()

        def make(array: Array) -> Rows:
            rows = DiskRows.create(tmp_path / f"rows{next(names)}", array.shape, array.dtype, engine)
            rows.write(np.arange(len(array)), array)
            return rows

        return make

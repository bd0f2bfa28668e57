"""The contract of Rows, run over every implementation."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from ooc.loading.feature_cache import CachedRows, RowCache
from ooc.stores.arrays.joined_rows import JoinedRows
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


class TestCachedRows(RowsContract):
    @pytest.fixture
    def make(self) -> Make:
        def make(array: Array) -> Rows:
            cache = RowCache(len(array) + 3, array.shape[1:], array.dtype)
            cache.slot = np.random.default_rng(0).permutation(len(array) + 3)[: len(array)].astype(np.int32)
            cache.rows[cache.slot] = array
            return CachedRows(cache)

        return make


class TestJoinedRows(RowsContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        names = count()

        def make(array: Array) -> Rows:
            parts: dict[str, Rows] = {}
            for part in np.split(array, (len(array) // 3, len(array) // 2)):
                name = f"x{next(names)}"
                with Appender(tmp_path / "s", name, array.shape[1:], array.dtype) as appender:
                    appender.append(part)
                parts[name] = open_zarr_rows(tmp_path / "s", name, "mmap")
            return JoinedRows(parts)

        return make

    def test_parts_of_other_rows_are_bytes_of_the_widest(self) -> None:
        rng = np.random.default_rng(0)
        parts = {
            "wide": rng.random((5, 3, 2), np.float32),
            "none": np.empty((4, 0), np.float64),
            "narrow": rng.integers(0, 99, (7, 3), np.int8),
        }
        joined = JoinedRows({name: ArrayRows(array) for name, array in parts.items()})
        assert (joined.dtype, joined.shape, joined.row_bytes) == (np.uint8, (16, 24), 24)
        ids = np.array([15, 0, 4, 9, 5, 9, 8])
        out = np.zeros((10, 24), np.uint8)
        assert joined.read(ids, out, ids % 10) == 0
        for name, array in parts.items():
            begin = joined.begin[name]
            mine = ids[(ids >= begin) & (ids < begin + len(array))]
            assert np.array_equal(joined.view(name, out)[mine % 10], array[mine - begin])
            taken = joined.take(name, out, (mine % 10).astype(np.int32))
            assert (taken.dtype, taken.tolist()) == (array.dtype, array[mine - begin].tolist())


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

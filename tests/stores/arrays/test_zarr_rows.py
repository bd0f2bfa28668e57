"""The appender and the opening of Zarr arrays: what is written is what any Zarr reader sees, and damage is named."""

import errno
import json
import os
from contextlib import closing
from math import gcd
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.arrays.zarr_rows import ForeignRows, ShardedRows, open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender, layout, write_array
from ooc.stores.errors import InputError, StoreError
from ooc.stores.io.disk import _cache_file, profile_for
from ooc.stores.io.read_plan import plan_by_cost

SMALL: dict[str, Any] = {"chunk_bytes": 2**14, "shard_bytes": 2**16}
Array = np.ndarray[Any, Any]


def numbers(count: int, *shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(count).integers(0, 200, (count, *shape)).astype(dtype)


def append_in_parts(path: Path, array: Array, sizes: list[int], **options: Any) -> None:
    with Appender(path, "node/x", array.shape[1:], array.dtype, **options) as appender:
        first = 0
        for size in [*sizes, len(array)]:
            appender.append(array[first : first + size])
            first += size


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@given(
    st.integers(1, 10_000),
    st.none() | st.integers(0, 10**9),
    st.sampled_from([2**12, 2**20]),
    st.sampled_from([2**16, 2**30]),
)
@settings(deadline=None)
def test_layout_laws(row_bytes: int, count: int | None, chunk_bytes: int, shard_bytes: int) -> None:
    chunk_rows, shard_rows = layout(row_bytes, count, chunk_bytes, shard_bytes)
    step = 4096 // gcd(row_bytes, 4096)
    assert chunk_rows % step == 0
    assert chunk_rows * row_bytes % 4096 == 0  # the next chunk begins on a page
    assert chunk_rows * row_bytes <= max(chunk_bytes, step * row_bytes)
    assert shard_rows % chunk_rows == 0
    assert shard_rows * row_bytes <= max(shard_bytes, chunk_rows * row_bytes)
    if count is not None:  # nothing is larger than the array needs
        assert chunk_rows - step < max(count, 1)
        assert shard_rows - chunk_rows < max(count, 1)


@given(
    st.integers(0, 3000),
    st.lists(st.integers(0, 900), max_size=6),
    st.sampled_from([((), "int64"), ((3,), "float32"), ((100,), "float16"), ((2, 2), "uint8"), ((), "bool")]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_zarr_reads_what_was_appended_however_it_was_cut(
    tmp_path_factory: pytest.TempPathFactory, count: int, sizes: list[int], kind: tuple[Any, str], announced: bool
) -> None:
    shape, dtype = kind
    path = tmp_path_factory.mktemp("store")
    array = numbers(count, *shape, dtype=dtype)
    append_in_parts(path, array, sizes, count=count if announced else None, **SMALL)
    stored = zarr.open_array(path / "node/x", mode="r")
    assert (stored.shape, stored.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(stored[:], array)


def test_the_bytes_depend_on_the_rows_alone(tmp_path: Path) -> None:
    array = numbers(5000, 3)
    append_in_parts(tmp_path / "a", array, [1, 4000, 17], **SMALL)
    append_in_parts(tmp_path / "b", array, [], count=5000, **SMALL)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_an_array_laid_out_otherwise_in_memory_is_written_by_rows(tmp_path: Path) -> None:
    array = np.asfortranarray(numbers(3000, 5))
    append_in_parts(tmp_path, array, [100], **SMALL)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "node/x", mode="r")[:], array)


def test_checksums_are_those_of_the_chunks_on_disk(tmp_path: Path) -> None:
    array = numbers(9000, 3)
    append_in_parts(tmp_path, array, [], **SMALL)
    rows = open_zarr_rows(tmp_path, "node/x")
    assert isinstance(rows, ShardedRows)
    chunk_bytes = zarr.open_array(tmp_path / "node/x", mode="r").chunks[0] * 12
    wanted = []
    for path, payload in zip(rows.segments.paths, rows.segments.payload.tolist(), strict=True):
        data = path.read_bytes()[:payload]
        wanted += [google_crc32c.value(data[at : at + chunk_bytes]) for at in range(0, payload, chunk_bytes)]
    assert len(rows.segments.paths) > 1
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "checksums/node/x", mode="r")[:], wanted)
    rows.close()


def test_attributes_and_write_array(tmp_path: Path) -> None:
    write_array(tmp_path, "x", numbers(10, 2, dtype="uint16"), {"stored_as": "bfloat16"})
    rows = open_zarr_rows(tmp_path, "x")
    assert rows.attributes == {"stored_as": "bfloat16"}
    assert "x" in zarr.open_group(tmp_path, mode="r")
    rows.close()


def test_map_is_the_whole_array(tmp_path: Path) -> None:
    array = numbers(9000, 3)
    append_in_parts(tmp_path, array, [], **SMALL)
    rows = open_zarr_rows(tmp_path, "node/x")
    mapped = rows.map()
    rows.close()
    np.testing.assert_array_equal(mapped, array)
    assert not mapped.flags.writeable
    write_array(tmp_path, "empty", numbers(0, 4))
    assert open_zarr_rows(tmp_path, "empty").map().shape == (0, 4)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    appender = Appender(tmp_path, "x", (3,), "float32", count=5)
    for wrong in (numbers(2, 4), numbers(2, 3, dtype="float64"), numbers(3)):
        with pytest.raises(InputError, match="array x: rows must be"):
            appender.append(wrong)
    appender.append(numbers(4, 3))
    with pytest.raises(InputError, match="4 rows were written, but 5 were expected"):
        appender.close()
    with pytest.raises(InputError, match="hold no bytes"):
        Appender(tmp_path, "y", (0,), "float32")


def test_nothing_is_overwritten_and_a_failure_leaves_no_array(tmp_path: Path) -> None:
    write_array(tmp_path, "x", numbers(10))
    with pytest.raises(StoreError, match="x is already there"):
        write_array(tmp_path, "x", numbers(10))
    with pytest.raises(InputError), Appender(tmp_path, "y", (), "float32", **SMALL) as appender:
        list(map(appender.append, [numbers(9000), numbers(9, 2)]))
    with pytest.raises(StoreError, match="cannot be opened as a Zarr array"):
        open_zarr_rows(tmp_path, "y")
    append_in_parts(tmp_path, numbers(10), [])
    write_array(tmp_path, "y", numbers(20))  # over what the failure left
    np.testing.assert_array_equal(open_zarr_rows(tmp_path, "y").map(), numbers(20))


def test_closing_on_a_full_disk_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    appender = Appender(tmp_path, "x", (2,), np.float32)
    appender.append(np.zeros((3, 2), np.float32))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="No space left"):
        appender.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Appender(tmp_path, "x", (), "int64", **SMALL) as appender:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(StoreError, match=r"cannot write .*/x/c/0: No space left on device; free some space"):
                appender.append(numbers(5000, dtype="int64"))
        appender.close()


@given(st.lists(st.integers(0, 8999), max_size=300), st.sampled_from([0.0, 1e-6, 1e-3]))
@settings(max_examples=30, deadline=None)
def test_the_plan_follows_the_disk_and_the_rows_do_not(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], read_s: float
) -> None:
    path = tmp_path_factory.mktemp("store")
    array = numbers(9000, 3)
    append_in_parts(path, array, [], **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        with closing(open_zarr_rows(path, "node/x")) as opened:
            engine = opened.engine.name
        unknown = profile_for(path, engine)
        (path / "cache/ooc/disks").mkdir(parents=True)
        known = unknown.model_copy(update={"read_s": read_s, "byte_s": 1e-9})
        _cache_file(known.device, known.size_bytes, engine).write_text(known.model_dump_json())
        rows = open_zarr_rows(path, "node/x")
    assert isinstance(rows, ShardedRows)
    assert rows.cost == known.cost
    wanted = np.array(ids, np.int64)
    out = np.empty((len(ids), 3), np.float32)
    nbytes = rows.read(wanted, out)
    np.testing.assert_array_equal(out, array[wanted])
    plan = rows.plan(wanted)
    reference = plan_by_cost(wanted, 12, known.cost, count=9000)
    np.testing.assert_array_equal(plan.length, reference.length)
    assert nbytes <= plan.nbytes
    rows.close()


class TestForeign:
    """Arrays that others wrote are read right, by byte arithmetic where their bytes allow it."""

    def write(self, path: Path, array: Array, **options: Any) -> ShardedRows | ForeignRows:
        options = {"chunks": (64, 8), "shards": (256, 8), "compressors": None, **options}
        stored = zarr.open_group(path, mode="a").create_array("x", shape=array.shape, dtype=array.dtype, **options)
        stored[:] = array
        rows = open_zarr_rows(path, "x")
        ids = np.random.default_rng(0).integers(0, len(array), 500)
        out = np.empty((500, *array.shape[1:]), array.dtype)
        rows.read(ids, out)
        np.testing.assert_array_equal(out, array[ids])
        np.testing.assert_array_equal(rows.map(), array)
        rows.close()
        return rows

    def test_uncompressed_shards_in_order(self, tmp_path: Path) -> None:
        assert isinstance(self.write(tmp_path, numbers(1000, 8) + 1), ShardedRows)

    @pytest.mark.parametrize(
        "options",
        [
            {"compressors": zarr.codecs.ZstdCodec()},
            {"shards": None},
            {"chunks": (64, 4)},
            {"chunks": (10, 8), "shards": (50, 8)},  # shards that end in the middle of a page
            {"serializer": zarr.codecs.BytesCodec(endian="big")},
        ],
        ids=["compressed", "unsharded", "columns", "pages", "big-endian"],
    )
    def test_anything_else(self, tmp_path: Path, options: dict[str, Any]) -> None:
        assert isinstance(self.write(tmp_path, numbers(1000, 8) + 1, **options), ForeignRows)

    @pytest.mark.parametrize(("first", "last"), [(64, 128), (256, 512)], ids=["chunk", "shard"])
    def test_chunks_of_zeros_that_zarr_leaves_out(self, tmp_path: Path, first: int, last: int) -> None:
        array = numbers(1000, 8) + 1
        array[first:last] = 0
        assert isinstance(self.write(tmp_path, array), ForeignRows)

    def test_a_chunk_that_cannot_be_decoded_is_named(self, tmp_path: Path) -> None:
        self.write(tmp_path, numbers(1000, 8) + 1, shards=None, compressors=zarr.codecs.ZstdCodec())
        (tmp_path / "x/c/3/0").write_bytes(b"not zstd")
        rows = open_zarr_rows(tmp_path, "x")
        with pytest.raises(StoreError, match=r"x: rows 200 to 200 cannot be decoded"):
            rows.read(np.array([200, 5]), np.empty((2, 8), np.float32))
        rows.close()

    def test_chunks_that_nobody_wants_are_not_decoded(self, tmp_path: Path) -> None:
        self.write(tmp_path, numbers(1000, 8) + 1, shards=None, compressors=zarr.codecs.ZstdCodec())
        rows = open_zarr_rows(tmp_path, "x")
        for number in range(2, 15):
            (tmp_path / f"x/c/{number}/0").write_bytes(b"not zstd")
        assert rows.read(np.array([999, 3, 70, 5]), np.empty((4, 8), np.float32)) == (70 - 3 + 1 + 1) * 32


class TestDamage:
    @pytest.fixture
    def shard(self, tmp_path: Path) -> Path:
        append_in_parts(tmp_path, numbers(9000, 3), [], **SMALL)
        return tmp_path / "node/x/c/1/0"

    def refuse(self, tmp_path: Path, message: str) -> None:
        for engine in ("pread", "mmap"):
            with pytest.raises(StoreError, match=message):
                open_zarr_rows(tmp_path, "node/x", engine)

    @pytest.mark.parametrize("left", [0, 10, 20_000, -1])
    def test_a_truncated_shard(self, tmp_path: Path, shard: Path, left: int) -> None:
        os.truncate(shard, left % shard.stat().st_size)
        self.refuse(tmp_path, rf"{shard} is truncated")

    def test_a_truncated_shard_of_another_writer(self, tmp_path: Path, shard: Path) -> None:
        (tmp_path / "checksums/node/x/zarr.json").unlink()
        for left in (-1, 10):
            os.truncate(shard, left % shard.stat().st_size)
            self.refuse(tmp_path, rf"{shard} is truncated")

    def test_a_missing_shard(self, tmp_path: Path, shard: Path) -> None:
        shard.unlink()
        self.refuse(tmp_path, f"{shard} is missing")

    def test_a_damaged_index(self, tmp_path: Path, shard: Path) -> None:
        data = bytearray(shard.read_bytes())
        data[-10] ^= 1
        shard.write_bytes(data)
        self.refuse(tmp_path, f"{shard} is truncated or damaged: the checksum of its index")

    def test_damaged_metadata_and_no_array(self, tmp_path: Path, shard: Path) -> None:
        with pytest.raises(StoreError, match="absent cannot be opened as a Zarr array"):
            open_zarr_rows(tmp_path, "absent")
        path = tmp_path / "node/x/zarr.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "codecs": [{"name": "no-such"}]}))
        self.refuse(tmp_path, "node/x cannot be opened as a Zarr array")

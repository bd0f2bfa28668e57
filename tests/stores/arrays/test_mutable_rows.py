"""Rows that are overwritten in place, against a numpy array."""

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.arrays import mutable_rows
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import ArrayRows, MutableRows
from ooc.stores.errors import StoreError
from ooc.stores.io.write_plan import plan_writes

Array = np.ndarray[Any, Any]


@given(
    st.sets(st.integers(0, 400), max_size=120),
    st.sampled_from([1, 8, 52, 128, 4096, 5732]),
    st.sampled_from([4096, 3 * 4096, 2**20]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_a_plan_covers_the_rows_pages_and_no_others(wanted: set[int], row_bytes: int, piece_bytes: int, random: Any) -> None:
    shuffled = list(wanted)
    random.shuffle(shuffled)
    ids = np.array(shuffled, np.int64)
    plan = plan_writes(ids, row_bytes, piece_bytes)
    covered = np.zeros(401 * row_bytes + 2 * 4096, np.bool_)
    for row in shuffled:
        covered[row * row_bytes : (row + 1) * row_bytes] = True
    pages = covered[: len(covered) // 4096 * 4096].reshape(-1, 4096)
    found = np.zeros(len(pages), np.int64)
    partial = np.zeros(len(pages), np.bool_)
    rows = np.random.default_rng(0).integers(1, 256, (len(ids), row_bytes)).astype(np.uint8)
    image, reference = np.zeros(pages.size, np.uint8), np.zeros(pages.size, np.uint8)
    for row, values in zip(shuffled, rows, strict=True):
        reference[row * row_bytes : (row + 1) * row_bytes] = values
    for j in range(len(plan)):
        begin, end = int(plan.begin[j]), int(plan.end[j])
        assert 0 < end - begin <= piece_bytes
        found[begin // 4096 : end // 4096] += 1
        for low, high in plan.partial(j):
            partial[(begin + low) // 4096 : (begin + high) // 4096] = True
        plan.fill(j, rows, image[begin:end])
    np.testing.assert_array_equal(found, pages.any(axis=1))
    np.testing.assert_array_equal(partial, pages.any(axis=1) & ~pages.all(axis=1))
    np.testing.assert_array_equal(image, reference)


def test_rows_written_twice_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="row 3 is written twice"):
        plan_writes(np.array([5, 3, 4, 3]), 8)


@pytest.mark.parametrize("engine", ["uring", "pread", "mmap"])
@pytest.mark.parametrize(("shape", "dtype"), [((500,), "int64"), ((3000, 33), "float16"), ((40, 1500), "float32")])
def test_what_is_written_is_read(tmp_path: Path, engine: str, shape: tuple[int, ...], dtype: str) -> None:
    rows, double = DiskRows.create(tmp_path / "rows", shape, dtype, engine), ArrayRows(np.zeros(shape, dtype))
    assert isinstance(rows, MutableRows)
    rng = np.random.default_rng(0)
    for step in range(12):
        begin, end = np.sort(rng.integers(0, shape[0] + 1, 2))
        ids = np.arange(begin, end) if step % 2 else rng.permutation(shape[0])[: rng.integers(1, shape[0] // 2)]
        values = rng.integers(-1000, 1000, (len(ids), *shape[1:])).astype(dtype)
        assert rows.write(ids, values) >= values.nbytes
        double.array[ids] = values
        asked = rng.integers(0, shape[0], 200)
        out, wanted = np.empty((200, *shape[1:]), dtype), np.empty((200, *shape[1:]), dtype)
        rows.read(asked, out)
        double.read(asked, wanted)
        np.testing.assert_array_equal(out, wanted)
    rows.sync()
    rows.close()
    rows.close()
    again = DiskRows.open(tmp_path / "rows", engine)
    assert (again.shape, again.dtype) == (shape, np.dtype(dtype))
    np.testing.assert_array_equal(again.map(), double.array)
    again.close()


def test_where_o_direct_is_refused_the_page_cache_does(tmp_path: Path, no_o_direct: None) -> None:
    rows = DiskRows.create(tmp_path / "rows", (100, 5), "float32")
    assert not rows.file.direct
    rows.write(np.array([7, 3]), np.full((2, 5), 2, np.float32))
    out = np.empty((3, 5), np.float32)
    rows.read(np.array([3, 4, 7]), out)
    assert out[:, 0].tolist() == [2, 0, 2]
    rows.close()


def test_what_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    rows = DiskRows.create(tmp_path / "rows", (100, 5), "float32")
    ones = np.ones((2, 5), np.float32)
    for bad in (-1, 100):
        with pytest.raises(IndexError, match=f"row {bad} is out of range"):
            rows.write(np.array([1, bad]), ones)
    for wrong in (ones[:1], ones[:, :4], ones.astype(np.float64)):
        with pytest.raises(ValueError, match="rows must be"):
            rows.write(np.array([1, 2]), wrong)
    with pytest.raises(ValueError, match="ids must be"):
        rows.write(np.array([1, 2], np.int32), ones)
    with pytest.raises(ValueError, match="twice"):
        rows.write(np.array([1, 1]), ones)
    assert rows.write(np.zeros(0, np.int64), ones[:0]) == 0
    assert not rows.map().any()
    rows.close()
    for call in (lambda: rows.write(np.array([1, 2]), ones), lambda: rows.read(np.array([1, 2]), ones)):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_opening_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    DiskRows.create(path, (100, 5), "float32").close()
    with pytest.raises(StoreError, match="exists already"):
        DiskRows.create(path, (100, 5), "float32")
    about = json.loads((path / "rows.json").read_text())
    (path / "rows.json").write_text(json.dumps({**about, "format": 9}))
    with pytest.raises(StoreError, match="has format 9"):
        DiskRows.open(path)
    (path / "rows.json").write_text(json.dumps({**about, "shape": [5000, 5]}))
    with pytest.raises(StoreError, match="truncated"):
        DiskRows.open(path)
    (path / "rows.json").write_text("{}")
    with pytest.raises(StoreError, match="no readable rows"):
        DiskRows.open(path)
    with pytest.raises(StoreError, match="no readable rows"):
        DiskRows.open(tmp_path / "absent")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"No space left on device; free some space"):
        DiskRows.create(tmp_path / "rows", (10**6, 64), "float16")
    assert os.listdir(tmp_path) == []


def test_a_failing_write_names_the_file_and_leaves_no_thread_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = DiskRows.create(tmp_path / "rows", (3000, 512), "float32")  # six pieces
    real, calls = os.pwritev, []

    def fail(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if offset == 2**21:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(StoreError, match=r"cannot write .*rows.bin: Input/output error"):
            rows.write(np.arange(3000), np.ones((3000, 512), np.float32))
    assert len(calls) == 6
    rows.write(np.arange(3000), np.full((3000, 512), 2, np.float32))
    assert (rows.map() == 2).all()
    rows.close()


def test_rows_are_given_more_rows_of_zeros_and_again_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, values = tmp_path / "rows", np.arange(15, dtype=np.float32).reshape(5, 3)
    with contextlib.closing(DiskRows.create(path, (5, 3), "float32")) as rows:
        rows.write(np.arange(5), values)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mutable_rows, "write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        DiskRows.extend(path, 4000)
    monkeypatch.undo()
    for count in (4000, 4000, 7):
        DiskRows.extend(path, count)
        with contextlib.closing(DiskRows.open(path)) as rows:
            out = np.empty((4000, 3), np.float32)
            assert rows.shape == out.shape
            rows.read(np.arange(4000), out)
        np.testing.assert_array_equal(out[:5], values)
        assert not out[5:].any()

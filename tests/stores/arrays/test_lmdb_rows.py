"""What is particular to rows in LMDB: shared environments, missing records, keys that others can read."""

import shutil
import struct
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from ooc.stores.arrays import lmdb_rows
from ooc.stores.arrays.lmdb_rows import Environment, LmdbRows, environment, write_lmdb_rows
from ooc.stores.errors import StoreError
from tests.scale import few

ARRAY = np.random.default_rng(0).random((300, 5), np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_lmdb_rows(tmp_path / "x.lmdb", ARRAY)
    return tmp_path / "x.lmdb"


def read(rows: LmdbRows, *ids: int) -> np.ndarray[Any, Any]:
    out = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
    rows.read(np.array(ids), out)
    return out


def test_records_are_raw_rows_under_big_endian_keys(path: Path) -> None:
    with lmdb.open(str(path), readonly=True) as env, env.begin() as txn:
        keys = [key for key, _ in txn.cursor()]
        assert keys == [struct.pack(">Q", row) for row in range(300)]
        assert txn.get(struct.pack(">Q", 257)) == ARRAY[257].tobytes()


def test_one_environment_is_shared_by_all_users_of_a_path(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    one, other = environment(path), environment(tmp_path / "link")
    assert one.env is other.env
    rows = LmdbRows(path, dtype="float32", shape=(300, 5))
    one.close()
    one.close()  # idempotent: does not take another user's hold
    other.close()
    np.testing.assert_array_equal(read(rows, 7, 7, 0), ARRAY[[7, 7, 0]])
    rows.close()
    with lmdb.open(str(path)):  # nobody holds it: LMDB would refuse a second opening in this process
        pass
    with pytest.raises(StoreError, match="closed"):
        read(rows, 1)


def test_an_environment_built_again_at_a_path_is_another_one(path: Path, tmp_path: Path) -> None:
    """And two paths to one file, as an unchanged file of a compacted store has, are the same one."""
    rows = LmdbRows(path, dtype="float32", shape=(300, 5))
    shutil.rmtree(path)
    write_lmdb_rows(path, -ARRAY)
    again = LmdbRows(path, dtype="float32", shape=(300, 5))
    np.testing.assert_array_equal(read(again, 7), -ARRAY[[7]])
    np.testing.assert_array_equal(read(rows, 7), ARRAY[[7]])
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/data.mdb").hardlink_to(path / "data.mdb")
    linked = environment(tmp_path / "linked")
    for each in (rows, again, linked):
        each.close()
    assert lmdb_rows._open == {}


def resident(file: Path) -> int:
    """Bytes of a mapped file that are in this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-"):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [16, 5000])
def test_what_was_read_does_not_stay_in_the_process(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_rows, "MAPPED_BYTES", 2**20)
    array = np.arange(1_000_000, dtype=np.float32).reshape(-1, width)
    write_lmdb_rows(tmp_path / "x.lmdb", array)
    file = tmp_path / "x.lmdb" / "data.mdb"
    rows, most = LmdbRows(tmp_path / "x.lmdb", dtype="float32", shape=array.shape), []
    forget = Environment.forget
    monkeypatch.setattr(Environment, "forget", lambda held: (most.append(resident(file)), forget(held)))
    ids = np.random.default_rng(0).integers(0, len(array), min(len(array), few(80, 500)))
    np.testing.assert_array_equal(read(rows, *ids.tolist()), array[ids])
    assert 0 < max(most) <= 2**20 + 2**19 < array.nbytes / 2  # inner pages of the tree on top
    assert resident(file) == 0
    rows.close()


def test_a_missing_record_names_the_row(path: Path) -> None:
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.delete(struct.pack(">Q", 42))
    rows = LmdbRows(path, dtype="float32", shape=(300, 5))
    np.testing.assert_array_equal(read(rows, 41, 43), ARRAY[[41, 43]])
    with pytest.raises(StoreError, match=r"x.lmdb: the record of row 42 is missing"):
        read(rows, 41, 42)
    rows.close()


def test_a_record_of_another_size_names_the_row(path: Path) -> None:
    rows = LmdbRows(path, dtype="float32", shape=(300, 6))
    with pytest.raises(StoreError, match="the record of row 3 has 20 bytes, not 24"):
        read(rows, 3)
    rows.close()


def test_absent_environments_and_databases(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="absent cannot be opened as an LMDB environment"):
        LmdbRows(tmp_path / "absent", dtype="float32", shape=(1,))
    with pytest.raises(StoreError, match="has no database 'y'"):
        LmdbRows(path, "y", dtype="float32", shape=(300, 5))
    write_lmdb_rows(path, ARRAY, "y")  # which needs that nothing was left open
    rows = LmdbRows(path, "y", dtype="float32", shape=(300, 5))
    np.testing.assert_array_equal(read(rows, 299), ARRAY[[299]])
    rows.close()


def test_writing_where_it_is_open_or_written_already_is_refused(path: Path) -> None:
    held = environment(path)
    with pytest.raises(StoreError, match="is open in this process"):
        write_lmdb_rows(path, ARRAY, "y")
    held.close()
    with pytest.raises(StoreError, match=r"already holds rows"):
        write_lmdb_rows(path, ARRAY)


def test_the_map_grows_beyond_its_first_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = np.random.default_rng(1).random((300, 600), np.float32)  # 720 kB
    monkeypatch.setattr("ooc.stores.arrays.lmdb_rows.SPARE_BYTES", 2**16 - 2 * wide.nbytes)  # a map of 64 KiB
    write_lmdb_rows(tmp_path / "w.lmdb", wide)
    rows = LmdbRows(tmp_path / "w.lmdb", dtype="float32", shape=wide.shape)
    np.testing.assert_array_equal(read(rows, *range(300)), wide)
    rows.close()

"""The distribution sort against NumPy's, in memory, over files, and where one range of keys has nearly all records."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.errors import InputError, StoreError
from ooc.stores.ingest import key_sort
from ooc.stores.ingest.key_sort import key_order, sorted_by_key

BITS, LOW = 29, 19
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


def records(count: int, skewed: bool, in_order: bool, seed: int) -> tuple[Any, dict[str, Any]]:
    """Distinct keys (destination, edge id), and columns that say which is which."""
    rng = np.random.default_rng(seed)
    edge = np.arange(count) if in_order else rng.permutation(count)
    dst = rng.integers(0, 1 << (BITS - LOW), count)
    dst[rng.random(count) < 0.9 * skewed] = 3
    keys = dst << LOW | edge
    return keys, {"src": (keys % 1009).astype(np.int32), "weight": (keys % 997).astype(np.float32)}


def batches(keys: Any, columns: dict[str, Any], size: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    for first in range(0, len(keys), size):
        yield keys[first : first + size], {name: column[first : first + size] for name, column in columns.items()}


@FEW
@given(
    count=st.integers(0, 3000),
    skewed=st.booleans(),
    in_order=st.booleans(),
    room=st.sampled_from([2_000, 20_000, 10**6]),
    announced=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 99),
)
def test_records_come_in_the_order_of_their_keys(  # type: ignore[no-untyped-def]
    tmp_path, monkeypatch, count, skewed, in_order, room, announced, seed
) -> None:
    monkeypatch.setattr(key_sort, "PIECE_ROWS", 16)
    keys, columns = records(count, skewed, in_order, seed)
    dtypes: dict[str, Any] = {"src": np.int32, "weight": np.float32}
    about, spill = int(announced * count), tmp_path / "spill"
    found = list(sorted_by_key(batches(keys, columns, 177), dtypes, about, BITS, LOW, room, spill))
    order = np.argsort(keys)
    joined = {name: np.concatenate([each[name] for _, each in found] or [columns[name]]) for name in dtypes}
    np.testing.assert_array_equal(np.concatenate([each for each, _ in found] or [keys]), keys[order])
    for name, column in columns.items():
        np.testing.assert_array_equal(joined[name], column[order])
        assert joined[name].dtype == column.dtype
    assert not list(tmp_path.iterdir())


def test_memory_holds_a_range_at_a_time(tmp_path: Path) -> None:
    keys, columns = records(200_000, True, True, 0)
    dtypes: dict[str, Any] = {"src": np.int32, "weight": np.float32}
    room = 1_000_000
    found = [
        len(each) for each, _ in sorted_by_key(batches(keys, columns, 5000), dtypes, 200_000, BITS, LOW, room, tmp_path / "s")
    ]
    assert sum(found) == 200_000
    assert max(found) <= room // key_sort.WORK_BYTES


def test_files_are_removed_when_a_consumer_stops(tmp_path: Path) -> None:
    keys, columns = records(50_000, True, False, 0)
    sorting = sorted_by_key(
        batches(keys, columns, 5000), {"src": np.int32, "weight": np.float32}, 50_000, BITS, LOW, 10_000, tmp_path / "s"
    )
    next(sorting)
    assert list(tmp_path.iterdir())
    sorting.close()
    assert not list(tmp_path.iterdir())


def sorting(tmp_path: Path, given: Iterator[Any] | None = None) -> Iterator[Any]:
    """Of 50,000 records in several ranges, most of them in one."""
    dtypes: dict[str, Any] = {"src": np.int32, "weight": np.float32}
    parts = batches(*records(50_000, True, False, 0), 5000) if given is None else given
    return sorted_by_key(parts, dtypes, 50_000, BITS, LOW, 100_000, tmp_path / "s")


def test_an_error_of_what_reads_records_ends_the_sort(tmp_path: Path) -> None:
    """It is raised where the records are wanted, though a thread reads them, and no file stays."""

    def damaged() -> Iterator[Any]:
        yield from list(batches(*records(50_000, True, False, 0), 5000))[:5]
        raise InputError("line 7 of edges.csv is no edge")

    with pytest.raises(InputError, match=r"line 7 of edges\.csv"):
        list(sorting(tmp_path, damaged()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("skewed", [False, True])
def test_a_file_that_another_program_shortens_ends_the_sort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skewed: bool
) -> None:
    """The error comes from a thread that sorts a range; skewed: after a range that was distributed again."""
    monkeypatch.setattr(key_sort, "PIECE_ROWS", 16)
    keys, columns = records(50_000, skewed, False, 0)
    keys, columns = keys[::-1], {name: column[::-1] for name, column in columns.items()}
    each = sorting(tmp_path, batches(keys, columns, 5000))
    next(each)
    os.truncate(tmp_path / "s", 5000)
    with pytest.raises(StoreError, match=r"/s: Input/output error"):
        list(each)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_the_sort(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, limit[1]))  # files end there: the nearest thing to a full disk
    try:
        with pytest.raises(StoreError, match=r"cannot write .*s: File too large; that disk"):
            list(sorting(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("low_bits", [0, 7, 40])
def test_order_of_keys_that_span_all_bits(low_bits: int) -> None:
    keys = np.random.default_rng(0).integers(0, 2**63 - 1, 5000)
    np.testing.assert_array_equal(keys[key_order(keys, low_bits)], np.sort(keys))
    in_order = np.arange(3000) | np.random.default_rng(1).integers(0, 9, 3000) << 40
    np.testing.assert_array_equal(in_order[key_order(in_order, 40)], np.sort(in_order))

"""A table in buckets: against an array in memory, with room for few buckets and for all."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.history.bucket_table import BucketTable, TableShape, TableView
from ooc.runtime.keyed_random import keyed_uniform
from ooc.sampling.bucket_order import beta_swaps, bucket_visits
from ooc.stores.arrays.bucket_rows import DATA, BucketRows
from ooc.stores.errors import StoreError

STREAM, BOUND = 5, 0.5


def made(path: Path, shape: TableShape, room: int, state: Any = None) -> BucketTable:
    files = BucketRows.open(path, state) if path.exists() else BucketRows.create(path, shape.buckets, shape.bucket_bytes)
    return BucketTable(files, shape, room, STREAM, BOUND)


def initial(shape: TableShape) -> Any:
    rows = np.empty((shape.rows, shape.width), np.float32)
    keyed_uniform(np.uint64(STREAM), np.arange(shape.rows), np.float32(BOUND), rows)
    return rows


def all_rows(table: BucketTable, kept: str | None = None) -> Any:
    out = np.full((table.shape.rows, table.shape.width), np.nan, np.float32)
    for ids, rows in table.blocks(kept):
        out[ids] = rows
    return out


def train(table: BucketTable, double: Any, epoch: int, resident: int, first: int = 0, last: int | None = None) -> None:
    """Add numbers to rows of both ends of every pair, which no other order adds to the same float32."""
    p = table.shape.buckets
    visits = bucket_visits(p, resident, 1, epoch)
    table.follow(visits, bucket_visits(p, resident, 1, epoch + 1))
    for number in range(first, len(visits) if last is None else last):
        table.visit(number)
        for i, j in visits[number].pairs.tolist():
            ids = np.concatenate([np.arange(i, table.shape.rows, p)[::3], np.arange(j, table.shape.rows, p)[::2]])
            rows = table.packed[table.places(np.unique(ids)), : table.shape.width]
            assert (rows == double[np.unique(ids)]).all()
            table.packed[table.places(np.unique(ids)), : table.shape.width] = rows * np.float32(1.25) + np.float32(i - j)
            double[np.unique(ids)] = double[np.unique(ids)] * np.float32(1.25) + np.float32(i - j)
            table.changed()


@given(st.integers(1, 9), st.integers(2, 6), st.integers(1, 8), st.integers(9, 3000))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_table_is_the_array_whatever_the_room(
    tmp_path_factory: pytest.TempPathFactory, buckets: int, resident: int, more: int, rows: int
) -> None:
    resident = min(buckets, resident)
    shape, path = TableShape(rows, 3, "rowwise_adagrad", buckets), tmp_path_factory.mktemp("table") / "table"
    double = initial(shape)
    with closing(made(path, shape, resident + more)) as table:
        assert (all_rows(table) == double).all()
        for epoch in range(2):
            train(table, double, epoch, resident)
            assert (all_rows(table) == double).all()
        table.flush()
        saved = table.files.state()
        table.files.commit()
        table.files.keep("best")
        best = double.copy()
        visits = len(bucket_visits(buckets, resident, 1, 2))
        train(table, double.copy(), 2, resident, 0, (visits + 1) // 2)
        assert (all_rows(table, "best") == best).all()
        some = np.random.default_rng(rows).integers(0, rows, 40)
        assert (TableView(table, "best").read(some) == best[some]).all()
    with closing(made(path, shape, resident + more, saved)) as table:
        assert (all_rows(table) == double).all(), "as at the checkpoint"
        assert (table.read(some) == double[some]).all()
        train(table, double, 2, resident)
        assert (all_rows(table) == double).all()


def test_with_room_for_all_nothing_is_read_or_written(tmp_path: Path) -> None:
    shape = TableShape(5000, 4, "adagrad", 6)
    with closing(made(tmp_path / "table", shape, 6)) as table:
        double = initial(shape)
        for epoch in range(3):
            train(table, double, epoch, 2)
        assert table.files.bytes_read == table.files.bytes_written == 0
        table.flush()
        assert table.files.bytes_written == 6 * shape.bucket_bytes
        table.flush()
        assert table.files.bytes_written == 6 * shape.bucket_bytes, "nothing has changed since"


def test_with_one_more_than_a_visit_has_the_bytes_are_those_of_the_swaps(tmp_path: Path) -> None:
    shape, resident = TableShape(30_000, 4, "adagrad", 12), 4
    swaps = beta_swaps(12, resident)
    with closing(made(tmp_path / "table", shape, resident + 1)) as table:
        double = initial(shape)
        train(table, double, 0, resident)
        table.flush()
        assert table.files.bytes_read <= swaps * shape.bucket_bytes, "the first visit of a bucket reads nothing"
        before = table.files.bytes_read, table.files.bytes_written
        for epoch in (1, 2):
            train(table, double, epoch, resident)
        read, written = table.files.bytes_read - before[0], table.files.bytes_written - before[1]
        assert (2 * swaps - 2) * shape.bucket_bytes <= read <= 2 * swaps * shape.bucket_bytes
        assert written <= 2 * swaps * shape.bucket_bytes


@pytest.mark.slow
def test_more_room_reads_less(tmp_path: Path) -> None:
    shape, read = TableShape(30_000, 4, "adagrad", 12), []
    for room in range(4, 13):
        with closing(made(tmp_path / str(room), shape, room)) as table:
            double = initial(shape)
            for epoch in range(3):
                train(table, double, epoch, 3)
            read.append(table.files.bytes_read)
    assert read == sorted(read, reverse=True)
    assert read[-1] == 0 < read[0]


def test_a_shape_has_every_row_once() -> None:
    shape = TableShape(1003, 100, "adagrad", 7)
    assert shape.bucket_bytes % 4096 == 0
    assert sorted(np.concatenate([shape.ids(bucket) for bucket in range(7)]).tolist()) == list(range(1003))


def test_rows_that_are_read_from_a_damaged_file_are_refused(tmp_path: Path) -> None:
    shape = TableShape(1500, 3, "rowwise_adagrad", 3)
    with closing(made(tmp_path / "table", shape, 3)) as table:
        train(table, initial(shape), 0, 3)
        table.flush()
        table.files.keep("best")
        saved = table.files.state()
    data = tmp_path / "table" / DATA
    kept = data.read_bytes()
    data.write_bytes(kept[:-5] + bytes([kept[-5] ^ 1]) + kept[-4:])
    for view in (None, "best"):
        with (
            closing(made(tmp_path / "table", shape, 3, saved)) as table,
            pytest.raises(StoreError, match="is damaged at bucket"),
        ):
            all_rows(table, view)

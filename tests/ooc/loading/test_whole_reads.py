"""Files that fit in memory and of which batches touch most pages: read once, whole, and used by scores as well."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.layerwise.pass_plan import ram_bytes
from ooc.loading.feature_cache import registry_of
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.whole_reads import page_bytes, reads_most
from ooc.models.builders import build_model
from ooc.runtime.memory_plan import MemoryPlan, divide
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.lmdb_rows import LmdbRows, write_lmdb_rows
from ooc.stores.arrays.rows import ArrayRows, Rows
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import StoreError
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.batches import same

PAGE = 4096
N, NARROW, WIDE = 2_000, 32, 500
"""nodes, and columns of float32: 32 rows a page, and two pages a row"""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("narrow"), NARROW)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store(tmp_path_factory.mktemp("wide"), WIDE)


def store(folder: Path, columns: int) -> Path:
    x = np.random.default_rng(0).standard_normal((N, columns), dtype=np.float32)
    graph = Graph.from_edges(*random_edges(N, 5 * N), N)
    return write_store(folder / "t.ooc", graph, x=x, y=np.arange(N) % 3, task="multiclass", num_classes=3)


def budget(max_batch: int = 10**8) -> MemoryPlan:
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=2 * max_batch)


def loader_of(ds: Dataset, nodes: range = range(150), **options: Any) -> NeighborLoader:
    return NeighborLoader(ds, [3, 2], input_nodes=nodes, batch_size=50, seed=0, **{"budget": budget(), **options})


def wanted(batches: list[Any]) -> Any:
    return np.unique(torch.cat([batch.n_id for batch in batches]).numpy())


def in_ram(path: Path, epochs: int = 1) -> list[Any]:
    with Dataset.open(path, in_memory=True) as ds:
        loader = loader_of(ds)
        return [batch for _ in range(epochs) for batch in loader]


@given(row_bytes=st.integers(1, 10_000), ids=st.sets(st.integers(0, 400), max_size=60))
def test_pages_are_those_that_bytes_lie_in(row_bytes: int, ids: set[int]) -> None:
    pages = {page for i in ids for page in range(i * row_bytes // PAGE, ((i + 1) * row_bytes - 1) // PAGE + 1)}
    assert page_bytes(row_bytes, np.array(sorted(ids), np.int64)) == PAGE * len(pages)


def test_most_is_half_of_the_pages_of_files(narrow: Path, tmp_path: Path) -> None:
    array = np.zeros((N, NARROW), np.float32)
    write_lmdb_rows(tmp_path / "rows", array)
    with Dataset.open(narrow) as ds, closing(LmdbRows(tmp_path / "rows", dtype="float32", shape=(NARROW,))) as records:
        x = ds.stored("x")
        assert reads_most(x, np.arange(0, N, 32))
        assert reads_most(x, np.arange(0, N, 64))  # every other page
        assert not reads_most(x, np.arange(0, N, 96))
        assert not reads_most(records, np.arange(N))  # no file of rows one behind the other
        assert not reads_most(ArrayRows(array), np.arange(N))
        joined = JoinedRows({"a": ArrayRows(array), "b": x})
        assert reads_most(joined, N + np.arange(0, N, 64))
        assert not reads_most(joined, np.arange(N + 64))


def test_a_narrow_file_is_read_once_and_no_page_twice(narrow: Path) -> None:
    """A row that the first epoch leaves out shares its page with others."""
    with Dataset.open(narrow) as ds:
        loader = loader_of(ds)
        batches = list(loader)
        assert len(wanted(batches)) < 0.9 * N
        assert (loader.rows_read, loader.bytes_read) == (N, PAGE * -(-N * 4 * NARROW // PAGE))
        batches += list(loader)
        other = loader_of(ds, range(N))
        list(other)
        assert (loader.rows_read, other.rows_read) == (N, 0)
    assert same(batches, in_ram(narrow, epochs=2))


def test_of_a_wide_file_only_the_rows_that_batches_want_are_read(wide: Path) -> None:
    with Dataset.open(wide) as ds:
        loader = loader_of(ds, range(20))
        rows = wanted(list(loader))
        assert 0 < loader.rows_read == len(rows) < N // 4
        all_rows = loader_of(ds, range(N))
        list(all_rows)
        assert all_rows.rows_read == N - len(rows)


def test_nothing_is_read_for_later_where_it_has_no_room(narrow: Path) -> None:
    small = dataclasses.replace(budget(110_000), in_flight=1)
    with Dataset.open(narrow) as ds:
        loader = loader_of(ds, budget=small)
        batches = list(loader)
        cache = registry_of(ds.stored("x"))._cache
        assert cache is not None
        assert len(cache.slot) < N
        assert len(wanted(batches)) <= loader.rows_read < 1.2 * len(wanted(batches)) < N
    assert same(batches, in_ram(narrow))


@pytest.mark.parametrize("bad_is_wanted", [False, True])
def test_a_row_that_cannot_be_read_fails_where_a_batch_wants_it(
    narrow: Path, monkeypatch: pytest.MonkeyPatch, bad_is_wanted: bool
) -> None:
    expected = in_ram(narrow)
    rows = wanted(expected)
    with Dataset.open(narrow) as ds:
        x = ds.stored("x")
        bad = int(rows[len(rows) // 2] if bad_is_wanted else np.setdiff1d(np.arange(N), rows)[7])
        first = next((k for k, batch in enumerate(expected) if bad in batch.n_id), len(expected))
        _break(monkeypatch, x, bad)
        loader, got = loader_of(ds), []
        if not bad_is_wanted:
            got = [batch for _ in range(10) for batch in loader]
            assert same(got, in_ram(narrow, epochs=10))
            assert registry_of(x).whole(N) is None
            cache = registry_of(x)._cache
            assert cache is not None
            assert cache.used == (cache.slot >= 0).sum() < N, "no slot is lost"
            loader, expected, first = loader_of(ds, range(bad, bad + 1)), [], 0
            got = []
        with pytest.raises(StoreError, match=f"row {bad} cannot"):
            got.extend(loader)
        assert same(got, expected[:first])
        monkeypatch.undo()
        again = loader_of(ds, range(N))
        assert same(list(again)[:2], _first_two(narrow))


def _first_two(path: Path) -> list[Any]:
    with Dataset.open(path, in_memory=True) as ds:
        return list(loader_of(ds, range(N)))[:2]


def _break(monkeypatch: pytest.MonkeyPatch, x: Any, bad: int) -> None:
    """Have every read of a row fail."""
    read = x.read

    def failing(ids: Any, out: Any, at: Any = None) -> int:
        if np.isin(bad, ids):
            raise StoreError(f"row {bad} cannot be read")
        return int(read(ids, out, at))

    monkeypatch.setattr(x, "read", failing)


def scored(ds: Dataset, folder: Path, room: int) -> tuple[Any, int]:
    """The outputs of a pass, and the bytes it read."""
    torch.manual_seed(0)
    model = build_model("sage", ds.num_features, 8, 3, 2)
    with closing(LayerwisePass(model, ds, folder, room=room)) as scan:
        rows: Rows = scan.run()
        out = np.empty(rows.shape, rows.dtype)
        rows.read(np.arange(N), out)
        return out, scan.stats.bytes_read


def room_of(ds: Dataset, folder: Path) -> int:
    """The memory that a pass takes to keep everything."""
    model = build_model("sage", ds.num_features, 8, 3, 2)
    with closing(LayerwisePass(model, ds, folder, room=10**9)) as scan:
        assert scan.plan.in_ram
        return ram_bytes(scan.shape)


def test_scores_leave_rows_in_memory_and_use_them(narrow: Path, tmp_path: Path) -> None:
    with Dataset.open(narrow) as fresh:
        expected, nbytes = scored(fresh, tmp_path / "a", 10**9)
    with Dataset.open(narrow) as ds:
        loader = loader_of(ds)
        list(loader)
        out, read = scored(ds, tmp_path / "b", 10**9)
        assert np.array_equal(out, expected)
        assert nbytes - read == loader.bytes_read
        list(loader)
        assert loader.rows_read == N


def test_rows_that_are_some_stay_as_well(wide: Path, tmp_path: Path) -> None:
    with Dataset.open(wide) as ds:
        first, again = (loader_of(ds, range(20)) for _ in range(2))
        list(first)
        out, read = scored(ds, tmp_path / "a", 10**9)
        assert read > N * 4 * WIDE
        list(again)
        assert again.rows_read == 0
    with Dataset.open(wide) as fresh:
        assert np.array_equal(out, scored(fresh, tmp_path / "b", 10**9)[0])


@pytest.mark.parametrize("spare", [-1, 0])
def test_rows_go_where_scores_need_their_memory(narrow: Path, tmp_path: Path, spare: int) -> None:
    """spare: bytes beyond those of the rows that a pass leaves."""
    with Dataset.open(narrow) as ds:
        loader = loader_of(ds)
        list(loader)
        room = room_of(ds, tmp_path / "a") + N * 4 * NARROW + spare
        scored(ds, tmp_path / "b", room)
        list(loader)
        assert loader.rows_read == (N if spare == 0 else 2 * N)


def test_a_reader_beside_others_takes_nothing_from_them(narrow: Path) -> None:
    """Rows in memory are lent to one reader at a time, also while scores use them."""
    with Dataset.open(narrow) as ds:
        loader, registry = loader_of(ds), registry_of(ds.stored("x"))
        list(loader)
        lease, there = registry.begin_scans(10**9), registry.whole(N)
        assert there is not None
        beside = loader_of(ds, range(N))
        batches: Iterator[Any] = iter(beside)
        next(batches)
        out, expected = (np.empty((N, NARROW), np.float32) for _ in range(2))
        there.read(np.arange(N), out)
        ds.stored("x").read(np.arange(N), expected)
        assert np.array_equal(out, expected)
        list(batches)
        lease.end()
        list(loader)
        assert loader.rows_read == N

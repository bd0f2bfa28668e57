"""Windows against batches read one by one: the same batches, the fewest rows read, failures in order, bounded bytes."""

import dataclasses
import gc
import threading
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc import windows
from ooc.budget import divide
from ooc.loaders import NeighborLoader
from ooc.order import Cursor
from ooc.windows import Grouping, Union
from stores.build import write_store
from stores.dataset import Dataset
from stores.errors import BudgetError, StoreError
from stores.graph import Graph
from stores.lmdb_rows import LmdbRows, write_lmdb_rows
from stores.rows import ArrayRows
from stores.zarr_rows import ForeignRows
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.waiting import no_threads

N, E, F = 300, 1500, 16


@pytest.fixture(scope="module")
def ds(tmp_path_factory):
    x = np.random.default_rng(0).standard_normal((N, F), dtype=np.float32)
    path = write_store(tmp_path_factory.mktemp("windows") / "test.ooc", Graph.from_edges(*random_edges(N, E), N), x=x)
    with Dataset.open(path) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_thread_left():
    yield
    gc.collect()
    assert no_threads()


def in_memory(loader: NeighborLoader) -> NeighborLoader:
    """The same loader, its rows read one by one from memory."""
    array = np.empty(loader._work.x.shape, np.float32)
    loader._work.x.read(np.arange(N), array)
    loader._work = dataclasses.replace(loader._work, x=ArrayRows(array))
    return loader


def budget(max_batch: int) -> Any:
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=2 * max_batch)


@settings(deadline=None, max_examples=40)
@given(parts=st.lists(st.lists(st.integers(0, 2**62), max_size=60) | st.lists(st.integers(0, 9), max_size=60), max_size=6))
def test_the_union_numbers_nodes_as_they_come(parts):
    union, number = Union(), {}
    for part in parts:
        expected = [number.setdefault(v, len(number)) for v in part]
        assert union.add(np.array(part, np.int64)).tolist() == expected
    assert union.size == len(number)
    assert union.node(union.size).tolist() == list(number)


def test_the_union_of_many_nodes():
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 30_000, 5000) for _ in range(12)]
    union = Union()
    positions = [union.add(part) for part in parts]
    node = union.node(union.size)
    assert np.array_equal(np.sort(node), np.unique(np.concatenate(parts)))
    for part, position in zip(parts, positions, strict=True):
        assert np.array_equal(node[position], part)


@settings(deadline=None, max_examples=25)
@given(
    batch_size=st.integers(3, 60),
    max_batch=st.integers(20_000, 400_000),
    threads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    ramp=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40)),
    prefetch=st.integers(1, 3),
    split=st.booleans(),
)
def test_batches_are_those_read_one_by_one(ds, batch_size, max_batch, threads, ramp, prefetch, split):
    """Whatever the budget, the windows' growth and the threads are."""

    def make():
        return NeighborLoader(
            ds, [3, 2], batch_size=batch_size, shuffle=not split, split_seeds=split, budget=budget(max_batch),
            prefetch_factor=prefetch, sample_threads=threads[0], read_threads=threads[1],
        )  # fmt: skip

    def outcome(loader):
        got = []
        try:
            got.extend(loader)
        except BudgetError as error:
            return got, str(error), error.__notes__
        return got, "", []

    with pytest.MonkeyPatch.context() as patch:
        first, growth, most = ramp
        patch.setattr(windows, "Grouping", partial(Grouping, first=first, growth=growth, most=most))
        with_windows = outcome(make())
    assert same(with_windows, outcome(in_memory(make())))


def test_every_row_of_a_window_is_read_once(ds):
    loader = NeighborLoader(ds, [5, 5], batch_size=20, budget=budget(10**8))
    batches = list(loader)
    ends = [0, 2, 10, 15]  # 15 batches: windows of 2, of 8, and the rest
    rows = [len(torch.cat([b.n_id for b in batches[i:j]]).unique()) for i, j in pairwise(ends)]
    assert loader.times()["read"]["items"] == len(rows)
    assert loader.rows_read == sum(rows) < sum(len(batch.n_id) for batch in batches)


def foreign_features(path, array):
    """A compressed Zarr array, each row in two chunks."""
    shape, chunks = array.shape, (37, array.shape[1] - 1)
    zarr.create_array(path, shape=shape, chunks=chunks, dtype=array.dtype, compressors=zarr.codecs.ZstdCodec())[:] = array


@pytest.mark.parametrize(
    ("write", "kind", "width", "dtype"),
    [
        (write_lmdb_rows, LmdbRows, F, "float32"),
        (foreign_features, ForeignRows, F, "float32"),
        (foreign_features, ForeignRows, F + 5, "float16"),
    ],
)
def test_features_that_someone_else_wrote_are_windowed_to_the_bit(ds, tmp_path, write, kind, width, dtype):
    x = np.random.default_rng(1).standard_normal((N, width)).astype(dtype)
    write(tmp_path / "features", x)
    own = write_store(tmp_path / "own.ooc", Graph.from_edges(*random_edges(N, E), N), x=x)

    def batches(path, **options):
        with Dataset.open(path, **options) as opened:
            loader = NeighborLoader(opened, [4, 3], batch_size=20, shuffle=True, seed=2, budget=budget(10**8))
            return [batch for _ in range(2) for batch in loader], loader, opened.rows("x")

    expected, _, rows = batches(own, in_memory=True)
    assert isinstance(rows, ArrayRows)
    got, loader, rows = batches(ds.path, features={"x": tmp_path / "features"})
    assert isinstance(rows, kind)
    assert len(got) == len(expected) == 30
    assert same(got, expected)
    windows_of = [got[i:j] for i, j in ((0, 2), (2, 10), (10, 15), (15, 17), (17, 25), (25, 30))]
    assert loader.times()["read"]["items"] == len(windows_of)
    assert loader.rows_read == sum(len(torch.cat([batch.n_id for batch in each]).unique()) for each in windows_of)
    assert loader.bytes_read >= loader.rows_read * x.itemsize * width


@settings(deadline=None, max_examples=40)
@given(batch_size=st.integers(1, 40), max_batch=st.integers(5_000, 200_000), most=st.integers(1, 40))
def test_windows_hold_all_batches_in_order_within_their_bytes(ds, batch_size, max_batch, most):
    loader = NeighborLoader(ds, [2, 2], batch_size=batch_size)
    work, pool = loader._work, 4 * max_batch
    drawn = list(work.split(iter([Cursor(0, step) for step in range(len(loader))])))
    made = list(Grouping(work, pool // 2, 1, first=2, growth=3, most=most).group(iter(drawn)))
    assert [batch for window in made for batch in window.batches] == drawn
    sizes = [len(window.batches) for window in made]
    for k, window in enumerate(made):
        assert sizes[k] <= min(2 * 3**k, most)
        for j, batch in enumerate(window.batches):
            position = window.position[j] if window.position else np.arange(len(window.node))
            assert np.array_equal(window.node[position], batch.subgraph.node)
            assert len(position) == 0 or position.max() < window.end[j]
        if sizes[k] > 1:
            assert len(np.unique(window.node)) == len(window.node)
            assert 2 * len(window.node) * 4 * F + 3 * work.nbytes(window.batches[0]) < 2 * window.nbytes <= pool


def test_the_bytes_bound_holds_windows_back(ds):

    def reads(max_batch):
        loader = NeighborLoader(ds, [2, 2], batch_size=10, budget=budget(max_batch))
        assert len(list(loader)) == 30
        return loader.times()["read"]["items"]

    assert 30 > reads(40_000) > reads(10**7) == 3


class Broken(ArrayRows):
    """Rows of which some cannot be read."""

    def __init__(self, array, bad):
        super().__init__(array)
        self.bad = bad

    def read(self, ids, out):
        if np.isin(ids, self.bad).any():
            raise StoreError(f"row {self.bad} cannot be read")
        return super().read(ids, out)


class Behind:
    """Not an ArrayRows, so it is read through windows."""

    def __init__(self, rows):
        self.rows, self.shape, self.dtype, self.row_bytes = rows, rows.shape, rows.dtype, rows.row_bytes

    def read(self, ids, out):
        return self.rows.read(ids, out)


@pytest.mark.parametrize("bad", [3, 47, 155, 299])
def test_a_row_that_cannot_be_read_fails_at_its_batch(ds, bad):
    loader = NeighborLoader(ds, [2], batch_size=10)
    array = np.empty((N, F), np.float32)
    ds.rows("x").read(np.arange(N), array)
    expected = list(loader)
    first = next(step for step, batch in enumerate(expected) if bad in batch.n_id)
    loader = NeighborLoader(ds, [2], batch_size=10)
    loader._work = dataclasses.replace(loader._work, x=Behind(Broken(array, bad)))
    got = []
    with pytest.raises(StoreError, match=f"row {bad} cannot") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == [f"in stage 'read' at step {first} of the pipeline"]
    assert same(got, expected[:first])


def test_a_failing_sample_comes_after_the_batches_before_it(ds):
    loader = NeighborLoader(ds, [2], batch_size=10)
    sample = loader._work.sample

    class Failing(type(loader._work)):
        def sample(self, cursor):
            if cursor.step == 12:
                raise StoreError("mine")
            return sample(cursor)

    work = loader._work
    loader._work = Failing(**{field.name: getattr(work, field.name) for field in dataclasses.fields(work)})
    got = []
    with pytest.raises(StoreError, match="mine") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == ["in stage 'sample' at step 12 of the pipeline"]
    assert len(got) == 12


@pytest.mark.parametrize("taken", [0, 1, 5, 29])
def test_closing_at_any_batch_ends_all_threads(ds, taken):
    epoch = iter(NeighborLoader(ds, [2], batch_size=10))
    for _ in range(taken):
        next(epoch)
    epoch.close()
    epoch.close()
    assert list(epoch) == []


def test_closing_while_a_window_is_read_does_not_wait_for_the_next(ds):
    slow, reading = threading.Event(), threading.Event()

    class Slow(ArrayRows):
        def read(self, ids, out):
            reading.set()
            slow.wait(10)
            return super().read(ids, out)

    loader = NeighborLoader(ds, [2], batch_size=10)
    loader._work = dataclasses.replace(loader._work, x=Behind(Slow(np.zeros((N, F), np.float32))))
    epoch = iter(loader)
    assert reading.wait(10)
    closing = threading.Thread(target=epoch.close)
    closing.start()
    slow.set()
    closing.join(10)
    assert not closing.is_alive()
    assert loader.rows_read < N * 2

"""Windows against batches read one by one: the same batches, the fewest rows read, failures in order, bounded bytes."""

import dataclasses
import gc
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.aggregation import PreAggregation
from ooc.loading import feature_cache, read_strategy, superbatch
from ooc.loading.feature_cache import CachedNodes, registry_of
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.superbatch_plan import SuperbatchPlanner
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import divide
from ooc.stores.arrays.lmdb_rows import LmdbRows, write_lmdb_rows
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.arrays.zarr_rows import ForeignRows
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, StoreError
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.ooc.loading.strategies import over, with_stage
from tests.waiting import DEADLINE_S, eventually, no_threads, stage_threads

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
    x = loader.strategy.disk_rows
    array = np.empty(x.shape, np.float32)
    x.read(np.arange(N), array)
    return over(loader, ArrayRows(array))


def budget(max_batch: int) -> Any:
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=2 * max_batch)


@settings(deadline=None, max_examples=25)
@given(
    batch_size=st.integers(3, 60),
    max_batch=st.integers(20_000, 400_000),
    threads=st.integers(1, 3),
    ramp=st.tuples(st.integers(1, 20_000), st.integers(1, 5)),
    split=st.booleans(),
    alone=st.booleans(),
)
def test_batches_are_those_read_one_by_one(ds, batch_size, max_batch, threads, ramp, split, alone):
    """Whatever the budget, the windows' growth and the threads are, and whether the first batch is read by itself."""

    def make():
        return NeighborLoader(
            ds, [3, 2], batch_size=batch_size, shuffle=not split, split_seeds=split, budget=budget(max_batch),
            sample_threads=threads, seed=0,
        )  # fmt: skip

    def outcome(loader):
        got = []
        try:
            for _ in range(2):  # what the first epoch leaves in memory serves the second
                got.extend(loader)
        except BudgetError as error:
            return got, str(error), error.__notes__
        return got, "", []

    with pytest.MonkeyPatch.context() as patch:
        first_bytes, growth = ramp
        patch.setattr(read_strategy, "FIRST_ALONE_BYTES", 1 if alone else 2**60)
        patch.setattr(superbatch, "SuperbatchPlanner", partial(SuperbatchPlanner, first_bytes=first_bytes, growth=growth))
        with_windows = outcome(make())
    assert same(with_windows, outcome(in_memory(make())))


def test_a_row_that_fits_is_read_once_whatever_the_epochs_and_loaders(ds):
    with Dataset.open(ds.path) as fresh:
        loader = NeighborLoader(fresh, [5, 5], batch_size=20, budget=budget(10**8))
        first = torch.cat([batch.n_id for batch in loader]).unique()
        assert loader.times()["read"]["items"] == 1
        assert loader.rows_read == len(first)
        assert len(list(loader)) == 15
        other = NeighborLoader(fresh, [5, 5], batch_size=7, budget=budget(10**8))
        assert len(list(other)) == 43
        assert loader.rows_read + other.rows_read == N


def test_rows_read_are_those_that_residents_foresee_whatever_the_timing(ds):
    with Dataset.open(ds.path) as fresh:
        small = dataclasses.replace(budget(30_000), in_flight=1)
        loader = NeighborLoader(fresh, [3, 2], batch_size=4, shuffle=True, budget=small)
        strategy = loader.strategy
        drawn = list(strategy.stages.sample.batches(iter([Cursor(0, step) for step in range(len(loader))])))
        sketches = list(strategy.planner(small.batches).sketches(iter(drawn)))
        assert 2 < len(sketches) < len(drawn)
        held, foreseen = CachedNodes.none(), 0
        for sketch in sketches:
            (used,) = sketch.arrays
            held, change = held.take(used.ids, used.uses, used.limit, np.empty(0, np.int32))
            foreseen += int((change.carried < 0).sum())
        for _ in loader:
            pass
        assert loader.rows_read == foreseen < sum(len(np.unique(batch.subgraph.node)) for batch in drawn)


@pytest.mark.cases(1)
@pytest.mark.parametrize("alone", [False, True])
def test_rows_of_earlier_epochs_and_other_loaders_make_room(ds, alone, monkeypatch):
    """Without which an epoch waits forever for room among rows that the one before has left."""
    monkeypatch.setattr(read_strategy, "FIRST_ALONE_BYTES", 1 if alone else 2**60)
    with Dataset.open(ds.path) as fresh:
        small = dataclasses.replace(budget(30_000), in_flight=1)
        cache = registry_of(fresh.rows("x"))
        for epoch in range(6):
            loader = NeighborLoader(fresh, [3, 2], batch_size=4, shuffle=True, budget=small, seed=epoch)
            got, expected = list(loader), list(in_memory(NeighborLoader(fresh, [3, 2], batch_size=4, shuffle=True, seed=epoch)))
            assert same(got, expected)
            assert 0 < cache._cache.used == len(cache._cache.slot) == len(cache._cache.residents.node) < N


def test_a_first_batch_by_itself_leaves_the_memory_as_it_found_it(ds, monkeypatch):
    """But for its own rows; also where no other follows."""
    monkeypatch.setattr(read_strategy, "FIRST_ALONE_BYTES", 1)
    with Dataset.open(ds.path) as fresh:
        list(NeighborLoader(fresh, [3, 2], batch_size=20, budget=budget(10**8)))
        cache = registry_of(fresh.rows("x"))
        before = cache._cache.residents.node
        (batch,) = NeighborLoader(fresh, [3, 2], input_nodes=range(20), batch_size=20, budget=budget(10**8))
        assert np.array_equal(cache._cache.residents.node, np.setdiff1d(before, batch.n_id))
        assert cache._cache.used == len(cache._cache.residents.node)
        whole = NeighborLoader(fresh, [3, 2], batch_size=20, budget=budget(10**8))
        list(whole)
        assert whole.rows_read <= 2 * len(batch.n_id)


def test_a_second_pipeline_meanwhile_has_rows_of_its_own(ds):
    with Dataset.open(ds.path) as fresh:
        one, other = (NeighborLoader(fresh, [2], batch_size=20, budget=budget(10**8), seed=0) for _ in range(2))
        pairs = list(zip(one, other, strict=True))
        assert all(same(a, b) for a, b in pairs)
        assert one.rows_read == other.rows_read


@pytest.mark.parametrize("pre_aggregation", [None, PreAggregation("mean", F)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_second_loader_never_waits_for_one_that_is_being_iterated_over(ds, monkeypatch, pre_aggregation, fails):
    """Where the first one has nothing left to read: its last batch is held, or the next one is known to fail."""
    monkeypatch.setattr(feature_cache, "STOPPING_SECONDS", 2 * DEADLINE_S)
    with Dataset.open(ds.path) as fresh:
        first = NeighborLoader(fresh, [2], batch_size=20, budget=budget(10**8), pre_aggregation=pre_aggregation)
        sample = first.strategy.stages.sample.sample
        if fails:
            with_stage(first, "sample", lambda cursor: sample(cursor if cursor.step < 13 else Cursor(0, 99)))
        epoch = iter(first)
        held = [next(epoch) for _ in range(13 if fails else 15)][-1]
        assert eventually(lambda: not {"ooc-read", "ooc-sum"} & {*stage_threads()})
        began = time.monotonic()
        second = NeighborLoader(fresh, [2], batch_size=50, seed=1, budget=budget(10**8), pre_aggregation=pre_aggregation)
        assert len(list(second)) == 6
        assert time.monotonic() - began < DEADLINE_S
        assert held.batch_size == 20
        with pytest.raises(IndexError if fails else StopIteration):
            next(epoch)


def test_the_last_batch_gives_the_memory_back(ds):
    """What scores come from before the next epoch reads with all of it, and what is in memory is not read again."""
    with Dataset.open(ds.path) as fresh:
        loader = NeighborLoader(fresh, [5, 5], batch_size=20, budget=budget(10**8))
        epoch = iter(loader)
        for _ in range(len(loader)):
            next(epoch)
        assert not registry_of(fresh.rows("x"))._readers
        assert not stage_threads()
        other = NeighborLoader(fresh, [5, 5], batch_size=20, budget=budget(10**8))
        list(other)
        assert loader.rows_read + other.rows_read == N
        assert list(epoch) == []


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1, 14, 15])
def test_an_iterator_dropped_at_any_batch_gives_the_rows_back(ds, taken):
    """Also one that nobody took a batch of, though windows are read by then."""
    with Dataset.open(ds.path) as fresh:
        loader = NeighborLoader(fresh, [2], batch_size=20, budget=budget(10**8))
        registry = registry_of(fresh.rows("x"))
        for _ in range(3):
            epoch = iter(loader)
            for _ in range(taken):
                next(epoch)
            assert eventually(lambda: loader.rows_read > 0)
            del epoch
            gc.collect()
            assert no_threads()
            assert not registry._readers
            assert registry._cache.used == len(registry._cache.slot) == len(registry._cache.residents.node)


def foreign_features(path, array):
    """A compressed Zarr array, each row in two chunks."""
    shape, chunks = array.shape, (37, array.shape[1] - 1)
    zarr.create_array(path, shape=shape, chunks=chunks, dtype=array.dtype, compressors=zarr.codecs.ZstdCodec())[:] = array


@pytest.mark.cases(1)
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
            return [batch for _ in range(2) for batch in loader], loader, opened.stored("x")

    expected, _, rows = batches(own, in_memory=True)
    assert isinstance(rows, ArrayRows)
    got, loader, rows = batches(ds.path, features={"x": tmp_path / "features"})
    assert isinstance(rows, kind)
    assert len(got) == len(expected) == 30
    assert same(got, expected)
    assert loader.times()["read"]["items"] == 2
    assert loader.rows_read == len(torch.cat([batch.n_id for batch in got]).unique())
    assert loader.bytes_read >= loader.rows_read * x.itemsize * width


@settings(deadline=None, max_examples=20)
@given(batch_size=st.integers(1, 40), max_batch=st.integers(5_000, 200_000), first=st.integers(1, 2000), edge_ids=st.booleans())
def test_windows_hold_all_batches_in_order_within_their_bytes(ds, batch_size, max_batch, first, edge_ids):
    loader = NeighborLoader(ds, [2, 2], batch_size=batch_size, edge_ids=edge_ids)
    strategy, pool = loader.strategy, 4 * max_batch
    drawn = list(strategy.stages.sample.batches(iter([Cursor(0, step) for step in range(len(loader))])))
    planner = SuperbatchPlanner(strategy.stages, strategy.memory, pool, (CachedNodes.none(),), first * F * 4, growth=3)
    made = list(planner.sketches(iter(drawn)))
    unpacked = [batch.unpack([None], [sketch.arrays[0].ids]) for sketch in made for batch in sketch.batches]
    for one, other in zip(unpacked, drawn, strict=True):
        bare = dataclasses.replace(other.subgraph, slot=other.subgraph.slot if edge_ids else other.subgraph.slot[:0])
        assert (one.step, one.last) == (other.step, other.last)
        assert np.array_equal(one.position, other.position)
        for field in dataclasses.fields(bare):
            assert np.array_equal(getattr(one.subgraph, field.name), getattr(bare, field.name))
    for k, sketch in enumerate(made):
        (used,) = sketch.arrays
        parts = [used.ids[batch.row[0]] for batch in sketch.batches]
        assert np.array_equal(used.ids, np.unique(np.concatenate(parts)))
        assert used.uses.tolist() == [sum(node in part for part in parts) for node in used.ids]
        assert used.last.tolist() == [max(i for i, part in enumerate(parts) if node in part) for node in used.ids]
        if len(sketch.batches) > 1:
            assert len(used.ids) <= first * 3**k
            besides = 3 * max(strategy.memory.nbytes(each) for each in drawn[:1])
            assert len(used.ids) < used.limit < (pool - besides) // (4 * F)


def test_the_bytes_bound_holds_windows_back(ds):
    def reads(max_batch):
        with Dataset.open(ds.path) as fresh:
            small = dataclasses.replace(budget(max_batch), in_flight=1)
            loader = NeighborLoader(fresh, [2, 2], batch_size=5, budget=small)
            assert len(list(loader)) == 60
            return loader.times()["read"]["items"]

    assert 60 > reads(30_000) > reads(10**7) == 1


class Broken(ArrayRows):
    """Rows of which some cannot be read."""

    def __init__(self, array, bad):
        super().__init__(array)
        self.bad = bad

    def read(self, ids, out, at=None):
        if np.isin(ids, self.bad).any():
            raise StoreError(f"row {self.bad} cannot be read")
        return super().read(ids, out, at)


class Behind:
    """Not an ArrayRows, so it is read through windows."""

    def __init__(self, rows):
        self.rows, self.shape, self.dtype, self.row_bytes = rows, rows.shape, rows.dtype, rows.row_bytes

    def read(self, ids, out, at=None):
        return self.rows.read(ids, out, at)


@pytest.mark.parametrize("bad", [3, 47, 155, 299])
def test_a_row_that_cannot_be_read_fails_at_its_batch(ds, bad):
    loader = NeighborLoader(ds, [2], batch_size=10, seed=0)
    array = np.empty((N, F), np.float32)
    ds.rows("x").read(np.arange(N), array)
    expected = list(loader)
    first = next(step for step, batch in enumerate(expected) if bad in batch.n_id)
    loader = NeighborLoader(ds, [2], batch_size=10, seed=0)
    over(loader, Behind(Broken(array, bad)))
    got = []
    with pytest.raises(StoreError, match=f"row {bad} cannot") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == [f"in stage 'read' at step {first} of the pipeline"]
    assert same(got, expected[:first])


def test_a_failing_sample_comes_after_the_batches_before_it(ds):
    loader = NeighborLoader(ds, [2], batch_size=10, seed=0)
    sample = loader.strategy.stages.sample.sample

    def fail(cursor):
        if cursor.step == 12:
            raise StoreError("mine")
        return sample(cursor)

    with_stage(loader, "sample", fail)
    got = []
    with pytest.raises(StoreError, match="mine") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == ["in stage 'sample' at step 12 of the pipeline"]
    assert len(got) == 12


@pytest.mark.parametrize("taken", [0, 1, 5, 29])
def test_closing_at_any_batch_ends_all_threads(ds, taken):
    epoch = iter(NeighborLoader(ds, [2], batch_size=10, seed=0))
    for _ in range(taken):
        next(epoch)
    epoch.close()
    epoch.close()
    assert list(epoch) == []


def test_closing_while_a_window_is_read_does_not_wait_for_the_next(ds, monkeypatch):
    slow, reading, reads = threading.Event(), threading.Event(), []

    class Slow(ArrayRows):
        def read(self, ids, out, at=None):
            reads.append(len(ids))
            reading.set()
            slow.wait(60)
            return super().read(ids, out, at)

    monkeypatch.setattr(superbatch, "SuperbatchPlanner", partial(SuperbatchPlanner, first_bytes=60 * F * 4, growth=1))
    loader = NeighborLoader(ds, [2], batch_size=10, seed=0)
    over(loader, Behind(Slow(np.zeros((N, F), np.float32))))
    epoch = iter(loader)
    assert reading.wait(60)
    closing = threading.Thread(target=epoch.close)
    closing.start()
    assert eventually(lambda: epoch._batches._state.before.stopped)
    slow.set()
    closing.join(60)
    assert not closing.is_alive()
    assert len(reads) == 1
    assert loader.rows_read < N

"""Sweeps: failures come in order, and an epoch left halfway leaves nothing behind."""

import gc
import threading
from contextlib import suppress
from typing import Any

import pytest

from ooc.loading import shared_scan as shared_scans
from ooc.loading.feature_cache import registry_of
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, StoreError
from tests.ooc.batches import same
from tests.ooc.loading.shared_scan.scanning import few, in_memory, loader_of, outcome, piece_threads
from tests.ooc.loading.strategies import over, with_stage
from tests.ooc.loading.test_superbatch import Behind, Broken
from tests.waiting import NoMoreThreads, eventually, no_threads


@pytest.mark.cases(2)
@pytest.mark.parametrize(("bad", "fanout"), [(3, [4, 3]), (47, [2, -1]), (155, [4, 3]), (299, [1, -1])])
def test_a_row_that_cannot_be_read_fails_at_its_batch(path: Any, ds: Dataset, x: Any, bad: int, fanout: list[int]) -> None:
    """Of batches that share aggregates too."""
    options = {"fanout": fanout, "budget": few(10)}
    want = in_memory(path, fanout=fanout)[0][:15]
    rows = in_memory(path, fanout=fanout, pre_aggregation=None)[0]
    first = next(step for step, batch in enumerate(rows) if bad in batch.n_id)
    loader = loader_of(ds, **options)
    over(loader, Behind(Broken(x, bad)))
    got = []
    with pytest.raises(StoreError, match=f"row {bad} cannot") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == [f"in stage 'sum' at step {first} of the pipeline"]
    assert same(got, want[:first])
    assert not registry_of(loader.strategy.disk_rows)._readers


@pytest.mark.parametrize("failing", [0, 1, 11])
def test_a_failing_sample_comes_after_the_batches_before_it(path: Any, ds: Dataset, failing: int) -> None:
    loader = loader_of(ds)
    sample = loader.strategy.stages.sample.sample

    def fail(cursor: Cursor) -> Any:
        if cursor.step == failing:
            raise BudgetError("mine")
        return sample(cursor)

    with_stage(loader, "sample", fail)
    got, message, notes = outcome(loader)
    assert (message, notes) == ("mine", [f"in stage 'sample' at step {failing} of the pipeline"])
    assert same(got, in_memory(path)[0][:failing])


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1, 5, 14])
@pytest.mark.parametrize("how", ["closed", "dropped", "raised"])
def test_an_epoch_left_halfway_leaves_nothing(path: Any, ds: Dataset, taken: int, how: str) -> None:
    loader = loader_of(ds)
    rows = loader.strategy.disk_rows

    def leave() -> None:
        epoch = iter(loader)
        for _ in range(taken):
            next(epoch)
        if how == "closed":
            epoch.close()
            epoch.close()
            assert list(epoch) == []
        if how == "raised":
            raise ZeroDivisionError

    for _ in range(2):
        with suppress(ZeroDivisionError):
            leave()
        gc.collect()
        assert eventually(lambda: no_threads() and not piece_threads())
        assert not registry_of(rows)._readers
    loader.set_epoch(0)
    assert same(list(loader), in_memory(path)[0][:15])


@pytest.mark.cases(2)
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", range(6))
def test_an_epoch_that_cannot_begin_leaves_nothing(path: Any, ds: Dataset, monkeypatch: Any, at: int, error: Any) -> None:
    loader = loader_of(ds)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread, start=NoMoreThreads(at, error): start(thread))
        with pytest.raises(type(error)):
            iter(loader)
    assert eventually(lambda: no_threads() and not piece_threads())
    assert not registry_of(loader.strategy.disk_rows)._readers
    loader.set_epoch(0)
    assert same(list(loader), in_memory(path)[0][:15])


def test_an_epoch_after_one_that_was_dropped_has_all_the_memory(
    path: Any, ds: Dataset, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the reads under way still take."""
    pools, reading, slow = [], threading.Event(), threading.Event()
    chained = shared_scans.chained
    monkeypatch.setattr(shared_scans, "chained", lambda session, *a: (pools.append(session.pool), chained(session, *a))[1])

    class Slow(ArrayRows):
        def read(self, ids: Any, out: Any, at: Any = None) -> int:
            reading.set()
            slow.wait(60)
            return super().read(ids, out, at)

    loader = loader_of(ds)
    over(loader, Behind(Slow(x)))
    epoch = iter(loader)
    assert reading.wait(60)
    del epoch
    threading.Timer(0.2, slow.set).start()
    loader.set_epoch(0)
    assert same(list(loader), in_memory(path)[0][:15])
    assert pools == [loader.budget.batches] * 2


def test_a_collection_in_the_middle_of_a_request_to_read_stops_the_sweeper(ds: Dataset) -> None:
    """By the thread that makes the request, in which the collection of a dropped epoch may happen."""
    loader = loader_of(ds)
    session = shared_scans.ScanSession(loader.strategy, Clock(), loader.budget.batches)

    def request() -> None:
        with session._readers._shutdown_lock:
            session.stop()

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    session.end()


def test_closing_waits_for_the_reads_under_way(ds: Dataset, x: Any) -> None:
    """The rows may be closed next."""
    reading, slow, under_way = threading.Event(), threading.Event(), []

    class Slow(ArrayRows):
        def read(self, ids: Any, out: Any, at: Any = None) -> int:
            under_way.append(1)
            reading.set()
            slow.wait(60)
            under_way.pop()
            return super().read(ids, out, at)

    loader = loader_of(ds)
    over(loader, Behind(Slow(x)))
    epoch = iter(loader)
    assert reading.wait(60)
    closing = threading.Thread(target=epoch.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    slow.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not under_way
    assert not piece_threads()

"""Shared scans that are dropped, stopped or closed while they read."""

import threading
from typing import Any

import pytest

from ooc.loading import shared_pass
from ooc.loading.shared_scan import ScanSession
from ooc.runtime.clock import Clock
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from tests.ooc.batches import same
from tests.ooc.loading.shared_pass.scanning import in_memory, loader_of, piece_threads
from tests.ooc.loading.strategies import over
from tests.ooc.loading.test_superbatch import Behind


def test_an_epoch_after_one_that_was_dropped_has_all_the_memory(
    path: Any, ds: Dataset, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the reads under way still take."""
    pools, reading, slow = [], threading.Event(), threading.Event()
    chained = shared_pass.chained
    monkeypatch.setattr(shared_pass, "chained", lambda session, *a: (pools.append(session.pool), chained(session, *a))[1])

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
    session = ScanSession(loader.strategy, Clock(), loader.budget.batches)

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

"""Ctrl-C, an exception and a dropped iterator in the middle of a windowed epoch: no thread and no descriptor is left."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ooc.loading import superbatch
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.loading.strategies import over, with_stage
from tests.scale import few
from tests.waiting import NoMoreThreads, consumer_waits, eventually, no_threads, stage_threads

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    x = np.random.default_rng(0).standard_normal((300, 16), dtype=np.float32)
    return write_store(tmp_path_factory.mktemp("interrupt") / "test.ooc", Graph.from_edges(*random_edges(300, 1500), 300), x=x)


@pytest.fixture(autouse=True)
def _many_windows(monkeypatch):
    """Of a few batches each, where the memory would do for one window."""
    monkeypatch.setattr(superbatch, "SuperbatchPlanner", partial(superbatch.SuperbatchPlanner, first_bytes=9600, growth=1))


def descriptors() -> list[str]:
    """What this process has open, without the folder that is being listed."""
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(name) for name in names if os.path.islink(name))


def living_threads() -> set[threading.Thread]:
    """All threads but those of zarr's pool, which grows to its fixed size whenever reads overlap."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


@contextmanager
def leaving_nothing(path: Path) -> Iterator[Dataset]:
    """A data set whose use must leave no thread and no descriptor once it is closed."""
    with Dataset.open(path) as ds:  # what is loaded and compiled on the first use stays
        list(NeighborLoader(ds, [2, 2], batch_size=10))
    gc.collect()
    assert no_threads()
    threads, files = living_threads(), descriptors()
    with Dataset.open(path) as ds:
        assert descriptors() != files
        yield ds
        assert not stage_threads()
    assert living_threads() == threads
    assert descriptors() == files


class Held:
    """Calls through `run`, of which number `at` waits until it is let go."""

    def __init__(self, run, at):
        self.run, self.at, self.calls = run, at, 0
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls == self.at:
            self.reached.set()
            self.go.wait(60)
        return self.run(*arguments)


class HeldRows:
    """Rows with a held `read`."""

    def __init__(self, rows, at):
        self.shape, self.dtype, self.row_bytes = rows.shape, rows.dtype, rows.row_bytes
        self.read = Held(rows.read, at)


def held(loader: NeighborLoader, stage: str, at: int) -> Held:
    """Make call `at` of a loader's stage wait."""
    if stage == "read":
        rows = HeldRows(loader.strategy.disk_rows, at)
        over(loader, rows)
        return rows.read
    call = Held(getattr(getattr(loader.strategy.stages, stage), stage), at)
    with_stage(loader, stage, call)
    return call


# Window number 2 is read when the consumer has the first one's batches or waits for them.
@pytest.mark.parametrize(
    ("stage", "at"), [("sample", 1), ("sample", 12), ("read", 1), ("read", 2), ("collate", 1), ("collate", 7)]
)
def test_an_interrupt_of_the_waiting_consumer_ends_the_whole_chain(path, stage, at):
    with leaving_nothing(path) as ds:
        loader = NeighborLoader(ds, [2, 2], batch_size=10)
        call = held(loader, stage, at)
        epoch = iter(loader)
        stopped_by_interrupt = []

        def interrupt():
            if call.reached.wait(60) and eventually(consumer_waits):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # as Ctrl-C does
                stopped_by_interrupt.append(eventually(lambda: epoch._batches._state.stopped))
            call.go.set()

        hand = threading.Thread(target=interrupt)
        hand.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in epoch:
                pass
        assert not stage_threads()  # the interrupt is raised when they have ended
        assert list(epoch) == []
        hand.join()
        assert stopped_by_interrupt == [True]


def test_an_exception_in_the_loops_body_ends_all_threads(path):
    with leaving_nothing(path) as ds:
        loader = NeighborLoader(ds, [2, 2], batch_size=10)
        with pytest.raises(ZeroDivisionError, match="mine") as caught:  # noqa: PT012
            for step, _ in enumerate(loader):
                if step == 3:
                    raise ZeroDivisionError("mine")
        assert caught.traceback is not None  # which does not hold the loop's iterator
        assert no_threads()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", range(6))
def test_an_epoch_that_cannot_begin_leaves_nothing_and_the_next_has_all_the_memory(path, monkeypatch, at, error):
    with leaving_nothing(path) as ds:
        loader, lent = NeighborLoader(ds, [2, 2], batch_size=10), []
        want = [batch.n_id.tolist() for batch in loader]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda thread, start=NoMoreThreads(at, error): start(thread))
            with pytest.raises(type(error)) as caught:
                iter(loader)
        assert eventually(lambda: not stage_threads())
        monkeypatch.setattr(superbatch, "own_cache", lambda *_: lent.append("a small cache"))
        loader.set_epoch(0)
        assert [batch.n_id.tolist() for batch in loader] == want
        assert not lent
        assert caught.traceback is not None  # which holds what was made


def mapped_rings() -> int:
    return Path("/proc/self/maps").read_text().count("io_uring")


@pytest.mark.parametrize("topology", ["in memory", "on disk"])
def test_nothing_adds_up_over_many_openings(path, monkeypatch, topology):
    """Opened, read from, left by an exception or halfway and closed, 200 times."""
    if topology == "on disk":
        monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
    with leaving_nothing(path):
        pass
    files, threads, rings = descriptors(), living_threads(), mapped_rings()
    for cycle in range(few(30, 200)):
        with suppress(ZeroDivisionError), Dataset.open(path) as ds:
            loader = NeighborLoader(ds, [2, 2], batch_size=40)
            assert (loader.strategy.stages.sample.frontier is None) == (topology == "in memory")
            epoch = iter(loader)
            for _ in range(cycle % 3):
                next(epoch)
            if cycle % 2:
                raise ZeroDivisionError
            epoch.close()
        del loader, epoch
    gc.collect()
    assert no_threads()
    assert (descriptors(), living_threads(), mapped_rings()) == (files, threads, rings)


@pytest.mark.parametrize("taken", [0, 1, 3, 11])
def test_a_dropped_iterator_ends_all_threads(path, taken):
    def fail(loader):
        epoch = iter(loader)
        for _ in range(taken):
            next(epoch)
        raise ZeroDivisionError("mine")

    with leaving_nothing(path) as ds:
        loader = NeighborLoader(ds, [2, 2], batch_size=10)
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            fail(loader)
        assert stage_threads()  # the traceback holds the iterator
        del caught
        gc.collect()
        assert no_threads()
        assert len(list(loader)) == 30  # the next epoch

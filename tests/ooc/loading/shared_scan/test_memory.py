"""Sweeps: the memory that sums take, and two pipelines that share it."""

import gc
import threading
import weakref
from typing import Any

import pytest

from ooc.graph.aggregation import FirstLayerAggregates
from ooc.loading import shared_scan as shared_scans
from ooc.loading.feature_cache import CacheRegistry, registry_of
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.shared_scan import FloatBuffers, Stopped
from ooc.runtime.memory_plan import SECOND_SHARE
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from tests.ooc.batches import same
from tests.ooc.loading.shared_scan.scanning import few, in_memory, loader_of, outcome


def test_batches_that_are_kept_neither_hang_nor_change(path: Any, ds: Dataset) -> None:
    loader = loader_of(ds, budget=few(1))
    kept = list(loader)
    assert loader.times()["sum"]["items"] > 4
    copies = [FirstLayerAggregates(batch.x.neighbor.clone(), batch.x.self_row.clone()) for batch in kept]
    outcome(loader)
    assert same([batch.x for batch in kept], copies)
    assert same(kept, in_memory(path)[0][:15])


def test_sums_alive_stay_within_the_budget(ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: dict[int, int] = {}
    peak = 0
    take = FloatBuffers.take

    def counted(self: Any, shape: Any, turn: int | None = None) -> Any:
        nonlocal peak
        taken = take(self, shape, turn)
        if turn is not None:
            number = len(numbers)
            numbers.append(number)
            alive[number] = taken.nbytes
            weakref.finalize(taken.base, alive.pop, number)
            peak = max(peak, sum(alive.copy().values()))
        return taken

    numbers: list[int] = []
    monkeypatch.setattr(FloatBuffers, "take", counted)
    monkeypatch.setattr(shared_scans, "GRACE_SECONDS", 10.0)
    for room in 2, 4, 8:
        loader = loader_of(ds, batch_size=10, budget=few(room))
        for _ in range(3):
            for _ in loader:
                pass
        assert 0 < peak <= loader.budget.batches
        assert loader.times()["sum"]["items"] < 90
        del _
        gc.collect()
        assert not alive


def stopped(memory: FloatBuffers) -> None:
    with pytest.raises(Stopped):
        memory.take((1, 1), 4)


def test_two_buffers_serve_an_epoch_and_a_consumer_that_keeps_them_gets_more() -> None:
    memory = FloatBuffers(2)
    first, second = memory.take((5, 4), 0), memory.take((5, 4), 1)
    first[:], second[:] = 1, 2
    part, got = first[4:], []
    del first
    third = threading.Thread(target=lambda: got.append(memory.take((3, 4), 2)))
    third.start()
    third.join(0.1)
    assert third.is_alive()  # a part of it is in use still
    address = part.ctypes.data - (3 + 1) * 16
    del part
    third.join(10)
    assert got[0].ctypes.data == address
    memory.request(3)
    fourth = memory.take((5, 4), 3)
    fourth[:] = 3
    assert (second == 2).all()
    last = threading.Thread(target=lambda: stopped(memory))
    last.start()
    memory.close()
    last.join(10)
    assert not last.is_alive()
    with pytest.raises(Stopped):
        memory.take((2, 1), 0)


def test_copies_are_used_again_and_a_consumer_that_keeps_them_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_scans, "GRACE_SECONDS", 10.0)
    copies = FloatBuffers(2)
    first, second = copies.take((3, 4)), copies.take((3, 4))
    first[:], second[:], address, got = 1, 2, first.ctypes.data, []
    third = threading.Thread(target=lambda: got.append(copies.take((3, 4))))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    del first
    third.join(10)
    assert got[0].ctypes.data == address
    monkeypatch.setattr(shared_scans, "GRACE_SECONDS", 0.01)
    more = [copies.take((3, 4)) for _ in range(3)]
    assert len({each.ctypes.data for each in (*got, second, *more)}) == 5
    assert (second == 2).all()


def test_a_sweeps_first_batch_needs_no_copy_and_two_at_a_time_are_alive(
    path: Any, ds: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = FloatBuffers.take

    def counted(self: Any, shape: Any, turn: int | None = None) -> Any:
        taken.extend(shape[:1] if turn is None else [])
        return take(self, shape, turn)

    monkeypatch.setattr(FloatBuffers, "take", counted)
    loader = loader_of(ds, budget=few(4))
    got = outcome(loader)
    assert same(got, in_memory(path))
    assert 0 < len(taken) == 30 - loader.times()["sum"]["items"]


def test_two_loaders_at_once_share_the_memory(path: Any, ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    chained = shared_scans.chained
    monkeypatch.setattr(shared_scans, "chained", lambda session, *a: (pools.append(session.pool), chained(session, *a))[1])
    room = few(12)
    one, other = loader_of(ds, budget=room), loader_of(ds, seed=4, fanout=[2, 2], budget=room)
    got = list(zip(one, other, strict=True))
    assert pools == [room.batches, room.batches // SECOND_SHARE]
    assert same([a for a, _ in got], in_memory(path)[0][:15])
    assert same([b for _, b in got], in_memory(path, seed=4, fanout=[2, 2])[0][:15])
    assert same(list(loader_of(ds, split_seeds=True)), in_memory(path, split_seeds=True)[0][:15])  # evaluation after training
    assert pools[2] == few().batches


@pytest.mark.parametrize("edges_on_disk", [False, True])
def test_a_batch_that_only_fits_all_the_memory_is_refused_or_halved_beside_another_loader(
    ds: Dataset, monkeypatch: pytest.MonkeyPatch, edges_on_disk: bool
) -> None:
    if edges_on_disk:
        monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
    room = few(3)
    assert len(list(loader_of(ds, budget=room))) == 15
    first = iter(loader_of(ds, budget=room))
    next(first)
    with pytest.raises(BudgetError, match=r"20 seeds needs .* of 80 kB \(beside another loader .* a quarter of what 1 GB"):
        list(loader_of(ds, budget=room))
    assert 15 < len(list(loader_of(ds, budget=room, split_seeds=True))) <= 30
    first.close()


def test_a_loader_of_rows_beside_one_of_sums_shares_the_memory_too(ds: Dataset) -> None:
    registry = registry_of(ds.stored("x"))
    sums, rows = iter(loader_of(ds)), iter(NeighborLoader(ds, [2, 2], batch_size=20, budget=few()))
    next(sums), next(rows)
    assert [reader.cache for reader in registry._readers] == [None]  # the rows' pipeline has a smaller cache of its own
    sums.close(), rows.close()
    rows = iter(NeighborLoader(ds, [2, 2], batch_size=20, budget=few()))
    next(rows)
    second = registry.begin_scans()
    assert not second.alone  # and a sweep would have to do with less
    second.end()
    rows.close()
    first = registry.begin_scans()
    assert first.alone
    first.end()


def test_a_sweep_that_an_interrupt_took_from_its_owner_stands_in_nobodys_way() -> None:
    registry = CacheRegistry()
    registry.begin_scans()
    assert registry.begin_scans().alone

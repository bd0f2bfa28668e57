"""Sweeps: the memory that sums take, and two pipelines that share it."""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from ooc.graph.aggregation import FirstLayerAggregates
from ooc.loading import scan_memory, shared_pass
from ooc.loading.feature_cache import CacheRegistry, Stopped, registry_of
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.scan_memory import BLOCK_BYTES, RowCopies, ScanMemory
from ooc.runtime.memory_plan import SECOND_SHARE
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.ooc.loading.shared_pass.scanning import E, N, budget, few, in_memory, loader_of, outcome
from tests.waiting import eventually


def test_batches_that_are_kept_neither_hang_nor_change(path: Any, ds: Dataset) -> None:
    loader = loader_of(ds, budget=few(1))
    kept = list(loader)
    assert loader.times()["sum"]["items"] > 4
    copies = [FirstLayerAggregates(batch.x.neighbor.clone(), batch.x.self_row.clone()) for batch in kept]
    outcome(loader)
    assert same([batch.x for batch in kept], copies)
    assert same(kept, in_memory(path)[0][:15])


@pytest.mark.cases(1)
@pytest.mark.parametrize("fanout", [[4, 3], [-1, -1]])
def test_rows_alive_stay_within_the_budget(
    path: Any, monkeypatch: pytest.MonkeyPatch, fanout: list[int], tmp_path: Any
) -> None:
    """What a scan has filled, and has not given back, of all that are alive; wide rows, whose blocks are given back."""
    x = np.random.default_rng(0).standard_normal((N, 2048), dtype=np.float32)
    store = write_store(tmp_path / "wide.ooc", Graph.from_edges(*random_edges(N, E), N), x=x)
    alive: list[Any] = []
    peak, rolled, fill, take = 0, 0, ScanMemory.fill, ScanMemory.take

    def note() -> None:
        nonlocal peak
        rows = [each for each in (ref() for ref in alive) if each is not None]
        peak = max(peak, sum(each.taken.sums + each.taken.self_rows for each in rows))

    def filled(self: Any, rows: Any, nbytes: int, most: int) -> None:
        nonlocal rolled
        fill(self, rows, nbytes, most)
        rolled += 1
        assert nbytes <= rows.self_rows.nbytes
        note()

    def taken(self: Any, *a: Any) -> Any:
        rows = take(self, *a)
        alive.append(weakref.ref(rows))
        note()
        return rows

    monkeypatch.setattr(ScanMemory, "fill", filled)
    monkeypatch.setattr(ScanMemory, "take", taken)
    with Dataset.open(store) as ds:
        want = outcome(loader_of(ds, fanout=fanout, batch_size=10, budget=budget(10**9)), 1)
        monkeypatch.setattr(scan_memory, "GRACE_SECONDS", 10.0)
        for room in 12 * 10**6, 20 * 10**6:
            alive.clear()  # those of batches that are kept to compare with
            peak = rolled = 0
            loader = loader_of(ds, fanout=fanout, batch_size=10, budget=budget(room))
            got = [clone(batch) for batch in loader]
            assert same(got, want[0])
            assert 0 < peak <= room
            assert rolled > 1
            assert loader.times()["sum"]["items"] < 10
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]


def clone(batch: Any) -> Any:
    """A copy that shares no memory with the batch."""
    batch.x = FirstLayerAggregates(batch.x.neighbor.clone(), batch.x.self_row.clone())
    return batch


def stopped(take: Any) -> None:
    with pytest.raises(Stopped):
        take()


def test_two_scans_are_in_memory_and_a_consumer_that_keeps_them_gets_more() -> None:
    memory, shape, ends = ScanMemory(), (5, 2, 4), np.array([2, 5])
    first, second = memory.take(shape, ends, 0), memory.take(shape, ends, 1)
    assert not first.neighbor.any()
    first.neighbor[:], second.neighbor[:] = 1, 2
    part, got = first.part(0, slice(0, 2)), []
    del first
    third = threading.Thread(target=lambda: got.append(memory.take(shape, ends, 2)))
    third.start()
    third.join(0.1)
    assert third.is_alive()  # a part of it is in use still
    assert (part == 1).all()
    del part
    third.join(10)
    assert not got[0].neighbor.any()
    memory.request(3)
    fourth = memory.take(shape, ends, 3)
    fourth.neighbor[:] = 3
    assert (second.neighbor == 2).all()
    last = threading.Thread(target=lambda: stopped(lambda: memory.take(shape, ends, 4)))
    last.start()
    memory.close()
    last.join(10)
    assert not last.is_alive()
    stopped(lambda: memory.take(shape, ends, 0))
    stopped(lambda: memory.fill(fourth, 1, 0))


def test_aggregates_are_given_back_in_the_order_of_batches_for_own_rows_of_the_next_scan() -> None:
    width = BLOCK_BYTES // 4
    memory, ends = ScanMemory(), np.array([2, 3, 6])
    first = memory.take((6, 1, width), ends, 0, True)
    first.neighbor[:] = 1
    memory.fill(first, BLOCK_BYTES, 10**12)
    second = memory.take((6, 3, width), ends, 1, True)
    own, done = [], []

    def fill() -> None:
        for count in 1, 2, 3:
            memory.fill(second, count * BLOCK_BYTES, 14 * BLOCK_BYTES)
            done.append(count)

    thread = threading.Thread(target=fill)
    thread.start()
    own = [first.part(k, slice(a, b)) for k, (a, b) in enumerate([(0, 2), (2, 3), (3, 6)])]
    assert eventually(lambda: done == [1])
    begin = (-first.neighbor.ctypes.data) % BLOCK_BYTES  # parts of blocks stay
    own[1] = None
    assert (first.neighbor[2:] == 1).all()
    assert done == [1]  # batch 0 is not through
    own[0] = None
    assert eventually(lambda: done == ([1, 2, 3] if begin == 0 else [1, 2, 3][: len(done)]) and len(done) >= 2)
    assert not first.neighbor.reshape(-1)[: (2 * BLOCK_BYTES - BLOCK_BYTES) // 4].any()
    assert (own[2] == 1).all()
    own[2] = None
    del first
    thread.join(10)
    assert done == [1, 2, 3]
    memory.close()


def test_copies_are_used_again_and_a_consumer_that_keeps_them_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_memory, "GRACE_SECONDS", 10.0)
    copies = RowCopies(2)
    first, second = copies.take((3, 4)), copies.take((3, 4))
    first[:], second[:], address, got = 1, 2, first.ctypes.data, []
    third = threading.Thread(target=lambda: got.append(copies.take((3, 4))))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    del first
    third.join(10)
    assert got[0].ctypes.data == address
    monkeypatch.setattr(scan_memory, "GRACE_SECONDS", 0.01)
    more = [copies.take((3, 4)) for _ in range(3)]
    assert len({each.ctypes.data for each in (*got, second, *more)}) == 5
    assert (second == 2).all()


def test_the_first_batch_of_a_small_scan_needs_no_copy(path: Any, ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own rows of small scans are in the batches' order, of others in file order."""
    taken: list[int] = []
    take = RowCopies.take

    def counted(self: Any, shape: Any) -> Any:
        taken.extend(shape[:1])
        return take(self, shape)

    monkeypatch.setattr(RowCopies, "take", counted)
    for room, small in (200_000, True), (10**6, False):
        taken.clear()
        loader = loader_of(ds, budget=budget(room))
        got = outcome(loader)
        assert same(got, in_memory(path))
        assert 0 < len(taken) == 30 - (loader.times()["sum"]["items"] if small else 0)


def test_two_loaders_at_once_share_the_memory(path: Any, ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    chained = shared_pass.chained
    monkeypatch.setattr(shared_pass, "chained", lambda session, *a: (pools.append(session.pool), chained(session, *a))[1])
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

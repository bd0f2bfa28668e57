"""Rows in memory: the planner's laws against plain sets, the pool against a set of numbers."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.loading.feature_cache import CachedNodes, RowCache, Stopped, registry_of
from ooc.stores.arrays.rows import ArrayRows

nodes = st.sets(st.integers(0, 30), max_size=12)


def ascending(values):
    return np.array(sorted(values), np.int32)


@settings(deadline=None)
@given(st.lists(st.tuples(nodes, st.integers(0, 10)), max_size=8))
def test_what_lies_in_memory_is_what_sets_say(windows):
    residents, held, before, place = CachedNodes.none(), set(), set(), {}
    for number, (window, room) in enumerate(windows):
        node, limit = ascending(window), len(window) + room
        old = residents
        residents, change = old.take(node, np.ones(len(node), np.float32), limit, ascending(before))
        new, evicted = window - held, set(change.evicted.tolist())
        assert {n for n, at in zip(node.tolist(), change.carried.tolist(), strict=True) if at < 0} == new
        assert all(old.node[at] == n for n, at in zip(node, change.carried, strict=True) if at >= 0)
        assert evicted <= held - window
        assert len(evicted) == max(0, len(held | window) - limit)
        assert {int(old.node[at]) for at in change.idle} == evicted - before
        held = (held | window) - evicted
        assert residents.node.tolist() == sorted(held)
        assert len(held) <= limit
        place = {n: place.get(n, number) for n in held}  # the window each was read in
        moved = [int(old.node[at]) if at >= 0 else int(node[~at]) for at in change.source]
        assert moved == residents.node.tolist()
        before = window


def test_the_coldest_go_first():
    residents = CachedNodes.none()
    none = np.empty(0, np.int32)
    residents, _ = residents.take(ascending({1, 2, 3}), np.array([5, 1, 3], np.float32), 10, none)
    _, change = residents.take(ascending({4, 5}), np.ones(2, np.float32), 3, none)
    assert change.evicted.tolist() == [2, 3]


def test_uses_fade_with_the_windows():
    residents, none = CachedNodes.none(), np.empty(0, np.int32)
    residents, _ = residents.take(ascending({1}), np.array([3], np.float32), 10, none)
    for _ in range(3):
        residents, _ = residents.take(ascending({2}), np.ones(1, np.float32), 10, none)
    _, change = residents.take(ascending({3}), np.ones(1, np.float32), 2, none)
    assert change.evicted.tolist() == [1]


def test_slots_are_distinct_and_come_back():
    pool = RowCache(10, (2,), np.dtype(np.float32))
    one, other = pool.take(4, 4, 10), pool.take(1, 20, 9)
    assert (len(one), len(other), pool.used) == (4, 5, 9)
    assert len({*one.tolist(), *other.tolist()}) == 9
    pool.give(one)
    assert sorted(pool.take(4, 4, 9).tolist()) == sorted(one.tolist())


def test_whoever_waits_for_slots_gets_them_or_learns_of_the_end():
    pool = RowCache(4, (), np.dtype(np.int64))
    held, got = pool.take(4, 4, 4), []

    def take():
        try:
            while True:
                got.append(pool.take(3, 3, 4))
        except Stopped:
            got.append(None)

    thread = threading.Thread(target=take)
    thread.start()
    pool.give(held[:1])
    pool.give(held[1:3])
    pool.close()
    thread.join(10)
    assert not thread.is_alive()
    assert got[-1] is None
    with pytest.raises(Stopped):
        pool.take(0, 0, 4)
    pool.open()
    assert len(pool.take(0, 0, 4)) == 0


def test_a_shelf_lends_its_cache_once_at_a_time():
    rows = ArrayRows(np.zeros((9, 2), np.float32))
    registry = registry_of(rows)
    lease = registry.lend(5, rows)
    assert registry.lend(5, rows) is None
    slot = lease.cache.take(2, 2, 5)
    residents, _ = CachedNodes.none().take(ascending({3, 8}), np.ones(2, np.float32), 5, np.empty(0, np.int32))
    lease.end(residents, slot)
    again = registry_of(rows).lend(5, rows)
    assert again.cache is lease.cache
    assert again.cache.residents.node.tolist() == [3, 8]
    again.end(None, slot)
    assert again.cache.used == 0
    assert len(registry.lend(6, rows).cache.rows) == 6


def test_the_next_pipeline_waits_for_one_that_stops():
    rows = ArrayRows(np.zeros((9, 2), np.float32))
    registry = registry_of(rows)
    lease = registry.lend(5, rows)
    lease.stop()
    assert registry.lend(5, rows) is None  # its batches may still be asked for
    lease.stopping = True
    ending = threading.Timer(0.2, lease.end, (None, np.empty(0, np.int32)))
    ending.start()
    again = registry.lend(5, rows)
    assert again is not None
    assert not ending.is_alive() or lease._over
    lease.stop()  # another's by now
    assert len(again.cache.take(1, 1, 5)) == 1

"""Feature rows in memory, between superbatches and between epochs: which slots they are in, and which of them are evicted.

Decisions are made ahead, while superbatches are planned (`CachedNodes`, pure); reading only carries them out. So which rows are
read is a function of the batches and the budget, never of timing.
"""

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.clock import waiting
from stores.arrays.rows import AnyArray, Rows
from stores.jit import kernel

Slots = NDArray[np.int32]
STOPPING_SECONDS = 60.0
"""that the next pipeline waits for one that is stopping, which ends the reads under way first"""
_AGE = np.float32(0.5)
"""what a row's uses still count after one more superbatch"""


class Stopped(Exception):
    """Somebody waited for memory of a pipeline that was closed; only a pipeline's threads ever see it."""


class RowPool:
    """One buffer of row slots, taken and given back in any order by any thread.

    rows: [count, *row shape] of dtype, as they are on disk: what is stored in fewer bits leaves room for more rows. Memory that
    no row was ever put into costs nothing, and the slots last given back are the first to be taken again, so what the process
    holds is the most slots that were ever in use.

    >>> pool = RowPool(4, (2,), np.dtype(np.float32))
    >>> slot = pool.take(least=1, most=3, limit=4)
    >>> pool.give(slot)
    """

    def __init__(self, count: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.rows: AnyArray = np.empty((count, *row_shape), dtype)
        self._free = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._left = count  # free[:left] are the free slots
        self._closed = False
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Slots in use."""
        return len(self._free) - self._left

    def take(self, least: int, most: int, limit: int) -> Slots:
        """int32[n], least <= n <= most: as many slots as there are while no more than `limit` are in use. Waits for `least`.

        Raises Stopped where the pool is or gets closed.
        """
        limit = min(limit, len(self._free))
        if least > limit:
            raise ValueError(f"{least} slots of {limit}: nobody could ever give so many")
        with self._changed:
            with waiting():
                self._changed.wait_for(lambda: self._closed or self.used + least <= limit)
            if self._closed:
                raise Stopped
            n = min(most, limit - self.used)
            self._left -= n
            return self._free[self._left : self._left + n][::-1].copy()

    def clear(self) -> None:
        """All slots are free again, whoever left them taken."""
        with self._changed:
            self._free[:] = np.arange(len(self._free) - 1, -1, -1, dtype=np.int32)
            self._left = len(self._free)

    def give(self, slot: Slots) -> None:
        """Give slots (int32[n], distinct, in use) back."""
        with self._changed:
            self._free[self._left : self._left + len(slot)] = slot[::-1]
            self._left += len(slot)
            self._changed.notify_all()

    def open(self) -> None:
        """Let slots be taken again after `close`."""
        with self._changed:
            self._closed = False

    def close(self) -> None:
        """End all waiting, now and later; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class CacheChange:
    """What one superbatch does to the rows in memory."""

    carried: NDArray[np.int32]
    """int32[u]: positions of the superbatch's rows among the rows in memory before it, -1 where they are read"""
    evicted: NDArray[Any]
    """nodes evicted for it, ascending"""
    idle: NDArray[np.int32]
    """positions, among the rows in memory before, of those that the superbatch before does not use: evicted at once"""
    source: NDArray[np.int32]
    """where the rows in memory afterwards come from: position p before, or ~r for row r of the superbatch"""


@dataclass(frozen=True)
class CachedNodes:
    """PURE: the nodes whose rows are in memory once the superbatches so far are read.

    A superbatch may evict what it does not need itself, the least used of late first. (With only the next superbatch known,
    Belady's rule keeps what that one needs; how often a row was used, halved with every superbatch, stands for the rest.)

    >>> residents, change = CachedNodes.none().take(np.array([3, 7]), np.ones(2, np.float32), limit=2, before=np.empty(0, int))
    >>> residents.take(np.array([5, 7]), np.ones(2, np.float32), limit=2, before=np.array([3, 7]))[1].evicted
    array([3])
    """

    node: NDArray[Any]
    """[r], ascending; int32 where that is enough"""
    recent_uses: NDArray[np.float32]

    @classmethod
    def none(cls) -> "CachedNodes":
        """Nothing in memory yet."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32))

    def take(
        self, node: NDArray[Any], uses: NDArray[np.float32], limit: int, before: NDArray[Any]
    ) -> tuple["CachedNodes", CacheChange]:
        """The rows in memory with a superbatch's, and what changes for them.

        node: [u], the superbatch's, ascending; uses: float32[u], batches that use each; limit: rows in memory at most,
        u or more; before: the nodes of the superbatch before, ascending, whose rows go one by one.
        """
        carried, wanted = np.empty(len(node), np.int32), np.empty(len(self.node), np.int32)
        shared = int(shared_rows(node, self.node, carried))
        shared_rows(self.node, node, wanted)
        out = self._coldest(wanted < 0, len(self.node) + len(node) - shared - limit)
        evicted = self.node[out]
        used_before = np.empty(len(evicted), np.int32)
        shared_rows(evicted, before, used_before)
        recent_uses = self.recent_uses * _AGE
        recent_uses[wanted >= 0] += uses[wanted[wanted >= 0]]
        keep = np.ones(len(self.node), bool)
        keep[out] = False
        stay, new = np.flatnonzero(keep).astype(np.int32), np.flatnonzero(carried < 0).astype(np.int32)
        merged = np.concatenate([self.node[stay], node[new]])
        order = np.argsort(merged, kind="stable")  # two ascending runs
        change = CacheChange(carried, evicted, out[used_before < 0], np.concatenate([stay, ~new])[order])
        return CachedNodes(merged[order], np.concatenate([recent_uses[stay], uses[new]])[order]), change

    def _coldest(self, may_go: NDArray[np.bool_], count: int) -> NDArray[np.int32]:
        """int32[max(0, count)], ascending: positions of so many rows that may go, the coldest."""
        if count <= 0:
            return np.empty(0, np.int32)
        candidates = np.flatnonzero(may_go).astype(np.int32)
        assert count <= len(candidates), "a superbatch must fit the limit"
        if count == len(candidates):
            return candidates
        return np.sort(candidates[np.argsort(self.recent_uses[candidates], kind="stable")[:count]])


@dataclass
class RowCache:
    """The pool with what is in it; lives as long as the data set, lent to one pipeline at a time."""

    pool: RowPool
    residents: CachedNodes = field(default_factory=CachedNodes.none)
    slot: Slots = field(default_factory=lambda: np.empty(0, np.int32))
    """int32[r]: where the rows of `residents` are"""

    def clear(self) -> None:
        """Forget all rows, whoever left slots taken."""
        self.residents, self.slot = CachedNodes.none(), np.empty(0, np.int32)
        self.pool.clear()


class CacheLease:
    """A cache in the hands of one pipeline. registry: where it goes back to, None for a cache that nobody else is to have."""

    def __init__(self, cache: RowCache, registry: "CacheRegistry | None") -> None:
        self.cache = cache
        self._registry = registry
        self._over = False
        self._lock = threading.RLock()  # `stop` may come from a collection, in the middle of anything
        self.stopping = False
        """whether the cache is about to come back"""

    def stop(self) -> None:
        """End all waiting for slots; nothing once the lease is over, when the cache may be another's."""
        with self._lock:
            self.stopping = True
            if not self._over:
                self.cache.pool.close()

    def end(self, residents: CachedNodes | None, slot: Slots) -> None:
        """Give the cache back with what is in it; None: nobody knows (the pipeline was stopped halfway). Once: later it
        may be another's."""
        with self._lock:
            if self._over:
                return
            self._over = True
        if residents is None:
            self.cache.clear()
        else:
            self.cache.residents, self.cache.slot = residents, slot
        if self._registry is not None:
            self._registry.put()


class ScanLease:
    """A reader that keeps no rows (`ooc.loading.shared_scan`), as long as it goes on. alone: whether nobody else read them
    when it began."""

    def __init__(self, registry: "CacheRegistry", alone: bool) -> None:
        self._registry, self.alone = registry, alone
        self.stopping = False
        """whether it is about to end"""

    def stop(self) -> None:
        """Whoever comes now waits for the end, rather than do with less memory."""
        self.stopping = True

    def end(self) -> None:
        """It has ended; idempotent."""
        self._registry.leave(self)


class CacheRegistry:
    """Where the rows' cache waits for the next pipeline over the same rows; and who reads those rows now.

    The first pipeline has the memory of all; one that begins meanwhile must do with less, whichever way they read.
    """

    def __init__(self) -> None:
        self._scans: weakref.WeakSet[ScanLease] = weakref.WeakSet()  # one that an interrupt took from its owner is none
        self._cache: RowCache | None = None
        self._lease: CacheLease | None = None
        self._changed = threading.Condition()

    def lend(self, count: int, rows: Rows) -> CacheLease | None:
        """The cache, of `count` slots; None while another pipeline reads. Waits for those that are stopping."""
        with self._changed:
            self._changed.wait_for(self._settled, STOPPING_SECONDS)
            if self._lease is not None or self._scans:
                return None
            if self._cache is None or len(self._cache.pool.rows) != count:
                self._cache = None  # before the next one is made
                self._cache = RowCache(RowPool(count, rows.shape[1:], rows.dtype))
            self._cache.pool.open()
            self._lease = CacheLease(self._cache, self)
            return self._lease

    def begin_scans(self) -> ScanLease:
        """A reader begins that keeps no rows: those that wait here go. Waits for those that are stopping."""
        with self._changed:
            self._changed.wait_for(self._settled, STOPPING_SECONDS)
            begun = ScanLease(self, self._lease is None and not self._scans)
            self._cache = None if self._lease is None else self._cache
            self._scans.add(begun)
            return begun

    def leave(self, lease: ScanLease) -> None:
        """One that began has ended."""
        with self._changed:
            self._scans.discard(lease)
            self._changed.notify_all()

    def _settled(self) -> bool:
        """Whether nobody is about to end: how much memory the next one has must not depend on when that is."""
        return not any(each.stopping for each in (self._lease, *self._scans) if each is not None)

    def put(self) -> None:
        """Take the cache back."""
        with self._changed:
            self._lease = None
            self._changed.notify_all()


_registries: "weakref.WeakKeyDictionary[Rows, CacheRegistry]" = weakref.WeakKeyDictionary()
_registries_lock = threading.Lock()


def own_cache(count: int, rows: Rows) -> CacheLease:
    """A cache that goes with its pipeline."""
    return CacheLease(RowCache(RowPool(count, rows.shape[1:], rows.dtype)), None)


def registry_of(rows: Rows) -> CacheRegistry:
    """The registry of these rows, the same for all loaders over them; it goes with them."""
    with _registries_lock:
        return _registries.setdefault(rows, CacheRegistry())


@kernel
def shared_rows(one: NDArray[Any], other: NDArray[Any], found: NDArray[np.int32]) -> int:
    """found[i]: where one[i] stands in `other`, -1 where it does not; both ascend. Returns how many do."""
    at = count = 0
    for i in range(len(one)):
        while at < len(other) and other[at] < one[i]:
            at += 1
        found[i] = -1
        if at < len(other) and other[at] == one[i]:
            found[i] = at
            count += 1
    return count

"""Feature rows in memory, between superbatches and between epochs: which slots they are in, and which of them are evicted.

Decisions are made ahead, while superbatches are planned (`CachedNodes`, pure); reading only carries them out. So which rows are
read is a function of the batches and the budget, never of timing.
"""

import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.clock import waiting
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows, check_request
from ooc.stores.jit import kernel

Slots = NDArray[np.int32]
STOPPING_SECONDS = 60.0
"""that the next pipeline waits for one that is stopping, which ends the reads under way first"""
_AGE = np.float32(0.5)
"""what a row's uses still count after one more superbatch"""


class Stopped(Exception):
    """Somebody waited for memory of a pipeline that was closed; only a pipeline's threads ever see it."""


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
    """

    node: NDArray[Any]
    """[r], ascending; int32 where that is enough"""
    recent_uses: NDArray[np.float32]

    @classmethod
    def none(cls) -> "CachedNodes":
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

    def missing(self, node: NDArray[Any]) -> NDArray[np.int64]:
        """int64: those of `node` (ascending) whose rows are not in memory, ascending."""
        found = np.empty(len(node), np.int32)
        shared_rows(node, self.node, found)
        return node[found < 0].astype(np.int64)

    def _coldest(self, may_go: NDArray[np.bool_], count: int) -> NDArray[np.int32]:
        """int32[max(0, count)], ascending: positions of so many rows that may go, the coldest."""
        if count <= 0:
            return np.empty(0, np.int32)
        candidates = np.flatnonzero(may_go).astype(np.int32)
        assert count <= len(candidates), "a superbatch must fit the limit"
        if count == len(candidates):
            return candidates
        return np.sort(candidates[np.argsort(self.recent_uses[candidates], kind="stable")[:count]])


class RowCache:
    """One buffer of row slots, taken and given back in any order by any thread, and what is known to be in it.

    rows: [count, *row shape] of dtype, as they are on disk: what is stored in fewer bits leaves room for more rows. Memory that
    no row was ever put into costs nothing, and the slots last given back are the first to be taken again, so what the process
    holds is the most slots that were ever in use.
    """

    def __init__(self, count: int, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.rows: AnyArray = np.empty((count, *row_shape), dtype)
        self._free = np.empty(count, np.int32)
        self._closed = False
        self._changed = threading.Condition()
        self.clear()

    @property
    def used(self) -> int:
        return len(self._free) - self._left

    def take(self, least: int, most: int, limit: int) -> Slots:
        """int32[n], least <= n <= most: as many slots as there are while no more than `limit` are in use. Waits for `least`.

        Raises Stopped where the cache is or gets closed.
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

    def give(self, slot: Slots) -> None:
        """Give slots (int32[n], distinct, in use) back."""
        with self._changed:
            self._free[self._left : self._left + len(slot)] = slot[::-1]
            self._left += len(slot)
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all rows: all slots are free again, whoever left them taken."""
        with self._changed:
            self.residents, self.slot = CachedNodes.none(), np.empty(0, np.int32)  # int32[r]: where the rows of those are
            self._free[:] = np.arange(len(self._free) - 1, -1, -1, dtype=np.int32)
            self._left = len(self._free)  # free[:left] are the free slots

    def open(self) -> None:
        """Let slots be taken again after `close`."""
        with self._changed:
            self._closed = False

    def close(self) -> None:
        """End all waiting, now and later; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class CachedRows:
    """The rows of a cache that has all there are, as `Rows`; nothing is read from disk."""

    def __init__(self, cache: RowCache) -> None:
        self._cached, self._slot = ArrayRows(cache.rows), cache.slot
        self.shape, self.dtype = (len(cache.slot), *cache.rows.shape[1:]), cache.rows.dtype

    @property
    def row_bytes(self) -> int:
        return self._cached.row_bytes

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """See `Rows.read`."""
        check_request(self, ids, out, at)
        return self._cached.read(self._slot[ids].astype(np.int64), out, at)

    def submit(self, ids: Ids, out: AnyArray) -> Future[int]:
        """See `Rows.submit`."""
        check_request(self, ids, out, None)
        return self._cached.submit(self._slot[ids].astype(np.int64), out)

    def close(self) -> None:
        """Do nothing: the memory is the cache's."""


class RowLease:
    """One pipeline's reading of the rows. cache: where rows stay, None for shared scans (`ooc.loading.shared_scan`), which keep
    none; registry: None for a cache that nobody else is to have; alone: whether nobody else read the rows when it began."""

    def __init__(self, cache: RowCache | None, registry: "CacheRegistry | None", alone: bool) -> None:
        self.cache, self.alone = cache, alone
        self._registry = registry
        self._over = False
        self._lock = threading.RLock()  # `stop` may come from a collection, in the middle of anything
        self.stopping = False
        """whether it is about to end, so that the next pipeline waits for its memory; False as long as a consumer may ask for
        batches, because that may take any time"""

    def stop(self) -> None:
        """End all waiting for slots; nothing once the lease is over, when the cache may be another's."""
        with self._lock:
            if self.cache is not None and not self._over:
                self.cache.close()

    def end(self, residents: CachedNodes | None = None, slot: Slots | None = None) -> None:
        """Give the cache back with what is in it; None: nobody knows (the pipeline was stopped halfway). Once: later it
        may be another's."""
        with self._lock:
            if self._over:
                return
            self._over = True
        if self.cache is not None and residents is not None and slot is not None:
            self.cache.residents, self.cache.slot = residents, slot
        elif self.cache is not None:
            self.cache.clear()
        if self._registry is not None:
            self._registry.leave(self)


class CacheRegistry:
    """Where the rows' cache waits for the next pipeline over the same rows; and who reads those rows now.

    The first pipeline has the memory of all; one that begins meanwhile must do with less, whichever way they read.
    """

    def __init__(self) -> None:
        self._readers: weakref.WeakSet[RowLease] = weakref.WeakSet()  # one that an interrupt took from its owner is none
        self._cache: RowCache | None = None
        self._lent = False
        self._changed = threading.Condition()

    def lend(self, count: int, rows: Rows) -> RowLease | None:
        """The cache, of `count` slots; None while another pipeline reads. Waits for those that are stopping."""
        with self._changed:
            self._settle()
            if self._readers:
                return None
            if self._cache is None or self._lent or len(self._cache.rows) != count:  # lent: and it never came back
                self._cache = None  # before the next one is made
                self._cache = RowCache(count, rows.shape[1:], rows.dtype)
            self._cache.open()
            self._lent = True
            return self._begun(self._cache)

    def begin_scans(self, spare: int = 0) -> RowLease:
        """A reader begins that keeps no rows: those that wait here go, unless their memory is `spare` bytes at most. Waits for
        those that are stopping."""
        with self._changed:
            self._settle()
            if not self._lent and self._cache is not None and self._cache.rows.nbytes > spare:
                self._cache = None
            return self._begun(None)

    def whole(self, count: int) -> "CachedRows | None":
        """All rows, `count`, where they wait in memory; good until the cache is lent again."""
        with self._changed:
            cache = None if self._lent else self._cache
            if cache is None or len(cache.slot) < count or (cache.slot < 0).any():
                return None
            return CachedRows(cache)

    def _begun(self, cache: RowCache | None) -> RowLease:
        lease = RowLease(cache, self, not self._readers)
        self._readers.add(lease)
        return lease

    def leave(self, lease: RowLease) -> None:
        with self._changed:
            self._readers.discard(lease)
            self._lent = self._lent and lease.cache is None
            self._changed.notify_all()

    def _settle(self) -> None:
        """Wait for those that are about to end: how much memory the next one has must not depend on when that is."""
        self._changed.wait_for(lambda: not any(each.stopping for each in self._readers), STOPPING_SECONDS)


_registries: "weakref.WeakKeyDictionary[Rows, CacheRegistry]" = weakref.WeakKeyDictionary()
_registries_lock = threading.Lock()


def own_cache(count: int, rows: Rows) -> RowLease:
    """A cache that goes with its pipeline."""
    return RowLease(RowCache(count, rows.shape[1:], rows.dtype), None, alone=False)


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

"""Superbatches (`ooc.loading.superbatch_plan`) carried out: each row read once, in file order, for all batches that want it.

All superbatches share one buffer (`ooc.loading.feature_cache`): while the batches of one are gathered its rows make room, row
by row, for those of the next, so each may fill nearly all of it, where two buffers in turn would have half each. Batches are
the same as read one by one.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.loading.batch_bytes import BatchSize
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import CachedNodes, RowLease, Slots, own_cache, registry_of
from ooc.loading.host_passes import HostPasses
from ooc.loading.load_stage import BatchArray, LoadStage
from ooc.loading.read_strategy import (
    ReadGroup,
    ReadSession,
    ReadStrategy,
    ServedBatch,
    chained,
    clocks_of,
    first_alone,
    read_all_or_each,
)
from ooc.loading.row_changes import RowChanges, UsedRows
from ooc.loading.superbatch_plan import Superbatch, SuperbatchPlanner
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import SECOND_SHARE, MemoryPlan
from ooc.runtime.pipeline import Pipeline
from ooc.stores.arrays.rows import AnyArray, Rows

PIECE_ROWS = 2**15, 2**18
"""Rows of one read, where memory makes room for fewer or more; the latter bounds what planning takes to about 16 MB"""


@dataclass(frozen=True)
class FilledSuperbatch(ReadGroup):
    """A superbatch that was read."""

    superbatch: Superbatch
    arrays: tuple["FilledRows", ...]


class FilledRows(NamedTuple):
    """Where the rows of one array are."""

    slot: Slots
    """int32[u]: in the array's cache, valid for the first `done` batches; -1 for a row that could not be read, which none of
    these uses"""
    idle: Slots
    """slots to give back before the first batch"""


@dataclass(frozen=True)
class Superbatches(ReadStrategy):
    """Rows of as many batches as memory holds are read together, and stay in memory while they may be needed again."""

    memory: BatchSize

    def planner(self, pool: int, residents: Sequence[CachedNodes] | None = None) -> SuperbatchPlanner:
        """Groups batches. pool: bytes for all that is alive; residents: of each array, what is in memory before."""
        kept = [CachedNodes.none()] * len(self.stages.disk_arrays) if residents is None else residents
        return SuperbatchPlanner(self.stages, self.memory, pool, tuple(kept))

    def cache_bytes(self, budget: MemoryPlan) -> int:
        """See `ReadStrategy`."""
        pool = self.pool(budget)
        pools = self._pools(self.planner(pool), pool)
        return sum(_slots(each.rows, own) * each.rows.row_bytes for each, own in pools if each.rows is self.disk_rows)

    def _pools(self, planner: SuperbatchPlanner, pool: int) -> list[tuple[BatchArray, int]]:
        """Each array with the bytes of its cache at most, of `pool` bytes for all."""
        # A batch may have more of one array than that array's share.
        spare = self.memory.max_bytes if len(planner.arrays) > 1 else 0
        return [(array, int(pool * share) + spare) for array, share in zip(planner.arrays, planner.shares, strict=True)]

    def pipeline(self, cursors: Iterator[Cursor], budget: MemoryPlan, prefetch: int, clocks: dict[str, Clock]) -> Pipeline:
        own = clocks_of(clocks, ("sample", "group", "read", "collate"))
        alone = first_alone([each.rows for each in self.stages.disk_arrays.values()], own["read"])
        return chained(SuperbatchSession(self, self.pool(budget), alone), cursors, own)


class SuperbatchSession(ReadSession):
    """Reads superbatches into the caches of the arrays, serves their batches, and gives back rows no longer needed.

    alone: whether the first batch is a superbatch of its own.
    """

    stage = "read"

    def __init__(self, strategy: Superbatches, pool: int, alone: bool) -> None:
        stages, whole, most = strategy.stages, strategy.planner(pool), strategy.memory.max_bytes
        self.sample, self._load, self._collate = stages.sample, stages.load.begun(), stages.collate
        self._number, self._columns = list(stages.disk_arrays), whole.columns
        self._passes = HostPasses([] if self.sample.apart else [each.rows for each in whole.arrays], self.sample.order)
        self._arrays: list[_ArrayReader] = []
        try:
            for array, own in strategy._pools(whole, pool):
                self._arrays.append(_ArrayReader(array, stages.load, own, most))
            room = pool // SECOND_SHARE if any(each.second for each in self._arrays) else pool
            planner = strategy.planner(room, [each.residents for each in self._arrays])
            self._planner = replace(planner, first_alone=alone, ends=self._passes.ends)
        except BaseException:
            self.end()
            raise

    def plan(self, batches: Iterator[SampledBatch]) -> Iterator[Superbatch]:
        return self._planner.plan(batches)

    def read(self, group: Superbatch) -> FilledSuperbatch:
        """The rows that are not in memory yet, each once."""
        fills = [reader.begin(changes) for reader, changes in zip(self._arrays, group.arrays, strict=True)]

        def read_all() -> None:
            for fill in fills:
                fill.read_all()

        def read_one(k: int) -> None:
            for fill, row in zip(fills, group.batches[k].row, strict=True):
                fill.read(np.unique(row))

        with self._passes.each():
            done, error = read_all_or_each(len(group.batches), read_all, read_one)
        return FilledSuperbatch(done, error, group, tuple(fill.finish() for fill in fills))

    def collate(self, served: ServedBatch) -> tuple[int, object]:
        filled: FilledSuperbatch = served.group
        k, arrays, batch = served.k, filled.superbatch.arrays, filled.superbatch.batches[served.k]
        if k == 0:
            for reader, rows in zip(self._arrays, filled.arrays, strict=True):
                reader.give(rows.idle)  # the superbatch before is through, so nobody needs them
        drawn = batch.unpack(self._columns, [each.used.ids for each in arrays])
        read = zip(self._number, self._arrays, filled.arrays, batch.row, strict=True)
        loaded = self._load.take(drawn, {number: (reader.rows, own.slot[row]) for number, reader, own, row in read})
        for reader, rows, changes in zip(self._arrays, filled.arrays, arrays, strict=True):
            reader.give(rows.slot[changes.gone[changes.first[k] : changes.first[k + 1]]])
            if k + 1 == len(filled.superbatch.batches):
                reader.end_of(changes)
        return self._collate.collate(loaded)

    def stop(self) -> None:
        self._load.stop()
        self._passes.end()
        for each in self._arrays:
            each.lease.stop()

    def closing(self) -> None:
        for each in self._arrays:
            each.lease.stopping = True

    def end(self) -> None:
        self._passes.end()
        for each in self._arrays:
            each.end()


class _ArrayReader:
    """Reads the rows of one array into its cache, for one epoch. pool: bytes of its rows at most."""

    def __init__(self, array: BatchArray, load: LoadStage, pool: int, max_bytes: int) -> None:
        self._array, self._load = array, load
        self.lease, self.second = _lent(array.rows, pool, max_bytes)
        """whether another pipeline reads the same rows"""
        assert self.lease.cache is not None
        self._cache = cache = self.lease.cache
        self._slot = cache.slot
        """int32[r]: where the rows in memory are, in the order of `CachedNodes.node`"""
        self.residents = cache.residents
        self.final: CachedNodes | None = cache.residents
        """what is in memory once the last batch is gathered; until then, once reading has begun, nobody knows"""
        self._last: RowChanges | None = None
        """of the superbatch whose reading began last"""
        self._lock = threading.Lock()

    @property
    def rows(self) -> AnyArray:
        """The cache's rows, [slots, *row shape], as stored."""
        return self._cache.rows

    def begin(self, changes: RowChanges) -> "_Fill":
        """Begin to read a superbatch's rows."""
        with self._lock:
            self._last, self.final = changes, None
        self.give(self._slot[changes.early])
        slot = np.full(len(changes.carried), -1, np.int32)
        there = changes.carried >= 0
        slot[there] = self._slot[changes.carried[there]]
        return _Fill(self, changes, slot)

    def fill(self, used: UsedRows, row: NDArray[np.int64], slot: Slots) -> None:
        """Read rows `row` (ascending) of the superbatch, in pieces as large as there is room for."""
        cache = self._cache
        least, most = PIECE_ROWS
        begin = 0
        while begin < len(row):
            left = len(row) - begin
            own = cache.take(min(least, left), min(most, left), used.limit)
            piece = row[begin : begin + len(own)]
            try:
                nbytes = self._array.rows.read(used.ids[piece].astype(np.int64), cache.rows, own.astype(np.int64))
            except BaseException:
                cache.give(own)
                raise
            self._load.count(self._array, len(piece), nbytes)
            slot[piece] = own
            begin += len(piece)

    def finish(self, changes: RowChanges, slot: Slots) -> FilledRows:
        before, carried = self._slot.copy(), changes.carried
        before[carried[carried >= 0]] = slot[carried >= 0]  # those that could not be read before may have been now
        self._slot = _moved(changes.source, before, slot)
        return FilledRows(slot, self._slot[changes.idle])

    def give(self, slot: Slots) -> None:
        """Give slots back, of those rows that have one."""
        self._cache.give(slot[slot >= 0])

    def end_of(self, changes: RowChanges) -> None:
        """All batches of a superbatch are gathered."""
        with self._lock:
            if self._last is changes:
                self.final = changes.final

    def end(self) -> None:
        """Give the cache back; idempotent."""
        self.lease.end(self.final, self._slot)


class _Fill(NamedTuple):
    """The reading of a superbatch's rows of one array. slot: int32[u], where they are, -1 for those still to be read."""

    reader: _ArrayReader
    changes: RowChanges
    slot: Slots

    def read_all(self) -> None:
        self.read(np.arange(len(self.slot)))

    def read(self, row: NDArray[Any]) -> None:
        """Read those of the rows (ascending) that are not in memory."""
        self.reader.fill(self.changes.used, row[self.slot[row] < 0].astype(np.int64), self.slot)

    def finish(self) -> FilledRows:
        return self.reader.finish(self.changes, self.slot)


def _lent(rows: Rows, pool: int, max_bytes: int) -> tuple[RowLease, bool]:
    """The rows' cache, of so many bytes; a second pipeline at the same time has a smaller one of its own, and True."""
    lease = registry_of(rows).lend(_slots(rows, pool), rows)
    if lease is not None:
        return lease, False
    return own_cache(_slots(rows, pool // SECOND_SHARE + max_bytes), rows), True


def _slots(rows: Rows, pool: int) -> int:
    """Rows that a cache of so many bytes has room for."""
    return min(pool // rows.row_bytes + 1, rows.shape[0])


def _moved(source: NDArray[np.int32], before: Slots, own: Slots) -> Slots:
    """The slots of the rows in memory after a superbatch: see `CacheChange.source`."""
    new = source < 0
    after = np.empty(len(source), np.int32)
    after[new] = own[~source[new]]
    after[~new] = before[source[~new]]
    return after

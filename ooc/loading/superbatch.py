"""Superbatches (`ooc.loading.superbatch_plan`) carried out: each row read once, in file order, for all batches that want it.

All superbatches share one buffer (`ooc.loading.feature_cache`): while the batches of one are gathered its rows make room, row
by row, for those of the next, so each may fill nearly all of it, where two buffers in turn would have half each. Batches are
the same as read one by one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooc.loading.batch_bytes import BatchBytes
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import CachedNodes, RowLease, Slots, own_cache, registry_of
from ooc.loading.read_strategy import ReadGroup, ReadSession, ReadStrategy, ServedBatch, chained, clocks_of, read_all_or_each
from ooc.loading.superbatch_plan import Superbatch, SuperbatchPlanner, SuperbatchSketch
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import SECOND_SHARE, MemoryPlan
from ooc.runtime.pipeline import Pipeline
from ooc.stores.arrays.rows import Rows

PIECE_ROWS = 2**15, 2**18
"""Rows of one read, where memory makes room for fewer or more; the latter bounds what planning takes to about 16 MB"""


@dataclass(frozen=True)
class FilledSuperbatch(ReadGroup):
    """A superbatch that was read."""

    superbatch: Superbatch
    slot: Slots
    """int32[u]: where its rows are in the pool; valid for the first `done` batches"""
    idle: Slots
    """slots to give back before the first batch"""


@dataclass(frozen=True)
class Superbatches(ReadStrategy):
    """Rows of as many batches as memory holds are read together, and stay in memory while they may be needed again."""

    memory: BatchBytes

    def planner(self, pool: int, residents: CachedNodes) -> SuperbatchPlanner:
        """Groups batches. pool: bytes for all that is alive; residents: what is in memory before."""
        return SuperbatchPlanner(self.stages, self.memory, pool, residents)

    def pipeline(self, cursors: Iterator[Cursor], budget: MemoryPlan, prefetch: int, clocks: dict[str, Clock]) -> Pipeline:
        own = clocks_of(clocks, ("sample", "group", "read", "collate"))
        return chained(SuperbatchSession(self, self.pool(budget)), cursors, own)


class SuperbatchSession(ReadSession):
    """Reads superbatches into the pool of the rows' cache, serves their batches, and gives back rows no longer needed."""

    stage = "read"

    def __init__(self, strategy: Superbatches, pool: int) -> None:
        rows = strategy.disk_rows
        assert rows is not None
        self._rows, self._load, self._collate = rows, strategy.stages.load, strategy.stages.collate
        self.sample = strategy.stages.sample
        self._lease, room = _lent(rows, pool, strategy.memory.max_bytes)
        assert self._lease.cache is not None
        self._pool = cache = self._lease.cache
        self._slot = cache.slot
        """int32[r]: where the rows in memory are, in the order of `CachedNodes.node`"""
        self._final: CachedNodes | None = cache.residents
        """what is in memory once the last batch is gathered; until then, once reading has begun, nobody knows"""
        try:
            self._planner = strategy.planner(room, cache.residents)
        except BaseException:
            self.end()
            raise

    def plan(self, batches: Iterator[SampledBatch]) -> Iterator[Superbatch]:
        return self._planner.plan(batches)

    def read(self, group: Superbatch) -> FilledSuperbatch:
        """The rows that are not in memory yet, each once."""
        self._final = None
        self._pool.give(self._slot[group.early])
        slot = np.full(len(group.carried), -1, np.int32)
        there = group.carried >= 0
        slot[there] = self._slot[group.carried[there]]
        sketch = group.sketch

        def read_one(k: int) -> None:
            row = np.unique(sketch.batches[k].row)
            self._fill(sketch, row[slot[row] < 0].astype(np.int64), slot)

        done, error = read_all_or_each(len(sketch.batches), lambda: self._fill(sketch, np.flatnonzero(~there), slot), read_one)
        self._slot = _moved(group.source, self._slot, slot)
        return FilledSuperbatch(done, error, group, slot, self._slot[group.idle])

    def _fill(self, sketch: SuperbatchSketch, row: NDArray[np.int64], slot: Slots) -> None:
        """Read rows `row` (ascending) of the superbatch, in pieces as large as there is room for."""
        pool = self._pool
        least, most = PIECE_ROWS
        begin = 0
        while begin < len(row):
            left = len(row) - begin
            own = pool.take(min(least, left), min(most, left), sketch.limit)
            piece = row[begin : begin + len(own)]
            try:
                nbytes = self._rows.read(sketch.node[piece].astype(np.int64), pool.rows, own.astype(np.int64))
            except BaseException:
                pool.give(own)
                raise
            self._load.counts.add(len(piece), nbytes)
            slot[piece] = own
            begin += len(piece)

    def collate(self, served: ServedBatch) -> tuple[int, object]:
        filled: FilledSuperbatch = served.group
        superbatch, k, pool = filled.superbatch, served.k, self._pool
        batches = superbatch.sketch.batches
        if k == 0:
            pool.give(filled.idle)  # the superbatch before is through, so nobody needs them
        drawn = batches[k].unpack(superbatch.sketch.node)
        loaded = self._load.take(drawn, pool.rows, filled.slot[batches[k].row])
        pool.give(filled.slot[superbatch.gone[superbatch.first[k] : superbatch.first[k + 1]]])
        if k + 1 == len(batches):
            self._final = superbatch.final
        return self._collate.collate(loaded)

    def stop(self) -> None:
        self._lease.stop()

    def closing(self) -> None:
        self._lease.stopping = True

    def end(self) -> None:
        self._lease.end(self._final, self._slot)


def _lent(rows: Rows, pool: int, max_bytes: int) -> tuple[RowLease, int]:
    """The rows' cache, and the bytes for this pipeline; a second one at the same time has a cache and room of its own."""
    lease = registry_of(rows).lend(min(pool // rows.row_bytes + 1, rows.shape[0]), rows)
    if lease is not None:
        return lease, pool
    room = pool // SECOND_SHARE
    return own_cache(min(room // rows.row_bytes + max_bytes // rows.row_bytes + 1, rows.shape[0]), rows), room


def _moved(source: NDArray[np.int32], before: Slots, own: Slots) -> Slots:
    """The slots of the rows in memory after a superbatch: see `CacheChange.source`."""
    new = source < 0
    after = np.empty(len(source), np.int32)
    after[new] = own[~source[new]]
    after[~new] = before[source[~new]]
    return after

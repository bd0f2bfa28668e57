"""Windows of batches (`ooc.loading.superbatch_plan`) carried out: each row read once, in file order, for all batches that want
it.

Three pipelines in a chain: sample batches -> read windows -> gather and collate batches; see `in_superbatches`. All windows
share one buffer (`ooc.loading.feature_cache`): while the batches of one are gathered its rows make room, row by row, for those
of the next, so each may fill nearly all of it, where two buffers in turn would have half each. Batches are the same as read
one by one.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.loading.collate import LoadedBatch, SampledBatch
from ooc.loading.feature_cache import CachedNodes, CacheLease, PoolClosed, RowPool, Slots, own_cache, registry_of
from ooc.loading.superbatch_plan import AHEAD, Superbatch, SuperbatchPlanner, SuperbatchSketch
from ooc.loading.work import Work
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import SECOND_SHARE
from ooc.runtime.pipeline import CONSUMER, SOURCE, Pipeline, Stage

PIECE_ROWS = 2**15, 2**18
"""Rows of one read, where memory makes room for fewer or more; the latter bounds what planning takes to about 16 MB"""


@dataclass(frozen=True)
class FilledSuperbatch:
    """A window that was read."""

    window: Superbatch
    slot: Slots
    """int32[u]: where its rows lie in the pool; valid for the first `done` batches"""
    idle: Slots
    """slots to give back before the first batch"""
    done: int
    error: Exception | None
    """what batch `done` failed on"""


@dataclass(frozen=True)
class SuperbatchPart:
    """Batch number k of a window."""

    filled: FilledSuperbatch
    k: int


class Reader:
    """Reads windows, in their order, into the pool.

    slot: int32[r], where the rows in memory lie, in the order of `CachedNodes.node`.
    """

    def __init__(self, work: Work, pool: RowPool, slot: Slots) -> None:
        self._work, self._pool, self.slot = work, pool, slot
        self.begun = False

    def read(self, window: Superbatch) -> FilledSuperbatch:
        """The rows that are not in memory yet, each once. Where that fails, batch by batch as far as it goes."""
        self.begun = True
        self._pool.give(self.slot[window.early])
        slot = np.full(len(window.carried), -1, np.int32)
        there = window.carried >= 0
        slot[there] = self.slot[window.carried[there]]
        batches = window.sketch.batches
        done, error = len(batches), None
        try:
            self._load(window.sketch, np.flatnonzero(~there), slot)
        except PoolClosed:
            raise
        except Exception as failure:
            done, error = self._one_by_one(window.sketch, slot, failure)
        self.slot = _moved(window.source, self.slot, slot)
        return FilledSuperbatch(window, slot, self.slot[window.idle], done, error)

    def _load(self, sketch: SuperbatchSketch, row: NDArray[np.int64], slot: Slots) -> None:
        """Read rows `row` (ascending) of the window, in pieces as large as there is room for."""
        work, pool = self._work, self._pool
        assert work.x is not None
        least, most = PIECE_ROWS
        begin = 0
        while begin < len(row):
            left = len(row) - begin
            own = pool.take(min(least, left), min(most, left), sketch.limit)
            piece = row[begin : begin + len(own)]
            try:
                work.read.add(len(piece), work.x.read(sketch.node[piece].astype(np.int64), pool.rows, own.astype(np.int64)))
            except BaseException:
                pool.give(own)
                raise
            slot[piece] = own
            begin += len(piece)

    def _one_by_one(self, sketch: SuperbatchSketch, slot: Slots, failure: Exception) -> tuple[int, Exception | None]:
        """(batches that can be served, what the next one fails on)."""
        if len(sketch.batches) == 1:
            return 0, failure
        for done, batch in enumerate(sketch.batches):
            row = np.unique(batch.row)
            try:
                self._load(sketch, row[slot[row] < 0].astype(np.int64), slot)
            except PoolClosed:
                raise
            except Exception as error:
                return done, error
        return len(sketch.batches), None  # it went well the second time


class SuperbatchServer:
    """Takes the batches out of windows, in order, and gives rows back that are not needed any more."""

    def __init__(self, work: Work, pool: RowPool) -> None:
        self._work, self._pool = work, pool
        self.final: CachedNodes | None = None
        """what lies in memory, once the last batch is gathered"""

    def serve(self, windows: Iterator[FilledSuperbatch]) -> Iterator[SuperbatchPart]:
        """The batches of windows, one after the other."""
        step = 0
        for filled in windows:
            for k in range(filled.done):
                yield SuperbatchPart(filled, k)
            step += filled.done
            if filled.error is not None:
                filled.error.add_note(f"in stage 'read' at step {step} of the pipeline")
                raise filled.error
            del filled  # while the next one is waited for

    def collate(self, portion: SuperbatchPart) -> tuple[int, Any]:
        """(steps done with this batch, the batch); its rows are gathered from the pool. One thread, in order."""
        filled, k, pool = portion.filled, portion.k, self._pool
        window = filled.window
        sketch = window.sketch
        batch = sketch.batches[k]
        if k == 0:
            pool.give(filled.idle)  # the window before is through, so nobody needs them
        loaded = self._gather(batch.unpack(sketch.node), filled.slot[batch.row])
        pool.give(filled.slot[window.gone[window.first[k] : window.first[k + 1]]])
        if k + 1 == len(sketch.batches):
            self.final = window.final
        return self._work.collate(loaded)

    def _gather(self, drawn: SampledBatch, at: Slots) -> LoadedBatch:
        work, rows = self._work, self._pool.rows
        if work.pre_aggregation is not None:
            return work.aggregated(drawn, rows, at)
        assert work.collator.gather is not None
        return LoadedBatch(drawn, work.collator.gather.take(rows, at, work.buffers), work.labels(drawn))


def _moved(source: NDArray[np.int32], before: Slots, own: Slots) -> Slots:
    """The slots of the rows in memory after a window: see `Change.source`."""
    new = source < 0
    after = np.empty(len(source), np.int32)
    after[new] = own[~source[new]]
    after[~new] = before[source[~new]]
    return after


def in_superbatches(
    work: Work,
    cursors: Iterator[Cursor],
    *,
    pool: int,
    threads: int,
    split: bool,
    clocks: dict[str, Clock],
) -> Pipeline:
    """The pipeline of an epoch's batches through windows: (steps done, batch) in the order of `cursors`.

    pool: bytes for all batches and windows that are alive at once; threads: to sample with; split: halve a batch that does not
    fit; clocks: as of `Pipeline`, for all stages.
    """
    lease, pool = _lent(work, pool)
    try:
        return _chain(work, cursors, lease, pool, threads, split, clocks)
    except BaseException:
        lease.end(None, lease.cache.slot)
        raise


def _lent(work: Work, pool: int) -> tuple[CacheLease, int]:
    """The rows' cache, and the bytes for this pipeline; a second one at the same time has a cache and room of its own."""
    rows = work.x
    assert rows is not None
    lease = registry_of(rows).lend(min(pool // rows.row_bytes + 1, rows.shape[0]), rows)
    if lease is not None:
        return lease, pool
    room = pool // SECOND_SHARE
    return own_cache(min(room // rows.row_bytes + work.max_bytes // rows.row_bytes + 1, rows.shape[0]), rows), room


def _chain(
    work: Work, cursors: Iterator[Cursor], lease: CacheLease, pool: int, threads: int, split: bool, clocks: dict[str, Clock]
) -> Pipeline:
    """The three pipelines of `in_superbatches`; where one cannot be made, those before it have ended."""
    cache = lease.cache
    grouping = SuperbatchPlanner(work, pool, threads, cache.residents)
    reader, server = Reader(work, cache.pool, cache.slot), SuperbatchServer(work, cache.pool)
    own = {name: clocks.setdefault(name, Clock()) for name in ("sample", "group", "read", "collate", CONSUMER)}
    with ExitStack() as unfinished:
        sampled = _sampled(work, cursors, threads, split, own["sample"])
        unfinished.callback(sampled.close)
        filled = Pipeline(
            grouping.windows(sampled),
            [Stage("read", reader.read)],
            max_bytes=1,  # the pool is the gate
            max_items=2,
            clocks={SOURCE: own["group"], "read": own["read"]},
            before=sampled,
            on_stop=lease.stop,
        )
        unfinished.callback(filled.close)
        # The last to end: its threads stop when all before them have.
        served = Pipeline(
            server.serve(filled),
            [Stage("collate", server.collate)],
            max_bytes=1,
            max_items=AHEAD,
            clocks={"collate": own["collate"], CONSUMER: own[CONSUMER]},
            before=filled,
            on_end=lambda: lease.end(server.final if reader.begun else cache.residents, reader.slot),
        )
        unfinished.pop_all()
        return served


def _sampled(work: Work, cursors: Iterator[Cursor], threads: int, split: bool, clock: Clock) -> Pipeline:
    """Sampled batches. Not a gate: bounded in items, which a window counts."""
    alone = work.frontier is None and not split
    stages = [Stage("sample", work.sample, threads)] if alone else []
    source: Iterator[Any] = cursors
    if not alone:
        source = work.split(cursors) if work.frontier is None else work.sampled(cursors, split)
    clocks = {stages[0].name if alone else SOURCE: clock}
    return Pipeline(source, stages, max_bytes=1, max_items=threads, clocks=clocks)

"""PURE: sampled batches -> windows of batches whose rows are read together, and what leaves the memory for them.

Sampling needs no features, so batches are sampled ahead and grouped until the union of their rows fills its share of the
memory. Many rows lie closer together than few: the reads merge, and rows that several batches want are read once. (The
look-ahead of Ginex and MariusGNN's partition buffer rest on the same fact.) `ooc.loading.superbatch` carries it out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.relabel import RelabelTable, by_last_use
from ooc.loading.collate import SampledBatch
from ooc.loading.compact_batch import CompactBatch, narrow, pack
from ooc.loading.feature_cache import CachedNodes, shared_rows
from ooc.loading.work import Work

FIRST_BYTES, GROWTH = 2**30, 4
"""Of an epoch's first window, so that training starts soon (a smaller one is hardly read faster); each next one may have so
many times more"""
AHEAD = 1
"""Batches gathered before the model asks for them"""
ROW_BYTES = 112
"""a row's share of what keeps order in four windows: one gathered from, one read, one ready and one put together"""
WINDOWS = 4


@dataclass(frozen=True)
class SuperbatchSketch:
    """A window's batches, before it is known what lies in memory."""

    batches: tuple[CompactBatch, ...]
    node: NDArray[Any]
    """[u], ascending; int32 where that is enough"""
    last: NDArray[np.int32]
    """int32[u]: the last batch that uses a row"""
    uses: NDArray[np.float32]
    """float32[u]: how many do"""
    limit: int
    """rows in memory at most, with this window's"""


@dataclass(frozen=True)
class Superbatch:
    """Batches whose rows are read together, and what becomes of the rows in memory before and after."""

    sketch: SuperbatchSketch
    carried: NDArray[np.int32]
    source: NDArray[np.int32]
    """see `ooc.loading.feature_cache.CacheChange`"""
    early: NDArray[np.int32]
    """of an epoch's first window: what it gives up itself of the rows that were in memory, as positions"""
    idle: NDArray[np.int32]
    """what the next window gives up of the rows in memory after this one that this one does not use, as positions"""
    gone: NDArray[np.int32]
    """the rows of this window that the next gives up, by their last use"""
    first: NDArray[np.int64]
    """int64[batches + 1]: gone[first[k]:first[k + 1]] are not needed after batch k"""
    final: CachedNodes | None
    """of the last window: what lies in memory afterwards"""


class _Draft:
    """A window in the making."""

    def __init__(self, grouping: "SuperbatchPlanner", most_rows: int) -> None:
        self._grouping, self._most_rows = grouping, most_rows
        self._union = RelabelTable()
        self._batches: list[CompactBatch] = []
        self._last, self._uses = np.empty(0, np.int32), np.empty(0, np.float32)
        self._size = self._kept = self._most_nodes = self._batch = self._active = self._drawing = self._limit = 0

    def add(self, drawn: SampledBatch) -> bool:
        """Take a batch in, unless the window is full; the first always fits. False: finish, this draft takes no more."""
        number = self._union.add(drawn.subgraph.node)
        packed = pack(drawn, number, self._grouping.work.needs_slots)
        kept = self._kept + packed.nbytes
        self._most_nodes = max(self._most_nodes, len(number))
        self._batch = max(self._batch, self._grouping.work.nbytes(drawn))
        self._active = max(self._active, self._grouping.work.activation_bytes(drawn))
        self._drawing = max(self._drawing, drawn.subgraph.nbytes)
        size = self._union.size
        limit = self._grouping.rows_limit(kept, self._batch, self._active, self._drawing)
        # One batch's room is left: the next window goes on being read while this one's last batches wait for the model.
        if self._batches and (size > self._most_rows or size + self._most_nodes > limit):
            return False
        self._last = _grown(self._last, size)
        self._last[number] = len(self._batches)
        self._uses = _grown(self._uses, size)
        self._uses[number] += 1  # once, also where seeds repeat
        self._batches.append(packed)
        self._size, self._kept, self._limit = size, kept, max(limit, size)
        return True

    def finish(self) -> SuperbatchSketch:
        node, rank = self._union.ascending(self._size)
        batches = tuple(batch.renumbered(rank) for batch in self._batches)
        last, uses = np.empty(self._size, np.int32), np.empty(self._size, np.float32)
        last[rank], uses[rank] = self._last[: self._size], self._uses[: self._size]
        return SuperbatchSketch(batches, narrow(node), last, uses, self._limit)


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    """`array`, of `size` entries at least, with zeros behind it; a quarter more, so that many small batches copy it seldom."""
    if len(array) >= size:
        return array
    grown = np.zeros(max(size, len(array) * 5 // 4), array.dtype)
    grown[: len(array)] = array
    return grown


@dataclass(frozen=True)
class SuperbatchPlanner:
    """How sampled batches become windows."""

    work: Work
    pool_bytes: int
    """for all windows and batches that are alive at once"""
    drawing: int
    """batches being drawn at once"""
    residents: CachedNodes
    """what lies in memory before the first window"""
    first_bytes: int = FIRST_BYTES
    growth: int = GROWTH

    @property
    def row_bytes(self) -> int:
        assert self.work.x is not None
        return self.work.x.row_bytes

    def rows_limit(self, kept: int, batch: int, active: int, drawing: int) -> int:
        """Rows in memory at most beside windows whose batches take `kept` bytes each, the largest batch `batch`.

        Taken off: the batches gathered ahead, the one at the model, its activations (`active`, of which there is less,
        measured; the rest is for the memory of the batch before, which waits to be used again); those being drawn
        (`drawing` bytes each, with their hash tables); the windows' batches.
        """
        frontier = self.work.frontier
        drawn = 4 * self.drawing * drawing if frontier is None else frontier.max_bytes or 0
        besides = (AHEAD + 1) * batch + active + drawn + WINDOWS * kept
        return max(0, self.pool_bytes - besides) // (self.row_bytes + ROW_BYTES)

    def sketches(self, batches: Iterator[SampledBatch]) -> Iterator[SuperbatchSketch]:
        """Windows of consecutive batches, none left out. A failure comes after the window of the batches before it."""
        most_rows = max(1, self.first_bytes // self.row_bytes)
        draft: _Draft | None = None
        failure: BaseException | None = None
        while True:
            try:
                drawn = next(batches)
            except StopIteration:
                break
            except BaseException as error:  # the batches before it come first
                failure = error
                break
            if draft is None:
                draft = _Draft(self, most_rows)
            if not draft.add(drawn):
                yield draft.finish()
                most_rows *= self.growth
                draft = _Draft(self, most_rows)
                draft.add(drawn)
        if draft is not None:
            yield draft.finish()
        if failure is not None:
            raise failure

    def windows(self, batches: Iterator[SampledBatch]) -> Iterator[Superbatch]:
        """Each window once the next one is known, so that it knows which of its rows that one gives up."""
        residents, before, held = self.residents, np.empty(0, np.int32), None
        failure: BaseException | None = None
        sketches = self.sketches(batches)
        while True:
            try:
                sketch = next(sketches)
            except StopIteration:
                break
            except BaseException as error:
                failure = error
                break
            residents, change = residents.take(sketch.node, sketch.uses, sketch.limit, before)
            early = change.idle if held is None else change.idle[:0]
            if held is not None:
                yield _linked(*held, change.evicted, change.idle, None)
            held, before = (sketch, change.carried, change.source, early), sketch.node
        if held is not None:
            yield _linked(*held, before[:0], np.empty(0, np.int32), residents)
        if failure is not None:
            raise failure


def _linked(
    sketch: SuperbatchSketch,
    carried: NDArray[np.int32],
    source: NDArray[np.int32],
    early: NDArray[np.int32],
    evicted: NDArray[Any],
    idle: NDArray[np.int32],
    final: CachedNodes | None,
) -> Superbatch:
    """The window, `evicted` and `idle` being what the next one gives up."""
    going = np.empty(len(sketch.node), np.int32)
    gone = np.empty(int(shared_rows(sketch.node, evicted, going)), np.int32)
    first = np.zeros(len(sketch.batches) + 1, np.int64)
    by_last_use(sketch.last, going, gone, first)
    return Superbatch(sketch, carried, source, early, idle, gone, first, final)

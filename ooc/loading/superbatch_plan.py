"""PURE: sampled batches -> superbatches, whose rows are read together, and which rows leave the memory for them.

Sampling needs no features, so batches are sampled ahead and grouped until their distinct rows fill their share of the memory.
Many rows lie closer together than few: the reads merge, and rows that several batches want are read once. (The superbatches of
Ginex and MariusGNN's partition buffer rest on the same fact.) `ooc.loading.superbatch` carries it out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.relabel import RelabelTable, by_last_use
from ooc.loading.batch_bytes import BatchBytes, narrow
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import CacheChange, CachedNodes, shared_rows
from ooc.loading.read_strategy import AHEAD, Deferred, grouped
from ooc.loading.stages import BatchStages

FIRST_BYTES, GROWTH = 2**30, 4
"""Of an epoch's first superbatch, so that training starts soon (a smaller one is hardly read faster); each next one may have
so many times more"""
ROW_BYTES = 112
"""a row's share of what keeps order in four superbatches: one gathered from, one read, one ready and one put together"""
SUPERBATCHES = 4
_NOTHING = np.empty(0, np.int64)
_WIDE = {"edge_id": np.int64}
"""columns that wait as int32 where they fit, and their dtype"""


class CompactBatch(NamedTuple):
    """A sampled batch as it waits for its superbatch, in a third of its memory."""

    drawn: SampledBatch
    """its subgraph has no nodes, and numbers are int32 where they fit"""
    row: NDArray[np.int32]
    """int32[n]: positions of its nodes among the superbatch's"""

    @property
    def nbytes(self) -> int:
        small = self.drawn.subgraph
        return self.drawn.position.nbytes + self.row.nbytes + small.nbytes + sum(each.nbytes for each in small.columns.values())

    def unpack(self, node: NDArray[Any]) -> SampledBatch:
        """The batch as it was drawn, but for slots that nobody needs. node: [u], the superbatch's."""
        small = self.drawn.subgraph
        own, indptr, source, slot = (each.astype(np.int64) for each in (node[self.row], small.indptr, small.source, small.slot))
        columns = {name: array.astype(_WIDE.get(name, array.dtype)) for name, array in small.columns.items()}
        full = replace(small, node=own, indptr=indptr, source=source, slot=slot, columns=columns)
        return replace(self.drawn, subgraph=full)


def pack(drawn: SampledBatch, row: NDArray[np.int32], slots: bool) -> CompactBatch:
    """The batch with its nodes at `row` (int32[n]) of the superbatch; slots: whether those it was drawn from are needed."""
    full = drawn.subgraph
    indptr, source, slot = (narrow(array) for array in (full.indptr, full.source, full.slot if slots else _NOTHING))
    columns = {name: narrow(array) if name in _WIDE else array for name, array in full.columns.items()}
    small = replace(full, node=_NOTHING, indptr=indptr, source=source, slot=slot, columns=columns)
    return CompactBatch(replace(drawn, subgraph=small), row)


@dataclass(frozen=True)
class SuperbatchSketch:
    """A superbatch's batches, before it is known which rows are in memory."""

    batches: tuple[CompactBatch, ...]
    node: NDArray[Any]
    """[u], ascending; int32 where that is enough"""
    last: NDArray[np.int32]
    """int32[u]: the last batch that uses a row"""
    uses: NDArray[np.float32]
    """float32[u]: how many do"""
    limit: int
    """rows in memory at most, with this superbatch's"""


@dataclass(frozen=True)
class Superbatch:
    """Batches whose rows are read together, and what becomes of the rows in memory before and after."""

    sketch: SuperbatchSketch
    carried: NDArray[np.int32]
    source: NDArray[np.int32]
    """see `ooc.loading.feature_cache.CacheChange`"""
    early: NDArray[np.int32]
    """of an epoch's first superbatch: positions of the rows in memory that it evicts itself"""
    idle: NDArray[np.int32]
    """positions of the rows in memory afterwards that the next superbatch evicts and this one does not use"""
    gone: NDArray[np.int32]
    """the rows of this superbatch that the next evicts, by their last use"""
    first: NDArray[np.int64]
    """int64[batches + 1]: gone[first[k]:first[k + 1]] are not needed after batch k"""
    final: CachedNodes | None
    """of the last superbatch: what is in memory afterwards"""

    @property
    def missing(self) -> NDArray[np.int64]:
        """int64: the nodes whose rows are read, ascending."""
        return self.sketch.node[self.carried < 0].astype(np.int64)


class SuperbatchDraft:
    """A superbatch in the making, of so many rows at most."""

    def __init__(self, planner: "SuperbatchPlanner", most_rows: int) -> None:
        self._planner, self._most_rows = planner, most_rows
        self._table = RelabelTable()
        self._batches: list[CompactBatch] = []
        self._last, self._uses = np.empty(0, np.int32), np.empty(0, np.float32)
        self._size = self._kept = self._most_nodes = self._batch = self._active = self._drawing = self._limit = 0

    def add(self, drawn: SampledBatch) -> bool:
        """Take a batch in, unless the superbatch is full; see `ooc.loading.read_strategy.grouped`."""
        stages, memory = self._planner.stages, self._planner.memory
        number = self._table.add(drawn.subgraph.node)
        packed = pack(drawn, number, stages.needs_slots)
        kept = self._kept + packed.nbytes
        self._most_nodes = max(self._most_nodes, len(number))
        self._batch = max(self._batch, memory.nbytes(drawn))
        self._active = max(self._active, memory.activation_bytes(drawn))
        self._drawing = max(self._drawing, drawn.subgraph.nbytes)
        size = self._table.size
        limit = self._planner.rows_limit(kept, self._batch, self._active, self._drawing)
        # One batch's room is left: the next superbatch goes on being read while this one's last batches wait for the model.
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
        node, rank = self._table.ascending(self._size)
        batches = tuple(CompactBatch(batch.drawn, rank[batch.row]) for batch in self._batches)
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
    """How sampled batches become superbatches. memory: of a batch."""

    stages: BatchStages
    memory: BatchBytes
    pool_bytes: int
    """for all superbatches and batches that are alive at once"""
    residents: CachedNodes
    """what is in memory before the first superbatch"""
    first_bytes: int = FIRST_BYTES
    growth: int = GROWTH

    @property
    def row_bytes(self) -> int:
        assert self.stages.load.x is not None
        return self.stages.load.x.row_bytes

    def rows_limit(self, kept: int, batch: int, active: int, drawing: int) -> int:
        """Rows in memory at most beside superbatches whose batches take `kept` bytes each, the largest batch `batch`.

        Taken off: the batches gathered ahead, the one at the model, its activations (`active`, of which there is less,
        measured; the rest is for the memory of the batch before, which waits to be used again); those being drawn
        (`drawing` bytes each, with their hash tables); the superbatches' batches.
        """
        drawn = self.stages.sample.drawing_bytes(drawing)
        besides = (AHEAD + 1) * batch + active + drawn + SUPERBATCHES * kept
        return max(0, self.pool_bytes - besides) // (self.row_bytes + ROW_BYTES)

    def sketches(self, batches: Iterator[SampledBatch]) -> Iterator[SuperbatchSketch]:
        """Superbatches of consecutive batches, none left out; see `ooc.loading.read_strategy.grouped`."""
        first = max(1, self.first_bytes // self.row_bytes)
        return grouped(batches, (SuperbatchDraft(self, first * self.growth**k) for k in count()))

    def plan(self, batches: Iterator[SampledBatch]) -> Iterator[Superbatch]:
        """Each superbatch once the next one is known, so that it knows which of its rows that one evicts."""
        residents, before, waiting = self.residents, np.empty(0, np.int32), None
        nothing = np.empty(0, np.int32)
        sketches = Deferred(self.sketches(batches))
        for sketch in sketches:
            residents, change = residents.take(sketch.node, sketch.uses, sketch.limit, before)
            if waiting is not None:
                yield _linked(*waiting, change.evicted, change.idle, None)
            waiting, before = (sketch, change, change.idle if waiting is None else nothing), sketch.node
        if waiting is not None:
            yield _linked(*waiting, before[:0], nothing, residents)
        sketches.check()


def _linked(
    sketch: SuperbatchSketch,
    change: CacheChange,
    early: NDArray[np.int32],
    evicted: NDArray[Any],
    idle: NDArray[np.int32],
    final: CachedNodes | None,
) -> Superbatch:
    """The superbatch that `change` reads, of which the next one gives up `evicted` and `idle`."""
    going = np.empty(len(sketch.node), np.int32)
    gone = np.empty(int(shared_rows(sketch.node, evicted, going)), np.int32)
    first = np.zeros(len(sketch.batches) + 1, np.int64)
    by_last_use(sketch.last, going, gone, first)
    return Superbatch(sketch, change.carried, change.source, early, idle, gone, first, final)

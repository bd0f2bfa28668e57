"""PURE: sampled batches -> superbatches, whose rows are read together, and which rows leave the memory for them.

Sampling needs no features, so batches are sampled ahead and grouped until their distinct rows fill their share of the memory.
Many rows lie closer together than few: the reads merge, and rows that several batches want are read once. (The superbatches of
Ginex and MariusGNN's partition buffer rest on the same fact.) `ooc.loading.superbatch` carries it out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import EDGE_ID, narrow
from ooc.graph.hetero import HeteroSubgraph
from ooc.graph.relabel import RelabelTable
from ooc.loading.batch_bytes import BatchSize
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.load_stage import BatchArray
from ooc.loading.read_strategy import AHEAD, Deferred, GroupEnds, grouped
from ooc.loading.row_changes import FollowedCache, RowChanges, UsedRows
from ooc.loading.stages import BatchStages

FIRST_BYTES, GROWTH = 2**30, 4
"""Of an epoch's first superbatch, so that training starts soon (a smaller one is hardly read faster); each next one may have
so many times more"""
ROW_BYTES = 112
"""a row's share of what keeps order in four superbatches: one gathered from, one read, one ready and one put together"""
SUPERBATCHES = 4
_HEADROOM = 4
"""An array that stays in memory whole needs so many times its bytes of the pool, which batches take a part of, and a superbatch
leaves one batch's rows free"""
_NOTHING = np.empty(0, np.int64)


class CompactBatch(NamedTuple):
    """A sampled batch as it waits for its superbatch, in a third of its memory."""

    drawn: SampledBatch
    """its subgraph lacks the ids that `row` leads to, and numbers are int32 where they fit"""
    row: tuple[NDArray[np.int32], ...]
    """int32[n] of each array: positions of the batch's rows among the superbatch's"""

    @property
    def nbytes(self) -> int:
        small = self.drawn.subgraph
        return self.drawn.position.nbytes + sum(each.nbytes for each in self.row) + small.nbytes + small.column_bytes

    def unpack(self, of: Sequence[str | None], ids: Sequence[NDArray[Any]]) -> SampledBatch:
        """The batch as it was drawn, but for slots that nobody needs.

        of: the column of each array (`BatchArray.column`); ids: [u], the superbatch's of each array.
        """
        small = self.drawn.subgraph
        if isinstance(small, HeteroSubgraph):
            return replace(self.drawn, subgraph=small.unpacked())
        columns = {name: array.astype(np.int64) if name == EDGE_ID else array for name, array in small.columns.items()}
        node: NDArray[Any] = small.node
        for column, row, own in zip(of, self.row, ids, strict=True):
            if column is None:
                node = own[row]
            else:
                columns[column] = own[row].astype(np.int64)
        node, indptr, source, slot = (each.astype(np.int64) for each in (node, small.indptr, small.source, small.slot))
        full = replace(small, node=node, indptr=indptr, source=source, slot=slot, columns=columns)
        return replace(self.drawn, subgraph=full)


def pack(drawn: SampledBatch, of: Sequence[str | None], row: Sequence[NDArray[np.int32]], slots: bool) -> CompactBatch:
    """The batch with its rows of each array at `row` (int32[n]) of the superbatch; see `CompactBatch.unpack`.

    slots: whether those it was drawn from are needed.
    """
    full = drawn.subgraph
    if isinstance(full, HeteroSubgraph):
        return CompactBatch(replace(drawn, subgraph=full.packed(slots)), tuple(row))
    node = _NOTHING if None in of else full.node
    arrays = (narrow(array) for array in (node, full.indptr, full.source, full.slot if slots else _NOTHING))
    columns = {name: narrow(array) if name == EDGE_ID else array for name, array in full.columns.items() if name not in of}
    small_node, indptr, source, slot = arrays
    small = replace(full, node=small_node, indptr=indptr, source=source, slot=slot, columns=columns)
    return CompactBatch(replace(drawn, subgraph=small), tuple(row))


@dataclass(frozen=True)
class SuperbatchSketch:
    """A superbatch's batches, and of each array the rows that they use."""

    batches: tuple[CompactBatch, ...]
    arrays: tuple[UsedRows, ...]

    def with_all_rows(self, counts: Sequence[int | None]) -> "SuperbatchSketch":
        """The same batches, with all rows of some arrays. counts: of each array, how many those are; None: its rows stay."""
        arrays = tuple(own if n is None else own.of_all(n) for own, n in zip(self.arrays, counts, strict=True))
        known = list(zip(self.arrays, counts, strict=True))
        batches = [
            [row if n is None else own.ids[row].astype(np.int32) for row, (own, n) in zip(batch.row, known, strict=True)]
            for batch in self.batches
        ]
        packed = tuple(CompactBatch(each.drawn, tuple(row)) for each, row in zip(self.batches, batches, strict=True))
        return SuperbatchSketch(packed, arrays)


@dataclass(frozen=True)
class Superbatch:
    """Batches whose rows are read together, and of each array what becomes of its rows in memory."""

    batches: tuple[CompactBatch, ...]
    arrays: tuple[RowChanges, ...]


class _Union:
    """The distinct rows of one array that the batches of a superbatch in the making use."""

    def __init__(self) -> None:
        self._table = RelabelTable()
        self._last, self._uses = np.empty(0, np.int32), np.empty(0, np.float32)
        self._size = self._most = self.limit = self._room = 0

    def number(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32[n]: the numbers of a batch's rows, which are not in the superbatch before `take`."""
        self._most = max(self._most, len(ids))
        return self._table.add(ids)

    def filled(self, most_rows: int, limit: int) -> float:
        """The part of their memory that the rows take, with those numbered last: more than 1 where these do not fit. One
        batch's room is left: the next superbatch goes on being read while this one's last batches wait for the model."""
        size = self._table.size
        return max(size / most_rows, (size + self._most) / max(1, limit))

    def take(self, number: NDArray[np.int32], batch: int, most_rows: int, limit: int) -> None:
        """Take the rows numbered last in, as those of that batch."""
        self._size = size = self._table.size
        self._last = _grown(self._last, size)
        self._last[number] = batch
        self._uses = _grown(self._uses, size)
        self._uses[number] += 1  # once, also where seeds repeat
        self.limit, self._room = max(limit, size), min(most_rows, limit - self._most)

    def finish(self) -> tuple[UsedRows, NDArray[np.int32]]:
        """(the rows, int32[u]: each number's position among them)."""
        ids, rank = self._table.ascending(self._size)
        last, uses = np.empty(self._size, np.int32), np.empty(self._size, np.float32)
        last[rank], uses[rank] = self._last[: self._size], self._uses[: self._size]
        return UsedRows(narrow(ids), last, uses, self.limit, self._room), rank


class SuperbatchDraft:
    """A superbatch in the making. growth: how many times the planner's first bytes its rows may take."""

    def __init__(self, planner: "SuperbatchPlanner", growth: int) -> None:
        self._planner = planner
        self._most_rows = [rows * growth for rows in planner.first_rows]
        self._unions = [_Union() for _ in planner.arrays]
        self._batches: list[CompactBatch] = []
        self._kept = self._batch = self._active = self._drawing = 0
        self.fill = 0.0
        """the part of the memory that is taken"""

    def add(self, drawn: SampledBatch) -> bool:
        """Take a batch in, unless the superbatch is full; see `ooc.loading.read_strategy.grouped`."""
        planner, memory = self._planner, self._planner.memory
        numbers = [union.number(each.ids(drawn)) for union, each in zip(self._unions, planner.arrays, strict=True)]
        packed = pack(drawn, planner.columns, numbers, planner.stages.needs_slots)
        kept = self._kept + packed.nbytes
        self._batch = max(self._batch, memory.nbytes(drawn))
        self._active = max(self._active, memory.activation_bytes(drawn))
        self._drawing = max(self._drawing, drawn.subgraph.nbytes)
        limits = planner.rows_limits(kept, self._batch, self._active, self._drawing)
        rooms = list(zip(self._most_rows, limits, strict=True))
        fill = max(union.filled(*room) for union, room in zip(self._unions, rooms, strict=True))
        if self._batches and fill > 1:
            return False
        self.fill = fill
        for union, number, room in zip(self._unions, numbers, rooms, strict=True):
            union.take(number, len(self._batches), *room)
        self._batches.append(packed)
        self._kept = kept
        return True

    def finish(self) -> SuperbatchSketch:
        arrays, ranks = zip(*(union.finish() for union in self._unions), strict=True)
        batches = tuple(
            CompactBatch(batch.drawn, tuple(rank[row] for rank, row in zip(ranks, batch.row, strict=True)))
            for batch in self._batches
        )
        return SuperbatchSketch(batches, arrays)


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
    memory: BatchSize
    pool_bytes: int
    """for all superbatches and batches that are alive at once"""
    residents: tuple[CachedNodes, ...]
    """of each array, what is in memory before the first superbatch"""
    first_bytes: int = FIRST_BYTES
    growth: int = GROWTH
    first_alone: bool = False
    """whether the first batch is a superbatch of its own"""
    ends: GroupEnds | None = None
    """where superbatches end, if several processes are to group alike"""

    @cached_property
    def arrays(self) -> tuple[BatchArray, ...]:
        """The arrays that are read from disk."""
        return tuple(self.stages.disk_arrays.values())

    @cached_property
    def columns(self) -> tuple[str | None, ...]:
        """Of each array, the column of a batch that has its ids."""
        return tuple(each.column for each in self.arrays)

    @cached_property
    def of_edges(self) -> tuple[bool, ...]:
        """Of each array, whether its rows are those of edges."""
        return tuple(each.of_edges for each in self.arrays)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Of each array, its share of the memory of rows."""
        return shares_of(self.arrays, self.memory.edges_per_node, self.pool_bytes)

    @cached_property
    def stays_whole(self) -> tuple[bool, ...]:
        """Of each array, whether all of its rows stay in memory, once read."""
        needs = whole_shares(self.arrays, self.pool_bytes)
        return tuple(need <= share for need, share in zip(needs, self.shares, strict=True))

    @property
    def first_rows(self) -> list[int]:
        """Of each array, the rows of an epoch's first superbatch at most."""
        shared = zip(self.arrays, self.shares, strict=True)
        return [max(1, int(self.first_bytes * share) // each.rows.row_bytes) for each, share in shared]

    def rows_limits(self, kept: int, batch: int, active: int, drawing: int) -> list[int]:
        """Rows of each array in memory at most beside superbatches whose batches take `kept` bytes each, the largest `batch`.

        Taken off: the batches gathered ahead, the one at the model, its activations (`active`, of which there is less,
        measured; the rest is for the memory of the batch before, which waits to be used again); those being drawn
        (`drawing` bytes each, with their hash tables); the superbatches' batches.
        """
        drawn = self.stages.sample.drawing_bytes(drawing)
        besides = (AHEAD + 1) * batch + active + drawn + SUPERBATCHES * kept
        room, shared = max(0, self.pool_bytes - besides), zip(self.arrays, self.shares, strict=True)
        return [int(room * share) // (each.rows.row_bytes + ROW_BYTES) for each, share in shared]

    def sketches(self, batches: Iterator[SampledBatch]) -> Iterator[SuperbatchSketch]:
        """Superbatches of consecutive batches, none left out; see `ooc.loading.read_strategy.grouped`."""
        known = map(self.stages.load.with_edge_ids, batches)
        if self.first_alone:
            yield from grouped(islice(known, 1), iter([SuperbatchDraft(self, 1)]))
        yield from grouped(known, (SuperbatchDraft(self, self.growth**k) for k in count()), self.ends)

    def plan(self, batches: Iterator[SampledBatch]) -> Iterator[Superbatch]:
        """Each superbatch once the next one is known, so that it knows which of its rows that one evicts.

        A first batch by itself waits for no other, and leaves none of its rows in memory.
        """
        caches = [FollowedCache(residents) for residents in self.residents]
        waiting: SuperbatchSketch | None = None
        sketches = Deferred(self.sketches(batches))
        for sketch in islice(sketches, int(self.first_alone)):
            arrays = [cache.once(used, len(sketch.batches)) for cache, used in zip(caches, sketch.arrays, strict=True)]
            yield Superbatch(sketch.batches, tuple(arrays))
        for own in sketches:
            sketch = self._whole(own, caches)
            before = None if waiting is None else waiting.batches
            changes = [cache.take(used, before) for cache, used in zip(caches, sketch.arrays, strict=True)]
            if before is not None:
                yield Superbatch(before, tuple(each for each in changes if each is not None))
            waiting = sketch
        if waiting is not None:
            yield Superbatch(waiting.batches, tuple(cache.last(waiting.batches) for cache in caches))
        sketches.check()

    def _whole(self, sketch: SuperbatchSketch, caches: Sequence[FollowedCache]) -> SuperbatchSketch:
        """The superbatch, with all rows of those arrays that stay in memory and that its batches read the most of."""
        counts: list[int | None] = []
        for stays, array, used, cache in zip(self.stays_whole, self.arrays, sketch.arrays, caches, strict=True):
            counts.append(array.rows.shape[0] if stays and cache.reads_most(used, array.rows) else None)
        return sketch if counts == [None] * len(counts) else sketch.with_all_rows(counts)


def shares_of(arrays: Sequence[BatchArray], edges_per_node: float, pool_bytes: int) -> tuple[float, ...]:
    """The share of each array of the memory of rows: as much as a batch's rows take, but no more than all of its rows need.

    The shares depend on no batch, so that all loaders of the same kind keep rows in the same places.

    >>> shares_of([x], 1.0, 10**9)
    (1.0,)
    """
    left, found = 1.0, dict[int, float]()
    cost = [each.rows.row_bytes + ROW_BYTES for each in arrays]
    weight = [each * (edges_per_node if array.of_edges else 1.0) for each, array in zip(cost, arrays, strict=True)]
    whole = whole_shares(arrays, pool_bytes)
    order = sorted(range(len(arrays)), key=lambda i: whole[i] / weight[i])  # those that need less than their share come first
    for position, i in enumerate(order):
        own = left * weight[i] / sum(weight[j] for j in order[position:])
        found[i] = own if position == len(order) - 1 else min(own, whole[i])
        left -= found[i]
    return tuple(found[i] for i in range(len(arrays)))


def whole_shares(arrays: Sequence[BatchArray], pool_bytes: int) -> list[float]:
    """Of each array, the share of the memory of rows with which all of them stay in memory; may be more than 1."""
    return [_HEADROOM * (each.rows.row_bytes + ROW_BYTES) * each.rows.shape[0] / max(1, pool_bytes) for each in arrays]

"""PURE: sampled batches -> shared scans, each one pass over the rows for many batches, and the pieces it is read in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats
from ooc.graph.blocks import narrow
from ooc.graph.relabel import RelabelTable
from ooc.loading.batch_bytes import FEW, ScanSize
from ooc.loading.collate import SampledBatch
from ooc.loading.shared_sums import Digests, SumTable
from ooc.runtime.buffers import Buffers, own_pages
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.arrays.zarr_rows import ShardedRows
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.jit import kernel

PLAN_ROWS = 2**18
"""Rows whose reads are planned at once, which takes about 16 MB"""
_DIGIT = 12  # bits of a pass of the radix sort: two passes up to 16 M rows, its counters in the processor's nearest caches


class BatchRemainder(NamedTuple):
    """What remains of a sampled batch beside its aggregates."""

    drawn: SampledBatch
    """without its last hop"""
    num_rows: int
    """rows of aggregates: destinations of the first layer, of several edge types those of each"""

    @property
    def nbytes(self) -> int:
        return self.drawn.subgraph.nbytes + self.drawn.position.nbytes


@dataclass(frozen=True)
class WaitingBatch:
    """A sampled batch that waits for its aggregates.

    row: int32|int64[e], the row that an edge into the first layer's destinations needs; target: int32[e], the row of
    aggregates; edge: float32[e], what the edge counts for, or empty; scale: float32[num_rows], what each aggregate is
    multiplied by, or empty for ones; own: int32|int64[d], the destinations' own rows. size: its part of a scan's memory.
    digest: what tells its aggregates apart, None where it shares none.
    """

    rest: BatchRemainder
    row: NDArray[Any]
    target: NDArray[np.int32]
    edge: Floats
    scale: Floats
    own: NDArray[Any]
    size: ScanSize
    digest: Digests | None = None
    num_new: int | None = None
    """aggregates that are made for it, where it shares others"""

    @property
    def nbytes(self) -> int:
        return self.row.nbytes + self.target.nbytes + self.edge.nbytes + self.scale.nbytes

    def in_own_pages(self) -> "WaitingBatch":
        """The same with its entries in pages of their own, as they outlive what is allocated beside them."""
        block, begin, moved = own_pages(self.nbytes, np.uint8), 0, []
        for array in (self.row, self.target, self.edge, self.scale):  # those with the longest items first
            moved.append(block[begin : begin + array.nbytes].view(array.dtype))
            moved[-1][:] = array
            begin += array.nbytes
        row, target, edge, scale = moved
        return replace(self, row=row, target=target, edge=edge, scale=scale)

    @property
    def num_sums(self) -> int:
        """Aggregates that are made for the batch."""
        return self.rest.num_rows if self.num_new is None else self.num_new

    def without_shared(self, new: NDArray[np.bool_], row_bytes: int) -> "WaitingBatch":
        """The batch as it waits in a scan where only aggregates `new` (bool[num_rows]) are made for it, numbered among these.

        row_bytes: of an aggregate. The batch has a copy of all its aggregates at the model.
        """
        wanted = new[self.target]
        place = np.cumsum(new, dtype=np.int32) - np.int32(1)
        size, dropped = self.size, len(self.row) - int(np.count_nonzero(wanted))
        num_new = int(np.count_nonzero(new))
        return replace(
            self,
            num_new=num_new,
            row=self.row[wanted],
            target=place[self.target[wanted]],
            edge=self.edge[wanted] if len(self.edge) else self.edge,
            scale=self.scale[new] if len(self.scale) else self.scale,
            size=replace(
                size,
                sums=size.sums - row_bytes * (len(new) - num_new),
                entries=size.entries - size.entries * dropped // max(1, len(self.row) + len(self.own)),
                copied=size.copied + row_bytes * len(new),
            ),
        )


@dataclass(frozen=True)
class SharedScan:
    """Batches whose aggregates are made in one pass over the rows.

    start: int64[batches + 1], of the rows of aggregates start[k]:start[k + 1] are those that batch k is the last to need; sums:
    int32[num_rows] of each batch, which rows its aggregates are, None where they are these; scale: float32 of each row of
    aggregates, what it is multiplied by in the end, or empty for ones; own: int32[destinations], where each destination's own
    row is kept, of `num_self_rows` places, batch k's at own_start[k]:own_start[k + 1]; row: [u], ascending, the rows to read;
    first: int32|int64[u + 1], row u is wanted by entries first[u]:first[u + 1]; target: int32 of each entry, the row of
    aggregates it adds to, or ~ the place that keeps the row; edge: float32 of each entry, what it counts for, or empty.
    """

    batches: tuple[BatchRemainder, ...]
    start: NDArray[np.int64]
    sums: tuple[NDArray[np.int32] | None, ...]
    scale: Floats
    own: NDArray[np.int32]
    own_start: NDArray[np.int64]
    num_self_rows: int
    row: NDArray[Any]
    first: NDArray[Any]
    target: NDArray[np.int32]
    edge: Floats
    size: ScanSize
    """what its batches take of the memory"""

    @property
    def num_rows(self) -> int:
        return int(self.start[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of its entries in file order."""
        return self.row.nbytes + self.first.nbytes + self.target.nbytes + self.edge.nbytes

    @property
    def in_file_order(self) -> bool:
        """Whether own rows are kept in file order, so that they fill what the scan before gives back; see `ScanSize`."""
        return len(self.batches) > FEW

    def made_for(self, k: int) -> NDArray[np.int64]:
        """The rows of aggregates that batch k is the first to need, ascending."""
        needed = np.full(self.num_rows, len(self.batches))
        for batch in reversed(range(len(self.batches))):
            at = self.sums[batch]
            needed[slice(*self.start[batch : batch + 2]) if at is None else at] = batch
        return np.flatnonzero(needed == k)

    def without_entries(self) -> "SharedScan":
        """What serving its batches needs."""
        row, target, edge = self.row[:0].copy(), self.target[:0].copy(), self.edge[:0].copy()
        return replace(self, row=row, first=self.first[:0].copy(), target=target, edge=edge, scale=self.scale[:0].copy())

    def only(self, k: int) -> "SharedScan":
        """The entries of what is made for batch k, with the same places."""
        made, kept = np.zeros(self.num_rows + 1, np.bool_), np.zeros(self.num_self_rows + 1, np.bool_)
        made[self.made_for(k)] = True
        kept[self.own[self.own_start[k] : self.own_start[k + 1]]] = True
        of_self = self.target < 0
        mine = np.flatnonzero(
            np.where(of_self, kept[np.where(of_self, ~self.target, -1)], made[np.where(of_self, -1, self.target)])
        )
        row, first = _grouped(np.repeat(self.row, np.diff(self.first))[mine])
        edge = self.edge[mine] if len(self.edge) else self.edge
        return replace(self, row=row, first=first, target=self.target[mine], edge=edge)


class ScanDraft:
    """A scan in the making.

    pool: bytes for all that scans have in memory; self_row_bytes: of a destination's own row, and of an aggregate; reserved: of
    the pool, for other ends (freed blocks that the C library keeps, buffers of reads), but where FEW batches need it.
    """

    def __init__(self, pool: int, self_row_bytes: int, reserved: int = 0) -> None:
        self._pool, self._self_row_bytes, self._reserved = pool, self_row_bytes, reserved
        self._batches: list[WaitingBatch] = []
        self._sums: list[NDArray[np.int32] | None] = []
        self._start = [0]
        self._own: list[NDArray[np.int32]] = []
        self._self_rows = [0]
        self._sum_table, self._table = SumTable(), RelabelTable()
        self._size: ScanSize | None = None

    @property
    def fill(self) -> float:
        """The part of the memory that is taken."""
        return 0.0 if self._size is None else self._size.nbytes / max(1, self._room(self._size))

    def _room(self, size: ScanSize) -> int:
        return self._pool - (0 if size.batches <= FEW else self._reserved)

    def add(self, batch: WaitingBatch) -> bool:
        """Take a batch in, unless the scan is full; see `ooc.loading.read_strategy.grouped`."""
        batch, sums = self._shared(batch)
        own = self._table.add(batch.own)
        self_rows = self._table.size * self._self_row_bytes
        size = replace(batch.size, self_rows=self_rows) if self._size is None else self._size.joined(batch.size, self_rows)
        if self._batches and size.nbytes > self._room(size):
            return False
        self._batches.append(batch.in_own_pages())
        self._sums.append(sums)
        self._start.append(self._start[-1] + batch.num_sums)
        self._own.append(own)
        self._self_rows.append(self._table.size)
        self._size = size
        return True

    def _shared(self, batch: WaitingBatch) -> tuple[WaitingBatch, NDArray[np.int32] | None]:
        """The batch without the aggregates of batches before, and where its aggregates are, as `SharedScan.sums`."""
        if batch.digest is None:
            return batch, None
        sums, new = self._sum_table.add(batch.digest)
        batch = replace(batch, digest=None)
        return (batch, None) if new.all() else (batch.without_shared(new, self._self_row_bytes), sums)

    def finish(self) -> SharedScan:
        """Its entries in file order; those of one row stay in the order of batches, destinations and edges.

        What waited is given up as it is sorted, so that at most two copies are in memory.
        """
        assert self._size is not None
        rests = tuple(batch.rest for batch in self._batches)
        parts: list[tuple[Entries, int]] = []
        start, sums, place = _by_last_need(self._sums, self._start)
        scale = _joined_scales(self._batches, self._start, place)
        for batch, mine, base, known in zip(self._batches, self._own, self._start, self._self_rows, strict=False):
            target = batch.target if place is None else place[base + batch.target]
            parts.append(((batch.row, target, batch.edge), base if place is None else 0))
            # Whose rows nothing before keeps: places are in order of first occurrence.
            new = mine > np.maximum.accumulate(np.append(np.int32(known - 1), mine[:-1]))
            row = narrow(batch.own[new])
            parts.append(((row, ~mine[new], np.empty(0, np.float32)), 0))
        self._batches.clear()
        entries, own = _sorted(parts), np.concatenate(self._own)
        if len(rests) > FEW:
            own = _in_file_order(entries[1], self._self_rows[-1])[own]
        own_start = np.zeros(len(rests) + 1, np.int64)
        np.cumsum([len(each) for each in self._own], out=own_start[1:])
        rows, first = _grouped(entries[0])
        return SharedScan(rests, start, sums, scale, own, own_start, self._self_rows[-1], rows, first, *entries[1:], self._size)


def _by_last_need(
    sums: Sequence[NDArray[np.int32] | None], start: Sequence[int]
) -> tuple[NDArray[np.int64], tuple[NDArray[np.int32] | None, ...], NDArray[np.int32] | None]:
    """`SharedScan.start` and `sums`, and the new place of each aggregate, None where all stay: from the places of batches'
    aggregates, None for those made for it, start[k]:start[k + 1]."""
    if all(at is None for at in sums):
        return np.array(start, np.int64), tuple(sums), None
    each = [np.arange(*start[k : k + 2], dtype=np.int32) if at is None else at for k, at in enumerate(sums)]
    last = np.zeros(start[-1], np.int32)
    for k, at in enumerate(each):
        last[at] = k
    order = np.argsort(last, kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    ends = np.searchsorted(last[order], np.arange(len(each) + 1))
    moved = [place[at] for at in each]
    alone = [len(at) == b - a and (at == np.arange(a, b)).all() for at, a, b in zip(moved, ends[:-1], ends[1:], strict=True)]
    return ends, tuple(None if own else at for own, at in zip(alone, moved, strict=True)), place


def _joined_scales(batches: Sequence[WaitingBatch], start: Sequence[int], place: NDArray[np.int32] | None) -> Floats:
    """Of all batches, each at its place; empty where all are: a batch without aggregates has none either."""
    if not any(len(batch.scale) for batch in batches):
        return np.empty(0, np.float32)
    scale = np.ones(start[-1], np.float32)
    for batch, begin in zip(batches, start, strict=False):
        at: Any = slice(begin, begin + len(batch.scale))
        scale[at if place is None else place[at]] = batch.scale
    return scale


Entries = tuple[NDArray[Any], NDArray[np.int32], Floats]
"""row, target and edge, as in `SharedScan`"""


def _grouped(row: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The distinct rows of entries by ascending row, and where each one's entries begin, with the end of the last."""
    distinct = _distinct(row)
    rows, first = own_pages(distinct, row.dtype), own_pages(distinct + 1, np.int32 if len(row) < 2**31 else np.int64)
    _group(row, rows, first)
    return rows, first


@kernel
def _in_file_order(target: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Number the places that keep rows in the order of entries; returns the new place of each, int32[count]."""
    place, at = np.empty(count, np.int32), 0
    for e in range(len(target)):
        if target[e] < 0:
            place[~target[e]] = at
            target[e] = ~np.int32(at)
            at += 1
    return place


@kernel
def _distinct(row: NDArray[Any]) -> int:
    """Distinct values among ascending ones."""
    count = 0
    for i in range(len(row)):
        count += int(i == 0 or row[i] != row[i - 1])
    return count


@kernel
def _group(row: NDArray[Any], own: NDArray[Any], first: NDArray[Any]) -> None:
    """The distinct values among ascending ones, and where each begins, with the end of the last."""
    at = 0
    for i in range(len(row)):
        if i == 0 or row[i] != row[i - 1]:
            own[at] = row[i]
            first[at] = i
            at += 1
    first[at] = len(row)


def _sorted(parts: list[tuple[Entries, int]]) -> Entries:
    """Entries by ascending row, in order: a stable radix sort, least digit first. parts: entries, and what is added to their
    targets; emptied after the first pass, which takes the entries out of them."""
    count = sum(len(row) for (row, _, _), _ in parts)
    top = max(int(row.max(initial=0)) for (row, _, _), _ in parts)
    weighed = any(len(edge) for (_, _, edge), _ in parts)  # a batch without edges has no factors either, a kept row neither
    dtype = np.result_type(*(row for (row, _, _), _ in parts))
    own = _room(count, dtype, weighed)
    place = np.zeros((1 << _DIGIT) + 1, np.int64)
    for (row, _, _), _ in parts:
        _count(row, 0, place)
    _add_up(place)
    for (row, target, edge), base in parts:
        _move(row, target, edge if len(edge) or not weighed else np.ones(len(row), np.float32), 0, base, place, *own)
    parts.clear()
    for shift in range(_DIGIT, top.bit_length(), _DIGIT):
        place[:] = 0
        _count(own[0], shift, place)
        _add_up(place)
        other = _room(count, dtype, weighed)
        _move(*own, shift, 0, place, *other)
        own = other  # the other copy goes before there is a third
    return own


def _room(count: int, dtype: np.dtype[Any], weighed: bool) -> Entries:
    return own_pages(count, dtype), own_pages(count, np.int32), own_pages(count if weighed else 0, np.float32)


@kernel
def _count(row: NDArray[Any], shift: int, place: NDArray[np.int64]) -> None:
    """Count each digit, from bit `shift` on, one place behind its own."""
    mask = (1 << _DIGIT) - 1
    for i in range(len(row)):
        place[((row[i] >> shift) & mask) + 1] += 1


@kernel
def _add_up(place: NDArray[np.int64]) -> None:
    for digit in range(len(place) - 1):
        place[digit + 1] += place[digit]


@kernel
def _move(
    row: NDArray[Any],
    target: NDArray[np.int32],
    edge: Floats,
    shift: int,
    base: int,
    place: NDArray[np.int64],
    row_out: NDArray[Any],
    target_out: NDArray[np.int32],
    edge_out: Floats,
) -> None:
    """One pass of the sort, by the digit from bit `shift` on; place[digit] is where its next entry goes. base: for targets."""
    mask = (1 << _DIGIT) - 1
    for i in range(len(row)):
        digit = (row[i] >> shift) & mask
        to = place[digit]
        place[digit] = to + 1
        row_out[to] = row[i]
        target_out[to] = target[i] + base if target[i] >= 0 else target[i]
        if len(edge_out) > 0:
            edge_out[to] = edge[i]


@dataclass(frozen=True)
class ScanPiece:
    """A part of a scan. row_at: int64[p], where each row begins among the values read; first: int64[p + 1], its entries."""

    rows: Rows
    """that it reads from: of several node types those of one"""
    part: int
    """number of these"""
    row: NDArray[np.int64]
    """int64[p]: numbers among `rows`"""
    row_at: NDArray[np.int64]
    first: NDArray[np.int64]
    plan: ReadPlan | None
    """None: rows that are not read by a plan"""

    def read(self, buffers: Buffers) -> tuple[AnyArray, int]:
        """(the values, bytes read from the disk); aligned memory, so that an engine may read straight into it."""
        rows = self.rows
        if self.plan is None or not isinstance(rows, ShardedRows):
            values = buffers.empty((len(self.row), *rows.shape[1:]), rows.dtype)
            nbytes = rows.read(self.row, values)
            return values.reshape(-1).view(_bits(rows.dtype)), nbytes
        buffer = buffers.empty((self.plan.nbytes,), np.dtype(np.uint8))
        return buffer.view(_bits(rows.dtype)), rows.engine.read(self.plan, buffer)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What kernels see: they know float16 by its bits only."""
    return np.dtype(np.uint16) if dtype == np.float16 else dtype


def pieces(wanted: NDArray[Any], entries: NDArray[Any], rows: Rows, piece_bytes: int) -> Iterator[ScanPiece]:
    """The pieces of a pass over rows `wanted` (ascending), in file order, each of about so many bytes; of joined rows those of
    one part after the other. entries: [u + 1], where each row's begin, as `SharedScan.first`."""
    parts = [(0, rows)] if not isinstance(rows, JoinedRows) else [(rows.begin[name], own) for name, own in rows.parts.items()]
    ends = np.searchsorted(wanted, [begin for begin, _ in parts[1:]])
    for part, ((before, own), start, stop) in enumerate(zip(parts, [0, *ends], [*ends, len(wanted)], strict=True)):
        most = PLAN_ROWS if isinstance(own, ShardedRows) else max(1, piece_bytes // own.row_bytes)
        for begin in range(int(start), int(stop), most):
            end = min(begin + most, int(stop))
            row = wanted[begin:end].astype(np.int64) - before
            first = entries[begin : end + 1].astype(np.int64)
            if isinstance(own, ShardedRows):
                yield from _planned(row, first, own, part, piece_bytes)
            else:
                yield ScanPiece(own, part, row, np.arange(len(row)) * own.shape[1], first, None)


def _planned(
    row: NDArray[np.int64], first: NDArray[np.int64], rows: ShardedRows, number: int, piece_bytes: int
) -> Iterator[ScanPiece]:
    """The pieces of rows `row` (ascending), whose entries begin at `first`: runs of whole extents."""
    plan = rows.plan(row)
    ends = np.cumsum(plan.length)
    begin = done = 0
    while begin < len(ends):
        stop = max(begin + 1, int(np.searchsorted(ends, done + piece_bytes, side="right")))
        a, b = int(plan.first[begin]), int(plan.first[stop])
        row_at = plan.row_at[a:b] - done
        extents = plan.offset[begin:stop], plan.length[begin:stop]
        part = ReadPlan(plan.row_bytes, *extents, row_at, np.arange(b - a), plan.first[begin : stop + 1] - a)
        yield ScanPiece(rows, number, row[a:b], row_at // rows.dtype.itemsize, first[a : b + 1], part)
        begin, done = stop, int(ends[stop - 1])

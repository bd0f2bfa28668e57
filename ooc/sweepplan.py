"""PURE: sampled batches -> sweeps, whose sums are made in one pass over the rows, and the pieces that a pass is read in."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.budget import SweepSize
from ooc.buffers import Buffers
from ooc.collate import Drawn
from ooc.loading import Work
from ooc.packed import narrow
from ooc.sums import Floats
from stores.jit import kernel
from stores.plan import ReadPlan
from stores.rows import AnyArray, Rows
from stores.zarr_rows import ShardedRows

AHEAD = 1
"""Batches handed out before the model asks for them"""
PLAN_ROWS = 2**18
"""Rows whose reads are planned at once, which takes about 16 MB"""
_DIGIT = 11  # bits of a pass of the radix sort: its counters stay in the processor's first cache


class Rest(NamedTuple):
    """What remains of a sampled batch beside its sums. scale: float32[d], what each sum is multiplied by, or empty for ones."""

    drawn: Drawn
    """without its last hop"""
    scale: Floats

    @property
    def num_rows(self) -> int:
        """Destinations of the first layer: rows of sums."""
        return len(self.drawn.subgraph.node)


@dataclass(frozen=True)
class Waiting:
    """A sampled batch that waits for its sums. An entry is an edge into the first layer's destinations, or one of those itself.

    row: int32|int64[k], the row that an entry needs; target: int32[k], the destination, or ~ it where its own row is meant;
    edge: float32[k], what an edge counts for, or empty. share: its part of a sweep's memory.
    """

    rest: Rest
    row: NDArray[Any]
    target: NDArray[np.int32]
    edge: Floats
    share: SweepSize


def waiting(work: Work, drawn: Drawn) -> Waiting:
    """What a sampled batch wants of the rows."""
    subgraph = drawn.subgraph
    factors, rest = work.factors(drawn)
    count, edges = len(subgraph.indptr) - 1, len(subgraph.source)
    row = np.empty(edges + count, subgraph.node.dtype)
    np.take(subgraph.node, subgraph.source, out=row[:edges], mode="clip")
    row[edges:] = subgraph.node[:count]
    target = np.empty(edges + count, np.int32)
    target[:edges] = np.repeat(np.arange(count, dtype=np.int32), np.diff(subgraph.indptr))
    target[edges:] = ~np.arange(count, dtype=np.int32)
    edge = factors.edge
    if len(edge):
        edge = np.concatenate([edge, np.ones(count, np.float32)])
    return Waiting(Rest(rest, factors.target), narrow(row), target, edge, work.share_of_sweep(drawn))


@dataclass(frozen=True)
class Sweep:
    """Batches whose sums are made in one pass.

    start: int64[batches + 1], batch k has the rows of sums start[k]:start[k + 1]; row: [u], ascending, the rows to read;
    first: int64[u + 1], row u is wanted by entries first[u]:first[u + 1]; target, edge: of each entry, as in `Waiting`.
    """

    batches: tuple[Rest, ...]
    start: NDArray[np.int64]
    row: NDArray[Any]
    first: NDArray[np.int64]
    target: NDArray[np.int32]
    edge: Floats
    size: SweepSize
    """what its batches take of the memory"""

    @property
    def num_rows(self) -> int:
        """Rows of sums."""
        return int(self.start[-1])

    def only(self, k: int) -> "Sweep":
        """A sweep for batch k alone."""
        base, stop = int(self.start[k]), int(self.start[k + 1])
        to = np.where(self.target < 0, ~self.target, self.target)
        own = np.flatnonzero((to >= base) & (to < stop))
        target = self.target[own]
        target += np.where(target < 0, base, -base).astype(np.int32)
        row = np.repeat(self.row, np.diff(self.first))[own]
        edge = self.edge[own] if len(self.edge) else self.edge
        return _swept(self.batches[k : k + 1], row, target, edge, self.size)


def make_sweep(batches: list[Waiting]) -> Sweep:
    """Put the entries of batches in file order; those of one row stay in the order of batches, destinations and edges."""
    start = np.zeros(len(batches) + 1, np.int64)
    np.cumsum([batch.rest.num_rows for batch in batches], out=start[1:])
    target = np.concatenate([batch.target for batch in batches])
    at = 0
    for batch, base in zip(batches, start[:-1].tolist(), strict=True):
        own = target[at : at + len(batch.target)]
        own += np.where(own < 0, -base, base).astype(np.int32)
        at += len(own)
    row = np.concatenate([batch.row for batch in batches])
    weighed = any(len(batch.edge) for batch in batches)  # a batch without edges has no factors either
    edge = np.concatenate(
        [batch.edge if len(batch.edge) or not weighed else np.ones(len(batch.row), np.float32) for batch in batches]
    )
    row, target, edge = _sorted(row, target, edge)
    size = reduce(SweepSize.joined, (batch.share for batch in batches))
    return _swept(tuple(batch.rest for batch in batches), row, target, edge, size)


def _swept(batches: tuple[Rest, ...], row: NDArray[Any], target: NDArray[np.int32], edge: Floats, size: SweepSize) -> Sweep:
    """A sweep of entries in file order."""
    start = np.zeros(len(batches) + 1, np.int64)
    np.cumsum([batch.num_rows for batch in batches], out=start[1:])
    begins = np.flatnonzero(np.diff(row, prepend=row[:1] - 1))
    return Sweep(batches, start, row[begins], np.append(begins, len(row)), target, edge, size)


def _sorted(row: NDArray[Any], target: NDArray[np.int32], edge: Floats) -> tuple[NDArray[Any], NDArray[np.int32], Floats]:
    """Entries by ascending row, in order: a stable radix sort, least digit first."""
    top = int(row.max()) if len(row) else 0
    other = np.empty_like(row), np.empty_like(target), np.empty_like(edge)
    own = row, target, edge
    for shift in range(0, max(1, top.bit_length()), _DIGIT):
        _by_digit(*own, shift, *other)
        own, other = other, own
    return own


@kernel
def _by_digit(
    row: NDArray[Any],
    target: NDArray[np.int32],
    edge: Floats,
    shift: int,
    row_out: NDArray[Any],
    target_out: NDArray[np.int32],
    edge_out: Floats,
) -> None:
    """One pass of the sort, by the digit from bit `shift` on."""
    mask = (1 << _DIGIT) - 1
    place = np.zeros((1 << _DIGIT) + 1, np.int64)
    for i in range(len(row)):
        place[((row[i] >> shift) & mask) + 1] += 1
    for digit in range(mask + 1):
        place[digit + 1] += place[digit]
    for i in range(len(row)):
        digit = (row[i] >> shift) & mask
        to = place[digit]
        place[digit] = to + 1
        row_out[to] = row[i]
        target_out[to] = target[i]
        if len(edge) > 0:
            edge_out[to] = edge[i]


def sweeps(batches: Iterator[Waiting], pool: int) -> Iterator[Sweep]:
    """Sweeps of consecutive batches, none left out, each of as many as fit `pool` bytes, but of one at least.

    A failure comes after the sweep of the batches before it.
    """
    draft: list[Waiting] = []
    size: SweepSize | None = None
    failure: BaseException | None = None
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except BaseException as error:  # the batches before it come first
            failure = error
            break
        larger = batch.share if size is None else size.joined(batch.share)
        if draft and larger.nbytes > pool:
            yield _made_of(draft)
            larger = batch.share
        draft.append(batch)
        size = larger
        del batch
    if draft:
        yield _made_of(draft)
    if failure is not None:
        raise failure


def _made_of(draft: list[Waiting]) -> Sweep:
    """The sweep of a draft, which is emptied: what a generator refers to stays in memory while the sweep is under way."""
    sweep = make_sweep(draft)
    draft.clear()
    return sweep


def sweeps_pay(rows: Rows, pool: int) -> bool:
    """Whether to read the rows again for every sweep; not where all of them fit into memory and stay there."""
    return rows.shape[0] * rows.row_bytes > pool // 2


@dataclass(frozen=True)
class Piece:
    """A part of a pass. row_at: int64[p], where each row begins among the values read; first: int64[p + 1], its entries."""

    row: NDArray[np.int64]
    row_at: NDArray[np.int64]
    first: NDArray[np.int64]
    plan: ReadPlan | None
    """None: rows that are not read by a plan"""

    def read(self, rows: Rows, buffers: Buffers) -> tuple[AnyArray, int]:
        """(the values, bytes read from the disk); aligned memory, so that an engine may read straight into it."""
        if self.plan is None or not isinstance(rows, ShardedRows):
            values = buffers.empty((len(self.row), *rows.shape[1:]), rows.dtype)
            nbytes = rows.read(self.row, values)
            return values.reshape(-1).view(_bits(rows.dtype)), nbytes
        buffer = buffers.empty((self.plan.nbytes,), np.dtype(np.uint8))
        return buffer.view(_bits(rows.dtype)), rows.engine.read(self.plan, buffer)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What kernels see: they know float16 by its bits only."""
    return np.dtype(np.uint16) if dtype == np.float16 else dtype


def pieces(sweep: Sweep, rows: Rows, piece_bytes: int) -> Iterator[Piece]:
    """The pieces of a pass, in file order, each of about so many bytes."""
    most = PLAN_ROWS if isinstance(rows, ShardedRows) else max(1, piece_bytes // rows.row_bytes)
    for begin in range(0, len(sweep.row), most):
        row, first = sweep.row[begin : begin + most].astype(np.int64), sweep.first[begin : begin + most + 1]
        if isinstance(rows, ShardedRows):
            yield from _planned(row, first, rows, piece_bytes)
        else:
            yield Piece(row, np.arange(len(row)) * rows.shape[1], first, None)


def _planned(row: NDArray[np.int64], first: NDArray[np.int64], rows: ShardedRows, piece_bytes: int) -> Iterator[Piece]:
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
        yield Piece(row[a:b], row_at // rows.dtype.itemsize, first[a : b + 1], part)
        begin, done = stop, int(ends[stop - 1])

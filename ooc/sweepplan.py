"""PURE: sampled batches -> sweeps, whose sums are made in one pass over the rows, and the pieces that a pass is read in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
PIECES, PIECE_BYTES = 3, 8 * 2**20
"""Pieces of a pass that are in memory at once: two being read, so that the disk never waits, and one being added up"""
_ENTRY_COPIES = 4
"""of a sweep's entries: under way, ready, being put together, and once more while they are sorted"""
_DIGIT = 11  # bits of a pass of the radix sort: its counters stay in the processor's first cache


@dataclass(frozen=True)
class Waiting:
    """A sampled batch that waits for its sums. An entry is an edge into the first layer's destinations, or one of those itself.

    row: int32|int64[k], the row that an entry needs; target: int32[k], the destination, or ~ it where its own row is meant;
    edge: float32[k], what an edge counts for, or empty; scale: float32[d], what a destination's sum does, or empty.
    """

    rest: Drawn
    """the batch without its last hop"""
    row: NDArray[Any]
    target: NDArray[np.int32]
    edge: Floats
    scale: Floats
    nbytes: int
    """of the batch from the sweep to the model"""
    activations: int
    """bytes that the model needs for it"""
    drawing: int
    """bytes that drawing it took"""

    @property
    def num_rows(self) -> int:
        """Destinations of the first layer: rows of sums."""
        return len(self.rest.subgraph.node)


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
    sizes = work.nbytes(drawn), work.activation_bytes(drawn), subgraph.nbytes
    return Waiting(rest, narrow(row), target, edge, factors.target, *sizes)


@dataclass(frozen=True)
class Sweep:
    """Batches whose sums are made in one pass.

    start: int64[batches + 1], batch k has the rows of sums start[k]:start[k + 1]; row: [u], ascending, the rows to read;
    first: int64[u + 1], row u is wanted by entries first[u]:first[u + 1]; target, edge: of each entry, as in `Waiting`.
    """

    batches: tuple[Waiting, ...]
    start: NDArray[np.int64]
    row: NDArray[Any]
    first: NDArray[np.int64]
    target: NDArray[np.int32]
    edge: Floats

    @property
    def num_rows(self) -> int:
        """Rows of sums."""
        return int(self.start[-1])

    def only(self, k: int) -> "Sweep":
        """A sweep for batch k alone."""
        return make_sweep([self.batches[k]])


def make_sweep(batches: list[Waiting]) -> Sweep:
    """Put the entries of batches in file order; those of one row stay in the order of batches, destinations and edges."""
    start = np.zeros(len(batches) + 1, np.int64)
    np.cumsum([batch.num_rows for batch in batches], out=start[1:])
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
    begins = np.flatnonzero(np.diff(row, prepend=row[:1] - 1))
    return Sweep(tuple(batches), start, row[begins], np.append(begins, len(row)), target, edge)


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


def sweeps(batches: Iterator[Waiting], work: Work, pool: int, threads: int) -> Iterator[Sweep]:
    """Sweeps of consecutive batches, none left out, each of as many as fit `pool` bytes, but of one at least.

    threads: batches being drawn at once. A failure comes after the sweep of the batches before it.
    """
    draft: list[Waiting] = []
    size = Size(work, pool, threads)
    failure: BaseException | None = None
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except BaseException as error:  # the batches before it come first
            failure = error
            break
        larger = size.with_one(batch)
        if draft and not larger.fits:
            yield make_sweep(draft)
            draft, larger = [], Size(work, pool, threads).with_one(batch)
        draft.append(batch)
        size = larger
        del batch
    if draft:
        yield make_sweep(draft)
    if failure is not None:
        raise failure


@dataclass(frozen=True)
class Size:
    """What a sweep takes of the memory."""

    work: Work
    pool: int
    threads: int
    kept: int = 0
    """bytes of sums"""
    entries: int = 0
    activations: int = 0
    """of the largest batch, and so below"""
    drawing: int = 0

    def with_one(self, batch: Waiting) -> "Size":
        """The same with one batch more."""
        entries = self.entries + batch.row.nbytes + batch.target.nbytes + batch.edge.nbytes
        activations, drawing = max(self.activations, batch.activations), max(self.drawing, batch.drawing)
        return Size(self.work, self.pool, self.threads, self.kept + batch.nbytes, entries, activations, drawing)

    @property
    def fits(self) -> bool:
        """Whether two such sweeps fit, with what is drawn and read meanwhile and the model's activations."""
        lockstep = self.work.lockstep
        drawn = 4 * self.threads * self.drawing if lockstep is None else lockstep.max_bytes or 0
        besides = drawn + self.activations + PIECES * PIECE_BYTES
        return 2 * self.kept + _ENTRY_COPIES * self.entries + besides <= self.pool


def swept_bytes(sweep: Sweep) -> int:
    """What two sweeps like this one take, and the pieces under way: see `Size`."""
    entries = sum(batch.row.nbytes + batch.target.nbytes + batch.edge.nbytes for batch in sweep.batches)
    return 2 * sum(batch.nbytes for batch in sweep.batches) + _ENTRY_COPIES * entries + PIECES * PIECE_BYTES


def sweeps_pay(work: Work, pool: int) -> bool:
    """Whether to read the rows again for every sweep; not where all of them fit into memory and stay there."""
    assert work.x is not None
    return work.x.shape[0] * work.x.row_bytes > pool // 2


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


def pieces(sweep: Sweep, rows: Rows) -> Iterator[Piece]:
    """The pieces of a pass, in file order, each of about PIECE_BYTES."""
    row, width = sweep.row.astype(np.int64), rows.shape[1]
    if not isinstance(rows, ShardedRows):
        most = max(1, PIECE_BYTES // rows.row_bytes)
        for begin in range(0, len(row), most):
            own = row[begin : begin + most]
            yield Piece(own, np.arange(len(own)) * width, sweep.first[begin : begin + len(own) + 1], None)
        return
    plan = rows.plan(row)
    ends = np.cumsum(plan.length)
    begin = done = 0
    while begin < len(ends):
        stop = max(begin + 1, int(np.searchsorted(ends, done + PIECE_BYTES, side="right")))
        a, b = int(plan.first[begin]), int(plan.first[stop])
        row_at = plan.row_at[a:b] - done
        extents = plan.offset[begin:stop], plan.length[begin:stop]
        part = ReadPlan(plan.row_bytes, *extents, row_at, np.arange(b - a), plan.first[begin : stop + 1] - a)
        yield Piece(row[a:b], row_at // rows.dtype.itemsize, sweep.first[a : b + 1], part)
        begin, done = stop, int(ends[stop - 1])

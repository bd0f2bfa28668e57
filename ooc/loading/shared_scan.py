"""Shared scans: the first layer's aggregates of many batches, made while the features go by once in file order.

Batches that are pre-aggregated (`ooc.graph.aggregation`) need no row twice: a row that was read is added to the aggregates it
belongs to, of all batches that wait, and forgotten. So memory holds two rows for each destination of the first layer, not one
for every node, and a tenth of the reads serves the same batches. (Cooperative scans of databases, Zukowski et al., VLDB 2007,
share one pass in this way.) Two scans are in memory (`scan_memory.py`): one serves batches while the other is made. A batch is
the same, to the bit, as gathered from memory.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats, scale_rows, scatter_aggregates
from ooc.graph.blocks import narrow
from ooc.loading.batch_bytes import COPIES, PIECES, ScanBytes
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import RowLease, Stopped, registry_of
from ooc.loading.read_strategy import (
    ReadGroup,
    ReadSession,
    ReadStrategy,
    ServedBatch,
    chained,
    clocks_of,
    first_alone,
    grouped,
    read_all_or_each,
)
from ooc.loading.scan_memory import RowCopies, ScanMemory, ScanRows
from ooc.loading.shared_scan_plan import BatchRemainder, ScanDraft, ScanPiece, SharedScan, WaitingBatch, pieces
from ooc.loading.shared_sums import digests_of
from ooc.runtime.buffers import Buffers
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import keep_large_blocks, return_freed
from ooc.runtime.memory_plan import SECOND_SHARE, MemoryPlan
from ooc.runtime.pipeline import Pipeline
from ooc.runtime.range_io import ahead


@dataclass(frozen=True)
class FinishedScan(ReadGroup):
    """A scan's batches whose aggregates are in memory."""

    scan: SharedScan
    """without entries"""
    rows: ScanRows

    @classmethod
    def of(cls, done: int, error: Exception | None, scan: SharedScan, rows: ScanRows) -> "FinishedScan":
        return cls(done, error, scan.without_entries(), rows)


@dataclass(frozen=True)
class SharedScans(ReadStrategy):
    """One pass over the file makes the aggregates of as many batches as memory holds; `memory` is that of a scan."""

    memory: ScanBytes

    @property
    def reserves_blocks(self) -> bool:
        return self.memory.reserved_bytes > self.memory.spare_bytes

    def pool(self, budget: MemoryPlan) -> int:
        return budget.batches + self.memory.spare_bytes

    def shared(self, pool: int, parts: int) -> "SharedScans":
        """The same strategy for a pipeline that has `pool` bytes, one of so many parts of all."""
        memory, stages = self.memory.shared(pool, parts), self.stages
        return replace(self, stages=replace(stages, sample=stages.sample.shared(memory, parts)), memory=memory)

    def waiting(self, drawn: SampledBatch) -> WaitingBatch:
        """What a sampled batch wants of the rows."""
        stages = self.stages
        wanted = stages.load.entries(drawn)
        size = self.memory.size(drawn, stages.sample.drawing_bytes(drawn.subgraph.nbytes))
        rest, row = BatchRemainder(wanted.rest, wanted.num_rows), narrow(wanted.row)
        digest = None
        if self.memory.shares_sums:
            digest = digests_of(row, wanted.target, wanted.edge, wanted.scale, wanted.num_rows)
        return WaitingBatch(rest, row, wanted.target, wanted.edge, wanted.scale, wanted.own, size, digest)

    def plan(self, batches: Iterator[WaitingBatch], pool: int, alone: bool = False) -> Iterator[SharedScan]:
        """Scans of consecutive batches, each of as many as fit `pool` bytes, but of one at least; none left out.

        alone: whether the first batch has a scan of its own.
        """
        memory = self.memory
        drafts = (ScanDraft(pool, memory.self_row_bytes, memory.reserved_bytes) for _ in repeat(None))
        if alone:
            yield from grouped(islice(batches, 1), drafts)
        yield from grouped(batches, drafts)

    def pipeline(self, cursors: Iterator[Cursor], budget: MemoryPlan, prefetch: int, clocks: dict[str, Clock]) -> Pipeline:
        own = clocks_of(clocks, ("sample", "group", "read", "sum", "collate"))
        return chained(self._session(self.pool(budget), own["read"]), cursors, own)

    def _session(self, pool: int, clock: Clock) -> "ScanSession":
        """With less memory where another loader reads the same rows at the same time."""
        assert self.disk_rows is not None
        lease = registry_of(self.disk_rows).begin_scans()
        try:
            if lease.alone:
                return ScanSession(self, clock, pool, lease)
            pool //= SECOND_SHARE
            return ScanSession(self.shared(pool, SECOND_SHARE), clock, pool, lease)
        except BaseException:
            lease.end()
            raise


class ScanSession(ReadSession):
    """Makes aggregates, scan by scan, while those before serve their batches.

    Pieces of the file are read by threads of its own, and added up by the caller's. pool: bytes for all batches and scans alive
    at once; where one takes what is reserved for freed blocks, the C library keeps none any more. clock: of the reads; see
    `first_alone`. lease: None where nobody else may read the rows.
    """

    stage = "sum"

    def __init__(self, strategy: SharedScans, clock: Clock, pool: int = 1 << 62, lease: RowLease | None = None) -> None:
        rows, stages = strategy.disk_rows, strategy.stages
        assert rows is not None
        self._strategy, self._rows, self._load, self._collate = strategy, rows, stages.load, stages.collate
        self.sample, self.prepare, self.pool = stages.sample, strategy.waiting, pool
        self._memory, self._sums, self._self_rows = ScanMemory(), RowCopies(COPIES), RowCopies(COPIES)
        self._turn = 0
        self._returns = False
        self._decoders = self._load.decoders
        self._buffers = Buffers(kept=PIECES, direct=True, least_bytes=1)
        self._readers = ThreadPoolExecutor(PIECES, thread_name_prefix="ooc-piece")
        self._clock, self._lock, self._lease = clock, threading.Lock(), lease
        self._first_alone = first_alone([rows], clock)
        self._stopped = False

    def plan(self, batches: Iterator[WaitingBatch]) -> Iterator[SharedScan]:
        return self._strategy.plan(batches, self.pool, self._first_alone)

    def begin(self, turn: int) -> None:
        self._memory.request(turn)

    def read(self, group: SharedScan) -> FinishedScan:
        memory = self._strategy.memory
        if group.size.nbytes > self.pool - memory.reserved_bytes and not self._returns:
            self._returns = keep_large_blocks(False)
            return_freed()
        rows, most = self.room_for(group, self._turn), self.pool - memory.reserved_bytes - group.size.beside_rows
        self._turn += 1

        def filling(count: int) -> None:
            if group.in_file_order:
                self._memory.fill(rows, count * memory.self_row_bytes, most)

        def read_one(k: int) -> None:
            filling(group.num_self_rows)
            made = group.made_for(k)
            rows.neighbor[made] = 0
            self._add_all(group.only(k), rows)
            if len(group.scale):
                rows.neighbor[made] *= group.scale[made, None]

        def read_all() -> None:
            self._add_all(group, rows, filling)
            scale_rows(rows.neighbor, group.scale)

        done, error = read_all_or_each(len(group.batches), read_all, read_one)
        return FinishedScan.of(done, error, group, rows)

    def room_for(self, scan: SharedScan, turn: int, gives_back: bool = True) -> ScanRows:
        """Memory for a scan's aggregates, zeros, and the rows it keeps; gives_back: whether batches that were served do."""
        shape = scan.num_rows, scan.num_self_rows, self._load.width
        return self._memory.take(shape, scan.start[1:] * gives_back, turn, scan.in_file_order)

    def _add_all(self, scan: SharedScan, rows: ScanRows, filling: Callable[[int], None] | None = None) -> None:
        self.add_up(scan, rows, self.pieces(scan), filling)

    def pieces(self, scan: SharedScan) -> Iterator[ScanPiece]:
        return pieces(scan.row, scan.first, self._rows, self._strategy.memory.piece_bytes)

    def add_up(
        self, scan: SharedScan, rows: ScanRows, todo: Iterator[ScanPiece], filling: Callable[[int], None] | None = None
    ) -> None:
        """Read pieces `todo` of a scan, a few ahead, and add them in their order to its aggregates so far (zeros at first).

        filling: called with the number of self rows that are in memory after each.
        """
        filled = 0
        for piece, values in ahead(self._readers, lambda piece: (piece, self._read(piece)), self._while_wanted(todo), PIECES):
            entries = slice(int(piece.first[0]), int(piece.first[-1]))
            of_row = piece.first - piece.first[0]
            target, edge = scan.target[entries], scan.edge[entries]
            decoder = self._decoders[piece.part]
            if filling is not None:
                filled += int(np.count_nonzero(target < 0))
                filling(filled)
            scatter_aggregates(values, *decoder, piece.row_at, of_row, target, edge, rows.neighbor, rows.self_rows)
            del values  # before the next one is read

    def _while_wanted(self, todo: Iterator[ScanPiece]) -> Iterator[ScanPiece]:
        for piece in todo:
            if self._stopped:
                raise Stopped
            yield piece

    def _read(self, piece: ScanPiece) -> NDArray[Any]:
        """The values of a piece's extents, or of its rows one behind the other."""
        start = time.perf_counter()
        values, nbytes = piece.read(self._buffers)
        with self._lock:
            self._clock.worked(self._clock.items, start, time.perf_counter(), [])
            self._clock.items += 1
        self._load.counts.add(len(piece.row_at), nbytes)
        return values

    def collate(self, served: ServedBatch) -> tuple[int, Any]:
        made: FinishedScan = served.group
        scan, rows, k = made.scan, made.rows, served.k
        sums, own = scan.sums[k], scan.own[int(scan.own_start[k]) : int(scan.own_start[k + 1])]
        if sums is None:
            neighbor = rows.part(k, slice(int(scan.start[k]), int(scan.start[k + 1])))
        else:
            neighbor = self._copy(rows.neighbor, sums, self._sums)
            rows.served(k)
        once = (
            k == 0 and not scan.in_file_order and len(own) > 0 and own[-1] == len(own) - 1
        )  # no node came twice: in its order
        if once and not self._load.buffers.pinned:
            self_row = rows.self_rows[: len(own)]
        else:
            self_row = self._copy(rows.self_rows, own, self._self_rows)
        return self._collate.collate(self._load.aggregated(scan.batches[k].drawn, neighbor, self_row))

    def _copy(self, rows: Floats, at: NDArray[np.int32], copies: RowCopies) -> Floats:
        """A batch's own copy of rows `at`, page-locked where a GPU follows."""
        shape, buffers = (len(at), rows.shape[1]), self._load.buffers
        own = buffers.empty(shape, rows.dtype) if buffers.pinned else copies.take(shape)
        return np.take(rows, at, axis=0, out=own, mode="clip")

    def stop(self) -> None:
        """End all waiting, and reads that have not begun. It may come from a collection in the middle of anything, in a thread
        that holds the lock of `_readers` too."""
        if self._lease is not None:
            self._lease.stop()
        self._stopped = True
        self._memory.close()

    def closing(self) -> None:
        if self._lease is not None:
            self._lease.stopping = True

    def end(self) -> None:
        """End the threads that read. Not while aggregates are made."""
        self.stop()
        self._readers.shutdown()
        if self._lease is not None:
            self._lease.end()

"""Shared scans: the first layer's aggregates of many batches, made while the features go by once in file order.

Batches that are pre-aggregated (`ooc.graph.aggregation`) need no row twice: a row that was read is added to the aggregates it
belongs to, of all batches that wait, and forgotten. So memory holds two rows for each destination of the first layer, not one
for every node, and a tenth of the reads serves the same batches. (Cooperative scans of databases, Zukowski et al., VLDB 2007,
share one pass in this way.) Two scans' aggregates are in memory: one serves batches while the other is made. A batch is the
same, to the bit, as gathered from memory.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
    grouped,
    read_all_or_each,
)
from ooc.loading.shared_scan_plan import BatchRemainder, ScanDraft, ScanPiece, SharedScan, WaitingBatch, pieces
from ooc.runtime.buffers import Buffers, leased
from ooc.runtime.clock import Clock
from ooc.runtime.clock import waiting as waits
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import keep_large_blocks, return_freed
from ooc.runtime.memory_plan import SECOND_SHARE, MemoryPlan
from ooc.runtime.pipeline import Pipeline

GRACE_SECONDS = 0.5
"""after which a consumer that asks for more, and has let go of nothing, is taken to keep its batches"""


class FloatBuffers:
    """`count` float32 buffers; one is used again when nobody refers to an array over it any more.

    Memory that was never written costs nothing. A consumer that keeps its batches makes more buffers necessary.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: list[Floats] = [np.empty(0, np.float32)] * count
        self._requested = -1
        self._closed = self._kept = False
        self._changed = threading.Condition()  # over an RLock: a buffer may come back in a collection, in the middle of all

    def take(self, shape: tuple[int, int], turn: int | None = None) -> Floats:
        """float32[shape], uninitialised; waits for a buffer.

        turn: of the scan it is for, whose batches nobody has requested yet; None: of a batch, as large as the one before or
        somewhat larger. Raises Stopped where the buffers are closed, or get closed meanwhile.
        """
        size = shape[0] * shape[1]
        with self._changed:
            with waits():
                self._changed.wait_for(lambda: self._closed or self._free or turn is None or self._requested >= turn)
                # Requested, and none is free: the consumer is about to let go of the batch before, or it keeps its batches.
                grace = 0.0 if self._kept and turn is None else GRACE_SECONDS
                self._kept = not self._changed.wait_for(lambda: self._closed or self._free, grace)
            if self._closed:
                raise Stopped
            buffer = self._free.pop() if self._free else np.empty(0, np.float32)
        if len(buffer) < size:
            buffer = np.empty(size * 9 // 8 if turn is None else size, np.float32)
        return leased(buffer, self._give, buffer)[:size].reshape(shape)

    def _give(self, buffer: Floats) -> None:
        with self._changed:
            if len(self._free) < self._count:
                self._free.append(buffer)
            self._changed.notify_all()

    def request(self, turn: int) -> None:
        """The consumer is through with everything before what is made for `turn`, or keeps it."""
        with self._changed:
            self._requested = turn
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting, now and later; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class FinishedScan(ReadGroup):
    """A scan's batches whose aggregates are in memory.

    start, own, own_start: as of `SharedScan`. neighbor: float32[rows, f], neighbors' aggregates of all its batches, one behind
    the other; self_rows: float32[num_self_rows, f], the destinations' own rows, which batches share.
    """

    batches: tuple[BatchRemainder, ...]
    start: NDArray[np.int64]
    own: NDArray[np.int32]
    own_start: NDArray[np.int64]
    neighbor: Floats
    self_rows: Floats


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
        rest = BatchRemainder(wanted.rest, wanted.scale, wanted.num_rows)
        return WaitingBatch(rest, narrow(wanted.row), wanted.target, wanted.edge, wanted.own, size)

    def plan(self, batches: Iterator[WaitingBatch], pool: int) -> Iterator[SharedScan]:
        """Scans of consecutive batches, each of as many as fit `pool` bytes, but of one at least; none left out."""
        memory = self.memory
        return grouped(batches, (ScanDraft(pool, memory.self_row_bytes, memory.reserved_bytes) for _ in repeat(None)))

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
    at once; where one takes what is reserved for freed blocks, the C library keeps none any more. clock: of the reads. lease:
    None where nobody else may read the rows.
    """

    stage = "sum"

    def __init__(self, strategy: SharedScans, clock: Clock, pool: int = 1 << 62, lease: RowLease | None = None) -> None:
        rows, stages = strategy.disk_rows, strategy.stages
        assert rows is not None
        self._strategy, self._rows, self._load, self._collate = strategy, rows, stages.load, stages.collate
        self.sample, self.prepare, self.pool = stages.sample, strategy.waiting, pool
        self._aggregates, self._copies = FloatBuffers(2), FloatBuffers(COPIES)
        self._turn = 0
        self._returns = False
        self._decoders = self._load.decoders
        self._buffers = Buffers(kept=PIECES, direct=True, least_bytes=1)
        self._readers = ThreadPoolExecutor(PIECES, thread_name_prefix="ooc-piece")
        self._clock, self._lock, self._lease = clock, threading.Lock(), lease
        self._stopped = False

    def plan(self, batches: Iterator[WaitingBatch]) -> Iterator[SharedScan]:
        return self._strategy.plan(batches, self.pool)

    def begin(self, turn: int) -> None:
        self._aggregates.request(turn)

    def read(self, group: SharedScan) -> FinishedScan:
        memory = self._strategy.memory
        if group.size.nbytes > self.pool - memory.reserved_bytes and not self._returns:
            self._returns = keep_large_blocks(False)
            return_freed()
        neighbor, self_rows = self.room_for(group, self._turn)
        self._turn += 1

        def read_one(k: int) -> None:
            self._add_all(group.only(k), neighbor[group.start[k] : group.start[k + 1]], self_rows)

        done, error = read_all_or_each(len(group.batches), lambda: self._add_all(group, neighbor, self_rows), read_one)
        return FinishedScan(done, error, group.batches, group.start, group.own, group.own_start, neighbor, self_rows)

    def room_for(self, scan: SharedScan, turn: int) -> tuple[Floats, Floats]:
        """Memory for a scan's aggregates and the rows it keeps, float32[rows, f] and float32[num_self_rows, f]."""
        both = self._aggregates.take((scan.num_rows + scan.num_self_rows, self._load.width), turn)
        return both[: scan.num_rows], both[scan.num_rows :]

    def _add_all(self, scan: SharedScan, neighbor: Floats, self_rows: Floats) -> None:
        neighbor[:] = 0
        self.add_up(scan, neighbor, self_rows, self.pieces(scan))

    def pieces(self, scan: SharedScan) -> Iterator[ScanPiece]:
        return pieces(scan, self._rows, self._strategy.memory.piece_bytes)

    def add_up(self, scan: SharedScan, neighbor: Floats, self_rows: Floats, todo: Iterator[ScanPiece]) -> None:
        """Read pieces `todo` of a scan, a few ahead, and add them in their order to its aggregates so far (zeros at first)."""
        under_way: deque[tuple[ScanPiece, Future[NDArray[Any]]]] = deque()
        try:
            while True:
                for piece in islice(todo, PIECES - len(under_way)):
                    if self._stopped:
                        raise Stopped
                    under_way.append((piece, self._readers.submit(self._read, piece)))
                if not under_way:
                    return
                piece, read = under_way.popleft()
                with waits():
                    values = read.result()
                entries = slice(int(piece.first[0]), int(piece.first[-1]))
                of_row = piece.first - piece.first[0]
                target, edge = scan.target[entries], scan.edge[entries]
                decoder = self._decoders[piece.part]
                scatter_aggregates(values, *decoder, piece.row_at, of_row, target, edge, neighbor, self_rows)
                del values, read  # before the next one is submitted
        finally:
            wait([read for _, read in under_way if not read.cancel()])  # whoever closes the loader may close the rows next

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
        scan: FinishedScan = served.group
        mine = slice(int(scan.start[served.k]), int(scan.start[served.k + 1]))
        rest, neighbor = scan.batches[served.k], scan.neighbor[mine]
        own = scan.own[int(scan.own_start[served.k]) : int(scan.own_start[served.k + 1])]
        scale_rows(neighbor, rest.scale)
        buffers = self._load.buffers
        if served.k == 0 and not buffers.pinned and len(own) and own[-1] == len(own) - 1:  # no node came twice: in its order
            self_row = scan.self_rows[: len(own)]
        else:
            shape = len(own), neighbor.shape[1]
            self_row = buffers.empty(shape, neighbor.dtype) if buffers.pinned else self._copies.take(shape)
            np.take(scan.self_rows, own, axis=0, out=self_row, mode="clip")
        return self._collate.collate(self._load.aggregated(rest.drawn, neighbor, self_row))

    def stop(self) -> None:
        """End all waiting, and reads that have not begun. It may come from a collection in the middle of anything, in a thread
        that holds the lock of `_readers` too."""
        if self._lease is not None:
            self._lease.stop()
        self._stopped = True
        self._aggregates.close()

    def closing(self) -> None:
        if self._lease is not None:
            self._lease.stopping = True

    def end(self) -> None:
        """End the threads that read. Not while aggregates are made."""
        self.stop()
        self._readers.shutdown()
        if self._lease is not None:
            self._lease.end()

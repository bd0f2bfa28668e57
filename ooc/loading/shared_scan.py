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
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats, scale_rows, scatter_aggregates
from ooc.loading.batch_bytes import COPIES, PIECES, ScanBytes
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import Stopped, registry_of
from ooc.loading.load_stage import BatchStages
from ooc.loading.read_strategy import ReadStrategy, ServedBatch, chained, clocks_of, read_all_or_each
from ooc.loading.shared_scan_plan import BatchRemainder, ScanPiece, SharedScan, WaitingBatch, pieces, shared_scans, waiting
from ooc.runtime.buffers import Buffers, leased
from ooc.runtime.clock import Clock
from ooc.runtime.clock import waiting as waits
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import keep_large_blocks, return_freed
from ooc.runtime.memory_plan import SECOND_SHARE, MemoryPlan
from ooc.runtime.pipeline import Pipeline

GRACE_SECONDS = 0.5
"""after which a consumer that asks for more, and has let go of nothing, is taken to keep its batches"""


class AggregateBuffers:
    """Two buffers for aggregates, taken in turn; one comes back when nobody refers to an array over it any more.

    Memory that was never written costs nothing. A consumer that keeps its batches makes a third one necessary, and so on.

    >>> memory = AggregateBuffers()
    >>> neighbor, self_rows = memory.take(rows=1000, self_rows=900, width=128, turn=0)  # float32[1000, 128], float32[900, 128]
    """

    def __init__(self) -> None:
        self._free: list[Floats] = [np.empty(0, np.float32), np.empty(0, np.float32)]
        self._asked = -1
        self._closed = False
        self._changed = threading.Condition()  # over an RLock: a buffer may come back in a collection, in the middle of all

    def take(self, rows: int, self_rows: int, width: int, turn: int) -> tuple[Floats, Floats]:
        """float32[rows, width] and float32[self_rows, width], uninitialised. Waits for a buffer, but not once the consumer
        asks for what `turn` makes.

        Raises Stopped where that is closed, or gets closed meanwhile.
        """
        with self._changed:
            with waits():
                self._changed.wait_for(lambda: self._closed or self._free or self._asked >= turn)
                # Asked for, and none is free: the consumer is about to let go of the batch before, or it keeps its batches.
                self._changed.wait_for(lambda: self._closed or self._free, GRACE_SECONDS)
            if self._closed:
                raise Stopped
            buffer = self._free.pop() if self._free else np.empty(0, np.float32)
        if len(buffer) < (rows + self_rows) * width:
            buffer = np.empty((rows + self_rows) * width, np.float32)
        lease = leased(buffer, self._give, buffer)[: (rows + self_rows) * width].reshape(rows + self_rows, width)
        return lease[:rows], lease[rows:]

    def _give(self, buffer: Floats) -> None:
        with self._changed:
            if len(self._free) < 2:
                self._free.append(buffer)
            self._changed.notify_all()

    def ask(self, turn: int) -> None:
        """The consumer is through with everything before the aggregates of `turn`, or keeps it."""
        with self._changed:
            self._asked = turn
            self._changed.notify_all()

    def close(self) -> None:
        """End all waiting, now and later; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class SelfRowBuffers:
    """Buffers for batches' own copies of their destinations' rows: as many as are alive at once, then used again.

    One comes back as the consumer lets go of its batch, which is when the copy after the next is made; a consumer that keeps
    its batches gets more of them.

    >>> SelfRowBuffers(COPIES).take(rows=900, width=128).shape
    (900, 128)
    """

    def __init__(self, count: int) -> None:
        self._free: deque[Floats] = deque([np.empty(0, np.float32)] * count, maxlen=count)
        self._kept = False
        self._changed = threading.Condition()  # over an RLock, as in `AggregateBuffers`

    def take(self, rows: int, width: int) -> Floats:
        """float32[rows, width], uninitialised."""
        with self._changed:
            with waits():
                self._kept = not self._changed.wait_for(lambda: self._free, 0.0 if self._kept else GRACE_SECONDS)
            buffer = np.empty(0, np.float32) if self._kept else self._free.popleft()
        if len(buffer) < rows * width:
            buffer = np.empty(rows * width * 9 // 8, np.float32)  # batches differ in size a little
        return leased(buffer, self._give, buffer)[: rows * width].reshape(rows, width)

    def _give(self, buffer: Floats) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()


@dataclass(frozen=True)
class FinishedScan:
    """A scan's batches whose aggregates are in memory, or of its first `done` batches, and what the next one failed on.

    start, own: as of `SharedScan`. neighbor: float32[rows, f], neighbors' aggregates of all its batches, one behind the other;
    self_rows: float32[num_self_rows, f], the destinations' own rows, which batches share.
    """

    batches: tuple[BatchRemainder, ...]
    start: NDArray[np.int64]
    own: NDArray[np.int32]
    neighbor: Floats
    self_rows: Floats
    done: int
    error: Exception | None


@dataclass(frozen=True)
class SharedScans(ReadStrategy):
    """One pass over the file makes the aggregates of as many batches as memory holds.

    memory: of a scan.
    """

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
        return waiting(self.stages, self.memory, drawn)

    def plan(self, batches: Iterator[WaitingBatch], pool: int) -> Iterator[SharedScan]:
        """Scans of consecutive batches, none left out."""
        return shared_scans(batches, pool, self.memory.self_row_bytes, self.memory.reserved_bytes)

    def reads(self, batches: Iterator[SampledBatch], pool: int) -> Iterator[tuple[NDArray[Any], int]]:
        for scan in self.plan(map(self.waiting, batches), pool):
            yield scan.row, 2 * 2 * scan.num_rows  # two rows a destination, and two scans

    def pipeline(self, cursors: Iterator[Cursor], budget: MemoryPlan, prefetch: int, clocks: dict[str, Clock]) -> Pipeline:
        own = clocks_of(clocks, ("sample", "group", "read", "sum", "collate"))
        return chained(ScanSession(self, self.pool(budget), own["read"]), cursors, own)


class ScanReader:
    """Makes aggregates, scan by scan: pieces of the file are read by threads of its own, and added up by the caller's.

    pool: bytes for all scans; where one takes what is reserved for freed blocks, the C library keeps none any more.
    """

    def __init__(self, strategy: SharedScans, clock: Clock, pool: int = 1 << 62) -> None:
        rows, self._load = strategy.disk_rows, strategy.stages.load
        assert rows is not None
        self._rows, self._memory, self._pool = rows, strategy.memory, pool
        self.memory = AggregateBuffers()
        self._turn = 0
        self._returns = False
        self._decoder = self._load.decoder
        self._buffers = Buffers(kept=PIECES, direct=True, least_bytes=1)
        self._readers = ThreadPoolExecutor(PIECES, thread_name_prefix="ooc-piece")
        self._clock, self._lock = clock, threading.Lock()
        self._stopped = False

    def make(self, scan: SharedScan) -> FinishedScan:
        """The aggregates of a scan's batches. Where that fails, batch by batch as far as it goes."""
        if scan.size.nbytes > self._pool - self._memory.reserved_bytes and not self._returns:
            self._returns = keep_large_blocks(False)
            return_freed()
        neighbor, self_rows = self.memory.take(scan.num_rows, scan.num_self_rows, self._rows.shape[1], self._turn)
        self._turn += 1

        def read_one(k: int) -> None:
            self._add_all(scan.only(k), neighbor[scan.start[k] : scan.start[k + 1]], self_rows)

        done, error = read_all_or_each(len(scan.batches), lambda: self._add_all(scan, neighbor, self_rows), read_one)
        return FinishedScan(scan.batches, scan.start, scan.own, neighbor, self_rows, done, error)

    def _add_all(self, scan: SharedScan, neighbor: Floats, self_rows: Floats) -> None:
        neighbor[:] = 0
        self.add_up(scan, neighbor, self_rows, self.pieces(scan))

    def pieces(self, scan: SharedScan) -> Iterator[ScanPiece]:
        """The pieces of a scan."""
        return pieces(scan, self._rows, self._memory.piece_bytes)

    def add_up(self, scan: SharedScan, neighbor: Floats, self_rows: Floats, todo: Iterator[ScanPiece]) -> None:
        """Read pieces of a scan, a few ahead, and add them up in their order.

        Args:
            scan: Whose pieces they are.
            neighbor: float32[rows, f], its aggregates so far, zeros at first.
            self_rows: float32[num_self_rows, f], the rows it keeps.
            todo: The pieces.
        """
        under_way: deque[tuple[ScanPiece, Future[NDArray[Any]]]] = deque()
        try:
            for piece in [*islice(todo, PIECES)]:
                under_way.append((piece, self._submit(piece)))
            while under_way:
                piece, read = under_way.popleft()
                with waits():
                    values = read.result()
                entries = slice(int(piece.first[0]), int(piece.first[-1]))
                of_row = piece.first - piece.first[0]
                target, edge = scan.target[entries], scan.edge[entries]
                scatter_aggregates(values, *self._decoder, piece.row_at, of_row, target, edge, neighbor, self_rows)
                del values, read  # before the next one is submitted
                for piece in islice(todo, 1):
                    under_way.append((piece, self._submit(piece)))
        finally:
            wait([read for _, read in under_way if not read.cancel()])  # whoever closes the loader may close the rows next

    def _submit(self, piece: ScanPiece) -> "Future[NDArray[Any]]":
        if self._stopped:
            raise Stopped
        return self._readers.submit(self._read, piece)

    def _read(self, piece: ScanPiece) -> NDArray[Any]:
        """The values of a piece's extents, or of its rows one behind the other."""
        start = time.perf_counter()
        values, nbytes = piece.read(self._rows, self._buffers)
        with self._lock:
            self._clock.worked(self._clock.items, start, time.perf_counter(), [])
            self._clock.items += 1
        self._load.counts.add(len(piece.row_at), nbytes)
        return values

    def stop(self) -> None:
        """End all waiting, and reads that have not begun; idempotent. It may come from a collection in the middle of anything,
        in a thread that holds the lock of `_readers` too."""
        self._stopped = True
        self.memory.close()

    def close(self) -> None:
        """Stop, and end the threads that read; idempotent. Not while aggregates are made."""
        self.stop()
        self._readers.shutdown()


class ScanServer:
    """Collates the batches of scans, in order."""

    def __init__(self, stages: BatchStages) -> None:
        self._load, self._collate = stages.load, stages.collate
        self._copies = SelfRowBuffers(COPIES)

    def collate(self, served: ServedBatch) -> tuple[int, Any]:
        """(steps done with this batch, the batch)."""
        scan: FinishedScan = served.group
        mine = slice(int(scan.start[served.k]), int(scan.start[served.k + 1]))
        rest, neighbor, own = scan.batches[served.k], scan.neighbor[mine], scan.own[mine]
        scale_rows(neighbor, rest.scale)
        buffers = self._load.buffers
        if served.k == 0 and not buffers.pinned and len(own) and own[-1] == len(own) - 1:  # no node came twice: in its order
            self_row = scan.self_rows[: len(own)]
        else:
            shape = neighbor.shape
            self_row = buffers.empty(shape, neighbor.dtype) if buffers.pinned else self._copies.take(*shape)
            np.take(scan.self_rows, own, axis=0, out=self_row, mode="clip")
        return self._collate.collate(self._load.aggregated(rest.drawn, neighbor, self_row))


class ScanSession:
    """Makes scans while those before serve their batches.

    pool: bytes for all batches and scans alive at once; clock: of the reads. A second loader of the same rows at the same time
    has less memory.
    """

    stage = "sum"

    def __init__(self, strategy: SharedScans, pool: int, clock: Clock) -> None:
        assert strategy.disk_rows is not None
        self._lease = registry_of(strategy.disk_rows).begin_scans()
        try:
            self.pool = pool
            if not self._lease.alone:
                self.pool = pool // SECOND_SHARE
                strategy = strategy.shared(self.pool, SECOND_SHARE)
            self.sample = strategy.stages.sample
            self.prepare = strategy.waiting
            self.plan = partial(strategy.plan, pool=self.pool)
            self._reader, self._server = ScanReader(strategy, clock, self.pool), ScanServer(strategy.stages)
        except BaseException:
            self._lease.end()
            raise
        self.read, self.begin, self.collate = self._reader.make, self._reader.memory.ask, self._server.collate

    def stop(self) -> None:
        """End all waiting for memory."""
        self._lease.stop()
        self._reader.stop()

    def end(self) -> None:
        """End the threads that read."""
        self._reader.close()
        self._lease.end()

"""Sweeps: the first layer's sums of many batches, made while the features go by once in file order.

Batches whose first layer sums (`ooc.graph.aggregation`) need no row twice: a row that was read is added to the sums it belongs
to, of all batches that wait, and forgotten. So memory holds two rows for each destination of the first layer, not one for
every node, and a tenth of the reads serves the same batches. (Cooperative scans of databases, Zukowski et al., VLDB 2007,
share one pass in this way.) Two sweeps' sums are in memory: one serves batches while the other is made.

Three pipelines in a chain: sample batches -> make the sums of a sweep -> hand out its batches; see `in_shared_scans`. A batch
is the same, to the bit, as gathered from memory.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import FirstLayerAggregates, Floats, scale_rows, scatter_aggregates
from ooc.loading.collate import LoadedBatch
from ooc.loading.feature_cache import ScanLease, registry_of
from ooc.loading.scan_size import COPIES
from ooc.loading.shared_scan_plan import (
    AHEAD,
    BatchRemainder,
    ScanPiece,
    SharedScan,
    WaitingBatch,
    pieces,
    shared_scans,
    waiting,
)
from ooc.loading.work import PIECES, Work
from ooc.runtime.buffers import Buffers, leased
from ooc.runtime.clock import Clock
from ooc.runtime.clock import waiting as booked
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import keep_large_blocks, return_freed
from ooc.runtime.memory_plan import SECOND_SHARE
from ooc.runtime.pipeline import CONSUMER, SOURCE, Pipeline, Stage
from stores.arrays.rows import Rows

GRACE_SECONDS = 0.5
"""after which a consumer that asks for more, and has let go of nothing, is taken to keep its batches"""


class Stopped(Exception):
    """Somebody waited for memory of a pipeline that was closed; only a pipeline's threads ever see it."""


class AggregateBuffers:
    """Two buffers for sums, taken in turn; one comes back when nobody refers to an array over it any more.

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
        """float32[rows, width] and float32[roots, width], uninitialised. Waits for a buffer, but not once the consumer asks
        for what `turn` makes.

        Raises Stopped where that is closed, or gets closed meanwhile.
        """
        with self._changed:
            with booked():
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
        """The consumer is through with everything before the sums of `turn`, or keeps it."""
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
            with booked():
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
    """A sweep's batches whose sums stand in memory, or of its first `done` batches, and what the next one failed on.

    start, own: as of `SharedScan`. neighbor: float32[rows, f], neighbors' sums of all its batches, one behind the other; roots:
    float32[num_roots, f], the destinations' own rows, which batches share.
    """

    batches: tuple[BatchRemainder, ...]
    start: NDArray[np.int64]
    own: NDArray[np.int32]
    neighbor: Floats
    self_rows: Floats
    done: int
    error: Exception | None


class ScanReader:
    """Makes sums, sweep by scan: pieces of the file are read by threads of its own, and added up by the caller's.

    pool: bytes for all sweeps; where one takes what freed blocks were to have of it, the C library keeps none any more.
    """

    def __init__(self, work: Work, rows: Rows, clock: Clock, pool: int = 1 << 62) -> None:
        self._work, self._rows, self._pool = work, rows, pool
        self.memory = AggregateBuffers()
        self._turn = 0
        self._returns = False
        self._code = work.code
        self._buffers = Buffers(kept=PIECES, direct=True, least_bytes=1)
        self._readers = ThreadPoolExecutor(PIECES, thread_name_prefix="ooc-piece")
        self._clock, self._lock = clock, threading.Lock()
        self._stopped = False

    def make(self, scan: SharedScan) -> FinishedScan:
        """The sums of a sweep's batches. Where that fails, batch by batch as far as it goes."""
        if scan.size.nbytes > self._pool - self._work.kept_bytes and not self._returns:
            self._returns = keep_large_blocks(False)
            return_freed()
        neighbor, self_rows = self.memory.take(scan.num_rows, scan.num_self_rows, self._rows.shape[1], self._turn)
        self._turn += 1
        done, error = len(scan.batches), None
        try:
            self._add_all(scan, neighbor, self_rows)
        except Stopped:
            raise
        except Exception as failure:
            done, error = self._one_by_one(scan, neighbor, self_rows, failure)
        return FinishedScan(scan.batches, scan.start, scan.own, neighbor, self_rows, done, error)

    def _one_by_one(
        self, scan: SharedScan, neighbor: Floats, self_rows: Floats, failure: Exception
    ) -> tuple[int, Exception | None]:
        """(batches whose sums are made, what the next one fails on)."""
        if len(scan.batches) == 1:
            return 0, failure
        for done in range(len(scan.batches)):
            try:
                self._add_all(scan.only(done), neighbor[scan.start[done] : scan.start[done + 1]], self_rows)
            except Stopped:
                raise
            except Exception as error:
                return done, error
        return len(scan.batches), None  # it went well the second time

    def _add_all(self, scan: SharedScan, neighbor: Floats, self_rows: Floats) -> None:
        neighbor[:] = 0
        self.add_up(scan, neighbor, self_rows, pieces(scan, self._rows, self._work.piece_bytes))

    def add_up(self, scan: SharedScan, neighbor: Floats, self_rows: Floats, todo: Iterator[ScanPiece]) -> None:
        """Read pieces of a sweep, a few ahead, and add them up in their order.

        neighbor: float32[rows, f], its neighbors' sums so far, zeros at first; self_rows: float32[num_roots, f], the rows it
        keeps.
        """
        under_way: deque[tuple[ScanPiece, Future[NDArray[Any]]]] = deque()
        try:
            for piece in [*islice(todo, PIECES)]:
                under_way.append((piece, self._submit(piece)))
            while under_way:
                piece, read = under_way.popleft()
                with booked():
                    values = read.result()
                entries = slice(int(piece.first[0]), int(piece.first[-1]))
                of_row = piece.first - piece.first[0]
                target, edge = scan.target[entries], scan.edge[entries]
                scatter_aggregates(values, *self._code, piece.row_at, of_row, target, edge, neighbor, self_rows)
                del values, read  # before the next one is asked for
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
        self._work.read.add(len(piece.row_at), nbytes)
        return values

    def stop(self) -> None:
        """End all waiting, and reads that have not begun; idempotent. It may come from a collection in the middle of anything,
        in a thread that holds the lock of `_readers` too."""
        self._stopped = True
        self.memory.close()

    def close(self) -> None:
        """Stop, and end the threads that read; idempotent. Not while sums are made."""
        self.stop()
        self._readers.shutdown()


class ScanServer:
    """Hands out the batches of sweeps, in order."""

    def __init__(self, work: Work, scan_reader: ScanReader) -> None:
        self._work, self._scan_reader = work, scan_reader
        self._copies = SelfRowBuffers(COPIES)

    def serve(self, made: Iterator[FinishedScan]) -> Iterator["ScannedBatch"]:
        """The batches of sweeps, one after the other, with their sums."""
        step = 0
        for turn in range(1 << 62):
            self._scan_reader.memory.ask(turn)
            one = next(made, None)
            if one is None:
                return
            for k in range(one.done):
                mine = slice(int(one.start[k]), int(one.start[k + 1]))
                yield ScannedBatch(one.batches[k], one.neighbor[mine], one.self_rows, one.own[mine], k == 0)
            step += one.done
            if one.error is not None:
                one.error.add_note(f"in stage 'sum' at step {step} of the pipeline")
                raise one.error
            del one  # while the next one is waited for

    def collate(self, served: "ScannedBatch") -> tuple[int, Any]:
        """(steps done with this batch, the batch)."""
        rest, neighbor, self_rows, own, first = served
        scale_rows(neighbor, rest.scale)
        pinned = self._work.buffers.pinned
        if first and not pinned and len(own) and own[-1] == len(own) - 1:  # no node came twice: they stand in its order
            self_row = self_rows[: len(own)]
        else:
            self_row = (
                self._work.buffers.empty(neighbor.shape, neighbor.dtype) if pinned else self._copies.take(*neighbor.shape)
            )
            np.take(self_rows, own, axis=0, out=self_row, mode="clip")
        return self._work.collate(
            LoadedBatch(rest.drawn, FirstLayerAggregates(neighbor, self_row), self._work.labels(rest.drawn))
        )


class ScannedBatch(NamedTuple):
    """A batch of a scan: near, float32[d, f], is its own; its destinations' rows are roots[own]; first: of its sweep."""

    rest: BatchRemainder
    neighbor: Floats
    self_rows: Floats
    own: NDArray[np.int32]
    first: bool


def in_shared_scans(
    work: Work,
    cursors: Iterator[Cursor],
    *,
    pool: int,
    threads: int,
    split: bool,
    clocks: dict[str, Clock],
) -> Pipeline:
    """The pipeline of an epoch's batches through shared_scans: (steps done, batch) in the order of `cursors`.

    pool: bytes for all batches and sweeps that are alive at once; threads: to sample with; split: halve a batch that does not
    fit; clocks: as of `Pipeline`, for all stages.
    """
    assert work.x is not None
    rows, alone = work.x, work.frontier is None and not split
    own = {name: clocks.setdefault(name, Clock()) for name in ("sample", "group", "read", "sum", "collate", CONSUMER)}
    scanning = registry_of(rows).begin_sweeps()
    if not scanning.alone:
        pool //= SECOND_SHARE
        work = work.sharing(pool, SECOND_SHARE)
    try:
        scan_reader = ScanReader(work, rows, own["read"], pool)
        return _chain(work, cursors, scan_reader, scanning, pool, (threads, alone, split), own)
    except BaseException:
        scanning.end()
        raise


def _chain(
    work: Work,
    cursors: Iterator[Cursor],
    scan_reader: ScanReader,
    scanning: ScanLease,
    pool: int,
    sampling: tuple[int, bool, bool],
    own: dict[str, Clock],
) -> Pipeline:
    """The three pipelines of `in_shared_scans`; where one cannot be made, those before it have ended."""
    server = ScanServer(work, scan_reader)

    def stop() -> None:
        scanning.stop()
        scan_reader.stop()

    def end() -> None:
        scan_reader.close()
        scanning.end()

    with ExitStack() as unfinished:
        unfinished.callback(end)
        sampled = _sampled(work, cursors, sampling, own["sample"])
        unfinished.callback(sampled.close)
        made = Pipeline(
            shared_scans(sampled, pool, work.self_row_bytes, work.kept_bytes),
            [Stage("sum", scan_reader.make)],
            max_bytes=1,  # the buffers are the gate
            max_items=2,
            clocks={SOURCE: own["group"], "sum": own["sum"]},
            before=sampled,
            on_stop=stop,
        )
        unfinished.callback(made.close)
        served = Pipeline(
            server.serve(made),
            [Stage("collate", server.collate)],
            max_bytes=1,
            max_items=AHEAD,
            clocks={name: own[name] for name in ("collate", CONSUMER)},
            before=made,
            on_end=end,
        )
        unfinished.pop_all()
        return served


def _sampled(work: Work, cursors: Iterator[Cursor], sampling: tuple[int, bool, bool], clock: Clock) -> Pipeline:
    """Sampled batches, and what they want of the rows."""
    threads, alone, split = sampling
    source: Iterator[Any] = cursors
    if not alone:
        source = work.split(cursors) if work.frontier is None else work.sampled(cursors, split)
    stage = Stage("sample", partial(_sample, work) if alone else partial(waiting, work), threads)
    # Not a gate: bounded in items, which a sweep counts.
    return Pipeline(source, [stage], max_bytes=1, max_items=threads, clocks={"sample": clock})


def _sample(work: Work, cursor: Cursor) -> WaitingBatch:
    return waiting(work, work.sample(cursor))

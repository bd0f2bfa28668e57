"""Sweeps: the first layer's sums of many batches, made while the features go by once in file order.

Batches whose first layer sums (`ooc.graph.aggregation`) need no row twice: a row that was read is added to the sums it belongs
to, of all batches that wait, and forgotten. So memory holds two rows for each destination of the first layer, not one for
every node, and a tenth of the reads serves the same batches. (Cooperative scans of databases, Zukowski et al., VLDB 2007,
share one pass in this way.) Two sweeps' sums are in memory: one serves batches while the other is made.

Three pipelines in a chain: sample batches -> make the sums of a sweep -> hand out its batches; see `swept`. A batch is the
same, to the bit, as gathered from memory.
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

from ooc.graph.aggregation import FirstLayerAggregates, Floats, scale_rows, scatter_sums
from ooc.loading.collate import LoadedBatch
from ooc.loading.feature_cache import SECOND_SHARE, ScanLease, shelf_of
from ooc.loading.shared_scan_plan import AHEAD, BatchRemainder, ScanPiece, SharedScan, WaitingBatch, pieces, sweeps, waiting
from ooc.loading.work import PIECES, Work
from ooc.runtime.budget import COPIES
from ooc.runtime.buffers import Buffers, leased
from ooc.runtime.clock import Clock
from ooc.runtime.clock import waiting as booked
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import return_freed, return_large_blocks
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
    >>> near, roots = memory.take(rows=1000, roots=900, width=128, turn=0)  # float32[1000, 128], float32[900, 128]
    """

    def __init__(self) -> None:
        self._free: list[Floats] = [np.empty(0, np.float32), np.empty(0, np.float32)]
        self._asked = -1
        self._closed = False
        self._changed = threading.Condition()  # over an RLock: a buffer may come back in a collection, in the middle of all

    def take(self, rows: int, roots: int, width: int, turn: int) -> tuple[Floats, Floats]:
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
        if len(buffer) < (rows + roots) * width:
            buffer = np.empty((rows + roots) * width, np.float32)
        lease = leased(buffer, self._give, buffer)[: (rows + roots) * width].reshape(rows + roots, width)
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

    start, own: as of `SharedScan`. near: float32[rows, f], neighbors' sums of all its batches, one behind the other; roots:
    float32[num_roots, f], the destinations' own rows, which batches share.
    """

    batches: tuple[BatchRemainder, ...]
    start: NDArray[np.int64]
    own: NDArray[np.int32]
    near: Floats
    roots: Floats
    done: int
    error: Exception | None


class ScanReader:
    """Makes sums, sweep by sweep: pieces of the file are read by threads of its own, and added up by the caller's.

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

    def make(self, sweep: SharedScan) -> FinishedScan:
        """The sums of a sweep's batches. Where that fails, batch by batch as far as it goes."""
        if sweep.size.nbytes > self._pool - self._work.kept_bytes and not self._returns:
            self._returns = return_large_blocks()
            return_freed()
        near, roots = self.memory.take(sweep.num_rows, sweep.num_roots, self._rows.shape[1], self._turn)
        self._turn += 1
        done, error = len(sweep.batches), None
        try:
            self._add_all(sweep, near, roots)
        except Stopped:
            raise
        except Exception as failure:
            done, error = self._one_by_one(sweep, near, roots, failure)
        return FinishedScan(sweep.batches, sweep.start, sweep.own, near, roots, done, error)

    def _one_by_one(self, sweep: SharedScan, near: Floats, roots: Floats, failure: Exception) -> tuple[int, Exception | None]:
        """(batches whose sums are made, what the next one fails on)."""
        if len(sweep.batches) == 1:
            return 0, failure
        for done in range(len(sweep.batches)):
            try:
                self._add_all(sweep.only(done), near[sweep.start[done] : sweep.start[done + 1]], roots)
            except Stopped:
                raise
            except Exception as error:
                return done, error
        return len(sweep.batches), None  # it went well the second time

    def _add_all(self, sweep: SharedScan, near: Floats, roots: Floats) -> None:
        near[:] = 0
        self.add_up(sweep, near, roots, pieces(sweep, self._rows, self._work.piece_bytes))

    def add_up(self, sweep: SharedScan, near: Floats, roots: Floats, todo: Iterator[ScanPiece]) -> None:
        """Read pieces of a sweep, a few ahead, and add them up in their order.

        near: float32[rows, f], its neighbors' sums so far, zeros at first; roots: float32[num_roots, f], the rows it keeps.
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
                target, edge = sweep.target[entries], sweep.edge[entries]
                scatter_sums(values, *self._code, piece.row_at, of_row, target, edge, near, roots)
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

    def __init__(self, work: Work, sweeper: ScanReader) -> None:
        self._work, self._sweeper = work, sweeper
        self._copies = SelfRowBuffers(COPIES)

    def serve(self, made: Iterator[FinishedScan]) -> Iterator["ScannedBatch"]:
        """The batches of sweeps, one after the other, with their sums."""
        step = 0
        for turn in range(1 << 62):
            self._sweeper.memory.ask(turn)
            one = next(made, None)
            if one is None:
                return
            for k in range(one.done):
                mine = slice(int(one.start[k]), int(one.start[k + 1]))
                yield ScannedBatch(one.batches[k], one.near[mine], one.roots, one.own[mine], k == 0)
            step += one.done
            if one.error is not None:
                one.error.add_note(f"in stage 'sum' at step {step} of the pipeline")
                raise one.error
            del one  # while the next one is waited for

    def collate(self, served: "ScannedBatch") -> tuple[int, Any]:
        """(steps done with this batch, the batch)."""
        rest, near, roots, own, first = served
        scale_rows(near, rest.scale)
        pinned = self._work.buffers.pinned
        if first and not pinned and len(own) and own[-1] == len(own) - 1:  # no node came twice: they stand in its order
            root = roots[: len(own)]
        else:
            root = self._work.buffers.empty(near.shape, near.dtype) if pinned else self._copies.take(*near.shape)
            np.take(roots, own, axis=0, out=root, mode="clip")
        return self._work.collate(LoadedBatch(rest.drawn, FirstLayerAggregates(near, root), self._work.labels(rest.drawn)))


class ScannedBatch(NamedTuple):
    """A batch of a sweep: near, float32[d, f], is its own; its destinations' rows are roots[own]; first: of its sweep."""

    rest: BatchRemainder
    near: Floats
    roots: Floats
    own: NDArray[np.int32]
    first: bool


def swept(
    work: Work,
    cursors: Iterator[Cursor],
    *,
    pool: int,
    threads: int,
    split: bool,
    clocks: dict[str, Clock],
) -> Pipeline:
    """The pipeline of an epoch's batches through sweeps: (steps done, batch) in the order of `cursors`.

    pool: bytes for all batches and sweeps that are alive at once; threads: to sample with; split: halve a batch that does not
    fit; clocks: as of `Pipeline`, for all stages.
    """
    assert work.x is not None
    rows, alone = work.x, work.lockstep is None and not split
    own = {name: clocks.setdefault(name, Clock()) for name in ("sample", "group", "read", "sum", "collate", CONSUMER)}
    sweeping = shelf_of(rows).begin_sweeps()
    if not sweeping.alone:
        pool //= SECOND_SHARE
        work = work.sharing(pool, SECOND_SHARE)
    try:
        sweeper = ScanReader(work, rows, own["read"], pool)
        return _chain(work, cursors, sweeper, sweeping, pool, (threads, alone, split), own)
    except BaseException:
        sweeping.end()
        raise


def _chain(
    work: Work,
    cursors: Iterator[Cursor],
    sweeper: ScanReader,
    sweeping: ScanLease,
    pool: int,
    sampling: tuple[int, bool, bool],
    own: dict[str, Clock],
) -> Pipeline:
    """The three pipelines of `swept`; where one cannot be made, those before it have ended."""
    server = ScanServer(work, sweeper)

    def stop() -> None:
        sweeping.stop()
        sweeper.stop()

    def end() -> None:
        sweeper.close()
        sweeping.end()

    with ExitStack() as unfinished:
        unfinished.callback(end)
        sampled = _sampled(work, cursors, sampling, own["sample"])
        unfinished.callback(sampled.close)
        made = Pipeline(
            sweeps(sampled, pool, work.root_bytes, work.kept_bytes),
            [Stage("sum", sweeper.make)],
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
        source = work.split(cursors) if work.lockstep is None else work.sampled(cursors, split)
    stage = Stage("sample", partial(_sample, work) if alone else partial(waiting, work), threads)
    # Not a gate: bounded in items, which a sweep counts.
    return Pipeline(source, [stage], max_bytes=1, max_items=threads, clocks={"sample": clock})


def _sample(work: Work, cursor: Cursor) -> WaitingBatch:
    return waiting(work, work.sample(cursor))

"""Short trials of a run's stages before it begins: batches sampled, rows read, the model run on batches that are in memory.

Each works on counters and buffers of its own, so nothing of it reaches the run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, islice, repeat, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.loading.batch_bytes import PIECES
from ooc.loading.collate import SampledBatch
from ooc.loading.read_strategy import AHEAD, ReadStrategy, ServedBatch, sampled_batches, serve
from ooc.loading.scan_memory import ScanRows
from ooc.loading.shared_scan import FinishedScan, ScanSession, SharedScans
from ooc.loading.shared_scan_plan import ScanDraft, ScanPiece, SharedScan
from ooc.planning.simulate_superbatches import AggregationSpeed, BatchCosts, Lengths, cost_of
from ooc.runtime.clock import Clock, noting_waits
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import MemoryMeter
from ooc.runtime.pipeline import CONSUMER, Pipeline, Stage
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.zarr_rows import ShardedRows
from ooc.stores.io.read_plan import ReadCost

PIECE_ROWS = 2**16
"""Rows of one read that is timed"""
WARM_EVERY = 32
"""One of so many of them is read beforehand"""
LEAST_STEPS = 8
"""Batches that the model is timed on, where it is not very slow"""
ENOUGH_GROUPS, PATIENCE = 4, 8
"""A sample may take so many times its seconds until it fills so many superbatches or scans; so may the model until it ran
`LEAST_STEPS`"""
WARM_STEPS = 2

Step = Callable[[Any], None]


def batches_of(strategy: ReadStrategy, epoch: int, steps: int) -> Iterator[SampledBatch]:
    """The batches of an epoch's first steps, sampled as the loader samples them."""
    return strategy.stages.sample.batches(Cursor(epoch, step) for step in range(steps))


class BatchSample:
    """Iterates over batches, as many as fit bytes and seconds (one at least), and keeps them.

    The seconds are those since iteration began, whatever they were spent on; `patience` times as many until there are
    `ENOUGH_GROUPS`. first: what the first group of batches reads.
    """

    def __init__(self, source: Iterator[SampledBatch], max_bytes: int, seconds: float, patience: int = PATIENCE) -> None:
        self.batches: list[SampledBatch] = []
        self.first: Any = None
        self._groups = 0
        self._taken: list[float] = []
        self._source, self._max_bytes, self._seconds, self._patience = source, max_bytes, seconds, patience

    def __iter__(self) -> Iterator[SampledBatch]:
        begun, left = time.perf_counter(), self._max_bytes
        while not self.batches or left > 0:
            before = time.perf_counter()
            limit = self._seconds * (1 if self._groups >= ENOUGH_GROUPS else self._patience)
            if self.batches and before - begun > limit:
                return
            batch = next(self._source, None)
            if batch is None:
                return
            self._taken.append(time.perf_counter() - before)
            self.batches.append(batch)
            left -= batch.subgraph.nbytes
            yield batch

    def formed(self, reads: Any) -> None:
        """Count a group of batches, which reads that."""
        self.first = reads if self.first is None else self.first
        self._groups += 1

    @property
    def total_s(self) -> float:
        """Seconds that sampling took."""
        return sum(self._taken)

    @property
    def batch_s(self) -> float:
        """Seconds a batch; what the first one does for all (kernels, tables) is left out."""
        later = self._taken[1:] or self._taken
        return sum(later) / max(1, len(later))

    @property
    def steps(self) -> int:
        """Steps that the batches are of, which may have been split."""
        return sum(batch.last for batch in self.batches)


def lengths_of(strategy: ReadStrategy) -> list[Lengths]:
    """How ids of each array on disk are read; see `lengths_in`."""
    return [lengths_in(each.rows) for each in strategy.stages.disk_arrays.values()]


def lengths_in(x: Any) -> Lengths:
    """How the rows' planner reads ids; a read a row where somebody else's code does it."""
    if isinstance(x, ShardedRows):
        return lambda ids: x.plan(ids).length
    if isinstance(x, JoinedRows):
        return partial(_lengths_in_parts, [(x.begin[name], lengths_in(rows), rows.shape[0]) for name, rows in x.parts.items()])
    return lambda ids: np.full(len(ids), x.row_bytes, np.int64)


def _lengths_in_parts(parts: Sequence[tuple[int, Lengths, int]], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """How `JoinedRows` read ids (ascending): each of its parts (first row, lengths, number of rows) by itself."""
    found = [np.empty(0, np.int64)]
    for begin, lengths, rows in parts:
        first, last = np.searchsorted(ids, (begin, begin + rows))
        if last > first:
            found.append(lengths(ids[first:last] - begin))
    return np.concatenate(found)


def read_cost(x: Any, ids: NDArray[np.int64], max_bytes: int, seconds: float) -> tuple[ReadCost, float, AnyArray]:
    """(what reads cost now, the cores they keep busy, the rows read last) by reading `ids`, ascending, for about `seconds`.

    The device's cost model, scaled to what these reads took: a disk's speed changes by the minute, its shape does not.
    """
    lengths, model = lengths_in(x), cost_of(x)
    most = max(1, min(len(ids), PIECE_ROWS, max_bytes // x.row_bytes))
    rows = np.empty((most, *x.shape[1:]), x.dtype)
    x.read(ids[:most:WARM_EVERY], rows[: -(-most // WARM_EVERY)])  # compiles the kernels
    taken = expected = cpu = 0.0
    for at in range(0, len(ids) - most + 1, most):
        piece = ids[at : at + most]
        begun, busy = time.perf_counter(), time.process_time()
        x.read(piece, rows)
        cpu += time.process_time() - busy
        taken += time.perf_counter() - begun
        expected += read_s(model, lengths(piece))
        if taken > seconds:
            break
    scale = max(taken, 1e-9) / expected
    return ReadCost(model.read_s * scale, model.byte_s * scale, model.latency_s), cpu / max(taken, 1e-9), rows


def read_s(cost: ReadCost, length: NDArray[np.int64]) -> float:
    """Seconds of reading extents of so many bytes, by a cost model."""
    return len(length) * cost.read_s + int(length.sum()) * cost.byte_s


def batch_seconds(pipeline: Pipeline, step: Step) -> Iterator[float]:
    """Seconds of one batch after the other."""
    begun = time.perf_counter()
    for _, batch in pipeline:
        step(batch)
        del batch
        now = time.perf_counter()
        yield now - begun
        begun = now


def taken_by(runs: Iterator[float], least: int, seconds: float) -> list[float]:
    """What the next batches take: for about so many seconds, of `least` batches at least unless they take much longer."""
    taken: list[float] = []
    while (len(taken) < least or sum(taken) < seconds) and sum(taken) <= PATIENCE * max(seconds, 0.1):
        another = next(runs, None)
        if another is None:
            break
        taken.append(another)
    return taken


def run_together(
    pipeline: Pipeline, step: Step, base: BatchCosts, gather: Sequence[str], warm: int, seconds: float
) -> tuple[BatchCosts, int]:
    """(`base` with what a batch takes where nothing waits for the disk, in medians; the most bytes of the process).

    Runs `step` on a pipeline's batches for about `seconds`, after half as long to warm up, in which the first `warm` fill
    caches. gather: the stages between sampling and the model.
    """
    runs = batch_seconds(pipeline, step)
    with pipeline, MemoryMeter("plan", period_s=0.005) as meter:
        before = taken_by(runs, warm + 1, seconds / 2)
        busy = time.process_time()
        wall = taken_by(runs, LEAST_STEPS, seconds)
        cpu_s, peak = (time.process_time() - busy) / len(wall) if wall else 0.0, meter.peak
    warm = len(before) if wall else len(before) // 2  # of few batches the second half
    step_s = median_of(pipeline.clocks[CONSUMER], warm)
    collate_s = sum(median_of(pipeline.clocks[name], warm) for name in gather)
    together_s = float(np.median(wall or before[warm:])) if wall or before[1:] else step_s
    return replace(base, collate_s=collate_s, step_s=step_s, together_s=together_s, cpu_s=cpu_s), peak


def median_of(clock: Clock, warm: int) -> float:
    """Seconds of a stage's spans after the first few; 0 where there is none."""
    spans = clock.spans[warm:] or clock.spans
    return float(np.median([span.end - span.start for span in spans])) if spans else 0.0


class _Pass(NamedTuple):
    """A stretch of making aggregates. model_s: what it should take by the device's cost model."""

    seconds: float
    nbytes: int
    model_s: float
    reading_s: float
    waiting_s: float


class _Maker:
    """Makes parts of a scan's aggregates, and measures what they took."""

    def __init__(self, strategy: SharedScans, scan: SharedScan) -> None:
        assert strategy.disk_rows is not None
        self._rows, self.counts, self._scan = strategy.disk_rows, strategy.stages.counts, scan
        self._clock, self._model_s = Clock(), 0.0
        self.session = ScanSession(strategy, self._clock)

    def rows(self) -> ScanRows:
        """Zeros for a scan's aggregates and the rows it keeps, in memory; serving gives none of it back."""
        rows = self.session.room_for(self._scan, 0, gives_back=False)
        rows.neighbor[:], rows.self_rows[:] = 0, 0
        return rows

    def pieces(self) -> Iterator[ScanPiece]:
        cost = cost_of(self._rows)
        for piece in self.session.pieces(self._scan):
            length = np.array([len(piece.row) * self._rows.row_bytes]) if piece.plan is None else piece.plan.length
            self._model_s += read_s(cost, length)
            yield piece

    def make(self, rows: ScanRows, todo: Iterator[ScanPiece]) -> _Pass:
        """Read pieces and add their rows to the aggregates."""
        before, model, reading, begun = self.counts.nbytes, self._model_s, self._clock.busy_s, time.perf_counter()
        with noting_waits() as waits:
            self.session.add_up(self._scan, rows, todo)
        waited = sum(stop - start for start, stop in waits)
        seconds = time.perf_counter() - begun
        return _Pass(seconds, self.counts.nbytes - before, self._model_s - model, self._clock.busy_s - reading, waited)


def try_scan(
    strategy: SharedScans, scan: SharedScan, steps: int, step: Step, base: BatchCosts, seconds: float
) -> tuple[BatchCosts, int]:
    """Make a part of `scan` for about `seconds`, serve its batches to `step` for as long, and then both at once.

    Returns the costs, and the most bytes of the process but for the aggregates and the scan.
    strategy: whose counters and buffers nobody else uses; steps: of the epoch; base: what is known already.
    """
    maker = _Maker(strategy, scan)
    try:
        with MemoryMeter("plan", period_s=0.005) as meter:
            rows = maker.rows()  # what is served does not matter: while these are made they serve batches
            maker.make(rows, islice(maker.pieces(), PIECES + 1))  # loads the kernels
            end = time.perf_counter() + seconds
            alone = maker.make(rows, takewhile(lambda _: time.perf_counter() < end, maker.pieces()))
            finished = FinishedScan.of(len(scan.batches), None, scan, rows)
            with _pipeline(maker.session, finished, steps) as pipeline:
                found = _beside(pipeline, maker, rows, step, base, alone, seconds)
    finally:
        maker.session.end()
    known = rows.neighbor.nbytes + rows.self_rows.nbytes + scan.nbytes + sum(rest.nbytes for rest in scan.batches)
    return replace(found, collate_s=median_of(pipeline.clocks["collate"], WARM_STEPS)), max(0, meter.peak - known)


def _beside(
    pipeline: Pipeline, maker: _Maker, rows: ScanRows, step: Step, base: BatchCosts, alone: _Pass, seconds: float
) -> BatchCosts:
    """`base` with the pace, a batch while no aggregates are made, and the model's part of a batch while they are."""
    runs = batch_seconds(pipeline, step)
    taken_by(runs, WARM_STEPS, 0.0)
    quiet = taken_by(runs, LEAST_STEPS, seconds)
    stop = threading.Event()

    def over_and_over() -> Iterator[ScanPiece]:
        while not stop.is_set():
            yield from takewhile(lambda _: not stop.is_set(), maker.pieces())

    with ThreadPoolExecutor(1, thread_name_prefix="ooc-plan") as pool:
        making = pool.submit(maker.make, rows, over_and_over())
        try:
            next(runs)  # the batch under way when it began
            before, begun, spans = maker.counts.nbytes, time.perf_counter(), len(pipeline.clocks[CONSUMER].spans)
            busy = taken_by(runs, LEAST_STEPS, seconds)
            nbytes, taken = maker.counts.nbytes - before, time.perf_counter() - begun
        finally:
            stop.set()
        passed = making.result()
    slower = alone.seconds / alone.model_s
    byte_s = alone.model_s / max(1, alone.nbytes)
    together_s = float(np.median(quiet))
    pace = AggregationSpeed(
        alone=slower,
        beside=max(slower, taken / (nbytes * byte_s)) if nbytes else slower,
        batch_s=max(together_s, float(np.median(busy))),
        reading=min(1.0, passed.reading_s / passed.seconds),
        pre_aggregation=min(1.0, 1 - passed.waiting_s / passed.seconds),
    )
    return replace(base, step_s=median_of(pipeline.clocks[CONSUMER], spans), together_s=together_s, pace=pace)


def _pipeline(session: ScanSession, made: FinishedScan, steps: int) -> Pipeline:
    """Batches of a scan, over and over; for each that is served another one is sampled and put in file order."""
    cursors = (Cursor(0, step % steps) for step in count())
    sampled = sampled_batches(session.sample, session.prepare, cursors, Clock())

    def served() -> Iterator[ServedBatch]:
        for batch, drawn in zip(serve(repeat(made), "sum", session.begin), sampled, strict=False):
            draft = ScanDraft(1, 0)  # a scan by itself
            draft.add(drawn)
            draft.finish()
            yield batch

    return Pipeline(served(), [Stage("collate", session.collate)], max_bytes=1, max_items=AHEAD, before=sampled)

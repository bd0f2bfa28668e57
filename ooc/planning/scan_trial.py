"""A part of a run's first shared scan, made and served as training does, to know how fast: alone, and beside the model."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice, repeat, takewhile

import numpy as np

from ooc.graph.aggregation import Floats
from ooc.loading.batch_bytes import PIECES
from ooc.loading.read_strategy import AHEAD, ServedBatch, sampled_batches, serve
from ooc.loading.shared_scan import FinishedScan, ScanSession, SharedScans
from ooc.loading.shared_scan_plan import ScanDraft, ScanPiece, SharedScan, WaitingBatch
from ooc.planning.measure import LEAST_STEPS, PATIENCE, Step, median_of
from ooc.planning.simulate_superbatches import AggregationSpeed, cost_of
from ooc.runtime.clock import Clock, noting_waits
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import MemoryMeter
from ooc.runtime.pipeline import CONSUMER, Pipeline, Stage

WARM_STEPS = 2


@dataclass(frozen=True)
class ScanTrial:
    """What was measured."""

    pace: AggregationSpeed
    together_s: float
    """a batch while no aggregates are made"""
    step_s: float
    """of it the model's, while aggregates are made"""
    collate_s: float
    resident: int
    """most bytes of the process, but for the aggregates and the scan"""


@dataclass(frozen=True)
class _Pass:
    """A stretch of making aggregates."""

    seconds: float
    nbytes: int
    model_s: float
    """it should take by the device's cost model"""
    reading_s: float
    waiting_s: float


class _Maker:
    """Adds parts of a scan up, and measures what they took."""

    def __init__(self, strategy: SharedScans, scan: SharedScan) -> None:
        assert strategy.disk_rows is not None
        self._rows, self._counts, self._scan = strategy.disk_rows, strategy.stages.counts, scan
        self._clock, self._model_s = Clock(), 0.0
        self.session = ScanSession(strategy, self._clock)

    def buffer(self) -> tuple[Floats, Floats]:
        """Zeros for a scan's aggregates and the rows it keeps."""
        neighbor, self_rows = self.session.room_for(self._scan, 0)
        neighbor[:], self_rows[:] = 0, 0
        return neighbor, self_rows

    def pieces(self) -> Iterator[ScanPiece]:
        """Of the scan."""
        cost = cost_of(self._rows)
        for piece in self.session.pieces(self._scan):
            length = np.array([len(piece.row) * self._rows.row_bytes]) if piece.plan is None else piece.plan.length
            self._model_s += len(length) * cost.read_s + int(length.sum()) * cost.byte_s
            yield piece

    @property
    def nbytes(self) -> int:
        """Read so far."""
        return self._counts.nbytes

    def make(self, sums: tuple[Floats, Floats], todo: Iterator[ScanPiece]) -> _Pass:
        """Add pieces up."""
        before, model, reading, begun = self.nbytes, self._model_s, self._clock.busy_s, time.perf_counter()
        with noting_waits() as waits:
            self.session.add_up(self._scan, *sums, todo)
        waited = sum(stop - start for start, stop in waits)
        seconds = time.perf_counter() - begun
        return _Pass(seconds, self.nbytes - before, self._model_s - model, self._clock.busy_s - reading, waited)

    def repeated(self, stop: threading.Event) -> Iterator[ScanPiece]:
        """Of the scan, over and over."""
        while not stop.is_set():
            yield from takewhile(lambda _: not stop.is_set(), self.pieces())


def try_scan(strategy: SharedScans, scan: SharedScan, steps: int, step: Step, seconds: float) -> ScanTrial:
    """Make a part of `scan` for about `seconds`, serve its batches to `step` for as long, and then both at once.

    In memory are the aggregates of two scans, as in training.

    Args:
        strategy: Whose counters and buffers nobody else uses.
        steps: Of the epoch.
    """
    maker = _Maker(strategy, scan)
    try:
        with MemoryMeter("plan", period_s=0.005) as meter:
            made, served = maker.buffer(), maker.buffer()
            maker.make(made, islice(maker.pieces(), PIECES + 1))  # loads the kernels
            end = time.perf_counter() + seconds
            alone = maker.make(served, takewhile(lambda _: time.perf_counter() < end, maker.pieces()))
            pipeline = _pipeline(maker.session, _made(scan, served), steps)
            with pipeline:
                found = _beside(pipeline, maker, made, step, alone, seconds)
    finally:
        maker.session.end()
    known = sum(part.nbytes for part in (*made, *served)) + scan.nbytes + sum(rest.nbytes for rest in scan.batches)
    return ScanTrial(*found, median_of(pipeline.clocks["collate"], WARM_STEPS), max(0, meter.peak - known))


def _made(scan: SharedScan, sums: tuple[Floats, Floats]) -> FinishedScan:
    return FinishedScan(len(scan.batches), None, scan.batches, scan.start, scan.own, *sums)


def _beside(
    pipeline: Pipeline, maker: _Maker, sums: tuple[Floats, Floats], step: Step, alone: _Pass, seconds: float
) -> tuple[AggregationSpeed, float, float]:
    """(the pace, a batch while no aggregates are made, the model's part of a batch while they are)."""
    runs = _runs(pipeline, step)
    taken_by(runs, WARM_STEPS, 0.0)
    quiet = taken_by(runs, LEAST_STEPS, seconds)
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="ooc-plan") as pool:
        making = pool.submit(maker.make, sums, maker.repeated(stop))
        try:
            next(runs)  # the batch under way when it began
            before, begun, spans = maker.nbytes, time.perf_counter(), len(pipeline.clocks[CONSUMER].spans)
            busy = taken_by(runs, LEAST_STEPS, seconds)
            nbytes, taken = maker.nbytes - before, time.perf_counter() - begun
        finally:
            stop.set()
        passed = making.result()
    slower = alone.seconds / alone.model_s
    byte_s = alone.model_s / max(1, alone.nbytes)
    together = float(np.median(quiet))
    pace = AggregationSpeed(
        alone=slower,
        beside=max(slower, taken / (nbytes * byte_s)) if nbytes else slower,
        batch_s=max(together, float(np.median(busy))),
        reading=min(1.0, passed.reading_s / passed.seconds),
        pre_aggregation=min(1.0, 1 - passed.waiting_s / passed.seconds),
    )
    return pace, together, median_of(pipeline.clocks[CONSUMER], spans)


def _runs(pipeline: Pipeline, step: Step) -> Iterator[float]:
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
    while len(taken) < least or sum(taken) < seconds:
        taken.append(next(runs))
        if sum(taken) > PATIENCE * max(seconds, 0.1):
            break
    return taken


def _pipeline(session: ScanSession, made: FinishedScan, steps: int) -> Pipeline:
    """Batches of a scan, over and over; for each that is served another one is sampled and put in file order."""
    cursors = (Cursor(0, step % steps) for step in count())
    sampled = sampled_batches(session.sample, session.prepare, cursors, Clock())
    return Pipeline(
        _served(serve(repeat(made), "sum", session.begin), sampled),
        [Stage("collate", session.collate)],
        max_bytes=1,
        max_items=AHEAD,
        before=sampled,
    )


def _served(batches: Iterator[ServedBatch], sampled: Iterator[WaitingBatch]) -> Iterator[ServedBatch]:
    for batch, drawn in zip(batches, sampled, strict=False):
        draft = ScanDraft(1, 0)  # a scan by itself
        draft.add(drawn)
        draft.finish()
        yield batch

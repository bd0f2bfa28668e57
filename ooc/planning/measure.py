"""Short trials of a run's stages before it begins: batches sampled, rows read, the model run on rows that stand for others.

Each works on counters and buffers of its own, so nothing of it reaches the run.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.loading.collate import LoadedBatch, SampledBatch
from ooc.loading.read_strategy import ReadStrategy
from ooc.loading.stages import BatchStages, LoadStage
from ooc.planning.simulate_superbatches import Lengths, cost_of
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import MemoryMeter
from ooc.runtime.pipeline import CONSUMER, Pipeline, Stage
from stores.arrays.rows import AnyArray, ArrayRows
from stores.arrays.zarr_rows import ShardedRows
from stores.io.read_plan import ReadCost

PIECE_ROWS = 2**16
"""Rows of one read that is timed"""
WARM_EVERY = 32
"""One of so many of them is read beforehand"""
LEAST_STEPS = 8
"""Batches that the model is timed on, where it is not very slow"""
ENOUGH_GROUPS, PATIENCE = 4, 8
"""A sample may take so many times its seconds until it fills so many superbatches or scans; so may the model until it ran
`LEAST_STEPS`"""

Step = Callable[[Any], None]


class StandInRows:
    """Rows in memory that stand for those on disk: as large, of the same shape, but each is one of a few real ones."""

    def __init__(self, like: Any, rows: AnyArray) -> None:
        self.shape, self.dtype = like.shape, rows.dtype
        self.row_bytes = rows[:1].nbytes
        self.rows, self.cost = rows, cost_of(like)

    def read(self, ids: NDArray[np.int64], out: AnyArray, at: NDArray[np.int64] | None = None) -> int:
        """See `Rows.read`."""
        return ArrayRows(self.rows).read(ids % len(self.rows), out, at)

    def submit(self, ids: NDArray[np.int64], out: AnyArray) -> Future[int]:
        """See `Rows.submit`."""
        return ArrayRows(self.rows).submit(ids % len(self.rows), out)

    def close(self) -> None:
        """Nothing to give back."""


def batches_of(strategy: ReadStrategy, epoch: int, steps: int) -> Iterator[SampledBatch]:
    """The batches of an epoch's first steps, sampled as the loader samples them."""
    return strategy.stages.sample.batches(Cursor(epoch, step) for step in range(steps))


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


class BatchSample:
    """Iterates over batches, as many as fit bytes and seconds (one at least), and keeps them.

    The seconds are those since iteration began, whatever they were spent on; `patience` times as many until `ENOUGH_GROUPS`,
    which are counted in `groups`, are known.
    """

    def __init__(self, source: Iterator[SampledBatch], max_bytes: int, seconds: float, patience: int = PATIENCE) -> None:
        self.batches: list[SampledBatch] = []
        self.groups = 0
        self.whole = False
        """whether there are no more"""
        self._taken: list[float] = []
        self._source, self._max_bytes, self._seconds, self._patience = source, max_bytes, seconds, patience

    def __iter__(self) -> Iterator[SampledBatch]:
        begun, left = time.perf_counter(), self._max_bytes
        while not self.batches or left > 0:
            asked = time.perf_counter()
            limit = self._seconds * (1 if self.groups >= ENOUGH_GROUPS else self._patience)
            if self.batches and asked - begun > limit:
                return
            batch = next(self._source, None)
            if batch is None:
                self.whole = True
                return
            self._taken.append(time.perf_counter() - asked)
            self.batches.append(batch)
            left -= batch.subgraph.nbytes
            yield batch

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
    def parts(self) -> float:
        """Batches a step: 1 unless some were split."""
        return len(self.batches) / max(1, sum(batch.last for batch in self.batches))


def lengths_of(x: Any) -> Lengths:
    """How the rows' planner reads ids; a read a row where somebody else's code does it."""
    if isinstance(x, ShardedRows):
        return lambda ids: x.plan(ids).length
    return lambda ids: np.full(len(ids), x.row_bytes, np.int64)


class TimedLengths:
    """`lengths` with a clock: planning reads is part of reading, not of grouping."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths, self.total_s = lengths, 0.0

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        begun = time.perf_counter()
        found = self._lengths(ids)
        self.total_s += time.perf_counter() - begun
        return found


def read_cost(x: Any, ids: NDArray[np.int64], max_bytes: int, seconds: float) -> tuple[ReadCost, float, AnyArray]:
    """(what reads cost now, the cores they keep busy, the rows read last) by reading `ids`, ascending, for about `seconds`.

    The device's cost model, scaled to what these reads took: a disk's speed changes by the minute, its shape does not.
    """
    lengths = lengths_of(x)
    model = cost_of(x)
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
        length = lengths(piece)
        expected += len(length) * model.read_s + int(length.sum()) * model.byte_s
        if taken > seconds:
            break
    scale = max(taken, 1e-9) / expected
    return ReadCost(model.read_s * scale, model.byte_s * scale, model.latency_s), cpu / max(taken, 1e-9), rows


@dataclass(frozen=True)
class WarmBatchCosts:
    """What a batch takes where nothing waits for the disk: medians, in seconds."""

    seconds: float
    cpu_s: float
    sample_s: float
    collate_s: float
    step_s: float
    peak: int
    """bytes of the process"""


def run_together(pipeline: Pipeline, step: Step, gather: Sequence[str], warm: int, seconds: float) -> WarmBatchCosts:
    """Run `step` on a pipeline's batches for about `seconds`, after half as long to warm up, in which the first
    `warm` fill caches.

    gather: the stages between sampling and the model.
    """
    at: list[tuple[float, float]] = []
    mark = 0
    with pipeline, MemoryMeter("plan", period_s=0.005) as meter:
        for _, batch in pipeline:
            step(batch)
            del batch
            at.append((time.perf_counter(), time.process_time()))
            if not mark:
                mark = len(at) - 1 if len(at) > warm and at[-1][0] - at[0][0] > seconds / 2 else 0
            elif at[-1][0] - at[mark][0] > (seconds if len(at) > mark + LEAST_STEPS else PATIENCE * seconds):
                break
        peak = meter.peak
    warm = mark or (len(at) - 1) // 2
    wall = np.diff([wall for wall, _ in at[warm:]])
    cpu = (at[-1][1] - at[warm][1]) / max(1, len(at) - 1 - warm)
    clocks = pipeline.clocks
    steps = median_of(clocks[CONSUMER], warm)
    return WarmBatchCosts(
        seconds=float(np.median(wall)) if len(wall) else steps,
        cpu_s=float(cpu),
        sample_s=median_of(clocks["sample"], warm) if "sample" in clocks else 0.0,
        collate_s=sum(median_of(clocks[name], warm) for name in gather),
        step_s=steps,
        peak=peak,
    )


def median_of(clock: Clock, warm: int) -> float:
    """Seconds of a stage's spans after the first few; 0 where there is none."""
    spans = clock.spans[warm:] or clock.spans
    return float(np.median([span.end - span.start for span in spans])) if spans else 0.0


def load_shown(load: LoadStage, drawn: SampledBatch) -> LoadedBatch:
    """A batch with rows, or their aggregates, out of those that stand for the ones on disk."""
    if isinstance(load.x, StandInRows):
        return load.take(drawn, load.x.rows, drawn.subgraph.node % len(load.x.rows))
    return load.load(drawn)


def warm_pipeline(stages: BatchStages, steps: int, max_bytes: int, max_items: int) -> Pipeline:
    """Batches of the first steps as training makes them, but that none is read from the disk."""
    sample, cursors = stages.sample, (Cursor(0, step) for step in range(steps))
    # One thread gathers and collates, as it does for superbatches.
    collate = Stage("collate", lambda drawn: stages.collate.collate(load_shown(stages.load, drawn)))
    if sample.one_by_one:
        return Pipeline(cursors, [Stage("sample", sample.sample), collate], max_bytes, max_items)
    return Pipeline(sample.batches(cursors), [collate], max_bytes, max_items)

"""A short profile of a run before it begins: its own batches sampled, a part of its rows read, its model run on them.

Nothing of it reaches the run: the model is another one of the same shape, counters are its own, and what is drawn is a
function of the seed, so training is the same to the bit with and without it.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.budget import Budget
from ooc.buffers import Buffers
from ooc.collate import Drawn, Loaded
from ooc.loaders import NeighborLoader
from ooc.loading import BUFFERS_KEPT, Read, Work
from ooc.lookahead import Grouping
from ooc.memory import MemoryMeter
from ooc.order import Cursor
from ooc.pipeline import CONSUMER, Pipeline, Stage
from ooc.replay import Costs, Lengths, Replay, replay
from ooc.rowcache import Residents
from stores.plan import ReadCost, plan_reads
from stores.rows import AnyArray, ArrayRows
from stores.sizes import format_bytes
from stores.zarr_rows import ShardedRows

DRAWN_SHARE, ROWS_SHARE = 2, 4
"""Of the batches' memory, free before training: 1/2 at most for batches that were sampled, 1/4 for rows that were read"""
PIECE_ROWS = 2**16
"""Rows of one read that is timed"""
TOGETHER = 3
"""Batches in the pipeline at once: one sampled, one gathered ahead and one at the model"""
LEAST_STEPS, WARM_STEPS = 8, 2
ENOUGH_WINDOWS, PATIENCE = 4, 8
EVALUATED = 2
"""Batches of evaluation that are timed, after one more"""
MOST_DRAWN_BYTES = 2**29
CHEAP_SECONDS = 0.3
"""What trying another setting may take where nobody asked for it"""

FREE = ReadCost(0.0, 1e-18)
Step = Callable[[Any], None]


@dataclass(frozen=True)
class Profile:
    """What was measured."""

    steps: int
    """batches of the first epoch that were sampled"""
    costs: Costs
    """`read` costs nothing where rows are in memory"""
    windows: tuple[Replay, ...]
    """of the first epoch, and of the second where the first was sampled whole; none where rows are in memory"""
    others: dict[str, Replay]
    """the first epoch's with other settings, by what to do for them"""
    asked: float
    """rows a batch wants"""
    evaluations: dict[str, "Evaluation"]
    """of every split to score"""
    sampled_nbytes: float
    """bytes of edges that sampling a batch reads from the disk"""
    unmapped: int
    """bytes of edges that draws will map besides those they have"""
    resident: int
    """most bytes of the process while the model was run, but for what only the profile held"""
    seconds: float
    """it took"""


@dataclass(frozen=True)
class Evaluation:
    """Scoring a split once."""

    batches: int
    asked: float
    """rows a batch wants"""
    batch_s: float
    """to sample, gather and compute a batch, one after the other"""


class Shown:
    """Rows in memory that stand for those on disk: as large, of the same shape, but each is one of a few real ones."""

    def __init__(self, like: Any, rows: AnyArray) -> None:
        self.shape, self.dtype = like.shape, rows.dtype
        self.row_bytes = rows[:1].nbytes
        self.rows = rows

    def read(self, ids: NDArray[np.int64], out: AnyArray, at: NDArray[np.int64] | None = None) -> int:
        """See `Rows.read`."""
        return ArrayRows(self.rows).read(ids % len(self.rows), out, at)

    def submit(self, ids: NDArray[np.int64], out: AnyArray) -> Future[int]:
        """See `Rows.submit`."""
        return ArrayRows(self.rows).submit(ids % len(self.rows), out)

    def close(self) -> None:
        """Nothing to give back."""


def apart(work: Work, **changed: Any) -> Work:
    """The same work with counters and buffers of its own."""
    return replace(work, read=Read(), buffers=Buffers(BUFFERS_KEPT), **changed)


def batches_of(work: Work, epoch: int, steps: int) -> Iterator[Drawn]:
    """The batches of an epoch's first steps, sampled as training samples them."""
    cursors = (Cursor(epoch, step) for step in range(steps))
    return work.sampled(cursors, False) if work.lockstep is not None else map(work.sample, cursors)


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def first_rows(drawn: Sequence[Drawn], most: int = 8) -> NDArray[np.int64]:
    """The rows that a few batches want, ascending."""
    return np.unique(np.concatenate([batch.subgraph.node for batch in drawn[:most]]))


class Sample:
    """Iterates over an epoch's first batches, as many as fit bytes and seconds (one at least), and keeps them.

    The seconds are those since iteration began, whatever they were spent on; a few times as many until `ENOUGH_WINDOWS`, which
    are counted in `windows`, are known.
    """

    def __init__(self, work: Work, epoch: int, steps: int, max_bytes: int, seconds: float) -> None:
        self.batches: list[Drawn] = []
        self.windows = 0
        self._taken: list[float] = []
        self._source, self._steps = batches_of(work, epoch, steps), steps
        self._max_bytes, self._seconds = max_bytes, seconds

    def __iter__(self) -> Iterator[Drawn]:
        begun, left = time.perf_counter(), self._max_bytes
        while len(self.batches) < self._steps and (not self.batches or left > 0):
            asked = time.perf_counter()
            limit = self._seconds * (1 if self.windows >= ENOUGH_WINDOWS else PATIENCE)
            if self.batches and asked - begun > limit:
                return
            batch = next(self._source)
            self._taken.append(time.perf_counter() - asked)
            self.batches.append(batch)
            left -= batch.subgraph.nbytes
            yield batch

    def saw_window(self) -> None:
        """One more is known."""
        self.windows += 1

    @property
    def whole(self) -> bool:
        """Whether all steps were sampled."""
        return len(self.batches) == self._steps

    @property
    def total_s(self) -> float:
        """Seconds that sampling took."""
        return sum(self._taken)

    @property
    def batch_s(self) -> float:
        """Seconds a batch; what the first one does for all (kernels, tables) is left out."""
        later = self._taken[1:] or self._taken
        return sum(later) / len(later)


def lengths_of(x: Any) -> Lengths:
    """How the rows' planner reads ids; a read a row where somebody else's code does it."""
    if isinstance(x, ShardedRows):
        return lambda ids: x.plan(ids).length
    return lambda ids: np.full(len(ids), x.row_bytes, np.int64)


class Timed:
    """`lengths` with a clock: planning reads is part of reading, not of grouping."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths, self.total_s = lengths, 0.0

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        begun = time.perf_counter()
        found = self._lengths(ids)
        self.total_s += time.perf_counter() - begun
        return found


def read_cost(x: Any, ids: NDArray[np.int64], max_bytes: int, seconds: float) -> tuple[ReadCost, float, AnyArray]:
    """(what reads cost now, the cores they keep busy, the rows read) by reading some of `ids`, ascending, for about `seconds`.

    The device's cost model, scaled to what these reads took: a disk's speed changes by the minute, its shape does not.
    """
    lengths = lengths_of(x)
    model = x.cost if isinstance(x, ShardedRows) else ReadCost(0.0, 1e-9)
    most = max(1, min(len(ids), max_bytes // x.row_bytes))
    rows = np.empty((most, *x.shape[1:]), x.dtype)
    pieces = [ids[at : min(at + PIECE_ROWS, most)] for at in range(0, most, PIECE_ROWS)]
    x.read(pieces[0], rows[: len(pieces[0])])  # compiles the kernels
    taken = expected = cpu = 0.0
    at = 0
    for piece in pieces[1:] or pieces:
        at = 0 if len(pieces) == 1 else at + PIECE_ROWS
        begun, busy = time.perf_counter(), time.process_time()
        x.read(piece, rows[at : at + len(piece)])
        cpu += time.process_time() - busy
        taken += time.perf_counter() - begun
        length = lengths(piece)
        expected += len(length) * model.read_s + int(length.sum()) * model.byte_s
        if taken > seconds:
            break
    scale = max(taken, 1e-9) / expected
    read = ReadCost(model.read_s * scale, model.byte_s * scale, model.latency_s)
    return read, cpu / max(taken, 1e-9), rows[: at + len(pieces[min(1, len(pieces) - 1)])]


@dataclass(frozen=True)
class Together:
    """What a batch takes where nothing waits for the disk."""

    seconds: float
    cpu_s: float
    step_s: float
    collate_s: float
    peak: int
    """bytes of the process"""


def run_together(pipeline: Pipeline, step: Step, gather: Sequence[str], warm: int, seconds: float) -> Together:
    """Run `step` on a pipeline's batches for about `seconds`; the first `warm` fill caches and do not count.

    gather: the stages between sampling and the model.
    """
    begun = time.perf_counter()
    at = [(begun, time.process_time())]
    with pipeline, MemoryMeter("plan", period_s=0.005) as meter:
        for _, batch in pipeline:
            step(batch)
            at.append((time.perf_counter(), time.process_time()))
            del batch
            if len(at) > warm + LEAST_STEPS and at[-1][0] - begun > seconds:
                break
        peak = meter.peak
    warm = min(warm, (len(at) - 1) // 2)
    wall, cpu = np.subtract(at[-1], at[warm]) / (len(at) - 1 - warm)
    steps = [span.end - span.start for span in pipeline.clocks[CONSUMER].spans[warm:]]
    collate = sum(float(np.median([s.end - s.start for s in pipeline.clocks[name].spans] or [0.0])) for name in gather)
    return Together(float(wall), float(cpu), float(np.median(steps)) if steps else float(wall), collate, peak)


def load_shown(work: Work, drawn: Drawn) -> Loaded:
    """A batch with rows, or their sums, out of those that stand for the ones on disk."""
    if work.summing is not None and isinstance(work.x, Shown):
        return work.summed(drawn, work.x.rows, drawn.subgraph.node % len(work.x.rows))
    return work.load(drawn)


def pipeline_of(work: Work, steps: int, max_bytes: int, max_items: int, windows: bool) -> tuple[Pipeline, list[str]]:
    """(batches of the first steps as training makes them, but that none is read from the disk; the stages after sampling)."""
    cursors = (Cursor(0, step) for step in range(steps))
    if not windows:
        stages = work.stages(1, 2, False)
        return Pipeline(cursors, stages, max_bytes, max_items), ["read", "collate"]
    collate = Stage("collate", lambda drawn: work.collate(load_shown(work, drawn)))  # one thread does both, as for windows
    if work.lockstep is not None:
        return Pipeline(work.sampled(cursors, False), [collate], max_bytes, max_items), ["collate"]
    return Pipeline(cursors, [Stage("sample", work.sample), collate], max_bytes, max_items), ["collate"]


@dataclass(frozen=True)
class Trial:
    """What is profiled. step: runs the model on a batch, forward and backward; forward: without gradients, as for scores."""

    loader: NeighborLoader
    evaluators: Mapping[str, NeighborLoader]
    step: Step
    forward: Step
    steps: int
    """of the first epoch"""
    epochs: int


def profile(trial: Trial, seconds: float, variants: bool = True) -> Profile:
    """Profile the first epoch of a run (and the second, where there is one and the first takes no longer).

    variants: also see what other settings would read. Takes about three times `seconds` (twice that with variants), and no more
    memory than training. Raises what sampling or reading raises.

    >>> profile(Trial(loader, {}, step, forward, steps=len(loader), epochs=5), seconds=1.0).costs.step_s
    0.024
    """
    begun = time.perf_counter()
    work = apart(trial.loader.work)
    work.topology.warm()
    if work.x is None or isinstance(work.x, ArrayRows):
        measured = _in_memory(trial, work, seconds)
    else:
        measured = _from_disk(trial, work, seconds, variants)
    return replace(measured, seconds=time.perf_counter() - begun)


def _in_memory(trial: Trial, work: Work, seconds: float) -> Profile:
    """Where rows are in memory the profile is the pipeline itself, for a while."""
    loader, budget = trial.loader, trial.loader.budget
    sample = Sample(work, 0, trial.steps, MOST_DRAWN_BYTES, seconds / 4 / PATIENCE)
    asked = [len(batch.subgraph.node) for batch in sample]
    sample.batches.clear()
    pipeline, gather = pipeline_of(work, trial.steps, budget.in_flight, loader.prefetch, windows=False)
    found = run_together(pipeline, trial.step, gather, loader.prefetch, seconds)
    costs = Costs(sample.batch_s, 0.0, found.collate_s, found.step_s, found.seconds, found.cpu_s, FREE, 0.0, cores())
    return Profile(
        steps=len(asked),
        costs=costs,
        windows=(),
        others={},
        asked=sum(asked) / len(asked),
        evaluations={split: evaluation(each, apart(each.work), trial.forward) for split, each in trial.evaluators.items()},
        sampled_nbytes=0.0,
        unmapped=work.topology.unmapped(),
        resident=found.peak,
        seconds=0.0,
    )


def _from_disk(trial: Trial, work: Work, seconds: float, variants: bool) -> Profile:
    """Windows are put together as in training and read in part; the model runs on rows that stand for those."""
    budget, steps, lengths = trial.loader.budget, trial.steps, Timed(lengths_of(work.x))
    max_bytes = min(MOST_DRAWN_BYTES, budget.batches // DRAWN_SHARE)
    grouping = Grouping(work, budget.batches, trial.loader.threads[0], Residents.none())
    sample = Sample(work, 0, steps, max_bytes, seconds)
    begun = time.perf_counter()
    replays = [replay(grouping, sample, lengths, sample.saw_window)]
    group_s = (time.perf_counter() - begun - sample.total_s - lengths.total_s) / len(sample.batches)
    drawn, count = sample.batches, len(sample.batches)
    others = {}
    if variants or group_s * count < CHEAP_SECONDS:
        others = {name: replay(other, drawn, own) for name, other, own in variations(grouping, budget)}
    read, read_cpu, rows = read_cost(work.x, first_rows(drawn), budget.batches // ROWS_SHARE, seconds / 2)
    asked, sampled = sum(len(batch.subgraph.node) for batch in drawn) / count, work.read.topology_nbytes / count
    if sample.whole and trial.epochs > 1:
        second = Sample(work, 1, steps, max_bytes, 2 * seconds)
        later = replay(replace(grouping, residents=replays[0].residents), second, lengths)
        replays += [later] if second.whole else []
        second.batches.clear()
    drawn.clear()
    shown = apart(work, x=Shown(work.x, rows))
    pipeline, gather = pipeline_of(shown, steps, budget.in_flight, TOGETHER, windows=True)
    found = run_together(pipeline, trial.step, gather, WARM_STEPS, seconds)
    costs = Costs(
        sample_s=sample.batch_s,
        group_s=group_s,
        collate_s=found.collate_s,
        step_s=found.step_s,
        together_s=found.seconds,
        cpu_s=found.cpu_s,
        read=read,
        read_cpu=read_cpu,
        cores=cores(),
    )
    return Profile(
        steps=count,
        costs=costs,
        windows=tuple(replays),
        others=others,
        asked=asked,
        evaluations={
            split: evaluation(each, apart(each.work, x=shown.x), trial.forward) for split, each in trial.evaluators.items()
        },
        sampled_nbytes=sampled,
        unmapped=work.topology.unmapped(),
        resident=found.peak - rows.nbytes,
        seconds=0.0,
    )


def evaluation(loader: NeighborLoader, work: Work, forward: Step) -> Evaluation:
    """What scoring a split takes, from its first batches, as small as they have to be."""
    asked, begun = [], 0.0
    cursors = (Cursor(0, step) for step in range(len(loader)))
    for drawn in work.split(cursors) if work.lockstep is None else work.sampled(cursors, True):
        _, batch = work.collate(load_shown(work, drawn))
        forward(batch)
        begun = begun or time.perf_counter()  # the first one warms up
        asked.append(len(drawn.subgraph.node))
        if len(asked) > EVALUATED:
            break
    batch_s = (time.perf_counter() - begun) / max(1, len(asked) - 1)
    return Evaluation(len(loader), sum(asked) / len(asked), batch_s)


def variations(grouping: Grouping, budget: Budget) -> Iterator[tuple[str, Grouping, Lengths]]:
    """Other settings worth knowing of: (what to do, how it would be grouped, how its rows would be read)."""
    x: Any = grouping.work.x
    for percent in (50, 100):
        more = budget.memory * percent // 100
        name = f"--memory {format_bytes(budget.memory + more).replace(' ', '')}"
        yield name, replace(grouping, pool_bytes=grouping.pool_bytes + more), lengths_of(x)
    if isinstance(x, ShardedRows) and x.dtype == np.float32:
        half = x.row_bytes // 2
        plan = partial(plan_reads, row_bytes=half, count=x.shape[0], alignment=x.engine.alignment, gap_bytes=x.cost.gap_bytes)
        work = replace(grouping.work, x=Shown(x, np.empty((1, *x.shape[1:]), np.float16)))
        yield "float16 features (ooc ingest --dtype float16)", replace(grouping, work=work), lambda ids: plan(ids).length

"""A short profile of a run before it begins: its own batches sampled, a part of its rows read, its model run on them.

Nothing of it reaches the run: the model is another one of the same shape, counters are its own, and what is drawn is a
function of the seed, so training is the same to the bit with and without it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import FirstLayerAggregates
from ooc.loading.base import BatchLoader
from ooc.loading.collate import LoadedBatch, SampledBatch
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.shared_scan_plan import SharedScan
from ooc.loading.superbatch_plan import SuperbatchPlanner
from ooc.loading.work import Work
from ooc.planning.scan_trial import try_scan
from ooc.planning.simulate_history import HistoryShape, HistoryTraffic, simulate_exchange
from ooc.planning.simulate_scans import SimulatedScans, simulate_shared_scans
from ooc.planning.simulate_superbatches import BatchCosts, Lengths, SimulatedSuperbatches, replay
from ooc.planning.trials import (
    BatchSample,
    StandInRows,
    Step,
    TimedLengths,
    apart,
    batches_of,
    cores,
    lengths_of,
    load_shown,
    pipeline_of,
    read_cost,
    run_together,
)
from ooc.runtime.memory import return_freed
from ooc.runtime.memory_plan import MemoryPlan
from stores.arrays.rows import ArrayRows
from stores.arrays.zarr_rows import ShardedRows
from stores.io.read_plan import ReadCost, plan_by_cost
from stores.sizes import format_bytes

TOGETHER = 3
"""Batches in the pipeline at once: one sampled, one gathered ahead and one at the model"""
WARM_STEPS = 2
EVALUATED = 3
"""Batches of evaluation that the model runs on, the first to warm up"""
CHEAP_SECONDS = 0.3
"""What trying another setting may take where nobody asked for it"""

FREE = ReadCost(0.0, 1e-18)


@dataclass(frozen=True)
class RunProfile:
    """What was measured."""

    steps: int
    """batches of the first epoch that were sampled"""
    costs: BatchCosts
    """`read` costs nothing where rows are in memory"""
    replays: tuple[SimulatedSuperbatches | SimulatedScans, ...]
    """of the first epoch, and of the second where windows of the first were sampled whole; none where rows are in memory"""
    others: dict[str, SimulatedSuperbatches | SimulatedScans]
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
    """most bytes of the process while the model was run, but for rows, sums and what only the profile held"""
    seconds: float
    """it took"""
    exchange: HistoryTraffic | None = None
    """with histories, where there are any"""


@dataclass(frozen=True)
class Evaluation:
    """Scoring a split once."""

    batches: float
    batch_s: float
    """to compute a batch, and to sample and gather it where that is not told by `replay`"""
    sample_s: float
    replay: SimulatedSuperbatches | SimulatedScans | None
    """of its first batches; None where rows are in memory"""


@dataclass(frozen=True)
class RunTrial:
    """What is profiled. step: runs the model on a batch, forward and backward; forward: without gradients, as for scores."""

    loader: BatchLoader
    evaluators: Mapping[str, BatchLoader]
    step: Step
    forward: Step
    steps: int
    """of the first epoch"""
    epochs: int
    histories: HistoryShape | None = None


def profile(trial: RunTrial, seconds: float, variants: bool = True) -> RunProfile:
    """Profile the first epoch of a run (and the second, where there is one and the first takes no longer).

    variants: also see what other settings would read. Takes about five times `seconds`, and no more memory than training.
    Raises what sampling or reading raises.

    >>> profile(RunTrial(loader, {}, step, forward, steps=len(loader), epochs=5), seconds=1.0).costs.step_s
    0.024
    """
    begun = time.perf_counter()
    work = apart(trial.loader.work)
    work.topology.warm()
    if work.x is None or isinstance(work.x, ArrayRows):
        measured = _in_memory(trial, work, seconds)
    else:
        measured = _from_disk(trial, work, seconds, variants)
    return_freed()
    return replace(measured, seconds=time.perf_counter() - begun)


def _in_memory(trial: RunTrial, work: Work, seconds: float) -> RunProfile:
    """Where rows are in memory the profile is the pipeline itself, for a while."""
    loader, budget = trial.loader, trial.loader.budget
    pipeline, gather = pipeline_of(work, trial.steps, budget.in_flight, loader.prefetch, windows=False)
    found = run_together(pipeline, trial.step, gather, loader.prefetch, seconds)
    sample = BatchSample(batches_of(apart(work), 0, trial.steps), budget.trial_batches(), seconds / 2)
    exchange = None if trial.histories is None else _exchange(trial, list(sample))
    sample.batches.clear()
    costs = BatchCosts(found.sample_s, 0.0, found.collate_s, found.step_s, found.seconds, found.cpu_s, FREE, 0.0, cores())
    steps = pipeline.clocks["sample"].items
    return RunProfile(
        steps=steps,
        costs=costs,
        replays=(),
        others={},
        asked=work.read.asked / max(1, steps),
        evaluations=_evaluations(trial, trial.loader.work, seconds),
        sampled_nbytes=0.0,
        unmapped=work.topology.unmapped(),
        resident=found.peak,
        seconds=0.0,
        exchange=exchange,
    )


def _exchange(trial: RunTrial, drawn: list[SampledBatch]) -> HistoryTraffic | None:
    """What these batches, the first ones, pull from histories and push."""
    return None if trial.histories is None else simulate_exchange(trial.histories, drawn, len(drawn) == trial.steps)


def _from_disk(trial: RunTrial, work: Work, seconds: float, variants: bool) -> RunProfile:
    """Windows and sweeps are put together as in training and read in part; the model runs on rows that stand for the others."""
    budget, steps, lengths = trial.loader.budget, trial.steps, TimedLengths(lengths_of(work.x))
    max_bytes = budget.trial_batches()
    grouping = SuperbatchPlanner(work, budget.batches + work.spare_bytes, trial.loader.threads[0], CachedNodes.none())
    regroup(grouping, batches_of(work, 0, 1), lengths_of(work.x))  # loads the kernels
    sampling = apart(work)
    sample, seen = BatchSample(batches_of(sampling, 0, steps), max_bytes, seconds / 2), _First()
    begun = time.perf_counter()
    replays = [regroup(grouping, sample, lengths, lambda found: seen.add(found, sample))]
    group_s = (time.perf_counter() - begun - sample.total_s - lengths.total_s) / len(sample.batches)
    count, whole = len(sample.batches), sample.whole or len(sample.batches) == steps
    asked = sum(len(batch.subgraph.node) for batch in sample.batches) / count
    exchange = _exchange(trial, sample.batches)
    others = {}
    if variants or group_s * count < CHEAP_SECONDS:
        others = {name: regroup(other, sample.batches, own) for name, other, own in variations(grouping, budget)}
    sample.batches.clear()
    if whole and trial.epochs > 1 and isinstance(replays[0], SimulatedSuperbatches):
        second = BatchSample(batches_of(apart(work), 1, steps), max_bytes, seconds)
        later = regroup(replace(grouping, residents=replays[0].residents), second, lengths)
        replays += [later] if len(second.batches) == steps else []
        second.batches.clear()
    return_freed()
    base = BatchCosts(sample.batch_s, group_s, 0.0, 0.0, 0.0, 0.0, FREE, 0.0, cores())
    measure = _scanned if work.scanning else _windowed
    costs, resident, shown = measure(trial, work, seen.found, base, seconds)
    return RunProfile(
        steps=count,
        costs=costs,
        replays=tuple(replays),
        others=others,
        asked=asked,
        evaluations=_evaluations(trial, shown, seconds),
        sampled_nbytes=sampling.read.topology_nbytes / count,
        unmapped=work.topology.unmapped(),
        resident=resident,
        seconds=0.0,
        exchange=exchange,
    )


class _First:
    """Keeps what the first window reads, or the first sweep."""

    def __init__(self) -> None:
        self.found: Any = None

    def add(self, found: Any, sample: BatchSample) -> None:
        """See `replay` and `simulate_shared_scans`."""
        self.found = found if self.found is None else self.found
        sample.windows += 1


def regroup(
    grouping: SuperbatchPlanner, drawn: Any, lengths: Lengths, seen: Callable[[Any], None] = lambda _: None
) -> SimulatedSuperbatches | SimulatedScans:
    """What training reads for batches `drawn`, counted: see `replay` and `simulate_shared_scans`."""
    if grouping.work.scanning:
        return simulate_shared_scans(grouping.work, drawn, grouping.pool_bytes, lengths, seen)
    return replay(grouping, drawn, lengths, seen)


def _windowed(
    trial: RunTrial, work: Work, ids: NDArray[np.int64], base: BatchCosts, seconds: float
) -> tuple[BatchCosts, int, Work]:
    """(costs, bytes of the process beside its rows, the work on rows that stand for those on disk)."""
    budget = trial.loader.budget
    read, read_cpu, rows = read_cost(work.x, ids, budget.trial_rows, seconds)
    shown = apart(work, x=StandInRows(work.x, rows))
    pipeline, gather = pipeline_of(shown, trial.steps, budget.in_flight, TOGETHER, windows=True)
    found = run_together(pipeline, trial.step, gather, WARM_STEPS, seconds)
    costs = replace(
        base,
        collate_s=found.collate_s,
        step_s=found.step_s,
        together_s=found.seconds,
        cpu_s=found.cpu_s,
        read=read,
        read_cpu=read_cpu,
    )
    return costs, found.peak - rows.nbytes, shown


def _scanned(trial: RunTrial, work: Work, scan: SharedScan, base: BatchCosts, seconds: float) -> tuple[BatchCosts, int, Work]:
    """The same for sweeps."""
    found = try_scan(apart(work), scan, trial.steps, trial.loader.threads[0], trial.step, seconds)
    costs = replace(base, collate_s=found.collate_s, step_s=found.step_s, together_s=found.together_s, pace=found.pace)
    return costs, found.resident, work


def _evaluations(trial: RunTrial, shown: Work, seconds: float) -> dict[str, Evaluation]:
    """What scoring each split takes. shown: training's, for its rows."""
    return {
        split: evaluation(loader, apart(loader.work), shown, trial.forward, seconds / 4)
        for split, loader in trial.evaluators.items()
    }


def evaluation(loader: BatchLoader, work: Work, shown: Work, forward: Step, seconds: float) -> Evaluation:
    """What scoring a split takes, from its first batches, as small as they have to be."""
    pool, threads, x = loader.budget.batches + work.spare_bytes, loader.threads[0], work.x
    most = loader.budget.trial_batches(work.spare_bytes)
    sample = BatchSample(batches_of(work, 0, len(loader), split=True), most, seconds, patience=1)
    found: SimulatedSuperbatches | SimulatedScans | None = None
    if x is None or isinstance(x, ArrayRows):
        drawn = list(islice(sample, EVALUATED))
    else:
        found = regroup(SuperbatchPlanner(work, pool, threads, CachedNodes.none()), sample, lengths_of(x))
        drawn = sample.batches[:EVALUATED]
    batches, sample_s = len(loader) * sample.parts, sample.batch_s
    sample.batches.clear()
    batch_s = _scored(apart(work, x=shown.x), drawn, forward)
    return Evaluation(batches, batch_s + (0.0 if found else sample_s), sample_s, found)


def _scored(work: Work, drawn: list[SampledBatch], forward: Step) -> float:
    """Seconds to gather and score a batch, or to score it where its sums are made by sweeps."""
    taken = []
    while drawn:
        batch, begun = drawn.pop(0), time.perf_counter()
        if work.scanning:
            loaded = _without_sums(work, batch)
            begun = time.perf_counter()
        else:
            loaded = load_shown(work, batch)
        forward(work.collate(loaded)[1])
        taken.append(time.perf_counter() - begun)
    return min(taken, default=0.0)


def _without_sums(work: Work, drawn: SampledBatch) -> LoadedBatch:
    """A batch with zeros for its first layer's sums."""
    assert work.x is not None
    _, rest = work.factors(drawn)
    neighbor, self_row = np.zeros((2, len(rest.subgraph.node), work.x.shape[1]), np.float32)
    return LoadedBatch(rest, FirstLayerAggregates(neighbor, self_row), work.labels(rest))


def variations(grouping: SuperbatchPlanner, budget: MemoryPlan) -> Iterator[tuple[str, SuperbatchPlanner, Lengths]]:
    """Other settings worth knowing of: (what to do, how it would be grouped, how its rows would be read)."""
    x: Any = grouping.work.x
    for percent in (50, 100):
        more = budget.memory * percent // 100
        name = f"--memory {format_bytes(budget.memory + more).replace(' ', '')}"
        yield name, replace(grouping, pool_bytes=grouping.pool_bytes + more), lengths_of(x)
    if isinstance(x, ShardedRows) and x.dtype == np.float32:
        half = x.row_bytes // 2
        plan = partial(plan_by_cost, row_bytes=half, cost=x.cost, count=x.shape[0], alignment=x.engine.alignment)
        work = replace(grouping.work, x=StandInRows(x, np.empty((1, *x.shape[1:]), np.float16)))
        yield "float16 features (ooc ingest --dtype float16)", replace(grouping, work=work), lambda ids: plan(ids).length

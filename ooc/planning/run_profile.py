"""A short profile of a run before it begins: its own batches sampled, a part of its rows read, its model run on them.

Nothing of it reaches the run: the model is another one of the same shape, counters are its own, and what is drawn is a
function of the seed, so training is the same to the bit with and without it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from ooc.loading.base import BatchLoader
from ooc.loading.collate import LoadedBatch, SampledBatch
from ooc.loading.stages import BatchStages, LoadStage
from ooc.planning.measure import (
    BatchSample,
    StandInRows,
    Step,
    TimedLengths,
    batches_of,
    cores,
    lengths_of,
    load_shown,
    run_together,
)
from ooc.planning.read_models import ReadModel, RunTrial, model_of
from ooc.planning.simulate_history import HistoryTraffic, simulate_exchange
from ooc.planning.simulate_superbatches import BatchCosts, Lengths, SimulatedReads
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import return_freed
from ooc.runtime.memory_plan import MemoryPlan
from stores.arrays.zarr_rows import ShardedRows
from stores.io.read_plan import ReadCost, plan_by_cost
from stores.sizes import format_bytes

EVALUATED = 3
"""Batches of evaluation that the model runs on, the first to warm up"""
CHEAP_SECONDS = 0.3
"""What trying another setting may take where the user did not want it"""

FREE = ReadCost(0.0, 1e-18)


@dataclass(frozen=True)
class RunProfile:
    """What was measured."""

    steps: int
    """batches of the first epoch that were sampled"""
    costs: BatchCosts
    """`read` costs nothing where rows are in memory"""
    simulated: tuple[SimulatedReads, ...]
    """the first epoch, and the second where the first was sampled whole; none where rows are in memory"""
    others: dict[str, SimulatedReads]
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
    """most bytes of the process while the model was run, but for rows, aggregates and what only the profile had"""
    seconds: float
    """it took"""
    exchange: HistoryTraffic | None = None
    """with histories, where there are any"""


@dataclass(frozen=True)
class Evaluation:
    """Scoring a split once."""

    batches: float
    batch_s: float
    """to compute a batch, and to sample and gather it where that is not `simulated`"""
    sample_s: float
    simulated: SimulatedReads | None
    """of its first batches; None where rows are in memory"""


def profile(trial: RunTrial, seconds: float, variants: bool = True) -> RunProfile:
    """Profile the first epoch of a run (and the second, where there is one and the first takes no longer).

    variants: also see what other settings would read. Takes about five times `seconds`, and no more memory than training.
    Raises what sampling or reading raises.

    >>> profile(RunTrial(loader, {}, step, forward, steps=len(loader), epochs=5), seconds=1.0).costs.step_s
    0.024
    """
    begun = time.perf_counter()
    strategy = trial.loader.strategy.apart()
    strategy.stages.sample.topology.warm()
    model = model_of(strategy, strategy.pool(trial.loader.budget))
    measured = _in_memory(trial, seconds) if model is None else _from_disk(trial, model, seconds, variants)
    return_freed()
    return replace(measured, seconds=time.perf_counter() - begun)


def _in_memory(trial: RunTrial, seconds: float) -> RunProfile:
    """Where rows are in memory the profile is the pipeline itself, for a while."""
    loader, budget = trial.loader, trial.loader.budget
    strategy = loader.strategy.apart()
    cursors = (Cursor(0, step) for step in range(trial.steps))
    pipeline = strategy.pipeline(cursors, budget, loader.prefetch, {})
    found = run_together(pipeline, trial.step, ["read", "collate"], loader.prefetch, seconds)
    sample = BatchSample(batches_of(strategy.apart(), 0, trial.steps), budget.trial_batches(), seconds / 2)
    exchange = None if trial.histories is None else _exchange(trial, list(sample))
    sample.batches.clear()
    costs = BatchCosts(found.sample_s, 0.0, found.collate_s, found.step_s, found.seconds, found.cpu_s, FREE, 0.0, cores())
    steps = pipeline.clocks["sample"].items
    return RunProfile(
        steps=steps,
        costs=costs,
        simulated=(),
        others={},
        asked=strategy.stages.counts.requested / max(1, steps),
        evaluations=_evaluations(trial, loader.strategy.stages.load, seconds),
        sampled_nbytes=0.0,
        unmapped=strategy.stages.sample.topology.unmapped(),
        resident=found.peak,
        seconds=0.0,
        exchange=exchange,
    )


def _exchange(trial: RunTrial, drawn: list[SampledBatch]) -> HistoryTraffic | None:
    """What these batches, the first ones, pull from histories and push."""
    return None if trial.histories is None else simulate_exchange(trial.histories, drawn, len(drawn) == trial.steps)


def _from_disk(trial: RunTrial, model: ReadModel, seconds: float, variants: bool) -> RunProfile:
    """Groups of batches are planned as in training and read in part; the model runs on rows that stand for the others."""
    strategy, budget, steps = model.strategy, trial.loader.budget, trial.steps
    lengths = TimedLengths(lengths_of(strategy.disk_rows))
    max_bytes = budget.trial_batches()
    model.simulate(batches_of(strategy, 0, 1), lengths_of(strategy.disk_rows))  # loads the kernels
    sampling = strategy.apart()
    sample, seen = BatchSample(batches_of(sampling, 0, steps), max_bytes, seconds / 2), _First()
    begun = time.perf_counter()
    simulated = [model.simulate(sample, lengths, lambda found: seen.add(found, sample))]
    group_s = (time.perf_counter() - begun - sample.total_s - lengths.total_s) / len(sample.batches)
    count, whole = len(sample.batches), sample.whole or len(sample.batches) == steps
    asked = sum(len(batch.subgraph.node) for batch in sample.batches) / count
    exchange = _exchange(trial, sample.batches)
    others = {}
    if variants or group_s * count < CHEAP_SECONDS:
        others = {name: other.simulate(sample.batches, own) for name, other, own in variations(model, budget)}
    sample.batches.clear()
    following = model.following(simulated[0])
    if whole and trial.epochs > 1 and following is not None:
        second = BatchSample(batches_of(strategy.apart(), 1, steps), max_bytes, seconds)
        later = following.simulate(second, lengths)
        simulated += [later] if len(second.batches) == steps else []
        second.batches.clear()
    return_freed()
    base = BatchCosts(sample.batch_s, group_s, 0.0, 0.0, 0.0, 0.0, FREE, 0.0, cores())
    measured = model.measure(trial, seen.found, base, seconds)
    return RunProfile(
        steps=count,
        costs=measured.costs,
        simulated=tuple(simulated),
        others=others,
        asked=asked,
        evaluations=_evaluations(trial, measured.load, seconds),
        sampled_nbytes=sampling.stages.counts.topology_nbytes / count,
        unmapped=strategy.stages.sample.topology.unmapped(),
        resident=measured.resident,
        seconds=0.0,
        exchange=exchange,
    )


class _First:
    """Keeps what the first group of batches reads."""

    def __init__(self) -> None:
        self.found: Any = None

    def add(self, found: Any, sample: BatchSample) -> None:
        """See `ReadModel.simulate`."""
        self.found = found if self.found is None else self.found
        sample.groups += 1


def _evaluations(trial: RunTrial, shown: LoadStage, seconds: float) -> dict[str, Evaluation]:
    """What scoring each split takes. shown: training's, for its rows."""
    return {split: evaluation(loader, shown, trial.forward, seconds / 4) for split, loader in trial.evaluators.items()}


def evaluation(loader: BatchLoader, shown: LoadStage, forward: Step, seconds: float) -> Evaluation:
    """What scoring a split takes, from its first batches, as small as they have to be."""
    strategy = loader.strategy.apart()
    pool = strategy.pool(loader.budget)
    most = loader.budget.trial_batches(pool - loader.budget.batches)
    sample = BatchSample(batches_of(strategy, 0, len(loader)), most, seconds, patience=1)
    model, found = model_of(strategy, pool), None
    if model is None:
        drawn = list(islice(sample, EVALUATED))
    else:
        found = model.simulate(sample, lengths_of(strategy.disk_rows))
        drawn = sample.batches[:EVALUATED]
    batches, sample_s = len(loader) * sample.parts, sample.batch_s
    sample.batches.clear()
    stages = strategy.apart().stages.over(shown.x)
    load = partial(load_shown if model is None else model.load, stages.load)
    batch_s = _scored(stages, drawn, forward, load, model is None or model.gathers)
    return Evaluation(batches, batch_s + (0.0 if found else sample_s), sample_s, found)


def _scored(
    stages: BatchStages,
    drawn: list[SampledBatch],
    forward: Step,
    load: Callable[[SampledBatch], LoadedBatch],
    gathers: bool,
) -> float:
    """Seconds to gather (where `gathers`) and score a batch."""
    taken = []
    while drawn:
        batch, begun = drawn.pop(0), time.perf_counter()
        loaded = load(batch)
        begun = begun if gathers else time.perf_counter()
        forward(stages.collate.collate(loaded)[1])
        taken.append(time.perf_counter() - begun)
    return min(taken, default=0.0)


def variations(model: ReadModel, budget: MemoryPlan) -> Iterator[tuple[str, ReadModel, Lengths]]:
    """Other settings worth trying: (what to do, the model with them, how its rows would be read)."""
    x: Any = model.strategy.disk_rows
    for percent in (50, 100):
        more = budget.memory * percent // 100
        name = f"--memory {format_bytes(budget.memory + more).replace(' ', '')}"
        yield name, replace(model, pool=model.pool + more), lengths_of(x)
    if isinstance(x, ShardedRows) and x.dtype == np.float32:
        half = x.row_bytes // 2
        plan = partial(plan_by_cost, row_bytes=half, cost=x.cost, count=x.shape[0], alignment=x.engine.alignment)
        strategy = model.strategy.over(StandInRows(x, np.empty((1, *x.shape[1:]), np.float16)))
        name = "float16 features (ooc ingest --dtype float16)"
        yield name, replace(model, strategy=strategy), lambda ids: plan(ids).length

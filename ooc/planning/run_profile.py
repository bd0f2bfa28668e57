"""A short profile of a run before it begins: its own batches sampled, a part of its rows read, its model run on them.

A `ReadModel` counts what a read strategy reads without reading, and measures its stages on a few batches. Nothing of it reaches
the run: the model is another one of the same shape, counters are its own, and what is drawn is a function of the seed, so
training is the same to the bit with and without it.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import DTypeLike

from ooc.loading.base import BatchLoader
from ooc.loading.collate import LoadedBatch, SampledBatch
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.load_stage import LoadStage
from ooc.loading.packed import PackedBatches
from ooc.loading.read_strategy import InMemory, ReadStrategy
from ooc.loading.shared_scan import SharedScans
from ooc.loading.shared_scan_plan import SharedScan
from ooc.loading.stages import BatchStages
from ooc.loading.superbatch import Superbatches
from ooc.planning.measure import (
    WARM_STEPS,
    BatchSample,
    Step,
    batches_of,
    lengths_in,
    lengths_of,
    read_cost,
    run_together,
    try_scan,
)
from ooc.planning.simulate_history import HistoryShape, HistoryTraffic, simulate_exchange, sum_of
from ooc.planning.simulate_packed import simulate_packed
from ooc.planning.simulate_scans import SimulatedScans, simulate_scans
from ooc.planning.simulate_superbatches import (
    BatchCosts,
    Lengths,
    SimulatedInMemory,
    SimulatedReads,
    SimulatedSuperbatches,
    cost_of,
    simulate_superbatches,
)
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory import return_freed
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.arrays.zarr_rows import ShardedRows
from ooc.stores.io.read_plan import plan_by_cost
from ooc.stores.sizes import format_bytes

TOGETHER = 3
"""Batches in the pipeline at once: one sampled, one gathered ahead and one at the model"""

Seen = Callable[[Any], None]
"""called with what each group of batches reads"""
STAND_IN_BYTES = 2**22
"""of the rows that stand for those of edge features"""
EVALUATED = 3
"""Batches of evaluation that the model runs on, the first to warm up"""
CHEAP_SECONDS = 0.3
"""What trying another setting may take where the user did not want it"""


@dataclass(frozen=True)
class RunTrial:
    """What is profiled. step: runs the model on a batch, forward and backward; forward: without gradients, as for scores;
    steps: of the first epoch."""

    loader: BatchLoader
    evaluators: Mapping[str, BatchLoader]
    step: Step
    forward: Step
    steps: int
    epochs: int
    histories: Sequence[HistoryShape] = ()


TrialRows = Mapping[int, AnyArray]
"""number of an array on disk (see `LoadStage.arrays`) -> a few rows in memory, which stand for all of them"""


class RetypedRows:
    """Rows as they would be with another dtype; they are planned, and never read."""

    def __init__(self, like: Any, dtype: DTypeLike) -> None:
        self.shape, self.dtype, self.cost = like.shape, np.dtype(dtype), cost_of(like)
        self.row_bytes = self.dtype.itemsize * int(np.prod(like.shape[1:], dtype=np.int64))


def few_rows(like: Any) -> AnyArray:
    """Zeros in place of some rows of an array on disk."""
    return np.zeros((max(1, min(like.shape[0], STAND_IN_BYTES // like.row_bytes)), *like.shape[1:]), like.dtype)


def ignored(reads: Any) -> None:
    """A `Seen` that does nothing."""


@dataclass(frozen=True)
class ReadModel(ABC):
    """The cost model of a read strategy. pool: bytes for all batches alive at once."""

    strategy: ReadStrategy
    pool: int
    gathers: ClassVar[bool] = True
    """whether `load` is a part of each batch's work"""

    @abstractmethod
    def simulate(self, drawn: Iterable[SampledBatch], lengths: Sequence[Lengths], seen: Seen = ignored) -> SimulatedReads:
        """Count what training reads for batches `drawn`. lengths: of each array on disk."""

    def following(self, simulated: Any) -> Self | None:
        """The model of the epoch after; None where that reads as much as the first."""
        return None

    @abstractmethod
    def measure(self, trial: RunTrial, first: Any, base: BatchCosts, seconds: float) -> tuple[BatchCosts, int, TrialRows]:
        """Run the stages for about `seconds` each. first: what the first group reads; base: what is known already.

        Returns what the stages cost, the most bytes of the process while the model was run (but for rows and aggregates), and
        rows that stand for those on disk where batches are gathered.
        """

    def load(self, load: LoadStage, drawn: SampledBatch, rows: TrialRows) -> LoadedBatch:
        """A batch with rows, or their aggregates, out of those in memory."""
        if not rows:
            return load.load(drawn)
        known, arrays = load.with_edge_ids(drawn), load.arrays
        there = {number: (some, arrays[number].ids(known) % len(some)) for number, some in rows.items()}
        return load.take(known, there)


class InMemoryModel(ReadModel):
    """Of rows in memory: the pipeline itself, for a while."""

    def simulate(self, drawn: Iterable[SampledBatch], lengths: Sequence[Lengths], seen: Seen = ignored) -> SimulatedInMemory:
        asked = []
        for batch in drawn:
            asked.append(self.strategy.stages.sample.limit.rows(batch))
            seen(None)
        return SimulatedInMemory(sum(asked) / max(1, len(asked)))

    def measure(self, trial: RunTrial, first: Any, base: BatchCosts, seconds: float) -> tuple[BatchCosts, int, TrialRows]:
        prefetch, cursors = trial.loader.prefetch, (Cursor(0, step) for step in range(trial.steps))
        pipeline = self.strategy.apart().pipeline(cursors, trial.loader.budget, prefetch, {})
        return *run_together(pipeline, trial.step, base, ["read", "collate"], prefetch, seconds), {}


@dataclass(frozen=True)
class SuperbatchModel(ReadModel):
    """Of superbatches. residents: of each array the rows in memory before the first; None: none."""

    strategy: Superbatches
    residents: tuple[CachedNodes, ...] | None = None

    def simulate(
        self, drawn: Iterable[SampledBatch], lengths: Sequence[Lengths], seen: Seen = ignored
    ) -> SimulatedSuperbatches:
        return simulate_superbatches(self.strategy.planner(self.pool, self.residents), drawn, lengths, seen)

    def following(self, simulated: SimulatedSuperbatches) -> Self:
        return replace(self, residents=simulated.residents)

    def measure(self, trial: RunTrial, first: list[Ids], base: BatchCosts, seconds: float) -> tuple[BatchCosts, int, TrialRows]:
        """On rows that stand for those on disk; those of the first array are read in part."""
        budget, arrays = trial.loader.budget, self.strategy.stages.disk_arrays
        number, array = next(iter(arrays.items()))
        read, read_cpu, rows = read_cost(array.rows, first[0], budget.trial_rows, seconds)
        known = replace(base, read=read, read_cpu=read_cpu)
        own = {i: rows if i == number else few_rows(each.rows) for i, each in arrays.items()}
        pipeline = self._warm_pipeline(self.strategy.stages.apart(), own, trial.steps, budget.in_flight)
        costs, peak = run_together(pipeline, trial.step, known, ["collate"], WARM_STEPS, seconds)
        return costs, peak - rows.nbytes, own

    def _warm_pipeline(self, stages: BatchStages, rows: TrialRows, steps: int, max_bytes: int) -> Pipeline:
        """Batches of the first steps as training makes them, but that superbatches are not read from the disk."""
        sample, cursors = stages.sample, (Cursor(0, step) for step in range(steps))
        # One thread gathers and collates, as it does for superbatches.
        collate = Stage("collate", lambda drawn: stages.collate.collate(self.load(stages.load, drawn, rows)))
        if sample.one_by_one:
            return Pipeline(cursors, [Stage("sample", sample.sample), collate], max_bytes, TOGETHER)
        return Pipeline(sample.batches(cursors), [collate], max_bytes, TOGETHER)


@dataclass(frozen=True)
class ScanModel(ReadModel):
    """Of shared scans, which make the aggregates of batches beforehand."""

    strategy: SharedScans
    gathers: ClassVar[bool] = False

    def simulate(self, drawn: Iterable[SampledBatch], lengths: Sequence[Lengths], seen: Seen = ignored) -> SimulatedScans:
        return simulate_scans(self.strategy, drawn, self.pool, lengths[0], seen)

    def measure(
        self, trial: RunTrial, first: SharedScan, base: BatchCosts, seconds: float
    ) -> tuple[BatchCosts, int, TrialRows]:
        """On a part of the first scan."""
        return *try_scan(self.strategy.apart(), first, trial.steps, trial.step, base, seconds), {}

    def load(self, load: LoadStage, drawn: SampledBatch, rows: TrialRows) -> LoadedBatch:
        """With zeros for its aggregates."""
        wanted = load.entries(drawn)
        neighbor, self_rows = (np.zeros((rows, load.width), np.float32) for rows in (wanted.num_rows, len(wanted.own)))
        return load.aggregated(wanted.rest, neighbor, self_rows)


class PackedModel(ScanModel):
    """Of packed batches: each is served as a scan by itself."""

    strategy: PackedBatches  # type: ignore[assignment]

    def simulate(self, drawn: Iterable[SampledBatch], lengths: Sequence[Lengths], seen: Seen = ignored) -> SimulatedScans:
        return simulate_packed(self.strategy, drawn, self.pool, lengths[0], seen)

    def measure(
        self, trial: RunTrial, first: SharedScan, base: BatchCosts, seconds: float
    ) -> tuple[BatchCosts, int, TrialRows]:
        """On a scan of the first batch; nothing is written."""
        return *try_scan(self.strategy.scans.apart(), first, trial.steps, trial.step, base, seconds), {}


def model_of(strategy: ReadStrategy, pool: int) -> ReadModel:
    models: dict[Any, type[ReadModel]] = {InMemory: InMemoryModel, SharedScans: ScanModel, Superbatches: SuperbatchModel}
    models[PackedBatches] = PackedModel
    return models[type(strategy)](strategy, pool)


@dataclass(frozen=True)
class RunProfile:
    """What was measured.

    steps: batches of the first epoch that were sampled; simulated: the first epoch, and the second where the first was sampled
    whole; others: the first epoch's reads with other settings, by what to do for them; asked: rows a batch wants; evaluations:
    of every split to score; sampled_nbytes: bytes of edges that a batch reads from the disk by itself; unmapped: bytes of edges
    that draws will map besides those they have; resident: most bytes of the process while the model was run, but for rows,
    aggregates and what only the profile had; seconds: it took; exchange: with histories, where there are any.
    """

    steps: int
    costs: BatchCosts
    simulated: tuple[SimulatedReads, ...]
    others: dict[str, SimulatedReads]
    asked: float
    evaluations: dict[str, "Evaluation"]
    sampled_nbytes: float
    unmapped: int
    resident: int
    seconds: float
    exchange: HistoryTraffic | None = None


@dataclass(frozen=True)
class Evaluation:
    """Scoring a split once. batch_s: to compute a batch, and to sample and gather it where its reads are not `simulated`, as
    rows are in memory."""

    batches: float
    batch_s: float
    sample_s: float
    simulated: SimulatedReads | None


def profile(trial: RunTrial, seconds: float, variants: bool = True) -> RunProfile:
    """Profile the first epoch of a run (and the second, where there is one and the first takes no longer).

    variants: also see what other settings would read. Takes about five times `seconds`, and no more memory than training.
    Raises what sampling or reading raises.
    """
    begun, budget = time.perf_counter(), trial.loader.budget
    sampling = trial.loader.strategy.apart()
    topology = sampling.stages.sample.topology
    topology.warm()
    model = model_of(sampling.apart(), sampling.pool(budget))
    model.simulate(batches_of(model.strategy, 0, 1), lengths_of(sampling))  # loads the kernels
    sample = BatchSample(batches_of(sampling, 0, trial.steps), budget.trial_batches(), seconds / 2)
    first, base = _counted(model, sample)
    count, whole = len(sample.batches), sample.steps == trial.steps
    drawn = max(count, sampling.stages.counts.together)  # of the last that were drawn together, some may not be in the sample
    base = replace(base, sample_s=base.sample_s * count / drawn)
    asked = sum(map(sampling.stages.sample.limit.rows, sample.batches)) / count
    alone = sum(_read_alone(sampling.stages.load, batch) for batch in sample.batches) / count
    exchange = sum_of(simulate_exchange(each, sample.batches, whole) for each in trial.histories)
    tried = variations(model, budget) if variants or base.group_s * count < CHEAP_SECONDS else ()
    others = {name: other.simulate(sample.batches, own) for name, other, own in tried}
    sample.batches.clear()
    later = _later(model, first, trial, seconds) if whole else ()
    return_freed()
    costs, resident, rows = model.measure(trial, sample.first, base, seconds)
    scored = {name: evaluation(each, rows, trial.forward, seconds / 4) for name, each in trial.evaluators.items()}
    return_freed()
    return RunProfile(
        steps=count,
        costs=costs,
        simulated=(first, *later),
        others=others,
        asked=asked,
        evaluations=scored,
        sampled_nbytes=sampling.stages.counts.topology_nbytes / drawn + alone,
        unmapped=topology.unmapped(),
        resident=resident,
        seconds=time.perf_counter() - begun,
        exchange=exchange,
    )


def _read_alone(load: LoadStage, batch: SampledBatch) -> int:
    """Bytes that a batch reads by itself."""
    return sum(int(lengths_in(rows)(np.unique(ids)).sum()) for rows, ids in load.read_alone(batch))


def _counted(model: ReadModel, sample: BatchSample) -> tuple[SimulatedReads, BatchCosts]:
    """(what the batches of a sample read, what sampling and grouping them cost)."""
    planning_s = 0.0

    def timed(lengths: Lengths, ids: Ids) -> Ids:  # planning reads is part of reading, not of grouping
        nonlocal planning_s
        begun = time.perf_counter()
        found = lengths(ids)
        planning_s += time.perf_counter() - begun
        return found

    begun = time.perf_counter()
    found = model.simulate(sample, [partial(timed, each) for each in lengths_of(model.strategy)], sample.formed)
    group_s = (time.perf_counter() - begun - sample.total_s - planning_s) / len(sample.batches)
    grouped = model.strategy.reads_disk
    return found, BatchCosts(sample.batch_s, group_s * grouped, cores=len(os.sched_getaffinity(0)))


def _later(model: ReadModel, first: SimulatedReads, trial: RunTrial, seconds: float) -> tuple[SimulatedReads, ...]:
    """What the second epoch reads, where there is one that reads other rows and all of it can be sampled."""
    following = model.following(first)
    if trial.epochs < 2 or following is None:
        return ()
    sample = BatchSample(batches_of(model.strategy.apart(), 1, trial.steps), trial.loader.budget.trial_batches(), seconds)
    found = following.simulate(sample, lengths_of(model.strategy))
    return (found,) if sample.steps == trial.steps else ()


def evaluation(loader: BatchLoader, rows: TrialRows, forward: Step, seconds: float) -> Evaluation:
    """What scoring a split takes, from its first batches, as small as they have to be. rows: in memory, for all others."""
    strategy = loader.strategy.apart()
    pool, in_memory = strategy.pool(loader.budget), not strategy.reads_disk
    most = loader.budget.trial_batches(pool - loader.budget.batches)
    sample = BatchSample(batches_of(strategy, 0, len(loader)), most, seconds, patience=1)
    model = model_of(strategy, pool)
    found = model.simulate(sample, lengths_of(strategy))
    parts, stages = len(sample.batches) / max(1, sample.steps), strategy.apart().stages
    taken, drawn = [], sample.batches[:EVALUATED]
    sample.batches.clear()
    while drawn:
        batch, begun = drawn.pop(0), time.perf_counter()
        loaded = model.load(stages.load, batch, rows)
        begun = begun if model.gathers else time.perf_counter()
        forward(stages.collate.collate(loaded)[1])
        taken.append(time.perf_counter() - begun)
    batch_s = min(taken, default=0.0) + (sample.batch_s if in_memory else 0.0)
    return Evaluation(len(loader) * parts, batch_s, sample.batch_s, None if in_memory else found)


def variations(model: ReadModel, budget: MemoryPlan) -> Iterator[tuple[str, ReadModel, list[Lengths]]]:
    """Other settings worth trying where rows are on disk: (what to do, the model with them, how its rows would be read)."""
    if not model.strategy.reads_disk:
        return
    x: Any = model.strategy.disk_rows
    lengths = lengths_of(model.strategy)
    for percent in (50, 100):
        more = budget.memory * percent // 100
        name = f"{format_bytes(budget.memory + more)} of memory"
        yield name, replace(model, pool=model.pool + more), lengths
    if isinstance(x, ShardedRows) and x.dtype == np.float32:
        half = x.row_bytes // 2
        plan = partial(plan_by_cost, row_bytes=half, cost=x.cost, count=x.shape[0], alignment=x.engine.alignment)
        rows: Any = RetypedRows(x, np.float16)
        name = "features stored as float16"
        yield name, replace(model, strategy=model.strategy.over(rows)), [lambda ids: plan(ids).length, *lengths[1:]]

"""What a read strategy takes: its reads counted without reading, its speed measured on a few batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ooc.loading.base import BatchLoader
from ooc.loading.collate import LoadedBatch, SampledBatch
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.read_strategy import ReadStrategy
from ooc.loading.shared_scan import SharedScans
from ooc.loading.shared_scan_plan import SharedScan
from ooc.loading.stages import LoadStage
from ooc.loading.superbatch import Superbatches
from ooc.planning.measure import StandInRows, Step, load_shown, read_cost, run_together, warm_pipeline
from ooc.planning.scan_trial import try_scan
from ooc.planning.simulate_history import HistoryShape
from ooc.planning.simulate_scans import SimulatedScans, simulate_scans
from ooc.planning.simulate_superbatches import (
    BatchCosts,
    Lengths,
    SimulatedReads,
    SimulatedSuperbatches,
    simulate_superbatches,
)

TOGETHER = 3
"""Batches in the pipeline at once: one sampled, one gathered ahead and one at the model"""
WARM_STEPS = 2


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


@dataclass(frozen=True)
class Measured:
    """What a strategy's stages cost."""

    costs: BatchCosts
    resident: int
    """most bytes of the process while the model was run, but for rows and aggregates"""
    load: LoadStage
    """over rows in memory that stand for those on disk, where batches are gathered"""


@dataclass(frozen=True)
class ReadModel(ABC):
    """The cost model of a strategy that reads from disk. pool: bytes for all batches alive at once."""

    strategy: ReadStrategy
    pool: int

    @abstractmethod
    def simulate(
        self, drawn: Iterable[SampledBatch], lengths: Lengths, seen: Callable[[Any], None] = lambda _: None
    ) -> SimulatedReads:
        """Count what training reads for batches `drawn`. seen: called with what each group of batches reads."""

    def following(self, simulated: SimulatedReads) -> Self | None:
        """The model of the epoch after; None where that reads as much as the first."""
        return None

    @abstractmethod
    def measure(self, trial: RunTrial, first: Any, base: BatchCosts, seconds: float) -> Measured:
        """Run the stages for about `seconds` each. first: what the first group reads; base: what is known already."""

    @abstractmethod
    def load(self, shown: LoadStage, drawn: SampledBatch) -> LoadedBatch:
        """A batch to score, of rows in memory."""

    @property
    def gathers(self) -> bool:
        """Whether `load` is a part of each batch's work."""
        return True


@dataclass(frozen=True)
class SuperbatchModel(ReadModel):
    """Of superbatches. residents: rows in memory before the first."""

    strategy: Superbatches
    residents: CachedNodes

    def simulate(
        self, drawn: Iterable[SampledBatch], lengths: Lengths, seen: Callable[[Any], None] = lambda _: None
    ) -> SimulatedSuperbatches:
        return simulate_superbatches(self.strategy.planner(self.pool, self.residents), drawn, lengths, seen)

    def following(self, simulated: SimulatedReads) -> Self:
        assert isinstance(simulated, SimulatedSuperbatches)
        return replace(self, residents=simulated.residents)

    def measure(self, trial: RunTrial, first: NDArray[np.int64], base: BatchCosts, seconds: float) -> Measured:
        """On rows that stand for those on disk; these are read in part."""
        budget, x = trial.loader.budget, self.strategy.disk_rows
        read, read_cpu, rows = read_cost(x, first, budget.trial_rows, seconds)
        stages = self.strategy.apart().over(StandInRows(x, rows)).stages
        pipeline = warm_pipeline(stages, trial.steps, budget.in_flight, TOGETHER)
        found = run_together(pipeline, trial.step, ["collate"], WARM_STEPS, seconds)
        costs = replace(
            base,
            collate_s=found.collate_s,
            step_s=found.step_s,
            together_s=found.seconds,
            cpu_s=found.cpu_s,
            read=read,
            read_cpu=read_cpu,
        )
        return Measured(costs, found.peak - rows.nbytes, stages.load)

    def load(self, shown: LoadStage, drawn: SampledBatch) -> LoadedBatch:
        return load_shown(shown, drawn)


@dataclass(frozen=True)
class ScanModel(ReadModel):
    """Of shared scans."""

    strategy: SharedScans

    def simulate(
        self, drawn: Iterable[SampledBatch], lengths: Lengths, seen: Callable[[Any], None] = lambda _: None
    ) -> SimulatedScans:
        return simulate_scans(self.strategy, drawn, self.pool, lengths, seen)

    def measure(self, trial: RunTrial, first: SharedScan, base: BatchCosts, seconds: float) -> Measured:
        """On a part of the first scan."""
        found = try_scan(self.strategy.apart(), first, trial.steps, trial.step, seconds)
        costs = replace(base, collate_s=found.collate_s, step_s=found.step_s, together_s=found.together_s, pace=found.pace)
        return Measured(costs, found.resident, self.strategy.stages.load)

    def load(self, shown: LoadStage, drawn: SampledBatch) -> LoadedBatch:
        """With zeros for its aggregates, which scans make beforehand."""
        _, rest = shown.factors(drawn)
        return shown.aggregated(rest, *np.zeros((2, len(rest.subgraph.node), self.strategy.memory.batch.channels), np.float32))

    @property
    def gathers(self) -> bool:
        return False


def model_of(strategy: ReadStrategy, pool: int) -> ReadModel | None:
    """The cost model of a strategy; None where rows are in memory."""
    if isinstance(strategy, SharedScans):
        return ScanModel(strategy, pool)
    return SuperbatchModel(strategy, pool, CachedNodes.none()) if isinstance(strategy, Superbatches) else None

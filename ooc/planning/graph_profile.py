"""A short profile of a run on whole graphs: its own first batches, by a pipeline and a model of its own.

Graphs are read in long runs, so what is read follows from the rows, and an epoch takes as long as its slowest stage.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ooc.loading.graph_loader import GraphLoader
from ooc.planning.measure import LEAST_STEPS, WARM_STEPS, Step
from ooc.planning.run_profile import EVALUATED, Evaluation, RunProfile
from ooc.planning.simulate_superbatches import BatchCosts, Share, SimulatedReads
from ooc.runtime.memory import MemoryMeter
from ooc.runtime.pipeline import CONSUMER
from ooc.stores.io.read_plan import ReadCost

UNITS = 4
"""units of graphs in memory at once: one is read, one is ready, and batches are made of two"""
CHANGES = {
    "read": "store features in fewer bytes, or use a faster disk",
    "consumer": "the disk keeps up, so only a smaller model, or a faster processor or GPU, would help",
    "collate": "narrower features would help",
}
"""what helps where a stage takes the longest"""
_AT_ONCE = 2**20
"""graphs whose sizes are added up at once"""


@dataclass(frozen=True)
class SimulatedRuns(SimulatedReads):
    """Graphs read in runs, while batches are made of those before.

    asked, nbytes: rows of nodes of a batch, and bytes read for it; filled_s: until the first batch; held: bytes of graphs that
    will be in memory beyond those that the profile had there.
    """

    asked: float
    nbytes: float
    filled_s: float
    held: int
    groups: Sequence[int] = ()

    def epoch(self, costs: BatchCosts, steps: float) -> Share:
        read_s, asked = costs.read.byte_s * self.nbytes, self.asked * steps
        seconds = self.filled_s + max(costs.together_s, read_s) * steps
        more: dict[str, Any] = {"read_s": read_s * steps, "model_s": costs.step_s * steps}
        return Share(steps, seconds, self.nbytes * steps, asked, asked, **more)

    def peak_bytes(self, costs: BatchCosts, steps: float, row_bytes: int) -> int:
        return self.held


def profile_graphs(
    make: Callable[[str | None], GraphLoader], splits: Sequence[str], step: Step, forward: Step, steps: int, seconds: float
) -> RunProfile:
    """Profile the first epoch of a run on whole graphs, for about `seconds`, and scores for as long.

    Args:
        make: A new loader of a split, or (None) of the training graphs.
        splits: Those that are scored.
        step, forward: Run the model on a batch, with and without gradients.
        steps: Of the first epoch.
        seconds: What each part may take.
    """
    begun, loader = time.perf_counter(), make(None)
    loader.stop_before(1)
    _run(loader, lambda batch: None, 1, seconds)  # loads the kernels
    loader = make(None)
    loader.stop_before(steps)
    with MemoryMeter("plan", period_s=0.005) as meter:
        filled_s, taken = _run(loader, step, LEAST_STEPS + WARM_STEPS, seconds)
        resident = meter.peak
    simulated, costs = _measured(loader, filled_s, taken)
    scored = {split: _scored(make(split), forward, costs, simulated, loader.batch_size, seconds / 2) for split in splits}
    return RunProfile(
        steps=len(taken),
        costs=costs,
        simulated=(simulated,),
        others={},
        asked=simulated.asked,
        evaluations=scored,
        sampled_nbytes=0.0,
        unmapped=0,
        resident=resident,
        seconds=time.perf_counter() - begun,
    )


def _run(loader: GraphLoader, step: Step, least: int, seconds: float) -> tuple[float, list[float]]:
    """(seconds until the first batch, seconds of each batch): of so many batches at least, unless they take much longer."""
    taken: list[float] = []
    before = begun = time.perf_counter()
    filled_s = 0.0
    with closing(iter(loader)) as batches:
        for batch in batches:
            filled_s = filled_s or time.perf_counter() - begun
            step(batch)
            now = time.perf_counter()
            taken.append(now - before - (0.0 if taken else filled_s))
            before = now
            if now - begun > (seconds if len(taken) >= least else 4 * seconds):
                break
    return filled_s, taken


def _measured(loader: GraphLoader, filled_s: float, taken: Sequence[float]) -> tuple[SimulatedRuns, BatchCosts]:
    """What batches read, and what their stages cost."""
    reader, times, count = loader.reader, loader.times(), len(taken)
    rows, nbytes, batches = _sizes(loader)
    read, counts = times["read"]["busy_s"], reader.counts
    asked = rows / batches
    held = min(UNITS * loader.budget.graphs, nbytes) - nbytes * min(1.0, counts.rows / max(1, rows))
    steady = list(taken[WARM_STEPS:]) or list(taken)
    own = _of_a_batch(times, count)
    planned = times["plan"]["work_s"] * asked / max(1, counts.rows)  # ahead of the batches, as they are read
    costs = BatchCosts(
        sample_s=0.0,
        group_s=planned,
        collate_s=own.get("collate", 0.0),
        step_s=own.get(CONSUMER, 0.0),
        together_s=float(np.mean(steady)),
        read=ReadCost(0.0, read / counts.nbytes if counts.nbytes else 0.0),
        cores=len(os.sched_getaffinity(0)),
    )
    found = SimulatedRuns(asked, asked * counts.nbytes / max(1, counts.rows), filled_s, max(0, round(held)))
    return found, costs


def _of_a_batch(times: Mapping[str, Mapping[str, float]], batches: int) -> dict[str, float]:
    """Seconds of work of each stage for a batch."""
    return {name: each["work_s"] / max(1, batches) for name, each in times.items()}


def _sizes(loader: GraphLoader) -> tuple[int, int, int]:
    """(rows of nodes, bytes in memory, batches) of all graphs of a loader."""
    rows = nbytes = 0
    for first in range(0, len(loader.graphs), _AT_ONCE):
        graph = loader.graphs.ids(np.arange(first, min(first + _AT_ONCE, len(loader.graphs))))
        rows += int(loader.reader.sizes(graph)[0].sum())
        nbytes += int(loader.reader.nbytes(graph).sum())
    return rows, nbytes, max(1, len(loader))


def _scored(
    loader: GraphLoader, forward: Step, costs: BatchCosts, simulated: SimulatedRuns, batch_size: int, seconds: float
) -> Evaluation:
    """What scoring a split takes, whose graphs are read as fast."""
    loader.stop_before(min(EVALUATED, len(loader)))
    _, taken = _run(loader, forward, EVALUATED, seconds)
    read_s = costs.read.byte_s * simulated.nbytes * loader.batch_size / batch_size
    return Evaluation(len(loader), max(min(taken, default=0.0), read_s), 0.0, None)

"""PURE: what a run will take, from the superbatches that its batches form and what each stage costs.

Batches are a function of the seed, and so are superbatches: grouping the batches of a run without reading a row shows exactly
which rows it will read. What remains is time: reading, gathering and computing overlap, and rows make room for one another,
which `simulate` follows superbatch by superbatch. `ooc.planning.run_profile` measures the costs.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.superbatch import PIECE_ROWS
from ooc.loading.superbatch_plan import ROW_BYTES, SUPERBATCHES, SuperbatchPlanner
from stores.io.read_plan import ReadCost

Ids = NDArray[np.int64]
Lengths = Callable[[Ids], NDArray[np.int64]]
"""ascending ids -> bytes of the extents that serve them"""


class SimulatedReads(Protocol):
    """What an epoch's first batches read, counted without reading."""

    def epoch(self, costs: "BatchCosts", steps: float) -> "Share":
        """What an epoch of `steps` batches takes that begins with those simulated."""

    def later_epoch(self, costs: "BatchCosts", steps: int) -> "Share":
        """What one of the epochs after it takes."""

    def suffices(self, steps: float) -> bool:
        """Whether enough batches were simulated to extrapolate from."""

    def peak_bytes(self, costs: "BatchCosts", steps: float, row_bytes: int) -> int:
        """The most bytes in memory of rows or aggregates and their tables. row_bytes: of a stored row."""


@dataclass(frozen=True)
class SuperbatchLoad:
    """What a superbatch wants of the disk and of the memory."""

    asked: NDArray[np.int64]
    """int64[batches]: rows each batch wants"""
    rows_read: int
    extents: int
    nbytes: int
    limit: int
    """rows in memory at most while it is read"""
    kept: int
    """bytes of its batches while they wait"""
    early: int
    """rows evicted before anything is read for it"""
    idle: int
    """rows evicted as soon as its first batch is gathered"""
    freed: NDArray[np.int64]
    """int64[batches]: rows evicted after each batch"""

    @property
    def batches(self) -> int:
        return len(self.asked)


@dataclass(frozen=True)
class SimulatedSuperbatches:
    """The superbatches of an epoch's first batches; see `SimulatedReads`."""

    loads: tuple[SuperbatchLoad, ...]
    before: int
    """rows in memory before the first superbatch"""
    residents: CachedNodes
    """what is in memory after the last"""

    def epoch(self, costs: "BatchCosts", steps: float) -> "Share":
        """The batches beyond those simulated go on like the last half of their superbatches.

        Where they are not all, the last superbatch was cut short by the sample's end, and does not count unless it is the only
        one.
        """
        loads = self.loads
        line = simulate(loads, costs, self.before)
        if len(line.done) >= steps:
            known = _share(loads, line, costs, 0, len(loads))
            return known if len(line.done) == steps else known.scaled(steps)
        whole = max(1, len(loads) - 1)
        begin = whole // 2 if whole > 1 else 0
        steady = _share(loads, line, costs, begin, whole)
        known = _share(loads, line, costs, 0, whole)
        return known + steady.scaled(steps - known.steps) if steps >= known.steps else known.scaled(steps)

    def later_epoch(self, costs: "BatchCosts", steps: int) -> "Share":
        """All but the beginning of an epoch: what follows the batches simulated."""
        if self._covers(steps):
            return self.epoch(costs, steps)
        return self.epoch(costs, 2 * steps).without(self.epoch(costs, steps))

    def _covers(self, steps: float) -> bool:
        """Whether these are all superbatches of an epoch of so many batches."""
        return sum(load.batches for load in self.loads) >= steps

    def suffices(self, steps: float) -> bool:
        """All batches do, or two whole superbatches."""
        return self._covers(steps) or len(self.loads) > 2

    def peak_bytes(self, costs: "BatchCosts", steps: float, row_bytes: int) -> int:
        """Of the rows in memory and the batches that wait."""
        rows = simulate(self.loads, costs, self.before).peak_rows
        return rows * (row_bytes + ROW_BYTES) + SUPERBATCHES * max(load.kept for load in self.loads)


def simulate_superbatches(
    planner: SuperbatchPlanner, drawn: Iterable[SampledBatch], lengths: Lengths, seen: Callable[[Ids], None] = lambda _: None
) -> SimulatedSuperbatches:
    """Group `drawn` as training would, and count instead of reading; `seen` is called with the rows that each superbatch reads.

    >>> sum(load.rows_read for load in simulate_superbatches(planner, drawn, lambda ids: rows.plan(ids).length).loads)
    """
    loads, residents = [], planner.residents
    for superbatch in planner.plan(iter(drawn)):
        sketch, missing = superbatch.sketch, superbatch.missing
        extents, nbytes = planned(missing, lengths)
        loads.append(
            SuperbatchLoad(
                asked=np.array([len(batch.row) for batch in sketch.batches], np.int64),
                rows_read=len(missing),
                extents=extents,
                nbytes=nbytes,
                limit=sketch.limit,
                kept=sum(batch.nbytes for batch in sketch.batches),
                early=len(superbatch.early),
                idle=len(superbatch.idle),
                freed=np.diff(superbatch.first),
            )
        )
        residents = superbatch.final or residents
        seen(missing)
    return SimulatedSuperbatches(tuple(loads), len(planner.residents.node), residents)


def cost_of(x: Any) -> ReadCost:
    """The cost model of reading rows; by bytes alone where somebody else's code reads."""
    return x.cost if hasattr(x, "cost") else ReadCost(0.0, 1e-9)


def planned(ids: NDArray[np.int64], lengths: Lengths) -> tuple[int, int]:
    """(extents, bytes) of reading `ids` (ascending) in pieces."""
    pieces = [lengths(ids[at : at + PIECE_ROWS[1]]) for at in range(0, len(ids), PIECE_ROWS[1])]
    return sum(map(len, pieces)), sum(int(length.sum()) for length in pieces)


@dataclass(frozen=True)
class AggregationSpeed:
    """How fast shared scans make aggregates, by making some: reading and adding up together."""

    alone: float
    """times as long as the cost model says of the reads, while no batch is served"""
    beside: float
    """and while batches are"""
    batch_s: float
    """a batch, while aggregates are made"""
    reading: float
    """of the time, the share in which something is read"""
    pre_aggregation: float
    """and in which something is added up"""


@dataclass(frozen=True)
class BatchCosts:
    """Measured seconds of a batch, or as they are named."""

    sample_s: float
    """to sample a batch"""
    group_s: float
    """to put a batch into its superbatch"""
    collate_s: float
    """to gather and collate a batch"""
    step_s: float
    """the model's forward, backward and optimizer step, while nothing else runs in the process"""
    together_s: float
    """a batch where sampling, collation and the model share the processor and no batch waits for the disk"""
    cpu_s: float
    """processor seconds of such a batch, over all threads"""
    read: ReadCost
    read_cpu: float
    """cores that reading keeps busy"""
    cores: int
    pace: AggregationSpeed | None = None
    """of shared scans, which do not read as `read` says"""

    def read_s(self, load: SuperbatchLoad) -> float:
        """Seconds that reading a superbatch's rows takes."""
        return load.extents * self.read.read_s + load.nbytes * self.read.byte_s

    def batch_s(self, load: SuperbatchLoad) -> float:
        """Seconds between two batches whose rows are there in time: reading and grouping want cores too."""
        cpu = self.cpu_s + self.group_s + self.read_cpu * self.read_s(load) / load.batches
        return max(self.together_s, cpu / self.cores)


@dataclass(frozen=True)
class Timeline:
    """When things end, in seconds from the first request."""

    done: NDArray[np.float64]
    """float64[batches]: the model is through with a batch"""
    read_s: float
    """spent reading"""
    peak_rows: int
    """rows in memory at most"""


class _Pool:
    """Rows in memory, and when they will be evicted."""

    def __init__(self, rows: int) -> None:
        self.used = self.peak = rows
        self._freed: deque[tuple[float, int]] = deque()

    def free(self, time: float, rows: int) -> None:
        """`rows` are evicted at `time`, no earlier than any before."""
        if rows:
            self._freed.append((time, rows))

    def take(self, time: float, least: int, most: int, limit: int) -> tuple[float, int]:
        """(when there is room, rows taken): see `RowCache.take`."""
        while self._freed and (self._freed[0][0] <= time or self.used + least > limit):
            freed_at, rows = self._freed.popleft()
            time, self.used = max(time, freed_at), self.used - rows
        taken = max(least, min(most, limit - self.used))
        self.used += taken
        self.peak = max(self.peak, self.used)
        return time, taken


def simulate(loads: Sequence[SuperbatchLoad], costs: BatchCosts, before: int = 0) -> Timeline:
    """Follow `ooc.loading.superbatch` through its three pipelines: sampling runs two superbatches ahead of reading, reading
    goes on while the batches of the superbatch before make room, one batch is gathered ahead of the model.

    before: rows in memory at the beginning.
    """
    pool, rate = _Pool(before), max(costs.sample_s, costs.group_s)
    grouped = reader = gathered = model = asked_for = read_s = 0.0
    served = [0.0, 0.0]  # when the superbatches two and one before began to be served
    done: list[float] = []
    for w, load in enumerate(loads):
        ahead = loads[w + 1].batches if w + 1 < len(loads) else 0
        grouped = max(grouped, served[-2]) + rate * (ahead + (load.batches if w == 0 else 0))
        reader, left = max(reader, grouped), load.rows_read
        row_s = costs.read_s(load) / max(1, left)
        pool.free(reader, load.early)
        while left:
            reader, taken = pool.take(reader, min(PIECE_ROWS[0], left), min(PIECE_ROWS[1], left), load.limit)
            reader, left, read_s = reader + taken * row_s, left - taken, read_s + taken * row_s
        served.append(max(reader, gathered))
        batch_s = costs.batch_s(load)
        for k in range(load.batches):
            gathered = max(gathered, asked_for, served[-1]) + costs.collate_s
            pool.free(gathered, load.idle if k == 0 else 0)
            pool.free(gathered, int(load.freed[k]))
            asked_for = max(model, gathered)  # the model takes it, and the next one is begun
            model = asked_for + batch_s
            done.append(model)
    return Timeline(np.array(done), read_s, pool.peak)


@dataclass(frozen=True)
class Share:
    """What some batches of a run take."""

    steps: float = 0
    seconds: float = 0.0
    nbytes: float = 0.0
    rows_read: float = 0.0
    rows_asked: float = 0.0
    read_s: float = 0.0
    """in which something was read"""
    sum_s: float = 0.0
    """spent on making aggregates in shared scans"""
    model_s: float = 0.0

    def __add__(self, other: "Share") -> "Share":
        return Share(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def without(self, other: "Share") -> "Share":
        """What these take more than `other`."""
        return Share(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scaled(self, steps: float) -> "Share":
        """The same for so many batches."""
        return Share(*(value * steps / self.steps if self.steps else 0.0 for value in astuple(self)))


def _share(loads: Sequence[SuperbatchLoad], line: Timeline, costs: BatchCosts, begin: int, end: int) -> Share:
    """What the superbatches begin..end-1 take."""
    first, last = (sum(load.batches for load in loads[:w]) for w in (begin, end))
    some = loads[begin:end]
    return Share(
        steps=last - first,
        seconds=float(line.done[last - 1] - (line.done[first - 1] if first else 0.0)) if last else 0.0,
        nbytes=sum(load.nbytes for load in some),
        rows_read=sum(load.rows_read for load in some),
        rows_asked=sum(int(load.asked.sum()) for load in some),
        read_s=sum(costs.read_s(load) for load in some),
        model_s=(last - first) * costs.step_s,
    )

"""PURE: what a run will take, from the superbatches that its batches form and what each stage costs.

Batches are a function of the seed, and so are superbatches: grouping the batches of a run without reading a row shows exactly
which rows it will read. What remains is time: reading, gathering and computing overlap, and rows make room for one another,
which `simulate` follows superbatch by superbatch. `ooc.planning.run_profile` measures the costs.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import CachedNodes
from ooc.loading.load_stage import BatchArray
from ooc.loading.row_changes import RowChanges
from ooc.loading.superbatch import PIECE_ROWS
from ooc.loading.superbatch_plan import ROW_BYTES, SUPERBATCHES, CompactBatch, SuperbatchPlanner
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.rows import Ids
from ooc.stores.io.read_plan import ReadCost

Lengths = Callable[[Ids], NDArray[np.int64]]
"""ascending ids -> bytes of the extents that serve them"""
FREE = ReadCost(0.0, 1e-18)
"""of rows in memory"""


@dataclass(frozen=True)
class Share:
    """What some batches of a run take. nbytes, edge_nbytes: of the rows of nodes and of edges that are read; read_s: in which
    something was read; sum_s: spent on aggregates of shared scans; packed_nbytes: written to pack batches."""

    steps: float = 0
    seconds: float = 0.0
    nbytes: float = 0.0
    rows_read: float = 0.0
    rows_asked: float = 0.0
    read_s: float = 0.0
    sum_s: float = 0.0
    model_s: float = 0.0
    edge_nbytes: float = 0.0
    packed_nbytes: float = 0.0

    def __add__(self, other: "Share") -> "Share":
        return Share(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Share") -> "Share":
        return Share(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scaled(self, steps: float) -> "Share":
        return Share(*(value * steps / self.steps if self.steps else 0.0 for value in astuple(self)))


@dataclass(frozen=True)
class AggregationSpeed:
    """How fast shared scans make aggregates; measured on a part of one.

    alone, beside: reading and adding up together, in multiples of what the cost model says of the reads, while no batch is
    served and while batches are; batch_s: a batch, while aggregates are made; reading, pre_aggregation: of the time, the share
    in which something is read, and in which something is added up.
    """

    alone: float
    beside: float
    batch_s: float
    reading: float
    pre_aggregation: float


@dataclass(frozen=True)
class BatchCosts:
    """Measured seconds of a batch, or as they are named.

    group_s: to put a batch into its superbatch or scan; collate_s: to gather and collate it; step_s: the model's forward,
    backward and optimizer step, while nothing else runs in the process; together_s: a batch where sampling, collation and the
    model share the processor and no batch waits for the disk; cpu_s: processor seconds of such a batch, over all threads;
    read_cpu: cores that reading keeps busy; pace: of shared scans, which do not read as `read` says.
    """

    sample_s: float
    group_s: float
    collate_s: float = 0.0
    step_s: float = 0.0
    together_s: float = 0.0
    cpu_s: float = 0.0
    read: ReadCost = FREE
    read_cpu: float = 0.0
    cores: int = 1
    pace: AggregationSpeed | None = None

    def read_s(self, load: "SuperbatchLoad | ArrayLoad") -> float:
        return load.extents * self.read.read_s + load.nbytes * self.read.byte_s

    def batch_s(self, load: "SuperbatchLoad") -> float:
        """Seconds between two batches whose rows are there in time: reading and grouping want cores too."""
        cpu = self.cpu_s + self.group_s + self.read_cpu * self.read_s(load) / load.batches
        return max(self.together_s, cpu / self.cores)


class SimulatedReads(ABC):
    """What an epoch's first batches read, counted without reading."""

    makes: ClassVar[str] = "sum"
    """the stage that reads for many batches, where costs have its pace"""

    @property
    @abstractmethod
    def groups(self) -> Sequence[int | float]:
        """Batches of each group that is read together, the last of which the sample's end may have cut short."""

    def covers(self, steps: float) -> bool:
        """Whether these are all groups of an epoch of so many batches."""
        return sum(self.groups) >= steps

    def suffices(self, steps: float) -> bool:
        """Whether there is enough to extrapolate from: all batches, or two whole groups."""
        return self.covers(steps) or len(self.groups) > 2

    @abstractmethod
    def epoch(self, costs: BatchCosts, steps: float) -> Share:
        """What an epoch of `steps` batches takes that begins with those simulated."""

    def later_epoch(self, costs: BatchCosts, steps: int) -> Share:
        """What one of the epochs after it takes."""
        return self.epoch(costs, steps)

    @abstractmethod
    def peak_bytes(self, costs: BatchCosts, steps: float, row_bytes: int) -> int:
        """The most bytes in memory of rows or aggregates and their tables. row_bytes: of a stored row."""


@dataclass(frozen=True)
class SimulatedInMemory(SimulatedReads):
    """Rows in memory. asked: rows a batch wants."""

    asked: float
    groups: tuple[int, ...] = ()

    def epoch(self, costs: BatchCosts, steps: float) -> Share:
        seconds = costs.together_s * steps + costs.sample_s + costs.collate_s
        asked = self.asked * steps
        return Share(steps, seconds, rows_read=asked, rows_asked=asked, model_s=costs.step_s * steps)

    def peak_bytes(self, costs: BatchCosts, steps: float, row_bytes: int) -> int:
        return 0


@dataclass(frozen=True)
class ArrayLoad:
    """What a superbatch wants of one array.

    row_bytes: as stored; rows_read, extents, nbytes: of the disk; limit: rows in memory at most while it is read. Rows evicted:
    early, before anything is read for it; idle, as soon as its first batch is gathered; freed, int64[batches], after each
    batch.
    """

    of_edges: bool
    row_bytes: int
    rows_read: int
    extents: int
    nbytes: int
    limit: int
    early: int
    idle: int
    freed: NDArray[np.int64]


@dataclass(frozen=True)
class SuperbatchLoad:
    """What a superbatch wants of the disk and of the memory.

    asked: int64[batches], rows of nodes each batch wants; kept: bytes of its batches while they wait; arrays: those that are
    read from disk.
    """

    asked: NDArray[np.int64]
    kept: int
    arrays: tuple[ArrayLoad, ...]

    @property
    def batches(self) -> int:
        return len(self.asked)

    @property
    def extents(self) -> int:
        return sum(each.extents for each in self.arrays)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.arrays)

    @property
    def edge_nbytes(self) -> int:
        """Bytes of edge features."""
        return sum(each.nbytes for each in self.arrays if each.of_edges)

    @property
    def rows_read(self) -> int:
        """Rows of nodes; where these are in memory, all that are wanted."""
        if all(each.of_edges for each in self.arrays):
            return int(self.asked.sum())
        return sum(each.rows_read for each in self.arrays if not each.of_edges)


@dataclass(frozen=True)
class SimulatedSuperbatches(SimulatedReads):
    """The superbatches of an epoch's first batches. Of each array, before: rows in memory before the first; residents: what is
    in memory after the last."""

    loads: tuple[SuperbatchLoad, ...]
    before: tuple[int, ...]
    residents: tuple[CachedNodes, ...]

    @property
    def groups(self) -> list[int]:
        return [load.batches for load in self.loads]

    def epoch(self, costs: BatchCosts, steps: float) -> Share:
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
        steady = _share(loads, line, costs, whole // 2, whole)
        known = _share(loads, line, costs, 0, whole)
        return known + steady.scaled(steps - known.steps) if steps >= known.steps else known.scaled(steps)

    def later_epoch(self, costs: BatchCosts, steps: int) -> Share:
        """All but the beginning of an epoch: what follows the batches simulated."""
        if self.covers(steps):
            return self.epoch(costs, steps)
        return self.epoch(costs, 2 * steps) - self.epoch(costs, steps)

    def peak_bytes(self, costs: BatchCosts, steps: float, row_bytes: int) -> int:
        rows = simulate(self.loads, costs, self.before).peak_rows
        shown = zip(rows, self.loads[0].arrays, strict=True)
        own = sum(most * ((each.row_bytes if each.of_edges else row_bytes) + ROW_BYTES) for most, each in shown)
        return own + SUPERBATCHES * max(load.kept for load in self.loads)


def simulate_superbatches(
    planner: SuperbatchPlanner, drawn: Iterable[SampledBatch], lengths: Sequence[Lengths], seen: Callable[[list[Ids]], None]
) -> SimulatedSuperbatches:
    """Group `drawn` as training would, and count instead of reading.

    lengths: of each array; `seen` is called with the rows of each that a superbatch reads.
    """
    loads, residents = [], planner.residents
    for superbatch in planner.plan(iter(drawn)):
        missing = [each.missing for each in superbatch.arrays]
        own = zip(planner.arrays, superbatch.arrays, missing, lengths, strict=True)
        asked = [_nodes_of(batch, planner.of_edges) for batch in superbatch.batches]
        kept = sum(batch.nbytes for batch in superbatch.batches)
        loads.append(SuperbatchLoad(np.array(asked, np.int64), kept, tuple(_array_load(*each) for each in own)))
        residents = tuple(each.final or before for each, before in zip(superbatch.arrays, residents, strict=True))
        seen(missing)
    return SimulatedSuperbatches(tuple(loads), tuple(len(each.node) for each in planner.residents), residents)


def _nodes_of(batch: CompactBatch, of_edges: Sequence[bool]) -> int:
    """Rows of nodes that a batch asks for."""
    if all(of_edges):
        return len(batch.drawn.subgraph.node)
    return sum(len(row) for row, edges in zip(batch.row, of_edges, strict=True) if not edges)


def _array_load(array: BatchArray, changes: RowChanges, missing: Ids, lengths: Lengths) -> ArrayLoad:
    extents, nbytes = planned(missing, lengths)
    return ArrayLoad(
        of_edges=array.of_edges,
        row_bytes=array.rows.row_bytes,
        rows_read=len(missing),
        extents=extents,
        nbytes=nbytes,
        limit=changes.used.limit,
        early=len(changes.early),
        idle=len(changes.idle),
        freed=np.diff(changes.first),
    )


def cost_of(x: Any) -> ReadCost:
    """The cost model of reading rows; by bytes alone where other code reads."""
    parts = x.parts.values() if isinstance(x, JoinedRows) else [x]
    return next((each.cost for each in parts if hasattr(each, "cost")), ReadCost(0.0, 1e-9))


def planned(ids: NDArray[np.int64], lengths: Lengths) -> tuple[int, int]:
    """(extents, bytes) of reading `ids` (ascending) in pieces."""
    pieces = [lengths(ids[at : at + PIECE_ROWS[1]]) for at in range(0, len(ids), PIECE_ROWS[1])]
    return sum(map(len, pieces)), sum(int(length.sum()) for length in pieces)


class Timeline(NamedTuple):
    """done: float64[batches], when the model is through with each batch, in seconds from the first request; peak_rows: of each
    array the most rows in memory."""

    done: NDArray[np.float64]
    peak_rows: tuple[int, ...]


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


def simulate(loads: Sequence[SuperbatchLoad], costs: BatchCosts, before: Sequence[int]) -> Timeline:
    """Follow `ooc.loading.superbatch` through its three pipelines: sampling runs two superbatches ahead of reading, reading
    goes on while the batches of the superbatch before make room, one batch is gathered ahead of the model.

    before: of each array the rows in memory at the beginning.
    """
    pools, rate = [_Pool(rows) for rows in before], max(costs.sample_s, costs.group_s)
    grouped = reader = gathered = model = asked_for = 0.0
    served = [0.0, 0.0]  # when the superbatches two and one before began to be served
    done: list[float] = []
    for w, load in enumerate(loads):
        ahead = loads[w + 1].batches if w + 1 < len(loads) else 0
        grouped = max(grouped, served[-2]) + rate * (ahead + (load.batches if w == 0 else 0))
        reader = max(reader, grouped)
        for pool, each in zip(pools, load.arrays, strict=True):
            reader = _read(pool, each, costs, reader)
        served.append(max(reader, gathered))
        batch_s = costs.batch_s(load)
        for k in range(load.batches):
            gathered = max(gathered, asked_for, served[-1]) + costs.collate_s
            for pool, each in zip(pools, load.arrays, strict=True):
                pool.free(gathered, each.idle if k == 0 else 0)
                pool.free(gathered, int(each.freed[k]))
            asked_for = max(model, gathered)  # the model takes it, and the next one is begun
            model = asked_for + batch_s
            done.append(model)
    return Timeline(np.array(done), tuple(pool.peak for pool in pools))


def _read(pool: _Pool, load: ArrayLoad, costs: BatchCosts, start: float) -> float:
    """When the rows of one array are read that are begun with at `start`."""
    time, left = start, load.rows_read
    row_s = costs.read_s(load) / max(1, left)
    pool.free(time, load.early)
    while left:
        time, taken = pool.take(time, min(PIECE_ROWS[0], left), min(PIECE_ROWS[1], left), load.limit)
        time, left = time + taken * row_s, left - taken
    return time


def _share(loads: Sequence[SuperbatchLoad], line: Timeline, costs: BatchCosts, begin: int, end: int) -> Share:
    first, last = (sum(load.batches for load in loads[:w]) for w in (begin, end))
    some = loads[begin:end]
    return Share(
        steps=last - first,
        seconds=float(line.done[last - 1] - (line.done[first - 1] if first else 0.0)) if last else 0.0,
        nbytes=sum(load.nbytes - load.edge_nbytes for load in some),
        edge_nbytes=sum(load.edge_nbytes for load in some),
        rows_read=sum(load.rows_read for load in some),
        rows_asked=sum(int(load.asked.sum()) for load in some),
        read_s=sum(costs.read_s(load) for load in some),
        model_s=(last - first) * costs.step_s,
    )

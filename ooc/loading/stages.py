"""The stages of a loader's pipeline: Cursor -> SampledBatch -> LoadedBatch -> Data.

Seeds of a step are drawn around and checked against the memory; feature rows or first-layer aggregates and labels are added;
`ooc.loading.collate` makes the batch. Stages know nothing of the loader, so that threads do not keep it alive.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.graph.aggregation import Factors, FirstLayerAggregates, PreAggregation, RowDecoder, gathered, without_last_hop
from ooc.graph.blocks import EDGE_ID, Subgraph
from ooc.graph.device_subgraph import DeviceSubgraph
from ooc.graph.mapped_topology import HeteroTopology, Topology
from ooc.loading.arguments import InputNodes
from ooc.loading.batch_bytes import BatchLimit
from ooc.loading.collate import CollateStage, EdgeFeature, Gather, LoadedBatch, SampledBatch, with_edge_ids
from ooc.loading.input_links import InputLinks
from ooc.loading.row_pool import RowPool
from ooc.runtime.buffers import Buffers
from ooc.runtime.keyed_random import Cursor, Purpose, key, seeds_of, steps_of
from ooc.runtime.memory_plan import MemoryPlan, smaller_than, words_for
from ooc.sampling import OnDiskFrontier
from ooc.sampling.labor import Key, batch_key
from ooc.sampling.links import AnySeeds, Seeds
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph

FIRST_TOGETHER, MOST_TOGETHER = 4, 128
"""Batches drawn together where the edges stay on disk: at first, and at most; in between as many as fit. (1.6 billion edges,
[15,10,5]: 128 batches read a third less of the edges than 64 do; more are drawn for longer than a scan is used.)"""
BUFFERS_KEPT, PINNED_KEPT = 1, 4
"""Memory of batches that the model is done with, for the rows of the next ones; page-locking takes long enough to keep more"""

InMemoryRows = tuple[AnyArray, NDArray[Any]]
"""(rows as stored, positions int32|int64[n] of a batch's among them)"""
DrawSubgraph = Callable[[AnySeeds, Any], tuple[Any, int]]
"""(seeds, `Key`) -> (the subgraph as of `SampledBatch`, bytes of edges read from the disk for it)"""


@dataclass(frozen=True)
class Order:
    """Which seeds a step has, and the keys of its draws: all that a batch depends on besides the cursor."""

    nodes: InputNodes | InputLinks
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int
    world_size: int
    seed_drawn: bool = False
    """whether the seed came from torch's generator; see `ooc.loading.ranks.SeedShare`"""
    batch_dependency: int = 1
    """for how many batches, over all epochs, draws depend on one another; see `Labor`"""
    draws_by_rank: bool = False
    """whether ranks draw differently, as where a batch is drawn without seeds. Otherwise a node's draw is the same on all
    ranks, and in one process that has their batches together"""

    def positions(self, cursor: Cursor) -> Ids:
        return seeds_of(
            self.nodes, cursor, self.batch_size, self.shuffle, self.seed, self.drop_last, self.rank, self.world_size
        )

    def seeds(self, epoch: int, position: Ids) -> AnySeeds:
        return self.nodes.seeds(position, key(self.seed, Purpose.NEGATIVE, epoch))

    @property
    def steps(self) -> int:
        """Of an epoch, the same on all ranks."""
        return steps_of(len(self.nodes), self.batch_size, self.drop_last, self.world_size)

    @property
    def own_steps(self) -> int:
        """Those in which this rank has seeds: all but the last one, where that has fewer seeds than there are ranks."""
        steps = self.steps
        left = len(self.nodes) - (steps - 1) * self.batch_size * self.world_size
        return steps - (steps > 0 and left * self.rank // self.world_size == left * (self.rank + 1) // self.world_size)

    def key(self, cursor: Cursor) -> Key:
        rank = self.rank if self.draws_by_rank else 0
        if self.batch_dependency == 1:
            return key(self.seed, Purpose.SAMPLE, cursor.epoch, cursor.step, rank)
        return batch_key(self.seed, rank, cursor.epoch * self.steps + cursor.step, self.batch_dependency)


class SamplePlace(NamedTuple):
    """Where neighbors are sampled. device: the GPU; None for the CPU. why: for people; edges_on_host: whether the GPU reads the
    edges from the host's memory."""

    device: torch.device | None
    why: str
    edges_on_host: bool = False

    def __str__(self) -> str:
        return f"neighbors are sampled {'by the CPU' if self.device is None else f'on {self.device}'}: {self.why}"


ON_CPU = SamplePlace(None, "nothing else can be asked for")


@dataclass
class ReadCounts:
    """What was read so far, for batches not yet delivered too."""

    requested: int = 0
    """feature rows that sampled batches want, each time they do"""
    rows: int = 0
    nbytes: int = 0
    """bytes they took from the disk"""
    topology_nbytes: int = 0
    """bytes that sampling and edge features took from the disk, where they stay there"""
    together: int = 0
    """batches drawn together, whose edges these bytes are, yielded or not"""
    written: int = 0
    """bytes that were written to pack batches"""
    lock: Any = field(default_factory=threading.Lock)

    def add(
        self,
        rows: int = 0,
        nbytes: int = 0,
        *,
        requested: int = 0,
        topology: int = 0,
        together: int = 0,
        written: int = 0,
    ) -> None:
        with self.lock:
            self.rows += rows
            self.nbytes += nbytes
            self.requested += requested
            self.topology_nbytes += topology
            self.together += together
            self.written += written


@dataclass(frozen=True)
class SampleStage:
    """Draws batches, from a topology that is kept within its memory, and checks them against `limit`."""

    order: Order
    draw: DrawSubgraph
    topology: Topology | HeteroTopology
    limit: BatchLimit
    counts: ReadCounts
    frontier: OnDiskFrontier | None = None
    """draws many batches together, where the edges stay on disk"""
    threads: int = 1
    """that draw, where batches are drawn one by one"""
    split_seeds: bool = False
    """whether a batch beyond the limit is halved, and again, into more batches"""
    kept_bytes: int = 0
    """of the draws that a thread keeps for further batches, where batches are drawn one by one"""
    place: SamplePlace = ON_CPU
    apart: bool = False
    """whether batches of an epoch have no rows in common, such as parts: then ranks have nothing to share"""

    @property
    def one_by_one(self) -> bool:
        """Whether each cursor gives one batch, drawn by itself."""
        return self.frontier is None and not self.split_seeds

    def drawing_bytes(self, nbytes: int) -> int:
        """Bytes of the batches being drawn at once, with hash tables and the draws that are kept. nbytes: of a subgraph."""
        threads = 1 if self.split_seeds else self.threads
        return threads * (4 * nbytes + self.kept_bytes) if self.frontier is None else self.frontier.max_bytes or 0

    def shared(self, limit: BatchLimit, parts: int) -> Self:
        """The same within another limit, for one of so many parts of the frontier's memory."""
        frontier = self.frontier
        if frontier is not None and frontier.max_bytes is not None:
            own = frontier.max_bytes // parts
            frontier = frontier.within(own)
        return replace(self, limit=limit, frontier=frontier)

    def sample(self, cursor: Cursor) -> SampledBatch:
        """The batch at `cursor`, whole. Raises BudgetError where it does not fit the memory."""
        self.topology.warm()
        position = self.order.positions(cursor)
        seeds = self.order.seeds(cursor.epoch, position)
        return self._checked(cursor, position, True, self._drawn(seeds, self.order.key(cursor)), seeds)

    def sample_at(self, position: Ids, key: int) -> SampledBatch:
        """The batch of the input nodes at `position`, in no order of an epoch. Raises as `sample` does."""
        self.topology.warm()
        seeds = self.order.nodes.seeds(position, key)
        subgraph = self._drawn(seeds, key) if self.frontier is None else self._together([seeds], [key])[0]
        if isinstance(subgraph, Exception):
            raise subgraph
        return self._checked(Cursor(0, 0), position, True, subgraph, seeds)

    def batches(self, cursors: Iterator[Cursor]) -> Iterator[SampledBatch]:
        """The batches of `cursors`, drawn one by one, in halves or together."""
        return map(self.sample, cursors) if self.one_by_one else self._parts(cursors)

    def _parts(self, cursors: Iterator[Cursor]) -> Iterator[SampledBatch]:
        """The batches of `cursors`; with `split_seeds`, where one does not fit, its halves in order.

        Where the edges stay on disk, many are drawn at a time, hop by hop, as many as fit the frontier's memory. The batches
        before one that fails come first. All parts of a step share its draws: a node's draw is the same in every part as long
        as it is met at the same hop. Where fan-outs differ by hop, a node can be met at an earlier or a later hop in a half
        than in the whole, and then with another fan-out: so what is computed from a split batch depends on where it was split,
        that is, on the memory.
        """
        self.topology.warm()
        waiting: deque[tuple[Cursor, Ids, bool]] = deque()
        together = 1 if self.frontier is None else FIRST_TOGETHER
        while True:
            for cursor in islice(cursors, max(0, together - len(waiting))):
                waiting.append((cursor, self.order.positions(cursor), True))
            if not waiting:
                return
            parts = list(islice(waiting, together))
            seeds = [self.order.seeds(cursor.epoch, position) for cursor, position, _ in parts]
            found = self._subgraphs(seeds, [self.order.key(cursor) for cursor, _, _ in parts])
            if self.frontier is not None:
                together = min(2 * together, MOST_TOGETHER) if len(found) == together else len(found)
            for (cursor, position, last), each, subgraph in zip(parts, seeds, found, strict=False):
                waiting.popleft()
                try:
                    if isinstance(subgraph, Exception):
                        raise subgraph
                    drawn = self._checked(cursor, position, last, subgraph, each)
                except BudgetError:
                    if not self.split_seeds or len(position) == 1:
                        raise
                    half = len(position) // 2
                    waiting.extendleft([(cursor, position[half:], last), (cursor, position[:half], False)])
                    break  # what was drawn behind it is drawn again, in its place
                yield drawn
            del found  # before the next ones are drawn

    def _subgraphs(self, seeds: list[AnySeeds], keys: list[Key]) -> Sequence[Any]:
        """The subgraphs of the first of these seeds, of one at least, or what it failed on."""
        if self.frontier is not None:
            return self._together(seeds, keys)
        try:
            return [self._drawn(seeds[0], keys[0])]
        except BudgetError as error:
            return [error]

    def _together(self, seeds: list[AnySeeds], keys: list[Key]) -> Sequence[Subgraph | Exception]:
        assert self.frontier is not None
        plain = cast(list[Seeds], seeds)  # trees and several types are read through memory maps
        together = self.frontier.sample([each.node for each in plain], keys, [each.left_out for each in plain])
        self.counts.add(topology=together.nbytes, together=len(together.batches))
        return together.batches

    def _drawn(self, seeds: AnySeeds, key: Key) -> Any:
        subgraph, nbytes = self.draw(seeds, key)
        if nbytes:
            self.counts.add(topology=nbytes)
        return subgraph

    def _checked(self, cursor: Cursor, position: Ids, last: bool, subgraph: Any, seeds: AnySeeds) -> SampledBatch:
        self.topology.trim(subgraph)
        drawn, most = SampledBatch(cursor.step, last, position, subgraph, seeds.links), self.limit.max_bytes
        need = self.limit.need(drawn, self.drawing_bytes(subgraph.nbytes))  # the sampler has not counted what collation adds
        if need > most:
            raise BudgetError(
                f"a batch of {len(position)} seed{'s' * (len(position) != 1)} needs {words_for(need, most)}; "
                f"use {smaller_than(len(position))}"
            )
        self.counts.add(requested=self.limit.rows(drawn))
        return drawn


@dataclass(frozen=True)
class Labels:
    """The labels of a batch's nodes, out of `y` ([N] or [N, C])."""

    y: AnyArray
    own: bool = False
    """whether only the nodes of the first hop have labels, those of a part and not of its halo"""
    train: Members | None = None
    """nodes whose labels are given, the others' being unknown (-1, NaN); None: all"""
    floats: bool = False
    """whether labels are float32, as torch's binary losses of several labels take them"""

    def of(self, subgraph: Subgraph) -> AnyArray:
        return self.of_nodes(subgraph.node[: subgraph.num_nodes[0]] if self.own else subgraph.node)

    def of_nodes(self, node: Ids) -> AnyArray:
        """The labels of these nodes: [n] or [n, C]."""
        y = np.asarray(self.y[node])
        y = y.astype(np.int64) if y.dtype.kind in "iu" else y  # torch's losses take classes so
        if self.train is not None:
            y[~self.train.contains(node)] = -1 if y.dtype.kind == "i" else np.nan
        return y.astype(np.float32) if self.floats else y


class BatchArray(NamedTuple):
    """An array whose rows batches have."""

    rows: Rows
    """as stored"""
    gather: Gather
    column: str | None
    """of a sampled batch, which has the ids of the rows; None: those of its nodes"""

    @property
    def of_edges(self) -> bool:
        """Whether they are the rows of a batch's edges, by edge id."""
        return self.column == EDGE_ID

    @property
    def on_disk(self) -> bool:
        return on_disk(self.rows)

    def ids(self, drawn: SampledBatch) -> Ids:
        """int64[n]: the rows that a batch has, of its nodes or, with its edge ids, of its edges."""
        ids: Ids = drawn.subgraph.node if self.column is None else drawn.subgraph.columns[self.column]
        return ids


def on_disk(rows: Rows | None) -> bool:
    return rows is not None and not isinstance(rows, ArrayRows)


class ScanEntries(NamedTuple):
    """What a sampled batch wants of the rows, where its aggregates are made as they are read once in file order."""

    rest: SampledBatch
    """what remains of it beside the aggregates"""
    row: AnyArray
    """int32|int64[e]: the row that an edge into the first layer's destinations needs"""
    target: NDArray[np.int32]
    """int32[e]: the row of aggregates that it is added to"""
    edge: NDArray[np.float32]
    """float32[e]: what it counts for; empty for ones"""
    scale: NDArray[np.float32]
    """float32[num_rows]: what each aggregate is multiplied by; empty for ones"""
    own: AnyArray
    """int32|int64[d]: the rows of the destinations themselves"""
    num_rows: int
    """rows of aggregates"""


@dataclass(frozen=True)
class LoadStage:
    """Reads or takes the rows of batches, with memory of `buffers`, and counts them in `counts`."""

    graph: Graph | None
    """whose degrees count in aggregates"""
    x: Rows | None
    """feature rows as stored, [N, ...]; None where the store has none"""
    gather: Gather | None
    labels: Labels | None
    pre_aggregation: PreAggregation | None
    """what a batch holds in place of its feature rows"""
    counts: ReadCounts
    buffers: Buffers
    edge_features: tuple[EdgeFeature, ...] = ()
    pool: ClassVar[RowPool | None] = None
    """of rows that stay on the device, which batches are completed from"""

    @property
    def decoders(self) -> tuple[RowDecoder, ...]:
        """How pre-aggregation reads stored rows, of each part of `x`."""
        assert self.gather is not None
        return (RowDecoder.of(self.gather.encoding),)

    @property
    def width(self) -> int:
        """Columns of aggregates."""
        assert self.x is not None
        return self.x.shape[1]

    def load(self, drawn: SampledBatch) -> LoadedBatch:
        """The batch with its rows, read one batch at a time."""
        if self.x is None or self.pre_aggregation is None:
            return self.take(self.with_edge_ids(drawn), {})
        assert isinstance(self.x, ArrayRows), "rows on disk are aggregated by a read strategy"
        return self.take(drawn, {0: (self.x.array, drawn.subgraph.node)})

    def take(self, drawn: SampledBatch, there: Mapping[int, InMemoryRows]) -> LoadedBatch:
        """The batch with its rows or aggregates. there: rows in memory, by the array's number in `arrays`; others are read."""
        if self.x is not None and self.pre_aggregation is not None:
            return self._aggregates(drawn, *there[0])
        found = self.rows_of(drawn, there)
        x = None if self.x is None else found.pop(0)
        return LoadedBatch(drawn, x, self.labels_of(drawn), tuple(found))

    def rows_of(self, drawn: SampledBatch, there: Mapping[int, InMemoryRows]) -> list[AnyArray]:
        """The batch's rows of each array; there: see `take`."""
        return [
            each.gather.take(*there[number], self.buffers) if number in there else self._read(each, drawn)
            for number, each in enumerate(self.arrays)
        ]

    def _read(self, array: BatchArray, drawn: SampledBatch) -> AnyArray:
        ids = array.ids(drawn)
        values, nbytes = array.gather.read(array.rows, ids, self.buffers)
        self.count(array, len(ids), nbytes)
        return values

    def count(self, array: BatchArray, rows: int, nbytes: int) -> None:
        """Count so many rows that were read of an array."""
        if array.of_edges:
            self.counts.add(topology=nbytes)
        else:
            self.counts.add(rows, nbytes)

    @property
    def arrays(self) -> tuple[BatchArray, ...]:
        """The arrays whose rows batches have: x, if there is one, and edge features."""
        of_nodes = () if self.x is None or self.gather is None else (BatchArray(self.x, self.gather, None),)
        return (*of_nodes, *(BatchArray(each.rows, each.gather, EDGE_ID) for each in self.edge_features))

    def begun(self) -> Self:
        """The stage at work on an epoch, which `stop` ends."""
        return self

    def stop(self) -> None:
        """End all waiting of an epoch; idempotent."""

    def completed(self, batch: Any) -> Any:
        """The user's batch, with what is made on the device it was moved to."""
        return batch

    def read_alone(self, drawn: SampledBatch) -> Iterator[tuple[Rows, Ids]]:
        """Rows on disk that the batch reads by itself, beside those of `arrays`, and which: none."""
        return iter(())

    def with_edge_ids(self, drawn: SampledBatch) -> SampledBatch:
        """The batch with its edge ids, if edge features are read by them. Raises StoreError for ids out of range."""
        if not self.edge_features:
            return drawn
        assert self.graph is not None
        return with_edge_ids(self.graph, drawn, min(each.rows.shape[0] for each in self.edge_features))

    def _aggregates(self, drawn: SampledBatch, rows: AnyArray, at: NDArray[Any]) -> LoadedBatch:
        """The batch with its first layer's aggregates, out of rows in memory: node i's is rows[at[i]]."""
        assert self.gather is not None
        factors, rest = self.factors(drawn)
        sums = self.buffers.empty((2, len(drawn.subgraph.indptr) - 1, rows.shape[1]), np.dtype(np.float32))
        gathered(rows, self.decoders[0], at, drawn.subgraph, factors, sums[0], sums[1])
        return self.aggregated(rest, sums[0], sums[1])

    def aggregated(self, rest: SampledBatch, neighbor: AnyArray, self_row: AnyArray) -> LoadedBatch:
        """The batch `rest`, without its last hop, with its aggregates, float32[d, f] each."""
        return LoadedBatch(rest, FirstLayerAggregates(neighbor, self_row), self.labels_of(rest))

    def entries(self, drawn: SampledBatch) -> ScanEntries:
        """What the batch wants of a shared scan of the rows."""
        subgraph = drawn.subgraph
        factors, rest = self.factors(drawn)
        row = np.empty(len(subgraph.source), subgraph.node.dtype)
        np.take(subgraph.node, subgraph.source, out=row, mode="clip")
        target = np.repeat(np.arange(len(subgraph.indptr) - 1, dtype=np.int32), np.diff(subgraph.indptr))
        own = rest.subgraph.node
        return ScanEntries(rest, row, target, factors.edge, factors.target, own, len(own))

    def factors(self, drawn: SampledBatch) -> tuple[Factors, SampledBatch]:
        """What neighbors count for in the first layer's aggregates, and what remains of the batch beside them."""
        assert self.pre_aggregation is not None
        assert self.graph is not None
        factors = self.pre_aggregation.factors(self.graph, drawn.subgraph)
        here = isinstance(drawn.subgraph, DeviceSubgraph)
        rest = drawn.subgraph.without_last_hop() if here else without_last_hop(drawn.subgraph)
        return factors, replace(drawn, subgraph=rest)

    def labels_of(self, drawn: SampledBatch) -> AnyArray | None:
        return None if self.labels is None else self.labels.of(drawn.subgraph)


@dataclass(frozen=True)
class BatchStages:
    """What is done to a batch, whatever its rows are read with."""

    sample: SampleStage
    load: LoadStage
    collate: CollateStage

    def apart(self) -> Self:
        """The same stages with counters and buffers of their own."""
        counts = ReadCounts()
        load = replace(self.load, counts=counts, buffers=Buffers(BUFFERS_KEPT))
        return replace(self, sample=replace(self.sample, counts=counts), load=load)

    def over(self, rows: Rows) -> Self:
        """The same stages with other rows for those of `LoadStage.x`."""
        return replace(self, load=replace(self.load, x=rows))

    @property
    def counts(self) -> ReadCounts:
        return self.load.counts

    @property
    def needs_slots(self) -> bool:
        """Whether a sampled batch's slots are needed for collation, once its edge ids are known where they are wanted."""
        there = () if self.sample.frontier is None else self.sample.frontier.columns
        return self.collate.collator.needs_slots({*there, *([EDGE_ID] if self.load.edge_features else [])})

    @property
    def disk_arrays(self) -> dict[int, BatchArray]:
        """The arrays that are read from disk, by their number in `LoadStage.arrays`."""
        return {number: each for number, each in enumerate(self.load.arrays) if each.on_disk}


def buffers_for(device: torch.device | None, budget: MemoryPlan) -> Buffers:
    """Memory for rows of batches, page-locked where they are copied to a GPU."""
    if device is None or device.type != "cuda":
        return Buffers(BUFFERS_KEPT)
    return Buffers(PINNED_KEPT, max_bytes=budget.batches, pinned=True)

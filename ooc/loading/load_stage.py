"""`SampledBatch` -> `LoadedBatch`: the feature rows of a batch, or its first-layer aggregates, and its labels."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.graph.aggregation import Factors, FirstLayerAggregates, PreAggregation, RowDecoder, gathered, without_last_hop
from ooc.graph.blocks import Subgraph
from ooc.loading.collate import CollateStage, LoadedBatch, SampledBatch
from ooc.loading.feature_gather import Gather
from ooc.loading.sample_stage import ReadCounts, SampleStage
from ooc.runtime.buffers import Buffers
from ooc.runtime.memory_plan import MemoryPlan
from stores.arrays.members import Members
from stores.arrays.rows import AnyArray, ArrayRows, Rows
from stores.graph import Graph

BUFFERS_KEPT, PINNED_KEPT = 1, 4
"""Memory of batches that the model is done with, for the rows of the next ones; page-locking takes long enough to keep more"""


@dataclass(frozen=True)
class Labels:
    """The labels of a batch's nodes.

    Args:
        y: [N] or [N, C].
        own: Whether only the nodes of the first hop have labels, those of a part and not of its halo.
        train: Nodes whose labels are given, the others' being unknown (-1, NaN); None: all.
    """

    y: AnyArray
    own: bool = False
    train: Members | None = None

    def of(self, subgraph: Subgraph) -> AnyArray:
        """[n] or [n, C]."""
        node = subgraph.node[: subgraph.num_nodes[0]] if self.own else subgraph.node
        y = np.asarray(self.y[node])
        y = y.astype(np.int64) if y.dtype.kind in "iu" else y  # torch's losses take classes so
        if self.train is not None:
            y[~self.train.contains(node)] = -1 if y.dtype.kind == "i" else np.nan
        return y


@dataclass(frozen=True)
class LoadStage:
    """Reads or takes the rows of batches.

    Args:
        graph: Whose degrees and weights pre-aggregation takes.
        x: Feature rows as stored, [N, ...], None where the store has none.
        gather: How they become a batch's.
        labels: None where the store has none.
        pre_aggregation: What a batch holds in place of its feature rows.
        counts: Where rows read are counted.
        buffers: Memory for rows of batches.
    """

    graph: Graph
    x: Rows | None
    gather: Gather | None
    labels: Labels | None
    pre_aggregation: PreAggregation | None
    counts: ReadCounts
    buffers: Buffers

    @property
    def decoder(self) -> RowDecoder:
        """How pre-aggregation reads stored rows."""
        assert self.gather is not None
        return RowDecoder.of(self.gather.encoding)

    def load(self, drawn: SampledBatch) -> LoadedBatch:
        """The batch with its rows, read one batch at a time."""
        node = drawn.subgraph.node
        if self.x is None:
            return LoadedBatch(drawn, None, self.labels_of(drawn))
        if self.pre_aggregation is not None:
            assert isinstance(self.x, ArrayRows), "rows on disk are aggregated by a read strategy"
            return self.take(drawn, self.x.array, node)
        assert self.gather is not None
        x, nbytes = self.gather.read(self.x, node, self.buffers)
        self.counts.add(len(node), nbytes)
        return LoadedBatch(drawn, x, self.labels_of(drawn))

    def take(self, drawn: SampledBatch, rows: AnyArray, at: NDArray[Any]) -> LoadedBatch:
        """The batch with its rows or aggregates, out of rows in memory: node i's is rows[at[i]]."""
        assert self.gather is not None
        if self.pre_aggregation is None:
            return LoadedBatch(drawn, self.gather.take(rows, at, self.buffers), self.labels_of(drawn))
        factors, rest = self.factors(drawn)
        sums = self.buffers.empty((2, len(drawn.subgraph.indptr) - 1, rows.shape[1]), np.dtype(np.float32))
        gathered(rows, self.decoder, at, drawn.subgraph, factors, sums[0], sums[1])
        return self.aggregated(rest, sums[0], sums[1])

    def aggregated(self, rest: SampledBatch, neighbor: AnyArray, self_row: AnyArray) -> LoadedBatch:
        """The batch `rest`, without its last hop, with its aggregates, float32[d, f] each."""
        return LoadedBatch(rest, FirstLayerAggregates(neighbor, self_row), self.labels_of(rest))

    def factors(self, drawn: SampledBatch) -> tuple[Factors, SampledBatch]:
        """What neighbors count for in the first layer's aggregates, and what remains of the batch beside them."""
        assert self.pre_aggregation is not None
        factors = self.pre_aggregation.factors(self.graph, drawn.subgraph)
        return factors, replace(drawn, subgraph=without_last_hop(drawn.subgraph))

    def labels_of(self, drawn: SampledBatch) -> AnyArray | None:
        """Labels of a sampled batch's nodes, [n] or [n, C]."""
        return None if self.labels is None else self.labels.of(drawn.subgraph)


@dataclass(frozen=True)
class BatchStages:
    """The stages of a loader's pipeline: Cursor -> SampledBatch -> LoadedBatch -> Data."""

    sample: SampleStage
    load: LoadStage
    collate: CollateStage

    def apart(self) -> Self:
        """The same stages with counters and buffers of their own."""
        counts = ReadCounts()
        load = replace(self.load, counts=counts, buffers=Buffers(BUFFERS_KEPT))
        return replace(self, sample=self.sample.apart(counts), load=load)

    def over(self, rows: Rows | None) -> Self:
        """The same stages over other feature rows."""
        return replace(self, load=replace(self.load, x=rows))

    @property
    def counts(self) -> ReadCounts:
        """What all stages have read."""
        return self.load.counts

    @property
    def needs_slots(self) -> bool:
        """Whether a sampled batch's slots are needed for collation."""
        return self.collate.collator.needs_slots(read=self.sample.frontier is not None)


def buffers_for(device: torch.device | None, budget: MemoryPlan) -> Buffers:
    """Memory for rows of batches, page-locked where they are copied to a GPU."""
    if device is None or device.type != "cuda":
        return Buffers(BUFFERS_KEPT)
    return Buffers(PINNED_KEPT, max_bytes=budget.batches, pinned=True)

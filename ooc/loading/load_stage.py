"""The second stage of a loader's pipeline, SampledBatch -> LoadedBatch: feature rows or first-layer aggregates, and labels."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Factors, FirstLayerAggregates, PreAggregation, RowDecoder, gathered, without_last_hop
from ooc.graph.blocks import EDGE_ID, Subgraph
from ooc.graph.device_subgraph import DeviceSubgraph
from ooc.loading.collate import EdgeFeature, Gather, LoadedBatch, SampledBatch, with_edge_ids
from ooc.loading.read_counts import ReadCounts
from ooc.loading.row_pool import RowPool
from ooc.runtime.buffers import Buffers
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel
from ooc.stores.prefetch import AHEAD, prefetch

InMemoryRows = tuple[AnyArray, NDArray[Any]]
"""(rows as stored, positions int32|int64[n] of a batch's among them)"""


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
        y = self._classes(node) if self._are_classes else np.asarray(self.y[node])
        y = y.astype(np.int64, copy=False) if y.dtype.kind in "iu" else y  # torch's losses take classes so
        if self.train is not None:
            y[~self.train.contains(node)] = -1 if y.dtype.kind == "i" else np.nan
        return y.astype(np.float32) if self.floats else y

    @property
    def _are_classes(self) -> bool:
        """Whether they are whole numbers in memory, one a node."""
        y = self.y
        return type(y) is np.ndarray and y.ndim == 1 and y.dtype.kind in "iu" and y.dtype.isnative and y.flags.c_contiguous

    def _classes(self, node: Ids) -> NDArray[np.int64]:
        found = np.empty(len(node), np.int64)
        if not _take_classes(self.y, node, found):
            raise IndexError("a node of the batch has no label")
        return found


@kernel
def _take_classes(y: AnyArray, node: Ids, out: NDArray[np.int64]) -> bool:
    """Set out[i] = y[node[i]]; returns whether each node is there. numpy waits for each number."""
    for i in range(len(node)):
        if i + AHEAD < len(node):
            prefetch(y, node[i + AHEAD])
        if not 0 <= node[i] < len(y):
            return False
        out[i] = y[node[i]]
    return True


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

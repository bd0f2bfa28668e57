"""Batches whose feature rows come from a pool on the device (`ooc.loading.row_pool`): there they are put together.

While a batch is on the host its x is `PooledRows`: places in the pool, and the rows that are not there. On the device these
become x, decoded there, or the first layer's aggregates. A row is added to its sums in ascending order of the source and
rounded after every step, as on the host, so that aggregates have the same bits wherever they are made. Of a batch that was
sampled on the device the edges are sorted and counted there too: neither they nor any rows cross the bus.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ooc.graph.aggregation import Factors, FirstLayerAggregates, PreAggregation, ascending_edges
from ooc.graph.bag_sum import bag_sum
from ooc.graph.blocks import Subgraph
from ooc.graph.device_subgraph import DeviceSubgraph
from ooc.loading.collate import Gather, LoadedBatch, PooledRows, PooledSums, SampledBatch, SampledSums
from ooc.loading.load_stage import BatchArray, InMemoryRows, LoadStage
from ooc.loading.row_pool import RowPool, stored_tensor
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.graph import Graph

MISSED = "rows that are not in the pool"
"""a column of a sampled batch, while it waits for them"""


@dataclass(frozen=True)
class PooledLoadStage(LoadStage):
    """Reads the rows that are not in the pool, and says where the others are."""

    pool: RowPool = field(kw_only=True)  # type: ignore[misc]
    stopping: threading.Event = field(default_factory=threading.Event, kw_only=True)

    @property
    def arrays(self) -> tuple[BatchArray, ...]:
        """Of x the rows that are missed, as stored, if there can be any."""
        whole = super().arrays
        if self.pool.slots.whole:
            return whole[1:]
        return BatchArray(whole[0].rows, Gather(Encoding.raw(whole[0].rows.dtype)), MISSED), *whole[1:]

    def with_edge_ids(self, drawn: SampledBatch) -> SampledBatch:
        """The batch with the rows that it misses too."""
        drawn = super().with_edge_ids(drawn)
        if self.pool.slots.whole:
            return drawn
        subgraph = drawn.subgraph
        missed = subgraph.node[self.pool.slots.find(subgraph.node)[1]]
        return replace(drawn, subgraph=replace(subgraph, columns={**subgraph.columns, MISSED: missed}))

    def load(self, drawn: SampledBatch) -> LoadedBatch:
        return self.take(self.with_edge_ids(drawn), {})

    def take(self, drawn: SampledBatch, there: Mapping[int, InMemoryRows]) -> LoadedBatch:
        self.pool.fill(self.stopping.is_set)
        found = self.rows_of(drawn, there)
        subgraph, slots = drawn.subgraph, self.pool.slots
        assert self.x is not None
        values = np.empty((0, *self.x.shape[1:]), self.x.dtype) if slots.whole else found.pop(0)
        columns = {name: column for name, column in subgraph.columns.items() if name != MISSED}
        drawn = replace(drawn, subgraph=replace(subgraph, columns=columns))
        if slots.whole and isinstance(subgraph, DeviceSubgraph):  # ids are places, and on the device
            place, missed = subgraph.n_id, torch.empty(0, dtype=torch.int64)
        else:
            place, missed = map(torch.from_numpy, slots.find(subgraph.node))
        sums, rest = self._sums(drawn)
        x = PooledRows(place, missed, stored_tensor(values, self.pool.encoding), sums)
        return LoadedBatch(rest, x, self.labels_of(rest), tuple(found))

    def _sums(self, drawn: SampledBatch) -> tuple[PooledSums | SampledSums | None, SampledBatch]:
        """What the first layer's aggregates add up, if batches have them, and what remains of the batch beside them."""
        if self.pre_aggregation is None:
            return None, drawn
        subgraph = drawn.subgraph
        if isinstance(subgraph, DeviceSubgraph) and self.graph is not None and counts_there(self.pre_aggregation, self.graph):
            sums = SampledSums(subgraph.n_id, subgraph.edge_index, subgraph.edge_indptr, subgraph.degree)
            return sums, replace(drawn, subgraph=subgraph.without_last_hop())
        factors, rest = self.factors(drawn)
        return sums_of(subgraph, factors), rest

    def completed(self, batch: Any) -> Any:
        """A batch that is on the device, with its x there, made on the current stream; in place."""
        if isinstance(batch.x, PooledRows):
            assert self.gather is not None
            pooled: PooledRows = batch.x
            x = self.gather.decoded(self.pool.take(*pooled[:3]), self.pool.scale)
            sums = pooled.sums
            if isinstance(sums, SampledSums):
                assert self.pre_aggregation is not None
                sums = ordered(sums, self.pre_aggregation)
            batch.x = x if sums is None else aggregated(x, sums)
        return batch

    def begun(self) -> Self:
        return replace(self, stopping=threading.Event())

    def stop(self) -> None:
        self.stopping.set()


def sums_of(subgraph: Subgraph, factors: Factors) -> PooledSums:
    """What the first layer's aggregates add up."""
    source, edge = ascending_edges(subgraph, factors.edge)
    of_edges = torch.from_numpy(edge) if len(edge) else None
    of_targets = torch.from_numpy(factors.target) if len(factors.target) else None
    return PooledSums(torch.from_numpy(source), torch.from_numpy(subgraph.indptr.astype(np.int32)), of_edges, of_targets)


def counts_there(pre_aggregation: PreAggregation, graph: Graph) -> bool:
    """Whether a device that samples knows what edges count for: GCN's weights and self-loops are in the host's memory."""
    return pre_aggregation.kind != "gcn" or not ("weight" in graph.columns or len(graph.self_loops))


def ordered(sums: SampledSums, pre_aggregation: PreAggregation) -> PooledSums:
    """`sums_of` of a batch on the device, on the current stream, to the bit: numbers are rounded where numpy rounds them."""
    source, target = sums.edge_index
    key = target * ((2**63 - 1) // len(sums.indptr)) + sums.node[source]  # a graph has far fewer nodes than this leaves
    order = key.sort(stable=True).indices
    source = source[order]
    count = sums.indptr.diff()
    degree, divisor = sums.degree[: len(count)], count.clamp(min=1).double()
    kind, edge, scale = pre_aggregation.kind, None, None
    if kind == "mean":
        scale = (1 / divisor).float()
    elif kind == "expanded":
        scale = (degree / divisor).float()
    elif kind == "gcn":
        root = (sums.degree.float() + 1).double().sqrt().float()  # torch's root in float32 is not always the nearest
        inverse = (1 / root.double()).float()
        edge, scale = inverse[source], inverse[: len(count)] * (degree / divisor).float()
    return PooledSums(source.to(torch.int32), sums.indptr.to(torch.int32), edge, scale)


def aggregated(x: Tensor, sums: PooledSums) -> FirstLayerAggregates:
    """The first layer's aggregates of decoded rows x [n, f]."""
    index, rows = sums.source, x
    if sums.edge is not None:  # rounded before it is added, as the host's kernels do
        rows = x.index_select(0, index) * sums.edge[:, None]
        index = torch.arange(len(index), dtype=index.dtype, device=x.device)
    neighbor = bag_sum(index, rows, sums.indptr, None)
    if sums.target is not None:
        neighbor *= sums.target[:, None]
    return FirstLayerAggregates(neighbor, x[: len(sums.indptr) - 1].clone())


class PoolNeed(NamedTuple):
    """Bytes of a batch on the device. batch: as it crosses the bus; rows: x and what is made of it; model: activations."""

    batch: int
    rows: int
    model: int
    missed: int
    """rows that cross the bus"""


def pool_need(nodes: int, edges: int, missed: int, row: int, width: int, host: int, model: int, weighs: bool) -> PoolNeed:
    """PURE: what a batch of so many nodes and edges takes. row, width: bytes of a stored and of a decoded row; host: bytes of
    its other fields; weighs: whether edges have factors."""
    rows = nodes * (row + width) + width * edges * weighs
    return PoolNeed(host + 4 * nodes + missed * (8 + row), rows, model, missed)

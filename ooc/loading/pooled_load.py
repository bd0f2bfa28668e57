"""Batches whose feature rows come from a pool on the device (`ooc.loading.row_pool`): there they are put together.

While a batch is on the host its x is `PooledRows`: places in the pool, and the rows that are not there. On the device these
become x, decoded there, or the first layer's aggregates. A row is added to its sums in ascending order of the source and
rounded after every step, as on the host, so that aggregates have the same bits wherever they are made.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ooc.graph.aggregation import Factors, FirstLayerAggregates, ascending_edges
from ooc.graph.bag_sum import bag_sum
from ooc.graph.blocks import Subgraph
from ooc.graph.device_subgraph import DeviceSubgraph
from ooc.loading.collate import Gather, LoadedBatch, PooledRows, PooledSums, SampledBatch
from ooc.loading.row_pool import RowPool, stored_tensor
from ooc.loading.stages import BatchArray, InMemoryRows, LoadStage
from ooc.stores.arrays.encoding import Encoding

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
        sums, rest = None, drawn
        if self.pre_aggregation is not None:
            factors, rest = self.factors(drawn)
            sums = sums_of(subgraph, factors)
        x = PooledRows(place, missed, stored_tensor(values, self.pool.encoding), sums)
        return LoadedBatch(rest, x, self.labels_of(rest), tuple(found))

    def completed(self, batch: Any) -> Any:
        """A batch that is on the device, with its x there, made on the current stream; in place."""
        if isinstance(batch.x, PooledRows):
            assert self.gather is not None
            pooled: PooledRows = batch.x
            x = self.gather.decoded(self.pool.take(*pooled[:3]), self.pool.scale)
            batch.x = x if pooled.sums is None else aggregated(x, pooled.sums)
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

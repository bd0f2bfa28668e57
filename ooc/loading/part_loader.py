"""`PartLoader`: batches of whole parts of the graph, in a keyed random order, through the same pipeline as sampled ones.

A part is a contiguous range of nodes (`Graph.parts`), so its edges and its features are read front to back. With the halo (the
sources outside, one hop) a batch has all in-edges of its nodes: what histories train on. Without, only the edges between its
nodes: Cluster-GCN.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from ooc.graph.blocks import Sampler, Subgraph
from ooc.graph.mapped_topology import Topology
from ooc.loading.arguments import InputNodes
from ooc.loading.base import BatchLoader
from ooc.loading.collate import Collator, LoadedBatch, SampledBatch
from ooc.loading.feature_gather import Gather
from ooc.loading.work import BUFFERS_KEPT, PINNED_KEPT, Order, ReadCounts, Work
from ooc.runtime.buffers import Buffers
from ooc.runtime.keyed_random import steps_of
from ooc.runtime.memory_plan import MemoryPlan, plan_memory
from ooc.sampling.cluster import Edges, cut, parts_of, ranges_of
from stores.arrays.members import Members
from stores.arrays.rows import AnyArray
from stores.dataset import Dataset
from stores.errors import ConfigError
from stores.graph import Graph
from stores.io.segments import mapping_of

_WIDTHS_ALIVE = 3
"""Rows of a layer's width that a step holds at once for each node of the batch, for each layer, gradients included"""


@runtime_checkable
class CountingSampler(Protocol):
    """A sampler that reads edges from the disk, and counts them."""

    def counting(self, read: ReadCounts) -> Sampler:
        """The same sampler, whose bytes are counted in `read`."""


@dataclass(frozen=True)
class PartSampler:
    """Cuts the parts that a batch is made of out of the graph (see `ooc.sampling.cluster.cut`).

    >>> PartSampler(graph, parts_of(graph, 64), halo=True).sample(np.array([3, 17]), key=0).num_nodes
    (250000, 31000)
    """

    graph: Graph
    parts: NDArray[np.int64]
    halo: bool
    edges: Edges | None = None
    """where the edges are read from, None: the graph's arrays"""
    max_bytes: int | None = None
    row_bytes: int = 0
    read: ReadCounts = field(default_factory=ReadCounts)
    """where the bytes are counted"""

    def counting(self, read: ReadCounts) -> "PartSampler":
        """The same sampler, whose bytes are counted in `read`."""
        return replace(self, read=read)

    def sample(self, seeds: NDArray[np.int64], key: int) -> Subgraph:
        """The subgraph of parts `seeds`; nothing is drawn. Raises BudgetError where it does not fit."""
        ranges = ranges_of(self.parts, seeds)
        found = cut(self.graph, ranges, self.halo, self.edges, self.max_bytes, self.row_bytes)
        self.read.add_topology(found.nbytes)
        return found.subgraph


@dataclass(frozen=True)
class PartWork(Work):
    """The stages for batches of parts: the seeds are the parts' nodes, of which those to train on have labels."""

    layers: int = 1
    width: int = 0
    """of the model's rows, all layers together"""
    train: Members | None = None
    """nodes whose labels count, None: all"""

    share: float | None = None
    """what each of a batch's nodes counts for in a sum of losses; None: their mean is taken"""

    def apart(self) -> Self:
        """See `Work.apart`: what the sampler reads is counted there too."""
        work, sampler = super().apart(), self.sampler
        assert isinstance(sampler, CountingSampler), f"{sampler} counts nowhere what it reads"
        return replace(work, sampler=sampler.counting(work.read))

    def labels(self, drawn: SampledBatch) -> AnyArray | None:
        """[n] or [n, C] of the batch's own nodes, unknown (-1, NaN) where they are not to be trained on."""
        if self.y is None:
            return None
        node = drawn.subgraph.node[: drawn.subgraph.num_nodes[0]]
        y = np.array(self.y[node])
        y = y.astype(np.int64) if y.dtype.kind in "iu" else y
        if self.train is not None:
            y[~self.train.contains(node)] = -1 if y.dtype.kind == "i" else np.nan
        return y

    def activation_bytes(self, drawn: SampledBatch) -> int:
        """Bytes that the model needs beside a batch."""
        return max(self.nbytes(drawn), _WIDTHS_ALIVE * 4 * self.width * len(drawn.subgraph.node))

    def collate(self, loaded: LoadedBatch) -> tuple[int, Any]:
        """(steps done with this batch, the batch): all layers share one block."""
        drawn = loaded.drawn
        batch: Data = self.collator(loaded, drawn.subgraph.node[: drawn.subgraph.num_nodes[0]])
        batch.blocks = [batch.blocks[0]] * self.layers
        if self.share is not None:
            batch.node_norm = torch.full((batch.batch_size,), self.share)
        return drawn.step + drawn.last, batch


class PartLoader(BatchLoader):
    """Batches of `per_batch` parts each, every part once an epoch.

    parts: how many equal ranges of nodes, for a store without parts of its own. train: nodes whose labels count (None: all).
    layers: of the model: a batch has so many blocks, which are one and the same. width: of the rows the model makes for a
    node, all layers together, and beside: bytes a node takes beside its features, which memory is kept for.
    A batch is a `Data` as the NeighborLoader's, without the halo's labels; `batch_size` counts its own nodes, `input_id` and
    the first of `n_id` are those. Parts hold unequally many labels: `node_norm` float32[batch_size] is what each counts for
    in a sum of losses, so that the mean over an epoch's batches is that over all labels. Raises ConfigError where parts do not
    fit, BudgetError while iterating where a batch does not.

    >>> loader = PartLoader(ds, per_batch=4, halo=True, layers=3, shuffle=True)
    >>> batch = next(iter(loader))
    >>> batch.x.size(0) - batch.batch_size  # nodes of the halo
    """

    def __init__(
        self,
        data: Dataset,
        *,
        per_batch: int,
        halo: bool,
        layers: int,
        parts: int | None = None,
        shuffle: bool = False,
        train: Members | None = None,
        width: int = 0,
        beside: int = 0,
        seed: int = 0,
        device: torch.device | None = None,
        budget: MemoryPlan | None = None,
    ) -> None:
        self.parts = parts_of(data.graph, parts)
        count = len(self.parts) - 1
        if not 1 <= per_batch <= count:
            raise ConfigError(f"a batch of {per_batch} parts: give 1 to {count}, as many as there are")
        self.halo = halo
        budget = budget or plan_memory(data)
        order = Order(InputNodes(count), per_batch, shuffle, seed, False, 0, 1)
        shape = layers, width, beside
        work = _work(data, self.parts, halo, shape, order, train, budget, device)
        super().__init__(data, work, budget, device)

    def __repr__(self) -> str:
        halo = "with" if self.halo else "without"
        return f"{type(self).__name__}({len(self.parts) - 1} parts, {self._work.order.batch_size} a batch, {halo} their halo)"


def _work(
    ds: Dataset,
    parts: NDArray[np.int64],
    halo: bool,
    shape: tuple[int, int, int],
    order: Order,
    train: Members | None,
    budget: MemoryPlan,
    device: torch.device | None,
) -> PartWork:
    if not ds.num_features:
        raise ConfigError(f"{ds.path} holds no features to train on: ingest it with --features x=FILE")
    layers, width, beside = shape
    graph, y = ds.graph, ds.labels
    x, gather = ds.stored("x"), Gather(ds.encoding("x"))
    collator = Collator(graph, gather, edge_ids=False)
    row_bytes = beside + gather.row_bytes(x.shape[1:]) + (0 if y is None else 8 * int(np.prod(y.shape[1:], dtype=np.int64)))
    warm = budget.topology_in_ram
    mapped = mapping_of(graph.indices) is None or graph.sampled_bytes() <= warm  # else edges are read as they are wanted
    edges = None if mapped else Edges(ds.edge_rows("indices"), {name: ds.edge_rows(name) for name in collator.columns})
    topology = Topology(graph, None, max(0, budget.topology - graph.indptr.nbytes), warm, mapped, collator.columns)
    read = ReadCounts()
    sampler = PartSampler(graph, parts, halo, edges, budget.max_batch, row_bytes, read)
    to_cuda = device is not None and device.type == "cuda"
    buffers = Buffers(PINNED_KEPT, max_bytes=budget.batches, pinned=True) if to_cuda else Buffers(BUFFERS_KEPT)
    return PartWork(
        order=order,
        sampler=sampler,
        collator=collator,
        x=x,
        y=y,
        row_bytes=row_bytes,
        max_bytes=budget.max_batch,
        transform=None,
        pin=False,
        topology=topology,
        read=read,
        buffers=buffers,
        layers=layers,
        width=width,
        train=train,
        share=steps_of(len(parts) - 1, order.batch_size) / max(1, ds.num_nodes if train is None else len(train)),
    )

"""`PartLoader`: batches of whole parts of the graph, in a keyed random order, through the same pipeline as sampled ones.

A part is a contiguous range of nodes (`Graph.parts`), so its edges and its features are read front to back. With the halo (the
sources outside, one hop) a batch has all in-edges of its nodes: what histories train on. Without, only the edges between its
nodes: Cluster-GCN.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from ooc.graph.blocks import Sampler, Subgraph
from ooc.graph.mapped_topology import Topology
from ooc.loading.arguments import InputNodes
from ooc.loading.base import PREFETCH, BatchLoader
from ooc.loading.batch_bytes import BatchBytes, row_bytes_of
from ooc.loading.choose_read_strategy import choose_strategy
from ooc.loading.collate import CollateStage, Collator, LoadedBatch
from ooc.loading.feature_gather import Gather
from ooc.loading.load_stage import BatchStages, Labels, LoadStage, buffers_for
from ooc.loading.sample_stage import Order, ReadCounts, SampleStage
from ooc.runtime.keyed_random import steps_of
from ooc.runtime.memory_plan import MemoryPlan, plan_memory
from ooc.sampling.cluster import Edges, cut, parts_of, ranges_of
from stores.arrays.members import Members
from stores.dataset import Dataset
from stores.errors import ConfigError
from stores.graph import Graph
from stores.io.segments import mapping_of

MakeSampler = Callable[[Edges | None, int, int, ReadCounts], Sampler]
"""Makes the sampler from where its edges are read, bytes of a batch at most, bytes of a node's features and labels, and the
counts of what is read"""


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
    counts: ReadCounts = field(default_factory=ReadCounts)
    """where the bytes are counted"""

    def counting(self, counts: ReadCounts) -> "PartSampler":
        """The same sampler, whose bytes are counted in `counts`."""
        return replace(self, counts=counts)

    def sample(self, seeds: NDArray[np.int64], key: int) -> Subgraph:
        """The subgraph of parts `seeds`; nothing is drawn. Raises BudgetError where it does not fit."""
        ranges = ranges_of(self.parts, seeds)
        found = cut(self.graph, ranges, self.halo, self.edges, self.max_bytes, self.row_bytes)
        self.counts.add_topology(found.nbytes)
        return found.subgraph


@dataclass(frozen=True)
class PartCollate(CollateStage):
    """Collates parts: the seeds are the parts' nodes, and all layers share one block.

    Args:
        layers: Of the model.
        share: What each of a batch's nodes counts for in a sum of losses; None: their mean is taken.
    """

    layers: int = 1
    share: float | None = None

    def data(self, loaded: LoadedBatch) -> Data:
        """The batch before `transform`."""
        subgraph = loaded.drawn.subgraph
        batch = self.collator(loaded, subgraph.node[: subgraph.num_nodes[0]])
        batch.blocks = [batch.blocks[0]] * self.layers
        if self.share is not None:
            batch.node_norm = torch.full((batch.batch_size,), self.share)
        return batch


class SubgraphLoader(BatchLoader):
    """What loaders of parts, clusters and random subgraphs share: how edges are met, what a batch may take, and the stages.

    Args:
        order: Of the epoch's subgraphs.
        make_sampler: Makes the sampler of one.
        collate: Makes the batch.
        train: Nodes whose labels count, None: all.
        width: Columns of the rows that the model makes for a node, all layers together.
        beside: Bytes a node takes beside its features.
        sample_threads: That sample.
    """

    def __init__(
        self,
        data: Dataset,
        order: Order,
        make_sampler: MakeSampler,
        collate: CollateStage,
        *,
        train: Members | None,
        width: int,
        beside: int = 0,
        device: torch.device | None = None,
        budget: MemoryPlan | None = None,
        prefetch: int = PREFETCH,
        sample_threads: int = 1,
    ) -> None:
        budget = budget or plan_memory(data)
        graph, collator, counts = data.graph, collate.collator, ReadCounts()
        row_bytes = beside + row_bytes_of(data, collator)
        warm = budget.topology_in_ram
        mapped = mapping_of(graph.indices) is None or graph.sampled_bytes() <= warm  # else edges are read as they are wanted
        edges = None if mapped else Edges(data.edge_rows("indices"), {name: data.edge_rows(name) for name in collator.columns})
        topology = Topology(graph, None, max(0, budget.topology - graph.indptr.nbytes), warm, mapped, collator.columns)
        memory = BatchBytes(budget.max_batch, collator, row_bytes, model_width=width)
        sampler = make_sampler(edges, budget.max_batch, row_bytes, counts)
        sample = SampleStage(order, sampler, topology, memory, counts, threads=sample_threads)
        x, labels = data.stored("x") if data.num_features else None, None
        if data.labels is not None:
            labels = Labels(data.labels, own=True, train=train)
        load = LoadStage(graph, x, collator.gather, labels, None, counts, buffers_for(device, budget))
        super().__init__(data, choose_strategy(BatchStages(sample, load, collate), memory), budget, device, prefetch)


class PartLoader(SubgraphLoader):
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
        if not data.num_features:
            raise ConfigError(f"{data.path} holds no features to train on: ingest it with --features x=FILE")
        self.halo = halo
        order = Order(InputNodes(count), per_batch, shuffle, seed, False, 0, 1)
        share = steps_of(count, per_batch) / max(1, data.num_nodes if train is None else len(train))
        collator = Collator(data.graph, Gather(data.encoding("x")), edge_ids=False)
        super().__init__(
            data,
            order,
            part_sampler(data.graph, self.parts, halo),
            PartCollate(collator, order.nodes, layers=layers, share=share),
            train=train,
            width=width,
            beside=beside,
            device=device,
            budget=budget,
        )

    def __repr__(self) -> str:
        halo = "with" if self.halo else "without"
        return f"{type(self).__name__}({len(self.parts) - 1} parts, {self._order.batch_size} a batch, {halo} their halo)"


def part_sampler(graph: Graph, parts: NDArray[np.int64], halo: bool) -> MakeSampler:
    """Makes the sampler of these parts."""
    return lambda edges, most, row_bytes, counts: PartSampler(graph, parts, halo, edges, most, row_bytes, counts)

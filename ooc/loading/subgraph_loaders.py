"""`PartLoader`, `ClusterLoader` and `SaintLoader`: batches of whole parts of the graph, and of random subgraphs.

Every node of a batch is computed in every layer, so a batch has one block, the same for all layers. Parts are contiguous ranges
of nodes (`Graph.parts`), whose edges and features are read front to back. The pipeline is that of sampled neighborhoods.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from ooc.graph.mapped_topology import Topology
from ooc.loading.arguments import InputNodes, check_numbers, check_pyg_arguments, dataset_of, members_of, renamed
from ooc.loading.base import PREFETCH, BatchLoader, warn_of_prefetch
from ooc.loading.batch_bytes import BatchBytes, row_bytes_of
from ooc.loading.choose_read_strategy import choose_strategy
from ooc.loading.collate import CollateStage, Collator, Gather, LoadedBatch, SampledBatch, edge_features_of, masks_of
from ooc.loading.load_stage import Labels, LoadStage
from ooc.loading.ranks import share_of
from ooc.loading.read_counts import ReadCounts
from ooc.loading.sample_stage import DrawSubgraph, Order, SampleStage
from ooc.loading.stages import BatchStages, buffers_for
from ooc.runtime.keyed_random import Cursor, steps_of
from ooc.runtime.memory_plan import MemoryPlan, plan_memory
from ooc.runtime.messages import warn_user
from ooc.runtime.pipeline import Pipeline
from ooc.runtime.transfer import OnDevice, pins
from ooc.sampling.cluster import Edges, Limit, cut, parts_of, ranges_of
from ooc.sampling.links import AnySeeds, Seeds
from ooc.sampling.saint import Draw, Kind, Normalisation, SaintSampler, check
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.graph import Graph
from ooc.stores.io.segments import mapping_of


@dataclass(frozen=True)
class SubgraphSampleStage(SampleStage):
    """Draws subgraphs and, with GraphSAINT's coefficients `norm`, adds what their edges stand for."""

    norm: Normalisation | None = None

    def sample(self, cursor: Cursor) -> SampledBatch:
        drawn = super().sample(cursor)
        if self.norm is None:
            return drawn
        stands_for, nbytes = self.norm.counts().stands_for(drawn.subgraph)
        self.counts.add(topology=nbytes)
        return replace(drawn, subgraph=replace(drawn.subgraph, stands_for=stands_for))


@dataclass(frozen=True)
class SubgraphCollate(CollateStage):
    """Collates subgraphs: the seeds are all nodes but the halo, and all `layers` share one block.

    share: the weight of each seed in a sum of losses, None where their mean is taken. train: nodes to train on, for
    `input_mask`. norm: GraphSAINT's coefficients.
    """

    layers: int = 1
    share: float | None = None
    train: Members | None = None
    norm: Normalisation | None = None

    def data(self, loaded: LoadedBatch) -> Data:
        node = loaded.drawn.subgraph.node
        batch = self.collator(loaded, node[: loaded.drawn.subgraph.num_nodes[0]])
        block = batch.blocks[0]
        if self.share is not None:
            batch.node_norm = torch.full((batch.batch_size,), self.share)
        if self.train is not None:
            batch.input_mask = torch.from_numpy(self.train.contains(node))
        if self.norm is not None:
            degree = block.degree[: block.num_dst].float()
            block = block._replace(share=block.stands_for / degree[block.edge_index[1]])
            batch.edge_norm = block.stands_for
            count = len(self.train) if self.train is not None else len(self.norm.counts().nodes)
            batch.node_norm = torch.from_numpy(self.norm.counts().weights(node) / np.float32(count))
        batch.blocks = [block] * self.layers
        return batch


class SubgraphLoader(BatchLoader):
    """What loaders of parts, clusters and random subgraphs share; by default it draws the `parts` that are a step's seeds.

    train: nodes whose labels are given, None for all; mask: whether batches have `input_mask`; share: see `SubgraphCollate`;
    beside: bytes a node takes beside its features; the other arguments: see `ClusterLoader`.
    """

    induced = False
    """whether a batch counts as a graph of its own"""
    halo = False
    parts: Ids
    _norm: Normalisation | None = None

    def __init__(
        self,
        data: Dataset,
        order: Order,
        train: Members | None,
        *,
        mask: bool = True,
        share: float | None = None,
        beside: int = 0,
        num_layers: int = 1,
        transform: Callable[[Data], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        features: bool = True,
        edge_features: str | Sequence[str] | None = None,
        split_masks: bool = True,
        edge_ids: bool = True,
        width: int = 0,
        budget: MemoryPlan | None = None,
        sample_threads: int = 1,
        **arguments: Any,
    ) -> None:
        own = [name for each in (type(self), SubgraphLoader) for name in inspect.signature(each).parameters]
        check_pyg_arguments({"num_workers": num_workers, **arguments}, own, type(self).__name__)
        check_numbers(order, num_layers=num_layers, sample_threads=sample_threads)
        masks = masks_of(data) if split_masks else {}
        of_edges = edge_features_of(data, edge_features, dtype, masks)
        budget = budget or plan_memory(data)
        place = None if device is None else torch.device(device)
        pin = pins(pin_memory) and not (place is not None and place.type == "cuda")
        graph, counts = data.graph, ReadCounts()
        gather = Gather(data.encoding("x"), dtype) if features and data.num_features else None
        collator = Collator(graph, gather, edge_ids=edge_ids, induced=self.induced, masks=masks, edge_features=of_edges)
        row_bytes = beside + row_bytes_of(data, collator)
        warm = budget.topology_in_ram
        mapped = mapping_of(graph.indices) is None or graph.sampled_bytes() <= warm  # else edges are read as they are wanted
        edges = None if mapped else Edges(data.edge_rows("indices"), {name: data.edge_rows(name) for name in collator.columns})
        topology = Topology(graph, None, max(0, budget.topology - graph.indptr.nbytes), warm, mapped, collator.columns)
        limit = budget.batch, collator.nbytes(1, 0, row_bytes), collator.nbytes(0, 1, row_bytes)
        draw = self._drawing(graph, edges, limit, counts)
        density = max(1.0, data.num_edges / max(1, data.num_nodes))
        sizes: dict[str, Any] = {"model_width": width, "edges_per_node": density, "activations": budget.activations}
        memory = BatchBytes(budget.batch, collator, row_bytes, **sizes)
        apart = self._norm is None and not self.halo
        sample = SubgraphSampleStage(
            order, draw, topology, memory, counts, threads=sample_threads, norm=self._norm, apart=apart
        )
        labels = None if data.labels is None else Labels(data.labels, True, train, data.task == "multilabel")
        x = None if gather is None else data.stored("x")
        load = LoadStage(graph, x, gather, labels, None, counts, buffers_for(place, budget), of_edges)
        masked = train if mask else None
        collate = SubgraphCollate(collator, order.nodes, transform, pin, int(num_layers), share, masked, self._norm)
        strategy = choose_strategy(BatchStages(sample, load, collate), memory)
        warn_of_prefetch(prefetch_factor, strategy)
        super().__init__(data, strategy, budget, place, max(1, prefetch_factor or PREFETCH))

    def _drawing(self, graph: Graph, edges: Edges | None, limit: Limit, counts: ReadCounts) -> DrawSubgraph:
        """How a step's subgraph is drawn within the limit; edges: None for the graph's arrays."""
        parts, halo = self.parts, self.halo
        most = None if limit[0] is None else int(limit[0])

        def draw(seeds: AnySeeds, key: int) -> Any:
            assert isinstance(seeds, Seeds), "parts are of a graph of one type"
            return cut(graph, ranges_of(parts, seeds.node), halo, edges, most, *limit[1:])

        return draw


def _parts_of(data: Dataset, num_parts: int | None, batch_size: int) -> tuple[Ids, InputNodes]:
    """The first node of each part, and the parts as input nodes. Raises ConfigError where a batch cannot have so many."""
    parts = parts_of(data.graph, num_parts)
    count = len(parts) - 1
    if not isinstance(batch_size, Integral) or not 1 <= batch_size <= count:
        raise ConfigError(f"a batch of {batch_size} parts: give 1 to {count}, as many as there are")
    return parts, InputNodes(count)


def _warn_of_crowded_parts(parts: Ids, train: Members) -> None:
    """Say that equal ranges of node ids put the training nodes into a few parts, as where an input lists them first."""
    below, above = np.zeros(len(parts), np.int64), np.full(len(parts), len(train))
    while (below < above).any():  # below: how many training nodes come before each part
        middle = (below + above) // 2
        earlier = (below < above) & (train[np.minimum(middle, len(train) - 1)] < parts)
        below, above = np.where(earlier, middle + 1, below), np.where(earlier, above, middle)
    some = int(np.count_nonzero(np.diff(below)))
    if len(train) > 1 and some <= (len(parts) - 1) // 10 + 1 < len(parts) - 1:
        warn_user(
            f"all {len(train):,} training nodes are in {some} of {len(parts) - 1} parts, which are ranges of node ids: the "
            "other batches have nothing to learn from; ingest the store with parts of its own"
        )


class PartLoader(SubgraphLoader):
    """Batches of whole parts, every part once an epoch, with their halo (the sources outside, one hop) or without it.

    A batch is a `Data` as the NeighborLoader's, without the halo's labels; `batch_size` counts its own nodes, `input_id` and
    the first of `n_id` are those. `node_norm` float32[batch_size] is the weight of each in a sum of losses, so that the mean
    over an epoch's batches is that over all labels, though parts have unequally many.

    Args:
        data: A data set with features.
        per_batch: Parts of a batch.
        halo: Whether a batch has its halo, and so all in-edges of its nodes.
        layers: Of the model: a batch has so many blocks, one and the same.
        parts: Equal ranges of nodes to make, for a store without parts of its own.
        train: Nodes whose labels are given; None: all.
        shuffle, seed, options: As ClusterLoader's; beside: bytes a node takes beside its features.

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
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.parts, nodes = _parts_of(data, parts, per_batch)
        if not data.num_features:
            raise ConfigError(f"{data.path} holds no features to train on: ingest it with `features` or `x_cols`")
        self.halo = halo
        share = steps_of(len(nodes), per_batch) / max(1, data.num_nodes if train is None else len(train))
        order = Order(nodes, per_batch, shuffle, seed, False, 0, 1)
        super().__init__(
            data,
            order,
            train,
            mask=False,
            share=share,
            num_layers=layers,
            edge_features=(),
            edge_ids=False,
            split_masks=False,
            **options,
        )

    def __repr__(self) -> str:
        halo = "with" if self.halo else "without"
        return f"{type(self).__name__}({len(self.parts) - 1} parts, {self._order.batch_size} a batch, {halo} their halo)"


class ClusterLoader(SubgraphLoader):
    """Mini-batches of Cluster-GCN (Chiang et al., 2019): `batch_size` parts each, with all edges between their nodes.

    An epoch has every part once. As in the paper and in PyG, a batch counts as a graph of its own: degrees
    (`blocks[0].degree`) and sums of weights are the batch's. It is a `Data` with x [n, f], y [n], edge_index int64[2, e], n_id
    int64[n] (ascending), e_id int64[e], edge_weight of a weighted graph, edge_attr [e, f] if the store has that edge feature,
    batch_size (n), input_id (n_id), and `blocks`.

    Args:
        data: The data set.
        batch_size: Parts of a batch.
        shuffle: Whether parts are grouped anew every epoch, in a keyed random order.
        num_parts: Equal ranges of node ids to make, where the store has no parts (`ooc ingest --parts`).
        input_nodes: The nodes to train on, a split's name, a mask or ids as NeighborLoader's. `y` of other nodes is unknown
            (-1, NaN), so that a loss which leaves those out trains on these alone, and `input_mask` (bool[n]) is true for them.
        num_layers: `blocks` has so many, one and the same.
        transform, drop_last, num_workers, pin_memory, prefetch_factor, seed, rank, world_size: As NeighborLoader's.
        arguments: device, dtype, features, edge_features, split_masks, edge_ids, budget, sample_threads, and PyG's and
            DataLoader's other arguments, as NeighborLoader's; width: columns of all rows that the model makes for a node, which
            memory is kept for.

    Raises:
        ConfigError: An argument does not fit.
        BudgetError: While iterating, a batch does not fit the memory.

    >>> loader = ClusterLoader(ds, batch_size=20, shuffle=True, input_nodes="train")
    >>> for batch in loader:
    ...     loss = F.cross_entropy(model(batch.x, batch.edge_index)[batch.input_mask], batch.y[batch.input_mask])
    """

    induced = True

    @renamed(world="world_size")
    def __init__(
        self,
        data: Dataset | Path | str,
        batch_size: int = 1,
        shuffle: bool = False,
        num_parts: int | None = None,
        input_nodes: Any = None,
        num_layers: int = 1,
        transform: Callable[[Data], Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        *,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **arguments: Any,
    ) -> None:
        data = dataset_of(data, homogeneous=type(self).__name__)
        self.parts, nodes = _parts_of(data, num_parts, batch_size)
        train, self._train = members_of(data, input_nodes)
        if train is not None and data.graph.parts is None:
            _warn_of_crowded_parts(self.parts, train)
        share = share_of(seed, rank, world_size, in_order=not shuffle)
        super().__init__(
            data,
            Order(nodes, int(batch_size), shuffle, drop_last=drop_last, **share._asdict()),
            train,
            num_layers=num_layers,
            transform=transform,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            **arguments,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.parts) - 1} parts, {self._order.batch_size} a batch)"

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "mode": "cluster", "parts": len(self.parts) - 1, "train": self._train}


class SaintLoader(SubgraphLoader):
    """Mini-batches of GraphSAINT (Zeng et al., 2020): random subgraphs, normalised so that they stand for the whole graph.

    A batch has the fields of ClusterLoader's; degrees are the whole graph's. `node_norm` (float32[n]) makes sum(node_norm *
    loss of each node) of the input nodes the mean loss over all of them, on average. `edge_norm` (float32[e]) makes sums over
    in-edges those of the whole graph: our models take it from `blocks` (mean and GCN's sum alike; attention has none).

    Args:
        data: The data set.
        sampler: "walk" (`batch_size` roots, `walk_length` steps each), "node" (`batch_size` draws of nodes) or "edge" (of
            edges); see `ooc.sampling.saint`.
        batch_size: See `sampler`.
        walk_length: See `sampler`.
        num_steps: Subgraphs an epoch; None: as many as draw N nodes.
        sample_coverage: Before the first batch subgraphs are drawn until they have so many times N nodes, and counted.
        save_dir: Where the counts are kept; None: until the loader is closed.
        input_nodes, num_layers, transform, num_workers, pin_memory, prefetch_factor, seed, rank, world_size, arguments: As
            ClusterLoader's.

    Raises:
        ConfigError: An argument does not fit.
        BudgetError: While iterating, a batch does not fit the memory.

    >>> loader = SaintLoader(ds, "walk", batch_size=2000, walk_length=2, input_nodes="train", num_layers=3)
    >>> for batch in loader:
    ...     each = F.cross_entropy(model(batch.x, batch.blocks), batch.y, ignore_index=-1, reduction="none")
    ...     loss = (each * batch.node_norm).sum()
    """

    @renamed(world="world_size")
    def __init__(
        self,
        data: Dataset | Path | str,
        sampler: Kind = "walk",
        batch_size: int = 2000,
        walk_length: int = 2,
        num_steps: int | None = None,
        sample_coverage: float = 50,
        save_dir: Path | str | None = None,
        input_nodes: Any = None,
        num_layers: int = 1,
        transform: Callable[[Data], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        *,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **arguments: Any,
    ) -> None:
        data = dataset_of(data, homogeneous=type(self).__name__)
        self.how = check(Draw(sampler, batch_size, walk_length if sampler == "walk" else 1))
        steps = -(-data.num_nodes // self.how.most_nodes) if num_steps is None else num_steps
        if not isinstance(steps, int | np.integer):
            raise ConfigError(f"num_steps must be a whole number, not {steps!r}")
        if steps < 1 or not sample_coverage > 0:
            raise ConfigError(f"num_steps {steps} and sample_coverage {sample_coverage} must be more than 0")
        share = share_of(seed, rank, world_size)
        train, self._train = members_of(data, input_nodes)
        norm_seed = 0 if share.seed_drawn else share.seed  # so that counts in `save_dir` serve the next loader without a seed
        self._norm_of = {**self.how._asdict(), "seed": norm_seed, "coverage": sample_coverage, "store": data.fingerprint}
        self._closed = False
        self._folder = TemporaryDirectory(prefix="ooc-saint-") if save_dir is None else None
        folder = Path(self._folder.name) / "norm" if self._folder is not None else Path(str(save_dir))
        engine = "auto" if data.engine == "gds" else data.engine
        self._counting = folder, norm_seed, sample_coverage, self._norm_of, engine
        super().__init__(
            data,
            Order(InputNodes(steps * share.world_size), 1, False, drop_last=False, **share._asdict(), draws_by_rank=True),
            train,
            num_layers=num_layers,
            transform=transform,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            **arguments,
        )

    def _drawing(self, graph: Graph, edges: Edges | None, limit: Limit, counts: ReadCounts) -> DrawSubgraph:
        sampler = SaintSampler(graph, self.how, edges, *limit)
        bare = sampler._replace(row_bytes=0, edge_bytes=0)
        self._norm = Normalisation(bare, *self._counting, lambda nbytes: counts.add(topology=nbytes))
        return lambda seeds, key: sampler.draw(key)

    def prepare(self) -> None:
        """Count how often nodes and edges come now, and not at the first batch. Raises as iterating does."""
        assert self._norm is not None
        self._norm.counts()

    def _from(self, start: Cursor) -> Pipeline | OnDevice:
        if self._closed:
            raise ConfigError("the SaintLoader is closed: make another one")
        return super()._from(start)

    def close(self) -> None:
        """Close the files of the coefficients and, without `save_dir`, remove them; idempotent."""
        self._closed = True
        if self._norm is not None:
            self._norm.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.how}, {len(self)} batches)"

    def _identity(self) -> dict[str, Any]:
        return {**self._norm_of, **super()._identity(), "mode": "saint", "train": self._train}

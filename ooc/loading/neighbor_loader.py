"""`NeighborLoader`: a drop-in for PyG's, over a `Dataset` that need not fit in memory.

Threads sample, read and collate future batches while the model computes; a batch is a function of (seed, epoch, step, rank)
alone, whatever the threads, the read strategy (`ooc.loading.read_strategy`: rows on disk are read for many batches at once) and
the engine; and the memory, but for `split_seeds`, which says what then depends on it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replace_in
from pathlib import Path
from typing import Any, Literal

import torch
from torch_geometric.data import Data, HeteroData

from ooc.graph.aggregation import PreAggregation
from ooc.graph.hetero import EdgeKey
from ooc.loading.arguments import (
    InputNodes,
    Pack,
    check_numbers,
    check_pyg_arguments,
    dataset_of,
    input_nodes_of,
    positions_of,
    renamed,
)
from ooc.loading.base import PREFETCH, BatchLoader, warn_of_prefetch
from ooc.loading.choose_pool import plan_for, sampled_beside, with_pool
from ooc.loading.choose_read_strategy import keeps_blocks, neighbor_strategy
from ooc.loading.collate import BatchCollator, CollateStage, Collator, Gather, edge_features_by_type, edge_features_of, masks_of
from ooc.loading.hetero import HeteroCollator
from ooc.loading.hetero_rows import TypeRows
from ooc.loading.input_links import InputLinks
from ooc.loading.load_stage import Labels
from ooc.loading.ranks import share_of
from ooc.loading.sample_device import checked_device
from ooc.loading.sample_stage import Order
from ooc.loading.sampling import HGTSampling, Sampling, graphs_of
from ooc.loading.stored_edge_split import held_out_edges
from ooc.loading.threads import LoaderThreads, most_edges
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.ranks import cores_of_a_rank
from ooc.runtime.transfer import moved, pins
from ooc.sampling.hgt import samples_of
from ooc.sampling.labor import Labor
from ooc.sampling.layer_wise import LayerWise
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError


class SeedLoader(BatchLoader):
    """What the loaders of batches around seeds share."""

    _sampling: Sampling

    def _set_up(
        self,
        data: Dataset,
        order: Order,
        sampling: Sampling,
        threads: LoaderThreads,
        *,
        transform: Callable[[Any], Any] | None,
        pin_memory: bool,
        prefetch: tuple[int | None, int],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        features: bool,
        edge_features: str | Sequence[str] | None,
        split_masks: bool,
        edge_ids: bool,
        split_seeds: bool = False,
        budget: MemoryPlan | None,
        beside: Mapping[str, int] | None = None,
        pre_aggregation: PreAggregation | None = None,
        pack: Any = None,
        gpu_memory: int | str | None = None,
    ) -> None:
        """Make the stages of this order's batches. prefetch: factor, workers; beside: see `NeighborLoader`."""
        if not (pre_aggregation is None or isinstance(pre_aggregation, PreAggregation)):
            raise ConfigError(
                f"pre_aggregation must be what `ooc.models.pre_aggregation_of(model)` returns, not {pre_aggregation!r}"
            )
        if pre_aggregation is not None and sampling.whole:
            raise ConfigError(
                f"pre_aggregation is for sampled edges: leave it out, or subgraph_type={sampling.subgraph_type!r}"
            )
        if pre_aggregation is not None and edge_features:
            raise ConfigError("pre_aggregation has the last hop's edges summed up: leave out edge_features, or pre_aggregation")
        place = None if device is None else torch.device(device)
        budget = plan_for(data, budget, place, gpu_memory, sampling.node_bytes)
        factor, workers = prefetch
        batches = PREFETCH if factor is None else max(1, factor) * max(1, workers)
        pin = pins(pin_memory) and not (place is not None and place.type == "cuda")
        of_edges = edge_features if pre_aggregation is None else ()
        _check_beside(data, beside)
        collator = collator_of(data, order.nodes, sampling, dtype, features, of_edges, edge_ids, split_masks, beside or {})
        collate = CollateStage(collator, order.nodes, transform, pin)
        self._sampling = sampling
        settled = _threads_of(threads, data, order, sampling, budget, place)
        made = data, order, collate, sampling, budget, place, pre_aggregation, split_seeds, settled
        packed = Pack.of(pack, data)
        strategy, budget = with_pool(neighbor_strategy(*made, packed), budget, place, data, settled[1])
        if place is not None and place.type == "cuda" and sampling.device != "cpu":
            strategy, budget = sampled_beside(strategy, budget, lambda pool: neighbor_strategy(*made, packed, pool).stages)
        super().__init__(data, strategy, budget, place, batches)
        self.keeps_blocks = keeps_blocks(strategy, data, budget)
        warn_of_prefetch(factor, strategy)

    def __call__(self, index: Any) -> Any:
        """The batch of some of the input nodes, sampled and read now, as PyG's loaders give it.

        Args:
            index: Their positions among the input nodes, int64[b], or a mask of the input nodes.

        Returns:
            The batch, as iterating gives it. Its draws follow torch's generator.

        Raises:
            InputError: A position is out of range, or the mask of another length.
            ConfigError: The loader makes first-layer aggregates, which are computed for many batches at once.
            BudgetError: The batch does not fit the memory.

        >>> loader(torch.tensor([0, 5])).n_id[:2]
        """
        stages = self.strategy.stages
        if stages.load.pre_aggregation is not None:
            raise ConfigError("a loader with pre_aggregation has no single batches: make one without it")
        position = positions_of(index, self.num_seeds)
        drawn = stages.sample.sample_at(position, int(torch.randint(2**63 - 1, ()).item()))
        batch = stages.collate.collate(stages.load.load(drawn))[1]
        if self.device is not None and self.device.type != "cpu":
            copier = self._copier_of(stages.load.buffers, self.budget.max_batch)
            batch = moved(batch, self.device) if copier is None else copier.deliver(copier(batch))
        return stages.load.completed(batch)

    collate_fn = __call__
    """what PyG's ZipLoader calls"""

    def filter_fn(self, batch: Any) -> Any:
        """The batch itself, which `collate_fn` has made whole; see PyG's NodeLoader."""
        return batch

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), **self._sampling.identity}


class NeighborLoader(SeedLoader):
    """Mini-batches of sampled neighborhoods (GraphSAGE, Hamilton et al., 2017), as PyG's NeighborLoader gives them.

    A batch is a `Data` with x [n, f], y [n], edge_index int64[2, e], n_id int64[n], e_id int64[e], input_id int64[b],
    batch_size, num_sampled_nodes, num_sampled_edges (lists), edge_weight float32[e] of a weighted graph, edge_attr [e, f] if
    the store has that edge feature, a mask of each split (train_mask bool[n]), and `blocks`, one `Block` a layer, which share
    edge_index's memory. Each `iter` is the next epoch.

    Of a data set of several types a batch is a `HeteroData` with these fields by type, also of types that it did not reach
    (num_nodes 0, edge_index [2, 0]); input_id and batch_size are those of the type of input_nodes, and `blocks` has one
    `HeteroBlock` a layer. n_id are rows of their own type, e_id positions in the input of their own edge type.

    Args:
        data: The data set, or the path of a store, which is opened without a memory limit.
        num_neighbors: In-edges drawn at a node, per hop; -1 takes all. Of several edge types a list for all of them, or a
            dictionary with a list for each.
        input_nodes: None (all nodes), a split's name, a mask [N] (bool, or 0 and 1) or node ids [k] (tensor, array or list).
            Of several node types a pair of the type and one of these, or the type alone.
        batch_size, shuffle, replace, drop_last, pin_memory, input_id: As PyG's.
        weight_attr: Edge column to sample in proportion to ("edge_weight" stands for the graph's weight too). Edge types
            without it are sampled uniformly.
        transform: Called with every batch, in a thread; it should be pure.
        num_workers, prefetch_factor: Their product is how many batches of rows in memory are made in advance. Rows on disk are
            read further ahead, as far as the memory goes, so there it changes nothing.
        sampler: "neighbor" (or None) draws at each node independently; "labor", or a `Labor` with its settings, by random
            numbers of the sources, so that nodes share neighbors and a batch has fewer; "ladies", "fastgcn" and "degree", or a
            `LayerWise` with its settings, for all nodes of a hop together, `num_neighbors` of them. With these, and with the
            importance of `Labor`, batches have `edge_norm` float32[e], the weight of each edge in its destination's mean.
        subgraph_type: "directional" gives the sampled edges, "bidirectional" these and their reverses, without duplicates,
            "induced" all edges between a batch's nodes. With the last two the layers share one block. A reverse has the id and
            the features of its edge; where the store has a reverse edge type, it is that type's edge.
        disjoint: Whether each seed has a tree of its own, which shares no nodes with the others; `batch` int64[n] is the seed
            of each node's tree. Always so with times.
        time_attr: Times that limit what a seed reaches: a node array (an edge is as late as its source; types without it are
            not limited), or "time" for the times of edges, which "edge_time" stands for too. Batches have it as a field.
        temporal_strategy: "uniform", or "last" for the latest edges, of types that have times.
        input_time: Time of each input node, [k] in their order (a mask's nodes ascending); None: their own. An edge or node at
            that very time is reached. Batches have `seed_time` [b].
        edge_split: Edges of validation and test are in no batch: an `EdgeSplit` or `StoredEdgeSplit`, as of
            `LinkNeighborLoader`; of several edge types a pair of the one that it divides and the split.
        seed: Of the order and the draws; None: from torch's generator, when the loader is made, so that `torch.manual_seed`
            decides it. With several ranks, which must agree on it, None is 0.
        rank, world_size: This loader's share of each step's seeds; None: those of torch's process group, if there is one.
        device: Where batches are moved.
        dtype: Of x and edge features; None: as stored, but float16, bfloat16 and scaled int8 come as float32.
        features: Whether to give x.
        edge_features: Names of the edge features to give, [e, ...] each, in the order of `e_id`; `blocks` have the first of
            them as `edge_attr`. None: `edge_attr`, if the store has it; with `pre_aggregation` none. Of several types each has
            those of them that it has.
        split_masks: Whether to give `train_mask` and those of the other splits.
        edge_ids: False saves looking up `e_id`.
        split_seeds: A batch over the memory budget is halved, and again, into more batches, instead of refused: for evaluation,
            so not with shuffle. Where num_neighbors differ by hop, a node that a half meets at another hop gets that hop's
            fan-out, so scores may differ with the memory that decides on halving; where all hops draw alike they don't.
        budget: A plan of the memory other than `plan_memory(data)`.
        beside: Of several node types: type -> bytes of memory that a node of a batch takes beside its fields, such as the rows
            of an embedding table that are looked up for it. They count for the memory.
        pre_aggregation: `ooc.models.pre_aggregation_of(model)`: the loader computes the neighbor sums of the model's first
            layer, in a tenth of the memory. x is the `FirstLayerAggregates` of its destinations and no field has the last hop;
            x stays the rows if they are not float32 vectors or `dtype` asks for another type. Of several types,
            `blocks[0].neighbor` has the mean over each edge type whose sources have features, and x is the rows of the
            destinations; nodes without features keep all hops. The features of all types must have as many columns.
        pack: Disk space to pack batches in, such as "12GB", where rows are on disk and `pre_aggregation` is given: the rows of
            a batch are written together before it is served, which moves fewer bytes where memory holds the sums of few
            batches (deep fan-outs). A file without a name beside the store has them; a pair ("12GB", folder) says where.
            Batches are the same.
        gpu_memory: How much of the memory of a CUDA `device` to take, such as "8GB"; None: half of what is free, as a model is
            to have the rest. What batches leave has feature rows, which are not read or copied again; batches are the same.
        sample_threads: Threads that sample; by default one for four cores, or for two where `device` is a GPU, at most 8, and
            one where batches are large for the memory. Batches do not depend on it.
        read_threads: Threads that gather rows in memory; by default likewise, but at least two.
        sample_device: Where neighbors are sampled: "cpu", "cuda" (the GPU that batches go to, with the topology in its memory,
            or its edges in the host's), or "auto", the GPU where that can be done and pays. Batches are the same;
            `loader.sample_place` says which it is, and why.
        arguments: PyG's and DataLoader's others are accepted where they change nothing, with a warning that threads do the
            work; one that asks for something else is refused.

    Raises:
        ConfigError: An argument does not fit.
        InputError: An input node does not.
        BudgetError: While iterating, a batch does not fit the memory.

    >>> loader = NeighborLoader(ds, num_neighbors=[10, 10], input_nodes="train", batch_size=1024, shuffle=True)
    >>> for batch in loader:
    ...     model(batch.x, batch.edge_index)[: batch.batch_size]
    """

    @renamed(world="world_size", summing="pre_aggregation")
    def __init__(
        self,
        data: Dataset | Path | str,
        num_neighbors: Sequence[int] | Mapping[EdgeKey, Sequence[int]],
        input_nodes: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        replace: bool = False,
        weight_attr: str | None = None,
        transform: Callable[[Data], Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        input_id: Any = None,
        *,
        sampler: Labor | LayerWise | Literal["neighbor", "labor", "ladies", "fastgcn", "degree"] | None = None,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        time_attr: str | None = None,
        temporal_strategy: str = "uniform",
        input_time: Any = None,
        edge_split: Any = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        features: bool = True,
        edge_features: str | Sequence[str] | None = None,
        split_masks: bool = True,
        edge_ids: bool = True,
        split_seeds: bool = False,
        budget: MemoryPlan | None = None,
        beside: Mapping[str, int] | None = None,
        pre_aggregation: PreAggregation | None = None,
        pack: int | str | tuple[int | str, Path | str] | None = None,
        gpu_memory: int | str | None = None,
        sample_threads: int | None = None,
        read_threads: int | None = None,
        sample_device: Literal["auto", "cpu", "cuda"] = "auto",
        **arguments: Any,
    ) -> None:
        check_pyg_arguments({"num_workers": num_workers, **arguments}, list(inspect.signature(NeighborLoader).parameters))
        data = dataset_of(data)
        times = disjoint, time_attr, temporal_strategy
        how = subgraph_type, sampler, checked_device(sample_device)
        sampling = Sampling.of(data, num_neighbors, replace, weight_attr, *times, *how)
        nodes = sampling.with_times(data, input_nodes_of(data, input_nodes, input_id), input_time)
        nodes = replace_in(nodes, held_out=held_out_edges(data, edge_split))
        if nodes.held_out and sampling.subgraph_type == "induced":
            raise ConfigError("edge_split is of sampled edges: leave it out, or subgraph_type='induced'")
        share = share_of(seed, rank, world_size, own_ids=nodes.is_array, in_order=not shuffle)
        order = Order(
            nodes,
            batch_size,
            shuffle,
            drop_last=drop_last,
            batch_dependency=sampling.batch_dependency,
            **share._asdict(),
        )
        threads = LoaderThreads(sample_threads, read_threads)
        check_numbers(order, **threads.given)
        if split_seeds and shuffle:
            raise ConfigError("split_seeds is for evaluation: training batches must not depend on the memory; drop shuffle")
        self._set_up(
            data,
            order,
            sampling,
            threads,
            transform=transform,
            pin_memory=pin_memory,
            prefetch=(prefetch_factor, num_workers),
            device=device,
            dtype=dtype,
            features=features,
            edge_features=edge_features,
            split_masks=split_masks,
            edge_ids=edge_ids,
            split_seeds=split_seeds,
            budget=budget,
            beside=beside,
            pre_aggregation=pre_aggregation,
            pack=pack,
            gpu_memory=gpu_memory,
        )

    @property
    def num_neighbors(self) -> Any:
        """In-edges drawn at a node, per hop; of several edge types a list for each."""
        return self._sampling.fanout

    def __repr__(self) -> str:
        return f"{type(self).__name__}(fanout={self._sampling.fanout}, seeds={self.num_seeds}, batches={len(self)})"

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "mode": "neighbor"}


class HGTLoader(SeedLoader):
    """Mini-batches by the budget sampling of the Heterogeneous Graph Transformer (Hu et al., 2020), as PyG's HGTLoader.

    A batch is a `HeteroData` as `NeighborLoader` gives it, with all edges between its nodes: per iteration a number of nodes of
    each type is sampled, in proportion to the squares of their budgets, which grow by 1 / in-degree for every edge to a sampled
    node. Of `blocks` there is one for each iteration, all the same: every layer computes all nodes.

    Args:
        data: The data set, or the path of a store.
        num_samples: Nodes to sample per iteration, one list for all node types or a dictionary with a list for each.
        input_nodes: A node type, or a pair of it and None, a split's name, a mask or node ids.
        batch_size, shuffle, transform, drop_last, num_workers, pin_memory, prefetch_factor, input_id: As of `NeighborLoader`.
        seed, rank, world_size, device, dtype, features, split_masks, edge_ids, budget, sample_threads, read_threads: Likewise.
        arguments: PyG's and DataLoader's others; see `NeighborLoader`.

    Raises:
        ConfigError: An argument does not fit, or the data set has one node type.
        InputError: An input node does not fit.
        BudgetError: While iterating, a batch does not fit the memory.

    >>> loader = HGTLoader(ds, num_samples=[512] * 4, input_nodes=("paper", "train"), batch_size=128, shuffle=True)
    """

    def __init__(
        self,
        data: Dataset | Path | str,
        num_samples: Sequence[int] | Mapping[str, Sequence[int]],
        input_nodes: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        transform: Callable[[HeteroData], Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        input_id: Any = None,
        *,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        features: bool = True,
        split_masks: bool = True,
        edge_ids: bool = True,
        budget: MemoryPlan | None = None,
        sample_threads: int | None = None,
        read_threads: int | None = None,
        **arguments: Any,
    ) -> None:
        own = list(inspect.signature(HGTLoader).parameters)
        check_pyg_arguments({"num_workers": num_workers, **arguments}, own, "HGTLoader")
        data = dataset_of(data)
        if not data.is_hetero:
            raise ConfigError(f"HGTLoader samples by node type, but {data.path} has one: use NeighborLoader")
        nodes = input_nodes_of(data, input_nodes, input_id)
        sampling = HGTSampling(samples_of(num_samples, data.node_types))
        share = share_of(seed, rank, world_size, own_ids=nodes.is_array, in_order=not shuffle)
        order = Order(nodes, batch_size, shuffle, drop_last=drop_last, **share._asdict())
        threads = LoaderThreads(sample_threads, read_threads)
        check_numbers(order, **threads.given)
        self._set_up(
            data,
            order,
            sampling,
            threads,
            transform=transform,
            pin_memory=pin_memory,
            prefetch=(prefetch_factor, num_workers),
            device=device,
            dtype=dtype,
            features=features,
            edge_features=None,
            split_masks=split_masks,
            edge_ids=edge_ids,
            budget=budget,
        )

    @property
    def num_samples(self) -> dict[str, list[int]]:
        """Nodes to sample per iteration, by node type."""
        return self._sampling.fanout

    def __repr__(self) -> str:
        return f"HGTLoader(num_samples={self.num_samples}, seeds={self.num_seeds}, batches={len(self)})"

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "mode": "hgt"}


def _threads_of(
    threads: LoaderThreads, ds: Dataset, order: Order, sampling: Sampling, budget: MemoryPlan, device: torch.device | None
) -> tuple[int, int]:
    """The threads of a loader's stages; see `LoaderThreads.settled`."""
    edges = None
    if sampling.bounded:
        count = sum(graph.num_edges for graph in graphs_of(ds).values())
        edges = most_edges(order.batch_size * order.nodes.most_seeds, sampling.fanouts, count, sampling.replace)
    on_gpu = device is not None and device.type == "cuda"
    return threads.settled(cores_of_a_rank(), on_gpu, budget.drawn_ahead, edges)


def _check_beside(data: Dataset, beside: Mapping[str, int] | None) -> None:
    """Raise ConfigError for bytes beside the fields of a node type that the data set has not."""
    if beside and not data.is_hetero:
        raise ConfigError(f"beside is for data sets of several node types, and {data.path} has one: leave it out")
    if other := [name for name in beside or () if name not in data.node_types]:
        raise ConfigError(f"beside names node type {other[0]!r}, and {data.path} has {', '.join(data.node_types)}")


def collator_of(
    ds: Dataset,
    nodes: InputNodes | InputLinks,
    sampling: Sampling,
    dtype: torch.dtype | None,
    features: bool,
    edge_features: str | Sequence[str] | None,
    edge_ids: bool,
    split_masks: bool,
    beside: Mapping[str, int],
) -> BatchCollator:
    """What makes the batches of a loader with these arguments: PyG `Data`, or `HeteroData` of several types."""
    if not ds.is_hetero:
        gather = Gather(ds.encoding("x"), dtype) if features and ds.num_features else None
        masks, values = masks_of(ds) if split_masks else {}, sampling.values(ds.node_types[0])
        of_edges = edge_features_of(ds, edge_features, dtype, {*masks, *values, *sampling.edge_values})
        names, fields = (sampling.weight_attr, edge_ids, sampling.whole), (values, sampling.edge_values, sampling.layers)
        return Collator(ds.graph, gather, *names, masks, of_edges, *fields)
    types = {}
    for name in ds.node_types:
        own = ds.nodes(name)
        x, gather = (own.stored("x"), Gather(own.encoding("x"), dtype)) if features and own.num_features else (None, None)
        labels = None if own.labels is None else Labels(own.labels, floats=own.task == "multilabel")
        masks = masks_of(own) if split_masks else {}
        types[name] = TypeRows(x, gather, labels, masks, sampling.values(name), beside.get(name, 0))
    seeds = nodes.of.key if isinstance(nodes, InputLinks) else nodes.node_type or ds.node_types[0]
    by_type = edge_features_by_type(ds, edge_features, dtype, sampling.edge_values)
    times, layers = sampling.edge_values, sampling.layers
    return HeteroCollator(graphs_of(ds), types, seeds, sampling.weight_attr, edge_ids, times, layers, by_type)

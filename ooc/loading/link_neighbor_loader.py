"""`LinkNeighborLoader`: a drop-in for PyG's, over a `Dataset` that need not fit in memory.

A seed is a link; its ends are the sampler's seeds, and all else is as in `ooc.loading.neighbor_loader`: the same stages, read
strategies and memory. Unlike in PyG, the links to predict carry no messages.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch_geometric.data import Data

from ooc.graph.aggregation import PreAggregation
from ooc.graph.hetero import EdgeKey
from ooc.loading.arguments import check_numbers, check_pyg_arguments, dataset_of, input_ids_of
from ooc.loading.choose_pool import plan_for
from ooc.loading.choose_read_strategy import edges_stay_on_disk
from ooc.loading.input_links import InputLinks, attr_for, labels_for, negatives_for, pairs_of, part_of, times_for
from ooc.loading.link_type import LinkType
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.ranks import share_of
from ooc.loading.sample_device import checked_device
from ooc.loading.sample_stage import Order
from ooc.loading.sampling import Sampling
from ooc.loading.stored_edge_split import StoredEdgeSplit
from ooc.loading.threads import LoaderThreads
from ooc.runtime.memory_plan import MemoryPlan
from ooc.sampling.edge_split import EdgeSplit
from ooc.sampling.labor import Labor
from ooc.sampling.layer_wise import LayerWise
from ooc.sampling.links import EdgeLookup
from ooc.stores.dataset import Dataset


class LinkNeighborLoader(NeighborLoader):
    """Mini-batches of links with the sampled neighborhoods of their ends, as PyG's LinkNeighborLoader gives them.

    A batch is a `Data` with all fields of NeighborLoader's, over the distinct ends of its links and negatives, ascending, and
    their sampled neighborhoods; batch_size counts those ends. With binary negatives or none it has edge_label_index
    int64[2, b + m] (positions in n_id) and edge_label [b + m, ...] (1 and 0, or those given); with triplets src_index and
    dst_pos_index int64[b] and dst_neg_index int64[b] or [b, amount]. input_id int64[b] are the links' positions.

    The links of a batch, their reverses and other edges between the same two nodes are left out of its edge_index, because a
    model that receives messages along the link that it is to predict learns nothing else. The fan-out of the ends is drawn from
    their other edges. PyG leaves them in.

    Of a data set of several types the links are of one edge type, and a batch is a `HeteroData`: the fields of links are those
    of this edge type, src_index and the dst_* those of its node types, and batch_size counts the ends of each. Left out are the
    edges of that type and of its reverses: edge types that the store records as such, or that are named as PyG's `ToUndirected`
    names them (`rev_likes`).

    With `disjoint` each link has a tree of its own, which both its ends and its negatives are in; `batch` int64[n] is the link
    of each node's tree.

    Args:
        data: The data set, or the path of a store, which is opened without a memory limit.
        num_neighbors: In-edges drawn at a node, per hop; -1 takes all. Of several types one list, or a dictionary with one for
            each edge type.
        edge_label_index: The links, int[2, k] (sources, destinations); None: all edges of the graph, whose `input_id` is their
            edge id. They need not be edges of the graph. A part of `edge_split`, "train", "val" or "test": its edges; without
            one, a split of edges that the store has (`ooc ingest --edge-split`). Of several types a pair of the edge type and
            these, or the edge type alone for all of its edges.
        edge_label: [k, ...], one a link; of all edges in order of edge id; "y" for those of the store (`ooc ingest
            --edge-label`). With binary negatives, classes from 0 on become 1 and more, as in PyG.
        edge_label_time: Until when a link's tree reaches, [k], one a link; of all edges in order of edge id. None: the times of
            the edges, where `time_attr` names those. Negatives are of nodes that are there by then. Batches have it as
            `edge_label_time`, triplets as `seed_time`.
        disjoint, time_attr, temporal_strategy, sampler, sample_device: As of NeighborLoader; times need the links' own.
        neg_sampling: None, "binary" (random pairs of nodes), "triplet" (random destinations of each source), or PyG's
            `NegativeSampling` or a dict with mode, amount (negatives a link), src_weight and dst_weight ([N], what nodes are
            drawn in proportion to).
        neg_sampling_ratio: PyG's older way to ask for binary negatives.
        exact_negatives: Whether no negative may be an edge of the graph, a link given, or a node with itself; "possible" draws
            such a pair nevertheless for a source that has edges to all nodes, which True refuses.
        keep_supervision_edges: True leaves the links of a batch in its edge_index, as PyG does.
        edge_label_attr: Whether batches have the edge feature `edge_attr` of their links, which are edges of the graph, as
            `edge_label_attr` [b, ...].
        edge_split: Divides the graph's edges into the parts "train", "val" and "test", which `edge_label_index` may name; edges
            of validation and test are in no batch's edge_index. `StoredEdgeSplit` is that of a store.
        batch_size: Links of a batch.
        seed: Of the order, the draws and the negatives; see NeighborLoader. A negative depends on (seed, epoch, link).
        arguments: These and the others that the signature names are NeighborLoader's.

    Raises:
        ConfigError: An argument does not fit, or exact negatives are asked for in a graph with all possible edges.
        InputError: An end of a link is no node; while iterating, there is no exact negative.
        BudgetError: While iterating, a batch does not fit the memory.

    >>> loader = LinkNeighborLoader(ds, [10, 10], edge_label_index=links, neg_sampling="binary", batch_size=1024, shuffle=True)
    >>> for batch in loader:
    ...     src, dst = model(batch.x, batch.edge_index)[batch.edge_label_index]
    ...     loss = F.binary_cross_entropy_with_logits((src * dst).sum(-1), batch.edge_label)
    """

    def __init__(
        self,
        data: Dataset | Path | str,
        num_neighbors: Sequence[int] | Mapping[EdgeKey, Sequence[int]],
        edge_label_index: Any = None,
        edge_label: Any = None,
        edge_label_time: Any = None,
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Data], Any] | None = None,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        input_id: Any = None,
        *,
        sampler: Labor | LayerWise | Literal["neighbor", "labor", "ladies", "fastgcn", "degree"] | None = None,
        exact_negatives: bool | Literal["possible"] = False,
        keep_supervision_edges: bool = False,
        edge_label_attr: bool = False,
        edge_split: EdgeSplit | StoredEdgeSplit | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        features: bool = True,
        edge_features: str | Sequence[str] | None = None,
        split_masks: bool = True,
        edge_ids: bool = True,
        budget: MemoryPlan | None = None,
        beside: Mapping[str, int] | None = None,
        pre_aggregation: PreAggregation | None = None,
        gpu_memory: int | str | None = None,
        sample_threads: int | None = None,
        read_threads: int | None = None,
        sample_device: Literal["auto", "cpu", "cuda"] = "auto",
        **arguments: Any,
    ) -> None:
        own = list(inspect.signature(LinkNeighborLoader).parameters)
        check_pyg_arguments({"num_workers": num_workers, **arguments}, own, "LinkNeighborLoader")
        data = dataset_of(data)
        of, edge_label_index = LinkType.asked(data, edge_label_index)
        times = disjoint, time_attr, temporal_strategy
        how: dict[str, Any] = {"sampler": sampler, "device": checked_device(sample_device)}
        sampling = Sampling.of(data, num_neighbors, replace, weight_attr, *times, **how)
        budget = plan_for(data, budget, device, gpu_memory, sampling.node_bytes)
        x = of.target.stored("x") if features and of.target.num_features and not data.is_hetero else None
        stay = not data.is_hetero and edges_stay_on_disk(data, [x], sampling.weight, budget)
        edges = EdgeLookup(of.graph, of.edges.rows("indices") if stay else None)
        pair, slots = pairs_of(of, edge_label_index), part_of(of.edges, edges, edge_label_index, edge_split)
        count = of.edges.num_edges if pair is None else pair.shape[1]
        drawn = negatives_for(of, edges, neg_sampling, neg_sampling_ratio, exact_negatives, pair, sampling.times)
        label, number = labels_for(of.edges, edge_label, count, drawn), input_ids_of(input_id, count, "links")
        part = edge_label_index if slots is not None else None
        given = pair, slots, part, edge_split, label, number, drawn, not keep_supervision_edges
        time = times_for(of, sampling.times, edge_label_time, count, pair is not None)
        attr = attr_for(of.edges, edge_label_attr, pair, drawn)
        links = InputLinks(edges, of, *given, sampling.disjoint, *time, attr)
        share = share_of(seed, rank, world_size, own_ids=links.is_array, in_order=not shuffle)
        order = Order(
            links,
            batch_size,
            shuffle,
            drop_last=drop_last,
            batch_dependency=sampling.batch_dependency,
            **share._asdict(),
        )
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
            edge_features=edge_features,
            split_masks=split_masks,
            edge_ids=edge_ids,
            split_seeds=False,
            budget=budget,
            beside=beside,
            pre_aggregation=pre_aggregation,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(fanout={self._sampling.fanout}, links={self.num_seeds}, batches={len(self)})"

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "mode": "link_neighbor"}

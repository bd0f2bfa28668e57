"""How `NeighborLoader` samples, from PyG's arguments: fan-outs, weights, trees of their own, and times."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from ooc.graph.hetero import EdgeKey, only_type
from ooc.loading.arguments import InputNodes, fanouts_of, weight_column_of
from ooc.loading.link_type import LinkType
from ooc.sampling import HeteroNeighborSampler
from ooc.sampling.bidirectional import bidirectional
from ooc.sampling.disjoint_neighbor import DisjointSampler, Times
from ooc.sampling.edge_split import HeldOut
from ooc.sampling.hgt import HGTSampler
from ooc.sampling.induced import induced
from ooc.sampling.labor import Key, Labor
from ooc.sampling.layer_wise import LAYER_WISE, LayerWise
from ooc.sampling.links import AnySeeds, Seeds, TypedSeeds
from ooc.sampling.source_draws import kept_bytes
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.whole import whole
from ooc.stores.closest import did_you_mean
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph
from ooc.stores.node_set import NodeSet

SubgraphType = Literal["directional", "bidirectional", "induced"]
_TIME = "time"
"""the graph's column of times"""


@dataclass(frozen=True)
class Sampling:
    """What is sampled around seeds."""

    fanout: Any
    """In-edges drawn at a node, per hop; of several edge types a list for each"""
    replace: bool = False
    weight: str | None = None
    """the edge column to sample in proportion to"""
    weight_attr: str | None = None
    """what the user calls it"""
    disjoint: bool = False
    """whether each seed has a tree of its own"""
    times: Times | None = None
    time_attr: str | None = None
    subgraph_type: SubgraphType = "directional"
    """the edges of a batch: those sampled, all between its nodes, or those sampled in both directions"""
    labor: Labor | None = None
    """draws by random numbers of the sources"""
    layer_wise: LayerWise | None = None
    """draws for all nodes of a hop together, `fanout` of them; None, as `labor`: independent draws at each node"""
    device: str = "cpu"
    """where the user wants it sampled, see `ooc.loading.sample_device`"""

    @property
    def batch_dependency(self) -> int:
        """For how many batches draws depend on one another."""
        return 1 if self.labor is None else int(self.labor.batch_dependency)

    def kept_bytes(self, ds: Dataset) -> int:
        """Bytes of the draws that a sampling thread keeps for further batches, where edges are in memory."""
        if self.labor is None:
            return 0
        graphs, fanout = graphs_of(ds), self.fanout
        return sum(
            kept_bytes(
                self.labor, fanout[key] if ds.is_hetero else fanout, graph.num_edges, (self.weight or "") in graph.columns
            )
            for key, graph in graphs.items()
        )

    @property
    def needs_mapped_edges(self) -> bool:
        """Whether edges are read that no plan foresees: through memory maps, where they do not fit in memory."""
        important = self.layer_wise is not None or (self.labor is not None and self.labor.iterations != 0)
        return self.disjoint or self.whole or important

    @property
    def by_source(self) -> Labor | LayerWise | None:
        """What draws by random numbers of the sources, for which it reads all in-edges; None: a node's draw is independent."""
        return self.labor or self.layer_wise

    @property
    def node_bytes(self) -> int:
        """Bytes in memory that sampling keeps for each node."""
        return 0 if self.layer_wise is None else self.layer_wise.node_bytes

    @property
    def whole(self) -> bool:
        """Whether a batch counts as a graph of its own, whose nodes all layers compute."""
        return self.subgraph_type != "directional"

    @property
    def repeats_neighbors(self) -> bool:
        """Whether a node may have the same neighbors in several batches, so that they can share first-layer sums."""
        return self.batch_dependency > 1 or any(-1 in counts for counts in self.fanouts)

    @property
    def bounded(self) -> bool:
        """Whether fan-outs and the graph bound what a thread holds as it samples: it keeps draws where batches depend on one
        another, reads all in-edges where sources are drawn, and trees have edges in common."""
        return self.by_source is None and not self.whole and not self.disjoint

    @property
    def fanouts(self) -> list[Any]:
        """Per hop; of several edge types those of each."""
        return list(self.fanout.values()) if isinstance(self.fanout, dict) else [self.fanout]

    @property
    def layers(self) -> int | None:
        """Layers that share the block of all nodes and edges; None: each hop has its own."""
        return max(map(len, self.fanouts), default=0) if self.whole else None

    @classmethod
    def of(
        cls,
        ds: Dataset,
        num_neighbors: Any,
        replace: bool,
        weight_attr: str | None,
        disjoint: bool = False,
        time_attr: str | None = None,
        temporal_strategy: str = "uniform",
        subgraph_type: Any = "directional",
        sampler: Any = None,
        device: str = "cpu",
    ) -> "Sampling":
        """From PyG's arguments. Raises ConfigError where they do not fit the data set, or one another."""
        graphs = graphs_of(ds)
        weight = weight_column_of(graphs, weight_attr)
        if temporal_strategy not in ("uniform", "last"):
            raise ConfigError(f"temporal_strategy {temporal_strategy!r} is unknown: use uniform or last (the latest edges)")
        if time_attr is None and temporal_strategy != "uniform":
            raise ConfigError(f"temporal_strategy={temporal_strategy!r} needs time_attr, the name of the times")
        if weight is not None and (disjoint or time_attr is not None):
            raise ConfigError("weight_attr cannot be combined with disjoint or time_attr: leave it out")
        kind = getattr(subgraph_type, "value", subgraph_type)
        if kind not in get_args(SubgraphType):
            raise ConfigError(
                f"subgraph_type {kind!r} is unknown: use directional (the sampled edges), bidirectional (both directions of "
                "them) or induced (all edges between a batch's nodes)"
            )
        if kind == "induced" and (disjoint or time_attr is not None):
            raise ConfigError("subgraph_type='induced' cannot be combined with disjoint or time_attr")
        unfit = {"weight_attr": weight is not None, f"subgraph_type={kind!r}": kind != "directional"}
        by_source = _by_source(ds, sampler, replace, disjoint or time_attr is not None, unfit)
        labor = by_source if isinstance(by_source, Labor) else None
        layer_wise = by_source if isinstance(by_source, LayerWise) else None
        times = None if time_attr is None else times_of(ds, time_attr, temporal_strategy == "last")
        disjoint = bool(disjoint) or times is not None
        fanout = fanouts_of(ds, num_neighbors)
        return cls(fanout, bool(replace), weight, weight_attr, disjoint, times, time_attr, kind, labor, layer_wise, device)

    @property
    def identity(self) -> dict[str, Any]:
        """All of it that batches depend on, for the state of a loader."""
        fanout = self.fanout
        if isinstance(fanout, dict):
            fanout = {":".join(key): own for key, own in fanout.items()}
        kept = {"fanout": fanout, "replace": self.replace, "weight_attr": self.weight, "sampler": "neighbor"}
        if self.by_source is not None:
            kept |= {"sampler": self.by_source.name, **self.by_source.identity}
        if self.disjoint:
            kept |= {"disjoint": True, "time_attr": self.time_attr, "latest": self.times is not None and self.times.latest}
        return kept | ({"subgraph_type": self.subgraph_type} if self.whole else {})

    def values(self, node_type: str) -> dict[str, AnyArray]:
        """Fields of a batch's nodes of a type: their times."""
        if self.times is None or self.time_attr is None or node_type not in self.times.of_nodes:
            return {}
        return {self.time_attr: self.times.of_nodes[node_type]}

    @property
    def edge_values(self) -> dict[str, str]:
        """Fields of a batch's edges, and the column they are: their times."""
        return {self.time_attr: _TIME} if self.time_attr is not None and self.times is not None and self.times.of_edges else {}

    def with_times(self, ds: Dataset, nodes: InputNodes, input_time: Any) -> InputNodes:
        """The input nodes with their times. Raises ConfigError where those are missing or do not fit."""
        if input_time is not None and self.times is None:
            raise ConfigError("input_time needs time_attr, the name of the times it is compared with")
        if self.times is None:
            return nodes
        if input_time is not None:
            time = np.asarray(input_time.detach().cpu().numpy() if hasattr(input_time, "detach") else input_time)
            if time.shape != (len(nodes),) or time.dtype.kind not in "iuf":
                raise ConfigError(
                    f"input_time must be one number for each of {len(nodes)} input nodes, not {time.dtype}{list(time.shape)}"
                )
            return replace(nodes, time=time)
        own = self.times.of_nodes.get(nodes.node_type or ds.node_types[0])
        if own is None:
            raise ConfigError(f"input_time must be given: the input nodes have no {self.time_attr!r} of their own")
        return replace(nodes, node_time=own)

    def sampler(
        self,
        ds: Dataset,
        max_bytes: int | None,
        row_bytes: Mapping[str, int],
        held_out: Mapping[EdgeKey, HeldOut] | None = None,
        cold: bool = False,
    ) -> HeteroNeighborSampler | DisjointSampler | HGTSampler:
        """What draws batches of several types, or trees. row_bytes: of a node's features and labels, by node type; held_out:
        edges that carry no messages, by edge type; cold: whether edges are mapped from the disk and were not read ahead."""
        graphs, num_nodes = graphs_of(ds), {name: ds.nodes(name).num_nodes for name in ds.node_types}
        fanout = self.fanout if ds.is_hetero else dict.fromkeys(graphs, self.fanout)
        if self.disjoint:
            return DisjointSampler(graphs, num_nodes, fanout, self.replace, max_bytes, row_bytes, self.times, held_out)
        limits = max_bytes, row_bytes, held_out, self.labor, cold
        return HeteroNeighborSampler(graphs, num_nodes, fanout, self.replace, self.weight, *limits)


def sampler_of(sampler: Any) -> Labor | LayerWise | None:
    """What the argument `sampler` of a loader means; None for neighbor sampling. Raises ConfigError for another value."""
    if sampler is None or isinstance(sampler, Labor | LayerWise):
        return sampler
    known: dict[Any, Labor | LayerWise | None] = {"neighbor": None, "labor": Labor()}
    known |= {name: LayerWise(name) for name in LAYER_WISE}
    if isinstance(sampler, str) and sampler in known:
        return known[sampler]
    if sampler is Labor or sampler is LayerWise:
        raise ConfigError(f"sampler is the class ooc.{sampler.__name__}: give an object, as ooc.{sampler.__name__}(...)")
    kinds = f"sampler must be 'neighbor', 'labor', {', '.join(map(repr, LAYER_WISE))}, ooc.Labor(...) or ooc.LayerWise(...)"
    if isinstance(sampler, str):
        raise ConfigError(f"{kinds}, not {sampler!r}{did_you_mean(sampler, known)}")
    raise ConfigError(
        f"{kinds}, not {sampler!r}; the order of seeds comes from shuffle and seed, or give input_nodes in your own order"
    )


def _by_source(ds: Dataset, sampler: Any, replace: bool, trees: bool, unfit: Mapping[str, bool]) -> Labor | LayerWise | None:
    """What `sampler` means. Raises ConfigError where that does not fit. unfit: whether settings are given that layer-wise
    sampling and (but for weight_attr) importance do not allow, by name."""
    found = sampler_of(sampler)
    if found is None:
        return None
    if replace:
        raise ConfigError(f"sampler='{found.name}' draws without replacement: leave out replace")
    if trees:
        words = f"sampler='{found.name}' shares neighbors between seeds, so it cannot be combined with disjoint or time_attr"
        raise ConfigError(words)
    if isinstance(found, Labor) and found.iterations == 0:
        return found
    what = "importance of Labor" if isinstance(found, Labor) else f"sampler='{found.name}'"
    if isinstance(found, Labor):
        unfit = {name: given for name, given in unfit.items() if name != "weight_attr"}
    if other := next((name for name, given in unfit.items() if given), None):
        raise ConfigError(f"{what} cannot be combined with {other}: leave one of them out")
    if ds.is_hetero:
        raise ConfigError(f"{what} is for graphs of one type, and {ds.path} has several: leave it out")
    return found


@dataclass(frozen=True)
class HGTSampling(Sampling):
    """What HGT's sampler samples: `fanout` is the number of nodes per iteration, by node type."""

    subgraph_type: SubgraphType = "induced"

    @property
    def identity(self) -> dict[str, Any]:
        return {"num_samples": self.fanout}

    def sampler(
        self,
        ds: Dataset,
        max_bytes: int | None,
        row_bytes: Mapping[str, int],
        held_out: Mapping[EdgeKey, HeldOut] | None = None,
        cold: bool = False,
    ) -> HGTSampler:
        num_nodes = {name: ds.nodes(name).num_nodes for name in ds.node_types}
        return HGTSampler(graphs_of(ds), num_nodes, self.fanout, max_bytes, row_bytes)


def drawing(
    ds: Dataset,
    sampling: Sampling,
    max_bytes: int | None,
    row_bytes: Mapping[str, int],
    seed_type: str,
    held_out: Mapping[EdgeKey, HeldOut] | None = None,
    cold: bool = False,
) -> Any:
    """The `DrawSubgraph` of seeds, a `HeteroSubgraph`, of a homogeneous graph a `Subgraph`.

    max_bytes: of a batch; row_bytes: of a node's features and labels, by node type; seed_type: of `Seeds`; held_out: edges that
    carry no messages, by edge type; cold: see `Sampling.sampler`.
    """
    sampler = sampling.sampler(ds, max_bytes, row_bytes, held_out, cold)
    graphs, reverses = graphs_of(ds), reverses_of(ds) if sampling.subgraph_type == "bidirectional" else {}

    def draw(given: AnySeeds, key: Key) -> tuple[Any, int]:
        seeds = given
        if isinstance(seeds, Seeds):
            seeds = TypedSeeds({seed_type: seeds.node}, time=None if seeds.time is None else {seed_type: seeds.time})
        if isinstance(sampler, DisjointSampler):
            found = sampler.sample(seeds.node, key, seeds.time, seeds.tree, left_out=seeds.left_out)
        elif isinstance(sampler, HeteroNeighborSampler):
            found = sampler.sample(seeds.node, key, left_out=seeds.left_out)
        else:
            assert isinstance(key, int)
            found = sampler.sample(seeds.node, key)
        if sampling.subgraph_type == "bidirectional":
            found = bidirectional(graphs, reverses, found, sampler.max_bytes)
        elif sampling.subgraph_type == "induced" and not isinstance(sampler, HGTSampler):  # whose samples have all edges
            found = induced(graphs, found, sampler.max_bytes)
        return found if ds.is_hetero else only_type(found), 0

    return draw


def graphs_of(ds: Dataset) -> dict[EdgeKey, Graph]:
    """The topology of each edge type."""
    return {key: ds.edges(key).graph for key in ds.edge_types}


def reverses_of(ds: Dataset) -> dict[EdgeKey, EdgeKey]:
    """The edge type that has each edge type's edges in the other direction: one of another name if there is one, else the type
    itself where its ends are nodes of one type."""
    found = {}
    for key in ds.edge_types:
        reverses = LinkType.of(ds, key).reverses
        if reverses:
            found[key] = reverses[0]
        elif key[0] == key[2]:
            found[key] = key
    return found


def times_of(ds: Dataset, time_attr: str, latest: bool) -> Times:
    """The times that `time_attr` names: a node array of some types, or the edges' times ("time" or "edge_time").

    Raises ConfigError for a name that is neither or both, InputError for times that are no numbers, one a node.
    """
    of_nodes: dict[str, AnyArray] = {}
    for name in ds.node_types:
        if time_attr in ds.nodes(name).names:
            of_nodes[name] = _times_of_nodes(ds.nodes(name), time_attr)
    columns = {key: graph.columns[_TIME] for key, graph in graphs_of(ds).items() if _TIME in graph.columns}
    of_edges = columns if time_attr in (_TIME, "edge_time") else {}
    if of_nodes and of_edges:
        raise ConfigError(f"time_attr {time_attr!r} names times of nodes and of edges: use 'edge_time' for those of edges")
    if not of_nodes and not of_edges:
        arrays = sorted({each for name in ds.node_types for each in ds.nodes(name).names})
        there = ", ".join(arrays + ["time (of edges)"] * bool(columns)) or "none"
        raise ConfigError(f"time_attr {time_attr!r} is neither an array of nodes nor the time of edges: there are {there}")
    return Times(of_edges, of_nodes, latest)


def _times_of_nodes(nodes: NodeSet, name: str) -> AnyArray:
    """The times [N] in a node array, [N] or, as ingested, [N, 1]. Raises InputError for others."""
    time = np.asarray(whole(nodes.rows(name)))
    if time.shape not in ((nodes.num_nodes,), (nodes.num_nodes, 1)) or time.dtype.kind not in "iuf":
        raise InputError(
            f"times must be one number a node, but {name!r} of {nodes.name!r} nodes is {time.dtype}{list(time.shape)}"
        )
    return time.reshape(-1)

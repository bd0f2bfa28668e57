"""A sampled subgraph and its rows -> the PyG `Data` that the user sees.

Plain numpy: this runs in the pipeline's threads, where torch's own thread pool would be started once a thread.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from ooc.graph.aggregation import FirstLayerAggregates
from ooc.graph.blocks import EDGE_ATTR, EDGE_ID, Block, Subgraph, aggregated_block, blocks_of, graph_block
from ooc.graph.device_subgraph import DeviceSubgraph
from ooc.graph.hetero import EdgeKey, EdgeSample
from ooc.graph.mapped_topology import looked_up
from ooc.loading.arguments import InputNodes, names_of
from ooc.loading.input_links import InputLinks
from ooc.runtime.buffers import Buffers
from ooc.runtime.transfer import pin
from ooc.sampling.links import Links
from ooc.stores.arrays.encoding import DecodedRows, Encoding
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel
from ooc.stores.node_set import NodeSet

_FIELDS = {
    *("x", "y", "edge_index", "edge_weight", "n_id", "e_id", "num_nodes", "num_sampled_nodes", "num_sampled_edges", "input_id"),
    *("batch_size", "blocks", "node_norm", "edge_norm", "input_mask", "draw_score"),
    *("edge_label_index", "edge_label", "edge_label_time", "edge_label_attr"),
    *("seed_time", "src_index", "dst_pos_index", "dst_neg_index"),
}
"""names of a batch's other fields"""
_AS_STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types that torch has too: a batch may want them as they are stored"""


@dataclass(frozen=True)
class SampledBatch:
    """A sampled batch without its rows. `last`: no further part of this step follows (see `split_seeds`)."""

    step: int
    last: bool
    position: NDArray[np.int64]
    """int64[b]: where the seeds stand in the loader's input nodes"""
    subgraph: Any
    """a `Subgraph`, or a `DeviceSubgraph` that was sampled on the GPU; of a graph of several types a `HeteroSubgraph`"""
    links: Links | None = None
    """to predict; None in a batch of nodes"""

    @property
    def link_bytes(self) -> int:
        """Bytes of its links and of the fields that are made of them."""
        return 0 if self.links is None else self.links.nbytes


class PooledSums(NamedTuple):
    """What the first layer's aggregates of a batch add up, for e edges into d destinations."""

    source: Tensor
    """int32[e]: of each destination ascending by node"""
    indptr: Tensor
    """int32[d + 1]"""
    edge: Tensor | None
    """float32[e]: what an edge counts for; None for ones"""
    target: Tensor | None
    """float32[d]: what each sum is multiplied by; None for ones"""


class SampledSums(NamedTuple):
    """The same of a batch that was sampled on the device, where the edges are put in order too."""

    node: Tensor
    """int64[n]: node ids"""
    edge_index: Tensor
    """int64[2, e]: (source, destination) of every edge, sorted by destination"""
    indptr: Tensor
    """int64[d + 1]"""
    degree: Tensor
    """int64[n]: in-degree in the whole graph"""


class PooledRows(NamedTuple):
    """Replaces a batch's x where rows stay on the device, until it is there; see `ooc.loading.pooled_load`."""

    place: Tensor
    """int32|int64[n]: of each node's row in the pool; any where it is not there"""
    missed: Tensor
    """int64[m]: the nodes whose rows are not there"""
    values: Tensor
    """[m, *row shape]: these rows, as stored"""
    sums: PooledSums | SampledSums | None
    """None where x is the rows themselves"""


@dataclass(frozen=True)
class LoadedBatch:
    """A sampled batch with its rows."""

    drawn: SampledBatch
    x: Any
    """[n, *feature shape] of `Gather.gathered`, or the first layer's aggregates: `drawn` then has the hops before the last;
    None without features; of a graph of several types the arrays by node type"""
    y: Any
    """[n] or [n, C], None without labels; of a graph of several types the arrays by node type"""
    edge_features: Any = ()
    """[e, *feature shape] each, in the order of `Collator.edge_features`; of several types such tuples by edge type"""

    @property
    def aggregated(self) -> bool:
        """Whether x is, or on the device becomes, the first layer's aggregates."""
        pooled = isinstance(self.x, PooledRows) and self.x.sums is not None
        return pooled or isinstance(self.x, FirstLayerAggregates)


@dataclass(frozen=True)
class Gather:
    """How the rows of a batch become its `x`.

    encoding: of the stored rows. dtype: of x; None for their values: float32 for float16, bfloat16 and scaled int8, otherwise
    as stored. Where it is the stored type nothing is converted; any type but these two costs a second copy.
    """

    encoding: Encoding
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise ConfigError(f"dtype must be a type of torch, such as torch.float32, not {self.dtype!r}")

    @property
    def kept(self) -> bool:
        asked = self.dtype is not None and self.dtype == _AS_STORED.get(self.encoding.name)
        return asked or not self.encoding.is_short

    @property
    def gathered(self) -> np.dtype[Any]:
        """What `take` and `read` give."""
        return self.encoding.stored if self.kept else self.encoding.dtype

    def take(self, rows: AnyArray, at: Any, buffers: Buffers) -> AnyArray:
        """[n, *row shape] of `gathered`: rows[at], of stored rows in memory; at: int32|int64[n], in range."""
        out = buffers.empty((len(at), *rows.shape[1:]), self.gathered)
        encoding = Encoding.raw(rows.dtype) if self.kept else self.encoding
        encoding.gather(rows, at, out)
        return out

    def read(self, rows: Rows, ids: Ids, buffers: Buffers) -> tuple[AnyArray, int]:
        """The same of rows anywhere, with the bytes read from the disk for it; see `Rows.read`."""
        out = buffers.empty((len(ids), *rows.shape[1:]), self.gathered)
        return out, (rows if self.kept else DecodedRows(rows, self.encoding)).read(ids, out)

    @property
    def float32(self) -> bool:
        """Whether values are float32 from the gathering on: what sums can be made of."""
        return self.gathered == np.float32 and self.dtype in (None, torch.float32)

    def decoded(self, stored: Tensor, scale: Tensor) -> Tensor:
        """`x` of stored rows [n, *row shape] on any device, bfloat16 as such. scale: float32[f] of int8 there, else empty."""
        if not self.kept:
            stored = stored.float()
            stored = stored * scale.view(stored.shape[1:]) if len(scale) else stored
        return stored if self.dtype is None else stored.to(self.dtype)

    def tensor(self, gathered: AnyArray | FirstLayerAggregates | PooledRows) -> Any:
        """`x`, over the same memory where its dtype allows; of rows in a pool what it is made of."""
        if isinstance(gathered, PooledRows):
            return gathered
        if isinstance(gathered, FirstLayerAggregates):
            return FirstLayerAggregates(*map(torch.from_numpy, gathered))
        x = torch.from_numpy(gathered)
        if self.kept and self.encoding.name == "bfloat16":
            x = x.view(torch.bfloat16)
        return x if self.dtype is None else x.to(self.dtype)

    def row_bytes(self, row_shape: tuple[int, ...]) -> int:
        """Bytes of a node's features from gathering to the model: as gathered and, where that differs, in `dtype`."""
        example = np.empty((1, *row_shape), self.gathered)
        x = self.tensor(example)
        return example.nbytes + (x.nbytes if x.data_ptr() != example.ctypes.data else 0)


@dataclass(frozen=True)
class EdgeFeature:
    """An edge feature of batches. rows: as stored, one a edge id; gather: how they become the batch's."""

    name: str
    rows: Rows
    gather: Gather

    @property
    def edge_bytes(self) -> int:
        """Bytes of an edge's features from gathering to the model."""
        return self.gather.row_bytes(self.rows.shape[1:])


def edge_features_of(
    ds: Dataset, names: Any, dtype: torch.dtype | None, beside: Collection[str] = ()
) -> tuple[EdgeFeature, ...]:
    """The edge features that batches of a loader have.

    Args:
        ds: The data set.
        names: Of the features, or one name; None for `edge_attr` if the store has it.
        dtype: As `Gather.dtype`.
        beside: Names of further fields of the loader's batches, which no feature can have.

    Raises:
        ConfigError: A name is that of another field, or comes twice.
        InputError: The store has no such feature.
    """
    wanted = _wanted_features(names, ds.manifest.edge_types[0].arrays, beside)
    return tuple(_edge_feature(name, ds.edge_features(name), dtype) for name in wanted)


def edge_features_by_type(
    ds: Dataset, names: Any, dtype: torch.dtype | None, beside: Collection[str] = ()
) -> dict[EdgeKey, tuple[EdgeFeature, ...]]:
    """`edge_features_of` each edge type: those of the names that it has. Raises InputError for a name that no type has."""
    edges = {key: ds.edges(key) for key in ds.edge_types}
    there = sorted({name for each in edges.values() for name in each.names})
    wanted = _wanted_features(names, there, beside)
    for name in wanted:
        if name not in there:
            raise InputError(f"{ds.path} has no edge feature {name!r} of any type: there are {', '.join(there) or 'none'}")
    return {
        key: tuple(_edge_feature(name, own.features(name), dtype) for name in wanted if name in own.names)
        for key, own in edges.items()
    }


def _wanted_features(names: Any, there: Collection[str], beside: Collection[str]) -> list[str]:
    """The names as a list, of those there `edge_attr` if none are given; raises ConfigError as `edge_features_of`."""
    wanted = [EDGE_ATTR] * (EDGE_ATTR in there) if names is None else names_of(names, "edge_features")
    for name in wanted:
        if name in _FIELDS or name in beside:
            raise ConfigError(f"edge feature {name!r} has the name of another field of batches: ingest it under another name")
        if wanted.count(name) > 1:
            raise ConfigError(f"edge feature {name!r} is asked for twice")
    return wanted


def _edge_feature(name: str, values: Rows, dtype: torch.dtype | None) -> EdgeFeature:
    if isinstance(values, DecodedRows):
        return EdgeFeature(name, values.stored, Gather(values.encoding, dtype))
    return EdgeFeature(name, values, Gather(Encoding.plain(values.dtype), dtype))


def edge_index_of(subgraph: Subgraph) -> NDArray[np.int64]:
    """int64[2, e]: (source, destination) of every edge, sorted by destination."""
    edge_index = np.empty((2, len(subgraph.source)), np.int64)
    edge_index[0] = subgraph.source
    _set_targets(subgraph.indptr, edge_index[1])
    return edge_index


@kernel
def _set_targets(indptr: NDArray[np.int64], target: NDArray[np.int64]) -> None:
    """Set target[k] to the destination of edge k."""
    for i in range(len(indptr) - 1):
        target[indptr[i] : indptr[i + 1]] = i


def column_of(graph: Graph, subgraph: Subgraph | DeviceSubgraph | EdgeSample, name: str) -> AnyArray:
    """A column of the graph for sampled edges [e]: what was read for them, else looked up by slot."""
    return subgraph.columns[name] if name in subgraph.columns else looked_up(graph.columns[name], subgraph.slot)


def edge_ids_of(graph: Graph, subgraph: Subgraph | DeviceSubgraph | EdgeSample) -> NDArray[np.int64]:
    """int64[e]: the edges' positions in the input, which address edge features."""
    kept = EDGE_ID in graph.columns or EDGE_ID in subgraph.columns
    return np.asarray(column_of(graph, subgraph, EDGE_ID) if kept else subgraph.slot, np.int64)


def check_edge_ids(e_id: NDArray[np.int64], count: int) -> None:
    """Raise StoreError unless all of them are below `count`."""
    if len(e_id) and not 0 <= int(e_id.min()) <= int(e_id.max()) < count:
        wrong = e_id[(e_id < 0) | (e_id >= count)][0]
        raise StoreError(f"edge id {wrong} is none of {count} edges: the store is damaged; run `ooc verify` on it")


def with_edge_ids(graph: Graph, drawn: SampledBatch, count: int) -> SampledBatch:
    """The batch with its edge ids among its subgraph's columns. count: edge ids there are.

    Raises StoreError for others, which only a damaged store has.
    """
    subgraph = drawn.subgraph
    e_id = edge_ids_of(graph, subgraph)
    check_edge_ids(e_id, count)
    return replace(drawn, subgraph=replace(subgraph, columns={**subgraph.columns, EDGE_ID: e_id}))


def block_of(graph: Graph, subgraph: Subgraph | DeviceSubgraph, edge_index: Tensor, induced: bool = False) -> Block:
    """The block of the first layer, with the whole graph's degrees, self-loops and weights of its nodes and edges.

    induced: the subgraph has all edges between its nodes, and counts as a graph of its own: degrees and weights are its own.
    """
    weight = np.asarray(column_of(graph, subgraph, "weight"), np.float32) if "weight" in graph.columns else None
    if isinstance(subgraph, DeviceSubgraph):
        there = edge_index, subgraph.edge_indptr, weight
        return graph_block(graph, subgraph.node, sum(subgraph.num_nodes[:-1]), *there, degree=subgraph.degree)
    num_dst = len(subgraph.indptr) - 1
    block = graph_block(graph, subgraph.node, num_dst, edge_index, subgraph.indptr, weight)
    if subgraph.stands_for is not None:
        block = block._replace(stands_for=torch.from_numpy(subgraph.stands_for))
    if (share := subgraph.share()) is not None:
        block = block._replace(share=torch.from_numpy(share))
    if induced:
        block = block._replace(degree=torch.from_numpy(np.diff(subgraph.indptr)))
    if induced and weight is not None:
        source, target = edge_index.numpy()
        inner = np.bincount(target, np.where(source == target, 0, weight), minlength=len(subgraph.node))
        block = block._replace(weight_sum=torch.from_numpy(inner.astype(np.float32)))
    return block


def masks_of(nodes: Dataset | NodeSet) -> dict[str, Members]:
    """A batch's masks of the splits, by PyG's names: `train_mask` for "train"."""
    return {f"{name}_mask": nodes.members(name) for name in nodes.splits}


@dataclass(frozen=True)
class Collator:
    """Joins a loaded batch to a `Data` with the fields of PyG's NeighborLoader, and `blocks`.

    gather: how x is made, None where there are no features; weight_attr: a further name for the edge weights; edge_ids:
    whether to give `e_id`; edge_features: of a batch's edges, the first of which blocks have as `edge_attr`.
    """

    graph: Graph
    gather: Gather | None = None
    weight_attr: str | None = None
    edge_ids: bool = True
    induced: bool = False
    """see `block_of`"""
    masks: Mapping[str, Members] = field(default_factory=dict)
    """name of a field -> the nodes it is true for"""
    edge_features: tuple[EdgeFeature, ...] = ()
    values: Mapping[str, AnyArray] = field(default_factory=dict)
    """name of a field -> its value for every node, [N]: times"""
    edge_values: Mapping[str, str] = field(default_factory=dict)
    """name of a field -> the graph's column that it is of: times"""
    layers: int | None = None
    """layers that share the block of all nodes and edges; None: each hop has a prefix of it"""

    @property
    def columns(self) -> tuple[str, ...]:
        """The graph's columns of which a batch has its edges' entries."""
        ids = self.edge_ids or bool(self.edge_features)
        return tuple(name for name in (EDGE_ID, "weight") if name in self.graph.columns and (ids or name == "weight"))

    def needs_slots(self, there: Collection[str]) -> bool:
        """Whether a batch's slots are met again; there: the columns that come with it (`Subgraph.columns`)."""
        ids = (EDGE_ID,) if self.edge_ids or self.edge_features else ()
        return not {*self.columns, *ids, *self.edge_values.values()} <= {*there}

    def __call__(self, loaded: LoadedBatch, input_id: NDArray[np.int64], seed_time: AnyArray | None = None) -> Data:
        subgraph: Any = loaded.drawn.subgraph
        there: DeviceSubgraph | None = subgraph if isinstance(subgraph, DeviceSubgraph) else None
        edge_index = torch.from_numpy(edge_index_of(subgraph)) if there is None else there.edge_index
        first = block_of(self.graph, subgraph, edge_index, self.induced)
        features = [each.gather.tensor(found) for each, found in zip(self.edge_features, loaded.edge_features, strict=True)]
        if features:
            first = first._replace(edge_attr=features[0])
        data = Data(edge_index=edge_index, num_nodes=subgraph.size[0])
        if loaded.x is not None:
            assert self.gather is not None
            data.x = self.gather.tensor(loaded.x)
        if loaded.y is not None:
            data.y = torch.from_numpy(loaded.y)
        if first.weight is not None:
            data.edge_weight = first.weight
            if self.weight_attr is not None:
                data[self.weight_attr] = first.weight
        if first.share is not None:
            data.edge_norm = first.share
        if there is None and subgraph.score is not None:
            data.draw_score = torch.from_numpy(subgraph.score)
        for feature, values in zip(self.edge_features, features, strict=True):
            data[feature.name] = values
        data.n_id = torch.from_numpy(subgraph.node) if there is None else there.n_id
        if self.edge_ids:
            are_slots = there is not None and EDGE_ID not in {*self.graph.columns, *there.columns}
            data.e_id = subgraph.edge_slot if are_slots else torch.from_numpy(edge_ids_of(self.graph, subgraph))
        for name, members in self.masks.items():
            data[name] = torch.from_numpy(members.contains(subgraph.node))
        for name, values in self.values.items():
            data[name] = torch.from_numpy(values[subgraph.node])
        for name, column in self.edge_values.items():
            data[name] = torch.from_numpy(np.asarray(column_of(self.graph, subgraph, column)))
        if subgraph.tree is not None:
            data.batch = torch.from_numpy(subgraph.tree)
        if seed_time is not None:
            data.seed_time = torch.from_numpy(seed_time)
        data.num_sampled_nodes = list(subgraph.num_nodes)
        if self.layers is None:
            data.num_sampled_edges = list(subgraph.num_edges)
        data.input_id = torch.from_numpy(input_id)
        data.batch_size = len(input_id)
        whole = self.layers is not None
        data.blocks = [first] * (self.layers or 0) if whole else blocks_of(first, subgraph.num_nodes, subgraph.num_edges)
        if loaded.aggregated:
            data.blocks.insert(0, aggregated_block(first))
        return data

    @cached_property
    def edge_bytes(self) -> int:
        """Bytes of an edge's features in a batch, with its id where that is wanted for them alone."""
        return sum(each.edge_bytes for each in self.edge_features) + 8 * bool(self.edge_features and not self.edge_ids)

    def nbytes(self, num_nodes: int, num_edges: int, row_bytes: int) -> int:
        """Bytes of a batch, but for its subgraph's, from reading to the model; row_bytes: of a node's features and labels."""
        weighted = "weight" in self.graph.columns
        per_node = row_bytes + 8 + len(self.masks) + 8 * bool(len(self.graph.self_loops)) + 8 * weighted
        per_edge = 16 + 8 * self.edge_ids + 4 * weighted + self.edge_bytes
        return per_node * num_nodes + per_edge * num_edges


class BatchCollator(Protocol):
    """Makes the user's batch of a loaded one."""

    def needs_slots(self, there: Collection[str]) -> bool:
        """Whether a batch's slots are met again; there: the columns that come with it."""

    def __call__(self, loaded: LoadedBatch, input_id: NDArray[np.int64], seed_time: AnyArray | None = None) -> Any:
        """The batch. input_id: int64[b], PyG's `input_id` of the seeds; seed_time: [b], their times; None without times."""


@dataclass(frozen=True)
class CollateStage:
    """LoadedBatch -> the user's batch, through `transform`; with `pin` it is copied into page-locked memory."""

    collator: BatchCollator
    nodes: InputNodes | InputLinks
    transform: Callable[[Any], Any] | None = None
    pin: bool = False

    def data(self, loaded: LoadedBatch) -> Any:
        drawn = loaded.drawn
        time = None if isinstance(self.nodes, InputLinks) else self.nodes.times(drawn.position)
        batch = self.collator(loaded, self.nodes.input_id(drawn.position), time)
        if isinstance(self.nodes, InputLinks) and drawn.links is not None:
            self.nodes.add_to(batch, drawn.position, drawn.links, drawn.subgraph.num_nodes)
        return batch

    def collate(self, loaded: LoadedBatch) -> tuple[int, Any]:
        """(steps done with this batch, the batch)."""
        batch: Any = self.data(loaded)
        if self.transform is not None:
            batch = self.transform(batch)
        if self.pin:
            batch = pin(batch)
        return loaded.drawn.step + loaded.drawn.last, batch

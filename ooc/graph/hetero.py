"""A sampled subgraph of several node and edge types, and the blocks that a heterogeneous model's layers run on.

As in `ooc.graph.blocks`, the nodes of each type are in hop order and the edges of each type sorted by destination, so each
layer's blocks are prefixes of the same arrays. A subgraph of one node type and one edge type has the arrays of a `Subgraph`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.graph.blocks import Block, Subgraph, graph_block, narrow, trim
from ooc.stores.graph import Graph

EdgeKey = tuple[str, str, str]
"""An edge type as PyG writes it: (source type, name, target type)"""


@dataclass(frozen=True)
class EdgeSample:
    """The sampled edges of one type, sorted by destination."""

    indptr: NDArray[np.int64]
    """int64[d+1]: edges of each expanded node of the target type, in hop order"""
    source: NDArray[np.int64]
    """int64[e]: local node, of the source type, of each edge"""
    slot: NDArray[np.int64]
    """int64[e]: the edge's slot in the CSC of its type"""
    stands_for: NDArray[np.float32] | None = None
    """float32[e]: see `Block.stands_for`; None for uniform sampling"""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """columns of the type's graph read for these edges, [e] each, if the edges are on disk"""

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes, without `columns`."""
        arrays = (self.indptr, self.source, self.slot, self.stands_for)
        return sum(array.nbytes for array in arrays if array is not None)

    def packed(self, slots: bool) -> Self:
        """The edges in half of their memory; slots: whether those are needed again."""
        indptr, source, slot = (narrow(array) for array in (self.indptr, self.source, self.slot if slots else self.slot[:0]))
        return replace(self, indptr=indptr, source=source, slot=slot)

    def unpacked(self) -> Self:
        """What `packed` was called on, but for slots that nobody needs."""
        indptr, source, slot = (each.astype(np.int64) for each in (self.indptr, self.source, self.slot))
        return replace(self, indptr=indptr, source=source, slot=slot)

    def first(self, count: int) -> Self:
        """A copy of the first edges, so many; the destinations of the others have none."""
        if count == len(self.source):
            return self
        stands_for = None if self.stands_for is None else self.stands_for[:count].copy()
        columns = {name: column[:count].copy() for name, column in self.columns.items()}
        arrays = np.minimum(self.indptr, count), self.source[:count].copy(), self.slot[:count].copy()
        return type(self)(*arrays, stands_for, columns)

    def edge_index(self) -> NDArray[np.int64]:
        """int64[2, e]: (source, destination) of every edge, local ids of their own types."""
        edge_index = np.empty((2, len(self.source)), np.int64)
        edge_index[0] = self.source
        edge_index[1] = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        return edge_index


@dataclass(frozen=True)
class HeteroSubgraph:
    """A batch's sampled neighborhood by type, as numpy arrays, without features.

    Every node type and edge type of the graph is a key; a type that was not reached has empty arrays.

    >>> subgraph.node["paper"][: subgraph.num_nodes["paper"][0]]  # the seeds of this type, in the order given
    """

    node: Mapping[str, NDArray[np.int64]]
    """int64[n] by node type: row of each local node, in hop order, seeds first"""
    edges: Mapping[EdgeKey, EdgeSample]
    num_nodes: Mapping[str, tuple[int, ...]]
    """new nodes per hop, seeds first: L+1 numbers by node type"""
    num_edges: Mapping[EdgeKey, tuple[int, ...]]
    """edges per hop: L numbers by edge type"""
    tree: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """int64[n] by node type: the tree of each node, if seeds do not share nodes; else empty"""

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes, without columns of the edges."""
        nodes = sum(array.nbytes for array in (*self.node.values(), *self.tree.values()))
        return nodes + sum(edges.nbytes for edges in self.edges.values())

    @property
    def column_bytes(self) -> int:
        """Size of the edges' columns in bytes."""
        return sum(column.nbytes for edges in self.edges.values() for column in edges.columns.values())

    def packed(self, slots: bool) -> Self:
        """The subgraph in half of its memory; slots: whether those are needed again."""
        edges = {key: each.packed(slots) for key, each in self.edges.items()}
        node, tree = ({name: narrow(array) for name, array in arrays.items()} for arrays in (self.node, self.tree))
        return replace(self, node=node, tree=tree, edges=edges)

    def unpacked(self) -> Self:
        """What `packed` was called on, but for slots that nobody needs."""
        node, tree = ({name: array.astype(np.int64) for name, array in arrays.items()} for arrays in (self.node, self.tree))
        return replace(self, node=node, tree=tree, edges={key: each.unpacked() for key, each in self.edges.items()})


def without_last_hop_of(subgraph: HeteroSubgraph, types: Collection[str]) -> HeteroSubgraph:
    """Return a copy without the last hop's nodes of these types, and without the edges of that hop that begin at them.

    The counts of what is left out are 0, and all nodes that were expanded stay destinations.
    """
    hops = {name: _hops_of(name, counts, types) for name, counts in subgraph.num_nodes.items()}
    nodes = {name: sum(counts) for name, counts in hops.items()}
    per_hop = {key: _hops_of(key[0], counts, types) for key, counts in subgraph.num_edges.items()}
    return HeteroSubgraph(
        {name: node[: nodes[name]].copy() for name, node in subgraph.node.items()},
        {key: edges.first(sum(per_hop[key])) for key, edges in subgraph.edges.items()},
        hops,
        per_hop,
        {name: tree[: nodes[name]].copy() for name, tree in subgraph.tree.items()},
    )


def _hops_of(node_type: str, counts: tuple[int, ...], types: Collection[str]) -> tuple[int, ...]:
    """Counts per hop, without the last one's if the type is one of these."""
    return (*counts[:-1], 0) if node_type in types else counts


def only_type(found: HeteroSubgraph) -> Subgraph:
    """The subgraph of a graph of one node type and one edge type, as that of a homogeneous graph."""
    ((name, node),), ((key, edges),) = found.node.items(), found.edges.items()
    counts = found.num_nodes[name], found.num_edges[key]
    arrays = node, edges.indptr, edges.source, edges.slot
    return Subgraph(*arrays, *counts, edges.stands_for, edges.columns, found.tree.get(name))


class HeteroBlock(NamedTuple):
    """The bipartite graphs of one layer, which maps {type: rows} to {type: rows[:num_dst[type]]}.

    Destination row i of a type is source row i of that type. A NamedTuple, so that PyG's `HeteroData.to` moves it.
    """

    blocks: Mapping[EdgeKey, Block]
    """For each edge type its block: `num_src` rows of the source type in, `num_dst` rows of the target type out. What the whole
    graph says of nodes (degree, loops, weight_sum, loop_weight) is of the destinations, [num_dst]"""
    num_dst: Mapping[str, int]
    """rows out by node type"""
    neighbor: Mapping[EdgeKey, torch.Tensor] | None = None
    """float32[num_dst, f] of edge types whose sources' rows the loader has summed up for each destination (first-layer
    pre-aggregation): their blocks have no edges, and x has the rows of destinations only. None: no edge type has that"""


def hetero_block_of(
    graphs: Mapping[EdgeKey, Graph],
    subgraph: HeteroSubgraph,
    edge_index: Mapping[EdgeKey, torch.Tensor],
    weight: Mapping[EdgeKey, NDArray[np.float32]],
) -> HeteroBlock:
    """Return the first layer's block, with the whole graph's degrees, self-loops and weights of its nodes and edges.

    Args:
        graphs: The topology of each edge type.
        subgraph: The sampled batch.
        edge_index: int64[2, e] of each edge type, as `EdgeSample.edge_index` gives it.
        weight: float32[e] of each weighted edge type.

    Returns:
        The block of layer 0; `hetero_blocks_of` takes the other layers' from it.
    """
    blocks = {}
    for key, edges in subgraph.edges.items():
        source, _, target = key
        num_dst = len(edges.indptr) - 1
        own = subgraph.node[target][:num_dst]
        block = graph_block(graphs[key], own, num_dst, edge_index[key], edges.indptr, weight.get(key))
        stands_for = None if edges.stands_for is None else torch.from_numpy(edges.stands_for)
        blocks[key] = block._replace(num_src=len(subgraph.node[source]), stands_for=stands_for)
    return HeteroBlock(blocks, {name: sum(counts[:-1]) for name, counts in subgraph.num_nodes.items()})


def hetero_blocks_of(
    first: HeteroBlock, num_nodes: Mapping[str, tuple[int, ...]], num_edges: Mapping[EdgeKey, tuple[int, ...]]
) -> list[HeteroBlock]:
    """Return one block per layer, input side first, as prefixes of the first one; counts are as in `HeteroSubgraph`."""
    hops = max((len(counts) for counts in num_edges.values()), default=0)
    layers = []
    for depth in range(hops, 0, -1):
        size = {name: (sum(counts[: depth + 1]), sum(counts[:depth])) for name, counts in num_nodes.items()}
        blocks = {
            key: _trimmed(block, size[key[0]][0], size[key[2]][1], sum(num_edges[key][:depth]))
            for key, block in first.blocks.items()
        }
        layers.append(HeteroBlock(blocks, {name: num_dst for name, (_, num_dst) in size.items()}))
    return layers


def summed_block(block: HeteroBlock, neighbor: Mapping[EdgeKey, torch.Tensor]) -> HeteroBlock:
    """Return a first layer's block with the sums of these edge types in place of their edges."""
    blocks = dict(block.blocks)
    for key in neighbor:
        own = blocks[key]
        none = _trimmed(own, own.num_src, own.num_dst, 0)
        blocks[key] = none._replace(indptr=torch.zeros_like(own.indptr))
    return HeteroBlock(blocks, block.num_dst, neighbor)


def _trimmed(block: Block, num_src: int, num_dst: int, num_edges: int) -> Block:
    """`trim` of a block that knows its destinations only: arrays of nodes end with them."""
    return trim(block, num_dst, num_dst, num_edges)._replace(num_src=num_src)

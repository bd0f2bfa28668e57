"""A sampled subgraph, and the bipartite blocks that a model's layers run on.

Nodes are in hop order (seeds first) and edges sorted by destination, so each layer's block is a prefix of the same arrays:
layer l computes only the rows that layer l+1 needs (PyG's `trim_to_layer`, DGL's blocks; as in PyG's NeighborLoader, layers
share one sample per node).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.utils import index_sort
from torch_geometric.utils.sparse import index2ptr

from ooc.runtime.transfer import placed
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import StoreError
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel
from ooc.stores.prefetch import AHEAD, prefetch

EDGE_ATTR = "edge_attr"
"""the edge feature that batches have without being asked and models take, as in PyG"""
EDGE_ID = "edge_id"
"""the graph's column of edge ids"""


def narrow(array: NDArray[np.int64]) -> NDArray[Any]:
    """As int32 where all of it fits."""
    fits = len(array) == 0 or int(array.max()) < 2**31
    return array.astype(np.int32) if fits else array


@dataclass(frozen=True)
class Subgraph:
    """A batch's sampled neighborhood as numpy arrays, without features.

    The first `num_nodes[0]` nodes are the seeds in the order given. `indptr` covers the expanded nodes, all hops but the last:
    the sampled in-edges of local node i are edges `indptr[i]:indptr[i+1]`.
    """

    node: NDArray[np.int64]
    """int64[n]: node id (store row) of each local node, in hop order"""
    indptr: NDArray[np.int64]
    """int64[d+1]: edges of each expanded local node, d = sum(num_nodes[:-1])"""
    source: NDArray[np.int64]
    """int64[e]: local source node of each edge"""
    slot: NDArray[np.int64]
    """int64[e]: the edge's slot in the graph's CSC, which addresses weight, time and edge_id"""
    num_nodes: tuple[int, ...]
    """new nodes per hop, seeds first: L+1 numbers"""
    num_edges: tuple[int, ...]
    """edges per hop: L numbers"""
    stands_for: NDArray[np.float32] | None = None
    """float32[e]: see `Block.stands_for`; None for uniform sampling"""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """graph columns read for these edges, [e] each, if the edges are on disk"""
    tree: NDArray[np.int64] | None = None
    """int64[n]: the tree of each node, if seeds do not share nodes; else None"""
    unequal: bool = False
    """whether the edges of a node were drawn with unequal probabilities, so that means over them have to be weighted"""
    in_edges: NDArray[np.int64] | None = None
    """int64[d]: in-edges of each expanded node that might have been drawn, by which means divide what its drawn ones stand for;
    None: by the sum of that"""
    counts_for: NDArray[np.float64] | None = None
    """float64[e]: what an edge counts for in its destination's mean, where that is weighted: stands_for times the weight that
    edges are drawn by; None: stands_for"""
    score: NDArray[np.float64] | None = None
    """see `ooc.sampling.learned.Policy.score`; None where nothing was drawn by a policy"""

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of nodes and edges."""
        return len(self.node), len(self.source)

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes, `share` among them, without `columns`."""
        factors = (self.stands_for, self.counts_for)
        arrays = (self.node, self.indptr, self.source, self.slot, *factors, self.tree, self.in_edges)
        return sum(array.nbytes for array in arrays if array is not None) + 4 * len(self.source) * self.unequal

    def share(self) -> NDArray[np.float32] | None:
        """float32[e]: see `Block.share`; what an edge counts for, divided by what all of its destination count for or, where
        that is known, by how many there are."""
        if self.stands_for is None or not self.unequal:
            return None
        target = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        counts = self.stands_for if self.counts_for is None else self.counts_for
        total = np.bincount(target, counts) if self.in_edges is None else self.in_edges
        total = np.where(total > 0, total, 1)  # of edges that all have weight 0
        return (counts / total[target]).astype(np.float32)

    @property
    def column_bytes(self) -> int:
        """Size of `columns` in bytes."""
        return sum(each.nbytes for each in self.columns.values())


class Block(NamedTuple):
    """The bipartite graph of one layer: `num_src` source rows in, `num_dst` destination rows out.

    Destination row i is source row i. A NamedTuple, so that PyG's `Data.to` moves it. PyG's convolutions accept `edge_index`
    with `size=(num_src, num_dst)`.
    """

    edge_index: Tensor
    """int64[2, e]: (source, destination), sorted by destination"""
    indptr: Tensor
    """int64[num_dst+1]: the edges as rows of a CSR matrix [num_dst, num_src]"""
    num_src: int
    num_dst: int
    degree: Tensor
    """int64[num_src]: in-degree in the whole graph, including self-loops"""
    loops: Tensor | None
    """int64[num_src]: self-loops in the whole graph; None if the graph has none"""
    weight: Tensor | None
    """float32[e]: edge weights; None for an unweighted graph"""
    weight_sum: Tensor | None
    """float32[num_src]: sum of in-weights in the whole graph without self-loops; None for an unweighted graph"""
    loop_weight: Tensor | None = None
    """float32[num_src]: weight of each node's last self-loop, 1 without one; None without weights or self-loops in the graph"""
    stands_for: Tensor | None = None
    """float32[e]: edges of the whole graph each sampled edge represents, 1 / (expected occurrences in the sample). None for
    uniform sampling, where it is degree / (sampled edges) of the destination"""
    share: Tensor | None = None
    """float32[e]: weight of each edge in its destination's mean (GraphSAINT and layer-wise sampling: stands_for / degree; LABOR
    with importance: stands_for, times the weight that edges are drawn by, / its sum at the destination); None if all are
    equal"""
    edge_attr: Tensor | None = None
    """[e, *feature shape]: features of the edges; None where the batch has none"""
    shared: Any = None
    """`ooc.graph.shared_edges.SharedEdges` of layers that run on this one block; None where each layer has its own"""


def trim(block: Block, num_src: int, num_dst: int, num_edges: int) -> Block:
    """Return the prefix of `block` with the given numbers of sources, destinations and edges: the next layer's block."""
    return Block(
        block.edge_index[:, :num_edges],
        block.indptr[: num_dst + 1],
        num_src,
        num_dst,
        block.degree[:num_src],
        None if block.loops is None else block.loops[:num_src],
        None if block.weight is None else block.weight[:num_edges],
        None if block.weight_sum is None else block.weight_sum[:num_src],
        None if block.loop_weight is None else block.loop_weight[:num_src],
        None if block.stands_for is None else block.stands_for[:num_edges],
        None if block.share is None else block.share[:num_edges],
        None if block.edge_attr is None else block.edge_attr[:num_edges],
    )


def squared(block: Block) -> Block:
    """Return the block with all sources as destinations, of which those that were none have no in-edges."""
    if block.num_dst == block.num_src:
        return block
    more = block.indptr[-1:].expand(block.num_src - block.num_dst)
    return block._replace(indptr=torch.cat([block.indptr, more]), num_dst=block.num_src)


def aggregated_block(following: Block) -> Block:
    """Return a first layer's block without edges, for `FirstLayerAggregates`; `following` is the second layer's block."""
    none = trim(following, following.num_src, following.num_dst, 0)
    indptr = following.indptr.new_zeros(following.num_src + 1)
    return none._replace(indptr=indptr, num_dst=following.num_src)


def blocks_of(first: Block, num_nodes: tuple[int, ...], num_edges: tuple[int, ...]) -> list[Block]:
    """Return one block per layer, input side first, as prefixes of the first one; counts are per hop as in `Subgraph`."""
    hops = len(num_edges)
    return [
        trim(first, sum(num_nodes[: hops - layer + 1]), sum(num_nodes[: hops - layer]), sum(num_edges[: hops - layer]))
        for layer in range(hops)
    ]


def own_block(graph: Graph, first: int, stop: int, device: torch.device) -> Block:
    """Destinations first:stop without edges, with what the whole graph says of them: beside the sums of all their neighbors."""
    edge_index, indptr = np.empty((2, 0), np.int64), np.zeros(stop - first + 1, np.int64)
    weight = None if graph.weight_sum is None else np.empty(0, np.float32)
    return graph_block(graph, np.arange(first, stop), stop - first, edge_index, indptr, weight, device)


def gathered_block(
    graph: Graph, first: int, stop: int, source: Ids, weight: NDArray[np.float32] | None, device: torch.device
) -> tuple[Ids, Block]:
    """(nodes int64[n], the block of destinations first:stop with all their in-edges). The destinations come first, then the
    other sources, ascending. source: int64[e], of their slots; weight: float32[e] or None."""
    count = stop - first
    others = np.unique(source[(source < first) | (source >= stop)])
    inside = (source >= first) & (source < stop)
    local = np.where(inside, source - first, np.searchsorted(others, source) + count)
    indptr = np.asarray(graph.indptr[first : stop + 1]) - graph.indptr[first]
    edge_index = np.stack([local, np.repeat(np.arange(count), np.diff(indptr))])
    node = np.concatenate([np.arange(first, stop), others])
    return node, graph_block(graph, node, count, edge_index, indptr, weight, device)


def graph_block(
    graph: Graph,
    node: Ids,
    num_dst: int,
    edge_index: Any,
    indptr: Any,
    weight: NDArray[np.float32] | None,
    device: torch.device | None = None,
    degree: Tensor | None = None,
) -> Block:
    """The block of these edges (int64[2, e], local ids), with what the whole graph says of its nodes (int64[n]). Tensors are
    taken as they are. degree: int64[n], of the nodes, if it is known."""

    def tensor(array: Any) -> torch.Tensor:
        return array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))

    loop, loops = graph.last_loop_weight(node), np.empty(len(node) if len(graph.self_loops) else 0, np.int64)
    if degree is None:
        degrees = np.empty(len(node), np.int64)
        unknown = set_degrees(graph.indptr, node, degrees)
        if unknown >= 0:
            raise StoreError(f"node {node[unknown]} is not in the graph: the store is damaged; run `ooc verify` on it")
        degree = torch.from_numpy(degrees)
    count_loops(graph.self_loops, node, loops)
    block = Block(
        tensor(edge_index),
        tensor(indptr),
        len(node),
        num_dst,
        degree,
        torch.from_numpy(loops) if len(graph.self_loops) else None,
        None if weight is None else tensor(weight),
        None if graph.weight_sum is None else tensor(np.asarray(graph.weight_sum[node], np.float32)),
        None if loop is None else tensor(loop),
    )
    return block if device is None else placed(block, device)


@kernel
def set_degrees(indptr: NDArray[np.int64], node: Ids, degree: NDArray[np.int64]) -> int:
    """Set degree[i] to the in-edges of node[i]; see `Graph.degree`. Returns the first i whose node the graph lacks, or -1."""
    for i in range(len(node)):
        if i + AHEAD < len(node):
            prefetch(indptr, node[i + AHEAD])
        if not 0 <= node[i] < len(indptr) - 1:
            return i
        degree[i] = indptr[node[i] + 1] - indptr[node[i]]
    return -1


@kernel
def count_loops(self_loops: NDArray[np.int64], node: Ids, loops: NDArray[np.int64]) -> None:
    """Set loops[i] to how often node[i] is in the ascending `self_loops`, for each i below len(loops); see `Graph.loops`."""
    for i in range(len(loops)):
        first = stop = np.searchsorted(self_loops, node[i])
        while stop < len(self_loops) and self_loops[stop] == node[i]:
            stop += 1
        loops[i] = stop - first


def sorted_by_source(source: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sort edges by their source, those of a source in their order.

    A counting sort on CPU, which takes a thirtieth of torch's time for the edges of a batch.

    Args:
        source: Source of every edge, int64[e], below `size`.
        size: Number of sources.

    Returns:
        The edges in that order, int64[e], and the first of every source in it, int64[size + 1].

    >>> sorted_by_source(torch.tensor([1, 0, 1]), 2)
    (tensor([1, 0, 2]), tensor([0, 1, 3]))
    """
    if source.device.type != "cpu" or torch.compiler.is_compiling():
        ascending, order = index_sort(source, max_value=size, stable=True)
        if torch.compiler.is_compiling():  # index2ptr would fix the size and recompile for every batch
            return order, torch.searchsorted(ascending, torch.arange(size + 1, device=source.device))
        return order, index2ptr(ascending, size)
    order, indptr = torch.empty_like(source), torch.zeros(size + 1, dtype=torch.int64)
    _sort_by_source(source.numpy(), order.numpy(), indptr.numpy())
    return order, indptr


@kernel
def _sort_by_source(source: NDArray[np.int64], order: NDArray[np.int64], indptr: NDArray[np.int64]) -> None:
    """Kernel of `sorted_by_source`; indptr: zeros."""
    for k in range(len(source)):
        indptr[source[k] + 1] += 1
    for v in range(len(indptr) - 1):
        indptr[v + 1] += indptr[v]
    put = indptr[:-1].copy()
    for k in range(len(source)):
        order[put[source[k]]] = k
        put[source[k]] += 1

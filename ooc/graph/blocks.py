"""What flows through the pipeline: a sampled subgraph, and the bipartite blocks that a model's layers run on.

A subgraph's nodes stand in hop order (seeds first) and its edges are sorted by destination, so every layer's block is a
prefix of the same arrays: layer l of L computes only the rows that layer l+1 needs. (PyG calls the same thing
`trim_to_layer`; blocks as in DGL, but sharing one sample per node as PyG's NeighborLoader does.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Subgraph:
    """One batch's sampled neighborhood, numpy only; it holds no features.

    The first `num_nodes[0]` nodes are the seeds in the order given. `indptr` covers the nodes that were expanded, that is
    all hops but the last: local node i's sampled in-edges are edges `indptr[i]:indptr[i+1]`.
    """

    node: NDArray[np.int64]
    """int64[n]: node id (store row) of each local node, in hop order"""
    indptr: NDArray[np.int64]
    """int64[d+1]: edges of each expanded local node, d = sum(num_nodes[:-1])"""
    source: NDArray[np.int64]
    """int64[e]: local source node of each edge"""
    slot: NDArray[np.int64]
    """int64[e]: the edge's slot in the graph's CSC (addresses weight, time and edge_id alike)"""
    num_nodes: tuple[int, ...]
    """new nodes per hop, hop 0 (the seeds) first: L+1 numbers"""
    num_edges: tuple[int, ...]
    """edges per hop: L numbers"""
    stands_for: NDArray[np.float32] | None = None
    """float32[e]: see `Block.stands_for`; None for uniform draws"""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """the graph's columns that were read for these edges ([e] each), where the edges stay on disk"""

    @property
    def nbytes(self) -> int:
        """Bytes the arrays hold, those of `columns` aside."""
        arrays = (self.node, self.indptr, self.source, self.slot, self.stands_for)
        return sum(array.nbytes for array in arrays if array is not None)


class Sampler(Protocol):
    """Seeds and a key -> a subgraph, the same for the same two; reads no features."""

    def sample(self, seeds: NDArray[np.int64], key: int) -> Subgraph:
        """Raises BudgetError where the batch does not fit."""


class Block(NamedTuple):
    """The bipartite graph one layer computes on: `num_src` source rows in, `num_dst` destination rows out.

    Destination row i is source row i (destinations are a prefix of the sources). A NamedTuple, so that PyG's `Data.to`
    moves it. `edge_index` is what PyG's convolutions take, with `size=(num_src, num_dst)`.
    """

    edge_index: Tensor
    """int64[2, e]: (source, destination), sorted by destination"""
    indptr: Tensor
    """int64[num_dst+1]: the same edges as rows of a CSR matrix [num_dst, num_src]"""
    num_src: int
    num_dst: int
    degree: Tensor
    """int64[num_src]: in-degree in the whole graph, self-loops included"""
    loops: Tensor | None
    """int64[num_src]: self-loops in the whole graph, None where the graph has none"""
    weight: Tensor | None
    """float32[e]: edge weights, None for an unweighted graph"""
    weight_sum: Tensor | None
    """float32[num_src]: sum of the in-weights in the whole graph without self-loops, None for an unweighted graph"""
    loop_weight: Tensor | None = None
    """float32[num_src]: weight of each node's last self-loop in the whole graph, 1 where it has none; None for an unweighted
    graph and for one without self-loops"""
    stands_for: Tensor | None = None
    """float32[e]: how many edges of the whole graph each sampled edge stands for: 1 / (times it was expected in the sample),
    1 where no edge was left out. None for uniform sampling, where it is degree / (sampled edges) of the destination"""
    share: Tensor | None = None
    """float32[e]: what each edge counts for in the mean of its destination's neighbors, where sampled edges differ in that
    (GraphSAINT: stands_for / degree); None where they count alike"""


def trim(block: Block, num_src: int, num_dst: int, num_edges: int) -> Block:
    """The prefix of `block` with so many sources, destinations and edges: the next layer's block."""
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
    )


def aggregated_block(following: Block) -> Block:
    """The block of a first layer whose sums are made already (`ooc.graph.aggregation`): no edges, each source its own
    destination.

    following: the second layer's block, whose sources are the first's destinations.
    """
    none = trim(following, following.num_src, following.num_dst, 0)
    indptr = following.indptr.new_zeros(following.num_src + 1)
    return none._replace(indptr=indptr, num_dst=following.num_src)


def blocks_of(first: Block, num_nodes: tuple[int, ...], num_edges: tuple[int, ...]) -> list[Block]:
    """One block per layer, input side first, as prefixes of the first (largest) one.

    num_nodes, num_edges: per hop, as in `Subgraph`.
    """
    hops = len(num_edges)
    return [
        trim(first, sum(num_nodes[: hops - layer + 1]), sum(num_nodes[: hops - layer]), sum(num_edges[: hops - layer]))
        for layer in range(hops)
    ]

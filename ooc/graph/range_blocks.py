"""The blocks that layers run on in a pass over all nodes: of destinations whose sums are made, or with all their in-edges."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.graph.blocks import Block
from stores.graph import Graph

Ints = NDArray[np.int64]


def own_block(graph: Graph, first: int, stop: int, device: torch.device) -> Block:
    """Destinations first:stop without edges, with what the whole graph says of them: beside the sums of all their neighbors."""
    edge_index, indptr = np.empty((2, 0), np.int64), np.zeros(stop - first + 1, np.int64)
    weight = None if graph.weight_sum is None else np.empty(0, np.float32)
    return graph_block(graph, np.arange(first, stop), stop - first, edge_index, indptr, weight, device)


def gathered_block(
    graph: Graph, first: int, stop: int, source: Ints, weight: NDArray[np.float32] | None, device: torch.device
) -> tuple[Ints, Block]:
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
    node: Ints,
    num_dst: int,
    edge_index: Any,
    indptr: Ints,
    weight: NDArray[np.float32] | None,
    device: torch.device | None = None,
) -> Block:
    """The block of these edges (int64[2, e], local ids), with what the whole graph says of its nodes (int64[n])."""

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    loop = graph.last_loop_weight(node)
    return Block(
        edge_index if isinstance(edge_index, torch.Tensor) else tensor(edge_index),
        tensor(indptr),
        len(node),
        num_dst,
        tensor(graph.degree(node)),
        tensor(graph.loops(node)) if len(graph.self_loops) else None,
        None if weight is None else tensor(weight),
        None if graph.weight_sum is None else tensor(np.asarray(graph.weight_sum[node], np.float32)),
        None if loop is None else tensor(loop),
    )

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
    count = stop - first
    indptr = np.zeros(count + 1, np.int64)
    edges = np.empty((2, 0), np.int64), np.empty(0, np.float32)
    return _block(graph, np.arange(first, stop), count, edges, indptr, device)


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
    held = np.empty(0, np.float32) if weight is None else weight
    return node, _block(graph, node, count, (edge_index, held), indptr, device)


def _block(graph: Graph, node: Ints, num_dst: int, edges: tuple[Any, Any], indptr: Ints, device: torch.device) -> Block:
    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    weighted = graph.weight_sum is not None
    loop = graph.last_loop_weight(node)
    return Block(
        tensor(edges[0]),
        tensor(indptr),
        len(node),
        num_dst,
        tensor(graph.degree(node)),
        tensor(graph.loops(node)) if len(graph.self_loops) else None,
        tensor(edges[1]) if weighted else None,
        tensor(np.asarray(graph.weight_sum[node], np.float32)) if graph.weight_sum is not None else None,
        None if loop is None else tensor(loop),
    )

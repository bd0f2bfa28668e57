"""PURE: which nodes each process of several computes: contiguous ranges with as many nodes and edges as each other."""

from itertools import pairwise
from math import lcm

import numpy as np
from numpy.typing import NDArray

from ooc.layerwise import pass_plan
from ooc.stores.graph import Graph
from ooc.stores.io.pages import PAGE_BYTES

NodeRange = tuple[int, int]
"""(first node, one past the last)"""


def node_ranges(graph: Graph, size: int) -> list[NodeRange]:
    """Cut the nodes into ranges, one a rank, in their order.

    They begin where a pass may begin (`pass_plan.cell_rows`) and at a page of any file of rows, so that no two ranks write the
    same page. Work is counted as half by nodes, half by in-edges. Ranks beyond what a small graph has ranges for have none.

    Args:
        graph: The graph.
        size: How many ranks there are.

    Returns:
        `size` ranges.

    >>> node_ranges(graph, 2)
    [(0, 49152), (49152, 100000)]
    """
    if size == 1:
        return [(0, graph.num_nodes)]
    unit = lcm(pass_plan.cell_rows_of(graph.num_nodes), PAGE_BYTES)
    border = np.minimum(np.arange(0, graph.num_nodes + unit, unit), graph.num_nodes)
    return _cut(border, np.asarray(graph.indptr[border]), size)


def even_ranges(count: int, unit: int, size: int) -> list[NodeRange]:
    """Cut `count` nodes into ranges of equal lengths, one a rank, which begin at multiples of `unit`.

    >>> even_ranges(100, 10, 3)
    [(0, 40), (40, 70), (70, 100)]
    """
    units = -(-count // unit)
    cuts = [min(count, -(-units * rank // size) * unit) for rank in range(size + 1)]
    return list(pairwise(cuts))


def _cut(border: NDArray[np.int64], edges: NDArray[np.int64], size: int) -> list[NodeRange]:
    """border: where ranges may begin, from 0 to the number of nodes; edges: how many in-edges stand before each."""
    done = border / max(1, border[-1]) + edges / max(1, edges[-1])
    at = np.searchsorted(done, np.arange(1, size) * done[-1] / size)
    below = np.maximum(at - 1, 0)
    nearest = np.where(done[at] + done[below] > 2 * np.arange(1, size) * done[-1] / size, below, at)
    cuts = [0, *border[nearest].tolist(), int(border[-1])]
    return list(pairwise(cuts))

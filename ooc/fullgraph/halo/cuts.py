"""PURE: which nodes each rank computes, one contiguous range each."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
NODE_EDGES = 8
"""what the rows of a node cost, in edges that are added up"""


def balanced_cuts(indptr: Ints, count: int) -> Ints:
    """Cut the nodes into `count` ranges that cost about the same: rows that are computed, and edges that are added up.

    Args:
        indptr: int64[N + 1], in-edges of the nodes.
        count: Ranges, at most N.

    Returns:
        int64[count + 1], ascending from 0 to N: range r is nodes found[r]:found[r + 1], one at least.

    >>> balanced_cuts(np.array([0, 0, 40, 40, 40]), 2)
    array([0, 2, 4])
    """
    nodes, total = len(indptr) - 1, int(indptr[-1]) + NODE_EDGES * (len(indptr) - 1)
    found = np.zeros(count + 1, np.int64)
    found[count] = nodes
    for rank in range(1, count):
        low, high = int(found[rank - 1]) + 1, nodes - (count - rank)
        wanted = total * rank // count
        while low < high:  # the first node up to which there is as much as is wanted, or half a node more
            middle = (low + high) // 2
            low, high = (middle + 1, high) if _cost(indptr, middle) < wanted else (low, middle)
        if low - 1 > found[rank - 1] and wanted - _cost(indptr, low - 1) < _cost(indptr, low) - wanted:
            low -= 1
        found[rank] = low
    return found


def _cost(indptr: Ints, node: int) -> int:
    """Of the nodes before one."""
    return int(indptr[node]) + NODE_EDGES * node

"""The hash table by which samplers number nodes."""

import threading

import numpy as np

from ooc.sampling import kernels
from ooc.stores.arrays.rows import Ids

TABLE_KEPT = 32 * 2**20
"""bytes of the largest hash table a thread keeps for its next batch"""
STAMPS = 1 << (63 - kernels.LOCAL_BITS)
"""stamps of a table, after which it is cleared"""
_LEAST = 2**10


def table_capacity(num_nodes: int) -> int:
    """Entries of a hash table for `num_nodes` nodes: a power of two, at most three quarters full."""
    return max(_LEAST, 1 << (num_nodes * 4 // 3).bit_length())


def table_bytes(num_nodes: int) -> int:
    """Bytes of that table, and of the one before it while it grows to this size."""
    return 24 * table_capacity(num_nodes)


class Table(threading.local):
    """A hash table from node id to local id, one for each thread that uses it; see `kernels.relabel` for its layout."""

    def __init__(self) -> None:
        self.entries = np.zeros((_LEAST, 2), np.int64)
        self.stamp = 0

    def reserve(self, num_nodes: int, node: Ids, size: int) -> None:
        """Grow to `num_nodes` nodes; `node[:size]` are in the table."""
        capacity = table_capacity(num_nodes)
        if capacity > len(self.entries):
            self.entries = np.zeros((capacity, 2), np.int64)
            kernels.insert(self.entries, self.stamp, node, size)

    def refill(self, num_nodes: int, node: Ids, size: int) -> None:
        """Replace the contents by `node[:size]`, with capacity for `num_nodes`; a new stamp invalidates every entry."""
        self.stamp += 1
        if self.stamp == STAMPS:
            self.entries[:] = 0
            self.stamp = 1
        self.reserve(num_nodes, node, 0)
        kernels.insert(self.entries, self.stamp, node, size)

    def trim(self, kept: int = TABLE_KEPT) -> None:
        """Free a table that is too large to keep."""
        if self.entries.nbytes > kept:
            self.entries = np.zeros((_LEAST, 2), np.int64)

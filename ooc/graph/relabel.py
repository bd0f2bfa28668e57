"""`RelabelTable`: numbers the distinct nodes of many batches in order of first occurrence."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.jit import kernel
from ooc.stores.prefetch import AHEAD, prefetch

_MIN_CAPACITY = 2**10


class RelabelTable:
    """A hash table from node ids to numbers in order of first occurrence; grows beyond `expected` nodes.

    >>> table.add(np.array([7, 3, 7]))
    array([0, 1, 0], dtype=int32)
    """

    def __init__(self, expected: int = 0) -> None:
        self.size = 0
        self._node = np.empty(expected, np.int64)
        self._table = np.zeros(max(_MIN_CAPACITY, _capacity(expected)), np.int32)  # number + 1 of a node, 0 where empty

    @property
    def nbytes(self) -> int:
        return self._node.nbytes + self._table.nbytes

    @staticmethod
    def most_bytes(nodes: int) -> int:
        """Size in bytes at most of a table of so many nodes, however they are added."""
        return 8 * (nodes * 5 // 4) + 4 * max(_MIN_CAPACITY, _capacity(nodes))

    def add(self, node: NDArray[Any], number: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the numbers of `node` (int32|int64[n], may repeat) as int32[n] or in `number`; new ones get the next."""
        needed = self.size + len(node)
        if needed > len(self._node):
            grown = np.empty(max(needed, self.size * 5 // 4), np.int64)
            grown[: self.size] = self._node[: self.size]
            self._node = grown
        if needed * 4 > len(self._table) * 3:
            self._table = np.zeros(_capacity(needed), np.int32)
            _number(self._table, self._node, 0, self._node[: self.size].copy(), np.empty(self.size, np.int32))
        number = np.empty(len(node), np.int32) if number is None else number
        self.size = int(_number(self._table, self._node, self.size, node, number))
        return number

    def find(self, node: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the numbers of `node` (int64[n]) as int32[n], -1 for unknown nodes."""
        number = np.empty(len(node), np.int32)
        _find(self._table, self._node, node, number)
        return number

    def nodes(self) -> NDArray[np.int64]:
        """Return the node of each number, int64[size]."""
        return self._node[: self.size].copy()

    def ascending(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the first `size` nodes in ascending order, int64[size], and each number's rank, int32[size]."""
        order = np.argsort(self._node[:size])
        rank = np.empty(size, np.int32)
        rank[order] = np.arange(size, dtype=np.int32)
        return self._node[order], rank


def _capacity(nodes: int) -> int:
    """Capacity of a table that is at most three quarters full with so many nodes."""
    return 1 << (nodes * 4 // 3).bit_length()


@kernel
def _bits(table: NDArray[np.int32]) -> int:
    """log2 of the table's length."""
    bits = 0
    while (1 << bits) < len(table):
        bits += 1
    return bits


@kernel
def _home(bits: int, node_id: int) -> np.int64:
    """Home position of a node (Fibonacci hashing: the high bits of the product)."""
    return np.int64((np.uint64(node_id) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - bits))


@kernel
def _place(table: NDArray[np.int32], node: NDArray[np.int64], bits: int, node_id: int) -> np.int64:
    """Position of a node, or the empty position where it belongs (linear probing)."""
    at = _home(bits, node_id)
    while table[at] != 0 and node[table[at] - 1] != node_id:
        at = (at + 1) & (len(table) - 1)
    return at


@kernel
def _number(table: NDArray[np.int32], node: NDArray[np.int64], size: int, ids: NDArray[Any], number: NDArray[Any]) -> int:
    """Look up or append ids; fills `number` and returns the new size."""
    bits = _bits(table)
    for i in range(len(ids)):
        if i + AHEAD < len(ids):
            prefetch(table, _home(bits, ids[i + AHEAD]))
        at = _place(table, node, bits, ids[i])
        if table[at] == 0:
            node[size] = ids[i]
            size += 1
            table[at] = size
        number[i] = table[at] - 1
    return size


@kernel
def _find(table: NDArray[np.int32], node: NDArray[np.int64], ids: NDArray[np.int64], number: NDArray[np.int32]) -> None:
    """Look up ids; fills `number`, -1 for unknown ones."""
    bits = _bits(table)
    for i in range(len(ids)):
        number[i] = table[_place(table, node, bits, ids[i])] - 1


@kernel
def by_last_use(last: NDArray[np.int32], evicted: NDArray[np.int32], row: NDArray[np.int32], first: NDArray[np.int64]) -> None:
    """Group evicted rows (evicted[i] >= 0) by their last batch: row[first[k]:first[k + 1]] are evicted after batch k.

    A counting sort; last, evicted: int32[u], row: int32 output, first: int64[batches + 1], zeros.
    """
    for i in range(len(last)):
        if evicted[i] >= 0:
            first[last[i] + 1] += 1
    for k in range(1, len(first)):
        first[k] += first[k - 1]
    fill = first[:-1].copy()
    for i in range(len(last)):
        if evicted[i] >= 0:
            row[fill[last[i]]] = i
            fill[last[i]] += 1

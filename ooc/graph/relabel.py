"""`RelabelTable`: the distinct nodes of many batches, numbered as they come up."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stores.jit import kernel
from stores.prefetch import AHEAD, prefetch

_TABLE_LEAST = 2**10


class RelabelTable:
    """Node ids of several batches, each once and numbered as it first came up: a hash table that grows.

    >>> union = RelabelTable()
    >>> union.add(np.array([7, 3])), union.add(np.array([9, 7])), union.size
    (array([0, 1], dtype=int32), array([2, 0], dtype=int32), 3)
    """

    def __init__(self, expected: int = 0) -> None:
        """expected: nodes there may be; with more it grows."""
        self.size = 0
        self._node = np.empty(expected, np.int64)
        self._table = np.zeros(max(_TABLE_LEAST, _places(expected)), np.int32)  # number + 1 of a node, 0 where empty

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds."""
        return self._node.nbytes + self._table.nbytes

    def add(self, node: NDArray[Any], number: NDArray[Any] | None = None) -> NDArray[Any]:
        """The numbers of `node` (int32|int64[n], duplicates allowed), int32[n], or in `number` (int32|int64[n]) where given.
        Nodes not met before get the next ones."""
        most = self.size + len(node)
        if most > len(self._node):
            grown = np.empty(max(most, self.size * 5 // 4), np.int64)
            grown[: self.size] = self._node[: self.size]
            self._node = grown
        if most * 4 > len(self._table) * 3:
            self._table = np.zeros(_places(most), np.int32)
            _number(self._table, self._node, 0, self._node[: self.size].copy(), np.empty(self.size, np.int32))
        number = np.empty(len(node), np.int32) if number is None else number
        self.size = int(_number(self._table, self._node, self.size, node, number))
        return number

    def find(self, node: NDArray[np.int64]) -> NDArray[np.int32]:
        """The numbers of `node` (int64[n]): int32[n], -1 for those not met."""
        number = np.empty(len(node), np.int32)
        _find(self._table, self._node, node, number)
        return number

    def nodes(self) -> NDArray[np.int64]:
        """int64[size]: the node of each number."""
        return self._node[: self.size].copy()

    def ascending(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(int64[size], int32[size]): the first `size` nodes in ascending order, and where in it each number's node stands."""
        order = np.argsort(self._node[:size])
        rank = np.empty(size, np.int32)
        rank[order] = np.arange(size, dtype=np.int32)
        return self._node[order], rank


def _places(nodes: int) -> int:
    """Of a table that so many fill to three quarters at most."""
    return 1 << (nodes * 4 // 3).bit_length()


@kernel
def _bits(table: NDArray[np.int32]) -> int:
    """Of a number below the table's length."""
    bits = 0
    while (1 << bits) < len(table):
        bits += 1
    return bits


@kernel
def _home(bits: int, wanted: int) -> np.int64:
    """Where a node would stand in an empty table."""
    return np.int64((np.uint64(wanted) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - bits))


@kernel
def _place(table: NDArray[np.int32], node: NDArray[np.int64], bits: int, wanted: int) -> np.int64:
    """Where a node stands in the table, or the empty place where it would.

    Linear probing over a power of two, with Fibonacci hashing (the product's high bits).
    """
    at = _home(bits, wanted)
    while table[at] != 0 and node[table[at] - 1] != wanted:
        at = (at + 1) & (len(table) - 1)
    return at


@kernel
def _number(table: NDArray[np.int32], node: NDArray[np.int64], size: int, ids: NDArray[Any], number: NDArray[Any]) -> int:
    """number[i]: where ids[i] stands in node[:size], behind which it is put where it is not there. Returns the new size."""
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
    """number[i]: where ids[i] stands in `node`, or -1."""
    bits = _bits(table)
    for i in range(len(ids)):
        number[i] = table[_place(table, node, bits, ids[i])] - 1


@kernel
def by_last_use(last: NDArray[np.int32], evicted: NDArray[np.int32], row: NDArray[np.int32], first: NDArray[np.int64]) -> None:
    """The rows to give up after batch k: row[first[k]:first[k + 1]] (a counting sort).

    last: int32[u], the last batch that uses a row; evicted: int32[u], >= 0 for rows to give up. row: int32[that many];
    first: int64[batches + 1], zeros.
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

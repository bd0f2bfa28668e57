"""PURE: which of the first layer's aggregates several batches of a shared scan have in common.

Where all neighbors are taken, or LABOR draws alike for several batches, a node that is a destination in more than one of them
has the same neighbors in each, so its aggregate is made once, and batches copy it. Aggregates are compared by what they add up,
whatever sampler they come from.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats
from ooc.graph.relabel import RelabelTable
from ooc.runtime.keyed_random import mix64
from ooc.stores.jit import kernel

LEAST_SHARED = 8
"""A batch shares aggregates where at least one in so many is made for a batch before; it then has a copy of them all"""
SUM_BYTES = 20
"""of an aggregate, for finding it: half of what a scan in the making has, as two scans are counted"""
_SECOND = np.uint64(0x9E3779B97F4A7C15)

Digests = NDArray[np.int64]
"""[sums, 2]: 128 bits each"""


def digests_of(row: NDArray[Any], target: NDArray[np.int32], edge: Floats, scale: Floats, num_sums: int) -> Digests:
    """What tells aggregates apart: equal for those that add the same rows, in the same order, with the same factors.

    Args:
        row: int32|int64[e], the row that an entry adds.
        target: int32[e], the aggregate that it is added to.
        edge: float32[e], what it counts for, or empty.
        scale: float32[num_sums], what each aggregate is multiplied by, or empty.
        num_sums: Number of aggregates.

    Returns:
        int64[num_sums, 2]: two hashes; that different aggregates agree in 128 bits does not happen.
    """
    digest = np.zeros((num_sums, 2), np.int64)
    _digest(row, target, edge.view(np.uint32), scale.view(np.uint32), digest.view(np.uint64))
    return digest


@kernel
def _digest(
    row: NDArray[Any],
    target: NDArray[np.int32],
    edge: NDArray[np.uint32],
    scale: NDArray[np.uint32],
    digest: NDArray[np.uint64],
) -> None:
    for i in range(len(digest)):
        digest[i, 0] = mix64(np.uint64(scale[i]) + _SECOND) if len(scale) > 0 else _SECOND
        digest[i, 1] = mix64(digest[i, 0])
    for e in range(len(row)):
        i = target[e]
        word = np.uint64(row[e])
        if len(edge) > 0:
            word = mix64(word) ^ np.uint64(edge[e])
        digest[i, 0] = mix64(digest[i, 0] ^ word)
        digest[i, 1] = mix64(digest[i, 1] + word * _SECOND)


class SumTable:
    """Gives the aggregates of a scan's batches places 0, 1, ...; what a batch shares with batches before has one place."""

    def __init__(self) -> None:
        self.size = 0
        """places given"""
        self._table = RelabelTable()
        self._check = np.empty(0, np.int64)
        self._place = np.empty(0, np.int32)

    def add(self, digest: Digests) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Places of a batch's aggregates, int32[sums], and which of them are new, bool[sums]: these lie together, in order."""
        known = self._table.size
        number = self._table.add(digest[:, 0])
        if self._table.size > len(self._place):
            length = max(self._table.size, len(self._place) * 5 // 4)
            self._check, self._place = np.resize(self._check, length), np.resize(self._place, length)
        at, new = np.empty(len(digest), np.int32), np.empty(len(digest), np.bool_)
        self.size = int(_place(number, digest, known, self.size, self._check, self._place, at, new))
        return at, new


@kernel
def _place(
    number: NDArray[np.int32],
    digest: Digests,
    known: int,
    size: int,
    check: NDArray[np.int64],
    place: NDArray[np.int32],
    at: NDArray[np.int32],
    new: NDArray[np.bool_],
) -> int:
    """Fill `at` and `new`, and `check` and `place` of numbers from `known` on; returns the number of places given."""
    repeated = 0
    for i in range(len(number)):
        repeated += int(number[i] < known and check[number[i]] == digest[i, 1])
    shares = repeated > 0 and repeated * LEAST_SHARED >= len(number)
    coming = known
    for i in range(len(number)):
        n = number[i]
        first = n == coming  # numbers are in order of first occurrence
        new[i] = first or not shares or check[n] != digest[i, 1]
        at[i] = size if new[i] else place[n]
        if first:
            check[n], place[n] = digest[i, 1], size
            coming += 1
        size += int(new[i])
    return size

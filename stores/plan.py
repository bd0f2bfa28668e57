"""The read planner. Pure: from the rows that are wanted to the cheapest reads that serve them.

The idea is GraphBolt's and MariusGNN's made explicit: sampling is done before any feature is read, so the reads of a
batch, or of many, can be put in file order and merged first.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stores.jit import kernel

GAP_BYTES = 4096
"""Reading on over one unwanted page is cheaper than a second read. Measured over gaps of 0 to 32 KiB with 80,000 to
500,000 random rows of 512 bytes out of 4 GB: one page was the fastest everywhere, none 5 to 10 % slower."""
DENSE_SHARE, DENSE_FACTOR = 1 / 4, 4
"""From a quarter of the array's pages on, a gap of 16 KiB takes no longer (bandwidth is the limit, not reads a second) and a
third less of the processor, which the model needs."""
MAX_EXTENT_BYTES = 2**20


@dataclass(frozen=True)
class ReadPlan:
    """Sorted, disjoint, aligned extents of virtual bytes (row r of an array begins at r * row_bytes), and the rows in them.

    offset, length: int64[k], where an extent begins and how long it is, in bytes, both multiples of the alignment.
    row_at: int64[n], where the i-th wanted row begins in the concatenation of the extents.
    order: int64[n], positions of the wanted rows in ascending order of row, and so of `row_at`.
    first: int64[k + 1], the rows order[first[j]:first[j + 1]] lie in extent j, each of them whole.
    """

    row_bytes: int
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    row_at: NDArray[np.int64]
    order: NDArray[np.int64]
    first: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes of all extents."""
        return int(self.length.sum())


def gap_for(gap_bytes: int, wanted: int, row_bytes: int, count: int, page_bytes: int = 4096) -> int:
    """The gap, in bytes, worth reading over where `wanted` of `count` rows are read, `gap_bytes` being that of few rows.

    >>> gap_for(4096, 10, 512, count=10_000), gap_for(4096, 9_000, 512, count=10_000)
    (4096, 16384)
    """
    pages = max(1, count * row_bytes // page_bytes)
    return gap_bytes * DENSE_FACTOR if wanted * max(1, row_bytes // page_bytes) >= DENSE_SHARE * pages else gap_bytes


def plan_reads(
    ids: NDArray[np.int64],
    row_bytes: int,
    *,
    count: int,
    alignment: int = 4096,
    gap_bytes: int = GAP_BYTES,
    max_extent_bytes: int = MAX_EXTENT_BYTES,
) -> ReadPlan:
    """Plan the reading of rows `ids` (int64[n], any order, duplicates allowed) of an array of `count` rows.

    Rows on one page and rows at most `gap_bytes` apart share an extent. An extent ends at the first page border between
    two rows after which it would exceed `max_extent_bytes` (so rows that straddle every border may carry it beyond).
    The last extent may be longer than the array's bytes, up to the alignment. Raises IndexError for an id out of range.

    >>> plan_reads(np.array([9, 0, 8]), 512, count=100).length
    array([8192])
    """
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
        bad = ids[(ids < 0) | (ids >= count)][0]
        raise IndexError(f"row {bad} is out of range: there are {count} rows")
    order = np.argsort(ids, kind="stable")
    n = len(ids)
    offset, length, first = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n + 1, np.int64)
    row_at = np.empty(n, np.int64)
    k = _merge(ids[order], order, row_bytes, alignment, gap_bytes, max_extent_bytes, offset, length, first, row_at)
    first[k] = n
    return ReadPlan(row_bytes, offset[:k].copy(), length[:k].copy(), row_at, order, first[: k + 1].copy())


@kernel
def _merge(
    ascending: NDArray[np.int64],
    order: NDArray[np.int64],
    row_bytes: int,
    alignment: int,
    gap_bytes: int,
    max_extent_bytes: int,
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    first: NDArray[np.int64],
    row_at: NDArray[np.int64],
) -> int:
    k = 0
    done = 0  # bytes of the extents before the open one
    begin = end = -1  # the open extent
    for position in range(len(order)):
        row = ascending[position] * row_bytes
        low = row // alignment * alignment
        high = -(-(row + row_bytes) // alignment) * alignment
        if k == 0 or (low >= end and (low - end > gap_bytes or high - begin > max_extent_bytes)):
            if k > 0:
                done += end - begin
                length[k - 1] = end - begin
            begin = low
            end = high
            offset[k] = low
            first[k] = position
            k += 1
        end = max(end, high)
        row_at[order[position]] = done + row - begin
    if k > 0:
        length[k - 1] = end - begin
    return k

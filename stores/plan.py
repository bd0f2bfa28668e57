"""The read planner. Pure: from the rows that are wanted to the cheapest reads that serve them.

The idea is GraphBolt's and MariusGNN's made explicit: sampling is done before any feature is read, so the reads of a
batch, or of many, can be put in file order and merged first.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stores.jit import kernel

MAX_EXTENT_BYTES = 2**20
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class ReadCost:
    """What reads cost with many in flight: an extent takes `read_s` and `byte_s` a byte, and no request less than `latency_s`.

    read_s: seconds a read of no bytes would take, the inverse of reads a second, >= 0. byte_s: seconds a byte, > 0, the
    inverse of the bandwidth. latency_s: seconds of one small read by itself. With a cost linear in the bytes, merging
    neighbors over a gap pays exactly where the gap's bytes cost less than a read, so merging greedily is cheapest, and a
    sequential scan is what comes out where rows are dense: no rule of its own. (The affine model of external memory:
    Andrews, Bender and Zhang, 2002; Bender et al., "Small refinements to the DAM", SPAA 2019.)

    >>> ReadCost(read_s=8e-6, byte_s=0.625e-9).gap_bytes
    12288
    """

    read_s: float
    byte_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.read_s >= 0 and self.byte_s > 0 and self.latency_s >= 0):
            raise ValueError(f"a read costs no less than nothing, and a byte something: {self}")

    @property
    def gap_bytes(self) -> int:
        """The largest gap, in whole pages, that is cheaper to read over than to begin another read for."""
        return int(min(self.read_s / self.byte_s, 2**60)) // _PAGE_BYTES * _PAGE_BYTES

    def seconds(self, length: NDArray[np.int64]) -> float:
        """Seconds that reading extents of these lengths (int64[k], bytes: `ReadPlan.length`) takes."""
        if len(length) == 0:
            return 0.0
        return max(self.latency_s, len(length) * self.read_s + int(length.sum()) * self.byte_s)


DEFAULT_COST = ReadCost(read_s=8e-6, byte_s=0.625e-9, latency_s=50e-6)
"""A virtual NVMe disk, of a machine that was never measured. It predicted gathers of 50,000 to 1,500,000 random rows of 512
bytes out of 4 GB within 10 % over gaps of 0 to 16 KiB, and its gap of 12 KiB was within 2 % of the fastest for each."""
GAP_BYTES = DEFAULT_COST.gap_bytes


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

    With the gap of a `ReadCost` the plan costs no more than a read for every wanted page, and no more than a scan from the
    first wanted page to the last (in reads of max_extent_bytes, less the pages by which a row exceeds one).

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

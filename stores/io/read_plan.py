"""The read planner. Pure: from the rows that are wanted to the cheapest reads that serve them.

The idea is GraphBolt's and MariusGNN's made explicit: sampling is done before any feature is read, so the reads of a
batch, or of many, can be put in file order and merged first.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stores.jit import kernel

MAX_EXTENT_BYTES = 2**20
MOST_EXTRA = 0.2
"""Of the wanted pages' bytes: what rows' plans read over to save reads. The model's optimum may be three quarters more, for a
tenth of the time; a disk is seldom there for one program alone"""
_MOST_GAP = 2**16
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
    most_extra: float | None = None,
) -> ReadPlan:
    """Plan the reading of rows `ids` (int64[n], any order, duplicates allowed) of an array of `count` rows.

    Rows on one page and rows at most `gap_bytes` apart share an extent. An extent ends at the first page border between
    two rows after which it would exceed `max_extent_bytes` (so rows that straddle every border may carry it beyond).
    The last extent may be longer than the array's bytes, up to the alignment. Raises IndexError for an id out of range.

    With the gap of a `ReadCost` the plan costs no more than a read for every wanted page, and no more than a scan from the
    first wanted page to the last (in reads of max_extent_bytes, less the pages by which a row exceeds one).

    most_extra: pages that are not wanted are read over up to this part of the wanted ones' bytes, over the smallest gaps first;
    None: over every such gap. With it the plan may cost more than a scan: see `plan_by_cost`.

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
    ascending = ids[order]
    out = offset, length, first, row_at
    k, wanted = _merge(ascending, order, row_bytes, alignment, (gap_bytes, gap_bytes, 0), max_extent_bytes, *out)
    if most_extra is not None and int(length[:k].sum()) > (1 + most_extra) * wanted:
        gaps = np.zeros(min(gap_bytes // alignment, _MOST_GAP) + 1, np.int64)
        _count_gaps(ascending, row_bytes, alignment, gaps)
        limits = _affordable(gaps, int(most_extra * wanted), alignment)
        k, _ = _merge(ascending, order, row_bytes, alignment, limits, max_extent_bytes, *out)
    first[k] = n
    return ReadPlan(row_bytes, offset[:k].copy(), length[:k].copy(), row_at, order, first[: k + 1].copy())


def _affordable(gaps: NDArray[np.int64], spare: int, alignment: int) -> tuple[int, int, int]:
    """(gaps to read over, gaps to read over as long as there are bytes for them, those bytes), all in bytes.

    gaps: int64[m], how many there are of each size in pages; spare: bytes for all.
    """
    for size, count in enumerate(gaps.tolist()):
        if size * count * alignment > spare:
            return (size - 1) * alignment, size * alignment, spare
        spare -= size * count * alignment
    return (len(gaps) - 1) * alignment, 0, 0


@kernel
def _count_gaps(ascending: NDArray[np.int64], row_bytes: int, alignment: int, gaps: NDArray[np.int64]) -> None:
    """gaps[s] += gaps of s pages between rows, larger ones left out."""
    end = ascending[0] * row_bytes
    for position in range(len(ascending)):
        row = ascending[position] * row_bytes
        between = (row // alignment * alignment - end) // alignment
        if 0 < between < len(gaps):
            gaps[between] += 1
        end = -(-(row + row_bytes) // alignment) * alignment


@kernel
def _merge(
    ascending: NDArray[np.int64],
    order: NDArray[np.int64],
    row_bytes: int,
    alignment: int,
    limits: tuple[int, int, int],
    max_extent_bytes: int,
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    first: NDArray[np.int64],
    row_at: NDArray[np.int64],
) -> tuple[int, int]:
    """(extents, bytes of the wanted pages). limits: as of `_affordable`."""
    always, perhaps, spare = limits
    k = 0
    done = 0  # bytes of the extents before the open one
    wanted = 0
    begin = end = -1  # the open extent
    for position in range(len(order)):
        row = ascending[position] * row_bytes
        low = row // alignment * alignment
        high = -(-(row + row_bytes) // alignment) * alignment
        wanted += max(0, high - max(low, end))
        gap = low - end
        near = gap <= always
        if k > 0 and always < gap <= perhaps and gap <= spare and high - begin <= max_extent_bytes:
            near = True
            spare -= gap
        if k == 0 or (gap >= 0 and (not near or high - begin > max_extent_bytes)):
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
    return k, wanted


def plan_by_cost(ids: NDArray[np.int64], row_bytes: int, cost: ReadCost, *, count: int, alignment: int = 4096) -> ReadPlan:
    """The plan for rows `ids` on a disk of that cost: gaps are read over where that is cheaper, up to MOST_EXTRA of the wanted
    pages' bytes, or all between the first page and the last where one scan costs less. See `plan_reads`.

    >>> plan_by_cost(np.array([9, 0, 8]), 512, DEFAULT_COST, count=100).length
    array([8192])
    """
    plan = plan_reads(ids, row_bytes, count=count, alignment=alignment, gap_bytes=cost.gap_bytes, most_extra=MOST_EXTRA)
    if len(plan.offset) < 2:
        return plan
    span = int(plan.offset[-1] + plan.length[-1] - plan.offset[0])
    scan_s = -(-span // MAX_EXTENT_BYTES) * cost.read_s + span * cost.byte_s
    if max(cost.latency_s, scan_s) >= cost.seconds(plan.length):
        return plan
    return plan_reads(ids, row_bytes, count=count, alignment=alignment, gap_bytes=2**62)

"""PURE: the read planner, from requested rows to the cheapest reads that serve them.

As in GraphBolt and MariusGNN, sampling precedes reading, so the reads of many batches can be sorted in file order and merged.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooc.stores.jit import kernel

MAX_EXTENT_BYTES = 2**20
MOST_EXTRA = 0.2
"""limit on unneeded bytes read to save reads, relative to the bytes of needed pages; the model's optimum may read three
quarters more for a tenth of the time, on a disk that is seldom used by one program alone"""
_MOST_GAP = 2**16
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class ReadCost:
    """Cost of reads with many in flight: `read_s` per extent plus `byte_s` per byte, and at least `latency_s` per request.

    With a linear cost, merging neighbors over a gap pays exactly if the gap's bytes cost less than a read, so greedy merging is
    optimal and dense rows become a sequential scan. (The affine model of external memory: Andrews, Bender and Zhang, 2002;
    Bender et al., "Small refinements to the DAM", SPAA 2019.)

    Attributes:
        read_s: Seconds of an empty read, the inverse of reads per second, >= 0.
        byte_s: Seconds per byte, the inverse of the bandwidth, > 0.
        latency_s: Seconds of a single small read.

    >>> ReadCost(read_s=8e-6, byte_s=0.625e-9).gap_bytes
    12288
    """

    read_s: float
    byte_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.read_s >= 0 and self.byte_s > 0 and self.latency_s >= 0):
            raise ValueError(f"read_s must be at least 0 and byte_s positive: {self}")

    @property
    def gap_bytes(self) -> int:
        """The largest gap, in whole pages, that is cheaper to read over than to start another read."""
        return int(min(self.read_s / self.byte_s, 2**60)) // _PAGE_BYTES * _PAGE_BYTES

    def seconds(self, length: NDArray[np.int64]) -> float:
        """Seconds to read extents of these lengths (int64[k], bytes: `ReadPlan.length`)."""
        if len(length) == 0:
            return 0.0
        return max(self.latency_s, len(length) * self.read_s + int(length.sum()) * self.byte_s)


DEFAULT_COST = ReadCost(read_s=8e-6, byte_s=0.625e-9, latency_s=50e-6)
"""A virtual NVMe disk, used on machines that were not measured. It predicted gathers of 50,000 to 1,500,000 random rows of 512
bytes from 4 GB within 10 % for gaps of 0 to 16 KiB, and its gap of 12 KiB was within 2 % of the fastest."""
GAP_BYTES = DEFAULT_COST.gap_bytes


_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class ReadPlan:
    """Sorted, disjoint, aligned extents of virtual bytes (row r of an array begins at r * row_bytes), and the rows in them.

    Attributes:
        offset: int64[k], start of each extent in bytes, a multiple of the alignment.
        length: int64[k], its length, likewise.
        row_at: int64[n], start of the i-th requested row in the concatenated extents.
        order: int64[n], positions of the requested rows in ascending order of row, and so of `row_at`.
        first: int64[k + 1]; the rows order[first[j]:first[j + 1]] lie entirely in extent j.
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
    """Plan the reading of rows `ids` of an array.

    Rows on one page, or at most `gap_bytes` apart, share an extent. An extent ends at the first page border between two rows
    after which it would exceed `max_extent_bytes`; the last one may exceed the array by up to the alignment. With the gap of a
    `ReadCost` the plan costs at most a read per needed page, and at most a scan from the first needed page to the last.

    Args:
        ids: int64[n], any order, duplicates allowed.
        row_bytes: Bytes per row.
        count: Rows of the array.
        alignment: Alignment of offsets and lengths.
        gap_bytes: Largest gap to read over.
        max_extent_bytes: Limit on an extent.
        most_extra: Limit on the bytes read over, relative to those of needed pages, smallest gaps first; None for no limit.
            With it the plan may cost more than a scan; see `plan_by_cost`.

    Raises:
        IndexError: If an id is out of range.

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
    k, needed = _merge(ascending, order, row_bytes, alignment, (gap_bytes, gap_bytes, 0), max_extent_bytes, *out)
    if most_extra is not None and int(length[:k].sum()) > (1 + most_extra) * needed:
        gaps = np.zeros(min(gap_bytes // alignment, _MOST_GAP) + 1, np.int64)
        _count_gaps(ascending, row_bytes, alignment, gaps)
        limits = _affordable(gaps, int(most_extra * needed), alignment)
        k, _ = _merge(ascending, order, row_bytes, alignment, limits, max_extent_bytes, *out)
    first[k] = n
    return ReadPlan(row_bytes, offset[:k].copy(), length[:k].copy(), row_at, order, first[: k + 1].copy())


def _affordable(gaps: NDArray[np.int64], spare: int, alignment: int) -> tuple[int, int, int]:
    """Return the gap sizes to read over always and while bytes are left, and those bytes.

    `gaps` (int64[m]) counts the gaps of each size in pages; `spare` are the bytes for all of them.
    """
    for size, count in enumerate(gaps.tolist()):
        if size * count * alignment > spare:
            return (size - 1) * alignment, size * alignment, spare
        spare -= size * count * alignment
    return (len(gaps) - 1) * alignment, 0, 0


@kernel
def _count_gaps(ascending: NDArray[np.int64], row_bytes: int, alignment: int, gaps: NDArray[np.int64]) -> None:
    """Add the gaps of s pages between rows to gaps[s], ignoring larger ones."""
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
    """Return the number of extents and the bytes of needed pages; `limits` are those of `_affordable`."""
    always, perhaps, spare = limits
    k = 0
    done = 0  # bytes of the extents before the current one
    needed = 0
    begin = end = -1  # the current extent
    for position in range(len(order)):
        row = ascending[position] * row_bytes
        low = row // alignment * alignment
        high = -(-(row + row_bytes) // alignment) * alignment
        needed += max(0, high - max(low, end))
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
    return k, needed


def plan_by_cost(ids: NDArray[np.int64], row_bytes: int, cost: ReadCost, *, count: int, alignment: int = 4096) -> ReadPlan:
    """Plan the reading of rows `ids` on a disk of that cost; see `plan_reads`.

    Gaps are read over if that is cheaper, up to MOST_EXTRA of the needed pages' bytes, or everything between the first and last
    page if one scan costs less.

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


def plan_ranges(
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    row_bytes: int,
    *,
    count: int,
    alignment: int = 4096,
    gap_bytes: int = GAP_BYTES,
) -> tuple[ReadPlan, NDArray[np.int64]]:
    """Plan the reading of ranges of rows, each whole and contiguous in the buffer of the extents.

    Args:
        first: int64[k], first row of each range, in any order; ranges may overlap.
        last: int64[k], the row after its last one.
        row_bytes: Bytes per row.
        count: Rows of the array.
        alignment: Alignment of offsets and lengths.
        gap_bytes: Largest gap to read over.

    Returns:
        The plan, without rows of its own, and int64[k]: where each range begins in the concatenated extents, in bytes.

    Raises:
        IndexError: If a range is not one of the array's rows.

    >>> plan, at = plan_ranges(np.array([8, 0]), np.array([10, 2]), 4096, count=100)
    >>> plan.offset.tolist(), at.tolist()
    ([0, 32768], [8192, 0])
    """
    wrong = (first < 0) | (last < first) | (last > count)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise IndexError(f"rows {first[at]} to {last[at] - 1} are out of range: there are {count} rows")
    order = np.argsort(first, kind="stable") if (first[1:] < first[:-1]).any() else np.arange(len(first))
    begin, end, place = (np.empty(len(first), np.int64) for _ in range(3))
    k = _merge_ranges(first, last, order, row_bytes, alignment, gap_bytes, begin, end, place)
    pieces = -(-(end[:k] - begin[:k]) // (step := MAX_EXTENT_BYTES // alignment * alignment))
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = np.repeat(begin[:k], pieces) + number * step
    length = np.minimum(step, np.repeat(end[:k], pieces) - offset)
    return ReadPlan(row_bytes, offset, length, _NONE, _NONE, np.zeros(len(offset) + 1, np.int64)), place


@kernel
def _merge_ranges(
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    order: NDArray[np.int64],
    row_bytes: int,
    alignment: int,
    gap_bytes: int,
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    place: NDArray[np.int64],
) -> int:
    """Set begin and end of each extent in bytes, and the place of each range in them; returns the number of extents."""
    k, done = 0, 0
    for i in order:
        place[i] = done if k == 0 else done + end[k - 1] - begin[k - 1]
        if first[i] == last[i]:
            continue
        low = first[i] * row_bytes // alignment * alignment
        high = -(-(last[i] * row_bytes) // alignment) * alignment
        if k == 0 or low > end[k - 1] + gap_bytes:
            if k > 0:
                done += end[k - 1] - begin[k - 1]
            begin[k] = low
            end[k] = high
            k += 1
        end[k - 1] = max(end[k - 1], high)
        place[i] = done + first[i] * row_bytes - begin[k - 1]
    return k

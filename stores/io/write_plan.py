"""PURE: the write planner, from rows to overwrite to the pages that contain them, in file order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooc.stores.jit import kernel

PAGE_BYTES = 4096
PIECE_BYTES = 2**20
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class WritePlan:
    """Pieces of whole pages, ascending and disjoint, and the rows in each, possibly in part.

    Attributes:
        ids: int64[n], ascending.
        order: int64[n], which of the given rows has ids[i].
        begin: int64[k], first byte of each piece in the file; `end` is the byte after its last.
        first: int64[k]; rows first[j]:last[j] of `ids` overlap piece j.
    """

    row_bytes: int
    ids: Ints
    order: Ints
    begin: Ints
    end: Ints
    first: Ints
    last: Ints

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return int((self.end - self.begin).sum())

    def partial(self, j: int) -> list[tuple[int, int]]:
        """Ranges (begin, end) of piece j, in bytes from its start, whose pages the rows cover only in part."""
        length = int(self.end[j] - self.begin[j])
        part = np.empty(length // PAGE_BYTES, np.bool_)
        _partial(self.ids, int(self.first[j]), int(self.last[j]), self.row_bytes, int(self.begin[j]), part)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], part, [False]]).astype(np.int8)))
        return [(int(a) * PAGE_BYTES, int(b) * PAGE_BYTES) for a, b in edges.reshape(-1, 2)]

    def fill(self, j: int, rows: Bytes, out: Bytes) -> None:
        """Copy the bytes of `rows` (uint8[n, row_bytes], as planned) in piece j to `out`, uint8[end[j] - begin[j]]."""
        first, last = int(self.first[j]), int(self.last[j])
        _fill(self.ids, self.order, first, last, rows, int(self.begin[j]), out)


def plan_writes(ids: Ints, row_bytes: int, piece_bytes: int = PIECE_BYTES) -> WritePlan:
    """Plan the pages of rows `ids` (int64[n], distinct, any order); rows on neighboring pages are written together.

    A piece has at most `piece_bytes`, a multiple of 4096. Raises ValueError if an id occurs twice.

    >>> plan_writes(np.arange(64), 128).end
    array([8192])
    """
    steps = np.diff(ids)
    if len(ids) and bool((steps > 0).all()):
        order, ascending = np.arange(len(ids)), ids
    else:
        order = np.argsort(ids, kind="stable")
        ascending = ids[order]
        twice = np.flatnonzero(np.diff(ascending) == 0)
        if len(twice):
            raise ValueError(f"row {ascending[twice[0]]} is written twice in one call")
    low = ascending * row_bytes
    high = low + row_bytes
    begin, end = _runs(low // PAGE_BYTES * PAGE_BYTES, -(-high // PAGE_BYTES) * PAGE_BYTES, piece_bytes)
    first, last = np.searchsorted(high, begin, side="right"), np.searchsorted(low, end, side="left")
    return WritePlan(row_bytes, ascending, order, begin, end, first, last)


def _runs(low: Ints, high: Ints, piece_bytes: int) -> tuple[Ints, Ints]:
    """Merge touching page ranges low[i]:high[i] (ascending) and divide them into pieces."""
    if len(low) == 0:
        return low, high
    new = np.flatnonzero(low[1:] > high[:-1]) + 1
    begin, end = low[np.concatenate([[0], new])], high[np.concatenate([new - 1, [len(high) - 1]])]
    count = -(-(end - begin) // piece_bytes)
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    piece = np.repeat(begin, count) + within * piece_bytes
    return piece, np.minimum(piece + piece_bytes, np.repeat(end, count))


@kernel
def _partial(ids: Ints, first: int, last: int, row_bytes: int, begin: int, part: NDArray[np.bool_]) -> None:
    pages = len(part)
    covered = np.zeros(pages, np.int64)
    for i in range(first, last):
        low = max(ids[i] * row_bytes - begin, 0)
        high = min((ids[i] + 1) * row_bytes - begin, pages * PAGE_BYTES)
        while low < high:
            page = low // PAGE_BYTES
            stop = min(high, (page + 1) * PAGE_BYTES)
            covered[page] += stop - low
            low = stop
    for page in range(pages):
        part[page] = covered[page] < PAGE_BYTES


@kernel
def _fill(ids: Ints, order: Ints, first: int, last: int, rows: Bytes, begin: int, out: Bytes) -> None:
    row_bytes = rows.shape[1]
    for i in range(first, last):
        at = ids[i] * row_bytes - begin
        low, high = max(0, -at), min(row_bytes, len(out) - at)
        out[at + low : at + high] = rows[order[i], low:high]

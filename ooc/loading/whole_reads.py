"""PURE: when a superbatch reads an array whole, because the pages of what its batches want are most of the file.

Rows that lie in pages with others come into memory for nothing: 32 rows of 128 bytes share a page, so a few batches touch
nearly all pages of a narrow file. Read by themselves, the rows that those batches leave out would touch most pages once more.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.rows import ArrayRows, Ids, Rows
from ooc.stores.arrays.segment_rows import SegmentRows
from ooc.stores.io.pages import PAGE_BYTES

MOST = 2
"""A file is read whole where the pages that are wanted are 1/2 of it at least: so it is never more than twice what is wanted"""


def reads_most(rows: Rows, ids: Ids) -> bool:
    """Whether the pages of rows `ids` (int64[n], ascending, distinct) are most of the file; False where there is no file of
    rows one behind the other.

    >>> reads_most(ds.stored("x"), np.arange(ds.num_nodes // 2))
    True
    """
    parts = list(_parts(rows, ids))
    if not all(isinstance(own, SegmentRows | ArrayRows) for own, _ in parts):
        return False
    files = [(own, wanted) for own, wanted in parts if isinstance(own, SegmentRows)]
    wanted = sum(page_bytes(own.row_bytes, each) for own, each in files)
    return 0 < sum(own.shape[0] * own.row_bytes for own, _ in files) <= MOST * wanted


def page_bytes(row_bytes: int, ids: NDArray[np.int64]) -> int:
    """Bytes of the distinct pages that rows `ids` (ascending, distinct) of so many bytes touch, of a file that begins on one.

    >>> page_bytes(128, np.array([0, 31, 32]))
    8192
    """
    if not len(ids) or not row_bytes:
        return 0
    first, last = ids * row_bytes // PAGE_BYTES, ((ids + 1) * row_bytes - 1) // PAGE_BYTES
    shared = np.count_nonzero(first[1:] == last[:-1])
    return int((last - first + 1).sum() - shared) * PAGE_BYTES


def _parts(rows: Rows, ids: Ids) -> Iterator[tuple[Rows, Ids]]:
    """The arrays that rows consist of, each with the ids of its own."""
    if not isinstance(rows, JoinedRows):
        yield rows, ids
        return
    for name, own in rows.parts.items():
        begin = rows.begin[name]
        low, high = np.searchsorted(ids, [begin, begin + own.shape[0]])
        yield own, ids[low:high] - begin

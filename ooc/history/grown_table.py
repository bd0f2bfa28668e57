"""Tables of a store that has grown: rows go on as they are, with the state of their optimizer, and new nodes begin anew.

The table is written whole to another place, a bucket at a time, so that a killed run still has the one of its checkpoint.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooc.history.bucket_table import TableShape
from ooc.runtime.keyed_random import keyed_uniform
from ooc.stores.arrays.bucket_rows import PIECE_BYTES, BucketRows
from ooc.stores.io.pages import PAGE_BYTES, page_buffer


@dataclass(frozen=True)
class MovedRows:
    """Rows that were `old`, old + 1, ... and are `new`, new + 1, ..."""

    old: int
    new: int
    count: int


def moved_rows(before: Mapping[str, int], rows: int, after: Mapping[str, int]) -> list[MovedRows]:
    """Where the rows of each node type go, of types that stand behind one another and have grown at their ends.

    Args:
        before: Node type -> its first row, as it was.
        rows: How many there were in all.
        after: Node type -> its first row now.

    >>> moved_rows({"user": 0, "item": 10}, 15, {"user": 0, "item": 12})
    [MovedRows(old=0, new=0, count=10), MovedRows(old=10, new=12, count=5)]
    """
    starts = sorted(before.values())
    ends = dict(zip(starts, [*starts[1:], rows], strict=True))
    return [MovedRows(first, after[name], ends[first] - first) for name, first in before.items()]


class GrownTable:
    """Copies a table of buckets into a larger one with as many.

    Args:
        old: The table as it was.
        old_shape: Its shape.
        shape: The shape of the larger one, with the same columns and number of buckets.
        stream: Key of the initial rows.
        bound: These are uniform in [-bound, bound).

    >>> GrownTable(old, old_shape, shape, stream, 0.1).write(new, moved_rows(before, old_shape.rows, after))
    """

    def __init__(self, old: BucketRows, old_shape: TableShape, shape: TableShape, stream: int, bound: float) -> None:
        assert (old_shape.buckets, old_shape.packed) == (shape.buckets, shape.packed), "buckets and columns are the same"
        self._old, self._old_shape, self._shape = old, old_shape, shape
        self._stream, self._bound = np.uint64(stream), np.float32(bound)

    def write(self, new: BucketRows, moved: Iterable[MovedRows]) -> None:
        """Write all buckets of the larger table. Raises StoreError where a disk fails or is full."""
        shape, ranges = self._shape, list(moved)
        for bucket in range(shape.buckets):
            buffer = page_buffer(shape.bucket_bytes)
            packed = buffer.view(np.float32).reshape(-1, shape.packed)
            packed[:] = 0
            ids = shape.ids(bucket)
            self._begin(ids, packed[: len(ids)])
            for part in ranges:
                self._copy(part, bucket, packed)
            new.store(bucket, buffer)

    def _copy(self, part: MovedRows, bucket: int, packed: NDArray[np.float32]) -> None:
        """Those of the rows that are of a bucket: they were consecutive in one bucket too."""
        buckets = self._shape.buckets
        first = part.new + (bucket - part.new) % buckets
        count = max(0, -(-(part.new + part.count - first) // buckets))
        row, old_bucket = divmod(first - part.new + part.old, buckets)
        out = packed[first // buckets : first // buckets + count]
        if self._old.is_written(old_bucket):
            self._read(old_bucket, row, out)
        else:
            self._begin(part.old + np.arange(first - part.new, first - part.new + count * buckets, buckets), out)

    def _begin(self, ids: NDArray[np.int64], packed: NDArray[np.float32]) -> None:
        """The initial values of rows, without state."""
        rows = np.empty((len(ids), self._shape.width), np.float32)
        keyed_uniform(self._stream, ids, self._bound, rows)
        packed[:, : self._shape.width] = rows

    def _read(self, bucket: int, first: int, out: NDArray[np.float32]) -> None:
        """Fill `out` with rows of a bucket of the table as it was, from `first` on, in pieces of whole pages."""
        row_bytes = 4 * self._shape.packed
        begin, end = first * row_bytes, (first + len(out)) * row_bytes
        flat, piece = out.reshape(-1).view(np.uint8), page_buffer(PIECE_BYTES)
        for start in range(begin // PAGE_BYTES * PAGE_BYTES, end, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES)
            self._old.load_part(bucket, start, piece[: stop - start])
            low, high = max(begin, start), min(end, stop)
            flat[low - begin : high - begin] = piece[low - start : high - start]

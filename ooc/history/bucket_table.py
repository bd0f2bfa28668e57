"""A table of trained rows in buckets, of which memory holds some: read ahead in the order of an epoch's visits, written behind.

Row v is row v // p of bucket v % p. So hubs, which have neighboring ids where nodes are ordered by degree, are spread over all
buckets, and the nodes of a type are a range of rows in each. Rows that were never trained have their initial values, a function
of seed and node: a new table writes nothing, and the first visit of a bucket reads nothing.

What is trained depends on the visits alone. How many more buckets than a visit's there is room for decides what is read and
written: with room for all, nothing is.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ooc.history.row_optimizers import packed_width
from ooc.runtime.keyed_random import keyed_uniform
from ooc.sampling.bucket_order import Visit
from ooc.sampling.upcoming_buckets import UpcomingBuckets
from ooc.stores.arrays.bucket_rows import BucketRows, bucket_buffer
from ooc.stores.io.pages import PAGE_BYTES, page_buffer
from ooc.stores.jit import kernel

BLOCK_BYTES = 2**22
"""of rows that `blocks` gives at a time"""
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Block = tuple[Ints, Floats]


@dataclass(frozen=True)
class TableShape:
    """Of a table: its rows, their columns, and how they are divided.

    >>> TableShape(rows=10_000, width=100, optimizer="adagrad", buckets=4).bucket_rows
    2560
    """

    rows: int
    width: int
    optimizer: str
    buckets: int

    @property
    def packed(self) -> int:
        """Columns of a row with its optimizer's state."""
        return packed_width(self.optimizer, self.width)

    @property
    def bucket_rows(self) -> int:
        """Rows of a bucket, the same for all, so many that it has whole pages."""
        step = self.page_rows
        return -(-self.rows // (self.buckets * step)) * step

    @property
    def page_rows(self) -> int:
        """Rows that end with a page."""
        return PAGE_BYTES // math.gcd(4 * self.packed, PAGE_BYTES)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket."""
        return 4 * self.packed * self.bucket_rows

    def ids(self, bucket: int, first: int = 0, count: int | None = None) -> Ints:
        """The rows of the table that a bucket has from its row `first` on, int64[n]."""
        last = self.bucket_rows if count is None else min(self.bucket_rows, first + count)
        return np.arange(bucket + self.buckets * first, min(self.rows, bucket + self.buckets * last), self.buckets)


class BucketTable:
    """Rows float32 [N, width] with the state of their optimizer; see the module. For one thread.

    Args:
        files: The buckets on disk; closed with the table.
        shape: Of the table.
        room: Buckets that memory holds: all, or at least one more than a visit has.
        stream: Key of the initial rows.
        bound: These are uniform in [-bound, bound).

    >>> table.follow(bucket_visits(8, 3, seed=0, epoch=0))
    >>> table.visit(0)
    >>> optimizer.step(table.packed, table.places(ids), gradient, lr=0.1)
    """

    def __init__(self, files: BucketRows, shape: TableShape, room: int, stream: int, bound: float) -> None:
        self.files, self.shape, self.room = files, shape, min(room, shape.buckets)
        self._stream, self._bound = np.uint64(stream), np.float32(bound)
        self._buffer = bucket_buffer(self.room, shape.bucket_bytes)
        self.packed: Floats = self._buffer.view(np.float32).reshape(-1, shape.packed)
        """float32 [room * bucket rows, packed width]: what is in memory; see `places`"""
        self._slot = np.full(shape.buckets, -1, np.int64)  # of memory, by bucket
        self._dirty = np.zeros(shape.buckets, bool)
        self._free = list(range(self.room))
        self._ahead = UpcomingBuckets()
        self._coming: tuple[int, int, Future[None]] | None = None  # (bucket, slot, when it is there)
        self._pool = ThreadPoolExecutor(1, "ooc-buckets")
        self.waited = 0.0
        """seconds in which training waited for buckets"""
        self.worked = 0.0
        """seconds in which buckets were read or written"""

    def follow(self, visits: Sequence[Visit], later: Sequence[Visit] = ()) -> None:
        """Have these visits next, in this order; `visit` goes through them. later: those behind them, as far as known."""
        assert self.room >= min(self.shape.buckets, 1 + len(visits[0].resident)), "the one to read ahead has a place too"
        self.settle()
        self._ahead = UpcomingBuckets(visits, later)

    def visit(self, number: int) -> None:
        """Have the buckets of a visit in memory, and read the next one ahead. StoreError where the disk fails."""
        if number == self._ahead.at:
            return
        began = perf_counter()
        self._ahead.at = number
        for bucket in self._ahead.resident:
            if self._slot[bucket] < 0:
                self._bring(bucket)
        self.waited += perf_counter() - began
        self._read_ahead()

    def places(self, ids: Ints) -> Ints:
        """Where rows `ids` (int64[k], of resident buckets) are in `packed`, int64[k]."""
        out = np.empty(len(ids), np.int64)
        _places(ids, self._slot, self.shape.bucket_rows, out)
        return out

    def changed(self) -> None:
        """Rows of the visit's buckets were changed in memory."""
        self._dirty[list(self._ahead.resident)] = True

    def flush(self) -> None:
        """Write all that was changed, so that the files have what memory has. Raises StoreError where the disk is full."""
        self.settle()
        for bucket in np.flatnonzero(self._dirty & (self._slot >= 0)).tolist():
            self._write(bucket, int(self._slot[bucket]))
        if self._ahead.at >= 0:
            self._read_ahead()

    def read(self, ids: Ints, kept: str | None = None) -> Floats:
        """Rows `ids` (int64[n], any), float32[n, width]; those of buckets on disk one by one. kept: as of `blocks`."""
        self.settle()
        shape, rows = self.shape, np.empty((len(ids), self.shape.width), np.float32)
        slot = np.full(len(ids), -1) if kept is not None else self._slot[ids % shape.buckets]
        here = np.flatnonzero(slot >= 0)
        rows[here] = self.packed[self.places(ids[here]), : shape.width]
        buffer = page_buffer(2 * PAGE_BYTES + 4 * shape.packed)
        for i in np.flatnonzero(slot < 0).tolist():
            row, bucket = divmod(int(ids[i]), shape.buckets)
            if not self.files.is_written(bucket, kept):
                keyed_uniform(self._stream, ids[i : i + 1], self._bound, rows[i : i + 1])
                continue
            first = 4 * shape.packed * row
            begin, end = first // PAGE_BYTES * PAGE_BYTES, -(-(first + 4 * shape.packed) // PAGE_BYTES) * PAGE_BYTES
            self.files.load_part(bucket, begin, buffer[: end - begin], kept)
            rows[i] = buffer[first - begin : first - begin + 4 * shape.width].view(np.float32)
        return rows

    def blocks(self, kept: str | None = None) -> Iterator[Block]:
        """All rows, (ids int64[n], rows float32[n, width]), a part of a bucket at a time; valid until the next.

        Args:
            kept: Name of the view of the files (`BucketRows.keep`) to read; None: the rows as they are.

        Raises:
            StoreError: The disk fails, or behind the last rows of a bucket whose bytes are not those that were written.
        """
        self.settle()
        count = max(1, BLOCK_BYTES // (4 * self.shape.packed * self.shape.page_rows)) * self.shape.page_rows
        buffer = page_buffer(4 * self.shape.packed * count)
        rows = np.empty((count, self.shape.width), np.float32)
        for bucket in range(self.shape.buckets):
            checksum = 0 if self._reads_files(bucket, kept) else None
            for first in range(0, self.shape.bucket_rows, count):
                ids = self.shape.ids(bucket, first, count)
                if checksum is not None:
                    part = buffer[: min(len(buffer), 4 * self.shape.packed * (self.shape.bucket_rows - first))]
                    self.files.load_part(bucket, 4 * self.shape.packed * first, part, kept)
                    checksum = google_crc32c.extend(checksum, part)
                    own = buffer.view(np.float32).reshape(-1, self.shape.packed)
                    rows[: len(ids)] = own[: len(ids), : self.shape.width]
                else:
                    self._fill(bucket, first, ids, kept, rows[: len(ids)])
                if len(ids):
                    yield ids, rows[: len(ids)]
            if checksum is not None:
                self.files.check(bucket, checksum, kept)

    def _reads_files(self, bucket: int, kept: str | None) -> bool:
        """Whether rows of a bucket are read from the disk."""
        return (kept is not None or self._slot[bucket] < 0) and self.files.is_written(bucket, kept)

    def _fill(self, bucket: int, first: int, ids: Ints, kept: str | None, rows: Floats) -> None:
        """`rows` = rows of a bucket from `first` on, in memory or as they began."""
        slot = int(self._slot[bucket])
        if kept is None and slot >= 0:
            begin = slot * self.shape.bucket_rows + first
            rows[:] = self.packed[begin : begin + len(ids), : self.shape.width]
        else:
            keyed_uniform(self._stream, ids, self._bound, rows)

    def close(self) -> None:
        """End the thread, and close the files; idempotent. What was changed since `flush` is not written."""
        self._pool.shutdown(wait=True)
        self.files.close()

    def _bring(self, bucket: int) -> None:
        """Have a bucket in memory, which may be on its way."""
        if self._coming is None or self._coming[0] != bucket:
            self.settle()
            self._start(bucket)
        self.settle()

    def _read_ahead(self) -> None:
        """Begin to read the next bucket that is not in memory, if one can leave for it."""
        following = self._ahead.next_missing(self._here) if self._coming is None else None
        if following is not None:
            number, bucket = following
            self._start(bucket, before=number)

    @property
    def _here(self) -> set[int]:
        """The buckets in memory."""
        return set(np.flatnonzero(self._slot >= 0).tolist())

    def _start(self, bucket: int, before: int | None = None) -> None:
        """Read a bucket into a free place, or that of the one that is used last from now on, which is written first.

        before: the visit that it is for; None: the one that training waits for.
        """
        leaves = None
        if self._free:
            slot = self._free.pop()
        else:
            leaves = self._ahead.leaving(self._here, before)
            if leaves is None:
                return
            slot = int(self._slot[leaves])
            self._slot[leaves] = -1
        self._coming = bucket, slot, self._pool.submit(self._exchange, leaves, bucket, slot)

    def _exchange(self, leaves: int | None, comes: int, slot: int) -> None:
        """Write a bucket, if it was changed, and read another one in its place."""
        if leaves is not None and self._dirty[leaves]:
            self._write(leaves, slot)
        began = perf_counter()
        if self.files.is_written(comes):
            self.files.load(comes, self._bytes(slot))
        else:
            self._begin(comes, slot)
        self.worked += perf_counter() - began

    def _begin(self, bucket: int, slot: int) -> None:
        """Give a bucket its initial rows, without any state."""
        ids, first = self.shape.ids(bucket), slot * self.shape.bucket_rows
        own = self.packed[first : first + self.shape.bucket_rows]
        own[:] = 0
        keyed_uniform(self._stream, ids, self._bound, own[: len(ids), : self.shape.width])

    def _write(self, bucket: int, slot: int) -> None:
        began = perf_counter()
        self.files.store(bucket, self._bytes(slot))
        self._dirty[bucket] = False
        self.worked += perf_counter() - began

    def _bytes(self, slot: int) -> NDArray[np.uint8]:
        return self._buffer[slot * self.shape.bucket_bytes : (slot + 1) * self.shape.bucket_bytes]

    def settle(self) -> None:
        """Wait for what is on its way, so that `read` and `blocks` change nothing. Raises what it failed on."""
        if self._coming is not None:
            (bucket, slot, future), self._coming = self._coming, None
            future.result()
            self._slot[bucket] = slot


@dataclass(frozen=True)
class TableView:
    """The rows of a table as they are, or as they were kept, for what ranks them (`ooc.layerwise.filtered_ranks.RowTable`)."""

    table: BucketTable
    kept: str | None = None

    def read(self, ids: Ints) -> Floats:
        return self.table.read(ids, self.kept)

    def blocks(self) -> Iterator[Block]:
        return self.table.blocks(self.kept)


@kernel
def _places(ids: Ints, slot: Ints, bucket_rows: int, out: Ints) -> None:
    buckets = len(slot)
    for i in range(len(ids)):
        out[i] = slot[ids[i] % buckets] * bucket_rows + ids[i] // buckets

"""Contiguous row ranges: read and written without copies where possible, read ahead, and written in the background."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from ooc.runtime.buffers import PAGE_BYTES, Buffers
from ooc.runtime.clock import waiting
from ooc.stores.arrays import segment_rows
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import AnyArray, ArrayRows, MutableRows, Rows
from ooc.stores.errors import StoreError

Item = TypeVar("Item")
Result = TypeVar("Result")


class MemoryRows(ArrayRows):
    """Mutable rows in memory, for layer-wise passes over small graphs."""

    @classmethod
    def create(cls, shape: tuple[int, ...], dtype: Any) -> "MemoryRows":
        """Return rows of zeros."""
        return cls(np.zeros(shape, dtype))

    def write(self, ids: Any, rows: AnyArray) -> int:
        """See `MutableRows.write`."""
        self.array[ids] = rows
        return 0

    def sync(self) -> None:
        """Does nothing."""


def read_range(rows: Rows, first: int, stop: int, buffers: Buffers) -> tuple[AnyArray, int]:
    """Return rows first:stop as stored, [stop - first, *row shape], and the bytes read from disk.

    Rows in memory are returned as a view, others in aligned memory of `buffers` that an engine reads into directly.
    """
    return segment_rows.read_range(rows, first, stop, lambda nbytes: buffers.empty((nbytes,), np.dtype(np.uint8)))


def write_range(rows: "MutableRows | DiskRows | MemoryRows", first: int, values: AnyArray) -> int:
    """Set rows first, first + 1, ... to `values` [n, *row shape]; returns the bytes written to disk.

    Writes directly from `values` if both they and the range in the file are page-aligned.
    """
    if isinstance(rows, MemoryRows):
        rows.array[first : first + len(values)] = values
        return 0
    if isinstance(rows, DiskRows) and len(values):
        data, begin = values.reshape(-1).view(np.uint8), first * rows.row_bytes
        if not (begin % PAGE_BYTES or len(data) % PAGE_BYTES or data.ctypes.data % PAGE_BYTES):
            rows.file.store(begin, data)
            return len(data)
    return rows.write(np.arange(first, first + len(values)), values)


def ahead(
    pool: ThreadPoolExecutor, run: Callable[[Item], Result], items: Iterable[Item], depth: int, concurrent: bool = True
) -> Iterator[Result]:
    """Yield the results of `run` in the order of `items`, with at most `depth` alive, the caller's included.

    concurrent: whether an item may begin before the one before it is done.
    """
    under_way: deque[Future[Result]] = deque()
    todo = iter(items)

    def fill(most: int) -> None:
        while len(under_way) < most and (item := next(todo, None)) is not None:
            under_way.append(pool.submit(run, item))

    try:
        fill(depth if concurrent else 1)
        while under_way:
            with waiting():
                result = under_way.popleft().result()
            fill(depth - 1)
            yield result
            del result  # the caller drops it before requesting the next one
            fill(depth if concurrent else 1)
    finally:
        wait([future for future in under_way if not future.cancel()])


class WriteBehind:
    """Runs writes in two threads, in the order they came; at most `depth` wait besides the one handed over."""

    def __init__(self, name: str, depth: int) -> None:
        self._pool, self._depth = ThreadPoolExecutor(2, thread_name_prefix=name), depth
        self._pending: deque[Future[None]] = deque()

    def make_room(self) -> None:
        """Wait until fewer than `depth` writes wait. Raises StoreError where one failed."""
        while len(self._pending) >= self._depth:
            self._pending.popleft().result()

    def submit(self, write: Callable[[], None]) -> None:
        """Have something written, once there is room for it."""
        self.make_room()
        self._pending.append(self._pool.submit(write))

    def drain(self) -> None:
        """Wait until all is written. Raises StoreError, the first one, where something could not be."""
        failure: StoreError | None = None
        while self._pending:
            try:
                self._pending.popleft().result()
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the threads, without what has not begun; idempotent."""
        self._pool.shutdown(cancel_futures=True)
        self._pending.clear()

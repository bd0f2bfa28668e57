"""Contiguous ranges of rows, read and written whole: no plan row by row, no copy where memory and file are aligned."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from ooc.buffers import PAGE_BYTES, Buffers
from stores import segment_rows
from stores.mutable_rows import DiskRows
from stores.rows import AnyArray, ArrayRows, MutableRows, Rows

Item = TypeVar("Item")
Result = TypeVar("Result")


class MemoryRows(ArrayRows):
    """Rows in memory that are written as those on disk are: what a sweep keeps of a small graph.

    >>> MemoryRows.create((1000, 64), "float32").write(np.arange(10), values)
    """

    @classmethod
    def create(cls, shape: tuple[int, ...], dtype: Any) -> "MemoryRows":
        """Rows of zeros."""
        return cls(np.zeros(shape, dtype))

    def write(self, ids: Any, rows: AnyArray) -> int:
        """See `MutableRows.write`."""
        self.array[ids] = rows
        return 0

    def sync(self) -> None:
        """Nothing to do: memory lasts as long as it lasts."""


def read_range(rows: Rows, first: int, stop: int, buffers: Buffers) -> tuple[AnyArray, int]:
    """(rows first:stop as they are stored [stop - first, *row shape], bytes read from the disk for it).

    Rows in memory come as a view; others into memory of `buffers`, aligned, so that an engine reads straight into it.

    >>> values, nbytes = read_range(ds.stored("x"), 0, 8192, Buffers(kept=2, direct=True))
    """
    return segment_rows.read_range(rows, first, stop, lambda nbytes: buffers.empty((nbytes,), np.dtype(np.uint8)))


def write_range(rows: "MutableRows | DiskRows | MemoryRows", first: int, values: AnyArray) -> int:
    """Afterwards rows first, first + 1, ... are `values` [n, *row shape]; the bytes written to the disk.

    Straight from the memory where it and the rows' bytes in the file are whole pages.
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


def ahead(pool: ThreadPoolExecutor, run: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Iterator[Result]:
    """The results of `run`, in the order of `items`; at most `depth` of them are worked on or wait, besides the one that the
    caller has: one fewer while it works. Waits for what is under way at its end.

    >>> list(ahead(pool, str, range(3), depth=2))
    ['0', '1', '2']
    """
    under_way: deque[Future[Result]] = deque()
    todo = iter(items)
    try:
        while True:
            while len(under_way) < depth and (item := next(todo, None)) is not None:
                under_way.append(pool.submit(run, item))
            if not under_way:
                return
            yield under_way.popleft().result()
    finally:
        wait([future for future in under_way if not future.cancel()])


def one_ahead(pool: ThreadPoolExecutor, run: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """The same, where no more than two results may be there at a time: the caller's, and the next one, made meanwhile.

    >>> list(one_ahead(pool, str, range(3)))
    ['0', '1', '2']
    """
    under_way: Future[Result] | None = None
    try:
        for number in range(len(items)):
            result = (under_way or pool.submit(run, items[number])).result()
            under_way = pool.submit(run, items[number + 1]) if number + 1 < len(items) else None
            yield result
            del result  # the caller's, who lets it go before it asks for the next one
    finally:
        if under_way is not None and not under_way.cancel():
            wait([under_way])

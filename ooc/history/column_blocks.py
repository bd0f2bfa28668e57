"""Blocks of columns of a table on disk: as many as memory has room for stay there, others are read ahead and written behind.

They are gone through in turn, from the first to the last and again, as steps of `PropagatedTable` do.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.history.grown_table import MovedRows
from ooc.history.propagated_table import PLANES
from ooc.runtime.keyed_random import keyed_uniform
from ooc.stores.arrays.bucket_rows import PIECE_BYTES, BucketRows
from ooc.stores.io.pages import PAGE_BYTES, page_buffer

MOVING = 2
"""blocks in memory beside those that stay: the one that is worked on, and one that is read or written meanwhile"""
_ROWS_AT_ONCE = 2**16


def column_bytes(num_rows: int) -> int:
    """Bytes of a column of a table and its moments, on disk.

    >>> column_bytes(1_000_000)
    12000000
    """
    return 4 * PLANES * num_rows


def block_bytes(num_rows: int, columns: int) -> int:
    """Bytes of a block of so many columns on disk: whole pages.

    >>> block_bytes(1000, 16)
    192512
    """
    return -(-columns * column_bytes(num_rows) // PAGE_BYTES) * PAGE_BYTES


class StoredBlocks:
    """`ColumnBlocks` of equal width in a directory; see the module. For one thread.

    Rows begin with their initial values, a function of the key and the node, so a new table writes nothing.

    Args:
        files: The blocks on disk; closed with these.
        num_rows: Of the table.
        columns: Of each block.
        room: Blocks that memory holds: all, or at least `MOVING`.
        stream: Key of the initial rows.
        bound: These are uniform in [-bound, bound).

    >>> blocks = StoredBlocks(StoredBlocks.create(path, 1000, [16] * 4), 1000, [16] * 4, room=2, stream=7, bound=0.1)
    """

    def __init__(self, files: BucketRows, num_rows: int, columns: list[int], room: int, stream: int, bound: float) -> None:
        assert len(set(columns)) == 1, "blocks are of equal width"
        assert room >= min(MOVING, len(columns)), "one block is read while another is worked on"
        self.files, self.columns, self._rows = files, tuple(columns), num_rows
        self._stream, self._bound = np.uint64(stream), np.float32(bound)
        self._stay = len(columns) if room >= len(columns) else room - MOVING
        self._there: dict[int, NDArray[np.uint8]] = {}
        self._dirty: set[int] = set()
        self._free: list[NDArray[np.uint8]] = []
        self._coming: tuple[int, Future[None], NDArray[np.uint8]] | None = None
        self._leaving: tuple[Future[None], NDArray[np.uint8]] | None = None
        self._pool = ThreadPoolExecutor(1, "ooc-columns")

    @staticmethod
    def create(path: Path, num_rows: int, columns: list[int]) -> BucketRows:
        """Make the directory of a new table. Raises StoreError where it exists, or the disk refuses."""
        return BucketRows.create(path, len(columns), block_bytes(num_rows, columns[0]))

    def load(self, block: int) -> Tensor:
        """See `ColumnBlocks`; the block is changed in place."""
        if block not in self._there:
            if self._coming is None or self._coming[0] != block:
                self._settle()
                self._give_up(block)
                self._settle()
                self._begin(block)
            self._arrive()
        following = (block + 1) % len(self.columns)
        if following not in self._there and self._coming is None:
            self._give_up(block)
            self._begin(following)
        return self._values(self._there[block])

    def store(self, block: int, values: Tensor) -> None:
        """See `ColumnBlocks`: `values` is what `load` returned."""
        self._dirty.add(block)

    def keep(self, name: str) -> None:
        """Keep the blocks as they are under a name, in place of what had it; see `load_kept`."""
        self.flush()
        self.files.keep(name)

    def load_kept(self, block: int, name: str) -> Tensor:
        """The rows of a block as they were when it was kept, float32[N, columns], without the moments."""
        rows = np.empty(4 * self._rows * self.columns[block], np.uint8)
        piece, checksum = page_buffer(min(PIECE_BYTES, self.files.bucket_bytes)), 0
        for first in range(0, self.files.bucket_bytes, PIECE_BYTES):
            part = piece[: self.files.bucket_bytes - first]
            self.files.load_part(block, first, part, name)
            checksum = google_crc32c.extend(checksum, part)
            rows[first : first + len(part)] = part[: max(0, len(rows) - first)]
        self.files.check(block, checksum, name)
        return torch.from_numpy(rows.view(np.float32).reshape(self._rows, -1))

    def flush(self) -> None:
        """Write the blocks that were changed since. Raises StoreError for a full disk."""
        self._settle()
        for block in sorted(self._dirty):
            self.files.store(block, self._there[block])
        self._dirty.clear()

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores; once it is durable: `files.commit`."""
        self.flush()
        return self.files.state()

    def take_rows(self, other: "StoredBlocks", moved: Iterable[MovedRows]) -> None:
        """Go on with the rows and moments of a smaller table of the same columns, read from the disk; new rows begin anew."""
        ranges = list(moved)
        for block in range(len(self.columns)):
            old, new = other.load(block), self.load(block)
            for part in ranges:
                new[:, part.new : part.new + part.count] = old[:, part.old : part.old + part.count]
            self.store(block, new)

    def close(self) -> None:
        """Release files and threads; idempotent."""
        self._pool.shutdown()
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _give_up(self, block: int) -> None:
        """Let go of blocks that do not stay, but for this one; those that were changed are written."""
        for other in [each for each in self._there if each >= self._stay and each != block]:
            buffer = self._there.pop(other)
            if other in self._dirty:
                self._dirty.discard(other)
                self._leaving = self._pool.submit(self.files.store, other, buffer), buffer
            else:
                self._free.append(buffer)

    def _begin(self, block: int) -> None:
        """Read a block; in the thread that writes the one that leaves, so afterwards."""
        if self._free:
            buffer = self._free.pop()
        elif self._leaving is not None:
            buffer = self._leaving[1]
        else:
            buffer = page_buffer(self.files.bucket_bytes)
        self._coming = block, self._pool.submit(self._read, block, buffer), buffer

    def _read(self, block: int, buffer: NDArray[np.uint8]) -> None:
        if self.files.is_written(block):
            self.files.load(block, buffer)
            return
        values, columns = self._values(buffer).numpy(), self.columns[block]
        values[1:] = 0
        first = block * columns
        for start in range(0, self._rows, _ROWS_AT_ONCE):
            node = np.arange(start, min(start + _ROWS_AT_ONCE, self._rows))
            every = np.empty((len(node), first + columns), np.float32)
            keyed_uniform(self._stream, node, self._bound, every)
            values[0, node] = every[:, first:]

    def _arrive(self) -> None:
        """Wait for the block that is read, and for the one that left before."""
        assert self._coming is not None
        (block, done, buffer), self._coming = self._coming, None
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving[0].result()
            if leaving[1] is not buffer:
                self._free.append(leaving[1])
        done.result()
        self._there[block] = buffer

    def _settle(self) -> None:
        """Have nothing under way."""
        if self._coming is not None:
            self._arrive()
        if self._leaving is not None:
            (done, buffer), self._leaving = self._leaving, None
            done.result()
            self._free.append(buffer)

    def _values(self, buffer: NDArray[np.uint8]) -> Tensor:
        size = self.columns[0] * column_bytes(self._rows)
        return torch.from_numpy(buffer[:size].view(np.float32).reshape(PLANES, self._rows, self.columns[0]))

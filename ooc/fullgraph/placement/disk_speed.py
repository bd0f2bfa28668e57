"""How fast a disk is, for rows that are read and written as steps do."""

import shutil
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ooc.fullgraph.placement.costs import Speed
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import read_range, write_range
from stores.arrays.mutable_rows import DiskRows

TRIED_BYTES, _ROUNDS = 128 * 2**20, 5
"""written and read, so many times: a disk may stand still for seconds"""
PIECE_BYTES = 8 * 2**20


class PieceReader:
    """Pieces of a file, one after the other, over and over."""

    def __init__(self, rows: DiskRows) -> None:
        self._rows, self._at = rows, 0
        self._step = max(1, PIECE_BYTES // rows.row_bytes)
        self._buffers = Buffers(kept=2, direct=True, least_bytes=1)

    def some(self) -> None:
        """Read the next piece."""
        first = self._at
        read_range(self._rows, first, min(first + self._step, self._rows.shape[0]), self._buffers)
        self._at = first + self._step if first + 2 * self._step <= self._rows.shape[0] else 0


@contextmanager
def tried(folder: Path, nbytes: int) -> Iterator[DiskRows]:
    """Rows on the disk for a while."""
    path = folder / "profile"
    shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    rows = DiskRows.create(path, (nbytes // PIECE_BYTES * PIECE_BYTES // 1024, 256), "float32", "auto")
    try:
        yield rows
    finally:
        rows.close()
        shutil.rmtree(path, ignore_errors=True)


def disk_speed(folder: Path, nbytes: int = TRIED_BYTES) -> Speed:
    """Bytes a second that are read from and written to a folder's disk, in pieces as steps do."""
    buffers = Buffers(kept=4, direct=True, least_bytes=1)
    with tried(folder, nbytes) as rows, ThreadPoolExecutor(2, thread_name_prefix="ooc-plan") as pool:
        step = PIECE_BYTES // rows.row_bytes
        values: NDArray[np.float32] = buffers.empty((step, 256), np.dtype(np.float32))
        values[:] = 1
        starts = range(0, rows.shape[0], step)
        works: tuple[Callable[[int], int], ...] = (
            lambda first: write_range(rows, first, values),
            lambda first: read_range(rows, first, first + step, buffers)[1],
        )
        taken: list[list[float]] = [[], []]
        for _ in range(_ROUNDS):
            for work, rates in zip(works, taken, strict=True):
                begun = perf_counter()
                nbytes = sum(pool.map(work, starts))
                rates.append(nbytes / (perf_counter() - begun))
    written, read = map(statistics.median, taken)
    return Speed(read=read, written=written)

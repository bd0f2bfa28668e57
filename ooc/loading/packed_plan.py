"""PURE: sampled batches -> groups whose rows are packed on disk in one pass, and where each batch lies there."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.loading.batch_bytes import PackBytes, PackSize
from ooc.loading.shared_scan_plan import SharedScan
from ooc.stores.errors import BudgetError
from ooc.stores.io.pages import PAGE_BYTES, Bytes, page_buffer
from ooc.stores.sizes import format_bytes

_ALIGNED = 64
"""bytes at multiples of which the arrays of an image begin"""


class Place(NamedTuple):
    """Where something is in a file."""

    at: int
    sizes: tuple[int, ...]
    """bytes of its parts, each of which begins at a multiple of 64"""

    @property
    def nbytes(self) -> int:
        """Bytes of the file, in whole pages."""
        return -(-sum(_padded(size) for size in self.sizes) // PAGE_BYTES) * PAGE_BYTES

    @property
    def parts(self) -> list[slice]:
        """Where the parts are in it."""
        begins = accumulate(map(_padded, self.sizes), initial=0)
        return [slice(begin, begin + size) for begin, size in zip(begins, self.sizes, strict=False)]


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class Image:
    """An object as bytes: pickled with its arrays out of band, so that they are copied once when it is written, and not at
    all when it is read."""

    def __init__(self, value: Any) -> None:
        arrays: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
        parts: list[Any] = [head, *(each.raw() for each in arrays)]
        self._parts = [np.frombuffer(part, np.uint8) for part in parts]
        self.place = Place(0, tuple(len(part) for part in self._parts))

    def content(self) -> Bytes:
        """uint8[place.nbytes], page-aligned."""
        out = page_buffer(self.place.nbytes)
        for part, where in zip(self._parts, self.place.parts, strict=True):
            out[where] = part
        return out

    @staticmethod
    def value(place: Place, content: Bytes) -> Any:
        """The object; its arrays are views of `content`."""
        head, *arrays = (content[where].data for where in place.parts)
        return pickle.loads(head, buffers=arrays)


class PackedEntries(NamedTuple):
    """What a batch wants of its own rows, in their order; as of `SharedScan`."""

    first: NDArray[Any]
    target: NDArray[np.int32]
    edge: NDArray[np.float32]


@dataclass(frozen=True)
class DrawnBatch:
    """A sampled batch that waits to be packed. row: [u], ascending, the rows that it wants."""

    row: NDArray[Any]
    rest: Image
    """of its `SharedScan` without entries"""
    entries: Image
    """of its `PackedEntries`"""
    size: PackSize

    @classmethod
    def of(cls, scan: SharedScan, size: PackSize) -> "DrawnBatch":
        """The batch of a scan for it alone."""
        rest = replace(scan.without_entries(), scale=scan.scale)
        return cls(scan.row, Image(rest), Image(PackedEntries(scan.first, scan.target, scan.edge)), size)

    def packed_bytes(self, memory: PackBytes) -> int:
        """Bytes of disk."""
        return self.rest.place.nbytes + self.entries.place.nbytes + memory.packed_bytes(len(self.row))


class PackedBatch(NamedTuple):
    """Where a batch is in the file. rows_at: byte at which its rows begin."""

    rest: Place
    entries: Place
    rows_at: int
    num_rows: int


@dataclass(frozen=True)
class PackedGroup:
    """Batches to pack in one pass. row: the rows that they want, batch k's (ascending) at first[k]:first[k + 1]."""

    batches: tuple[PackedBatch, ...]
    row: NDArray[Any]
    first: NDArray[np.int64]

    def only(self, k: int) -> "PackedGroup":
        """Batch k alone, at its place."""
        own = self.row[self.first[k] : self.first[k + 1]]
        return PackedGroup(self.batches[k : k + 1], own, np.array([0, len(own)]))


class PackDraft:
    """A group in the making.

    pool: bytes for all that packed batches have in memory; begin: byte of the file at which the group's part begins; largest:
    bytes to serve the largest batch before; write: writes an image to its place.
    """

    def __init__(
        self, pool: int, memory: PackBytes, begin: int, largest: int, write: Callable[[Image, Place], None] | None = None
    ) -> None:
        self._pool, self._memory, self._begin, self._write = pool, memory, begin, write
        self.largest, self.used, self.fill = largest, 0, 0.0
        self._batches: list[PackedBatch] = []
        self._rows: list[NDArray[Any]] = []

    def add(self, batch: DrawnBatch) -> bool:
        """Take a batch in, unless the group is full; see `ooc.loading.read_strategy.grouped`."""
        memory, largest = self._memory, max(self.largest, batch.size.memory)
        used, count = self.used + batch.packed_bytes(memory), len(self._batches) + 1
        rows = sum(map(len, self._rows)) + len(batch.row)
        wanted = largest + memory.group_bytes(count, rows, batch.row.itemsize)
        if self._batches and (used > memory.group_disk or wanted > self._pool):
            return False
        if used > memory.group_disk:
            raise BudgetError(
                f"a packed batch takes {format_bytes(used)} of disk and `pack` leaves {format_bytes(memory.group_disk)}, half "
                f"of it: give at least {format_bytes(2 * used + used // 16)}, or leave it out"
            )
        rest = batch.rest.place._replace(at=self._begin + self.used)
        entries = batch.entries.place._replace(at=rest.at + rest.nbytes)
        self._batches.append(PackedBatch(rest, entries, entries.at + entries.nbytes, len(batch.row)))
        self._rows.append(batch.row)
        self.largest, self.used = largest, used
        self.fill = max(used / memory.group_disk, wanted / self._pool)
        if self._write is not None:
            self._write(batch.rest, rest)
            self._write(batch.entries, entries)
        return True

    def finish(self) -> PackedGroup:
        first = np.zeros(len(self._rows) + 1, np.int64)
        np.cumsum([len(each) for each in self._rows], out=first[1:])
        row = np.concatenate(self._rows)
        self._rows.clear()
        return PackedGroup(tuple(self._batches), row, first)


def runs(count: int, most: int) -> list[tuple[int, int]]:
    """0:count in runs of `most`."""
    return list(pairwise([*range(0, count, most), count]))

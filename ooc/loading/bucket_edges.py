"""Training edges on disk, sorted once by the buckets of their two ends, and read back a part of a pair of buckets at a time.

An edge is (source, destination, relation), 8 or 12 bytes, 16 or 24 where nodes need 64 bits. The edges of a pair are divided
into parts at random, by edge, so that a part fits memory; an epoch takes them in a random order, and the edges of each in
another one.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import KeyedPermutation, Purpose, key, mix64, numbered
from ooc.stores.errors import StoreError
from ooc.stores.ingest.key_sort import sorted_by_key
from ooc.stores.io.atomic import disk_errors, partial_path, publish, write_file
from ooc.stores.io.pages import PAGE_BYTES, PageFile, page_buffer
from ooc.stores.jit import kernel

DATA, OFFSETS, CHECKSUMS, ABOUT = "edges.bin", "offsets.npy", "checksums.npy", "edges.json"
_AGAIN = "remove it, and the run sorts its edges again"
PART_EDGES = 2**20
"""edges of a part on average, at most"""
Ints = NDArray[np.int64]
Edges = NDArray[Any]
"""int32 or int64 [n, 2 or 3]: sources, destinations, and relations where there are any"""
Piece = tuple[Ints, Ints, Ints | None]


@dataclass(frozen=True)
class EdgeShape:
    """What training edges are divided by.

    nodes: number of nodes; edges: about how many edges; buckets: of nodes; relations: whether edges have any.
    """

    nodes: int
    edges: int
    buckets: int
    relations: bool

    @property
    def columns(self) -> int:
        return 2 + self.relations

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int32 if self.nodes < 2**31 else np.int64)

    @property
    def edge_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def parts(self) -> int:
        """Parts of every pair of buckets."""
        return max(1, -(-self.edges // (self.buckets**2 * PART_EDGES)))


class BucketEdges:
    """Edges in the directory `path`; use `sort` or `open`.

    >>> edges = BucketEdges.sort(Path("run/edges"), shape, pieces, seed=0, room=10**8)
    >>> edges.read(0, 1, part=0)
    array([[0, 1, 7]], dtype=int32)
    """

    def __init__(self, path: Path, shape: EdgeShape, offsets: Ints, checksums: NDArray[np.uint32]) -> None:
        self.path, self.shape, self._offsets, self._checksums = path, shape, offsets, checksums
        self._file = PageFile(path / DATA, _padded(int(offsets[-1]) * shape.edge_bytes))
        self.bytes_read = 0

    @classmethod
    def sort(cls, path: Path, shape: EdgeShape, pieces: Iterator[Piece], seed: int, room: int) -> Self:
        """Sort edges into a new directory.

        Args:
            path: The directory, which must not exist; a process that is killed leaves none.
            shape: What they are divided by.
            pieces: The edges, (sources int64[k], destinations int64[k], relations int64[k] or None) at a time.
            seed: Which edges are in a part together.
            room: Memory for the edges that are sorted at a time, in bytes.

        Raises:
            StoreError: The disk is full, or refuses.
        """
        partial = partial_path(path)
        with disk_errors(path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        try:
            offsets, checksums = _write_sorted(partial, shape, pieces, seed, room)
            about = {"nodes": shape.nodes, "edges": shape.edges, "buckets": shape.buckets, "relations": shape.relations}
            write_file(partial / ABOUT, json.dumps(about).encode() + b"\n")
            with disk_errors(path):
                np.save(partial / OFFSETS, offsets)
                np.save(partial / CHECKSUMS, checksums)
            publish(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return cls(path, shape, offsets, checksums)

    @classmethod
    def open(cls, path: Path, shape: EdgeShape) -> Self:
        """Open edges that were sorted. Raises StoreError if they are damaged, or others."""
        try:
            about = json.loads((path / ABOUT).read_bytes())
            offsets, checksums = np.load(path / OFFSETS), np.load(path / CHECKSUMS)
            size = (path / DATA).stat().st_size
        except (ValueError, OSError) as error:
            raise StoreError(f"{path} cannot be read ({error}): {_AGAIN}") from None
        if about != {"nodes": shape.nodes, "edges": shape.edges, "buckets": shape.buckets, "relations": shape.relations}:
            raise StoreError(f"{path} is of other edges than the run's: {_AGAIN}")
        if size != _padded(int(offsets[-1]) * shape.edge_bytes):
            raise StoreError(f"{path / DATA} was cut or changed: remove {path}, and the run sorts its edges again")
        return cls(path, shape, offsets, checksums)

    def counts(self) -> Ints:
        """Edges by (bucket of the source, bucket of the destination, part), int64 [p, p, parts]."""
        return np.diff(self._offsets).reshape(self.shape.buckets, self.shape.buckets, self.shape.parts)

    @property
    def most(self) -> int:
        """Edges of the largest part."""
        return int(np.diff(self._offsets).max(initial=0))

    def read(self, source: int, destination: int, part: int) -> Edges:
        """The edges of a part of a pair of buckets, in the order of the input.

        Raises:
            StoreError: The disk fails, or the bytes are not those that were written.
        """
        block = (source * self.shape.buckets + destination) * self.shape.parts + part
        first, last = (int(at) * self.shape.edge_bytes for at in self._offsets[block : block + 2])
        begin, end = first // PAGE_BYTES * PAGE_BYTES, -(-last // PAGE_BYTES) * PAGE_BYTES
        buffer = page_buffer(end - begin)
        if end > begin:
            self._file.load(begin, buffer)
        self.bytes_read += end - begin
        found = buffer[first - begin : last - begin]
        if google_crc32c.value(found) != self._checksums[block]:
            raise StoreError(f"{self.path / DATA} is damaged: remove {self.path}, and the run sorts its edges again")
        return found.view(self.shape.dtype).reshape(-1, self.shape.columns)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def shuffled(edges: Edges, seed: int, epoch: int, block: int) -> Edges:
    """The edges of part number `block` of all in the order of an epoch."""
    return edges[KeyedPermutation(len(edges), numbered(key(seed, Purpose.SHUFFLE, epoch, 1), 1 + block))[:]]


def _write_sorted(
    folder: Path, shape: EdgeShape, pieces: Iterator[Piece], seed: int, room: int
) -> tuple[Ints, NDArray[np.uint32]]:
    """Write `DATA`, padded to a page; where each block begins, int64[blocks + 1], and the checksum of each, uint32[blocks]."""
    low_bits = max(1, shape.edges.bit_length())
    blocks = shape.buckets**2 * shape.parts
    columns = {str(i): shape.dtype for i in range(shape.columns)}
    counts, checksums = np.zeros(blocks, np.int64), np.zeros(blocks, np.uint32)
    sizes = {"count": shape.edges, "bits": low_bits + max(1, (blocks - 1).bit_length()), "low_bits": low_bits}
    keyed = _keyed(pieces, shape, np.uint64(key(seed, Purpose.BUCKETS, 0, 1)), low_bits)
    with disk_errors(folder / DATA), (folder / DATA).open("wb") as file:
        for keys, values in sorted_by_key(keyed, columns, **sizes, room=room, spill=folder / "spill"):
            own = np.bincount(keys >> low_bits, minlength=blocks)
            edges = np.stack([values[name] for name in columns], 1)
            _extend(checksums, own, edges)
            counts += own
            file.write(edges.data)
        file.write(b"\0" * (-file.tell() % PAGE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return np.concatenate([[0], np.cumsum(counts)]), checksums


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _extend(checksums: NDArray[np.uint32], counts: Ints, edges: Edges) -> None:
    """Extend the checksums of blocks by `edges`, which have so many of each block, in order of these."""
    end = np.cumsum(counts)
    for block in np.flatnonzero(counts).tolist():
        part = edges[end[block] - counts[block] : end[block]]
        checksums[block] = google_crc32c.extend(int(checksums[block]), part.reshape(-1).view(np.uint8))


def _keyed(pieces: Iterator[Piece], shape: EdgeShape, stream: np.uint64, low_bits: int) -> Iterator[Any]:
    """Keys that sort edges by block and then by their number, and their columns."""
    number = 0
    for source, destination, relation in pieces:
        keys = np.empty(len(source), np.int64)
        _block_keys(source, destination, shape.buckets, shape.parts, stream, number, low_bits, keys)
        columns = [source, destination, *([] if relation is None else [relation])]
        yield keys, {str(i): column.astype(shape.dtype) for i, column in enumerate(columns)}
        number += len(source)


@kernel
def _block_keys(
    source: Ints, destination: Ints, buckets: int, parts: int, stream: np.uint64, number: int, low_bits: int, keys: Ints
) -> None:
    for i in range(len(source)):
        part = np.int64(mix64(stream ^ np.uint64(number + i)) % np.uint64(parts))
        block = ((source[i] % buckets) * buckets + destination[i] % buckets) * parts + part
        keys[i] = (block << low_bits) | (number + i)

"""`Segments`: an array's shard files as one sequence of bytes, and one memory map over all of them."""

import ctypes
import ctypes.util
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import StoreError
from ooc.stores.io.bus_errors import Watched
from ooc.stores.io.chunk_sums import ChunkSums

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_BLOCK_BYTES = 2**20
_MAP_FAILED = ctypes.c_void_p(-1).value


Local = Callable[[int, NDArray[np.uint8]], None]
"""local(begin, out): fills `out` with virtual bytes that the files hold"""


class Far(Protocol):
    """An array far away of which files hold a part; see `ooc.stores.io.remote.array.RemoteArray`."""

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make the files hold all of it."""

    def read(self, begin: int, out: NDArray[np.uint8], local: Local) -> None:
        """Fill `out` with virtual bytes from `begin` on."""

    def check(self, numbers: Sequence[int], local: Local) -> None:
        """Compare chunks with their checksums."""

    def objects(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield (number, bytes) of every chunk as it is far away."""


@dataclass(frozen=True)
class Segments:
    """Files whose first `payload` bytes, concatenated, are the virtual bytes of one array.

    Attributes:
        paths: The files.
        payload: int64[k], useful bytes of each file, a multiple of 4096 except in the last.
        sums: Checksums of the array's chunks; None if there are none.
        far: The array far away, of which the files have holes for what is not there yet; None if it is on this disk.

    >>> Segments((Path("c/0/0"), Path("c/1/0")), np.array([2**30, 2**20])).total
    1074790400
    """

    paths: tuple[Path, ...]
    payload: NDArray[np.int64]
    sums: ChunkSums | None = None
    far: Far | None = None

    @property
    def start(self) -> NDArray[np.int64]:
        """int64[k + 1]: virtual byte at which each file begins; the last entry is the total."""
        start = np.zeros(len(self.paths) + 1, np.int64)
        np.cumsum(self.payload, out=start[1:])
        return start

    @property
    def total(self) -> int:
        """Number of virtual bytes."""
        return int(self.payload.sum())

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Fetch what the files lack of an array far away; progress(done, total) is in bytes. Raises StoreError as it does."""
        if self.far is not None:
            self.far.fill(progress)

    def read(self, begin: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the virtual bytes from `begin` on, through the page cache.

        Raises StoreError if a file is too short or cannot be read.
        """
        if self.far is not None:
            self.far.read(begin, out, self._read)
        else:
            self._read(begin, out)

    def _read(self, begin: int, out: NDArray[np.uint8]) -> None:
        start = self.start
        while len(out):
            number = int(np.searchsorted(start, begin, side="right")) - 1
            part, path, offset = out[: int(start[number + 1]) - begin], self.paths[number], begin - int(start[number])
            with _opened(path, offset + len(part)) as fd:
                _fill(fd, path, offset, part)
            begin, out = begin + len(part), out[len(part) :]

    def blocks(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Read the whole array sequentially and compare it with its checksums: yields (first virtual byte, bytes).

        A block is valid until the next one, and the last one of a file may be shorter. Raises StoreError as `read` does, and
        for a chunk that does not match its checksum.
        """
        self.fill()
        scratch = np.empty(_BLOCK_BYTES, np.uint8)
        # Each block by a file descriptor of its own: along one, Linux's readahead takes ever larger folios, and in a virtual
        # machine that gives free memory back to its host these are slow to get (386 MB: 0.6 s, with small ones 0.23 s).
        for path, begin, payload in zip(self.paths, self.start.tolist(), self.payload.tolist(), strict=False):
            for offset in range(0, payload, len(scratch)):
                block = scratch[: payload - offset]
                with _opened(path, payload) as fd:
                    _fill(fd, path, offset, block)
                if self.sums is not None:
                    self.sums.see(begin + offset, block)
                yield begin + offset, block

    def check(self, offset: NDArray[np.int64], length: NDArray[np.int64]) -> None:
        """Read the chunks that the extents touch (int64[k] each, bytes) and compare those that were not compared yet.

        Raises StoreError as `blocks` does.
        """
        if self.sums is None or not self.sums.pending:
            return
        if self.far is not None:
            self.far.check(self.sums.unchecked(offset, length), self._read)
            return
        scratch = np.empty(self.sums.chunk_bytes, np.uint8)
        for number in self.sums.unchecked(offset, length):
            begin = number * len(scratch)
            chunk = scratch[: self.total - begin]
            self.read(begin, chunk)
            self.sums.see(begin, chunk)


class _Mapping:
    """Owns the address range, which is unmapped when the last array over it is gone."""

    watched: list[Watched]

    def __init__(self, nbytes: int, segments: Segments, writable: bool = False) -> None:
        self.nbytes = nbytes
        self.segments = segments
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = _map(None, nbytes, mmap.PROT_READ, flags, -1, "an address range")
        # Not at interpreter exit: threads may still be reading, and the kernel unmaps anyway.
        self.watched = []
        weakref.finalize(self, _unmap, self.address, nbytes, self.watched).atexit = False
        self.__array_interface__ = {"data": (self.address, not writable), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _unmap(address: int, nbytes: int, watched: list[Watched]) -> None:
    for each in watched:
        each.close()
    _LIBC.munmap(address, nbytes)


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int, what: object) -> int:
    mapped: int | None = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        raise StoreError(f"{what} of {nbytes} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return mapped


def map_segments(segments: Segments, random: bool = True, checked: bool = False, private: bool = False) -> NDArray[np.uint8]:
    """Map all payloads as one read-only uint8[total], file after file in one address range (MAP_FIXED).

    `random` sets MADV_RANDOM (no readahead). A `private` map can be written to, which copies the page and leaves the file as it
    is. The map lives as long as any array over it. If a page cannot be read, the process ends with an error message; with
    `checked`, the page is read as zeros and `check_map` raises StoreError afterwards. Raises StoreError if a file is shorter
    than its payload or cannot be opened.

    >>> indices = map_segments(segments).view(np.int32)
    """
    total = segments.total
    if total == 0:
        return np.empty(0, np.uint8)
    start = segments.start
    mapping = _Mapping(-(-total // mmap.PAGESIZE) * mmap.PAGESIZE, segments, private)
    how = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
    protection = mmap.PROT_READ | mmap.PROT_WRITE if private else mmap.PROT_READ
    for path, first, payload in zip(segments.paths, start, segments.payload, strict=False):
        fd = open_for_reading(path, int(payload))
        try:
            address = mapping.address + int(first)
            _map(address, int(payload), protection, how | _MAP_FIXED, fd, path)
        finally:
            os.close(fd)
        mapping.watched.append(Watched(address, int(payload), path, checked))
    if random:
        _LIBC.madvise(mapping.address, total, mmap.MADV_RANDOM)
    array: NDArray[Any] = np.asarray(mapping)
    return array[:total]


def mapping_of(array: NDArray[Any]) -> _Mapping | None:
    """Return the map of `map_segments` that contains the array's bytes, or None."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, _Mapping) else None


def check_map(array: NDArray[Any]) -> None:
    """Raise StoreError if a page of a map made with `checked` could not be read."""
    mapping = mapping_of(array)
    for each in mapping.watched if mapping is not None else ():
        each.check()


def warm(array: NDArray[Any]) -> int:
    """Read a mapped array's files sequentially into the page cache; returns the bytes read, 0 if it is not mapped.

    Random page faults would read the same bytes at a fraction of the sequential speed. The map is no longer MADV_RANDOM: where
    memory is short, Linux gives up the pages of such maps first, however often they are used. Raises StoreError if the array
    cannot be read or does not match its checksums.

    >>> warm(graph.indices)
    """
    mapping = mapping_of(array)
    if mapping is None:
        return 0
    for _ in mapping.segments.blocks():
        pass
    _LIBC.madvise(mapping.address, mapping.nbytes, mmap.MADV_NORMAL)
    return mapping.segments.total


def forget(array: NDArray[Any]) -> None:
    """Unmap a mapped array's pages from this process; they stay in the page cache and are mapped again on access.

    Without it, random access would gradually map the whole array. Arrays in RAM are ignored.
    """
    mapping = mapping_of(array)
    if mapping is not None:
        _LIBC.madvise(mapping.address, mapping.nbytes, mmap.MADV_DONTNEED)


def map_of(file: Path) -> tuple[int, int] | None:
    """Return (address, bytes) of a file that another library has mapped in this process, or None.

    >>> map_of(Path("x.lmdb/data.mdb"))
    """
    inode = file.stat().st_ino
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, number, *name = line.split(maxsplit=5)
        if int(number) == inode and name and os.path.basename(name[0]) == file.name:
            first, stop = (int(each, 16) for each in span.split("-"))
            return first, stop - first
    return None


def forget_map(address: int, nbytes: int) -> None:
    """`forget` for a result of `map_of`."""
    _LIBC.madvise(address, nbytes, mmap.MADV_DONTNEED)


@contextmanager
def _opened(path: Path, nbytes: int) -> Iterator[int]:
    fd = open_for_reading(path, nbytes)
    try:
        yield fd
    finally:
        os.close(fd)


def _fill(fd: int, path: Path, offset: int, out: NDArray[np.uint8]) -> None:
    """Fill `out` from byte `offset` of a file on."""
    left = out.data
    try:
        while len(left):
            got = os.preadv(fd, [left], offset)
            if not got:
                raise StoreError(f"{path} is truncated at byte {offset}: run `ooc verify` on the store and ingest it again")
            offset, left = offset + got, left[got:]
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read at byte {offset}: {error.strerror}; check the disk, then verify the store or write it again"
        ) from None


def open_for_reading(path: Path, nbytes: int, flags: int = 0) -> int:
    """Open a file with at least `nbytes`. Raises StoreError if it is shorter or cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: the store was moved or is incomplete; restore it, or ingest it again") from error
    size = os.fstat(fd).st_size
    if size < nbytes:
        os.close(fd)
        raise StoreError(f"{path} is truncated: {size} bytes where {nbytes} belong; write the store again")
    return fd

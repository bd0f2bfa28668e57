"""Leases of large buffers that are used again: aligned, and page-locked where batches go on to CUDA.

Fresh memory costs a page fault every few kilobytes: where an array of 50 MB is gathered for every batch, the system would zero
as many bytes first, and take them back afterwards. Page-locking costs as much once more, so there it matters twice.

A lease ends with the last reference to its memory. Whoever copies from it asynchronously keeps a reference until the copy's
event has passed (`ooc.runtime.transfer` does), so no buffer is written to while the GPU still reads it.
"""

import mmap
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_BYTES = 2**20
"""Smaller arrays are left to the allocator, which keeps them anyway"""
PAGE_BYTES = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context


class Buffers:
    """Gives arrays whose memory comes back when the last reference to them, or to a tensor over them, is gone.

    kept: buffers that wait for their next use at most, beside those in use. max_bytes: of all buffers, in use and waiting;
    an array beyond it is ordinary memory (never waited for: a user may hold on to any number of batches). pinned:
    page-locked for CUDA, from the first byte of a page to the last. direct: for reads straight from the disk; forked processes
    do not get them, else a fork meanwhile might leave this process with a copy that lacks what comes (open(2) on O_DIRECT).
    least_bytes: of an array that gets a buffer; most_kept: bytes of one that waits, larger ones go back to the system at once.
    Pipelines reserve a batch's bytes in step order before they ask for its memory, so it is the oldest batches that get leases.

    >>> buffers = Buffers(kept=2)
    >>> x = buffers.empty((100_000, 128), np.dtype(np.float32))
    """

    def __init__(
        self,
        kept: int,
        *,
        max_bytes: int | None = None,
        pinned: bool = False,
        direct: bool = False,
        least_bytes: int = LEAST_BYTES,
        most_kept: int | None = None,
    ) -> None:
        self.pinned, self._direct = pinned, direct
        self.refused = 0
        """arrays that got ordinary memory, because of `max_bytes`"""
        # Of bounded length, and filled without a lock: a buffer may come back in a collection, in the middle of anything.
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=kept)
        self._out: dict[int, tuple[int, int]] = {}  # lease -> address and bytes; single operations on it need no lock
        self._number = 0
        self._max_bytes, self._least_bytes, self._most_kept = max_bytes, max(1, least_bytes), most_kept
        self._lock = threading.Lock()

    @property
    def out_bytes(self) -> int:
        """Bytes of the buffers in use."""
        return sum(nbytes for _, nbytes in self._out.copy().values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.out_bytes + sum(buffer.nbytes for buffer in self._free.copy())

    def holds(self, address: int) -> bool:
        """Whether memory at this address (of an array's or a tensor's storage) lies in a lease of these buffers."""
        return any(begin <= address < begin + nbytes for begin, nbytes in self._out.copy().values())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An uninitialised array."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes < self._least_bytes:
            return np.empty(shape, dtype)
        lease = self._lease(nbytes)
        if lease is None:
            return np.empty(shape, dtype)
        return lease[:nbytes].view(dtype).reshape(shape)

    def _lease(self, nbytes: int) -> NDArray[np.uint8] | None:
        with self._lock:
            buffer = self._waiting(nbytes)
            if buffer is None:
                room = None if self._max_bytes is None else (self._max_bytes - self.nbytes) // PAGE_BYTES * PAGE_BYTES
                wanted = -(-nbytes * 9 // 8 // PAGE_BYTES) * PAGE_BYTES  # batches differ in size a little
                wanted = wanted if room is None else min(wanted, room)
                if wanted < nbytes:
                    self.refused += 1
                    return None
                buffer = _unforked(wanted) if self._direct else _aligned(wanted, self.pinned)
            self._number = number = self._number + 1
            self._out[number] = buffer.ctypes.data, buffer.nbytes
        lease: NDArray[np.uint8] = leased(buffer, _end, self._out, self._free, self._most_kept, number, buffer)
        return lease

    def _waiting(self, nbytes: int) -> NDArray[np.uint8] | None:
        """A buffer that is large enough, out of those that wait; the smaller ones are given up."""
        while self._free:
            buffer = self._free.pop()
            if buffer.nbytes >= nbytes:
                return buffer
        return None


class _Lease:
    """What arrays over a buffer refer to."""

    def __init__(self, buffer: NDArray[Any]) -> None:
        self.__array_interface__ = buffer.__array_interface__


def leased(buffer: NDArray[Any], end: Callable[..., object], *arguments: Any) -> NDArray[Any]:
    """`buffer` as an array at whose end, that of all its views and of tensors over them too, `end(*arguments)` is called."""
    lease = _Lease(buffer)
    weakref.finalize(lease, end, *arguments).atexit = False
    return np.asarray(lease)


def _end(
    out: dict[int, tuple[int, int]], free: "deque[NDArray[np.uint8]]", most: int | None, number: int, buffer: NDArray[np.uint8]
) -> None:
    """A lease's end, in any thread; in this order, so that no buffer is missing from the count in between."""
    if most is None or buffer.nbytes <= most:
        free.append(buffer)
    out.pop(number, None)


def _aligned(nbytes: int, pinned: bool) -> NDArray[np.uint8]:
    """uint8[nbytes], whole pages from the beginning of one; page-locked until it goes where `pinned`."""
    raw = np.empty(nbytes + PAGE_BYTES, np.uint8)
    begin = -raw.ctypes.data % PAGE_BYTES
    buffer = raw[begin : begin + nbytes]
    if pinned:
        _lock_pages(raw, buffer.ctypes.data, nbytes)
    return buffer


def _unforked(nbytes: int) -> NDArray[np.uint8]:
    """uint8[nbytes], whole pages that a forked process does not have."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _lock_pages(owner: NDArray[np.uint8], address: int, nbytes: int) -> None:
    """Page-lock memory until its `owner` goes. Where CUDA refuses, it stays ordinary: copies from it are slower, and right."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
    if error:
        warnings.warn(
            f"CUDA cannot page-lock {nbytes:,} bytes (error {error}): copies to the GPU are slower; raise `ulimit -l`, or the "
            "container's memory limit",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    weakref.finalize(owner, cudart.cudaHostUnregister, address).atexit = False  # before numpy gives the memory back

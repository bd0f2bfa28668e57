"""Reusable leases of large buffers, aligned and, for CUDA, page-locked.

Fresh memory costs a page fault every few kilobytes, and page-locking as much again, so arrays gathered for every batch reuse
buffers. A lease ends with the last reference to its memory; asynchronous copies hold a reference until their event has passed
(see `ooc.runtime.transfer`), so no buffer is overwritten while the GPU reads it.
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
from numpy.typing import DTypeLike, NDArray

from ooc.stores.sizes import format_bytes

LEAST_BYTES = 2**20
"""smaller arrays are left to the allocator, which caches them itself"""
PAGE_BYTES = 4096
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, since Linux 4.14
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context
_MORE, _PINNED_MORE = 8, 3
"""A buffer is larger by such a share than what it is made for, as batches differ in size: page-locking a larger one stops all
that goes on on the GPU"""
_LOCKED = 712  # cudaErrorHostMemoryAlreadyRegistered
_owners: dict[tuple[Any, int, int], int] = {}
"""of page-locked memory: (CUDA's functions, address, bytes) -> how many there are"""
_locking = threading.RLock()  # an owner may end in a garbage collection of the thread that has it


class Buffers:
    """Allocates arrays whose memory is reused when the last reference to them, or to a tensor over them, is gone.

    Pipelines reserve a batch's bytes in step order before requesting its memory, so the oldest batches get the leases. At most
    `kept` idle buffers are kept for reuse, none larger than `most_kept`. Arrays smaller than `least_bytes`, or beyond
    `max_bytes` of all buffers in use and idle, use ordinary memory without waiting, since users may keep any number of batches.
    `direct` buffers are for O_DIRECT reads, and are zeros in a forked process (see open(2)); `pinned` are page-locked for CUDA.
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
        """arrays that got ordinary memory because of `max_bytes`"""
        # Bounded, and filled without a lock: a garbage collection may return a buffer at any point.
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=kept)
        self._out: dict[int, tuple[int, int]] = {}  # lease -> (address, bytes); its operations are atomic
        self._number = 0
        self._max_bytes, self._least_bytes, self._most_kept = max_bytes, max(1, least_bytes), most_kept
        self._lock = threading.Lock()

    @property
    def out_bytes(self) -> int:
        """Bytes of the buffers in use."""
        return sum(nbytes for _, nbytes in self._out.copy().values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use and idle."""
        return self.out_bytes + sum(buffer.nbytes for buffer in self._free.copy())

    def holds(self, address: int) -> bool:
        """Whether the address (of an array or a tensor's storage) lies in a lease of these buffers."""
        return any(begin <= address < begin + nbytes for begin, nbytes in self._out.copy().values())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        lease = None if nbytes < self._least_bytes else self._lease(nbytes)
        return np.empty(shape, dtype) if lease is None else lease[:nbytes].view(dtype).reshape(shape)

    def _lease(self, nbytes: int) -> NDArray[np.uint8] | None:
        with self._lock:
            buffer = self._waiting(nbytes)
            if buffer is None:
                room = None if self._max_bytes is None else (self._max_bytes - self.nbytes) // PAGE_BYTES * PAGE_BYTES
                more = nbytes // (_PINNED_MORE if self.pinned else _MORE)
                needed = -(-(nbytes + more) // PAGE_BYTES) * PAGE_BYTES
                needed = needed if room is None else min(needed, room)
                if needed < nbytes:
                    self.refused += 1
                    return None
                buffer = _unforked(needed) if self._direct else _aligned(needed, self.pinned)
            self._number = number = self._number + 1
            self._out[number] = buffer.ctypes.data, buffer.nbytes
        return leased(buffer, _end, self._out, self._free, self._most_kept, number, buffer)

    def _waiting(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Pop an idle buffer that is large enough, dropping smaller ones."""
        while self._free:
            buffer = self._free.pop()
            if buffer.nbytes >= nbytes:
                return buffer
        return None


class _Lease:
    """Referenced by all arrays over a buffer."""

    def __init__(self, buffer: NDArray[Any]) -> None:
        self.__array_interface__ = buffer.__array_interface__


def leased(buffer: NDArray[Any], end: Callable[..., object], *arguments: Any) -> NDArray[Any]:
    """Return `buffer` as an array; `end(*arguments)` is called when it, its views and tensors over them are gone."""
    lease = _Lease(buffer)
    weakref.finalize(lease, end, *arguments).atexit = False
    return np.asarray(lease)


def _end(
    out: dict[int, tuple[int, int]], free: "deque[NDArray[np.uint8]]", most: int | None, number: int, buffer: NDArray[np.uint8]
) -> None:
    """End a lease, in any thread; in this order, so that no buffer is missing from the count in between."""
    if most is None or buffer.nbytes <= most:
        free.append(buffer)
    out.pop(number, None)


def _aligned(nbytes: int, pinned: bool) -> NDArray[np.uint8]:
    """Return page-aligned uint8[nbytes], page-locked while it lives if `pinned`."""
    raw = np.empty(nbytes + PAGE_BYTES, np.uint8)
    begin = -raw.ctypes.data % PAGE_BYTES
    buffer = raw[begin : begin + nbytes]
    if pinned:
        _lock_pages(raw, buffer.ctypes.data, nbytes)
    return buffer


def _unforked(nbytes: int) -> NDArray[np.uint8]:
    """Return page-aligned uint8[nbytes] whose pages a fork does not copy: a forked process has zeros there.

    Addresses stay taken in it. With MADV_DONTFORK they would be those of other memory soon, and a garbage collection that ends
    the array there would unmap that.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(_WIPE_ON_FORK)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def own_pages(count: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros, [count], in pages of their own, which the system has back as soon as the last reference is gone.

    For arrays that outlive those allocated beside them: in the C library's heap they leave holes (of shared scans 150 MB).
    """
    dtype = np.dtype(dtype)
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, count)


def page_lock(owner: Any, address: int, nbytes: int) -> int:
    """Page-lock memory for CUDA while `owner` lives: CUDA's error, 0 if it is done. Owners of the same memory share it."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    key = cudart, address, nbytes
    with _locking:
        _owners[key] = _owners.get(key, 0) + 1  # first of all: a garbage collection may end another owner
        error = 0 if _owners[key] > 1 else int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
        if not error:  # undone before the memory is given back
            weakref.finalize(owner, _unlock, key).atexit = False
            return 0
        del _owners[key]
    # CUDA keeps the error for this thread, and torch would raise it after the next kernel: after this one instead
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return error


def _unlock(key: tuple[Any, int, int]) -> None:
    """An owner of page-locked memory is gone."""
    with _locking:
        _owners[key] -= 1
        if not _owners[key]:
            del _owners[key]
            key[0].cudaHostUnregister(key[1])


def lock_failed(nbytes: int, error: int) -> str:
    """Why CUDA has not page-locked so much memory, and what to do, for people."""
    what = "part of it is page-locked by something else in this process" if error == _LOCKED else "raise `ulimit -l`"
    return f"CUDA cannot page-lock {format_bytes(nbytes)} (error {error}; {what})"


def _lock_pages(owner: NDArray[np.uint8], address: int, nbytes: int) -> None:
    """Page-lock memory while `owner` lives; if CUDA refuses, copies from it are correct but slower."""
    error = page_lock(owner, address, nbytes)
    if error:
        warnings.warn(
            f"CUDA cannot page-lock {nbytes:,} bytes (error {error}): copies to the GPU are slower; raise `ulimit -l`, or the "
            "container's memory limit",
            RuntimeWarning,
            stacklevel=2,
        )

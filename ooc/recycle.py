"""Large arrays used again once nobody refers to them: fresh memory costs a page fault every few kilobytes.

Where an array of 50 MB is gathered for every batch, the system would zero as many bytes first, and take them back afterwards.
"""

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES = 2**20
"""Smaller arrays are left to the allocator, which keeps them anyway"""


class Recycler:
    """Gives arrays whose memory comes back when the last reference to them, or to a tensor over them, is gone.

    kept: buffers that wait for their next use at most, beside those in use.

    >>> recycler = Recycler(kept=2)
    >>> x = recycler.empty((100_000, 128), np.dtype(np.float32))
    """

    def __init__(self, kept: int) -> None:
        # Of bounded length, and filled without a lock: a buffer may come back in a collection, in the middle of anything.
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=kept)
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An uninitialised array."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes < LEAST_BYTES:
            return np.empty(shape, dtype)
        return np.asarray(self._lease(nbytes))[:nbytes].view(dtype).reshape(shape)

    def _lease(self, nbytes: int) -> "_Lease":
        buffer = self._waiting(nbytes)
        if buffer is None:
            buffer = np.empty(nbytes * 9 // 8, np.uint8)  # batches differ in size a little
        lease = _Lease(buffer)
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return lease

    def _waiting(self, nbytes: int) -> NDArray[np.uint8] | None:
        """A buffer that is large enough, out of those that wait; the smaller ones are given up."""
        with self._lock:
            while self._free:
                buffer = self._free.pop()
                if buffer.nbytes >= nbytes:
                    return buffer
        return None


class _Lease:
    """What arrays over a buffer refer to."""

    def __init__(self, buffer: NDArray[np.uint8]) -> None:
        self.__array_interface__ = buffer.__array_interface__

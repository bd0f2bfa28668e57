"""Thread pools shared by the whole process, started by their first user and ended by their last."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import StoreError

T = TypeVar("T")


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, none of them None, with the next one computed by a thread."""
    with ThreadPoolExecutor(1, "ooc-ahead") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


class SharedPool:
    """A named pool of at most `threads` threads, reference-counted by `acquire` and `release`.

    >>> pool = READERS.acquire()
    >>> pool.submit(work)
    >>> READERS.release()
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.threads = threads
        self._lock = threading.Lock()
        self._users = 0
        self._pool: ThreadPoolExecutor | None = None
        os.register_at_fork(after_in_child=self._start_afresh)

    def _start_afresh(self) -> None:
        """Reset after a fork: the child has none of the threads, and another thread may have had the lock."""
        self._lock, self._pool = threading.Lock(), None

    def acquire(self) -> ThreadPoolExecutor:
        """Return the pool; every call needs its own `release`."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=self.name)
            self._users += 1
            return self._pool

    def release(self) -> None:
        """End the threads if this was the last user, after their current work."""
        with self._lock:
            self._users -= 1
            pool = self._pool if self._users == 0 else None
            if pool is not None:
                self._pool = None
        if pool is not None:
            pool.shutdown(wait=True)


READERS = SharedPool("ooc-read", 128)
"""reading threads; each waits for one read at a time, so their number is the queue depth"""
BACKGROUND = SharedPool("ooc-rows", 8)
"""threads that execute `Rows.submit`; they wait on READERS, so they cannot be in that pool"""


class Background:
    """Implements `submit` of Rows: `read` in a thread of the shared pool."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _pool: ThreadPoolExecutor | None = None
    _ended = False
    _pool_lock = threading.Lock()

    def read(self, ids: NDArray[np.int64], out: NDArray[Any]) -> int:
        raise NotImplementedError

    def submit(self, ids: NDArray[np.int64], out: NDArray[Any]) -> Future[int]:
        """`read` in the background; do not use `out` until the future is done. Raises StoreError after `close`."""
        with self._pool_lock:
            if self._ended:  # a pool acquired now would never be released
                raise StoreError(f"the rows {self.dtype}{list(self.shape)} are closed: open them again to read from them")
            if self._pool is None:
                self._pool = BACKGROUND.acquire()
            return self._pool.submit(self.read, ids, out)

    def _end_background(self) -> None:
        with self._pool_lock:
            used, self._pool, self._ended = self._pool is not None, None, True
        if used:
            BACKGROUND.release()

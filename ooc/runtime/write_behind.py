"""Writes in the background, a few at a time, in the order they came."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from stores.errors import StoreError


class WriteBehind:
    """Runs writes in threads. threads: of them; depth: writes that may wait, besides the one that is handed over.

    >>> writes = WriteBehind("ooc-write", depth=4)
    >>> writes.submit(lambda: file.store(0, copy))
    >>> writes.drain()
    """

    def __init__(self, name: str, depth: int, threads: int = 2) -> None:
        self._pool, self._depth = ThreadPoolExecutor(threads, thread_name_prefix=name), depth
        self._pending: deque[Future[None]] = deque()

    def make_room(self) -> None:
        """Wait until fewer than `depth` writes wait. Raises StoreError where one failed."""
        while len(self._pending) >= self._depth:
            self._pending.popleft().result()

    def submit(self, write: Callable[[], None]) -> None:
        """Have something written, once there is room for it."""
        self.make_room()
        self._pending.append(self._pool.submit(write))

    def drain(self) -> None:
        """Wait until all is written. Raises StoreError, the first one, where something could not be."""
        failure: StoreError | None = None
        while self._pending:
            try:
                self._pending.popleft().result()
            except StoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the threads, without what has not begun; idempotent."""
        self._pool.shutdown(cancel_futures=True)
        self._pending.clear()

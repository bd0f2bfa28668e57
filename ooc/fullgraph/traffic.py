"""What an exact step moved and when: bytes by direction, and the stretches of work of every lane for a chart."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ooc.clock import Clock
from ooc.trace import Spans

COMPUTE, ADD, READ, WRITE = "compute", "add", "read", "write"


class Traffic:
    """Counts, thread-safe; bounded, as clocks keep so many spans (see `ooc.clock`). bytes_read, bytes_written: of the disk.

    seconds: by op, since the last `restart`.

    >>> with traffic.timed(COMPUTE, first): ...
    >>> traffic.spans()["compute"]
    """

    def __init__(self) -> None:
        self.bytes_read = self.bytes_written = 0
        self.seconds: dict[str, float] = {}
        self._clocks: dict[str, Clock] = {}
        self._lock = threading.Lock()
        self._op = 0

    def restart(self) -> None:
        """Forget seconds and spans, not bytes."""
        with self._lock:
            self.seconds, self._clocks, self._op = {}, {}, 0

    @contextmanager
    def op(self, name: str) -> Iterator[None]:
        """What is done belongs to this op: its number in the step is the spans' item."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
            self._op += 1

    @contextmanager
    def timed(self, lane: str) -> Iterator[None]:
        """A stretch of work."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._worked(lane, began)

    def _worked(self, lane: str, began: float) -> None:
        with self._lock:
            self._clocks.setdefault(lane, Clock()).worked(self._op, began, time.perf_counter(), [])

    def read(self, nbytes: int, began: float) -> None:
        """Bytes that were read from the disk."""
        if nbytes:
            self._worked(READ, began)
            with self._lock:
                self.bytes_read += nbytes

    def written(self, nbytes: int, began: float) -> None:
        """Bytes that were written to the disk."""
        if nbytes:
            self._worked(WRITE, began)
            with self._lock:
                self.bytes_written += nbytes

    def spans(self) -> Spans:
        """By lane, with the number of the op in the step as item."""
        return {lane: clock.spans for lane, clock in self._clocks.items()}

    def busy(self) -> dict[str, float]:
        """Seconds in which anything was done, by lane."""
        return {lane: clock.busy_s for lane, clock in self._clocks.items()}

"""What an exact step moved and when: bytes by direction, and the stretches of work of every lane for a chart."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ooc.runtime.clock import Clock, MemorySample, Spans

COMPUTE, ADD, READ, WRITE, EXCHANGE = "compute", "add", "read", "write", "exchange"
_MOST_SAMPLES = 1024
"""kept of a step: when there are so many, every two become one"""
Noted = Callable[[int, float], None]
"""noted(bytes, when it began): what a thread read or wrote, once it is done"""


def unnoted(nbytes: int, began: float) -> None:
    """A `Noted` that does nothing."""


class IoStats:
    """Counts, thread-safe; bounded, as clocks keep so many spans (see `ooc.runtime.clock`).

    bytes_read, bytes_written: of the disk. Since the last `restart`, seconds: by op, without those of ops that were run again
    meanwhile; samples: of memory and disk; ops: names by their number in the step.
    """

    def __init__(self) -> None:
        self.bytes_read = self.bytes_written = 0
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Forget seconds, samples and spans, not bytes."""
        with self._lock:
            self.seconds: dict[str, float] = {}
            self.samples: list[MemorySample] = []
            self.ops: list[str] = []
            self._clocks: dict[str, Clock] = {}
            self._began, self._every, self._within = time.perf_counter(), 0.0, 0.0

    @contextmanager
    def op(self, name: str) -> Iterator[None]:
        """What is done belongs to this op; its number in the step is the spans' item."""
        began, around, self._within = time.perf_counter(), self._within, 0.0
        try:
            yield
        finally:
            taken = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._within
            self._within = around + taken
            self.ops.append(name)

    def sample(self, memory: int, disk: int) -> None:
        """Bytes of values and sums that there are now; of many samples the largest are kept."""
        now = time.perf_counter() - self._began
        if self.samples and now - self.samples[-1].seconds < self._every:
            self.samples[-1] = _most(self.samples[-1], MemorySample(now, memory, disk))
            return
        self.samples.append(MemorySample(now, memory, disk))
        if len(self.samples) >= _MOST_SAMPLES:
            self.samples = [_most(*pair) for pair in zip(self.samples[::2], self.samples[1::2], strict=True)]
            self._every = 2 * now / _MOST_SAMPLES

    @contextmanager
    def timed(self, lane: str) -> Iterator[None]:
        """A stretch of work."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._worked(lane, began)

    def _worked(self, lane: str, began: float, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self._clocks.setdefault(lane, Clock()).worked(len(self.ops), began, time.perf_counter(), [])
            self.bytes_read += read
            self.bytes_written += written

    def read(self, nbytes: int, began: float) -> None:
        """Bytes that were read from the disk."""
        if nbytes:
            self._worked(READ, began, read=nbytes)

    def written(self, nbytes: int, began: float) -> None:
        """Bytes that were written to the disk."""
        if nbytes:
            self._worked(WRITE, began, written=nbytes)

    def spans(self) -> Spans:
        """By lane, with the number of the op in the step as item."""
        return {lane: clock.spans for lane, clock in self._clocks.items()}

    def busy(self) -> dict[str, float]:
        """Seconds in which anything was done, by lane."""
        return {lane: clock.busy_s for lane, clock in self._clocks.items()}


def _most(first: MemorySample, second: MemorySample) -> MemorySample:
    return MemorySample(first.seconds, max(first.memory, second.memory), max(first.disk, second.disk))

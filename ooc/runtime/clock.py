"""Timing of pipeline stages: total work and wait seconds, and the first spans for a timeline chart."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_SPANS = 2048
"""spans recorded per stage: about 0.3 MB"""
_STRETCHES = 64
"""recent work intervals a span may overlap"""
_JOINED_SECONDS = 0.5e-3
"""shorter waits do not split a span"""


class Span(NamedTuple):
    """An interval of work of one thread; start and end are seconds of `time.perf_counter`."""

    item: int
    """index in the stage's pipeline: a batch, or a superbatch when superbatches are read"""
    thread: int
    start: float
    end: float


class _Waits(threading.local):
    """The current thread's waits within a stage; None outside one."""

    def __init__(self) -> None:
        self.now: list[tuple[float, float]] | None = None


_waits = _Waits()


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time of the block as waiting, not working, of the current stage.

    >>> with waiting():
    ...     changed.wait_for(there_is_room)
    """
    begun = time.perf_counter()
    try:
        yield
    finally:
        if _waits.now is not None:
            _waits.now.append((begun, time.perf_counter()))


@contextmanager
def noting_waits() -> Iterator[list[tuple[float, float]]]:
    """Collect the (start, end) of every `waiting` block in this thread, in order."""
    before, _waits.now = _waits.now, []
    try:
        yield _waits.now
    finally:
        _waits.now = before


@dataclass
class Clock:
    """A stage's seconds, summed over its threads, and its first spans."""

    work_s: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    """while at least one thread was working"""
    items: int = 0
    spans: list[Span] = field(default_factory=list)
    _busy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_STRETCHES))
    """the latest disjoint work intervals"""

    def worked(self, item: int, start: float, end: float, waits: list[tuple[float, float]]) -> None:
        """Record that an item was processed from `start` to `end`, with `waits` in between; call under a lock."""
        waited = sum(stop - begun for begun, stop in waits)
        self.work_s += end - start - waited
        self.wait_s += waited
        for stop, begun in [*((b, s) for b, s in waits if s - b > _JOINED_SECONDS), (end, end)]:
            self._add_busy(start, stop)
            if stop > start and len(self.spans) < MOST_SPANS:
                self.spans.append(Span(item, threading.get_ident(), start, stop))
            start = begun

    def _add_busy(self, start: float, stop: float) -> None:
        """Merge a work interval with those it overlaps; intervals arrive in order of their end."""
        self.busy_s += stop - start
        begin = start
        while self._busy and self._busy[-1][1] >= start:
            first, last = self._busy.pop()
            self.busy_s -= min(last, stop) - max(first, start)
            begin, stop = min(begin, first), max(stop, last)
        self._busy.append((begin, stop))

    def sums(self) -> dict[str, float]:
        """Return the totals: seconds of work and waiting over all threads, seconds of any work, and items."""
        return {"work_s": self.work_s, "wait_s": self.wait_s, "busy_s": self.busy_s, "items": self.items}

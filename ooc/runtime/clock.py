"""What every stage of a pipeline did, and when: sums for bars, and the first spans for a chart of the stages over time."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_SPANS = 2048
"""a stage keeps: about 0.3 MB"""
_STRETCHES = 64
"""of work that a span may reach back over"""
_JOINED_SECONDS = 0.5e-3
"""A wait shorter than this does not cut a span in two"""


class Span(NamedTuple):
    """A stretch of work of one thread. start, end: seconds of `time.perf_counter`."""

    item: int
    """which one of the stage's pipeline: a batch, or a window where windows are read"""
    thread: int
    start: float
    end: float


class _Waits(threading.local):
    """What the work under way in this thread waited for; None outside of a stage."""

    def __init__(self) -> None:
        self.now: list[tuple[float, float]] | None = None


_waits = _Waits()


@contextmanager
def waiting() -> Iterator[None]:
    """Where a stage's own code waits for somebody else: booked as the stage's waiting, not as its work.

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
    """The (start, end) that `waiting` saw in this thread, in order, filled while the block runs."""
    before, _waits.now = _waits.now, []
    try:
        yield _waits.now
    finally:
        _waits.now = before


@dataclass
class Clock:
    """What one stage did, in seconds summed over its threads, and its first spans."""

    work_s: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    """while at least one thread worked"""
    items: int = 0
    spans: list[Span] = field(default_factory=list)
    _busy: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_STRETCHES))
    """the latest stretches of any work, apart from one another"""

    def worked(self, item: int, start: float, end: float, waits: list[tuple[float, float]]) -> None:
        """An item was worked on from `start` to `end`, waiting in between at `waits`. Called under a lock."""
        waited = sum(stop - begun for begun, stop in waits)
        self.work_s += end - start - waited
        self.wait_s += waited
        for stop, begun in [*((b, s) for b, s in waits if s - b > _JOINED_SECONDS), (end, end)]:
            self._add_busy(start, stop)
            if stop > start and len(self.spans) < MOST_SPANS:
                self.spans.append(Span(item, threading.get_ident(), start, stop))
            start = begun

    def _add_busy(self, start: float, stop: float) -> None:
        """Join a stretch of work, which ends no earlier than those before, with those it meets."""
        self.busy_s += stop - start
        begin = start
        while self._busy and self._busy[-1][1] >= start:
            first, last = self._busy.pop()
            self.busy_s -= min(last, stop) - max(first, start)
            begin, stop = min(begin, first), max(stop, last)
        self._busy.append((begin, stop))

    def sums(self) -> dict[str, float]:
        """Seconds of work and of waiting, over all threads, and of any work at all; items."""
        return {"work_s": self.work_s, "wait_s": self.wait_s, "busy_s": self.busy_s, "items": self.items}

"""What every stage of a pipeline did, and when: sums for bars, and the first spans for a chart of the stages over time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_SPANS = 2048
"""a stage keeps: about 0.3 MB"""
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
    items: int = 0
    spans: list[Span] = field(default_factory=list)

    def worked(self, item: int, start: float, end: float, waits: list[tuple[float, float]]) -> None:
        """An item was worked on from `start` to `end`, waiting in between at `waits`. Called under a lock."""
        waited = sum(stop - begun for begun, stop in waits)
        self.work_s += end - start - waited
        self.wait_s += waited
        for stop, begun in [*((b, s) for b, s in waits if s - b > _JOINED_SECONDS), (end, end)]:
            if stop > start and len(self.spans) < MOST_SPANS:
                self.spans.append(Span(item, threading.get_ident(), start, stop))
            start = begun

    def sums(self) -> dict[str, float]:
        """Seconds of work and of waiting, and items."""
        return {"work_s": self.work_s, "wait_s": self.wait_s, "items": self.items}

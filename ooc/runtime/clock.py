"""Timing of pipeline stages: seconds of work and waiting, and the first spans, written as a timeline to RUN/trace.json."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ooc.stores.errors import ConfigError
from ooc.stores.io.atomic import write_file

TRACE = "trace.json"
"""Chrome's trace-event format, for Perfetto and chrome://tracing"""
_BYTES = "bytes"
"""name of the counter in it"""
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


Spans = Mapping[str, Sequence[Span]]
"""by stage"""


class _Waits(threading.local):
    """The current thread's waits within a stage; None outside one."""

    def __init__(self) -> None:
        self.now: list[tuple[float, float]] | None = None


_waits = _Waits()


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time of the block as waiting, not working, of the current stage."""
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


class MemorySample(NamedTuple):
    """Most bytes of values and sums in memory and on disk from `seconds` (since the start) on."""

    seconds: float
    memory: int
    disk: int


def lanes(spans: Sequence[Span]) -> list[int]:
    """Assign each span the first lane without an overlap; there are as many lanes as threads worked at once."""
    free: list[float] = []
    chosen = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
        lane = next((k for k, end in enumerate(free) if end <= spans[i].start), len(free))
        free[lane:] = [spans[i].end, *free[lane + 1 :]]
        chosen[i] = lane
    return chosen


def write_trace(run_dir: Path, spans: Spans, memory: Sequence[MemorySample] = ()) -> None:
    """Write RUN/trace.json: one thread per stage and lane, in microseconds since the first span; `memory` becomes counters."""
    begin = min((span.start for each in spans.values() for span in each), default=0.0)
    threads: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = []
    for stage, each in spans.items():
        for span, lane in zip(each, lanes(each), strict=True):
            tid = threads.setdefault((stage, lane), len(threads))
            place = {"ph": "X", "pid": 0, "tid": tid, "ts": (span.start - begin) * 1e6, "dur": (span.end - span.start) * 1e6}
            events.append({"name": f"{stage} {span.item}", "cat": stage, "args": {"item": span.item}, **place})
    for (stage, lane), tid in threads.items():
        name = f"{stage} {lane + 1}" if lane else stage
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}})
    for sample in memory:
        place = {"ph": "C", "pid": 0, "ts": sample.seconds * 1e6}
        events.append({"name": _BYTES, "args": {"memory": sample.memory, "disk": sample.disk}, **place})
    write_file(run_dir / TRACE, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


class Trace(NamedTuple):
    """What `write_trace` wrote; spans are in seconds since the first."""

    spans: dict[str, list[Span]]
    memory: list[MemorySample]


def read_trace(run_dir: Path) -> Trace:
    """Return RUN/trace.json, empty if it does not exist. Raises ConfigError if it is another file."""
    path = run_dir / TRACE
    trace = Trace({}, [])
    if not path.exists():
        return trace
    try:
        for event in json.loads(path.read_bytes())["traceEvents"]:
            if event["ph"] == "X":
                start = event["ts"] / 1e6
                span = Span(event["args"]["item"], event["tid"], start, start + event["dur"] / 1e6)
                trace.spans.setdefault(event["cat"], []).append(span)
            if event["ph"] == "C" and event["name"] == _BYTES:
                trace.memory.append(MemorySample(event["ts"] / 1e6, event["args"]["memory"], event["args"]["disk"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a trace written by `ooc train` ({error!r}); delete it") from None
    return trace

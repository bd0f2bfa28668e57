"""RUN/trace.json: a timeline of the stages in Chrome's trace-event format (for Perfetto and chrome://tracing)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ooc.runtime.clock import Span
from stores.errors import ConfigError
from stores.io.atomic import write_file

TRACE = "trace.json"
_BYTES = "bytes"
"""name of the counter"""

Spans = Mapping[str, Sequence[Span]]
"""by stage"""


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
    """Write RUN/trace.json: one thread per stage and lane, in microseconds since the first span; `memory` becomes counters.

    >>> write_trace(Path("runs/cora"), loader.spans())
    """
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

"""RUN/trace.json: when each stage worked on what, in Chrome's trace-event format (Perfetto and chrome://tracing open it)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ooc.clock import Span
from stores.atomic import write_file
from stores.errors import ConfigError

TRACE = "trace.json"

Spans = Mapping[str, Sequence[Span]]
"""by stage"""


def lanes(spans: Sequence[Span]) -> list[int]:
    """For each span the first lane in which it meets no earlier one: as many lanes as threads were at work at once."""
    free: list[float] = []
    chosen = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
        lane = next((k for k, end in enumerate(free) if end <= spans[i].start), len(free))
        free[lane:] = [spans[i].end, *free[lane + 1 :]]
        chosen[i] = lane
    return chosen


def write_trace(run_dir: Path, spans: Spans) -> None:
    """Write RUN/trace.json: complete events in microseconds since the first, a thread a stage and lane.

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
    write_file(run_dir / TRACE, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


def read_trace(run_dir: Path) -> dict[str, list[Span]]:
    """The spans of RUN/trace.json, in seconds since the first; {} where there is none. Raises ConfigError for another file."""
    path = run_dir / TRACE
    if not path.exists():
        return {}
    spans: dict[str, list[Span]] = {}
    try:
        for event in json.loads(path.read_bytes())["traceEvents"]:
            if event["ph"] == "X":
                start = event["ts"] / 1e6
                span = Span(event["args"]["item"], event["tid"], start, start + event["dur"] / 1e6)
                spans.setdefault(event["cat"], []).append(span)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a trace that `ooc train` wrote ({error!r}); delete it") from None
    return spans

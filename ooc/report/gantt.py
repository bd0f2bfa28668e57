"""A Gantt chart of a run's stages, which shows whether reading, sampling and the model overlap."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ooc.runtime.clock import MOST_SPANS, Span, Spans, lanes
from ooc.runtime.pipeline import CONSUMER

WINDOWS_SHOWN, BATCHES_SHOWN = 3, 24
COLORS = {
    "sample": ("#3d8b5f", "#7fb598"),
    "group": ("#8a6bb1", "#b9a5d1"),
    "read": ("#2563a8", "#7aa3d0"),
    "sum": ("#2f8f9d", "#86c1c9"),
    "pack": ("#2f8f9d", "#86c1c9"),
    "collate": ("#b8901f", "#d8bf74"),
    "tables": ("#a8557a", "#cf9db4"),
    CONSUMER: ("#d9722b", "#eaa97c"),
}
_OTHER = ("#52606d", "#9aa5b1")


def stage_name(stage: str) -> str:
    """What the report calls a stage: the one that takes the batches is the model."""
    return {CONSUMER: "model", "tables": "embedding tables"}.get(stage, stage)


def section(spans: Spans) -> tuple[float, float]:
    """Return (start, end) of a stretch in the middle: three superbatches or shared scans, or two dozen batches where there are
    not several of those; of few batches the whole trace."""
    full = [each[-1].end for each in spans.values() if len(each) >= MOST_SPANS]
    known = min(full, default=max(span.end for each in spans.values() for span in each))  # later, a stage has no spans
    unit_stage = next((name for name in ("sum", "pack") if spans.get(name)), "read")  # read in many pieces
    items, shown = _items(spans.get(unit_stage, []) if spans.get("group") else [], known), WINDOWS_SHOWN
    if len(items) < 2:
        items, shown = _items(spans.get(CONSUMER) or next(iter(spans.values())), known), BATCHES_SHOWN
        if len(items) <= shown:
            return min(each[0].start for each in spans.values() if each), known
    middle = list(items.values())[max(0, (len(items) - shown) // 2) :][:shown]
    together = [span for each in middle for span in each]
    return (min(s.start for s in together), max(s.end for s in together)) if together else (0.0, known)


def _items(spans: Sequence[Span], known: float) -> dict[int, list[Span]]:
    """The spans of each item that end before `known`."""
    items: dict[int, list[Span]] = {}
    for span in spans:
        if span.end <= known:
            items.setdefault(span.item, []).append(span)
    return items


def gantt_figure(spans: Spans) -> Figure:
    """Draw the stages over a stretch in the middle of the trace; shades alternate by superbatch or batch."""
    start, end = section(spans)
    figure = Figure(figsize=(11.6, 2.9), layout="constrained")
    axes, rows = figure.subplots(), list[Lane]()
    for stage, each in spans.items():
        shown = [span for span in each if span.end > start and span.start < end]
        chosen = lanes(shown)
        for lane in range(max(chosen, default=-1) + 1):
            bars = [span for span, own in zip(shown, chosen, strict=True) if own == lane]
            shades = COLORS.get(stage, _OTHER)
            times = [(max(span.start, start) - start, min(span.end, end) - max(span.start, start)) for span in bars]
            name = "" if lane else stage_name(stage)
            rows.append((name, times, [shades[span.item % 2] for span in bars]))
    draw_lanes(axes, rows)
    axes.set(xlabel=f"seconds, from {start:.2f} s after training began", xlim=(0, end - start))
    return figure


Lane = tuple[str, Sequence[tuple[float, float]], Sequence[str]]
"""name, (start, seconds) of its bars, and their colors"""


def draw_lanes(axes: Axes, rows: Sequence[Lane], **style: Any) -> None:
    """Draw lanes of bars over time, the first on top."""
    for row, (_, times, colors) in enumerate(rows):
        axes.broken_barh(times, (-row - 0.36, 0.72), facecolors=colors, **style)
    axes.set_yticks([-float(row) for row in range(len(rows))], [name for name, *_ in rows])
    axes.grid(axis="y", visible=False)

"""Charts of an exact training step, planned and measured: its schedule, memory by tier, and seconds by op."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ooc.fullgraph.placement.op_costs import TIERS
from ooc.fullgraph.placement.step_plan import PlannedRun, StepPlan
from ooc.fullgraph.program import TensorPlacement
from ooc.report.gantt import draw_lanes
from ooc.runtime.clock import MemorySample, Spans
from ooc.stores.sizes import format_bytes

FORWARD, BACKWARD, RECOMPUTED, INK, GREY = "#2563a8", "#d9722b", "#8a6bb1", "#1f2933", "#c3cad3"
LANES = ("computing", "bus", "disk")
NAMES = {TensorPlacement.RETAINED: "memory", TensorPlacement.DEVICE: "GPU memory", TensorPlacement.DISK: "disk"}
_MEASURED = {TensorPlacement.RETAINED: "memory", TensorPlacement.DISK: "disk"}
"""tier -> the field of a `MemorySample`; a GPU's is not measured"""
_LABELLED = 24
"""most ops that are labelled in the chart"""
_NARROW = 0.035
"""share of the chart's width; narrower ops are not labelled"""
_SHOWN_LIMIT = 3.0
"""a limit above this multiple of the use is named in the legend, not drawn"""
_ABOVE: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2, "fontsize": 8.5}
"""a legend above its chart"""


def schedule_figure(plan: StepPlan, spans: Spans | None = None, ops: Sequence[str] = ()) -> Figure:
    """Draw a step as planned, with a lane for computing and for each tier with transfers, above the step as executed.

    spans: seconds by lane of a whole step, whose `item` is the number of the run; ops: names of the runs, in order.
    """
    lanes = [number for number in range(len(LANES)) if any(run.parts[number] for run in plan.runs)]
    actual = {name: each for name, each in (spans or {}).items() if each}
    heights = [len(lanes) + 0.6, *([len(actual) + 0.6] if actual else [])]
    figure = Figure(figsize=(11.6, 0.9 + 0.42 * sum(heights)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    _planned(axes[0], plan, lanes)
    if actual:
        _actual(axes[1], actual, [run.op for run in plan.runs] if not ops else list(ops), plan)
    axes[-1].set(xlabel="seconds of the step", xlim=(0, max(plan.seconds, *(axis.dataLim.x1 for axis in axes))))
    shown = [Patch(color=FORWARD, label="forward"), Patch(color=BACKWARD, label="backward")]
    shown += [Patch(color=RECOMPUTED, label="recomputed")] * any(run.again for run in plan.runs)
    axes[0].legend(handles=shown, ncols=3, **_ABOVE)
    return figure


def _color(run: PlannedRun) -> str:
    return RECOMPUTED if run.again else BACKWARD if run.backward else FORWARD


def _planned(axes: Axes, plan: StepPlan, lanes: list[int]) -> None:
    """Draw the planned runs one after another; a run's parts start together, and what is not overlapped follows."""
    colors = [_color(run) for run in plan.runs]
    rows = [(LANES[lane], [(run.start, run.parts[lane]) for run in plan.runs], colors) for lane in lanes]
    draw_lanes(axes, rows, edgecolor="white", linewidth=0.6)
    for run in plan.runs[:_LABELLED] if len(plan.runs) <= _LABELLED else ():
        if run.stop - run.start > _NARROW * plan.seconds:
            axes.annotate(run.op, ((run.start + run.stop) / 2, 0.42), ha="center", va="bottom", fontsize=7.5, color=INK)
    for run in plan.runs:
        axes.axvline(run.stop, color=GREY, linewidth=0.6, zorder=0)
    axes.set_ylim(-len(lanes) + 0.4, 0.8)
    axes.set_title(f"planned: {plan.seconds:.3g} s", loc="left", fontsize=9.5)


def _actual(axes: Axes, spans: Spans, ops: list[str], plan: StepPlan) -> None:
    begin = min(span.start for each in spans.values() for span in each)
    end = max(span.end for each in spans.values() for span in each)
    colors = {run.op: _color(run) for run in reversed(plan.runs) if not run.again}
    names = dict(enumerate(ops))
    rows = [
        (
            lane,
            [(span.start - begin, span.end - span.start) for span in each],
            [colors.get(names.get(span.item, ""), RECOMPUTED) for span in each],
        )
        for lane, each in spans.items()
    ]
    draw_lanes(axes, rows)
    axes.set_ylim(-len(spans) + 0.4, 0.6)
    axes.set_title(f"measured: {end - begin:.3g} s", loc="left", fontsize=9.5)


def memory_figure(plan: StepPlan, measured: Sequence[MemorySample] = ()) -> Figure:
    """Draw the bytes of every tier over the step against its limit; `measured` are samples of the executed step."""
    used = [tier for tier in range(len(TIERS)) if plan.peak[tier] or (tier == 0 and plan.runs)]
    figure = Figure(figsize=(5.6, 0.9 + 1.6 * len(used)), layout="constrained")
    end = max([plan.seconds, *(each.seconds for each in measured)])
    for axes, tier in zip(np.atleast_1d(figure.subplots(len(used), 1, sharex=True)), used, strict=True):
        edges, planned = [0.0, *(run.stop for run in plan.runs)], [run.memory[tier] / 1e6 for run in plan.runs]
        axes.stairs(planned, edges, fill=True, color=FORWARD, alpha=0.35, label="planned")
        axes.stairs(planned, edges, color=FORWARD, linewidth=1.4)
        of_sample = _MEASURED.get(TIERS[tier])
        samples = [getattr(each, of_sample) for each in measured] if of_sample else []
        if samples:
            axes.plot([each.seconds for each in measured], [size / 1e6 for size in samples], color=BACKWARD, label="measured")
        limit = plan.room.bytes[tier]
        top = max([plan.peak[tier], *samples])
        if limit < _SHOWN_LIMIT * top:
            axes.axhline(limit / 1e6, color=INK, linestyle="--", linewidth=1.2, label=f"limit {format_bytes(limit)}")
            top = max(top, limit)
        else:
            axes.plot([], [], " ", label=f"limit {format_bytes(limit)}")
        axes.set(ylabel=f"{NAMES[TIERS[tier]]}, MB", xlim=(0, end), ylim=(0, 1.12 * max(top, 1) / 1e6))
        axes.legend(ncols=3, **_ABOVE)
    axes.set_xlabel("seconds of the step")
    return figure


def seconds_figure(plan: StepPlan, measured: Mapping[str, float]) -> Figure:
    """Draw seconds by run, predicted and measured; `measured` is by name, "layer0 again" for a recomputation."""
    predicted: dict[str, float] = {}
    for run in plan.runs:
        predicted[run.name] = predicted.get(run.name, 0.0) + run.stop - run.start
    names = list(dict.fromkeys([*predicted, *measured]))
    figure = Figure(figsize=(5.6, 0.9 + 0.34 * len(names)), layout="constrained")
    axes = figure.subplots()
    at = np.arange(len(names))[::-1]
    axes.barh(at + 0.19, [predicted.get(name, 0.0) for name in names], color=FORWARD, height=0.36, label="predicted")
    axes.barh(at - 0.19, [measured.get(name, 0.0) for name in names], color=BACKWARD, height=0.36, label="measured")
    axes.set_yticks(at, names)
    axes.set(xlabel="seconds")
    axes.grid(axis="y", visible=False)
    axes.legend(ncols=2, **_ABOVE)
    return figure

"""Charts of an exact training step, planned and measured: its schedule, memory by tier, and seconds by op."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ooc.fullgraph.ir import TensorPlacement
from ooc.fullgraph.placement.costs import TIERS
from ooc.fullgraph.placement.step_plan import PlannedRun, StepPlan
from ooc.runtime.clock import MemorySample, Spans
from stores.sizes import format_bytes

FORWARD, BACKWARD, RECOMPUTED, INK, GREY = "#2563a8", "#d9722b", "#8a6bb1", "#1f2933", "#c3cad3"
LANES = ("computing", "host memory", "disk")
NAMES = {TensorPlacement.RETAINED: "memory", TensorPlacement.HOST: "host memory", TensorPlacement.DISK: "disk"}
_LABELLED = 24
"""most ops that are labelled in the chart"""
_NARROW = 0.035
"""share of the chart's width; narrower ops are not labelled"""


def schedule_figure(plan: StepPlan, spans: Spans | None = None, ops: Sequence[str] = ()) -> Figure:
    """Draw a step as planned, with a lane for computing and for each tier with transfers, above the step as executed.

    Args:
        plan: The plan.
        spans: Seconds by lane of a whole step; `item` is the number of the run.
        ops: Names of the runs, in order.

    >>> schedule_figure(plan, full.traffic.spans(), ops).savefig("schedule.png")
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
    axes[0].legend(handles=shown, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=3, fontsize=8.5)
    return figure


def _color(run: PlannedRun) -> str:
    return RECOMPUTED if run.again else BACKWARD if run.backward else FORWARD


def _planned(axes: Axes, plan: StepPlan, lanes: list[int]) -> None:
    """Draw the planned runs one after another; a run's parts start together, and what is not overlapped follows."""
    for row, lane in enumerate(lanes):
        bars = [(run.start, run.parts[lane]) for run in plan.runs]
        axes.broken_barh(
            bars, (-row - 0.36, 0.72), facecolors=[_color(run) for run in plan.runs], edgecolor="white", linewidth=0.6
        )
    for run in plan.runs[:_LABELLED] if len(plan.runs) <= _LABELLED else ():
        if run.stop - run.start > _NARROW * plan.seconds:
            axes.annotate(run.op, ((run.start + run.stop) / 2, 0.42), ha="center", va="bottom", fontsize=7.5, color=INK)
    for run in plan.runs:
        axes.axvline(run.stop, color=GREY, linewidth=0.6, zorder=0)
    axes.set_yticks([-float(row) for row in range(len(lanes))], [LANES[lane] for lane in lanes])
    axes.set_ylim(-len(lanes) + 0.4, 0.8)
    axes.set_title(f"planned: {plan.seconds:.3g} s", loc="left", fontsize=9.5)
    axes.grid(axis="y", visible=False)


def _actual(axes: Axes, spans: Spans, ops: list[str], plan: StepPlan) -> None:
    begin = min(span.start for each in spans.values() for span in each)
    end = max(span.end for each in spans.values() for span in each)
    colors = {run.op: _color(run) for run in reversed(plan.runs) if not run.again}
    for row, each in enumerate(spans.values()):
        axes.broken_barh(
            [(span.start - begin, span.end - span.start) for span in each],
            (-row - 0.36, 0.72),
            facecolors=[colors.get(ops[span.item], RECOMPUTED) if span.item < len(ops) else RECOMPUTED for span in each],
        )
    axes.set_yticks([-float(row) for row in range(len(spans))], list(spans))
    axes.set_ylim(-len(spans) + 0.4, 0.6)
    axes.set_title(f"measured: {end - begin:.3g} s", loc="left", fontsize=9.5)
    axes.grid(axis="y", visible=False)


def memory_figure(plan: StepPlan, measured: Sequence[MemorySample] = ()) -> Figure:
    """Draw the bytes of every tier over the step against its limit; `measured` are samples of the executed step.

    >>> memory_figure(plan).savefig("memory.png")
    """
    used = [tier for tier in range(len(TIERS)) if plan.peak[tier] or (tier == 0 and plan.runs)]
    figure = Figure(figsize=(5.6, 0.9 + 1.6 * len(used)), layout="constrained")
    end = max([plan.seconds, *(each.seconds for each in measured)])
    for axes, tier in zip(np.atleast_1d(figure.subplots(len(used), 1, sharex=True)), used, strict=True):
        edges = [0.0, *(run.stop for run in plan.runs)]
        axes.stairs([run.memory[tier] / 1e6 for run in plan.runs], edges, fill=True, color=FORWARD, alpha=0.35, label="planned")
        axes.stairs([run.memory[tier] / 1e6 for run in plan.runs], edges, color=FORWARD, linewidth=1.4)
        samples = _samples_of(measured, TIERS[tier])
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
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=3, fontsize=8.5)
    axes.set_xlabel("seconds of the step")
    return figure


def _samples_of(measured: Sequence[MemorySample], tier: TensorPlacement) -> list[int]:
    """Measured bytes of a tier; none for host memory, which is not measured."""
    if tier is TensorPlacement.HOST:
        return []
    return [each.disk if tier is TensorPlacement.DISK else each.memory for each in measured]


_SHOWN_LIMIT = 3.0
"""a limit above this multiple of the use is named in the legend, not drawn"""


def seconds_figure(plan: StepPlan, measured: Mapping[str, float]) -> Figure:
    """Draw seconds by run, predicted and measured; `measured` is by name, "layer0 again" for a recomputation.

    >>> seconds_figure(plan, full.traffic.seconds).savefig("seconds.png")
    """
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
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=2, fontsize=8.5)
    return figure

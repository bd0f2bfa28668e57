"""The self-contained HTML page of a run: curves, stage times, memory, I/O."""

import io
import re
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ooc.config.base import differing
from ooc.config.modes import class_of
from ooc.report.gantt import gantt_figure, stage_name
from ooc.runtime.clock import Trace, read_trace
from ooc.stores.io.atomic import remove_leftovers, write_file
from ooc.stores.sizes import format_bytes
from ooc.training.checkpoint import read_json, read_metrics, read_plan

REPORT = "report.html"
LABELLED = 8
"""most layers that the legend names"""
MAX_POINTS = 2000
"""points of the loss curve; more steps are averaged"""
SMOOTHED = 60
"""steps from which on the loss curve has a running mean"""
INK, BLUE, ORANGE, GREEN, GREY = "#1f2933", "#2563a8", "#d9722b", "#3d8b5f", "#c3cad3"

PLAIN_GROUND: Any = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
"""the ground of a label, over lines that would cross it"""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


NOTABLE = 0.25
"""share by which a figure may differ from its prediction before it is marked"""
PlanRow = tuple[str, str, str, str, bool]
"""what, predicted and actual as text ("-" if unknown), difference, whether that is marked"""
Shown = tuple[str, str, str]
"""title, SVG and caption of a figure"""


def write_report(run_dir: Path | str) -> Path:
    """Write RUN/report.html and return its path; an unfinished run gets its curves so far.

    Raises ConfigError if `run_dir` is not a run.

    >>> write_report("runs/cora")
    PosixPath('runs/cora/report.html')
    """
    run_dir = Path(run_dir)
    steps, epochs = read_metrics(run_dir)
    summary = read_json(run_dir / "summary.json", "resume the run to write it again") or {}
    trace = read_trace(run_dir)
    with matplotlib.rc_context(STYLE):
        figures = _figures(steps, epochs, summary)
        timeline = svg_of(gantt_figure(trace.spans)) if any(trace.spans.values()) else None
        if summary.get("full"):
            more, schedule = _exact(read_plan(run_dir), summary["full"], trace)
            figures, timeline = [*figures, *more], schedule
    page = _render(run_dir.resolve().name, summary, figures, len(steps), len(epochs), timeline)
    remove_leftovers(run_dir)
    write_file(run_dir / REPORT, page.encode())
    return run_dir / REPORT


def _exact(plan: dict[str, Any] | None, measured: dict[str, Any], trace: Trace) -> tuple[list[Shown], str | None]:
    """Figures and schedule of exact training, planned and measured."""
    if plan is None:
        return [], None
    from ooc.fullgraph.placement.step_plan import StepPlan
    from ooc.report.full_charts import memory_figure, schedule_figure, seconds_figure

    step, seconds = StepPlan.of(plan), measured["op_seconds"]
    caption = "Values and aggregates by tier, planned and measured, against the limit."
    figures = [
        ("Memory of a step", svg_of(memory_figure(step, trace.memory)), caption),
        ("Predicted and measured", svg_of(seconds_figure(step, seconds)), "Seconds by op, in the last step."),
    ]
    return figures, svg_of(schedule_figure(step, trace.spans, measured.get("ops", list(seconds))))


def page_templates() -> jinja2.Environment:
    """The templates of pages, which share their style."""
    loader = jinja2.PackageLoader("ooc.report", ".")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def _render(name: str, summary: dict[str, Any], figures: list[Shown], steps: int, epochs: int, timeline: str | None) -> str:
    """The page; `timeline` is the SVG of the stages over time."""
    environment = page_templates()
    environment.filters["score"] = lambda value: "-" if value is None else f"{value:.4f}"
    config = summary.get("config", {})
    return environment.get_template("page.html.jinja").render(
        name=name,
        finished=bool(summary),
        tiles=_tiles(summary) if summary else [("steps", f"{steps:,}"), ("epochs", f"{epochs:,}")],
        figures=figures,
        timeline=timeline,
        exact=bool(summary.get("full")),
        plan=_plan_rows(summary["plan"]) if "plan" in summary else [],
        predicted=bool(summary.get("plan", {}).get("predicted")),
        advice=summary.get("plan", {}).get("advice"),
        metrics=_with_baselines(summary),
        unscored=summary.get("unscored", {}),
        negatives=summary.get("negatives"),
        metric_names=list(next(iter(summary.get("metrics", {}).values()), {})),
        batches=class_of(config).model_construct(**config).batches,
        config=config,
        settings=_settings(config),
        versions=summary.get("versions", {}),
        **{name: summary.get(name) for name in ("best_epoch", "monitor", "device", "threads", "class_names", "labels")},
    )


def _settings(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Settings that were chosen, and the others: (heading, name -> value)."""
    known = {name: value for name, value in config.items() if value not in (None, {}, [])}
    chosen = differing(class_of(config), config) | ({"task"} if config.get("task", "node") != "node" else set())
    parts = ("", [name for name in known if name in chosen]), ("defaults", [name for name in known if name not in chosen])
    return [(heading, {name: _setting(known[name]) for name in names}) for heading, names in parts if names]


def _setting(value: Any) -> Any:
    """A setting's value as the page shows it: fan-outs by edge type, and other tables, entry by entry."""
    if not isinstance(value, dict):
        return value
    texts = {name: ",".join(map(str, own)) if isinstance(own, list) else own for name, own in value.items()}
    return "; ".join(f"{name} = {text}" for name, text in texts.items())


def _with_baselines(summary: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Scores by split, each followed by those of the baselines."""
    baselines, scores = summary.get("baselines", {}), dict[str, dict[str, float]]()
    for split, own in summary.get("metrics", {}).items():
        scores |= {split: own, **{f"{split}, {name}": each[split] for name, each in baselines.items()}}
    return scores


def _tiles(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Headline figures of the page: (label, value)."""
    metrics, monitor = summary["metrics"], summary["monitor"]
    which, test = ("test", metrics["test"]) if metrics.get("test") else ("validation", metrics.get("val") or {})
    tiles = [(f"{which} {monitor.replace('_', ' ')}", f"{test[monitor]:.4f}")] if test.get(monitor) is not None else []
    tiles.append(("steps", f"{summary['total_steps']:,}"))
    if summary["seconds_per_batch"] is not None:
        tiles += [
            ("per batch", _seconds(summary["seconds_per_batch"])),
            ("per epoch", _seconds(summary["seconds_per_epoch"])),
            *([(f"{summary['unit']} per second", f"{summary['units_per_second']:,.0f}")] if "unit" in summary else []),
            ("read from disk", format_bytes(summary["bytes_read"])),
            ("mean read rate", f"{summary['read_bytes_per_second'] / 1e6:,.1f} MB/s"),
            *([("written to pack batches", format_bytes(packed))] if (packed := summary.get("packed_bytes_written")) else []),
            *([("rows read", f"{summary['rows_read']:,}")] if summary["rows_read"] or "unit" not in summary else []),
        ]
    if summary.get("histories"):
        tiles.append(("rows from histories", f"{100 * summary['histories']['share_pulled']:.1f} %"))
    if sent := (summary.get("full") or {}).get("bytes_exchanged"):
        tiles.append(("sent between processes", format_bytes(sent)))
    tiles.append(("peak memory", format_bytes(summary["peak_rss_bytes"])))
    if summary["peak_cuda_bytes"]:
        tiles.append(("peak CUDA memory", format_bytes(summary["peak_cuda_bytes"])))
    return tiles


def _plan_rows(plan: dict[str, Any]) -> list[PlanRow]:
    """The table of what was predicted and what happened."""
    kept = "embedding tables" if "tables" in plan["actual"].get("stages", {}) else "histories"
    shown: dict[str, tuple[str, Any]] = {
        "seconds_per_epoch": ("training, per epoch", _seconds),
        "evaluate_seconds": ("evaluation, in total", _seconds),
        "peak_rss_bytes": ("peak memory", format_bytes),
        "value_bytes": ("values and aggregates in memory, peak", format_bytes),
        "bytes_read": ("read from disk", format_bytes),
        "bytes_written": ("written to disk", format_bytes),
        "packed_bytes_written": ("written to pack batches", format_bytes),
        "history_bytes_read": (f"{kept} read", format_bytes),
        "history_bytes_written": (f"{kept} written", format_bytes),
        "hit_rate": ("rows served from memory", lambda value: f"{100 * value:.1f} %"),
        "read_amplification": ("bytes read per byte needed", lambda value: f"{value:.2f}"),
        "read_bytes_per_second": ("read bandwidth", lambda value: f"{format_bytes(value)}/s"),
        "bottleneck": ("bottleneck", stage_name),
    }
    predicted, actual = dict(plan["predicted"] or {}), plan["actual"]
    if not predicted.get("evaluate_seconds"):  # by layer-wise passes
        predicted["evaluate_seconds"] = None
    rows = []
    for name, (label, shown_as) in shown.items():
        both = predicted.get(name), actual.get(name)
        if any(both) if name.startswith(("history", "packed")) else both != (None, None):
            before, now = ("-" if value is None else str(shown_as(value)) for value in both)
            rows.append((label, before, now, *_difference(*both)))
    return rows


def _difference(predicted: Any, actual: Any) -> tuple[str, bool]:
    """How much more or less than predicted something was, as text, and whether that is much; words are compared as such."""
    if predicted is None or actual is None:
        return "", False
    if isinstance(predicted, str):
        return ("" if predicted == actual else "another"), predicted != actual
    if not predicted:
        return "", bool(actual)
    share = actual / predicted - 1
    percent = round(100 * share)
    return f"{percent:+,} %" if percent else "0 %", abs(share) > NOTABLE


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 120 else f"{value / 60:.3g} min"


def _figures(steps: list[dict[str, Any]], epochs: list[dict[str, Any]], summary: dict[str, Any]) -> list[Shown]:
    """Every figure there is data for."""
    figures = []
    if steps:
        figures.append(("Training loss", loss_figure(steps), _loss_caption(len(steps))))
    if scored := [line for line in epochs if line.get("val")]:
        caption = "Scores after each epoch; the dot marks the epoch whose model is reported."
        figures.append(("Validation", validation_figure(scored, summary.get("best_epoch")), caption))
    if drifted := [line for line in epochs if line.get("drift")]:
        caption = "Relative error of each inner layer's histories on a sample of nodes, without dropout; dashed: a refresh."
        figures.append(("Drift of the histories", drift_figure(drifted), caption))
    if summary.get("stages"):
        caption = (
            "Seconds summed over a stage's threads. Where the model waits, the stage that works longest is the bottleneck."
        )
        figures.append(("Where the time went", stages_figure(summary["stages"]), caption))
    if summary.get("memory") or summary.get("peak_rss_bytes"):
        caption = "Resident memory of the process" + (", against the budget." if summary.get("memory_budget_bytes") else ".")
        figures.append(("Memory", memory_figure(summary), caption))
    return figures


def _loss_caption(steps: int) -> str:
    """What the points of the loss curve are, and its line where it has one."""
    width = -(-steps // MAX_POINTS)
    points = "One point per step" if width == 1 else f"One point per {width:,} steps, their mean"
    return f"{points}; the line is a running mean." if steps > SMOOTHED else f"{points}."


def loss_figure(steps: list[dict[str, Any]]) -> str:
    """Draw the loss by step, averaged to MAX_POINTS, with a running mean."""
    loss = np.array([line["loss"] for line in steps], np.float64)
    width = -(-len(loss) // MAX_POINTS)
    starts = np.arange(0, len(loss), width)
    thin = np.add.reduceat(loss, starts) / np.diff(np.append(starts, len(loss)))
    figure, axes = _axes()
    x = starts + (width - 1) / 2
    many = len(loss) > SMOOTHED
    axes.plot(x, thin, color=GREY if many else BLUE, linewidth=0.9 if many else 1.6)
    if many:
        axes.plot(x, running_mean(thin, len(thin) // 40), color=BLUE, linewidth=1.8)
    axes.set(xlabel="step", ylabel="loss", xlim=(0, max(len(loss) - 1, 1)))
    return svg_of(figure)


def running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean over `width` values before and after each, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, last = np.maximum(at - width, 0), np.minimum(at + width + 1, len(values))
    return (total[last] - total[first]) / (last - first)


def validation_figure(epochs: list[dict[str, Any]], best_epoch: int | None) -> str:
    """Draw validation scores by epoch, with the loss in a separate panel."""
    figure = Figure(figsize=(5.6, 3.1), layout="constrained")
    losses = _values(epochs, "loss")
    has_loss = losses is not None  # link prediction reports none
    top, *others = np.atleast_1d(figure.subplots(1 + has_loss, 1, sharex=True, height_ratios=(2, 1)[: 1 + has_loss]))
    x = [line["epoch"] + 1 for line in epochs]
    marker = "o" if len(x) < 30 else None
    names = {
        "accuracy": BLUE,
        "ap": BLUE,
        "auroc": ORANGE,
        "f1_macro": GREEN,
        "f1": GREEN,
        "mrr": GREEN,
        "tgb_mrr": INK,
        "r2": BLUE,
    }
    for name, color in names.items():
        if (values := _values(epochs, name)) is not None:
            width = 1.7 if top.lines else 4.0  # scores may be equal: the first one shows on both sides of another
            top.plot(x, values, color=color, linewidth=width, marker=marker, markersize=3, label=name.replace("_", " "))
            if best_epoch is not None and best_epoch + 1 in x:
                best = values[x.index(best_epoch + 1)]
                top.plot(best_epoch + 1, best, "o", color=color, markersize=6, markeredgecolor="white")
            for who, each in epochs[-1].get("baselines", {}).items():
                top.axhline(each["val"][name], color=color, linestyle="--", linewidth=1.0, label=f"{name} of {who}")
    top.set(ylabel="score")
    if top.lines:  # r2 may be undefined
        top.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=3, fontsize=8.5)  # above the lines
    for bottom in others:
        bottom.plot(x, losses, color=INK, linewidth=1.4, marker=marker, markersize=3)
        bottom.set(ylabel="loss")
    last = [top, *others][-1]
    last.set(xlabel="epoch")
    last.xaxis.get_major_locator().set_params(integer=True)
    if len(x) == 1:
        last.set_xticks(x)  # no parts of an epoch
    return svg_of(figure)


def _values(epochs: list[dict[str, Any]], name: str) -> list[float] | None:
    """A validation score by epoch, NaN where it is undefined; None where it always is."""
    found = [line["val"].get(name) for line in epochs]
    return [np.nan if value is None else value for value in found] if any(value is not None for value in found) else None


def drift_figure(epochs: list[dict[str, Any]]) -> str:
    """Draw drift by epoch, one line per layer, deeper layers darker."""
    figure, axes = _axes()
    x = [line["epoch"] + 1 for line in epochs]
    layers = len(epochs[0]["drift"])
    every = -(-layers // LABELLED)
    for layer in range(layers):
        shade = 1.0 if layers == 1 else 0.3 + 0.7 * layer / (layers - 1)
        label = f"layer {layer + 1}" if layer % every == 0 or layer == layers - 1 else None
        axes.plot(x, [line["drift"][layer] for line in epochs], color=BLUE, alpha=shade, linewidth=1.6, label=label)
    for line in epochs:
        if line.get("refreshed"):
            axes.axvline(line["epoch"] + 1, color=GREY, linestyle="--", linewidth=0.9)
    axes.set(xlabel="epoch", ylabel="relative error")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right", fontsize=8.5)
    return svg_of(figure)


def stages_figure(stages: dict[str, dict[str, float]]) -> str:
    """Draw work and wait seconds of every stage as stacked bars, in pipeline order."""
    names = [name for name in stages if name != "source"]  # it only counts steps
    work = np.array([stages[name]["work_s"] for name in names])
    wait = np.array([stages[name]["wait_s"] for name in names])
    figure, axes, at = _bars_of([stage_name(name) for name in names])
    axes.barh(at, work, color=BLUE, height=0.6, label="work")
    axes.barh(at, wait, left=work, color=GREY, height=0.6, label="wait")
    axes.set(xlabel="seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2, fontsize=8.5)
    return svg_of(figure)


def memory_figure(summary: dict[str, Any]) -> str:
    """Draw before, after and peak of every recorded stretch, and the budget as a line."""
    readings = summary["memory"]
    bars = [
        (f"{reading['name']}: {part}", reading[part], ORANGE if part == "peak" else BLUE)
        for reading in readings[-4:]
        for part in ("before", "peak", "after")
    ] or [("peak", summary["peak_rss_bytes"], ORANGE)]
    figure, axes, at = _bars_of([name for name, *_ in bars])
    axes.barh(at, [size / 1e6 for _, size, _ in bars], color=[color for *_, color in bars], height=0.62)
    for y, (_, size, _) in zip(at, bars, strict=True):
        axes.annotate(
            format_bytes(size), (size / 1e6, y), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=PLAIN_GROUND
        )
    if budget := summary.get("memory_budget_bytes"):
        axes.axvline(budget / 1e6, color=INK, linestyle="--", linewidth=1.2, label=f"budget {format_bytes(budget)}")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), fontsize=8.5)
    axes.set(xlabel="MB", xlim=(0, 1.18 * max([size for _, size, _ in bars] + [budget or 0]) / 1e6))
    return svg_of(figure)


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 3.1), layout="constrained")
    return figure, figure.subplots()


def _bars_of(names: list[str]) -> tuple[Figure, Axes, NDArray[np.int64]]:
    """A figure for horizontal bars, the first name on top, and their places."""
    figure, axes = _axes()
    at = np.arange(len(names))[::-1]
    axes.set_yticks(at, names)
    axes.grid(axis="y", visible=False)
    return figure, axes, at


def svg_of(figure: Figure) -> str:
    """Return the figure as an <svg> element without XML prologue and date."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'^<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" xmlns="http://www.w3.org/2000/svg" '
                  r'xmlns:xlink="http://www.w3.org/1999/xlink">', text, count=1, flags=re.S)  # fmt: skip

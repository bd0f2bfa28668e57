"""Techniques against memory compared, as a table of the terminal and as one self-contained page."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from ooc.config.techniques import PLAIN
from ooc.report.page import BLUE, GREY, STYLE, page_templates, svg_of
from ooc.stores.io.atomic import write_file
from ooc.stores.sizes import format_bytes
from ooc.training.comparison import Trial

PAGE = "comparison.html"
Column = tuple[str, Callable[[Trial], float | None], Callable[[float], str]]
"""title, value of a trial, its text"""


def _score(value: float) -> str:
    return f"{value:.4f}"


def _seconds(value: float) -> str:
    return f"{value:.3g}"


def columns_of(trials: Sequence[Trial]) -> list[Column]:
    """What is compared: the score, memory, time and bytes."""
    metric = next((each.metric for each in trials if each.metric), "score").replace("_", " ")
    on_gpu = any(each.peak_cuda_bytes for each in trials)
    return [
        (metric, lambda trial: trial.score, _score),
        ("peak memory", lambda trial: trial.peak_rss_bytes, format_bytes),
        *([("peak CUDA memory", lambda trial: trial.peak_cuda_bytes, format_bytes)] if on_gpu else []),
        ("seconds per epoch", lambda trial: trial.seconds, _seconds),
        ("bytes read and written", lambda trial: trial.bytes_moved, format_bytes),
    ]


def comparison_table(trials: Sequence[Trial]) -> Table:
    """Return a table with a row for each technique, and under it why others could not be tried."""
    table = Table(box=None, pad_edge=False)
    table.add_column("technique")
    columns = columns_of(trials)
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    table.add_column("what it does")
    for trial in trials:
        if trial.refused is not None:
            table.add_row(trial.technique, *["-"] * len(columns), trial.refused, style="dim")
            continue
        table.add_row(trial.technique, *(_cell(trial, column) for column in columns), trial.about)
    return table


def _cell(trial: Trial, column: Column) -> str:
    _, value_of, text_of = column
    value = value_of(trial)
    if value is None:
        return "-"
    spread = f" ± {trial.deviation:.4f}" if text_of is _score and trial.deviation is not None else ""
    return text_of(value) + spread


def write_comparison(out: Path, store: Path | str, trials: Sequence[Trial], seeds: int) -> Path:
    """Write OUT/comparison.html, a page with a chart and a table that loads nothing, and return its path.

    Args:
        out: The directory of the comparison.
        store: What was trained on.
        trials: The techniques, the settings as given first.
        seeds: Runs of each.
    """
    columns = columns_of(trials)
    tried = [trial for trial in trials if trial.refused is None]
    with matplotlib.rc_context(STYLE):
        figure = svg_of(comparison_figure(tried))
    text = (
        page_templates()
        .get_template("comparison.html.jinja")
        .render(
            name=out.resolve().name,
            store=store,
            epochs=trials[0].epochs,
            seeds=seeds,
            figure=figure,
            titles=[title for title, _, _ in columns],
            rows=[(trial.technique, [_cell(trial, column) for column in columns], trial.about) for trial in tried],
            refused=[(trial.technique, trial.refused) for trial in trials if trial.refused is not None],
        )
    )
    write_file(out / PAGE, text.encode())
    return out / PAGE


def comparison_figure(trials: Sequence[Trial]) -> Figure:
    """Draw a panel of horizontal bars for each column, one bar a technique; a line is where the settings as given are."""
    columns = columns_of(trials)
    figure = Figure(figsize=(11.4, 1.0 + 0.34 * len(trials)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(columns), sharey=True))
    at = np.arange(len(trials))[::-1]
    colors = [GREY if trial.technique == PLAIN else BLUE for trial in trials]
    for axes, (title, value_of, text_of) in zip(panels, columns, strict=True):
        values = np.array([np.nan if (value := value_of(trial)) is None else value for trial in trials], np.float64)
        axes.barh(at, np.nan_to_num(values), color=colors, height=0.62)
        axes.axvline(np.nan_to_num(values[0]), color="#9aa5b1", linewidth=0.9, linestyle="--")
        for place, value in zip(at, values, strict=True):
            text = "-" if np.isnan(value) else text_of(value)
            axes.annotate(text, (np.nan_to_num(value), place), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
        if text_of is _score:
            low = np.nanmin(values) if np.isfinite(values).any() else 0.0
            axes.set_xlim(left=max(0.0, low - 0.25 * max(1e-3, np.nanmax(values) - low)) if np.isfinite(values).any() else 0.0)
        axes.margins(x=0.32)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
    panels[0].set_yticks(at, [trial.technique for trial in trials])
    return figure

"""Techniques against memory compared, as a table of the terminal and as one self-contained page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ooc.config.techniques import PLAIN
from ooc.report.page import BLUE, GREY, PLAIN_GROUND, STYLE, page_templates, svg_of
from ooc.stores.io.atomic import write_file
from ooc.stores.sizes import format_bytes
from ooc.training.comparison import Trial

PAGE = "comparison.html"
_UNLIMITED = 10_000
"""columns of a terminal that is wide enough for every table"""
_TITLE = 9
"""characters of a line of a column's title in the terminal, half of those on the chart"""
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
        ("memory of training", lambda trial: trial.training_bytes, format_bytes),
        ("peak of the process", lambda trial: trial.peak_rss_bytes, format_bytes),
        *([("peak CUDA memory", lambda trial: trial.peak_cuda_bytes, format_bytes)] if on_gpu else []),
        ("seconds per epoch", lambda trial: trial.seconds, _seconds),
        ("bytes read and written", lambda trial: trial.bytes_moved, format_bytes),
    ]


def comparison_table(trials: Sequence[Trial], width: int) -> Table:
    """Return a table with a row for each technique that was tried.

    Args:
        trials: The techniques, the settings as given first.
        width: Columns of the terminal. What a technique does is shown where each row has room for it in one line.
    """
    whole = _table(trials, about=True)
    fits = Console(width=_UNLIMITED).measure(whole).maximum <= width
    return whole if fits else _table(trials, about=False)


def _table(trials: Sequence[Trial], about: bool) -> Table:
    """The table, with what techniques do or without."""
    table = Table(box=None, pad_edge=False)
    table.add_column("technique", no_wrap=True, min_width=max(len(trial.technique) for trial in trials))
    columns = columns_of(trials)
    for title, _, _ in columns:
        table.add_column("\n".join(wrap(title, _TITLE)), justify="right")
    if about:
        table.add_column("what it does")
    for trial in trials:
        if trial.refused is None:
            cells = [_cell(trial, column) for column in columns]
            table.add_row(trial.technique, *cells, *([trial.about] if about else []))
    return table


def refusals(trials: Sequence[Trial]) -> list[str]:
    """Return a line for each technique that could not be tried."""
    return [f"{trial.technique} was not tried: {trial.refused}" for trial in trials if trial.refused is not None]


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
            refused=refusals(trials),
        )
    )
    write_file(out / PAGE, text.encode())
    return out / PAGE


def comparison_figure(trials: Sequence[Trial]) -> Figure:
    """Draw a panel for each column: scores as dots, all else as bars from 0; a line is where the settings as given are."""
    columns = columns_of(trials)
    figure = Figure(figsize=(11.4, 1.2 + 0.34 * len(trials)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(columns), sharey=True))
    at = np.arange(len(trials))[::-1]
    colors = [GREY if trial.technique == PLAIN else BLUE for trial in trials]
    for axes, (title, value_of, text_of) in zip(panels, columns, strict=True):
        values = np.array([np.nan if (value := value_of(trial)) is None else value for trial in trials], np.float64)
        axes.grid(visible=False)
        if text_of is _score:
            _dots(axes, values, at, colors)
        else:
            axes.barh(at, values, color=colors, height=0.62)
            axes.margins(x=0.5)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
        axes.axvline(values[0], color="#9aa5b1", linewidth=0.9, linestyle="--", zorder=0)
        left = axes.get_xlim()[0]
        for place, value in zip(at, values, strict=True):
            text, end = ("-", left) if np.isnan(value) else (text_of(value), value)
            axes.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center", fontsize=8.5, bbox=PLAIN_GROUND)
        axes.set_title("\n".join(wrap(title, 2 * _TITLE)), loc="left", fontsize=10)
    panels[0].set_yticks(at, [trial.technique for trial in trials])
    return figure


def _dots(axes: Axes, values: NDArray[np.float64], at: NDArray[np.int64], colors: Sequence[str]) -> None:
    """Draw scores, which are close together, on an axis with numbers that has room for text on the right."""
    axes.scatter(values, at, color=colors, s=42, zorder=3)
    known = values[np.isfinite(values)]
    if known.size:
        span = max(1e-3, float(known.max() - known.min()))
        axes.set_xlim(known.min() - 0.2 * span, known.max() + 0.9 * span)
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", visible=True)

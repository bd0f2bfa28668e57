"""Plots of the benchmarks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Panel:
    """A diagram with a line for each of `series`, its values (None: omitted) over `at`; x, y: labels."""

    at: Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    x: str
    y: str
    marker: str = "o-"


@contextmanager
def _figure(path: Path, panels: int) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(5.5 * panels, 3.8), layout="constrained", squeeze=False)
    try:
        yield axes[0]
        figure.savefig(path)
    finally:
        pyplot.close(figure)


def lines(path: Path, panels: Sequence[Panel]) -> None:
    """Draw panels next to each other, with y axes from 0."""
    with _figure(path, len(panels)) as axes:
        for ax, panel in zip(axes, panels, strict=True):
            for name, values in panel.series.items():
                there = [(p, v) for p, v in zip(panel.at, values, strict=True) if v is not None]
                ax.plot([p for p, _ in there], [v for _, v in there], panel.marker, label=name)
            ax.set(xlabel=panel.x, ylabel=panel.y)
            ax.set_ylim(bottom=0)
            ax.legend()


def bars(path: Path, values: Mapping[str, float], x: str) -> None:
    """Draw a labelled bar for each of `values`, top to bottom, on a logarithmic axis."""
    with _figure(path, 1) as (ax,):
        drawn = ax.barh(list(values), list(values.values()))
        ax.bar_label(drawn, fmt="%.3g", padding=3)
        ax.set_xscale("log")
        ax.margins(x=0.2)
        ax.invert_yaxis()
        ax.set_xlabel(x)

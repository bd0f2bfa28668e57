"""The self-contained HTML page of a memory meter: the process over time, and a step by layer, operation and line of code."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ooc.report.page import BLUE, GREEN, GREY, INK, ORANGE, STYLE, Shown, page_templates, svg_of
from ooc.runtime.memory import MemoryMeter, MemoryReading, MeterSample
from ooc.runtime.step_memory import StepMemory
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.io.atomic import write_file
from ooc.stores.sizes import format_bytes

LINES = 40
"""shown on the page, those with the most bytes at the peak first"""
LAYERS = 10
"""told apart in the figures; the others are one"""
_OTHERS = "others"
_COLORS = (BLUE, ORANGE, GREEN, "#8a6bb1", "#b8901f", "#2f8f9d", "#a8557a", "#7aa3d0", "#eaa97c", "#7fb598")
_SIZE = FuncFormatter(lambda value, _: format_bytes(int(value)))


def write_memory_report(meter: MemoryMeter, path: Path | str) -> Path:
    """Write a page that draws a meter's latest reading, and return its path.

    It has the process, its control group and GPUs over time and, of a meter with a model, a step: bytes by layer over its
    operations, what each layer has at the peak and keeps for the backward pass, and a table of the lines that allocate.

    Args:
        meter: One with a finished reading.
        path: The file to write, such as "memory.html"; nothing else is needed to show it.

    Raises:
        ConfigError: If it is no memory meter.
        InputError: If the meter has measured nothing yet.
        StoreError: If the file cannot be written.

    >>> with ooc.MemoryMeter("step", model=model) as meter:
    ...     loss_of(model(batch.x, batch.blocks), batch.y).backward()
    >>> ooc.write_memory_report(meter, "memory.html")
    PosixPath('memory.html')
    """
    if not isinstance(meter, MemoryMeter):
        raise ConfigError(f"a memory report is of an `ooc.MemoryMeter`, not {type(meter).__name__}: give the meter itself")
    if not meter.readings:
        raise InputError(f"the memory meter {meter.name!r} has measured nothing yet: use it in a `with` block first")
    reading, samples, path = meter.reading, meter.samples[-1], Path(path)
    step = meter.steps[-1] if meter.steps else None
    with matplotlib.rc_context(STYLE):
        figures = [("Over time", svg_of(time_figure(samples)), _time_caption(reading))]
        if step is not None and step.timeline:
            figures += _step_figures(step)
    lines = [] if step is None else step.lines
    environment = page_templates()
    environment.filters["size"] = lambda nbytes: format_bytes(nbytes) if nbytes else "-"
    page = environment.get_template("memory.html.jinja").render(
        name=meter.name,
        what=_what(reading, samples, step),
        tiles=_tiles(reading, step),
        figures=figures,
        lines=lines[:LINES],
        left=len(lines[LINES:]),
        left_bytes=sum(line.allocated for line in lines[LINES:]),
    )
    write_file(path, page.encode())
    return path


def _what(reading: MemoryReading, samples: list[MeterSample], step: StepMemory | None) -> str:
    seconds = f"{samples[-1].seconds:.3g} s"
    if step is None:
        return f"{seconds}; operations were not recorded: give the meter a model"
    calls = sum(line.calls for line in step.lines)
    return f"{seconds}, {calls:,} operations that allocate, on {len(step.lines):,} lines"


def _tiles(reading: MemoryReading, step: StepMemory | None) -> list[tuple[str, str]]:
    tiles = [("peak of the process", format_bytes(reading.peak)), ("the process, more than before", _more(reading))]
    if step is not None:
        tiles += [("tensors of the block at most", format_bytes(step.peak))]
        tiles += [("between forward and backward pass", format_bytes(step.kept or 0))]
    tiles += [(f"{name} at most", format_bytes(peak)) for name, peak in _devices(reading).items() if peak]
    return tiles


def _more(reading: MemoryReading) -> str:
    """By how much the process has grown."""
    more = reading.after - reading.before
    return f"{'-' if more < 0 else ''}{format_bytes(abs(more))}"


def _devices(reading: MemoryReading) -> dict[str, int]:
    return {"tensors on CUDA": reading.cuda_peak, "tensors on MPS": reading.mps_peak}


def _time_caption(reading: MemoryReading) -> str:
    group = f" Its control group had {format_bytes(reading.group_peak)} at most, files that were read among them."
    return "Resident memory of the process, and tensors on GPUs." + (group if reading.group_peak else "")


def time_figure(samples: list[MeterSample]) -> Figure:
    """Draw the process and the GPUs over time."""
    figure = Figure(figsize=(11.0, 2.6), layout="constrained")
    axes = figure.subplots()
    seconds = [sample.seconds for sample in samples]
    drawn = {"process": (BLUE, "process"), "cuda": (ORANGE, "CUDA"), "mps": (GREEN, "MPS")}
    for field, (color, label) in drawn.items():
        values = [getattr(sample, field) for sample in samples]
        if any(values):
            axes.plot(seconds, values, color=color, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_SIZE)
    axes.set_xlabel("seconds")
    axes.legend(loc="lower right")
    return figure


def _step_figures(step: StepMemory) -> list[Shown]:
    names = layers_shown(step)
    over = f"Bytes of tensors that the block allocated, by layer; {format_bytes(step.peak)} at the peak."
    each = "What stands at the peak, and between the forward and the backward pass."
    return [
        ("The step", svg_of(step_figure(step, names)), over),
        ("By layer", svg_of(layers_figure(step.by_layer(), names)), each),
    ]


def layers_shown(step: StepMemory) -> list[str]:
    """The layers that are told apart, in the order in which they come; the ones with the most bytes at any time."""
    most: dict[str, int] = {}
    for point in step.timeline:
        for name, size in point.bytes.items():
            most[name] = max(most.get(name, 0), size)
    chosen = sorted(most, key=lambda name: -most[name])[:LAYERS]
    return [name for name in most if name in chosen]


def step_figure(step: StepMemory, names: list[str]) -> Figure:
    """Draw the bytes of each layer over the operations of a step, one above the other."""
    figure = Figure(figsize=(11.0, 3.4), layout="constrained")
    axes = figure.subplots()
    ops = np.array([point.op for point in step.timeline])
    rows = [[point.bytes.get(name, 0) for point in step.timeline] for name in names]
    rest = [sum(size for name, size in point.bytes.items() if name not in names) for point in step.timeline]
    labels, colors = [*names, _OTHERS], [*_COLORS[: len(names)], GREY]
    shown = slice(None) if any(rest) else slice(len(names))
    axes.stackplot(ops, *[*rows, rest][shown], labels=labels[shown], colors=colors[shown], step="post", alpha=0.9)
    backward = next((point.op for point in step.timeline if point.backward), None)
    if backward is not None:
        axes.axvline(backward, color=INK, linewidth=1, linestyle="--")
        axes.text(backward, axes.get_ylim()[1], " backward", va="top", color=INK)
    axes.set_xlim(ops[0], max(ops[-1], ops[0] + 1))
    axes.yaxis.set_major_formatter(_SIZE)
    axes.set_xlabel("operations")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def layers_figure(by_layer: dict[str, tuple[int, int]], names: list[str]) -> Figure:
    """Draw what each layer has at the peak, and keeps."""
    names = [name for name in names if any(by_layer.get(name, (0, 0)))]
    figure = Figure(figsize=(11.0, 0.8 + 0.42 * max(1, len(names))), layout="constrained")
    axes, at = figure.subplots(), np.arange(len(names))[::-1]
    axes.barh(at + 0.18, [by_layer[name][0] for name in names], 0.34, color=BLUE, label="at the peak")
    axes.barh(at - 0.18, [by_layer[name][1] for name in names], 0.34, color=ORANGE, label="kept for the backward pass")
    axes.set_yticks(at, names)
    axes.xaxis.set_major_formatter(_SIZE)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure

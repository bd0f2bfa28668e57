"""Draws docs/seconds-per-batch.svg, the figure of the README, from the table of measurements in docs/BENCHMARKS.md.

python -m tools.docs.speed_chart
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "docs" / "BENCHMARKS.md"
OUT = ROOT / "docs" / "seconds-per-batch.svg"

_HEADING = "## Comparison with PyG and GraphBolt"
_NAMES = (
    (r"ooc.*", "ooc"),
    (r"PyG with `trim_to_layer`.*", "PyG, trim_to_layer"),
    (r"PyG.*", "PyTorch Geometric"),
    (r"GraphBolt.*", "DGL GraphBolt"),
)
_WIDTH, _LABEL, _BAR, _ROW, _TOP = 760, 170, 480, 30, 34
_STYLE = "font-family: system-ui, sans-serif; fill: #1f2933"


class Bar(NamedTuple):
    """One measurement: the system, seconds a batch, and whether features were read from disk within a limit."""

    name: str
    seconds: float
    from_disk: bool


def measured(text: str) -> list[Bar]:
    """The bars of the first table under the heading of the comparison, as it stands."""
    if _HEADING not in text:
        raise ValueError(f"{SOURCE} has no heading {_HEADING!r}")
    table = text.split(_HEADING)[1].split("|---", 1)[1]
    bars = []
    for line in table.splitlines()[1:]:
        if not line.startswith("|"):
            break
        arm, seconds = (cell.replace("*", "").strip() for cell in line.split("|")[1:3])
        name = next(short for pattern, short in _NAMES if re.fullmatch(pattern, arm))
        bars.append(Bar(name, float(seconds), "limit" in arm))
    return bars


def draw(bars: Sequence[Bar]) -> str:
    """Two groups of horizontal bars, each on a linear scale of its own, as SVG."""
    lines: list[str] = []
    y = 10
    titles = {False: "Everything in RAM", True: "Features on disk, 2 GB of memory with the page cache, cold"}
    for from_disk, title in titles.items():
        group = sorted((bar for bar in bars if bar.from_disk == from_disk), key=lambda bar: bar.seconds)
        lines.append(f'<text x="20" y="{y + 16}" style="{_STYLE}" font-size="15" font-weight="600">{title}</text>')
        y += _TOP
        for bar in group:
            lines.append(_bar(bar, max(each.seconds for each in group), y))
            y += _ROW
        y += 12
    note = "Seconds per batch: GraphSAGE, 8 M nodes x 128 features, 80 M edges, fan-out 10, 10, 1,024 seeds, 2 cores, no GPU."
    lines.append(f'<text x="20" y="{y + 14}" style="{_STYLE}" font-size="12.5">{note}</text>')
    height = y + 28
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *lines, "</svg>"]) + "\n"


def _bar(bar: Bar, longest: float, y: int) -> str:
    color = "#2a6f97" if bar.name == "ooc" else "#b8c4ce"
    length = max(2.0, _BAR * bar.seconds / longest)
    weight = ' font-weight="600"' if bar.name == "ooc" else ""
    end = f'x="{_LABEL - 8}" y="{y + 16}" text-anchor="end"'
    name = f'<text {end} style="{_STYLE}" font-size="14"{weight}>{escape(bar.name)}</text>'
    rect = f'<rect x="{_LABEL}" y="{y}" width="{length:.1f}" height="22" rx="2" fill="{color}"/>'
    value = (
        f'<text x="{_LABEL + length + 8:.1f}" y="{y + 16}" style="{_STYLE}" font-size="14"{weight}>{bar.seconds:.3g} s</text>'
    )
    return f"{name}\n{rect}\n{value}"


def main() -> None:
    """Write the figure."""
    OUT.write_text(draw(measured(SOURCE.read_text())))
    print(OUT)


if __name__ == "__main__":
    main()

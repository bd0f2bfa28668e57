"""Draws docs/packages.svg: the packages of `stores/` and `ooc/` on their floors, and which imports which.

    python -m tools.docs.package_diagram

Boxes and arrows are read from the imports of the code. An arrow is left out where a path of other arrows implies it.
"""

import ast
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "packages.svg"

Imports = dict[str, set[str]]

_BOX, _ROW, _GAP, _MARGIN = (176, 46), 86, 22, 30
_COLORS = {"ooc": "#dbe9f6", "stores": "#e8f3dc"}
_STYLE = "font-family: system-ui, sans-serif; fill: #1f2933"


def package_of(module: str) -> str | None:
    """The package on the diagram that a module belongs to; None for modules outside `ooc` and `stores`.

    >>> package_of("ooc.loading.base"), package_of("ooc.stores.graph"), package_of("numpy")
    ('ooc/loading', 'stores', None)
    """
    top, *rest = module.removeprefix("ooc.").split(".") if module.startswith("ooc.stores") else module.split(".")
    if top not in _COLORS:
        return None
    inner = rest and (ROOT / top / rest[0]).is_dir()
    return f"{top}/{rest[0]}" if inner else top


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports() -> Imports:
    """Package -> the packages that it imports, from the code as it is. The modules directly in `stores/` count as one."""
    found: Imports = {}
    for top in _COLORS:
        for path in sorted((ROOT / top).rglob("*.py")):
            package = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
            if package is None or package == "ooc":  # `ooc/__init__.py` only names what others define
                continue
            targets = {package_of(name) for name in imported(path)} - {None, package, "ooc"}
            found.setdefault(package, set()).update(name for name in targets if name)
    return found


def floors(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Packages by floor, from the top: each stands right above the highest that it imports. `stores` is one floor."""
    level = {name: 0 for name in graph if name.startswith("stores")}
    while len(level) < len(graph):
        ready = {n: targets for n, targets in graph.items() if n not in level and targets <= level.keys()}
        if not ready:
            raise ValueError(f"these packages import each other in a circle: {sorted(graph.keys() - level.keys())}")
        level |= {n: 1 + max((level[target] for target in targets), default=0) for n, targets in ready.items()}
    return [sorted(n for n in level if level[n] == height) for height in range(max(level.values()), -1, -1)]


def reduced(graph: Mapping[str, set[str]]) -> Imports:
    """The graph without the arrows that paths of other arrows imply (its transitive reduction)."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        stack = list(graph[start])
        while stack:
            if (name := stack.pop()) not in seen:
                seen.add(name)
                stack += graph[name]
        return seen

    return {n: {t for t in targets if not any(t in reach(other) for other in targets - {t})} for n, targets in graph.items()}


def draw(graph: Mapping[str, set[str]]) -> str:
    """The diagram as SVG."""
    upper = {n: {t if not t.startswith("stores") else "stores" for t in targets} for n, targets in graph.items()}
    upper = {n: targets for n, targets in upper.items() if not n.startswith("stores")} | {"stores": set()}
    rows = floors(upper)
    width = 2 * _MARGIN + max(len(row) for row in rows) * (_BOX[0] + _GAP) - _GAP
    inner = sorted(n for n in graph if n.startswith("stores/"))
    width = max(width, 2 * _MARGIN + (len(inner) + 1) * (_BOX[0] + _GAP))
    at: dict[str, tuple[float, float]] = {}
    for height, row in enumerate(rows):
        left = (width - len(row) * (_BOX[0] + _GAP) + _GAP) / 2
        at |= {n: (left + k * (_BOX[0] + _GAP), _MARGIN + height * _ROW) for k, n in enumerate(row)}
    lines = [_arrow(at[n], at[t]) for n, targets in sorted(reduced(upper).items()) for t in sorted(targets)]
    boxes = [_box(n, *place) for n, place in at.items() if n != "stores"] + [_stores(inner, width, at["stores"][1])]
    height = int(at["stores"][1] + _BOX[1] + 2 * _MARGIN)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}">'
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#7b8794"/></marker></defs>'
    )
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, marker, white, *lines, *boxes, "</svg>"]) + "\n"


def _arrow(source: tuple[float, float], target: tuple[float, float]) -> str:
    x1, y1 = source[0] + _BOX[0] / 2, source[1] + _BOX[1]
    x2, y2 = target[0] + _BOX[0] / 2, target[1] - 1
    bend = (y2 - y1) / 2
    path = f"M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="#7b8794" stroke-width="1.3" marker-end="url(#tip)"/>'


def _box(name: str, x: float, y: float) -> str:
    color = _COLORS[name.split("/")[0]]
    rect = f'<rect x="{x:.0f}" y="{y:.0f}" width="{_BOX[0]}" height="{_BOX[1]}" rx="6" fill="{color}" stroke="#52606d"/>'
    middle = f'x="{x + _BOX[0] / 2:.0f}" y="{y + _BOX[1] / 2 + 5:.0f}" text-anchor="middle"'
    text = f'<text {middle} style="{_STYLE}" font-size="15">'
    return f"{rect}{text}{escape(name)}</text>"


def _stores(inner: list[str], width: float, y: float) -> str:
    """The ground floor: `stores/` as one wide box with its packages inside."""
    frame = (
        f'<rect x="{_MARGIN / 2}" y="{y:.0f}" width="{width - _MARGIN:.0f}" height="{_BOX[1] + _MARGIN}" rx="6" '
        f'fill="#f4f9ee" stroke="#52606d"/>'
    )
    label = f'<text x="{_MARGIN}" y="{y + _BOX[1] / 2 + 20:.0f}" style="{_STYLE}" font-size="15">stores/ (no torch)</text>'
    left = width - len(inner) * (_BOX[0] + _GAP) - _MARGIN / 2
    return "\n".join([frame, label, *(_box(n, left + k * (_BOX[0] + _GAP), y + _MARGIN / 2) for k, n in enumerate(inner))])


def main() -> None:
    """Write the diagram."""
    OUT.write_text(draw(imports()))
    print(OUT)


if __name__ == "__main__":
    main()

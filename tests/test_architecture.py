"""What the packages may import, and how large their files may grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for package in ("stores", "ooc", "tools") for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Top-level names of every module that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    forbidden = {"stores": {"torch", "torch_geometric", "torchmetrics", "ooc", "tools"}, "ooc": {"tools"}, "tools": set()}
    assert not imported(path) & forbidden[path.relative_to(ROOT).parts[0]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("ooc", ["torch", "numba", "zarr", "numpy"]), ("stores.dataset", ["torch"]), ("ooc.cli", ["torch", "numba"])],
)
def test_importing_is_light(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_offers_what_it_names() -> None:
    import ooc

    for name in ooc.__all__:
        assert getattr(ooc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ooc.nothing

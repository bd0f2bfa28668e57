"""The notebooks run from an empty folder, and are kept without outputs."""

import json
import os
import sys
from pathlib import Path

import pytest

from tools.docs.snippets import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(each, id=each.stem) for each in NOTEBOOKS])
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_notebooks_are_kept_without_outputs() -> None:
    """A change of a notebook is then a change of its text."""
    assert len(NOTEBOOKS) >= 3
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")], f"{path}: clear its outputs"

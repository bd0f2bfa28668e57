"""Modules whose code runs on first use."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ooc.runtime.lazy_imports import DeferredModules
from tests.forked import python

CODE = "import time\nimport {name}.counted\n{name}.counted.runs.append(1)\ntime.sleep(0.05)\nvalue = 1\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package that is deferred; `counted.runs` in it has an entry for each run of its code."""
    name = "deferred_for_a_test"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(CODE.format(name=name))
    (folder / "counted.py").write_text("runs = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [DeferredModules([name]), *sys.meta_path])
    yield name
    for each in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[each]


def runs_of(package: str) -> list[int]:
    runs: list[int] = __import__(f"{package}.counted").counted.runs
    return runs


def test_the_code_runs_on_first_use_only(package: str) -> None:
    module = __import__(package)
    assert runs_of(package) == []
    assert module.__file__.endswith("__init__.py")
    assert runs_of(package) == [], "what every module has is known without it"
    assert module.value == 1
    assert runs_of(package) == [1]
    assert "value" in dir(module)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing
    assert runs_of(package) == [1]


@pytest.mark.parametrize(
    "statement", ["from {} import value", "from {} import *\nvalue", "import {} as it\ndir(it).index('value')"]
)
def test_any_way_of_asking_for_a_name_runs_it(package: str, statement: str) -> None:
    __import__(package)
    exec(statement.format(package), {})
    assert runs_of(package) == [1]


def test_threads_wait_for_the_one_that_runs_it(package: str) -> None:
    module, found = __import__(package), []
    threads = [threading.Thread(target=lambda: found.append(module.value)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4
    assert runs_of(package) == [1]


def test_code_that_fails_says_so_on_every_use(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "__init__.py").write_text("raise ValueError('broken')\n")
    module = __import__(package)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            _ = module.value


@pytest.mark.slow
def test_pyg_begins_without_its_data_sets() -> None:
    """A release of PyG that uses them while it is imported would take pandas and pyarrow along again."""
    code = (
        "import sys; before = set(sys.modules); import ooc, torch_geometric.nn, torch_geometric.loader\n"
        "print([name for name in ('torch_geometric.llm', 'torch_geometric.datasets.planetoid') if name in sys.modules])\n"
        "from torch_geometric.datasets import KarateClub\n"
        "import torch_geometric.datasets.planetoid\n"
        "print(KarateClub()[0].num_nodes, torch_geometric.datasets.Planetoid.__name__)"
    )
    assert python("-c", code).stdout.splitlines() == ["[]", "34 Planetoid"]

"""What is released: the contents of wheel and sdist, the tag, and the conda recipe's requirements."""

import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from ooc.cli.main import main
from tools.packaging.check import NEEDED, ROOT, faults_of_sdist, faults_of_tag, faults_of_wheel, version

CONDA = {"torch": "pytorch", "torch-geometric": "pytorch_geometric", "lmdb": "python-lmdb", "duckdb": "python-duckdb"}
CONDA["matplotlib"] = "matplotlib-base"
"""names of packages that differ there"""


def wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def test_a_wheel_holds_ooc_alone(tmp_path: Path) -> None:
    assert not faults_of_wheel(wheel(tmp_path / "good.whl", *NEEDED, f"ooc-{version()}.dist-info/RECORD"))
    faults = faults_of_wheel(wheel(tmp_path / "bad.whl", *NEEDED[1:], "stores/graph.py"))
    assert faults == ["bad.whl: stores stands at the top level", f"bad.whl: {NEEDED[0]} is missing"]


def test_an_sdist_holds_files_where_the_repository_has_a_link(tmp_path: Path) -> None:
    path = tmp_path / "bad.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo("ooc-1/ooc/stores")
        link.type, link.linkname = tarfile.SYMTYPE, "../stores"
        archive.addfile(link)
    assert faults_of_sdist(path)[0] == "bad.tar.gz: ooc-1/ooc/stores is a link"


def test_a_tag_is_the_version_and_stands_in_the_changelog() -> None:
    assert not faults_of_tag(f"v{version()}", f"# Changelog\n\n## {version()}\n")
    assert len(faults_of_tag("v99.0", "# Changelog\n")) == 2


def test_the_version_stands_in_the_changelog() -> None:
    assert not faults_of_tag(f"v{version()}", (ROOT / "CHANGELOG.md").read_text())


def test_the_conda_recipe_requires_what_the_package_requires() -> None:
    required = {
        re.split(r"(?=>=)", each)[0]: each
        for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    }
    recipe = (ROOT / "tools" / "packaging" / "conda" / "meta.yaml").read_text().split("  run:\n")[1].split("\n\n")[0]
    expected = {f"{CONDA.get(name, name)} {text[len(name) :]}" for name, text in required.items()}
    assert set(re.findall(r"- (\S+ >=\S+)", recipe)) - {"python >=3.11"} == expected


def test_the_conda_recipe_renders_and_its_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    """As conda-build renders it: Jinja, then YAML."""
    folder = ROOT / "tools" / "packaging" / "conda"

    def load_file_data(name: str, from_recipe_dir: bool) -> dict[str, Any]:
        assert from_recipe_dir
        return tomllib.loads((folder / name).read_text())

    text = jinja2.Template((folder / "meta.yaml").read_text()).render(load_file_data=load_file_data, PYTHON="python")
    recipe = yaml.safe_load(text)
    project = load_file_data("../../../pyproject.toml", from_recipe_dir=True)["project"]
    assert recipe["package"] == {"name": project["name"], "version": version()}
    assert (folder / recipe["source"]["path"]).resolve() == ROOT
    assert recipe["build"]["entry_points"] == [f"{name} = {target}" for name, target in project["scripts"].items()]
    assert (ROOT / recipe["about"]["license_file"]).is_file()
    assert recipe["about"]["license"] == project["license"]
    for name in recipe["test"]["imports"]:
        importlib.import_module(name)
    for command in recipe["test"]["commands"]:
        assert main(command.split()[1:]) == 0
    assert "Train graph neural networks" in capsys.readouterr().out


@pytest.mark.slow
def test_a_built_wheel_and_sdist_may_be_released(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    source = tmp_path / "source"
    for name in filter(None, tracked.decode().split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)]
    subprocess.run(words, check=True, capture_output=True)
    (built,), (sdist,) = tmp_path.glob("dist/*.whl"), tmp_path.glob("dist/*.tar.gz")
    assert not faults_of_wheel(built) + faults_of_sdist(sdist)

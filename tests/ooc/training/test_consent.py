"""Attempts to have a store or a run of a stranger execute code: none of it is imported, called or unpickled unasked."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from ooc.cli.main import main
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import configure

NET = """
from pathlib import Path
Path({mark!r}).touch()
from torch import nn
from torch_geometric.nn import SAGEConv
class Net(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = SAGEConv(in_channels, out_channels)
    def forward(self, x, edge_index):
        return self.conv(x, edge_index)
"""


class Exploit:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def stranger(make_store: MakeStore, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A store, a finished run of it, and a file that exists once code of theirs has run."""
    store = make_store()
    train(configure(store, tmp_path / "run", epochs=1))
    return store, tmp_path / "run", tmp_path / "executed"


def edit(run: Path, **values: Any) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **values}))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(each) for each in arguments]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("ooc: error: ")
    return err


def verbs(store: Path, run: Path, out: Path) -> list[list[object]]:
    """Every verb that makes a run's model."""
    infer, embed = (
        [verb, store, "--checkpoint", run, "--out", out.with_suffix(ending)]
        for verb, ending in (("infer", ".parquet"), ("embed", ".zarr"))
    )
    return [infer, embed, ["train", "--out", run, "--resume"]]


@pytest.mark.parametrize("number", range(3))
def test_a_function_that_a_run_names_is_not_called(
    stranger: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], number: int
) -> None:
    store, run, mark = stranger
    edit(run, model="os:system", model_args={"command": f"touch {mark}"})
    command = verbs(store, run, run.with_name("out.parquet"))[number]
    assert "importing it runs its code" in refused(capsys, *command)
    assert "not a torch.nn.Module class" in refused(capsys, *command, "--allow-code")
    assert "not a torch.nn.Module class" in refused(capsys, *command, "--model", "os:system")
    assert not mark.exists()


@pytest.mark.parametrize("where", ["in the run", "in the store", "a package around the run", "on sys.path"])
@pytest.mark.parametrize("number", range(3))
def test_a_module_in_a_run_or_a_store_is_not_imported(
    stranger: tuple[Path, Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    number: int,
) -> None:
    store, run, mark = stranger
    folder = store if where == "in the store" else run
    name = f"evil_net_{number}_{where.replace(' ', '_')}"
    (folder / f"{name}.py").write_text(NET.format(mark=str(mark)))
    (folder / "__init__.py").write_text(f"open({str(mark)!r}, 'w')")
    around = where == "a package around the run"
    monkeypatch.chdir(run.parent if around else folder)
    monkeypatch.setattr("sys.path", [each for each in __import__("sys").path if each])
    if where == "on sys.path":
        monkeypatch.syspath_prepend(folder)
    model = f"run.{name}:Net" if around else f"{name}:Net"
    edit(run, model=model)
    command = verbs(store, run, run.with_name("out.parquet"))[number]
    assert "importing it runs its code" in refused(capsys, *command)
    err = refused(capsys, *command, "--allow-code")
    assert "which is data" in err or "cannot import" in err
    assert not mark.exists()


def test_a_class_of_ones_own_is_named_again(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a flag, in the configuration, or by --allow-code; a fresh run's flag is consent."""
    (tmp_path / "consenting_net.py").write_text(NET.format(mark=str(tmp_path / "mark")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    store, run, name = make_store(), tmp_path / "run", "consenting_net:Net"
    small = ["--no-plan", "--layers", "1", "--fanout", "3"]
    assert main(["train", str(store), "--out", str(run), "--model", name, "--epochs", "1", *small]) == 0
    resume = ["train", "--out", str(run), "--resume", "--epochs", "2"]
    capsys.readouterr()
    assert f"uses the class {name}" in refused(capsys, *resume)
    assert "trained with model = 'consenting_net:Net'" in refused(capsys, *resume, "--model", "os:system")
    assert main([*resume, "--allow-code"]) == main([*resume, "--model", name]) == 0
    (tmp_path / "own.toml").write_text(f'model = "{name}"\nlayers = 1\nfanout = [3]\n')
    assert main([*resume, "--config", str(tmp_path / "own.toml")]) == 0
    infer = ["infer", str(store), "--checkpoint", str(run), "--out", str(tmp_path / "p.parquet")]
    capsys.readouterr()
    assert f"--model {name}" in refused(capsys, *infer)
    assert "name that class" in refused(capsys, *infer, "--model", "os:system")
    assert main([*infer, "--model", name]) == 0


@pytest.mark.parametrize("name", ["model.pt", "checkpoint.pt"])
def test_a_checkpoint_is_not_unpickled(
    stranger: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    store, run, mark = stranger
    (run / name).write_bytes(pickle.dumps(Exploit(mark)))
    command = verbs(store, run, run.with_name("out.parquet"))[0 if name == "model.pt" else 2]
    assert "not a readable checkpoint" in refused(capsys, *command)
    assert not mark.exists()


@pytest.mark.parametrize("dtype", ["|O", "<f4"])
def test_an_array_is_not_unpickled(stranger: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """Zarr's second format has a codec that unpickles."""
    store, run, mark = stranger
    x = store / "node" / "node" / "x"
    shutil.rmtree(x)
    x.mkdir()
    codec, fill = {"id": "pickle"}, {"|O": None, "<f4": 0}[dtype]
    filters, compressor = ([codec], None) if dtype == "|O" else (None, codec)
    about: dict[str, Any] = {"zarr_format": 2, "shape": [50, 8], "chunks": [50, 8], "dtype": dtype, "fill_value": fill}
    (x / ".zarray").write_text(json.dumps({**about, "order": "C", "filters": filters, "compressor": compressor}))
    (x / "0.0").write_bytes(pickle.dumps([Exploit(mark)]))
    for command in (["train", store, "--out", run.with_name("other")], verbs(store, run, run.with_name("out.parquet"))[0]):
        refused(capsys, *command)
    main(["verify", str(store)])
    main(["info", str(store)])
    assert not mark.exists()


def test_a_report_shows_text_as_text(stranger: tuple[Path, Path, Path]) -> None:
    _, run, _ = stranger
    summary = json.loads((run / "summary.json").read_text())
    config = {**summary["config"], "model": "<img src=x onerror=alert(1)>"}
    text = {**summary, "config": config, "monitor": "<script>alert(1)</script>"}
    (run / "summary.json").write_text(json.dumps(text))
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;img src=x" in page
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page

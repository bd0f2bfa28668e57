"""What the kills' benchmark finds where something is damaged: its checks can fail."""

import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ooc.layerwise import exact_pass as exact_pass_module
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.layerwise.row_files import Files
from ooc.training.infer import infer
from ooc.training.loop import train
from ooc.training.run import Run
from tests.conftest import MakeStore
from tests.ooc.runs import KillAt, Killed, configure
from tools.bench.kills import verbs
from tools.bench.lib import leftovers as remains
from tools.bench.lib.killed_process import Places, end_of, fork, killed_inside


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this process keeps what it has on its way."""
    for owner, name in ((Run, "checkpoint"), (Files, "note"), (LayerwisePass, "_open_tiles")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    folder = tmp_path / "record"
    folder.mkdir()
    remains.record(folder)
    return folder


def flip(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))


def test_a_history_with_one_wrong_bit_is_found(make_store: MakeStore, tmp_path: Path, record: Path) -> None:
    store = make_store()
    settings: dict[str, Any] = {"mode": "history", "parts": 5, "fanout": [], "checkpoint_every": 2, "refresh": 1}
    settings |= {"layers": 3, "history_dtype": "float32", "batch_size": 1024}
    (tmp_path / "cut").mkdir()
    train(configure(store, tmp_path / "whole", **settings))
    nobody = (record / "commits.jsonl").read_text()
    with pytest.raises(Killed):
        train(configure(store, tmp_path / "cut/run", **settings), watcher=KillAt(7))
    (record / "commits.jsonl").write_text(nobody)
    assert remains.check(tmp_path / "cut", record, tmp_path / "scratch") == 0
    train(configure(store, tmp_path / "cut/run", **settings), resume=True)
    (record / "commits.jsonl").write_text(nobody)
    shutil.rmtree(tmp_path / "scratch")
    assert remains.check(tmp_path / "cut", record, tmp_path / "scratch") == 0
    shutil.rmtree(tmp_path / "scratch")
    flip(tmp_path / "cut/run/history/layer1/rows.bin", 4 * 8 * 41 + 2)
    with pytest.raises(AssertionError, match="nobody killed"):
        remains.check(tmp_path / "cut", record, tmp_path / "scratch")


def test_a_sweep_with_one_wrong_bit_is_found(
    make_store: MakeStore, tmp_path: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(num_nodes=9000, num_edges=20_000)
    train(configure(store, tmp_path / "model", epochs=1))
    monkeypatch.setattr(exact_pass_module, "LayerwisePass", partial(LayerwisePass, room=300_000))
    (tmp_path / "cut").mkdir()
    infer(tmp_path / "model", store, tmp_path / "whole.parquet")

    def stop(what: str, done: int, total: int) -> None:
        if what == "layer 1":
            raise Killed

    with pytest.raises(Killed):
        infer(tmp_path / "model", store, tmp_path / "cut/p.parquet", progress=stop)
    assert remains.check(tmp_path / "cut", record, tmp_path / "scratch") == 0
    flip(tmp_path / "cut/p.parquet.sweep/out/rows.bin", 5)
    with pytest.raises(AssertionError, match="out differs before node"):
        remains.check(tmp_path / "cut", record, tmp_path / "scratch")


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    for name, score in (("one", 1), ("two", 1), ("three", 2)):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run/summary.json").write_text(f'{{"metrics": {score}, "seconds": "{name}"}}')
        (tmp_path / name / "run/metrics.jsonl").write_text(str(score))
    (tmp_path / "three/.left.tmp").touch()
    assert remains.differences(tmp_path / "one", tmp_path / "two") == []
    found = remains.differences(tmp_path / "one", tmp_path / "three")
    assert found == [".left.tmp is in one only", "run/metrics.jsonl differs", "run/summary.json differs"]


def test_where_a_process_was_when_it_was_killed(tmp_path: Path) -> None:
    places = Places("one", "two")

    def run() -> int:
        for _ in range(3):
            with places.at("one"):
                pass
        with places.at("two"):
            while True:
                os.getpid()

    assert killed_inside(fork(run, tmp_path / "log"), places, "two", 1, 0.01) == -9
    assert places.inside() == ["two"]
    assert (places.entered("one"), places.entered("two")) == (3, 1)
    places.reset()
    assert killed_inside(fork(lambda: 5, tmp_path / "log"), places, "two", 1, 0.0) == 5
    assert places.inside() == []
    assert end_of(fork(lambda: os.write(1, b"told") // 0, tmp_path / "log")) == 1
    assert "told" in (tmp_path / "log").read_text()


def test_what_a_command_that_is_killed_leaves_behind_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(words: list[str], folder: Path) -> int:
        temporary = folder / f"{os.getpid()}.tmp"
        temporary.write_text("text")
        temporary.rename(folder / words[0])
        return 0

    monkeypatch.setattr(verbs, "run", careless)
    chance = random.Random(0)
    killed = verbs.Killed(verbs.Verb("careless", ["out"], ()), tmp_path)
    assert killed.calls == ["open", "write", "rename"]
    while not killed.at["rename"]:
        killed.kill(chance)
    found = [each for each in killed.findings if "killed at rename 0" in each]
    assert len(found) == 1
    assert ".tmp is in one only" in found[0]

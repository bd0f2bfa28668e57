"""What the kills' benchmark finds where something is damaged: its checks can fail."""

import os
import shutil
import signal
import time
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
from tools.bench.lib import killed_process
from tools.bench.lib import leftovers as remains
from tools.bench.lib.killed_process import Places, end_of, fork, killed_inside
from tools.bench.lib.results import Results, clear


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    killed = verbs.Killed(verbs.Verb("careless", ["out"]), tmp_path)
    assert killed.calls == ["open", "write", "rename"]
    assert [killed.moment(number)[0] for number in range(5)] == ["open", "rename", "write", "time", "open"]
    at, found = killed.kill(1)
    assert at == ["rename"]
    assert len(found) == 1
    assert found[0].startswith("killed at rename 0: ")
    assert found[0].endswith(".tmp is in one only")


def test_each_call_of_a_kind_is_killed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "run_until", lambda *_: (0, ["open", "write", "write", "write"]))
    killed = verbs.Killed(verbs.Verb("none", []), tmp_path)
    moments = [killed.moment(number) for number in range(18)]
    assert sorted(moments[1::3][:3]) == [("write", 0), ("write", 1), ("write", 2)]
    assert moments[1::3][3:] == moments[1::3][:3]
    assert all(0 <= place <= killed.seconds for _, place in moments[2::3])


def test_a_campaign_goes_on_where_it_was_and_repeats_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path, every=1)
    results.add("one", "fine", kills=2, verb="a")
    results.add("two", "bad", ["it broke", "and more"], kills=1, verb="b")
    assert "two: it broke\ntwo: and more\n2 cases, 2 findings" in capsys.readouterr().err
    (tmp_path / "left").mkdir()
    clear(tmp_path)
    again = Results(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["results.jsonl"]
    assert ("one" in again, "two" in again, len(again)) == (True, False, 2)
    assert again.findings == ["two: it broke", "two: and more"]
    again.add("two", "fine", kills=1, verb="b")
    assert (again.findings, again.counts(), again.total("kills"), again.total("kills", verb="a")) == ([], {"fine": 2}, 3, 2)


def test_what_blocks_or_spins_hangs_and_what_waits_for_a_core_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spin() -> int:
        while True:
            pass

    assert killed_process.ended(fork(signal.pause, tmp_path / "log"), 0.2)[0] is None
    assert killed_process.ended(fork(spin, tmp_path / "log"), 0.2)[0] is None
    monkeypatch.setattr(killed_process, "_core_seconds", lambda _: (0.0, 1e9))
    code, peak = killed_process.ended(fork(lambda: time.sleep(0.4) or 5, tmp_path / "log"), 0.2)
    assert code == 5
    assert peak > 1 << 20

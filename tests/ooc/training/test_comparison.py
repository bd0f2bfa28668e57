"""Techniques compared: each trains in a process of its own, is kept, and is in the table or says why not."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
from rich.console import Console

import ooc
from ooc.config.base import RunConfig
from ooc.config.techniques import TECHNIQUES
from ooc.report.comparison import comparison_figure, comparison_table, refusals, write_comparison
from ooc.stores.errors import ConfigError
from ooc.training import comparison
from ooc.training.checkpoint import write_json
from ooc.training.comparison import Trial
from tests.conftest import MakeStore
from tests.forked import Python
from tests.ooc.runs import SMALL


class Forked(Python):
    """`subprocess.Popen` of a Python program, forked from a process that has imported it."""

    def __init__(self, words: list[str], env: dict[str, str], stdout: int, stderr: IO[str]) -> None:
        super().__init__(*words[1:], into=stderr.fileno(), env=env)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def terminate(self) -> None:
        self.process.terminate()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Techniques train in processes that begin at once."""
    monkeypatch.setattr(comparison, "subprocess", SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL))


TRIALS = [
    Trial("plain", "the settings as given", 3, "accuracy", 0.8, 0.01, 500_000_000, 90_000_000, 0, 1.5, 2_000_000),
    Trial("history", "parts", 3, "accuracy", None, None, 400_000_000, 30_000_000, 0, 1.0, 1_000_000),
    Trial("labor", "shared neighbors", refused="labor needs edges"),
]


@pytest.mark.slow
def test_each_technique_trains_once_and_equals_its_own_run(make_store: MakeStore, tmp_path: Path, forked: None) -> None:
    settings = {**SMALL, "store": make_store(), "out": tmp_path / "all", "epochs": 2}
    seen: dict[str, list[int]] = {}
    trials = ooc.compare(
        techniques="checkpointing",
        progress=lambda name, done, total, unit="": seen.setdefault(name, []).append(done),
        **settings,
    )
    trained = [name for name in seen if "again" not in name]  # as it is where kernels were compiled
    assert trained == [each.technique for each in trials] == ["plain", "checkpointing"]
    assert all(each == sorted(each) and each[-1] == 2 for each in seen.values())
    assert trials[0].score == trials[1].score  # the same model, recomputed
    alone = ooc.train(**{**settings, "out": tmp_path / "alone"})
    assert trials[0].score == alone["metrics"]["test"][alone["monitor"]]
    assert all(each.peak_rss_bytes > 50_000_000 and each.seconds > 0 for each in trials)
    summary = json.loads((tmp_path / "all" / "plain" / "summary.json").read_text())
    training = next(each for each in summary["memory"] if each["name"] == "training")
    assert trials[0].training_bytes == training["peak"] - summary["budget"]["baseline"] > 0

    before = (tmp_path / "all" / "plain" / "summary.json").stat().st_mtime_ns
    assert ooc.compare(techniques="checkpointing", **settings) == trials
    assert (tmp_path / "all" / "plain" / "summary.json").stat().st_mtime_ns == before  # kept
    assert [Trial(**each) for each in json.loads((tmp_path / "all" / "comparison.json").read_text())] == trials


@pytest.mark.slow
def test_runs_that_chose_settings_are_kept_too(make_store: MakeStore, tmp_path: Path, forked: None) -> None:
    settings = {**SMALL, "store": make_store(), "out": tmp_path / "all", "epochs": 1, "techniques": "cluster"}
    trials, summary = ooc.compare(**settings), tmp_path / "all" / "cluster" / "summary.json"
    assert json.loads(summary.read_text())["config"]["evaluate"] != "auto"
    before = summary.stat().st_mtime_ns
    assert ooc.compare(**settings) == trials
    assert summary.stat().st_mtime_ns == before


@pytest.mark.slow
def test_runs_on_other_data_are_trained_again(make_store: MakeStore, tmp_path: Path, forked: None) -> None:
    store, summary = make_store(), tmp_path / "all" / "plain" / "summary.json"
    settings = {**SMALL, "store": store, "out": tmp_path / "all", "epochs": 1, "techniques": "plain"}
    ooc.compare(**settings)
    before = summary.stat().st_mtime_ns
    ooc.split(store, random_split=(0.5, 0.2, 0.3), replace=True)
    ooc.compare(**settings)
    again = summary.stat().st_mtime_ns
    assert again > before
    ooc.compare(**settings)
    assert summary.stat().st_mtime_ns == again


@pytest.mark.slow
def test_a_technique_that_does_not_fit_says_why_and_the_others_go_on(
    make_store: MakeStore, tmp_path: Path, forked: None
) -> None:
    settings = {**SMALL, "store": make_store(), "out": tmp_path / "all", "epochs": 1, "replace": True}
    plain, labor, bf16 = ooc.compare(techniques=["labor", "bf16"], seeds=2, **settings)
    assert plain.refused is None is bf16.refused
    assert plain.deviation is not None
    assert labor.refused == "replace does not apply to sampler = labor: leave it out"


def test_settings_that_cannot_be_compared_are_refused(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    with pytest.raises(ConfigError, match="not in mode full"):
        ooc.compare(store=store, out=tmp_path / "a", mode="full")
    with pytest.raises(ConfigError, match="seeds = 0 is invalid: give 1 or more"):
        ooc.compare(store=store, out=tmp_path / "a", seeds=0)
    assert not (tmp_path / "a").exists()


def test_a_run_that_compiled_kernels_is_measured_again(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SMALL, "store": make_store(), "out": tmp_path / "all", "epochs": 1}
    summary = ooc.train(**{**settings, "out": tmp_path / "run"})
    names: list[str] = []

    def trained(config: RunConfig, name: str, progress: object) -> dict[str, Any]:
        names.append(name)
        cold = len(names) == 1
        found = {**summary, "kernels_compiled": 3 * cold, "seconds_per_epoch": 30.0 if cold else 0.5}
        config.out.mkdir(exist_ok=True)
        write_json(config.out / "summary.json", found | {"config": config.model_dump(mode="json")})
        return found

    monkeypatch.setattr(comparison, "_trained", trained)
    plain, bf16 = ooc.compare(techniques="bf16", **settings)
    assert names == ["plain", "plain again, with compiled kernels", "bf16"]
    assert plain.seconds == 0.5 == bf16.seconds


def test_a_refused_comparison_leaves_nothing(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ConfigError("bad.py:10: RuntimeError: no such width")

    monkeypatch.setattr(comparison, "_trained", refused)
    settings = {**SMALL, "store": make_store(), "out": tmp_path / "all", "techniques": "bf16"}
    with pytest.raises(ConfigError, match=r"bad\.py:10"):
        ooc.compare(**settings)
    assert not settings["out"].exists()
    (settings["out"] / "plain").mkdir(parents=True)  # of an earlier comparison
    (settings["out"] / "comparison.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"bad\.py:10"):
        ooc.compare(**settings)
    assert sorted(path.name for path in settings["out"].iterdir()) == ["comparison.json", "plain"]


def test_a_directory_of_other_runs_stays_as_it_is(make_store: MakeStore, tmp_path: Path) -> None:
    store, run = make_store(), tmp_path / "runs" / "plain"
    run.mkdir(parents=True)
    (run / "model.pt").write_bytes(b"of days")
    for out in (tmp_path / "runs", run / "model.pt"):
        with pytest.raises(ConfigError, match="is not of `ooc compare`: choose another `out`"):
            ooc.compare(store=store, out=out, techniques="labor")
    assert (run / "model.pt").read_bytes() == b"of days"


def test_the_table_and_the_page_hold_every_trial(tmp_path: Path) -> None:
    table = comparison_table(TRIALS, 160)
    assert [len(column._cells) for column in table.columns] == [2] * 7
    assert refusals(TRIALS) == ["labor was not tried: labor needs edges"]
    page = write_comparison(tmp_path, "a.ooc", TRIALS, 2).read_text()
    for text in (
        "0.8000 ± 0.0100",
        "500 MB",
        "90 MB",
        "labor was not tried: labor needs edges",
        "3 epochs, 2 seeds",
        "accuracy",
    ):
        assert text in page, text
    assert page.count("<svg") == 1
    assert "<script" not in page


def test_a_narrow_terminal_has_whole_names_and_a_line_for_each_technique() -> None:
    trials = [replace(TRIALS[0], technique=name, about=technique.about) for name, technique in TECHNIQUES.items()]

    def printed(width: int) -> list[str]:
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(comparison_table(trials, width))
        return console.export_text().splitlines()

    for width in (80, 160):
        lines = printed(width)[-len(trials) :]
        for line, trial in zip(lines, trials, strict=True):
            assert line.startswith(f"{trial.technique} ")
            assert "0.8000 ± 0.0100" in line
            assert (trial.about in line) == (width == 160)


def test_lengths_on_the_chart_are_in_proportion() -> None:
    trials = [replace(TRIALS[0], score=score) for score in (0.6748, 0.6471)]
    scores, *others = comparison_figure(trials).axes
    assert not scores.patches  # dots, as their axis does not begin at 0
    assert np.array(scores.collections[0].get_offsets())[:, 0].tolist() == [0.6748, 0.6471]
    assert len(scores.get_xticks()) > 1
    assert others
    for axes in others:
        assert axes.get_xlim()[0] == 0
        assert all(bar.get_x() == 0 for bar in axes.patches)  # type: ignore[attr-defined]


def test_a_technique_without_a_score_is_on_the_chart() -> None:
    scores, *_ = comparison_figure(TRIALS[:2]).axes
    assert [text.get_text() for text in scores.texts] == ["0.8000", "-"]


@pytest.mark.slow
def test_the_command_prints_the_table_and_names_an_unknown_technique(make_store: MakeStore, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ooc", "compare", str(make_store()), "--out", str(tmp_path / "all"), "--hidden", "8"]
    words += ["--fanout", "3,3", "--batch-size", "8", "--epochs", "1", "--techniques"]
    done = subprocess.run([*words, "bf16"], capture_output=True, text=True, check=True)
    assert "technique" in done.stdout
    assert "bf16" in done.stdout
    assert (tmp_path / "all" / "comparison.html").exists()
    wrong = subprocess.run([*words, "magic"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "'magic' is unknown; there are plain" in wrong.stderr

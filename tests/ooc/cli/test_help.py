"""The help of the command line: short, by topic, with examples that parse."""

import re
import shlex
from typing import Any

import pytest
import typer.main

from ooc.cli.commands import app
from ooc.cli.flags import APPEND, INGEST
from ooc.cli.main import main
from ooc.cli.train_verbs import TRAIN
from ooc.config import topics
from ooc.config.modes import classes

COMMAND: Any = typer.main.get_command(app)
VERBS = sorted(COMMAND.commands)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def options(text: str) -> list[str]:
    """Names of the options that a help lists."""
    return re.findall(r"^  --([a-z0-9-]+)", text, re.M)


def test_the_help_of_training_shows_what_matters_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    short, full = printed(capsys, "train", "--help"), printed(capsys, "train", "--help-all")
    assert len(short) < 7_900
    assert 20 <= len(options(short)) <= 30
    assert set(options(full)) == {flag.name.replace("_", "-") for flag in TRAIN} | {
        "out",
        "config",
        "resume",
        "grown",
        "allow-code",
    }
    assert f"{len(options(full)) - len(options(short))} more options: " in short
    assert "train --help-all" in short
    for topic in ("Run:", "Model:", "Optimization:", "Machine:"):
        assert topic in short


def test_the_help_says_which_words_a_number_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    full = printed(capsys, "train", "--help-all")
    for option in ("--importance INT|*", "--refresh INT|auto", "--class-weights LIST|none|balanced", "--weight-attr TEXT"):
        assert re.search(rf"^  {re.escape(option)}\s", full, re.M)


def test_the_help_of_a_mode_shows_its_options_only(capsys: pytest.CaptureFixture[str]) -> None:
    for name, settings in classes().items():
        task, _, mode = name.rpartition(" ")
        asked = ["--mode", mode, *(["--task", task] if task else [])]
        named = {each.replace("-", "_") for each in options(printed(capsys, "train", *asked, "--help-all"))}
        assert named - {"config", "resume", "grown", "allow_code"} <= set(settings.model_fields) - set(settings.refused)
    history = printed(capsys, "train", "--mode=history", "--help-all")
    assert "--refresh" in history
    assert not {"fanout", "roots"} & set(options(history))
    links = printed(capsys, "train", "--task", "link", "--mode=events", "--help-all")
    assert "ratio" in options(links)
    assert "fanout" not in options(links)
    assert "--task auto|classification|regression" in printed(capsys, "ingest", "--task", "regression", "--help-all")
    for asked, own in (
        ("--task=link", "edge-type decoder eval-ratio"),
        ("--task=graph", "pooling"),
        ("--mode=history", "refresh"),
    ):
        assert {*own.split(), "model", "out"} <= set(options(printed(capsys, "train", asked, "--help")))
    assert "--loss bce|bpr|softmax " in printed(capsys, "train", "--task", "link", "--help")
    events = printed(capsys, "train", "--mode", "events", "--help")
    assert re.search(r"--lr NUMBER .*\[0.0005\]", events)


def test_the_short_help_of_a_mode_has_what_its_runs_often_set(capsys: pytest.CaptureFixture[str]) -> None:
    for mode, settings in classes().items():
        assert set(settings.often) <= set(settings.model_fields) - set(settings.refused), mode
    tables = options(printed(capsys, "train", "--mode", "table", "--help"))
    assert {"optimizer", "lr-schedule", "eval-every"} <= set(tables)
    assert "allow-code" not in tables, "no class of one's own is trained there"
    assert "allow-code" in options(printed(capsys, "train", "--mode", "history", "--help"))
    lightgcn = printed(capsys, "train", "--mode", "lightgcn", "--help")
    assert "Tables (--mode table, lightgcn):" in lightgcn


def test_brackets_and_modes_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    full = " ".join(printed(capsys, "train", "--help-all").split())
    assert "ooc[gds]" in full
    assert "snapshots: snapshots:" not in full
    assert "sampled for link" in full
    assert "link sampled" not in full
    assert "[100; events 50; snapshots 20]" in full
    ingest = " ".join(printed(capsys, "ingest", "--help-all").split())
    assert "ooc[metis]" in ingest
    assert "Column of the sources. [src]" in ingest


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (topics.TRAIN, {"config", "resume", "grown"}.union(*(each.model_fields for each in classes().values()))),
        (topics.INGEST, {flag.name for flag in [*INGEST, *APPEND]}),
    ],
)
def test_topics_name_settings_that_there_are_once(table: topics.Topics, names: set[str]) -> None:
    named = [name for own in table.values() for name in " ".join(own).split()]
    assert len(named) == len(set(named))
    assert set(named) <= names


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_a_topic_and_examples_that_parse(name: str) -> None:
    command = COMMAND.commands[name]
    assert command.rich_help_panel in ("Stores", "Training and prediction", "Other")
    assert len(command.get_short_help_str(78)) <= 78
    assert not command.get_short_help_str(78).endswith("...")
    lines = command.epilog.replace("\\\n", " ").strip().splitlines()
    for line in lines:
        program, verb, *words = shlex.split(line.split(" > ")[0])
        assert (program, verb) == ("ooc", name)
        command.make_context(name, words, resilient_parsing=False)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert printed(capsys, "--version") == f"ooc {version('ooc')}\n"

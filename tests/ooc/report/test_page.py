"""The page: self-contained, whole, and true to the run's numbers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from ooc.config.modes import load_config
from ooc.report import page
from ooc.report.page import STYLE, loss_figure, memory_figure, running_mean, stages_figure, validation_figure, write_report
from ooc.stores.errors import ConfigError
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.training.test_train import configure


@pytest.fixture(autouse=True)
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield


def texts(svg: str) -> list[str]:
    """All text in a figure; parsing it also shows that it is well-formed."""
    return [text.strip() for element in ElementTree.fromstring(svg).iter() for text in [element.text or ""] if text.strip()]


def test_the_page_of_a_run_holds_its_numbers_and_loads_nothing(make_store: MakeStore, tmp_path: Path) -> None:
    summary = train(configure(make_store(), tmp_path / "run", memory="4GB", plan=True))
    page = write_report(tmp_path / "run").read_text()
    assert f"{summary['metrics']['test']['accuracy']:.4f}" in page
    for title in (
        "Training loss",
        "Validation",
        "Where the time went",
        "Memory",
        "Predicted and actual",
        "Stages over time",
        "Settings",
    ):
        assert f"<h2>{title}" in page
    assert page.count("<svg") == 5
    assert "budget 4 GB" in page
    assert summary["plan"]["advice"] in page
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(http", page)
    targets = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert all(target.startswith("#") for target in targets), targets


def test_a_run_without_a_prediction_shows_what_it_took(make_store: MakeStore, tmp_path: Path) -> None:
    train(configure(make_store(), tmp_path / "run", epochs=1, plan=False))
    page = write_report(tmp_path / "run").read_text()
    assert "<h2>What the run took</h2>" in page
    assert "predicted" not in page.lower()
    assert "<td>-</td>" not in page


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "fan-out 3, 3, batches of 8,"),
        ({"mode": "history", "parts": 4, "parts_per_batch": 2}, "histories, 2 parts per batch,"),
        ({"mode": "history", "parts": 4, "history": "zero"}, "zeros instead of histories, 1 part per batch,"),
        ({"mode": "cluster", "parts": 4}, "clusters, 1 part per batch,"),
        ({"mode": "saint", "roots": 5, "walk_length": 3}, "GraphSAINT, 5 walks of 3 per batch,"),
        ({"mode": "saint", "roots": 5, "saint": "node"}, "GraphSAINT, 5 nodes per batch,"),
    ],
    ids=str,
)
def test_the_page_says_what_batches_are_made_of(
    make_store: MakeStore, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    given = {"epochs": 1, "layers": 2, **({"fanout": []} if settings else {}), **settings}
    train(configure(make_store(), tmp_path / "run", **given))
    page = write_report(tmp_path / "run").read_text()
    assert words in page
    kept = settings.get("mode") == "history" and "history" not in settings
    assert ("histories read" in page) == ("histories written" in page) == kept


def test_an_unfinished_run_shows_what_there_is(tmp_path: Path) -> None:
    lines = [{"epoch": 0, "step": step, "loss": 1 / (step + 1)} for step in range(7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"epoch": 0, "ste')
    (tmp_path / f".report.html.{2**22 + 1}.tmp").touch()  # of a call that was killed
    page = write_report(tmp_path).read_text()
    assert [*tmp_path.glob(".*")] == []
    assert "Not finished" in page
    assert page.count("<svg") == 1


def test_names_are_escaped(make_store: MakeStore, tmp_path: Path) -> None:
    out = tmp_path / "<b>&"
    train(configure(make_store(class_names=["<i>", "b", "c"]), out, epochs=1))
    page = write_report(out).read_text()
    assert "<h1>&lt;b&gt;&amp;</h1>" in page
    assert "3 classes: &lt;i&gt;, b, c." in page


def test_a_folder_that_is_no_run_and_a_broken_summary_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match=r"summary\.json: not valid JSON"):
        write_report(tmp_path)


def test_a_long_loss_curve_is_thinned(tmp_path: Path) -> None:
    steps = [{"loss": 1.0} for _ in range(50_000)]
    assert len(loss_figure(steps)) < 200_000


def test_running_mean_against_a_loop() -> None:
    values = np.random.default_rng(0).random(23)
    expected = [values[max(0, i - 4) : i + 5].mean() for i in range(23)]
    np.testing.assert_allclose(running_mean(values, 4), expected)


def test_figures_name_what_they_show() -> None:
    stage = {"work_s": 1.0, "wait_s": 2.0}
    assert {"sample", "model", "work", "wait"} <= set(texts(stages_figure({"sample": stage, "consumer": stage})))
    readings = [{"name": "training", "before": 10**6, "peak": 3 * 10**6, "after": 2 * 10**6}]
    summary: dict[str, Any] = {"memory": readings, "memory_budget_bytes": 4 * 10**6, "peak_rss_bytes": 3 * 10**6}
    assert {"training: peak", "3 MB", "budget 4 MB"} <= set(texts(memory_figure(summary)))
    epochs = [{"epoch": e, "val": {"accuracy": 0.5, "auroc": None, "loss": 1.0}} for e in range(3)]
    found = texts(validation_figure(epochs, best_epoch=1))
    assert "accuracy" in found
    assert "auroc" not in found
    assert "0.98" not in texts(validation_figure(epochs[:1], best_epoch=0))  # no parts of an epoch


def test_what_is_far_from_its_prediction_is_marked() -> None:
    plan = {
        "predicted": {"seconds_per_epoch": 2.0, "peak_rss_bytes": 10**9, "bytes_read": 10**6, "bottleneck": "read"},
        "actual": {"seconds_per_epoch": 2.6, "peak_rss_bytes": 10**9, "bytes_read": 750_001, "bottleneck": "consumer"},
    }
    rows = {label: (*shown, marked) for label, *shown, marked in page._plan_rows(plan)}
    assert rows["training, per epoch"] == ("2 s", "2.6 s", "+30 %", True)
    assert rows["peak memory"] == ("1 GB", "1 GB", "0 %", False)
    assert rows["read from disk"][2:] == ("-25 %", False)
    assert rows["bottleneck"] == ("read", "model", "another", True)
    assert page._plan_rows({"predicted": None, "actual": {"bytes_read": 5}}) == [("read from disk", "-", "5 B", "", False)]


def test_settings_that_were_chosen_come_first(make_store: MakeStore, tmp_path: Path) -> None:
    config = load_config(None, {"store": "a.ooc", "out": "run", "fanout": "5,5,5", "hidden": 32}).model_dump(mode="json")
    (heading, chosen), (rest, others) = page._settings(config)
    assert (heading, rest) == ("", "defaults")
    assert list(chosen) == ["store", "out", "hidden", "fanout"]
    assert {"lr", "layers", "eval_fanout", "mode", "task"} <= set(others)
    links = load_config(None, {"store": "a.ooc", "out": "run", "task": "link"}).model_dump(mode="json")
    assert page._settings(links)[0][1]["task"] == "link"


def test_captions_and_legends_fit_what_is_drawn() -> None:
    assert page._loss_caption(60) == "One point per step."
    assert page._loss_caption(61) == "One point per step; the line is a running mean."
    assert page._loss_caption(5000).startswith("One point per 3 steps, their mean; ")
    epochs = [{"epoch": epoch, "drift": [0.1, 0.2, 0.3]} for epoch in range(2)]
    assert {"layer 1", "layer 2", "layer 3"} <= set(texts(page.drift_figure(epochs)))
    deep = set(texts(page.drift_figure([{"epoch": 0, "drift": [0.1] * 31}])))
    assert {"layer 1", "layer 31"} <= deep
    assert sum(text.startswith("layer ") for text in deep) <= 9


def test_labels_have_a_ground_over_the_budget_line() -> None:
    readings = [{"name": "training", "before": 10**6, "peak": 3 * 10**6, "after": 2 * 10**6}]
    svg = memory_figure({"memory": readings, "memory_budget_bytes": 3_200_000, "peak_rss_bytes": 3 * 10**6})
    assert svg.index("3 MB") > svg.index("stroke-dasharray"), "labels are drawn after the line"
    assert svg.count("fill: #ffffff") >= 3

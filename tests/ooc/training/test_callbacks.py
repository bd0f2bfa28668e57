"""Callbacks of users, and the loggers: what arrives at TensorBoard, Weights & Biases and MLflow."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import ooc
from ooc.config.base import RunConfig
from ooc.config.modes import load_config
from ooc.stores.errors import ConfigError
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import configure


class Recorded(ooc.Callback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def begin(self, config: RunConfig, total_steps: int) -> None:
        self.calls.append(("begin", total_steps))

    def start(self, epoch: int, step: int, epochs: int, steps_per_epoch: int, *rest: Any) -> None:
        self.calls.append(("start", (epoch, step, epochs, steps_per_epoch)))

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        self.calls.append(("step", (epoch, step, total_steps)))

    def epoch(self, line: dict[str, Any]) -> None:
        self.calls.append(("epoch", line["epoch"]))

    def finish(self, summary: dict[str, Any]) -> None:
        self.calls.append(("finish", list(summary["metrics"])))

    def close(self) -> None:
        self.calls.append(("close", None))


def test_a_callback_follows_a_run_and_the_rest_of_it(make_store: MakeStore, tmp_path: Path) -> None:
    store, seen = make_store(), Recorded()
    train(configure(store, tmp_path / "run", epochs=2, max_steps=6), callbacks=[seen])
    steps = [("step", (number // 4, number % 4, number)) for number in range(6)]
    expected = [("begin", 0), ("start", (0, 0, 2, 4)), *steps[:4], ("epoch", 0), *steps[4:], ("epoch", 1)]
    assert seen.calls == [*expected, ("finish", ["val", "test"]), ("close", None)]
    again = Recorded()
    train(configure(store, tmp_path / "run", epochs=2), resume=True, callbacks=[again])
    assert again.calls[:2] == [("begin", 6), ("start", (1, 2, 2, 4))]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == _without(store, tmp_path / "plain")


class Failing(Recorded):
    """Fails when it is closed, as a logger whose server is gone."""

    def close(self) -> None:
        super().close()
        raise OSError("no connection")


def test_a_callback_that_fails_to_close_leaves_no_other_open(make_store: MakeStore, tmp_path: Path) -> None:
    all_of = [Recorded(), Failing(), Recorded()]
    with pytest.raises(OSError, match="no connection"):
        train(configure(make_store(), tmp_path / "run", epochs=1), callbacks=all_of)
    assert [each.calls.count(("close", None)) for each in all_of] == [1, 1, 1]
    assert (tmp_path / "run" / "summary.json").exists()


def _without(store: Path, out: Path) -> bytes:
    train(configure(store, out, epochs=2))
    return (out / "metrics.jsonl").read_bytes()


def logged(make_store: MakeStore, out: Path, name: str) -> list[float]:
    """Train 5 batches, then the other 3 of two epochs, with a logger; the losses."""
    store = make_store()
    train(configure(store, out, epochs=2, max_steps=5, log=[name]))
    train(configure(store, out, epochs=2, log=[name]), resume=True)
    return [step["loss"] for step in read_metrics(out)[0]]


def test_tensorboard_has_every_loss_once_and_the_scores(make_store: MakeStore, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    losses = logged(make_store, tmp_path / "run", "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = events.Scalars("train/loss")
    assert [each.step for each in found] == list(range(8))
    assert [each.value for each in found] == pytest.approx(losses)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert events.Scalars("best/test/accuracy")[-1].value == pytest.approx(summary["metrics"]["test"]["accuracy"])
    assert len(events.Scalars("val/loss")) >= 2


@pytest.mark.slow
def test_mlflow_has_the_losses_the_settings_and_the_scores(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("ooc.training.loggers._MOST_METRICS", 3)  # requests have a limit
    losses = logged(make_store, tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    [found] = client.search_runs([client.get_experiment_by_name("ooc").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["model"] == "sage"
    history = {each.step: each.value for each in client.get_metric_history(found.info.run_id, "train/loss")}
    assert [history[step] for step in range(8)] == pytest.approx(losses)
    assert "best/test/accuracy" in found.data.metrics


@pytest.mark.slow
def test_wandb_logs_offline(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    losses = logged(make_store, tmp_path / "run", "wandb")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{(tmp_path / 'run' / 'wandb.id').read_text()}"}
    written = b"".join(file.read_bytes() for file in files)  # protobuf records, whose values are JSON
    assert any(json.dumps(loss).encode() in written for loss in losses)
    assert b"best/test/accuracy" in written


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_missing_package_is_one_line_and_leaves_no_run(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"logging to {name} needs a package: pip install 'ooc\[{name}\]'"):
        train(configure(make_store(), tmp_path / "run", log=[name]))
    assert not (tmp_path / "run").exists()


def test_names_of_loggers() -> None:
    base = {"store": "a.ooc", "out": "run"}
    assert load_config(None, base).loggers == []
    assert load_config(None, {**base, "log": "tensorboard,wandb"}).loggers == ["tensorboard", "wandb"]
    assert load_config(None, {**base, "log": "wandb", "tensorboard": True}).loggers == ["wandb", "tensorboard"]
    with pytest.raises(ConfigError, match="log = 'comet' is invalid: expected 'tensorboard', 'wandb' or 'mlflow'"):
        load_config(None, {**base, "log": "comet"})

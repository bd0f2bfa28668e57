"""Runs on targets that are numbers: losses of PyG in memory, scores of the predictions, in every mode, resumed to the bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv

from ooc.config.modes import load_config, settings_of
from ooc.report.page import write_report
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.build import make_model
from ooc.training.checkpoint import read_metrics
from ooc.training.infer import infer
from ooc.training.loop import train
from ooc.training.verbs import plan_of
from tests.conftest import MakeStore
from tests.ooc.runs import SMALL, KillAt, Killed, curve
from tests.ooc.temporal_stores import Edges

N = 50
Settings = dict[str, Any]
MODES: dict[str, Settings] = {
    "sampled": {"loss": "huber", "huber_delta": 0.5},
    "own": {"model": "torch_geometric.nn:GraphSAGE"},
    "layerwise": {"evaluate": "layerwise", "loss": "mae"},
    "cluster": {"mode": "cluster", "parts": 5, "fanout": [], "layers": 2},
    "saint": {"mode": "saint", "roots": 10, "fanout": [], "layers": 2},
    "history": {"mode": "history", "parts": 5, "fanout": [], "layers": 2},
    "full": {"mode": "full", "fanout": None, "batch_size": None, "layers": 2},
}


def linear(targets: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(x, y): targets that are sums of the features, some of them unknown."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((N, 8), dtype=np.float32)
    y = 3 + x @ rng.standard_normal((8, targets or 1), dtype=np.float32)
    y[rng.random(y.shape) < 0.2] = np.nan
    return x, y if targets else y[:, 0]


def store_of(make_store: MakeStore, targets: int | None, **more: Any) -> Path:
    x, y = linear(targets)
    return make_store(x=x, y=y, task="regression", **more)


def configure(store: Path, out: Path, **settings: Any) -> Any:
    given = {**SMALL, "dropout": 0.0, **settings}
    return load_config(None, {"store": store, "out": out, **given})


def rmse_and_r2(predicted: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """In float64, of known targets."""
    predicted, y = predicted.reshape(len(y), -1).astype(np.float64), y.reshape(len(y), -1).astype(np.float64)
    known, each = ~np.isnan(y), []
    for p, t, there in zip(predicted.T, y.T, known.T, strict=True):
        each.append(1 - ((p - t)[there] ** 2).sum() / ((t[there] - t[there].mean()) ** 2).sum())
    return float(np.sqrt(((predicted - y)[known] ** 2).mean())), float(np.mean(each))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("loss", "targets"), [("mse", 3), ("mae", None), ("huber", 3)])
def test_exact_losses_are_those_of_pyg_in_memory(make_store: MakeStore, tmp_path: Path, loss: str, targets: int | None) -> None:
    store = store_of(make_store, targets)
    config = configure(store, tmp_path / "run", **MODES["full"], loss=loss)
    train(config)
    found = [line["loss"] for line in read_metrics(config.out)[0]]
    x, y = (torch.from_numpy(each) for each in linear(targets))
    with Dataset.open(store) as ds:
        target = np.repeat(np.arange(N), np.diff(ds.graph.indptr))
        edge_index = torch.from_numpy(np.stack([np.asarray(ds.graph.indices, np.int64), target]))
        seeds = torch.from_numpy(ds.split("train"))
        ours: Any = make_model(config, 8, targets or 1)
    convs = torch.nn.ModuleList([SAGEConv(8, config.hidden), SAGEConv(config.hidden, targets or 1)])
    for layer, conv in zip(ours.layers, convs, strict=True):
        conv.load_state_dict(layer.conv.state_dict())
    optimizer = torch.optim.Adam(convs.parameters(), lr=config.lr)
    by_name = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}
    for epoch in range(config.epochs):
        out = convs[1](convs[0](x, edge_index).relu(), edge_index)[seeds].view(y[seeds].shape)
        known = ~y[seeds].isnan()
        expected = by_name[loss](out[known], y[seeds][known])
        assert found[epoch] == pytest.approx(float(expected.detach()), rel=1e-5)
        optimizer.zero_grad()
        expected.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODES)
def test_every_mode_trains_scores_and_resumes_to_the_bit(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    store = store_of(make_store, 2)
    summary = train(configure(store, tmp_path / "whole", **MODES[name]))
    for split in ("val", "test"):
        assert list(summary["metrics"][split]) == ["loss", "mse", "mae", "rmse", "r2"]
        assert None not in summary["metrics"][split].values()
    _, epochs = read_metrics(tmp_path / "whole")
    best = min(epochs, key=lambda line: line["val"]["rmse"])
    assert (summary["monitor"], summary["best_epoch"]) == ("rmse", best["epoch"])
    assert summary["metrics"]["val"] == best["val"]
    config = configure(store, tmp_path / "cut", **MODES[name], checkpoint_every=1)
    with pytest.raises(Killed):
        train(config, watcher=KillAt(summary["total_steps"] - 2))
    train(config, resume=True)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("targets", "ending"), [(None, "parquet"), (2, "csv")])
def test_scores_are_those_of_the_predictions(make_store: MakeStore, tmp_path: Path, targets: int | None, ending: str) -> None:
    names = None if targets is None else ["age", "size"]
    store, (_, y) = store_of(make_store, targets, class_names=names), linear(targets)
    settings: Settings = {
        "evaluate": "layerwise",
        "epochs": 20,
        "eval_every": 20,
        "lr": 0.05,
        "batch_size": 64,
        "fanout": [-1, -1],
    }
    summary = train(configure(store, tmp_path / "run", **settings))
    infer(tmp_path / "run", store, tmp_path / f"p.{ending}")
    if ending == "parquet":
        table = pq.read_table(tmp_path / "p.parquet")
        assert table.column_names == ["id", "prediction"]
        predicted = np.array(table["prediction"])
    else:
        table = pyarrow.csv.read_csv(tmp_path / "p.csv")
        assert table.column_names == ["id", "prediction_age", "prediction_size"]
        predicted = np.stack([np.array(table[name]) for name in table.column_names[1:]], axis=1)
    with Dataset.open(store) as ds:
        test = ds.split("test")
    rmse, r2 = rmse_and_r2(predicted[test], y[test])
    assert summary["metrics"]["test"]["rmse"] == pytest.approx(rmse, rel=1e-5)
    assert summary["metrics"]["test"]["r2"] == pytest.approx(r2, rel=1e-5)
    assert r2 > 0.3, "the targets are learned"
    if names is not None:
        page = write_report(tmp_path / "run").read_text()
        assert f"{rmse:.4f}" in page
        assert "2 targets: age, size" in page


def test_a_store_without_labels_is_predicted_by_a_run_of_numbers(make_store: MakeStore, tmp_path: Path) -> None:
    store = store_of(make_store, None)
    train(configure(store, tmp_path / "run", epochs=1))
    bare = make_store("bare.ooc", x=linear(None)[0], y=None, task=None, num_classes=None)
    for name, given in (("a", store), ("b", bare)):
        infer(tmp_path / "run", given, tmp_path / f"{name}.parquet")
    one, other = (pq.read_table(tmp_path / f"{name}.parquet") for name in "ab")
    assert one.equals(other)


def test_runs_from_before_there_were_tasks_go_on(make_store: MakeStore, tmp_path: Path) -> None:
    store, out = make_store(), tmp_path / "run"
    train(configure(store, out, epochs=1))
    saved = json.loads((out / "config.json").read_text())
    for name in ("task", "loss", "huber_delta"):
        del saved[name]
    (out / "config.json").write_text(json.dumps(saved))
    assert train(settings_of(None, {"out": out, "epochs": 2}, resume=True), resume=True)["epochs"] == 2
    train(configure(store, tmp_path / "whole", epochs=2))
    assert curve(out) == curve(tmp_path / "whole")


def test_runs_of_numbers_are_planned(make_store: MakeStore, tmp_path: Path) -> None:
    assert (
        plan_of(configure(store_of(make_store, 2), tmp_path / "run", mode="sampled", plan=True)).prediction.peak_rss_bytes > 0
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"class_weights": "balanced"},
            "class_weights = 'balanced' is for classes, and the labels are targets of a regression",
        ),
        ({"monitor": "accuracy"}, "monitor = 'accuracy' is no metric of a regression task"),
        ({"huber_delta": 2}, "huber_delta applies to loss = huber only"),
    ],
)
def test_settings_of_classes_are_refused(make_store: MakeStore, tmp_path: Path, settings: Settings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train(configure(store_of(make_store, None), tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="loss = 'mae' is for targets of a regression, and the labels are multiclass"):
        train(configure(make_store("classes.ooc"), tmp_path / "run", loss="mae"))


def test_windows_predict_numbers_of_nodes(tmp_path: Path) -> None:
    edges = Edges()
    edges.y = np.where(np.arange(edges.nodes) % 4 == 0, np.nan, edges.x.sum(1))
    masks = {name: np.arange(edges.nodes) % 3 == number for number, name in enumerate(("train", "val", "test"))}
    for name, mask in masks.items():
        np.save(tmp_path / f"{name}.npy", mask)
    store = edges.store(tmp_path, **{name: tmp_path / f"{name}.npy" for name in masks})
    settings: Settings = {"mode": "snapshots", "task": "node", "window": "100", "by": "count", "hidden": 8, "identity": 4}
    config = load_config(None, {"store": store, "out": tmp_path / "run", "epochs": 1, "threads": 1, **settings})
    summary = train(config)
    assert summary["monitor"] == "rmse"
    assert summary["metrics"]["val"]["mse"] > 0

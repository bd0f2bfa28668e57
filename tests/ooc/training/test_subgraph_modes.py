"""`--mode cluster` and `--mode saint`: the run is a function of its settings, and resumes to the bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ooc.cli.main import main
from ooc.config.modes import load_config
from ooc.metrics.nodes import Loss
from ooc.runtime.memory_plan import divide
from ooc.stores.errors import BudgetError, ConfigError
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import KillAt, Killed, configure, curve, tight
from tests.scale import some

MODES: list[dict[str, Any]] = [
    {"mode": "cluster", "parts_per_batch": 2, "parts": 9},
    {"mode": "saint", "saint": "walk", "roots": 8, "walk_length": 2},
    {"mode": "saint", "saint": "edge", "roots": 12},
    {"mode": "saint", "saint": "node", "roots": 20},
]


def settings(mode: dict[str, Any]) -> dict[str, Any]:
    return {"fanout": [], "layers": 2, "norm": "batch", "plan": False, **mode}


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    return make_store(num_nodes=120, num_edges=900)


@pytest.mark.parametrize(
    "mode",
    [*MODES[:1], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])],
    ids=lambda mode: mode.get("saint", "cluster"),
)
def test_a_run_is_a_function_of_its_settings_and_resumes_to_the_bit(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    summary = train(configure(store, tmp_path / "whole", **settings(mode)))
    assert summary["epochs"] == 3
    assert summary["metrics"]["test"]["accuracy"] is not None
    assert summary["config"]["eval_fanout"] == [-1, -1]
    want = curve(tmp_path / "whole")
    for name, more in {"ram": {"in_memory": True}, "pread": {"engine": "pread"}, "budget": {"memory": tight()}}.items():
        train(configure(store, tmp_path / name, **settings(mode), **more))
        assert curve(tmp_path / name) == want
    monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 2**62)
    train(configure(store, tmp_path / "edges", **settings(mode)))
    assert curve(tmp_path / "edges") == want
    for step in some((3, 0, summary["total_steps"] - 1), 1) if mode in MODES[:2] else (3,):
        out = tmp_path / f"cut-{step}"
        config = configure(store, out, checkpoint_every=2, **settings(mode))
        with pytest.raises(Killed):
            train(config, watcher=KillAt(step))
        train(config, resume=True)
        assert curve(out) == want
    again = configure(store, tmp_path / "cut-3", **{**settings(mode), "seed": 6})
    with pytest.raises(ConfigError, match="was trained with seed = 5, not 6"):
        train(again, resume=True)


@pytest.mark.slow
def test_models_of_all_kinds_train(store: Path, tmp_path: Path) -> None:
    for name in ("gcn", "gat", "gin", "gcnii", "appnp", "sgc"):
        for mode in MODES[:2]:
            out = tmp_path / f"{name}-{mode['mode']}"
            assert train(configure(store, out, **{**settings(mode), "model": name, "epochs": 1, "norm": "none"}))["epochs"] == 1


def test_the_parts_of_the_store_are_taken(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=120, num_edges=900, parts=[0, 30, 60, 90, 100, 120])
    summary = train(configure(store, tmp_path / "run", **settings({"mode": "cluster"})))
    assert summary["total_steps"] == 3 * 5
    with pytest.raises(ConfigError, match="the store has 5 parts, not 4"):
        train(configure(store, tmp_path / "other", **settings({"mode": "cluster", "parts": 4})))
    assert not (tmp_path / "other").exists()


def test_a_batch_too_large_names_the_fix(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(divide(10**9, baseline=0), max_batch=1000, in_flight=2000)
    monkeypatch.setattr("ooc.runtime.memory_plan.divide", lambda *_, **__: small)
    store = make_store(num_nodes=120, num_edges=900)
    scored = {"eval_fanout": [2, 2]}  # full neighborhoods would be refused before any batch
    with pytest.raises(BudgetError, match="use fewer parts per batch, a store with more parts"):
        train(configure(store, tmp_path / "run", **settings({"mode": "cluster", "parts": 2, **scored})))
    with pytest.raises(BudgetError, match="sample fewer roots"):
        train(configure(store, tmp_path / "run", **settings({"mode": "saint", **scored})))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "cluster", "roots": 5}, "roots does not apply to mode cluster"),
        ({"mode": "saint", "parts_per_batch": 5}, "parts_per_batch does not apply to mode saint"),
        ({"mode": "cluster", "fanout": [3, 3]}, "fanout does not apply to mode cluster"),
        ({"mode": "saint", "saint": "node", "walk_length": 5}, "walk_length does not apply to saint = node"),
        ({"saint": "node"}, "saint does not apply to mode sampled"),
        ({"mode": "history", "saint_coverage": 3}, "saint_coverage does not apply to mode history"),
        ({"mode": "cluster", "refresh": 3}, "refresh does not apply to mode cluster"),
    ],
    ids=str,
)
def test_settings_of_another_mode_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {"store": "s", "out": "o", **given})


@pytest.mark.slow
def test_from_the_command_line(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--layers", "2", "--hidden", "8", "--epochs", "1", "--threads", "1", "--mode"]
    out = tmp_path / "run"
    assert main(["train", str(store), "--out", str(out), *flags, "cluster", "--parts", "6", "--parts-per-batch", "2"]) == 0
    assert json.loads((out / "summary.json").read_text())["total_steps"] == 3
    assert main(["report", str(out)]) == 0
    saint = ["saint", "--saint", "walk", "--roots", "20", "--walk-length", "1", "--saint-coverage", "3"]
    assert main(["train", str(store), "--out", str(tmp_path / "saint"), *flags, *saint]) == 0
    assert (tmp_path / "saint/saint/counts.json").exists()
    assert main(["train", str(store), "--out", str(tmp_path / "no"), *flags, "cluster"]) == 2
    assert "ingest it with --parts, or give --parts" in capsys.readouterr().err


def test_weighted_losses_are_sums() -> None:
    torch.manual_seed(0)
    weights = torch.rand(6)
    logits, classes = torch.randn(6, 3), torch.tensor([0, 2, -1, 1, 1, -1])
    each = torch.nn.functional.cross_entropy(logits, classes.clamp(min=0), reduction="none")
    known = classes >= 0
    assert torch.allclose(Loss("multiclass")(logits, classes, weights), (each * weights)[known].sum())
    even = torch.full((6,), 1 / int(known.sum()))
    assert torch.allclose(Loss("multiclass")(logits, classes, even), Loss("multiclass")(logits, classes))
    labels = torch.tensor([[1, 0, 1]] * 5 + [[-1, -1, -1]])
    even = torch.full((6,), 1 / 5)
    assert torch.allclose(Loss("multilabel")(logits, labels, even), Loss("multilabel")(logits, labels))
    binary = torch.tensor([1, 0, 1, 1, 0, -1])
    assert torch.allclose(Loss("binary")(logits[:, :1], binary, even), Loss("binary")(logits[:, :1], binary))

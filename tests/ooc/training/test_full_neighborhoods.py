"""Scores by full neighborhoods that do not fit the memory: layer-wise passes instead, or one line before the first step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.cli.main import main
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_seconds
from ooc.training.full_neighborhoods import share_of_batch
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import KillAt, Killed, configure, curve, tight

PARTS: dict[str, Any] = {"mode": "cluster", "parts": 9, "layers": 3, "fanout": []}


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    return make_store(num_nodes=120, num_edges=900)


def test_a_run_chooses_passes_where_neighborhoods_hardly_fit(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = train(configure(store, tmp_path / "sampled", **PARTS))
    assert sampled["config"]["evaluate"] == "sampled"
    monkeypatch.setattr("ooc.training.batch_scores.CLOSE", 0.0)
    layerwise = train(configure(store, tmp_path / "layerwise", **PARTS))
    assert layerwise["config"]["evaluate"] == "layerwise"
    for split, scores in sampled["metrics"].items():
        assert layerwise["metrics"][split] == pytest.approx(scores, rel=1e-4)
    with pytest.raises(Killed):
        train(configure(store, tmp_path / "cut", checkpoint_every=2, **PARTS), watcher=KillAt(12))
    monkeypatch.undo()  # the run keeps what it chose
    assert train(configure(store, tmp_path / "cut", **PARTS), resume=True)["config"]["evaluate"] == "layerwise"
    assert curve(tmp_path / "cut") == curve(tmp_path / "layerwise")
    asked = train(configure(store, tmp_path / "sampled", evaluate="layerwise", **{**PARTS, "epochs": 4}), resume=True)
    assert asked["config"]["evaluate"] == "layerwise"


def test_the_share_of_a_batch_is_that_of_the_largest_neighborhood(store: Path) -> None:
    with ooc.open(store, memory=tight()) as ds:
        indptr = np.asarray(ds.graph.indptr)
        few, all_hops = (NeighborLoader(ds, [-1] * hops, "val", split_seeds=True) for hops in (1, 3))
        (one, _), (three, error) = share_of_batch(few, indptr), share_of_batch(all_hops, indptr)
    assert 0 < one < three < 1
    assert error is None


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of which three hops are the whole."""
    rng, nodes = np.random.default_rng(0), 20_000
    split = torch.arange(nodes)
    data = Data(
        x=torch.from_numpy(rng.normal(size=(nodes, 8)).astype(np.float32)),
        y=torch.from_numpy(rng.integers(4, size=nodes)),
        edge_index=torch.from_numpy(rng.integers(nodes, size=(2, 3_000_000))),
        train_mask=split % 50 == 0,
        val_mask=split % 50 == 1,
        test_mask=split % 50 == 2,
    )
    path = tmp_path_factory.mktemp("dense") / "store"
    ooc.from_data(data, path).close()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"evaluate": "sampled"}, {"eval_batch_size": 2}, {}], ids=str)
def test_a_run_that_cannot_be_scored_is_refused_before_its_first_step(
    dense: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {**PARTS, "parts": 200, "layers": 8, "epochs": 1, "memory": tight(330_000_000)}
    with pytest.raises(BudgetError, match="evaluation on full neighborhoods does not fit the memory") as caught:
        train(configure(dense, tmp_path / "run", **{**settings, "hidden": 128, **more}))
    assert "batch size below" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "`evaluate=layerwise`" not in str(caught.value)  # whose buffers do not fit either
    assert not (tmp_path / "run").exists()


def test_layerwise_is_named_where_its_pass_fits(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ooc.training.full_neighborhoods.FULL", 1e-6)
    monkeypatch.setattr("ooc.training.batch_scores.CLOSE", 1e-6)
    words = ["train", str(store), "--out", str(tmp_path / "run"), "--mode", "cluster", "--parts", "9", "--layers", "3"]
    assert main([*words, "--hidden", "8", "--epochs", "1", "--evaluate", "sampled"]) == 2
    assert "more memory, or give --evaluate layerwise or --eval-fanout" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--hidden", "8", "--epochs", "1"]) == 0
    assert "scores are computed layer by layer" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/config.json").read_text())["evaluate"] == "layerwise"


def test_a_plan_whose_scores_take_the_time_says_what_helps(make_store: MakeStore) -> None:
    store = make_store(num_nodes=3000, num_edges=9000)
    settings: dict[str, Any] = {"store": store, "hidden": 8, "batch_size": 1, "epochs": 10**6}
    assert "of the time: `evaluate=layerwise` computes" in ooc.plan(**settings, mode="cluster", parts=1, layers=3).advice
    assert "`evaluate" not in ooc.plan(**{**settings, "epochs": 1}, mode="cluster", parts=1, layers=3).advice
    advice = ooc.plan(**{**settings, "batch_size": 999}, mode="sampled", fanout=[2], eval_fanout=[-1], eval_batch_size=1).advice
    assert "a larger `eval_every` or `eval_batch_size` would help" in advice


def test_long_durations_are_written_as_people_say_them() -> None:
    texts = ["0.05 s", "12 min", "3.1 h", "2.0 days"]
    assert [format_seconds(each) for each in (0.05, 700, 11_160, 172_800)] == texts

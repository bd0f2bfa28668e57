"""Drift: the relative error of histories, without what dropout alone makes of it, measured so that training does not notice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.history import drift
from ooc.history.drift import Drift, LayerDrift, drift_row_bytes, drift_sample
from ooc.history.history import History
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.training.loop import train, train_epoch
from ooc.training.open_run import open_run
from ooc.training.run import Run
from ooc.training.watchers import LineWatcher, Watchers
from tests.conftest import MakeStore
from tests.ooc.graphs import hub_graph
from tests.ooc.history.test_halo import configure

STILL = 1e-30
"""a learning rate that changes no parameter"""


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    """A hub, isolated nodes, self-loops, duplicates; weights too."""
    edges = hub_graph(60).numpy()
    return make_store(num_nodes=60, src=edges[0], dst=edges[1], weight=True)


@pytest.fixture
def large(make_store: MakeStore) -> Path:
    """So many nodes that the error of a sample is small."""
    return make_store(num_nodes=2000, num_edges=8000, x=np.random.default_rng(1).standard_normal((2000, 64), np.float32))


def measured(run: Run, max_bytes: int = 2**30) -> LayerDrift:
    assert run.mode.halo is not None
    assert run.mode.halo.history is not None
    return Drift(run.model, run.dataset, run.mode.halo.history, run.mode.device, "fp32").measure(7, max_bytes)


def history_of(run: Run) -> History:
    assert run.mode.halo is not None
    assert run.mode.halo.history is not None
    return run.mode.halo.history


@pytest.mark.parametrize("edges", [2**12, 1])
def test_drift_is_the_relative_error(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edges: int) -> None:
    """A layer's own, where its field is small enough to go back to the features."""
    monkeypatch.setattr(drift, "FIELD_EDGES", (edges, edges))
    with open_run(configure(store, tmp_path / "run", layers=3, refresh=1), False, Watchers([])) as run:
        train_epoch(run)
        run.mode.end_epoch(False)
        history, every, rows = history_of(run), np.arange(60), np.empty((60, 8), np.float32)
        history.rows[0].read(every, rows)
        history.overwrite(0, every, 3 * rows)
        found = measured(run)
        first, second = found.drift
        assert first == pytest.approx(2.0, rel=1e-4)
        assert second < 1e-5 if edges > 1 else second > 0.1
        assert found.noise == [0.0, 0.0]
        assert found.drift == pytest.approx(found.error)
        assert found.chance == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gcn", "sage", "gcnii"])
def test_what_dropout_draws_is_no_drift(large: Path, tmp_path: Path, model: str) -> None:
    """Of a model that did not change there is none but by chance, though what was pushed is far from what is computed anew."""

    settings: dict[str, Any] = {"model": model, "layers": 3, "dropout": 0.5, "hidden": 64, "lr": STILL, "epochs": 4}
    settings |= {"refresh": "auto", "drift_tolerance": 0.05}
    train(configure(large, tmp_path / "run", **settings))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for line in [line for line in lines if "step" not in line][1:]:  # in the first one the halo's histories were zeros
        assert line["drift_error"][-1] > 0.3
        assert line["drift_error"] == pytest.approx(line["drift_noise"], rel=0.1, abs=1e-5)
        assert all(found < 1e-5 + chance for found, chance in zip(line["drift"], line["drift_chance"], strict=True))
        assert max(line["drift_chance"]) < 0.4
        assert "refreshed" not in line
    with open_run(configure(large, tmp_path / "moved", **settings), False, Watchers([])) as run:
        for epoch in range(2):
            run.state.epoch, run.state.step = epoch, 0
            train_epoch(run)
            history_of(run).end_epoch()
        assert not measured(run).passes(0.05)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter *= 2
        found = measured(run)
        assert found.passes(0.05)
        assert max(found.drift) == pytest.approx(0.5, abs=0.3)
        assert 2 * max(found.chance) < max(found.drift) < max(found.error)


def test_measuring_changes_no_loss(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's generators, nor what batch norms record, nor the mode of a part of the model."""
    store = make_store(num_nodes=60)
    settings: dict[str, Any] = {"layers": 3, "dropout": 0.5, "norm": "batch", "model": "sage", "epochs": 3}
    with open_run(configure(store, tmp_path / "run", **settings), False, Watchers([])) as run:
        train_epoch(run)
        frozen: Any = run.model.layers
        frozen[0].eval()
        before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        modes, state = [part.training for part in run.model.modules()], torch.get_rng_state()
        history_of(run).end_epoch()
        found = measured(run)
        assert found.noise[-1] > 0
        assert measured(run) == found
        assert [part.training for part in run.model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
        for name, tensor in run.model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
    train(configure(store, tmp_path / "with", **settings))
    monkeypatch.setattr("ooc.training.history_mode.HistoryMode._drift", lambda mode, history: None)
    train(configure(store, tmp_path / "without", **settings))
    losses = [
        [line.get("loss") for line in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())]
        for name in ("with", "without")
    ]
    assert losses[0] == losses[1]


def test_a_sample_is_halved_until_it_fits(store: Path, tmp_path: Path) -> None:
    """The same rows in less memory; where not even one node fits it is said, once, or where a refresh depends on it refused."""
    with Dataset.open(store) as ds:
        each = drift_row_bytes(ds.num_features, [8, 8])
        sample = drift_sample(ds.graph, 7, 2, 2**30, each)
        whole = [field.node[: field.num_nodes[0]] for field in sample]
        parts, nbytes = whole, 2**17
        while len(parts) == len(whole):
            nbytes = int(nbytes * 0.95)
            parts = [field.node[: field.num_nodes[0]] for field in drift_sample(ds.graph, 7, 2, nbytes, each)]
        assert sorted(np.concatenate(parts)) == sorted(np.concatenate(whole)) == list(range(60))
        with pytest.raises(BudgetError):
            list(drift_sample(ds.graph, 7, 2, 100, each))
    with open_run(configure(store, tmp_path / "run", layers=3), False, Watchers([])) as run:
        train_epoch(run)
        history_of(run).end_epoch()
        found, less = measured(run), measured(run, nbytes)
        assert less.drift == pytest.approx(found.drift, rel=1e-5)


@pytest.mark.parametrize("refresh", [None, "auto"])
def test_a_drift_that_cannot_be_measured_is_reported(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refresh: Any
) -> None:
    def refuse(*_: Any) -> Any:
        raise BudgetError("too little")

    class Noting(LineWatcher):
        def note(self, text: str) -> None:
            reported.append(text)

    reported: list[str] = []
    monkeypatch.setattr(drift.NeighborSampler, "need", refuse)
    config = configure(store, tmp_path / "run", refresh=refresh)
    if refresh == "auto":
        with pytest.raises(BudgetError):
            train(config)
    else:
        train(config, watcher=Noting())
        assert sum("drift is not measured: too little" in text for text in reported) == 1

"""Runs on whole graphs: they learn, continue to the bit, score and predict every graph, and refuse what is none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import global_add_pool

import ooc
from ooc.cli.main import main
from ooc.config.graphs import GraphConfig
from ooc.planning.graph_profile import SimulatedRuns
from ooc.planning.simulate_superbatches import BatchCosts
from ooc.report.page import write_report
from ooc.stores.errors import ConfigError
from ooc.stores.io.read_plan import ReadCost
from ooc.training import loop
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import KillAt, Killed, curve

SMALL: dict[str, Any] = {"hidden": 16, "batch_size": 16, "epochs": 3, "lr": 0.02, "dropout": 0.2, "seed": 1, "threads": 1}


def labelled(count: int, numbers: bool = False) -> list[Data]:
    """Graphs whose label is whether (or how much) their features exceed 0 on average."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(count):
        nodes = int(torch.randint(2, 9, (1,), generator=generator))
        shift = torch.randn(1, generator=generator)
        x = torch.randn(nodes, 4, generator=generator) * 0.3 + shift
        edges = torch.randint(0, nodes, (2, 12), generator=generator)
        found.append(Data(x=x, edge_index=edges, y=shift if numbers else (shift > 0).long()))
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "classes.ooc"
    ooc.from_data(labelled(160), path, random_split=(0.6, 0.2, 0.2)).close()
    return path


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "numbers.ooc"
    ooc.from_data(labelled(160, numbers=True), path, random_split=(0.6, 0.2, 0.2)).close()
    return path


@pytest.mark.parametrize(
    "model",
    [
        {"model": "gin", "pooling": "sum"},
        pytest.param({"model": "sage", "pooling": "attention", "virtual_node": True}, marks=pytest.mark.slow),
    ],
)
def test_classes_of_graphs_are_learned(store: Path, tmp_path: Path, model: dict[str, Any]) -> None:
    summary = ooc.train(store=store, out=tmp_path / "run", task="graph", **{**SMALL, **model, "epochs": 10, "dropout": 0.0})
    assert summary["metrics"]["test"]["auroc"] > 0.9
    assert summary["metrics"].keys() == {"val", "test"}
    predicted = ooc.infer(tmp_path / "run", store, tmp_path / "p.parquet")
    table = pq.read_table(tmp_path / "p.parquet")
    assert (predicted.rows, table.column_names) == (160, ["id", "class", "probability"])
    with ooc.open(store) as ds:
        assert ds.graphs.labels is not None
        right = table["class"].to_numpy() == np.asarray(ds.graphs.labels)
        test = ds.graphs.split("test")
        assert right[test].mean() == pytest.approx(summary["metrics"]["test"]["accuracy"])
        logits = np.asarray(ooc.infer(tmp_path / "run", ds))
    probability = torch.from_numpy(logits[:, 0]).sigmoid().numpy()
    np.testing.assert_allclose(table["probability"].to_numpy(), probability, atol=1e-6)
    write_report(tmp_path / "run")


@pytest.mark.slow
def test_numbers_of_graphs_are_learned(numbers: Path, tmp_path: Path) -> None:
    summary = ooc.train(
        store=numbers, out=tmp_path / "run", task="graph", model="gcn", **{**SMALL, "epochs": 15, "dropout": 0.0}
    )
    assert summary["metrics"]["test"]["r2"] > 0.8
    assert pq.read_table(ooc.infer(tmp_path / "run", numbers, tmp_path / "p.parquet").path).column_names == ["id", "prediction"]


@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.slow), 6, pytest.param(11, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_bit(store: Path, tmp_path: Path, at: int) -> None:
    def config(out: str, **more: Any) -> GraphConfig:
        settings = {**SMALL, "checkpoint_every": 2, "accumulate": 2, "shuffle_block": "4KB", **more}
        return GraphConfig(store=store, out=tmp_path / out, model="gin", virtual_node=True, **settings)

    whole = train(config("whole"))
    with pytest.raises(Killed):
        train(config("killed"), watcher=KillAt(at))
    resumed = train(config("killed", memory="3GB", engine="mmap"), resume=True)
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert resumed["metrics"] == whole["metrics"]
    states = [torch.load(tmp_path / out / "model.pt", weights_only=True)["model"] for out in ("whole", "killed")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class Net(nn.Module):
    """A model of the user's, of nodes' features and edges alone."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(in_channels, hidden_channels), nn.Linear(hidden_channels, out_channels)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        out: Tensor = self.last(global_add_pool(self.first(x).relu(), batch))
        return out


def test_models_of_the_users_train(store: Path, tmp_path: Path) -> None:
    settings = {name: value for name, value in SMALL.items() if name != "dropout"}
    summary = ooc.train(store=store, out=tmp_path / "run", task="graph", model=f"{__name__}:Net", **settings)
    assert summary["metrics"]["val"]["loss"] is not None
    assert len(ooc.infer(tmp_path / "run", store, allow_code=True)) == 160
    with pytest.raises(ConfigError, match="does not accept pooling: leave it out"):
        ooc.train(store=store, out=tmp_path / "other", task="graph", model=f"{__name__}:Net", pooling="sum", **settings)


def test_a_run_of_classes_on_a_store_of_numbers_predicts_classes(store: Path, numbers: Path, tmp_path: Path) -> None:
    ooc.train(store=store, out=tmp_path / "run", task="graph", **{**SMALL, "epochs": 1})
    ooc.infer(tmp_path / "run", numbers, tmp_path / "p.parquet")
    assert pq.read_table(tmp_path / "p.parquet").column_names == ["id", "class", "probability"]


def test_the_command_line_trains_and_predicts(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    flags = ["--task", "graph", "--model", "gin", "--pooling", "max", "--epochs", "1", "--hidden", "8", "--virtual-node"]
    assert main(["train", str(store), "--out", run, *flags]) == 0
    assert "auroc" in capsys.readouterr().out
    assert main(["infer", str(store), "--checkpoint", run, "--out", str(tmp_path / "p.csv")]) == 0
    assert "160 graphs, 1 model output;" in capsys.readouterr().out
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 161
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_graphs"] == 160
    for name, value in {"num_layers": 2, "node_type": "node"}.items():
        with pytest.raises(ConfigError, match=f"{name} applies to outputs of nodes, and .* is a run of whole graphs: leave it"):
            ooc.infer(run, store, **{name: value})


def test_what_does_not_fit_is_refused_in_a_line(store: Path, tmp_path: Path, make_store: MakeStore) -> None:
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="holds one graph, and task = 'graph' is of many: ingest it with `graph_id`"):
        ooc.train(store=make_store(), out=out, task="graph")
    with pytest.raises(ConfigError, match="has labels of graphs, and none of nodes: train with `task='graph'`"):
        ooc.train(store=store, out=out)
    with pytest.raises(ConfigError, match="fanout does not apply to mode graphs"):
        ooc.train(store=store, out=out, task="graph", fanout=[3, 3])
    with pytest.raises(ConfigError, match="virtual_node does not apply to mode sampled"):
        ooc.train(store=store, out=out, virtual_node=True)
    with pytest.raises(ConfigError, match="task = 'graph' is not trained by mode full"):
        ooc.train(store=store, out=out, task="graph", mode="full")
    assert not out.exists()


def test_modes_of_nodes_are_refused_and_leave_nothing(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("sampled", "cluster", "saint", "history", "full"):
        for verb in (["train", "--out", f"{tmp_path}/run"], ["plan"]):
            assert main([*verb, str(store), "--mode", mode]) == 2
            error = capsys.readouterr().err
            assert "has labels of graphs, and none of nodes: train with --task graph" in error
            assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_reads_is_predicted(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PLAN_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    config = GraphConfig(store=store, out=tmp_path / "run", model="gin", **SMALL)
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    planned = loop.plan(config)
    assert torch.equal(drawn, torch.get_rng_state())
    assert list(tmp_path.iterdir()) == []
    summary, found = train(config), planned.prediction
    for name in ("bytes_read", "rows_read", "rows_asked"):
        assert getattr(found, name) == pytest.approx(summary[name], rel=0.02), name
    assert found.peak_rss_bytes == pytest.approx(summary["peak_rss_bytes"], rel=0.1)
    assert found.evaluate_seconds > 0
    assert found.hit_rate is None
    assert found.seconds_per_epoch * 3 == pytest.approx(found.first_epoch_seconds + 2 * (found.later_epoch_seconds or 0))
    assert "read; " in str(planned)
    assert "fan-out" not in planned.advice


def test_an_epoch_of_graphs_takes_as_long_as_its_slowest_stage() -> None:
    runs = SimulatedRuns(asked=100.0, nbytes=10_000.0, filled_s=2.0, held=5)
    slow, fast = (BatchCosts(0.0, 0.0, together_s=0.01, read=ReadCost(0.0, byte_s)) for byte_s in (1e-5, 1e-7))
    assert runs.epoch(slow, 50).seconds == pytest.approx(2.0 + 50 * 0.1)
    assert runs.epoch(fast, 50).seconds == pytest.approx(2.0 + 50 * 0.01)
    assert runs.epoch(fast, 50).nbytes == 500_000


def test_ooc_init_begins_with_the_graphs(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(store)]) == 0
    text = capsys.readouterr().out
    assert "task graphs: binary; splits train, val, test" in text
    (tmp_path / "run.toml").write_text(text)
    flags = ["--config", f"{tmp_path}/run.toml", "--out", f"{tmp_path}/run", "--max-steps", "1"]
    assert main(["train", str(store), *flags]) == 0
    capsys.readouterr()
    assert main(["info", f"{tmp_path}/run"]) == 2
    assert "is a run of `ooc train`, and no store: `ooc report" in capsys.readouterr().err


def test_embeddings_of_graph_models_are_refused(store: Path, tmp_path: Path) -> None:
    ooc.train(store=store, out=tmp_path / "run", task="graph", **{**SMALL, "epochs": 1})
    with pytest.raises(ConfigError, match="was trained with mode graphs: this verb takes models of nodes"):
        ooc.embed(tmp_path / "run", store)

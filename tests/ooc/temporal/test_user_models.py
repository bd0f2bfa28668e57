"""Models of the user's own, on events and on windows."""

from pathlib import Path
from typing import Any

import pytest

from ooc.cli.main import main
from ooc.config.events import EventsConfig
from ooc.config.snapshots import SnapshotsConfig
from ooc.training.loop import train
from tests.ooc.runs import KillAt, Killed, curve
from tests.ooc.temporal_stores import Edges

SOURCE = """
import torch
from torch import nn
from torch_geometric.nn import SAGEConv
from ooc.temporal.window_models import WindowModel

class Recency(nn.Module):
    def __init__(self, in_channels, hidden_channels, columns, scale=1.0):
        super().__init__()
        self.lin, self.scale = nn.Linear(in_channels + 1, hidden_channels), scale
        assert columns == ("msg",)

    def forward(self, batch):
        source, target = batch.edge_index
        past = torch.bincount(target, minlength=len(batch.entry))[batch.query]
        rows = torch.cat([batch.x[batch.entry[batch.query]], past.float()[:, None] * self.scale], dim=1)
        return self.lin(rows)

class Narrow(Recency):
    def forward(self, batch):
        return super().forward(batch)[:, 1:]

class OnGraphs(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = SAGEConv(in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)

class Flat(OnGraphs):
    def forward(self, x, edge_index):
        return x

class Decaying(WindowModel):
    def __init__(self, in_channels, hidden_channels):
        super().__init__()
        self.conv, self.widths = SAGEConv(in_channels, hidden_channels), (hidden_channels,)

    def forward(self, x, block, carried, weights=()):
        rows = self.conv(x, block.edge_index) + 0.5 * carried[0]
        return rows, [rows]
"""
EVENTS: dict[str, Any] = {"hidden": 8, "num_neighbors": [3], "batch_size": 20, "epochs": 2, "threads": 1}
WINDOWS: dict[str, Any] = {"window": "40", "by": "count", "hidden": 8, "identity": 4, "epochs": 2, "threads": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Edges(span=3000).store(tmp_path_factory.mktemp("own"), undirected=True)


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_in_time.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def configure(store: Path, out: Path, model: str, **more: Any) -> EventsConfig | SnapshotsConfig:
    settings = {"store": store, "out": out, "model": f"mine_in_time:{model}", "columns": ["msg"], **more}
    return EventsConfig(**EVENTS, **settings) if model in ("Recency", "Narrow") else SnapshotsConfig(**WINDOWS, **settings)


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["Recency", "OnGraphs", "Decaying"])
def test_a_model_of_ones_own_is_trained_and_resumed(store: Path, tmp_path: Path, model: str) -> None:
    summary = train(configure(store, tmp_path / "whole", model))
    assert summary["metrics"]["test"].keys() >= {"ap", "auroc", "mrr"}
    cut = configure(store, tmp_path / "cut", model, checkpoint_every=2)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(5))
    train(cut, resume=True)
    assert curve(tmp_path / "whole") == curve(tmp_path / "cut")


def test_its_arguments_are_those_given(store: Path, tmp_path: Path) -> None:
    found = [train(configure(store, tmp_path / f"{k}", "Recency", model_args={"scale": k}))["metrics"] for k in (0.0, 1.0)]
    assert found[0] != found[1]


ON_EVENTS = ["--mode", "events", "--batch-size", "20", "--model"]
ON_WINDOWS = ["--mode", "snapshots", "--window", "600", "--model"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*ON_EVENTS, "mine_in_time:Narrow"], "returned (60, 99): it must return rows (60, 100), one per batch.query"),
        ([*ON_EVENTS, "mine_in_time:OnGraphs"], "cannot be called: for events, use forward(batch)"),
        ([*ON_EVENTS, "mine_in_time:Recency", "--memory-dim", "9"], "memory_dim does not apply to model"),
        ([*ON_EVENTS, "mine_in_time:Recency", "--heads", "5"], "does not accept heads: leave it out"),
        ([*ON_EVENTS, "gcn"], "model 'gcn' is unknown: use tgn, tgat, graphmixer, or package.module:Class"),
        ([*ON_EVENTS, "tgn", "--model-args", "a=b"], "model_args apply to your own class"),
        ([*ON_WINDOWS, "mine_in_time:Recency"], "model mine_in_time:Recency needs columns, which are not among"),
        ([*ON_WINDOWS, "mine_in_time:Flat"], "for all nodes"),
        ([*ON_WINDOWS, "mine_in_time:OnGraphs", "--conv", "gcn"], "conv does not apply to model mine_in_time:OnGraphs"),
        ([*ON_WINDOWS, "sage"], "model 'sage' is unknown: use recurrent, roland, evolvegcn, or package.module:Class"),
    ],
)
def test_what_does_not_fit_is_one_line(
    store: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(store), "--out", str(tmp_path / "run"), "--columns", "msg", *flags]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert words in line

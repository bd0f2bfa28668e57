"""Integer features: built-in models compute with them as float32, a class of the user's looks them up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import SAGEConv

import ooc
from ooc.config import FullConfig
from ooc.training.infer import embed
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import configure, curve


class Lookup(nn.Module):
    """Embeds integer features."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int, num_layers: int, **_: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(5, hidden_channels)
        self.convs = nn.ModuleList([SAGEConv(hidden_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)])

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.convs[1](self.convs[0](self.table(x[:, 0]), edge_index).relu(), edge_index)


X = np.random.default_rng(0).integers(0, 5, (50, 8))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "settings", [{"evaluate": "layerwise"}, {"model": "gat"}, {"mode": "history", "fanout": [], "parts": 5}], ids=str
)
def test_built_in_models_train_on_integers_as_on_the_same_floats(
    make_store: MakeStore, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for name, x in (("whole", X), ("float", X.astype(np.float32))):
        store = make_store(f"{name}.ooc", x=x)
        train(configure(store, tmp_path / name, **{"epochs": 2, **settings}))
    assert curve(tmp_path / "whole") == curve(tmp_path / "float")


def test_exact_training_on_integers(make_store: MakeStore, tmp_path: Path) -> None:
    scores = []
    for name, x in (("whole", X), ("float", X.astype(np.float32))):
        settings: dict[str, Any] = {"model": "gcn", "hidden": 8, "layers": 2, "epochs": 2, "seed": 5, "threads": 1}
        store = make_store(f"{name}.ooc", x=x)
        scores.append(train(FullConfig(store=store, out=tmp_path / name, **settings))["metrics"]["val"])
    assert scores[0] == pytest.approx(scores[1])  # rows of other widths are cut into other ranges


def test_own_models_look_integers_up(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(x=X)
    scores = train(configure(store, tmp_path / "run", model=f"{__name__}:Lookup", epochs=1))
    assert scores["total_steps"] > 0


def test_own_models_that_look_integers_up_are_scored_and_inferred_exactly(make_store: MakeStore, tmp_path: Path) -> None:
    store, model = make_store(x=X), f"{__name__}:Lookup"
    train(configure(store, tmp_path / "run", model=model, epochs=1, evaluate="layerwise"))
    with ooc.open(store) as ds:
        net = Lookup(8, 16, ds.num_classes, 2).eval()
        target = np.repeat(np.arange(50), np.diff(ds.graph.indptr))
        edge_index = torch.from_numpy(np.stack([np.asarray(ds.graph.indices, np.int64), target]))
        with torch.no_grad():
            expected = net(torch.from_numpy(X), edge_index)
        torch.testing.assert_close(torch.from_numpy(ooc.infer(net, ds)[:]), expected)


def test_embeddings_of_integers(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(x=X)
    train(configure(store, tmp_path / "run", epochs=1))
    assert embed(tmp_path / "run", store, tmp_path / "e.zarr").rows == 50

"""Runs on labels of edges: classes and numbers are learned by the one loop, a step is the formula, and a run goes on."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import ooc
from ooc.config.edges import EdgeConfig
from ooc.config.modes import load_config
from ooc.stores.errors import ConfigError
from ooc.training.edge_mode import EdgeMode
from ooc.training.infer import infer
from ooc.training.loop import plan, train
from ooc.training.registry import mode_of
from tests.conftest import MakeStore, random_edges
from tests.ooc.runs import SMALL, KillAt, Killed, curve

N, E = 120, 1500
KINDS = ["classes", "numbers"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Labels that follow from the features of both ends."""
    rng = np.random.default_rng(0)
    src, dst = random_edges(N, E)
    x = rng.standard_normal((N, 6), dtype=np.float32)
    score = x[src, 0] - x[dst, 1]
    part, folder = rng.random(E), tmp_path_factory.mktemp("edge_runs")
    paths = {}
    for kind, y in zip(KINDS, (np.digitize(score, [-0.7, 0.7]), np.stack([score, -2 * score], 1)), strict=True):
        data = Data(x=torch.from_numpy(x), edge_index=torch.from_numpy(np.stack([src, dst])), edge_y=torch.from_numpy(y))
        data.edge_attr = torch.from_numpy(rng.standard_normal((E, 3), dtype=np.float32))
        data.edge_train_mask, data.edge_val_mask = torch.from_numpy(part < 0.7), torch.from_numpy((part >= 0.7) & (part < 0.85))
        data.edge_test_mask = torch.from_numpy(part >= 0.85)
        paths[kind] = folder / f"{kind}.ooc"
        ooc.from_data(data, paths[kind]).close()
    return paths


def configure(store: Path, out: Path, **settings: Any) -> EdgeConfig:
    return EdgeConfig(store=store, out=out, **{**SMALL, "batch_size": 64, "dropout": 0.0, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sage", "gine"])
@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_edges_are_learned(stores: dict[str, Path], tmp_path: Path, kind: str, model: str) -> None:
    config = configure(stores[kind], tmp_path / "run", model=model, hidden=32, epochs=12, lr=0.01, fanout=[4])
    summary = train(config)
    scores = summary["metrics"]["test"]
    assert scores["accuracy" if kind == "classes" else "r2"] > (0.7 if model == "sage" else 0.4)
    assert set(summary["metrics"]) == {"val", "test"}
    with pytest.raises(ConfigError, match="trained on labels of edges"):
        infer(tmp_path / "run", stores[kind])


def test_a_step_is_the_formula(stores: dict[str, Path], tmp_path: Path) -> None:
    """With all edges but those of the batch, which are left out of the messages in both directions."""
    store = stores["classes"]
    with ooc.open(store) as ds:
        mode: Any = mode_of(configure(store, tmp_path / "run"))(configure(store, tmp_path / "run", fanout=[-1, -1]), ds)
        assert isinstance(mode, EdgeMode)
        batch = next(iter(mode.batches(0, 0, 1)))
        found = mode.loss(batch)
        target = np.repeat(np.arange(N), np.diff(ds.graph.indptr))
        edge_index = torch.from_numpy(np.stack([np.asarray(ds.graph.indices, np.int64), target]))
        x = torch.empty(N, 6)
        ds.rows("x").read(np.arange(N), x.numpy())
        ends = batch.n_id[batch.edge_label_index]
        pairs = {frozenset(pair) for pair in ends.t().tolist()}
        kept = torch.tensor([frozenset(pair) not in pairs for pair in edge_index.t().tolist()])
        rows = x
        for number, layer in enumerate(mode.model.encoder.layers):
            conv = SAGEConv(rows.size(1), layer.conv.out_channels)
            conv.load_state_dict(layer.conv.state_dict())
            rows = conv(rows, edge_index[:, kept])
            rows = rows.relu() if number == 0 else rows
        attr = torch.empty(len(batch.input_id), 3)
        ds.edges().features("edge_attr").read(batch.input_id.numpy(), attr.numpy())
        logits = mode.model.decoder(rows[ends[0]], rows[ends[1]], edge_attr=attr)
        labels = torch.from_numpy(np.array(ds.edges().labels)).long()[batch.input_id]
        assert found.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
        mode.close()


def test_a_run_goes_on_and_is_planned(stores: dict[str, Path], tmp_path: Path) -> None:
    store = stores["numbers"]
    train(configure(store, tmp_path / "whole", max_steps=6))
    train(configure(store, tmp_path / "run", max_steps=3))
    train(configure(store, tmp_path / "run", max_steps=6), resume=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    made = plan(configure(store, tmp_path / "plan", max_steps=6))
    assert made.prediction.peak_rss_bytes > 0


def test_what_does_not_apply_is_refused(make_store: MakeStore, stores: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no labels of edges"):
        train(configure(make_store(), tmp_path / "run"))
    with pytest.raises(ConfigError, match="no split 'learn'"):
        train(configure(stores["classes"], tmp_path / "run", train_split="learn"))
    given = {"store": str(stores["classes"]), "out": str(tmp_path / "run")}
    assert isinstance(load_config(None, {**given, "task": "edge"}), EdgeConfig)
    with pytest.raises(ConfigError, match="not trained by mode cluster"):
        load_config(None, {**given, "task": "edge", "mode": "cluster"})
    with pytest.raises(ConfigError, match="evaluate"):
        load_config(None, {**given, "task": "edge", "evaluate": "layerwise"})
    with pytest.raises(ConfigError, match="compile does not apply"):
        load_config(None, {**given, "task": "edge", "compile": True})
    assert not (tmp_path / "run").exists()


def test_parameters_are_drawn_from_the_seed_alone(stores: dict[str, Path], tmp_path: Path) -> None:
    for number in (1, 2):
        torch.manual_seed(number)
        train(configure(stores["classes"], tmp_path / f"{number}", max_steps=2, epochs=1))
    assert curve(tmp_path / "1") == curve(tmp_path / "2")


USERS, ITEMS, VIEWS = 60, 40, 900
RATES, RATED, FRIENDS = ("user", "rates", "item"), ("item", "rated_by", "user"), ("user", "knows", "user")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stars follow from the features of users and items; friends have labels too; users know one another."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("typed_edges")
    x = {"user": rng.standard_normal((USERS, 5), np.float32), "item": rng.standard_normal((ITEMS, 3), np.float32)}
    src, dst = rng.integers(0, USERS, VIEWS), rng.integers(0, ITEMS, VIEWS)
    stars = np.digitize(x["user"][src, 0] + x["item"][dst, 0], [-0.5, 0.5])
    part = rng.choice(["train", "val", "test"], VIEWS, p=[0.6, 0.2, 0.2])
    friends = rng.integers(0, USERS, (2, 300))
    ids = {name: pa.array(np.arange(len(rows))) for name, rows in x.items()}
    nodes = {
        name: pa.table({"id": ids[name]} | {f"f{i}": pa.array(rows[:, i]) for i in range(rows.shape[1])})
        for name, rows in x.items()
    }
    nodes["shop"] = pa.table({"id": pa.array(np.arange(5))})
    sold = pa.table({"src": pa.array(np.arange(ITEMS) % 5), "dst": pa.array(np.arange(ITEMS))})
    rates = pa.table({"src": src, "dst": dst, "stars": stars, "part": pa.array(part)})
    knows = pa.table({"src": friends[0], "dst": friends[1], "since": rng.random(300), "part": pa.array(part[:300])})
    ooc.ingest(
        folder / "shop.ooc",
        nodes=nodes,
        edges={RATES: rates, FRIENDS: knows, ("shop", "sells", "item"): sold},
        x_cols={"user": "f*", "item": "f*"},
        edge_label={RATES: "stars", FRIENDS: "since"},
        edge_split={RATES: "part", FRIENDS: "part"},
        reverse=True,
    )
    return folder / "shop.ooc"


def typed(store: Path, out: Path, **settings: Any) -> EdgeConfig:
    return configure(store, out, **{"model": "rsage", "edge_type": "user:rates:item", "batch_size": 128, **settings})


@pytest.mark.parametrize(
    "how", [pytest.param({"epochs": 25, "lr": 0.02, "hidden": 16}, marks=pytest.mark.slow), {"edge_type": "user:knows:user"}]
)
def test_labels_of_an_edge_type_are_learned(shop: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    """Between nodes of two types, or of one; shops have an embedding table, and labels are those of the edge type."""
    summary = train(typed(shop, tmp_path / "run", **how))
    if "edge_type" in how:
        assert summary["metrics"]["test"]["rmse"] < 1
        return
    assert summary["metrics"]["test"]["accuracy"] > 0.6
    assert summary["class_names"] is None
    predicted = plan(typed(shop, tmp_path / "planned", **how)).prediction
    assert predicted.rows_asked > 0
    assert "tables" in predicted.stages


def test_a_killed_run_on_an_edge_type_goes_on_to_the_bit(shop: Path, tmp_path: Path) -> None:
    whole, cut = (typed(shop, tmp_path / name, checkpoint_every=1, dropout=0.5) for name in ("whole", "cut"))
    summary = train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(4))
    assert train(cut, resume=True)["metrics"] == summary["metrics"]
    assert curve(cut.out) == curve(whole.out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"edge_type": None},
            "has labels of user:rates:item, user:knows:user: choose one, as in `edge_type='user:rates:item'`",
        ),
        ({"edge_type": "user:likes:item"}, "edge_type = 'user:likes:item': .* has no such edge type: it has"),
        (
            {"edge_type": "shop:sells:item"},
            r"has no labels of these edges \(it has labels of user:rates:item, user:knows:user\)",
        ),
        ({"model": "sage"}, "model 'sage' is not for heterogeneous graphs"),
    ],
)
def test_edge_types_that_cannot_be_trained_on(shop: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(typed(shop, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_an_edge_type_of_a_homogeneous_store_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="edge_type applies to heterogeneous stores"):
        train(configure(stores["classes"], tmp_path / "run", edge_type="a:b:c"))

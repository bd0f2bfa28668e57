"""Runs on labels of edges: classes and numbers are learned by the one loop, a step is the formula, and a run goes on."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import ooc
from ooc.config.edges import EdgeConfig
from ooc.config.modes import load_config
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.metrics.tasks import LabelTask
from ooc.models.builders import full_blocks
from ooc.models.layers import run_model
from ooc.sampling.links import EdgeLookup
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.whole import whole
from ooc.stores.errors import ConfigError
from ooc.training.edge_mode import EdgeMode, edge_model
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
    with infer(tmp_path / "run", stores[kind]) as found, ooc.open(stores[kind]) as ds:
        y, outputs = np.asarray(ds.edges().labels), np.asarray(found)
        error = (outputs.argmax(1) != y).mean() if kind == "classes" else ((outputs - y) ** 2).mean() / y.var()
    assert error < (0.3 if model == "sage" else 0.6)


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


def outputs_without(model: Any, x: torch.Tensor, edge_index: torch.Tensor, pair: tuple[int, int], attr: torch.Tensor) -> Any:
    """The outputs of an edge on the whole graph without the edges between its two ends."""
    kept = torch.tensor([frozenset(each) != frozenset(pair) for each in edge_index.t().tolist()])
    with torch.no_grad():
        rows = run_model(model.encoder, x, full_blocks(edge_index[:, kept], len(x), len(model.encoder.layers)))
        return model.decoder(rows[pair[0]], rows[pair[1]], edge_attr=attr).numpy()


@pytest.mark.parametrize("kind", ["classes", pytest.param("numbers", marks=pytest.mark.slow)])
def test_outputs_of_edges_are_without_the_edge_itself(stores: dict[str, Path], tmp_path: Path, kind: str) -> None:
    hops = 1 if kind == "classes" else 2
    config = configure(stores[kind], tmp_path / "run", fanout=[-1] * hops, max_steps=3)
    train(config)
    written = ooc.infer(config.out, config.store, tmp_path / "edges.parquet")
    assert (written.rows, written.of, written.columns) == (E, "edges", 3 if kind == "classes" else 2)
    with ooc.open(config.store) as ds, ooc.infer(config.out, ds) as found:
        edges, outputs, x = ds.edges(), np.asarray(found), torch.from_numpy(whole(ds.rows("x")).copy())
        src, dst = EdgeLookup(edges.graph).ends(np.arange(E))
        e_id, attr = edges.graph.edge_ids(np.arange(E)), torch.from_numpy(whole(edges.features("edge_attr")).copy())
        model = edge_model(config, ds, LabelTask.of(edges), edges).eval()
        model.load_state_dict(torch.load(config.out / "model.pt", weights_only=True)["model"])
        edge_index = torch.from_numpy(np.stack([src, dst]))
        for slot in range(0, E, 150):
            expected = outputs_without(model, x, edge_index, (int(src[slot]), int(dst[slot])), attr[e_id[slot]])
            np.testing.assert_allclose(outputs[e_id[slot]], expected, rtol=1e-4, atol=1e-5)
    table = pq.read_table(tmp_path / "edges.parquet")
    assert table.column_names[:3] == ["id", "source", "target"]
    for name, wanted in (("id", e_id), ("source", src), ("target", dst)):
        assert np.array_equal(table[name].to_numpy(), wanted), name
    if kind == "classes":
        assert np.array_equal(table["class"].to_numpy(), outputs[e_id].argmax(1))
    else:
        np.testing.assert_array_equal(np.stack(table["predictions"].to_numpy()), outputs[e_id])
    with pytest.raises(ConfigError, match=r"num_layers applies to outputs of nodes, and .* is a run of labels of edges"):
        ooc.infer(config.out, config.store, num_layers=2)
    with pytest.raises(ConfigError, match="trained on labels of edges, and this verb computes nodes"):
        ooc.embed(config.out, config.store)


def test_a_run_of_classes_on_a_store_of_numbers_predicts_classes(stores: dict[str, Path], tmp_path: Path) -> None:
    train(configure(stores["classes"], tmp_path / "run", epochs=1, label_smoothing=0.1))
    ooc.infer(tmp_path / "run", stores["numbers"], tmp_path / "p.parquet")
    assert pq.read_table(tmp_path / "p.parquet").column_names == ["id", "source", "target", "class", "probabilities"]


def test_edges_without_labels_have_no_outputs(stores: dict[str, Path], tmp_path: Path) -> None:
    train(configure(stores["classes"], tmp_path / "run", max_steps=1, fanout=[3]))
    src, dst = random_edges(N, E)
    data = Data(x=torch.zeros(N, 6), edge_index=torch.from_numpy(np.stack([src, dst])), edge_attr=torch.zeros(E, 3))
    ooc.from_data(data, tmp_path / "none.ooc").close()
    with pytest.raises(
        ConfigError, match=r"the edges of .*none\.ooc have no labels, which outputs are of: ingest it with `edge_label`"
    ):
        ooc.infer(tmp_path / "run", tmp_path / "none.ooc")


def test_an_undirected_edge_has_outputs_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    src, dst = rng.integers(0, 20, (2, 60))
    table = pa.table({"src": src, "dst": dst, "kind": rng.integers(0, 2, 60), "part": ["train", "val"] * 30})
    x = rng.standard_normal((20, 3)).astype(np.float32)
    nodes = pa.table({"id": np.arange(20), **{f"f{i}": x[:, i] for i in range(3)}})
    kinds = {"edge_label": "kind", "edge_split": "part", "undirected": True}
    ooc.ingest(tmp_path / "s.ooc", edges=table, nodes=nodes, x_cols="f*", **kinds)
    train(configure(tmp_path / "s.ooc", tmp_path / "run", max_steps=2, fanout=[3]))
    assert ooc.infer(tmp_path / "run", tmp_path / "s.ooc", tmp_path / "edges.csv").rows == 60
    found = pyarrow.csv.read_csv(tmp_path / "edges.csv")
    order = np.argsort(found["id"].to_numpy())
    for name, ends in (("source", np.minimum(src, dst)), ("target", np.maximum(src, dst))):
        assert np.array_equal(found[name].to_numpy()[order], ends), name
    assert not np.isnan(np.asarray(ooc.infer(tmp_path / "run", tmp_path / "s.ooc"))).any()


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


def test_a_split_without_a_known_label_is_refused(tmp_path: Path) -> None:
    data = Data(x=torch.randn(9, 3), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), edge_y=torch.tensor([-1, -1, 1]))
    data.edge_train_mask = torch.tensor([True, True, False])
    with ooc.from_data(data, tmp_path / "s.ooc"), pytest.raises(ConfigError, match="has no known label: nothing to train on"):
        train(configure(tmp_path / "s.ooc", tmp_path / "run"))


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


def test_outputs_of_an_edge_type(shop: Path, tmp_path: Path) -> None:
    """As those of batches of one edge, with the embedding tables of the best epoch."""
    config = typed(shop, tmp_path / "run", fanout=[-1], epochs=1)
    train(config)
    table = pq.read_table(ooc.infer(config.out, shop, tmp_path / "edges.parquet").path)
    with ooc.open(shop) as ds, ooc.infer(config.out, ds) as found:
        outputs, edges = np.asarray(found), ds.edges(RATES)
        assert outputs.shape == (VIEWS, 3)
        assert np.array_equal(np.sort(table["id"].to_numpy()), np.arange(VIEWS))
        assert np.array_equal(table["class"].to_numpy(), outputs[table["id"].to_numpy()].argmax(1))
        model = edge_model(config, ds, LabelTask.of(edges), edges).eval()
        model.load_state_dict(torch.load(config.out / "model.pt", weights_only=True)["model"])
        (kept,) = (config.out / "tables").glob("*-shop/ended-*")
        shops = torch.empty(5, model.encoder.layers[0].conv.in_channels["shop"])
        with closing(DiskRows.open(kept)) as rows:
            rows.read(np.arange(5), shops.numpy())
        loader = LinkNeighborLoader(ds, [-1], RATES, batch_size=1)
        for position in range(0, VIEWS, 90):
            batch = loader([position])
            batch["shop"].x = shops[batch["shop"].n_id]
            with torch.no_grad():
                expected = model(batch).numpy()
            np.testing.assert_allclose(outputs[batch[RATES].input_id.numpy()], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
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

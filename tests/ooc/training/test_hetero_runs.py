"""Training on heterogeneous graphs, with embedding tables of types without features, against the same training in RAM."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATv2Conv, HeteroConv, SAGEConv

import ooc
from ooc.cli.main import main
from ooc.config.modes import load_config
from ooc.config.nodes import TrainConfig
from ooc.history.embedding_tables import EmbeddingTables, kept_rows
from ooc.layerwise import full_neighbor_pass
from ooc.models.hetero import build_hetero_model, full_hetero_blocks
from ooc.models.layers import run_layers
from ooc.report.page import write_report
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.build import write_hetero_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, OocError
from ooc.stores.graph import Graph
from ooc.training.batch_modes import SampledMode
from ooc.training.build import make_hetero_model, table_shapes
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from ooc.training.registry import MODES
from tests.conftest import MakeStore
from tests.ooc.hetero_batches import NODES, WIDTHS, hetero_data, sizes
from tests.ooc.runs import KillAt, Killed, configure, curve

CLASSES = 3
SPLITS = {"train": np.arange(0, 16), "val": np.arange(16, 23), "test": np.arange(23, 30)}
RUN: dict[str, Any] = {"model": "rsage", "dropout": 0.5}


def graph_of(data: HeteroData) -> HeteroData:
    """With labels of papers that follow their features."""
    x = data["paper"].x
    data["paper"].y = (x[:, 0] > 0.3).long() + (x[:, 1] > 0).long()
    return data


def write(path: Path, data: HeteroData, splits: dict[str, np.ndarray] = SPLITS, labelled: str | None = "paper") -> Path:
    count = sizes(data)
    nodes: dict[str, Any] = {name: {"num_nodes": size} for name, size in count.items()}
    for name in data.node_types:
        if "x" in data[name]:
            nodes[name]["x"] = data[name].x.numpy()
    if labelled is not None:
        y = data[labelled].y.numpy()
        nodes[labelled] |= {"y": y, "task": "multiclass", "num_classes": CLASSES, "splits": splits}
    edges = {}
    for key in data.edge_types:
        sources = {} if key[0] == key[2] else {"num_sources": count[key[0]]}
        edges[key] = Graph.from_edges(*data[key].edge_index.numpy(), num_nodes=count[key[2]], **sources)
    return write_hetero_store(path, nodes, edges)


@pytest.fixture(scope="module")
def data() -> HeteroData:
    """Authors have no features."""
    return graph_of(hetero_data(0, {**WIDTHS, "author": 0}))


@pytest.fixture(scope="module")
def store(data: HeteroData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hetero") / "papers.ooc", data)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out)[0]]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding tables do not fit their share of the memory."""
    monkeypatch.setattr(MemoryPlan, "table_rows", property(lambda self: 2048))


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["rsage", "rgcn", "hgt"])
def test_full_fan_outs_train_as_in_ram(store: Path, data: HeteroData, tmp_path: Path, model: str) -> None:
    """All training nodes are a batch: the losses of the model on the whole graph, with torch's own table and SparseAdam."""
    more = {"heads": 2} if model == "hgt" else {}
    config = configure(store, tmp_path / "run", model=model, fanout=[-1, -1], batch_size=16, dropout=0.0, epochs=5, **more)
    train(config)
    with Dataset.open(store) as ds:
        made, shape = make_hetero_model(config, ds, "paper", CLASSES), table_shapes(config, ds)["author"]
    table = nn.Embedding(*shape, sparse=True)
    tables = EmbeddingTables.open(tmp_path / "tables", {"author": shape}, seed=config.seed, optimizer="adam", max_bytes=10**6)
    with torch.no_grad():
        table.weight.copy_(torch.from_numpy(tables.tables["author"].rows(np.arange(NODES["author"]))))
    tables.close()
    blocks, wanted = full_hetero_blocks(data.edge_index_dict, sizes(data), 2), []
    optimizers = torch.optim.Adam(made.parameters(), lr=config.lr), torch.optim.SparseAdam([table.weight], lr=config.lr)
    seen = torch.from_numpy(reached(data))
    for _ in range(5):
        rows = torch.zeros(*shape).index_copy(0, seen, table(seen))  # those that no batch has are not looked up
        out = made({**data.x_dict, "author": rows}, blocks)
        loss = F.cross_entropy(out[:16], data["paper"].y[:16])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        wanted.append(float(loss.detach()))
    np.testing.assert_allclose(losses(config.out), wanted, rtol=1e-5)


def reached(data: HeteroData) -> np.ndarray:
    """Authors within two hops of the training nodes."""
    found: dict[str, set[int]] = {"paper": set(range(16)), "author": set(), "venue": set()}
    for _ in range(2):
        new: dict[str, set[int]] = {name: set(nodes) for name, nodes in found.items()}
        for key in data.edge_types:
            source, target = data[key].edge_index.tolist()
            new[key[0]] |= {s for s, t in zip(source, target, strict=True) if t in found[key[2]]}
        found = new
    return np.array(sorted(found["author"]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["rsage", "rgcn", "hgt"])
@pytest.mark.parametrize("killed_at", [4, 1])
def test_a_killed_run_goes_on_to_the_bit(store: Path, tmp_path: Path, model: str, killed_at: int, on_disk: None) -> None:
    settings = {**RUN, "model": model, "checkpoint_every": 1, "accumulate": 2, "grad_clip": 1.0, "batch_size": 4}
    whole, cut = (configure(store, tmp_path / name, **settings) for name in ("whole", "cut"))
    summary = train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(killed_at))
    resumed = train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)
    assert resumed["metrics"] == summary["metrics"]


def test_tables_on_disk_and_in_ram_train_to_the_same_bits(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(configure(store, tmp_path / "ram", **RUN))
    monkeypatch.setattr(MemoryPlan, "table_rows", property(lambda self: 2048))
    train(configure(store, tmp_path / "disk", **RUN))
    assert curve(tmp_path / "ram") == curve(tmp_path / "disk")


@pytest.mark.parametrize("in_ram", [True, False])
def test_rows_of_tables_count_for_the_memory_of_batches(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_ram: bool
) -> None:
    """Of training and of scores: of each batch of an optimizer step, and with the moments of Adam unless these stay in RAM."""
    if not in_ram:
        monkeypatch.setattr(MemoryPlan, "table_rows", property(lambda self: 0))
    found = []
    for number, settings in enumerate([{"optimizer": "sgd"}, {"optimizer": "adam"}, {"optimizer": "adam", "accumulate": 3}]):
        with Dataset.open(store) as ds:
            mode = SampledMode(configure(store, tmp_path / f"{number}", **{**RUN, **settings}), ds)
            for loader in (mode.loader, mode.evaluators["val"]):
                sample = loader.strategy.stages.sample
                drawn = sample.sample(Cursor(0, 0))
                found.append((sample.limit.activation_bytes(drawn), 4 * 8 * len(drawn.subgraph.node["author"])))
    for (sgd, row), (adam, _), (several, _) in (found[::2], found[1::2]):
        assert row
        assert (adam - sgd, several - adam) == ((0, 4 * row) if in_ram else (6 * row, 10 * row))


def test_a_run_learns_and_is_scored_by_its_best_tables(store: Path, tmp_path: Path) -> None:
    config = configure(store, tmp_path / "run", **{**RUN, "dropout": 0.0, "epochs": 30, "fanout": [-1, -1], "batch_size": 16})
    summary = train(config)
    assert losses(config.out)[-1] < 0.2 * losses(config.out)[0]
    best = summary["best_epoch"]
    line = next(line for line in read_metrics(config.out)[1] if line["epoch"] == best)
    assert summary["metrics"]["val"] == line["val"]
    kept = list((config.out / "tables").glob("*/best-*"))
    assert f"best-{best}" in [path.name for path in kept]
    assert summary["history_pulled"] > 0
    assert summary["histories"] is None, "what is pulled are no histories"


class OwnTypes(nn.Module):
    """PyG's style."""

    def __init__(
        self, in_channels: dict[str, int], hidden_channels: int, out_channels: int, metadata: Any, node_type: str
    ) -> None:
        super().__init__()
        self.node_type = node_type
        self.first, self.second = (
            HeteroConv({key: SAGEConv((-1, -1), width) for key in metadata[1]}) for width in (hidden_channels, out_channels)
        )
        assert in_channels == {"paper": 5, "author": 8, "venue": 4}, "the table's width, of the type without features"

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> Tensor:
        x_dict = {name: x.relu() for name, x in self.first(x_dict, edge_index_dict).items()}
        out: Tensor = self.second(x_dict, edge_index_dict)[self.node_type]
        return out


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["torch_geometric.nn:GraphSAGE", f"{__name__}:OwnTypes"])
def test_ones_own_classes_train(store: Path, tmp_path: Path, model: str) -> None:
    """Of homogeneous graphs by PyG's `to_hetero`, and of heterogeneous ones."""
    config = configure(store, tmp_path / "run", model=model, dropout=0.0, epochs=20, fanout=[-1, -1], batch_size=16)
    train(config)
    assert losses(config.out)[-1] < 0.5 * losses(config.out)[0]


class OwnEdges(nn.Module):
    """A layer of attention in PyG's words, with edge features of the edge types that have them."""

    def __init__(self, out_channels: int, metadata: Any, node_type: str, edge_dim: Any = None) -> None:
        super().__init__()
        self.node_type, dims = node_type, edge_dim or {}
        convs = {key: GATv2Conv((-1, -1), out_channels, edge_dim=dims.get(key), add_self_loops=False) for key in metadata[1]}
        self.conv = HeteroConv(convs)

    def forward(self, x_dict: Any, edge_index_dict: Any, edge_attr_dict: Any) -> Tensor:
        out: Tensor = self.conv(x_dict, edge_index_dict, edge_attr_dict=edge_attr_dict)[self.node_type]
        return out


@pytest.mark.slow
def test_ones_own_class_takes_edge_features_by_type(store: Path, tmp_path: Path) -> None:
    """Trained, and computed for all nodes as on the whole graph; a store without edge features is refused before the run."""
    own, given = f"{__name__}:OwnEdges", graph_of(hetero_data(0))
    for key, width in {("author", "writes", "paper"): 3, ("paper", "cites", "paper"): 2}.items():
        given[key].edge_attr = torch.randn(given[key].edge_index.size(1), width, generator=torch.Generator().manual_seed(0))
    given["paper"].train_mask = torch.arange(30) < 16
    ooc.from_data(given, tmp_path / "papers.ooc").close()
    config = configure(tmp_path / "papers.ooc", tmp_path / "run", model=own, dropout=0.0, epochs=2, layers=1, fanout=[-1])
    train(config)
    with Dataset.open(config.store) as ds:
        made = make_hetero_model(config, ds, "paper", CLASSES).eval()
    made.load_state_dict(torch.load(config.out / "model.pt", weights_only=True)["model"])
    with torch.no_grad():
        expected = made(given.x_dict, given.edge_index_dict, given.edge_attr_dict)
    with ooc.infer(config.out, config.store, model_class=own) as found:
        np.testing.assert_allclose(np.asarray(found), expected.numpy(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"OwnEdges takes edge features, and .* has none called edge_attr \(it has: none\)"):
        train(configure(store, tmp_path / "none", model=own, layers=1, fanout=[-1]))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "sage"}, "model 'sage' is not for heterogeneous graphs: use rsage, rgcn, hgt, or package.module:Class"),
        (
            {"mode": "cluster", "fanout": []},
            "mode cluster of task node trains on homogeneous graphs, and .* is heterogeneous: use mode sampled",
        ),
        ({"compile": True}, "compile = true does not apply to heterogeneous graphs"),
        ({"precision": "fp16"}, "the embedding tables of author are not trained in fp16: use `precision` fp32 or bf16"),
        ({"node_type": "author"}, r"node_type = 'author': .* has no labels \(node types with labels: paper\)"),
        ({"node_type": "movie"}, r"node_type = 'movie': .* has no such node type \(node types with labels: paper\)"),
        ({"model": "hgt", "heads": 3}, "hidden = 8 is the width of all 3 heads together"),
        ({"num_bases": 2}, "num_bases does not apply to model rsage"),
        ({"train_split": "first"}, "no split 'first' to train on"),
        (
            {"model": "torch_geometric.nn:GAT"},
            "GAT cannot be made heterogeneous by PyG's to_hetero: 'add_self_loops' attribute set to 'True'",
        ),
    ],
)
def test_what_does_not_apply_is_refused_in_one_line(
    store: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        ooc.train(store=store, out=tmp_path / "run", **{"model": "rsage", "hidden": 8, **settings})
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_every_other_mode_is_refused_and_leaves_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for task, mode in (name for name, made in MODES.items() if not made.typed):
        more = ["--window", "1d"] if mode == "snapshots" else []
        assert main(["train", str(store), "--task", task, "--mode", mode, *more, "--out", f"{tmp_path}/run"]) == 2
        error = capsys.readouterr().err
        assert f"mode {mode} of task {task} trains on homogeneous graphs, and " in error
        known = "mode sampled (task node, edge, link) or mode lightgcn (task link) or mode table (task link)"
        assert error.endswith(f" is heterogeneous: use {known}\n")
        assert error.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


def test_models_of_heterogeneous_graphs_on_a_homogeneous_store(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    with pytest.raises(ConfigError, match=r"model rsage is for heterogeneous graphs, and .* is homogeneous: use sage"):
        train(configure(store, tmp_path / "run", model="rsage"))
    with pytest.raises(ConfigError, match="node_type applies to heterogeneous stores"):
        train(configure(store, tmp_path / "run", node_type="paper"))


def whole_graph(data: HeteroData, authors: np.ndarray) -> dict[str, Tensor]:
    """The rows of all nodes, with those of the embedding table."""
    return {**data.x_dict, "author": torch.from_numpy(authors)}


def trained(config: TrainConfig, kept: int | str) -> tuple[nn.Module, np.ndarray]:
    """The model that a run ended with, in evaluation mode, and the rows of authors that it goes with."""
    with Dataset.open(config.store) as ds:
        made, shapes = make_hetero_model(config, ds, "paper", CLASSES).eval(), table_shapes(config, ds)
    made.load_state_dict(torch.load(config.out / "model.pt", weights_only=True)["model"])
    (rows,) = kept_rows(config.out / "tables", shapes, kept).values()
    authors = np.empty(shapes["author"], np.float32)
    rows.read(np.arange(len(authors)), authors)
    return made, authors


@pytest.mark.cases(1)
@pytest.mark.parametrize("node_type", [None, "author"])
def test_rows_of_a_layer_are_those_on_the_whole_graph(
    store: Path, data: HeteroData, tmp_path: Path, node_type: str | None
) -> None:
    """Of the type that the run learned, and of another one without features."""
    config = configure(store, tmp_path / "run", **{**RUN, "epochs": 1})
    made, authors = trained(config, train(config)["best_epoch"])
    blocks = full_hetero_blocks(data.edge_index_dict, sizes(data), 1)
    with torch.no_grad():
        expected = run_layers([made.layers[0]], whole_graph(data, authors), blocks)[node_type or "paper"]
    given = {} if node_type is None else {"node_type": node_type}
    with ooc.embed(config.out, store, **given) as found:
        np.testing.assert_allclose(np.asarray(found), expected.numpy(), atol=1e-5, rtol=1e-5)
    flags = [] if node_type is None else ["--node-type", node_type]
    assert (
        main(["embed", str(store), "--checkpoint", str(config.out), "--out", f"{tmp_path}/x.zarr", "--layer", "1", *flags]) == 0
    )
    assert zarr.open_array(tmp_path / "x.zarr/x", mode="r").shape == expected.shape


def test_rows_that_there_are_not_are_refused_in_one_line(store: Path, tmp_path: Path) -> None:
    config = configure(store, tmp_path / "run", **{**RUN, "epochs": 1})
    train(config)
    for message, asked in [
        ("the model has layers 1 to 2", lambda: ooc.embed(config.out, store, layer=3)),
        (
            "gives outputs of paper, and node_type = 'author': leave it out",
            lambda: ooc.infer(config.out, store, node_type="author"),
        ),
        ("is heterogeneous: give the type of the nodes, `node_type`", lambda: ooc.infer(nn.Linear(1, 1), store)),
        ("no node type 'movie'", lambda: ooc.embed(config.out, store, node_type="movie")),
    ]:
        with pytest.raises(OocError, match=message) as raised:
            asked()
        assert "\n" not in str(raised.value)


def test_a_module_is_computed_for_a_type(store: Path, data: HeteroData) -> None:
    """With an embedding table of its own, which gets the numbers of nodes."""
    with Dataset.open(store) as ds:
        widths = {name: ds.nodes(name).num_features for name in ds.node_types}
        for node_type in ("venue", "paper"):
            model = build_hetero_model("rsage", widths, 8, 3, ds.metadata(), node_type, num_nodes=sizes(data)).eval()
            x = {**data.x_dict, "author": torch.arange(NODES["author"])}
            with torch.no_grad():
                expected = model(x, full_hetero_blocks(data.edge_index_dict, sizes(data), 2))
            with ooc.infer(model, ds, node_type=node_type) as found:
                np.testing.assert_allclose(np.asarray(found), expected.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["rsage", "torch_geometric.nn:GraphSAGE"])
def test_exact_scores_are_those_of_full_neighborhoods(store: Path, tmp_path: Path, model: str) -> None:
    """Whatever training samples."""
    settings = {**RUN, "model": model, "epochs": 2, "fanout": [2, 2]}
    exact = train(configure(store, tmp_path / "a", evaluate="layerwise", **settings))
    sampled = train(configure(store, tmp_path / "b", eval_fanout=[-1, -1], **settings))
    assert exact["metrics"] == sampled["metrics"]
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.slow
def test_a_run_without_scores_has_the_tables_that_it_ended_with(store: Path, data: HeteroData, tmp_path: Path) -> None:
    """Also when it goes on and is killed, as the file of the model still is of its first end."""
    store = write(tmp_path / "unscored.ooc", data, {"train": SPLITS["train"]})
    config = configure(store, tmp_path / "run", **{**RUN, "epochs": 2, "checkpoint_every": 1})
    train(config)
    (ended,) = (config.out / "tables").glob("*/ended-*")
    made, authors = trained(config, ended.name)
    with torch.no_grad():
        expected = made(whole_graph(data, authors), full_hetero_blocks(data.edge_index_dict, sizes(data), 2)).numpy()
    with ooc.infer(config.out, store) as found:
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5, rtol=1e-5)
    longer = config.model_copy(update={"epochs": 4})
    with pytest.raises(Killed):
        train(longer, resume=True, watcher=KillAt(6))
    with ooc.infer(config.out, store) as found:
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5, rtol=1e-5)
    train(longer, resume=True)
    assert [path.name for path in (config.out / "tables").glob("*/*-*")] == ["ended-8"]
    with ooc.infer(config.out, store) as found:
        assert not np.allclose(np.asarray(found), expected)


def test_the_last_scores_of_an_epoch_cut_short_may_be_the_best(store: Path, data: HeteroData, tmp_path: Path) -> None:
    """They come after the last checkpoint, which knows nothing of them."""
    config = configure(store, tmp_path / "run", **{**RUN, "batch_size": 4, "max_steps": 2})
    assert train(config)["best_epoch"] == 0
    made, authors = trained(config, "ended-2")
    with torch.no_grad():
        expected = made(whole_graph(data, authors), full_hetero_blocks(data.edge_index_dict, sizes(data), 2)).numpy()
    with ooc.infer(config.out, store) as found:
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["rsage", "hgt", "torch_geometric.nn:GraphSAGE", f"{__name__}:OwnTypes"])
def test_outputs_of_all_nodes_are_those_on_the_whole_graph(
    store: Path, data: HeteroData, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the embedding tables of the best epoch, which R-SAGE has before the last one; in batches of some nodes."""
    monkeypatch.setattr(full_neighbor_pass, "SEEDS", 7)
    config = configure(
        store, tmp_path / "run", model=model, dropout=0.0, epochs=6, lr=0.3, **({"heads": 2} if model == "hgt" else {})
    )
    best = train(config)["best_epoch"]
    assert model != "rsage" or best < 5
    made, authors = trained(config, best)
    x = whole_graph(data, authors)
    edges = full_hetero_blocks(data.edge_index_dict, sizes(data), 2) if ":" not in model else data.edge_index_dict
    with torch.no_grad():
        out = made(x, edges)
    expected = out["paper"] if isinstance(out, dict) else out
    given: dict[str, Any] = {"model_class": model} if ":" in model else {}
    size = max(1.0, float(expected.abs().max()))  # rows are large at this rate, and rounding is of their largest terms
    with ooc.infer(config.out, store, **given) as found:
        np.testing.assert_allclose(np.asarray(found), expected.numpy(), atol=1e-5 * size, rtol=1e-5)
    written = ooc.infer(config.out, store, tmp_path / "p.parquet", **given)
    assert (written.rows, written.columns) == (NODES["paper"], CLASSES)
    assert "full neighborhoods of 2 hops" in written.moved
    assert pq.read_table(tmp_path / "p.parquet")["class"].to_pylist() == expected.argmax(1).tolist()


def test_outputs_are_of_the_type_that_the_run_learned(tmp_path: Path) -> None:
    """Whatever labels the store has whose nodes they are of, and whether the run has ended."""
    data = graph_of(hetero_data(0))
    trained_on = write(tmp_path / "papers.ooc", data)
    config = configure(trained_on, tmp_path / "run", model="rsage", epochs=1, plan=False)
    assert train(config)["labels_of"] == "paper"
    with ooc.infer(config.out, trained_on) as found:
        expected = np.asarray(found).copy()
    of_authors = data.clone()
    of_authors["author"].y = torch.arange(NODES["author"]) % CLASSES
    stores = [
        write(tmp_path / "authors.ooc", of_authors, {"train": np.arange(20)}, labelled="author"),
        write(tmp_path / "none.ooc", data, labelled=None),
    ]
    summary = config.out / "summary.json"
    ended = summary.read_text()
    for store in stores:
        for text in (ended, None):
            summary.write_text(text) if text else summary.unlink()
            with ooc.infer(config.out, store) as found:
                assert np.array_equal(np.asarray(found), expected)
        summary.write_text(ended)
    summary.unlink()
    shutil.rmtree(trained_on)
    for store in stores:
        with pytest.raises(ConfigError, match=r"run does not say which labels it learned, and neither does .*papers\.ooc"):
            ooc.infer(config.out, store)


def test_a_store_without_the_type_that_a_run_learned_is_refused(store: Path, make_store: MakeStore, tmp_path: Path) -> None:
    config = configure(store, tmp_path / "run", epochs=1, plan=False, **RUN)
    train(config)
    summary = config.out / "summary.json"
    summary.write_text(summary.read_text().replace('"labels_of": "paper"', '"labels_of": "book"'))
    with pytest.raises(ConfigError, match=r"gives outputs of nodes book, and .* has the types paper, author, venue"):
        ooc.infer(config.out, store)


@pytest.mark.slow
def test_outputs_that_cannot_be_exact_are_refused(store: Path, data: HeteroData, tmp_path: Path) -> None:
    config = configure(store, tmp_path / "run", **{**RUN, "checkpoint_every": 1, "batch_size": 4})
    with pytest.raises(Killed):
        train(config, watcher=KillAt(2))
    with pytest.raises(
        ConfigError, match="has not ended, nor scored an epoch, and so kept no embedding tables of author: resume"
    ):
        ooc.infer(config.out, store)
    other = write(tmp_path / "other.ooc", graph_of(hetero_data(1, {**WIDTHS, "author": 0})))
    with pytest.raises(ConfigError, match="has embedding tables of the nodes of another store"):
        ooc.infer(config.out, other)
    own = f"{__name__}:OwnTypes"
    shallow = configure(store, tmp_path / "shallow", model=own, dropout=0.0, epochs=1, layers=1, fanout=[-1])
    train(shallow)
    with pytest.raises(ConfigError, match="outputs of OwnTypes depend on nodes more than 1 hops away"):
        ooc.infer(shallow.out, store, model_class=own)
    with ooc.infer(shallow.out, store, model_class=own, num_layers=2) as found:
        assert found.shape == (NODES["paper"], CLASSES)


def test_ooc_init_suggests_a_model_of_heterogeneous_graphs(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(store)]) == 0
    config = tmp_path / "run.toml"
    config.write_text(capsys.readouterr().out)
    assert "task paper: multiclass; splits train, val, test" in config.read_text()
    assert main(["train", str(store), "--config", str(config), "--out", f"{tmp_path}/run", "--max-steps", "1"]) == 0
    assert (tmp_path / "run/model.pt").exists()


def test_fan_outs_by_edge_type(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, from Python with PyG's triples, and in a file: the same run; zeros leave a type out."""
    flags = [str(store), "--model", "rsage", "--hidden", "8", "--epochs", "1", "--seed", "3", "--no-plan"]
    cites = ["--fanout", "2,2", "--fanout", "paper:cites:paper=3,0"]
    assert main(["train", *flags, *cites, "--out", f"{tmp_path}/a"]) == 0
    given: dict[Any, list[int]] = {"default": [2, 2], ("paper", "cites", "paper"): [3, 0]}
    ooc.train(store=store, out=tmp_path / "b", model="rsage", hidden=8, epochs=1, seed=3, plan=False, fanout=given)
    file = tmp_path / "run.toml"
    file.write_text('[fanout]\ndefault = [2, 2]\n"paper:cites:paper" = [3, 0]\n')
    assert main(["train", *flags, "--config", str(file), "--out", f"{tmp_path}/c"]) == 0
    assert curve(tmp_path / "a") == curve(tmp_path / "b") == curve(tmp_path / "c")
    assert "default = 2,2; paper:cites:paper = 3,0" in write_report(tmp_path / "a").read_text()
    assert main(["train", "--out", f"{tmp_path}/a", "--resume", "--epochs", "2"]) == 0
    with Dataset.open(store) as ds:
        loader = SampledMode(load_config(file, {"store": store, "out": tmp_path / "d", "model": "rsage"}), ds).loader
        expected = {key: [3, 0] if key[1] == "cites" else [2, 2] for key in ds.edge_types}
        assert loader.num_neighbors == expected
    capsys.readouterr()


@pytest.mark.parametrize(
    ("fanout", "message"),
    [
        (
            ["2,2", "paper:likes:paper=3,3"],
            "for the edge type paper:likes:paper, which the graph has not: it has author:writes",
        ),
        (["paper:cites:paper=3,3"], "no fan-out is given for the edge type author:writes:paper: give one for each"),
        (["2,2", "paper:cites:paper=3"], "fanout paper:cites:paper=3 has 1 number for 2 layers: give one per layer"),
        (["2,2", "cites=3,3"], "'cites' is no edge type: write source:name:target, as in author:writes:paper=10,5"),
        (["2,2", "paper:cites:paper=3,x"], "expected a valid integer"),
        (["2,2", "3,3", "paper:cites:paper=3,3"], "the one of all others is given twice"),
        (["2,2", "paper:cites:paper=-2,3"], "each number must be -1 (all neighbors), 0 (none) or positive"),
    ],
)
def test_fan_outs_that_do_not_fit(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fanout: list[str], message: str
) -> None:
    flags = [text for each in fanout for text in ("--fanout", each)]
    assert main(["train", str(store), "--model", "rsage", *flags, "--out", f"{tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_fan_outs_by_edge_type_on_a_homogeneous_store(make_store: MakeStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fan-outs by edge type \(a:b:c\) are of heterogeneous stores, and .* one edge type"):
        ooc.train(store=make_store(), out=tmp_path / "run", fanout={"a:b:c": [2, 2]})

"""Runs of mode "lightgcn" whose steps propagate over sampled links."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import LGConv
from torch_geometric.utils import to_undirected

import ooc
from ooc.cli.main import main
from ooc.config.lightgcn import LightGCNConfig
from ooc.history.embedding_tables import FOLDER
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.errors import BudgetError, ConfigError
from ooc.training.loop import plan, train
from ooc.training.open_run import open_run
from ooc.training.watchers import Watchers
from tests.ooc.lightgcn import embeddings, kill_the_command, killed_in_little_memory
from tests.ooc.tables import ITEMS, USERS, make_shop, recall_and_ndcg

WIDTH = 8
SMALL: dict[str, Any] = {"batch_size": 32, "hidden": WIDTH, "epochs": 3, "lr": 0.03, "threads": 1, "eval_every": 1}
SMALL |= {"eval_k": [5], "l2": 0.01, "fanout": [3, 2]}
KINDS = [
    {"loss": "bpr", "ratio": 2},
    {"loss": "softmax", "ratio": 16, "similarity": "cosine", "temperature": 0.3},
    {"loss": "softmax", "ratio": 16, "layers": 3},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shop") / "shop.ooc"
    make_shop(path)
    return path


def config(store: Path, out: Path, **settings: Any) -> LightGCNConfig:
    return LightGCNConfig(store=store, out=out, **{**SMALL, **settings})


def behind_pyg(table: torch.Tensor, run: Any, layers: int) -> torch.Tensor:
    """The rows that PyG's convolution over all links of training makes of a table, float64."""
    heads, _, tails = run.mode.split.links("train")
    edge_index = to_undirected(torch.from_numpy(np.stack([heads, tails])), num_nodes=USERS + ITEMS)
    conv, rows, total = LGConv(), table, table
    for _ in range(layers):
        rows = conv(rows, edge_index)
        total = total + rows
    return total / (layers + 1)


def reference_loss(rows: torch.Tensor, table: torch.Tensor, links: Any, settings: LightGCNConfig) -> torch.Tensor:
    node = torch.from_numpy(links.node)
    source, target, negative = (node[part] for part in (links.source, links.target, links.negative))
    behind = torch.nn.functional.normalize(rows, dim=1) if settings.similarity == "cosine" else rows
    true = (behind[source] * behind[target]).sum(1) / settings.temperature
    if settings.loss == "bpr":
        loss = -torch.nn.functional.logsigmoid(true[:, None] - (behind[source][:, None] * behind[negative]).sum(2)).mean()
    else:
        false = (behind[source] @ behind[negative].T) / settings.temperature
        false = false.masked_fill(target[:, None] == negative, -torch.inf)
        loss = torch.nn.functional.cross_entropy(torch.cat([true[:, None], false], 1), torch.zeros(len(true)).long())
    parts = (source, target, negative.flatten())
    return loss + settings.l2 / 2 * sum((table[part] ** 2).sum(1).mean() for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_neighbors_a_step_has_the_loss_and_gradient_of_pygs_convolution(
    store: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    """Over the whole graph in float64, the links of the batch among those that carry messages."""
    settings = config(store, tmp_path / "run", **{**kind, "fanout": [-1] * kind.get("layers", 2)})
    with open_run(settings, False, Watchers([])) as run:
        mode: Any = run.mode
        mode.prepare()
        table = torch.cat([mode.steps.load(block, None) for block in range(len(mode.steps.columns))], 1)
        assert 0.16 < table.abs().max() <= 0.17
        with closing(mode.batches(0, 0, 1)) as batches:
            loss = mode.step(next(batches), 1)
        theirs = table.double().requires_grad_()
        wanted = reference_loss(behind_pyg(theirs, run, settings.layers), theirs, mode.links_of(0, 0), settings)
        wanted.backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        mode.steps.tables.gather()
        for name, own in mode.steps.tables.tables.items():
            (pulled,) = own._pulled
            gradient = theirs.grad[mode.links.first[name] + torch.from_numpy(pulled.ids)]
            torch.testing.assert_close(own.merged.grad.double(), gradient, rtol=1e-5, atol=1e-6)


def test_a_run_of_few_neighbors_learns_what_the_exact_one_does(tmp_path: Path) -> None:
    """Near its Recall@20, and far above lists at random."""
    path, rng, data = tmp_path / "visits.ooc", np.random.default_rng(0), HeteroData()
    users, items, groups = 300, 200, 10
    user, choice = np.repeat(np.arange(users), 14), rng.integers(0, items // groups, users * 14)
    visits = np.unique(np.stack([user, choice * groups + user % groups]), axis=1)
    part = rng.random(visits.shape[1])
    data["user"].num_nodes, data["item"].num_nodes = users, items
    edges = data["user", "visits", "item"]
    edges.edge_index = torch.from_numpy(visits)
    edges.edge_train_mask, edges.edge_val_mask, edges.edge_test_mask = (
        torch.from_numpy(each) for each in (part < 0.6, (part >= 0.6) & (part < 0.7), part >= 0.7)
    )
    ooc.from_data(data, path).close()
    settings: dict[str, Any] = {"mode": "lightgcn", "hidden": 16, "batch_size": 256, "epochs": 30, "lr": 0.02, "threads": 1}
    settings |= {"store": path, "eval_every": 30, "layers": 3}
    exact, sampled, begun = (
        ooc.train(out=tmp_path / name, **{**settings, **own})["metrics"]["test"]["recall@20"]
        for name, own in (("exact", {}), ("sampled", {"fanout": [4, 4, 4]}), ("begun", {"epochs": 1, "lr": 1e-9, "init": 1e-6}))
    )
    assert exact > 0.8
    assert sampled > exact - 0.05
    assert sampled > begun + 0.3


def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of no table fit the memory."""
    monkeypatch.setattr(MemoryPlan, "beside_tables", lambda plan, nbytes: plan.beside_history())
    monkeypatch.setattr(MemoryPlan, "table_rows", property(lambda plan: 4096))


def test_any_memory_and_any_kill_give_the_same_bits(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, **own: Any) -> LightGCNConfig:
        return config(store, tmp_path / name, norm_power=0.5, **own)

    whole, cut_off = killed_in_little_memory(make, lambda: on_disk(monkeypatch))
    assert whole["history_bytes_read"] == 0
    assert all(each["history_bytes_read"] > 0 for each in cut_off)


FLAGS = "--task link --mode lightgcn --hidden 32 --fanout 3,3,3 --batch-size 32 --epochs 60 --lr 0.03 --l2 0.01 --eval-k 5"
FLAGS += " --eval-every 20 --threads 1 --seed 3 --checkpoint-every 20"
ON_DISK = """
MemoryPlan.beside_tables = lambda plan, nbytes: plan.beside_history()
MemoryPlan.table_rows = property(lambda plan: 4096)
"""


@pytest.mark.slow
def test_kill_9_at_random_moments(store: Path, tmp_path: Path) -> None:
    """Rows are on disk, so that kills are in the middle of steps that write them."""
    kill_the_command(store, tmp_path, FLAGS, ON_DISK, "70 rows, on disk")


def test_scores_lists_and_embeddings_are_of_the_exact_propagation_of_the_best_rows(store: Path, tmp_path: Path) -> None:
    settings = config(store, tmp_path / "run", epochs=6, lr=0.1)
    result = train(settings)
    rows = embeddings(settings.out)
    for name in ("val", "test"):
        scores = recall_and_ndcg(store, rows, name, 5)
        assert result["metrics"][name] == pytest.approx({"recall@5": scores[0], "ndcg@5": scores[1]})
    assert result["metrics"]["test"]["recall@5"] > 0.5
    best = settings.out / FOLDER
    table = []
    for folder in sorted(best.iterdir()):
        with closing(DiskRows.open(folder / f"best-{result['best_epoch']}")) as kept:
            own = np.empty(kept.shape, np.float32)
            kept.read(np.arange(len(own)), own)
            table.append(own)
    with open_run(settings, True, Watchers([])) as run:
        wanted = behind_pyg(torch.from_numpy(np.concatenate(table)).double(), run, 2)
    np.testing.assert_allclose(rows, wanted.numpy(), atol=1e-6)
    np.testing.assert_array_equal(ooc.embed(settings.out, store, node_type="item")[:], rows[USERS:])
    near = ooc.neighbors(settings.out, store, [3], k=4, by="dot", node_type="item")
    score = rows[USERS:] @ rows[USERS + 3]
    score[3] = -np.inf
    np.testing.assert_array_equal(near.item[0], np.argsort(-score)[:4])
    assert ooc.infer(settings.out, store, tmp_path / "best.parquet", top=3).rows == USERS
    before = result["metrics"]
    again = train(settings.model_copy(update={"epochs": 8}), resume=True)  # the run goes on from the rows as they were
    once = train(config(store, tmp_path / "once", epochs=8, lr=0.1))
    assert again["metrics"] == once["metrics"]
    assert before["val"]["recall@5"] <= again["metrics"]["val"]["recall@5"]
    np.testing.assert_array_equal(embeddings(settings.out), embeddings(tmp_path / "once"))


def test_a_store_of_users_and_items_grows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    for name, users, items in (("first", 50, 40), ("more", 70, 60)):
        pairs = np.unique(rng.integers(0, (users, items), (400, 2)), axis=0)
        columns = {"user": [f"u{i:02}" for i in pairs[:, 0]], "item": [f"i{i:02}" for i in pairs[:, 1]]}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    store, run = tmp_path / "visits.ooc", tmp_path / "run"
    kinds: dict[str, Any] = {"src": "user", "dst": "item"}
    edges = "user:visits:item"
    words = ["--nodes", "user", "--nodes", "item", "--src", kinds["src"], "--dst", kinds["dst"]]
    assert main(["ingest", str(store), *words, "--edges", f"{edges}={tmp_path / 'first.parquet'}"]) == 0
    settings: dict[str, Any] = {"mode": "lightgcn", "hidden": 8, "fanout": [3, 3], "threads": 1, "lr": 1e-9, "eval_k": [5]}
    ooc.train(store=store, out=run, epochs=1, **settings)
    with ooc.open(store) as ds:
        before = {name: ds.nodes(name).num_nodes for name in ds.node_types}
    words = ["append", str(store), "--edges", f"{edges}={tmp_path / 'more.parquet'}", "--src", "user", "--dst", "item"]
    assert main(words) == 0
    with pytest.raises(ConfigError, match="has grown since"):
        ooc.train(out=run, resume=True, epochs=2)
    result = ooc.train(out=run, resume=True, grown=True, epochs=2)
    assert result["epochs"] == 2
    for name, count in before.items():
        assert len(ooc.embed(run, store, node_type=name)) > count


def test_a_plan_says_how_many_rows_a_step_reaches_at_most(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(config(store, tmp_path / "run"))
    assert "The whole table is in memory" in made.advice
    assert (made.first.read, made.trained) == (0, 70)
    on_disk(monkeypatch)
    settings = config(store, tmp_path / "run", batch_size=4, val_split="test", eval_splits=[], eval_every=100, epochs=2)
    made = plan(settings)
    assert made.in_memory == 4096 // (12 * WIDTH)
    assert made.trained == min(70, 12 + (12 + 36) * 2)
    assert "rows, 42 in memory" in str(made)
    result = train(settings)
    assert 0 < result["rows_asked"] <= made.trained * result["total_steps"]


def test_what_does_not_fit_is_one_line(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    words = ["train", str(store), "--task", "link", "--mode", "lightgcn", "--out", str(out)]
    wrong = {
        ("--fanout", "10,10", "--layers", "3"): "fanout 10,10 has 2 numbers for 3 layers: give one per layer",
        ("--fanout", "10,0,10"): "each number must be -1 (all neighbors) or positive",
        ("--fanout", "user:likes:item=10,10"): "fanout by edge type does not apply to mode lightgcn",
        ("--fanout", "10,10", "--optimizer", "sgd"): "optimizer does not apply to mode lightgcn",
        ("--fanout", "10,10", "--sampler", "labor"): "sampler does not apply to mode lightgcn",
    }
    for flags, said in wrong.items():
        assert main([*words, *flags]) == 2, flags
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert main([*words[:4], "--mode", "table", "--model", "mf", "--out", str(out), "--fanout", "10"]) == 2
    assert "fanout does not apply to mode table" in capsys.readouterr().err
    assert not out.exists()
    train(config(store, out, epochs=1))
    with pytest.raises(ConfigError, match=r"was trained with fanout = \[3, 2\], not \[\]"):
        train(config(store, out, epochs=2, fanout=[], layers=2), resume=True)
    monkeypatch.setattr(MemoryPlan, "batch", property(lambda plan: 10_000))
    with pytest.raises(BudgetError, match=r"hop 1 of fan-out 3,2 samples .* give a smaller `fanout` or `batch_size`"):
        train(config(store, tmp_path / "little"))


@pytest.mark.parametrize("layers", [None, 2])
def test_a_fan_out_says_how_many_layers_there_are(layers: int | None) -> None:
    made = LightGCNConfig(store="a.ooc", out="run", fanout="10,-1", layers=layers or 2)
    assert LightGCNConfig(store="a.ooc", out="run", fanout="10,-1").layers == made.layers == 2
    assert made.batches == "propagation over sampled links, fan-out 10, -1, batches of 2,048 links"
    assert LightGCNConfig(store="a.ooc", out="run").batches.startswith("propagation over the whole graph")

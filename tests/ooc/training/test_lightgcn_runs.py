"""Runs of mode "lightgcn" against PyG's model trained by torch in RAM on the same batches."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.nn.models import LightGCN
from torch_geometric.utils import to_undirected

import ooc
from ooc.cli.main import main
from ooc.config.lightgcn import LightGCNConfig
from ooc.loading.relation_links import RelationLinks
from ooc.runtime import memory_plan
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.errors import BudgetError, ConfigError
from ooc.training.loop import plan, train
from ooc.training.open_run import open_run
from ooc.training.watchers import Watchers, terminal_watcher
from tests.ooc.lightgcn import embeddings, kill_the_command, killed_in_little_memory
from tests.ooc.runs import Killed, curve
from tests.ooc.tables import ITEMS, USERS, make_shop, recall_and_ndcg

WIDTH = 8
SMALL: dict[str, Any] = {"batch_size": 32, "hidden": WIDTH, "layers": 2, "epochs": 3, "lr": 0.03, "threads": 1, "eval_every": 1}
SMALL |= {"eval_k": [5], "l2": 0.01}
KINDS = [{"loss": "bpr", "ratio": 2}, {"loss": "softmax", "ratio": 16, "similarity": "cosine", "temperature": 0.3}]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shop") / "shop.ooc"
    make_shop(path)
    return path


def config(store: Path, out: Path, **settings: Any) -> LightGCNConfig:
    return LightGCNConfig(store=store, out=out, **{**SMALL, **settings})


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in curve(out).splitlines()]


def little_memory(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    monkeypatch.setattr(memory_plan.MemoryPlan, "batches", property(lambda plan: batches))


def in_ram(run: Any, settings: LightGCNConfig) -> tuple[list[float], torch.Tensor]:
    """Losses of PyG's model with torch's Adam on the run's batches, and its rows behind the propagation."""
    mode = run.mode
    heads, _, tails = mode.split.links("train")
    edge_index = to_undirected(torch.from_numpy(np.stack([heads, tails])), num_nodes=USERS + ITEMS)
    model = LightGCN(USERS + ITEMS, WIDTH, settings.layers)
    with torch.no_grad():
        model.embedding.weight.copy_(torch.cat([mode.steps.load(block, None) for block in range(len(mode.steps.columns))], 1))
    optimizer, losses = torch.optim.Adam(model.parameters(), settings.lr), []
    for epoch in range(settings.epochs):
        for step in range(mode.steps_per_epoch):
            links = mode.links_of(epoch, step)
            node = torch.from_numpy(links.node)
            own, rows = model.embedding.weight[node], model.get_embedding(edge_index)[node]
            if settings.similarity == "cosine":
                rows = torch.nn.functional.normalize(rows, dim=1)
            true = (rows[links.source] * rows[links.target]).sum(1) / settings.temperature
            if settings.loss == "bpr":
                false = (rows[links.source][:, None] * rows[links.negative]).sum(2)
                loss = -torch.nn.functional.logsigmoid(true[:, None] - false).mean()
            else:
                false = rows[links.source] @ rows[links.negative].T / settings.temperature
                false[links.target[:, None] == links.negative] = -torch.inf
                loss = torch.nn.functional.cross_entropy(torch.cat([true[:, None], false], 1), torch.zeros(len(true)).long())
            parts = (links.source, links.target, links.negative.flatten())
            loss = loss + settings.l2 / 2 * sum((own[part] ** 2).sum(1).mean() for part in parts)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.get_embedding(edge_index).detach()


def test_a_plan_says_what_the_run_reads_and_writes(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = {"eval_splits": [], "eval_every": 100, "checkpoint_every": 10_000}
    settings = config(store, tmp_path / "run", epochs=2, val_split="test", **never)
    assert "The whole table is in memory" in plan(settings).advice
    little_memory(monkeypatch, 10_000)
    made = plan(settings)
    assert made.in_memory < made.parts
    found = train(settings)
    assert found["columns"] == [WIDTH // made.parts] * made.parts
    read, written = ((made.first.read + made.later.read), (made.first.written + made.later.written))
    assert abs(found["history_bytes_read"] / made.part_bytes - read) <= 3 * made.parts, "the end reads it too"
    assert abs(found["history_bytes_written"] / made.part_bytes - written) <= 3 * made.parts
    main(["plan", str(store), "--task", "link", "--mode", "lightgcn"])
    assert "blocks of columns" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_rows_are_those_of_pygs_model_in_ram(store: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    settings = config(store, tmp_path / "run", val_split="test", eval_splits=["test"], eval_every=100, **kind)
    with open_run(settings.model_copy(update={"out": tmp_path / "double"}), False, Watchers([])) as run:
        losses, rows = in_ram(run, settings)
    train(settings)
    own = [line["loss"] for line in lines(settings.out) if "loss" in line]
    np.testing.assert_allclose(own, losses, rtol=1e-4)
    np.testing.assert_allclose(embeddings(settings.out), rows.numpy(), atol=2e-3)


def test_more_memory_never_reads_more(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, moved = config(store, tmp_path / "run", hidden=24), []
    for room in range(9_000, 60_000, 500):
        little_memory(monkeypatch, room)
        made = plan(settings)
        moved.append(made.later.read * made.part_bytes)
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0 < moved[0]


def test_a_run_goes_on_in_memory_that_holds_its_blocks(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(store, tmp_path / "run", epochs=1)
    train(settings)
    little_memory(monkeypatch, 10_000)
    with pytest.raises(BudgetError, match=r"blocks of 8 columns, with which .*run began, do not fit the memory: give .* more"):
        train(config(store, tmp_path / "run", epochs=2), resume=True)


def test_any_memory_and_any_kill_give_the_same_bits(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, **own: Any) -> LightGCNConfig:
        return config(store, tmp_path / name, norm_power=0.5, **own)

    whole, cut_off = killed_in_little_memory(make, lambda: little_memory(monkeypatch, 15_000))
    assert whole["columns"] == [WIDTH]
    assert all(len(each["columns"]) > 1 for each in cut_off)


FLAGS = "--task link --mode lightgcn --hidden 32 --layers 2 --batch-size 32 --epochs 24 --lr 0.03 --l2 0.01 --eval-k 5"
FLAGS += " --eval-every 8 --threads 1 --seed 3 --checkpoint-every 20"


@pytest.mark.slow
def test_kill_9_at_random_moments(store: Path, tmp_path: Path) -> None:
    """Columns are on disk, so that kills are in the middle of steps that write them."""
    shrink = "MemoryPlan.batches = property(lambda plan: 20_000)"
    kill_the_command(store, tmp_path, FLAGS, shrink, "blocks of")


def test_lists_are_those_of_the_best_rows(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(store, tmp_path / "run", epochs=6, lr=0.1)
    result = train(settings, watcher=terminal_watcher())
    assert re.search(r"val recall@5 \d\.\d{4}, val ndcg@5 \d\.\d{4}", "".join(capsys.readouterr()))
    validated = [line["val"]["recall@5"] for line in lines(settings.out) if "val" in line]
    assert result["metrics"]["val"]["recall@5"] == max(validated)
    for name in ("val", "test"):
        scores = recall_and_ndcg(store, embeddings(settings.out), name, 5)
        assert result["metrics"][name] == pytest.approx({"recall@5": scores[0], "ndcg@5": scores[1]})
    assert result["metrics"]["test"]["recall@5"] > 0.5


@pytest.mark.parametrize("power", [0.5, 0.0])
def test_norms_count_to_a_power_in_scores_and_lists(store: Path, tmp_path: Path, power: float) -> None:
    """Against all scores of the rows that the same training ends with, in float64."""
    kind: dict[str, Any] = {"loss": "softmax", "ratio": 16, "similarity": "cosine", "temperature": 0.3, "epochs": 1}
    dots, own = config(store, tmp_path / "dots", **kind), config(store, tmp_path / "own", norm_power=power, **kind)
    train(dots)
    result = train(own)
    rows = embeddings(dots.out).astype(np.float64)
    rows *= np.linalg.norm(rows, axis=1, keepdims=True) ** (power - 1)
    np.testing.assert_allclose(embeddings(own.out), rows, rtol=1e-5)
    for name in ("val", "test"):
        scores = recall_and_ndcg(store, rows, name, 5)
        assert result["metrics"][name] == pytest.approx({"recall@5": scores[0], "ndcg@5": scores[1]})
    assert [line["val"] for line in lines(own.out) if "val" in line] == [result["metrics"]["val"]]
    assert [line["loss"] for line in lines(own.out) if "loss" in line] == [x["loss"] for x in lines(dots.out) if "loss" in x]
    ooc.infer(own.out, store, tmp_path / "best.parquet", top=3)
    with ooc.open(store) as ds:
        source, _, target = next(RelationLinks(ds, None, relations=False).pieces())
    score = rows[:USERS] @ rows[USERS:].T
    score[source, target - USERS] = -np.inf
    listed = pq.read_table(tmp_path / "best.parquet")
    np.testing.assert_array_equal(listed["target"].to_numpy().reshape(USERS, 3), np.argsort(-score, axis=1)[:, :3])
    np.testing.assert_allclose(listed["score"].to_numpy().reshape(USERS, 3), -np.sort(-score, axis=1)[:, :3], rtol=1e-4)
    near = ooc.neighbors(own.out, store, [3], k=4, by="dot", node_type="item")
    score = rows[USERS:] @ rows[USERS + 3]
    score[3] = -np.inf
    np.testing.assert_array_equal(near.item[0], np.argsort(-score)[:4])


def test_norm_power_is_of_lightgcn_and_stays_what_it_is(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(store, tmp_path / "run", norm_power=0.5, epochs=1))
    with pytest.raises(ConfigError, match=r"was trained with norm_power = 0.5, not 1"):
        train(config(store, tmp_path / "run", epochs=2), resume=True)
    words = ["train", str(store), "--task", "link", "--norm-power", "0.5", "--out", str(tmp_path / "other")]
    assert main([*words, "--mode", "table", "--model", "mf"]) == 2
    assert "norm_power does not apply to mode table" in capsys.readouterr().err
    assert main([*words[:-4], "--norm-power", "1.5", "--mode", "lightgcn", "--out", str(tmp_path / "other")]) == 2
    assert "expected a number less than or equal to 1" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_rows_of_an_earlier_end_stay_whole_until_there_are_others(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(store, tmp_path / "run", epochs=1)
    train(settings)
    before, more = ooc.embed(settings.out, store, node_type="item")[:], settings.model_copy(update={"epochs": 4})

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(DiskRows, "sync", killed)  # behind what the end of the run has written
    with pytest.raises(Killed):
        train(more, resume=True)
    monkeypatch.undo()
    np.testing.assert_array_equal(ooc.embed(settings.out, store, node_type="item")[:], before)
    train(more, resume=True)
    assert (ooc.embed(settings.out, store, node_type="item")[:] != before).any()
    assert len(list(settings.out.glob("embeddings*"))) == 1


def test_what_does_not_fit_is_one_line(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="temperature does not apply to loss = bpr"):
        ooc.train(store=store, out=tmp_path / "run", mode="lightgcn", temperature=0.5)
    with pytest.raises(ConfigError, match=r"monitor = 'recall@7' is no score of eval_k: use one of recall@5, ndcg@5"):
        ooc.train(store=store, out=tmp_path / "run", mode="lightgcn", eval_k=[5], monitor="recall@7")
    with pytest.raises(ConfigError, match="eval_splits: 'dev' is no part of the edges: give train, val, test"):
        train(config(store, tmp_path / "run", eval_splits=["dev"]))
    with pytest.raises(ConfigError, match="train_split = 'dev', and val and test divide the edges at random: leave it out"):
        train(config(store, tmp_path / "run", val=0.1, train_split="dev"))
    with pytest.raises(ConfigError, match="patience needs edges to validate on"):
        train(config(store, tmp_path / "run", val=0.0, test=0.1, patience=2))
    little_memory(monkeypatch, 1000)
    with pytest.raises(BudgetError, match="a column of 70 rows and the links do not fit the memory: give"):
        train(config(store, tmp_path / "run"))
    assert not (tmp_path / "run").exists()

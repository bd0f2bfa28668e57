"""Runs of embedding tables: the formula of a step, the same bits in memory and from disk, killed and gone on."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import ooc
from ooc.config.tables import TableConfig
from ooc.loading.relation_links import RelationLinks, RelationSplit
from ooc.models.link_scores import make_scorer
from ooc.planning.table_plan import exchanges
from ooc.report.page import write_report
from ooc.runtime.keyed_random import Purpose, key, keyed_uniform
from ooc.runtime.memory_plan import TopologyBytes, divide
from ooc.stores.arrays.bucket_rows import BucketRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.pages import page_buffer
from ooc.stores.process import resident_bytes
from ooc.stores.sizes import parse_bytes
from ooc.training import checkpoint
from ooc.training.loop import plan, train
from ooc.training.summary import score_lines
from ooc.training.table_memory import TableMemory
from ooc.training.watchers import terminal_watcher
from tests.forked import Python
from tests.ooc.runs import InterruptAt, KillAt, Killed, curve, kill_at_random
from tests.ooc.tables import USERS, N, R, make_shop, make_triples, recall_and_ndcg, table_config

DISK: dict[str, Any] = {"buckets": 5, "resident": 2}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "links.ooc"
    make_triples(path)
    return path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has room for the buckets of a visit and one more."""
    monkeypatch.setattr(TableMemory, "room", property(lambda self: min(self.shape.buckets, self.resident + 1)))


def rows_of(out: Path) -> Any:
    """The table that the run's model has, with the optimizer's state, by bucket."""
    saved = torch.load(out / "model.pt", weights_only=True)["table"]["files"]
    rows = BucketRows.open(out / "table", {**saved, "kept": {}})
    found = []
    for bucket in range(rows.buckets):
        buffer = page_buffer(rows.bucket_bytes)
        rows.load(bucket, buffer)
        found.append(buffer.tobytes())
    rows.close()
    return found


def test_a_step_is_the_formula(store: Path, tmp_path: Path) -> None:
    """With one bucket, 1-vs-all and one batch an epoch, a step is Adagrad's on the softmax over all nodes, both ways."""
    settings = {"loss": "all", "ratio": 256, "batch_size": 10_000, "epochs": 4, "buckets": 1, "eval_splits": []}
    train(table_config(store, tmp_path / "run", **settings, eval_every=100, init=0.5, regularizer_weight=0.01))
    with Dataset.open(store) as ds:
        head, relation, tail = map(torch.from_numpy, RelationSplit(RelationLinks(ds, None, True), None).links("train"))
    torch.manual_seed(key(3, Purpose.INIT) >> 1)
    scorer = make_scorer("complex", 8, R)
    first = np.empty((N, 8), np.float32)
    keyed_uniform(np.uint64(key(3, Purpose.TABLE)), np.arange(N), np.float32(0.5), first)
    rows = torch.nn.Parameter(torch.from_numpy(first))
    optimizer, losses = torch.optim.Adagrad([rows, *scorer.parameters()], lr=0.1), []
    for _ in range(4):
        both = [(rows[head], tail, False), (rows[tail], head, True)]
        ways = [
            torch.nn.functional.cross_entropy(scorer.score_all(scorer.queries(known, relation, way), rows), true)
            for known, true, way in both
        ]
        relations = scorer.relation[relation]  # type: ignore[index]
        cubes = sum((each.view(-1, 2, 4).square().sum(1) ** 1.5).sum() for each in (rows[head], rows[tail], relations))
        loss: Any = sum(ways) / 2 + 0.01 * cubes / len(head)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    np.testing.assert_allclose([line["loss"] for line in lines if "step" in line], losses, rtol=1e-4)
    found = np.frombuffer(rows_of(tmp_path / "run")[0], np.float32).reshape(-1, 16)[:N]
    np.testing.assert_allclose(found[:, :8], rows.detach().numpy(), rtol=1e-2, atol=1e-4)


@pytest.mark.cases(2)
@pytest.mark.parametrize("model", ["mf", "distmult", "complex", "transe", "rotate", "simple"])
def test_every_model_learns(store: Path, tmp_path: Path, model: str) -> None:
    settings: dict[str, Any] = {"reciprocal": True, "relation_weight": 0.1} if model != "mf" else {"loss": "bpr"}
    settings |= {"loss": "adversarial", "margin": 6.0} if model in ("transe", "rotate") else {}
    found = train(table_config(store, tmp_path / "run", model=model, hidden=32, epochs=12, eval_every=6, **settings, **DISK))
    assert found["metrics"]["test"]["mrr"] > 0.06, "of constant scores it is 0.01"


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam"])
def test_memory_and_disk_give_the_same_bits(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    found = {}
    for room in (3, 4, 5):
        monkeypatch.setattr(TableMemory, "room", room)
        out = tmp_path / str(room)
        found[room] = train(table_config(store, out, optimizer=optimizer, checkpoint_every=1000, **DISK))
    assert curve(tmp_path / "3") == curve(tmp_path / "4") == curve(tmp_path / "5")
    assert rows_of(tmp_path / "3") == rows_of(tmp_path / "4") == rows_of(tmp_path / "5")
    assert found[3]["metrics"] == found[5]["metrics"]
    assert found[5]["table_bytes_read"] < found[4]["table_bytes_read"] < found[3]["table_bytes_read"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("room", [3, 4, 5])
def test_a_plan_says_what_the_run_reads_and_writes(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """By the same choices; checkpoints and the end write what is in memory besides."""
    monkeypatch.setattr(TableMemory, "room", room)
    unscored: dict[str, Any] = {"val": 0.0, "test": 0.0, "eval_splits": [], "checkpoint_every": 10_000}
    settings = table_config(store, tmp_path / "run", epochs=4, **unscored, **DISK)
    made = plan(settings)
    assert not settings.out.exists()
    found = train(settings)
    own = found["table"]
    assert (made.parts, made.trained, made.in_memory) == (own["buckets"], own["resident"], own["in_memory"])
    assert made.facts == {"swaps": own["swaps"], "least_swaps": own["least_swaps"]}
    epochs = exchanges(made.parts, made.trained, room, settings.seed, 4)
    assert (made.first, made.later) == (epochs[0], epochs[-1])
    ended = found["checkpoint_bytes_written"] // made.part_bytes
    assert ended <= 5 * room, "one an epoch, and the end"
    read, written = (sum(getattr(each, name) for each in epochs) * made.part_bytes for name in ("read", "written"))
    assert found["table_bytes_read"] == read
    assert written <= found["table_bytes_written"] <= written + found["checkpoint_bytes_written"]
    assert (read == 0) == (room == 5)
    assert found["edge_bytes_read"] >= 4 * made.link_bytes_read
    assert "in memory" in str(made)
    assert json.loads(json.dumps(made.asdict()))["resident_rows"] <= made.rows


def test_buckets_are_other_bits(store: Path, tmp_path: Path) -> None:
    for buckets in (1, 5):
        train(table_config(store, tmp_path / str(buckets), epochs=1, buckets=buckets))
    assert curve(tmp_path / "1") != curve(tmp_path / "5")


@pytest.mark.cases(1)
@pytest.mark.parametrize("every", [1, 7, 1000])
def test_a_killed_run_goes_on_to_the_bit(store: Path, tmp_path: Path, few: None, every: int) -> None:
    settings = {**DISK, "checkpoint_every": every, "lr_factor": 0.5, "lr_patience": 1}
    train(table_config(store, tmp_path / "whole", **settings))
    steps = len([line for line in curve(tmp_path / "whole").splitlines() if b'"step"' in line])
    config = table_config(store, tmp_path / "run", **settings)
    for at in (3, steps // 3, steps // 2, steps - 2):
        with pytest.raises(Killed):
            train(config, resume=(tmp_path / "run").exists(), watcher=KillAt(at))
    train(config, resume=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_of_an_earlier_version_keeps_how_far_its_learning_rate_had_fallen(store: Path, tmp_path: Path) -> None:
    """There it was among the table's own state, config.json had no schedule, and sorted edges had no checksums."""
    settings = {**DISK, "checkpoint_every": 7, "lr": 1e-6, "lr_factor": 0.5, "lr_patience": 1, "eval_every": 1, "epochs": 4}
    train(table_config(store, tmp_path / "whole", **settings))
    lines = [json.loads(line) for line in curve(tmp_path / "whole").splitlines()]
    ends = [number for number, line in enumerate(lines) if "val" in line]
    assert "lr" in lines[ends[-2]]
    config = table_config(store, tmp_path / "run", **settings)
    with pytest.raises(Killed):
        train(config, watcher=KillAt(lines[ends[-1] - 1]["step"] - 1))
    saved = checkpoint.load(config.out)
    assert saved is not None
    assert saved["state"]["lr_scale"] < 1
    saved["table"] |= {"lr_scale": saved["state"].pop("lr_scale"), "since_better": saved["state"].pop("lr_stale")}
    checkpoint.save(config.out, saved)
    given = json.loads((config.out / "config.json").read_text())
    for name in ("lr_schedule", "lr_warm_up", "lr_epochs", "momentum"):
        del given[name]
    (config.out / "config.json").write_text(json.dumps(given))
    (config.out / "edges" / "checksums.npy").unlink()
    train(config, resume=True)
    assert curve(config.out) == curve(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_keeps_a_checkpoint(store: Path, tmp_path: Path, few: None) -> None:
    train(table_config(store, tmp_path / "whole", **DISK))
    with pytest.raises(KeyboardInterrupt):
        train(table_config(store, tmp_path / "run", **DISK), watcher=InterruptAt(40))
    saved = checkpoint.load(tmp_path / "run")
    assert saved is not None
    assert saved["state"]["total_steps"] == 41
    train(table_config(store, tmp_path / "run", **DISK), resume=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_more_epochs_go_on_and_the_model_before_them_stays_until_there_is_another(
    store: Path, tmp_path: Path, few: None
) -> None:
    train(table_config(store, tmp_path / "whole", epochs=4, **DISK))
    train(table_config(store, tmp_path / "run", epochs=2, **DISK))
    before = rows_of(tmp_path / "run")
    with pytest.raises(Killed):
        train(table_config(store, tmp_path / "run", epochs=4, **DISK), resume=True, watcher=KillAt(190))
    assert rows_of(tmp_path / "run") == before
    train(table_config(store, tmp_path / "run", epochs=4, **DISK), resume=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


@pytest.mark.slow
def test_the_best_epochs_rows_are_scored(store: Path, tmp_path: Path, few: None) -> None:
    """A learning rate that is much too high ends with a worse model than the best one."""
    found = train(table_config(store, tmp_path / "run", hidden=32, epochs=5, lr=2.0, **DISK))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    scores = [line["val"]["mrr"] for line in lines if "val" in line]
    best = int(np.argmax(scores))
    assert found["metrics"]["val"]["mrr"] == max(scores)
    assert found["best_epoch"] == best < 4
    until = train(table_config(store, tmp_path / "until", hidden=32, epochs=best + 1, lr=2.0, **DISK))
    assert found["metrics"] == until["metrics"]
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "until")


@pytest.mark.slow
def test_little_disk_takes_more_checkpoints_and_the_same_bits(store: Path, tmp_path: Path, few: None) -> None:
    settings = {**DISK, "eval_every": 100, "eval_splits": [], "checkpoint_every": 1000}
    one = train(table_config(store, tmp_path / "whole", **settings))
    bucket = one["table"]["bucket_bytes"]
    two = train(table_config(store, tmp_path / "run", disk=f"{11 * bucket}", **settings))
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert (tmp_path / "run" / "table" / "slots.bin").stat().st_size <= 11 * bucket
    assert two["checkpoint_bytes_written"] > one["checkpoint_bytes_written"]
    with pytest.raises(ConfigError, match=r"disk = .* take .* at least: give more"):
        train(table_config(store, tmp_path / "none", disk=f"{10 * bucket}", **settings))
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="holds the table, its last checkpoint and the best model's rows"):
        train(table_config(store, tmp_path / "best", disk=f"{11 * bucket}", **DISK))


def test_automatic_buckets_are_kept(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = table_config(store, tmp_path / "run", epochs=1)
    train(config)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["buckets"] == 1
    monkeypatch.setattr("ooc.training.table_memory._divided", lambda *_: pytest.fail("it was chosen when the run began"))
    monkeypatch.undo()
    more = train(config.model_copy(update={"epochs": 2}), resume=True)
    assert more["config"]["buckets"] == 1
    with pytest.raises(ConfigError, match="buckets = 1, not 2"):
        train(config.model_copy(update={"epochs": 2, "buckets": 2}), resume=True)


def test_what_does_not_fit_is_refused(store: Path, tmp_path: Path) -> None:
    def refused(match: str, **settings: Any) -> None:
        with pytest.raises((ConfigError, BudgetError, ValueError), match=match):
            train(table_config(store, tmp_path / "run", **settings))
        assert not (tmp_path / "run").exists()

    refused("hidden = 7: complex needs an even number: give 6 or 8", hidden=7)
    refused("hidden = 1: rotate needs an even number: give 2", model="rotate", hidden=1)
    refused("loss = all scores all nodes", loss="all", ratio=256, buckets=4)
    refused("ratio does not apply to loss = all", loss="all")
    refused("unknown in mode table", model="sage")
    refused("model lightgcn is trained by mode lightgcn: leave the model out, and give that mode", model="lightgcn")
    refused("distance does not apply to model complex", distance="l1")
    refused("dropout does not apply", dropout=0.1)
    refused("resident = 1", buckets=3, resident=1)
    refused("is more than the 3 buckets", buckets=3, resident=4)
    refused("weight_decay does not apply to model mf", model="mf", weight_decay=0.1)
    refused("eval_splits: 'other' is no part of the edges", eval_splits=["other"])
    refused("val_split: 'dev' is no part of the edges", val_split="dev")
    refused("train_split = 'dev', and val and test divide the edges at random: leave it out", val=0.1, train_split="dev")
    refused("edge_type applies to heterogeneous", edge_type="a:b:c")
    with pytest.raises(ConfigError, match="nproc does not apply to mode table"):
        plan(table_config(store, tmp_path / "run"), nproc=2)


def test_too_little_memory_says_how_much(store: Path, tmp_path: Path) -> None:
    """300 rows of 2**16 columns with their state take 157 MB."""
    memory = resident_bytes()[0] + 500_000_000
    with pytest.raises(BudgetError, match=r"of memory leaves .* give at least") as caught:
        train(table_config(store, tmp_path / "run", hidden=2**16, buckets=1, memory=str(memory)))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_memory_that_is_advised_for_buckets_is_enough_from_wherever_it_was_asked() -> None:
    """Of a graph whose mapped bytes grow with the memory."""
    config = table_config(Path("s.ooc"), Path("run"), hidden=256, buckets=16, resident=4)

    def divided(memory: int) -> TableMemory:
        plan = divide(memory, baseline=250_000_000, topology=TopologyBytes(10_000_000, 10**9))
        return TableMemory.of(config, plan, rows=200_000, edges=400_000, scored=0, candidates=0)

    def advised(memory: int, match: str) -> int:
        with pytest.raises(BudgetError, match=match) as refused:
            divided(memory)
        return parse_bytes(re.findall(r"at least (.*), or", str(refused.value))[0])

    small = advised(720_000_000, "a batch and the edges read ahead take")
    assert small == advised(750_000_000, "a batch and the edges read ahead take")
    enough = advised(small, r"give at least .*, or a larger `buckets`$")
    assert enough == advised(900_000_000, "or a larger `buckets`")
    divided(enough)
    advised(int(0.97 * enough), "or a larger `buckets`")


FEW = """
import sys
from ooc.cli.main import main
from ooc.training.table_memory import TableMemory
from ooc.training.watchers import terminal_watcher
TableMemory.room = property(lambda self: min(self.shape.buckets, self.resident + 1))
sys.exit(main({words!r}))
"""
FLAGS = "--task link --mode table --model complex --hidden 64 --batch-size 500 --ratio 32 --epochs 2 --eval-every 1 --threads 1"
FLAGS += " --seed 3 --buckets 6 --resident 2 --checkpoint-every 5"


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """Buckets of 2 MB: many kills are in the middle of an exchange (`tools.bench.kills.tables` counts them)."""
    store = tmp_path / "links.ooc"
    make_triples(store, nodes=20_000, edges=12_000)

    def begin(out: Path) -> Python:
        words = ["train", str(store), "--out", str(out), *FLAGS.split(), *(["--resume"] if out.exists() else [])]
        return Python("-c", FEW.format(words=words))

    def same(out: Path) -> None:
        assert curve(out) == curve(tmp_path / "whole")
        assert rows_of(out) == rows_of(tmp_path / "whole")

    kill_at_random(begin, tmp_path, same, earliest=0.2)


@pytest.mark.slow
@pytest.mark.alone
def test_a_table_larger_than_memory_keeps_to_it(tmp_path: Path) -> None:
    """100,000 rows of 1,000 columns with Adagrad's state are 800 MB, and the process has less for them."""
    store, memory = tmp_path / "links.ooc", 1_150_000_000
    make_triples(store, nodes=100_000, edges=200_000)
    flags = ["--task", "link", "--mode", "table", "--hidden", "1000", "--batch-size", "2000", "--ratio", "32", "--epochs", "2"]
    flags += ["--eval-candidates", "1000", "--eval-every", "2", "--eval-splits", "", "--threads", "1"]
    words = ["-m", "ooc.cli", "train", str(store), *flags]
    done = Python(*words, "--out", str(tmp_path / "disk"), "--memory", str(memory)).wait()
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "disk" / "summary.json").read_text())
    table = found["table"]
    assert table["in_memory"] < table["buckets"]
    assert found["table_bytes_read"] > 0
    assert found["peak_rss_bytes"] <= memory
    own = ["--buckets", str(table["buckets"]), "--resident", str(table["resident"])]
    assert Python(*words, "--out", str(tmp_path / "memory"), *own).wait().returncode == 0
    other = json.loads((tmp_path / "memory" / "summary.json").read_text())
    assert other["table"]["in_memory"] == table["buckets"]
    assert other["table_bytes_read"] == 0
    assert curve(tmp_path / "disk") == curve(tmp_path / "memory")


@pytest.mark.slow
def test_users_and_items_and_a_report(tmp_path: Path, few: None) -> None:
    """Each user likes the items of its group: only items are ranked, so 1 of 10 is right by chance."""
    rng, data = np.random.default_rng(1), HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 200, 60
    user = rng.integers(0, 200, 3000)
    item = (user % 6) * 10 + rng.integers(0, 10, 3000)
    data["user", "likes", "item"].edge_index = torch.from_numpy(np.stack([user, item]))
    ooc.from_data(data, tmp_path / "shop.ooc").close()
    settings: dict[str, Any] = {"model": "mf", "hidden": 16, "loss": "bpr", "epochs": 15, "val": 0.1, "test": 0.1}
    found = train(table_config(tmp_path / "shop.ooc", tmp_path / "run", **settings, **DISK))
    assert found["metrics"]["test"]["hits@10"] > 0.8, "of 60 items a sixth would be 0.17"
    assert "hits@10" in write_report(tmp_path / "run").read_text()


@pytest.mark.cases(1)
@pytest.mark.parametrize("buckets", [{"buckets": 1}, DISK])
def test_lists_of_matrix_factorization_are_those_of_sorted_scores(tmp_path: Path, few: None, buckets: dict[str, int]) -> None:
    """By the rows of the epoch that NDCG chose."""
    store, run = tmp_path / "shop.ooc", tmp_path / "run"
    make_shop(store)
    settings: dict[str, Any] = {"model": "mf", "loss": "bpr", "epochs": 6, "eval_k": [5], "monitor": "ndcg@5", "patience": 2}
    result = train(table_config(store, run, lr=0.5, **settings, **buckets), watcher=terminal_watcher())
    rows = np.concatenate([ooc.embed(run, store, node_type=name)[:] for name in ("user", "item")])
    for name in ("val", "test"):
        recall, ndcg = recall_and_ndcg(store, rows, name, 5)
        found = {"recall@5": recall, "ndcg@5": ndcg}
        assert {key: result["metrics"][name][key] for key in found} == pytest.approx(found)
        assert result["metrics"][name]["mrr"] > 0
    lines = [json.loads(line)["val"]["ndcg@5"] for line in curve(run).splitlines() if b'"val"' in line]
    assert result["metrics"]["val"]["ndcg@5"] == max(lines)
    assert result["best_epoch"] == lines.index(max(lines))
    assert ooc.infer(run, store, tmp_path / "best.parquet", top=3).rows == USERS


def test_a_run_says_that_it_has_ended_for_want_of_improvement(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"lr": 1e-9, "epochs": 9, "patience": 2}
    assert train(table_config(store, tmp_path / "run", **settings), watcher=terminal_watcher())["epochs"] == 3
    assert "mrr on validation did not improve in 2 evaluations: training ends" in capsys.readouterr().err


def test_labels_that_are_no_classes_are_said_to_be_no_relations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = np.random.default_rng(0).integers(0, 40, (2, 300))
    data = Data(num_nodes=40, edge_index=torch.from_numpy(ends), edge_y=torch.rand(300))
    ooc.from_data(data, tmp_path / "links.ooc").close()
    train(table_config(tmp_path / "links.ooc", tmp_path / "run", epochs=1), watcher=terminal_watcher())
    assert "the edges' labels are no relations" in capsys.readouterr().err


def test_lists_are_of_matrix_factorization_alone(store: Path, tmp_path: Path) -> None:
    for settings, words in (
        ({"eval_k": [5]}, "eval_k does not apply to model complex"),
        ({"monitor": "recall@20"}, "monitor = 'recall@20' is no score of this run: use one of mrr, hits@1, hits@3, hits@10"),
        ({"model": "mf", "eval_k": [5], "eval_candidates": 9}, "eval_k ranks all destinations, and eval_candidates a sample"),
        ({"model": "mf", "eval_k": [5], "monitor": "ndcg@20"}, "use one of mrr, hits@1, hits@3, hits@10, recall@5, ndcg@5"),
    ):
        with pytest.raises(ValueError, match=words):
            table_config(store, tmp_path / "run", **settings)
    assert table_config(store, tmp_path / "run", model="mf").ranked_k == [20]
    assert table_config(store, tmp_path / "run", model="mf", eval_k="").ranked_k == []
    assert table_config(store, tmp_path / "run", model="mf", eval_candidates=9).ranked_k == []


def test_settings_are_a_config_file(tmp_path: Path) -> None:
    config = TableConfig(store=Path("a.ooc"), out=Path("run"), model="rotate", distance="l1", loss="adversarial", margin=9)
    assert TableConfig(**json.loads(config.model_dump_json())) == config


def test_scores_among_a_sample_are_said_to_be_estimates(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = table_config(store, tmp_path / "sampled", epochs=1, eval_candidates=20)
    found = train(sampled, watcher=terminal_watcher())
    assert "scores are estimates: ranks among 20 random candidates, not among all" in "".join(capsys.readouterr())
    said = "estimates: ranked among 20 random candidates, not all"
    assert score_lines(found)[-1] == said
    assert said in write_report(sampled.out).read_text()
    exact = train(table_config(store, tmp_path / "exact", epochs=1))
    assert "negatives" not in exact
    assert found["metrics"]["test"]["mrr"] > exact["metrics"]["test"]["mrr"]
    whole = train(table_config(store, tmp_path / "whole", epochs=1, eval_candidates=N))
    assert whole["metrics"] == exact["metrics"]
    assert "negatives" not in whole

"""Several processes train as one: the same losses and scores as one process with batches as large as theirs together."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.training.checkpoint import read_metrics
from tests.conftest import MakeStore
from tests.ooc.ranks import run_ranks

SMALL = ["--hidden", "8", "--epochs", "2", "--threads", "1", "--seed", "5"]


def trained(count: int, store: Path, out: Path, batch_size: int, *flags: str) -> tuple[list[float], dict[str, Any]]:
    """(losses of the steps, the summary) of so many processes."""
    plan = ["--no-plan"] if "graph" not in flags else []
    words: list[str | Path] = ["-m", "ooc", "train", store, "--out", out, *SMALL, *plan, *flags]
    done = run_ranks(count, *words, "--batch-size", str(batch_size // count))
    assert [each.returncode for each in done] == [0] * count, [each.stderr for each in done]
    assert all(each.stdout == "" == each.stderr for each in done[1:]), "rank 0 speaks"
    steps, _ = read_metrics(out)
    return [line["loss"] for line in steps], json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_as_one(make_store: MakeStore, tmp_path: Path, count: int) -> None:
    store = make_store(num_nodes=203, num_edges=1500)
    flags = ["--fanout", "4,4"]
    expected, one = trained(1, store, tmp_path / "one", 16, *flags)
    losses, several = trained(count, store, tmp_path / "several", 16, *flags)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert several["metrics"] == {split: pytest.approx(scores, abs=1e-5) for split, scores in one["metrics"].items()}
    assert several["rows_asked"] >= one["rows_asked"]
    assert several["world_size"] == count
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several", "test.ooc"]


def case(kind: str, tmp_path: Path, make_store: MakeStore) -> tuple[Path, list[str]]:
    """(a store, the flags of a kind of run on it)."""
    if kind == "graphs":
        graphs = []
        generator = torch.Generator().manual_seed(0)
        for _ in range(61):
            nodes = int(torch.randint(2, 9, (1,), generator=generator))
            x, edges = torch.randn(nodes, 4, generator=generator), torch.randint(0, nodes, (2, 12), generator=generator)
            graphs.append(Data(x=x, edge_index=edges, y=(x.mean() > 0).long().view(1)))
        path = tmp_path / "graphs.ooc"
        ooc.from_data(graphs, path, random_split=(0.6, 0.2, 0.2)).close()
        return path, ["--task", "graph", "--model", "gin"]
    if kind == "regression":
        y = np.random.default_rng(1).standard_normal((203, 2)).astype(np.float32)
        y[::7, 1] = np.nan
        return make_store(num_nodes=203, num_edges=1500, y=y, task="regression", num_classes=2), ["--fanout", "4,4"]
    store = make_store(num_nodes=203, num_edges=1500, weight=True if kind == "gcn" else None)
    return store, {
        "gcn": [
            "--model",
            "gcn",
            "--fanout",
            "4,4",
            "--norm",
            "layer",
            "--accumulate",
            "2",
            "--activation-checkpointing",
            "layers",
        ],
        "labor": [
            "--fanout",
            "4,4",
            "--sampler",
            "labor",
            "--layer-dependency",
            "--class-weights",
            "balanced",
            "--optimizer",
            "sgd",
        ],
        "exact": ["--fanout", "4,4", "--evaluate", "layerwise", "--grad-clip", "0.5"],
    }[kind]


@pytest.mark.parametrize("kind", ["gcn", *(pytest.param(each, marks=pytest.mark.slow) for each in ("graphs", "labor"))])
def test_runs_of_other_kinds_do_so_too(make_store: MakeStore, tmp_path: Path, kind: str) -> None:
    store, flags = case(kind, tmp_path, make_store)
    count, size = (3, 18) if kind == "graphs" else (2, 16)
    expected, one = trained(1, store, tmp_path / "one", size, *flags)
    losses, found = trained(count, store, tmp_path / "several", size, *flags)
    assert losses == pytest.approx(expected, abs=2e-6)
    assert found["metrics"] == {split: pytest.approx(scores, abs=1e-4) for split, scores in one["metrics"].items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["regression", "exact"])
def test_scores_are_those_of_all_ranks(make_store: MakeStore, tmp_path: Path, kind: str) -> None:
    store, flags = case(kind, tmp_path, make_store)
    expected, one = trained(1, store, tmp_path / "one", 16, *flags)
    losses, found = trained(2, store, tmp_path / "several", 16, *flags)
    assert losses == pytest.approx(expected, abs=2e-6)
    assert found["metrics"] == {split: pytest.approx(scores, abs=1e-4) for split, scores in one["metrics"].items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--mode", "cluster", "--parts", "7"],
        ["--mode", "saint", "--roots", "20", "--saint-coverage", "5"],
        ["--task", "link", "--fanout", "4,4", "--eval-k", "5", "--batch-size", "100"],
        ["--task", "link", "--loss", "softmax", "--fanout", "4,4", "--decoder", "mlp", "--batch-size", "100"],
    ],
    ids=["cluster", "saint", "link", "softmax"],
)
def test_ranks_whose_batches_are_apart_end_together(make_store: MakeStore, tmp_path: Path, flags: list[str]) -> None:
    """Uneven ends too: of 7 parts, the last step has one for three processes."""
    store, out = make_store(num_nodes=203, num_edges=1500), tmp_path / "run"
    done = run_ranks(3, "-m", "ooc", "train", store, "--out", out, *SMALL, *flags)
    assert [each.returncode for each in done] == [0] * 3, [each.stderr for each in done]
    steps, epochs = read_metrics(out)
    assert [line["step"] for line in steps] == list(range(len(steps)))
    assert len(epochs) == 2
    assert all(np.isfinite(line["loss"]) for line in steps)
    assert json.loads((out / "summary.json").read_text())["metrics"]["test"]


@pytest.mark.slow
def test_ranks_pack_their_batches_each(make_store: MakeStore, tmp_path: Path) -> None:
    """As one process without a pack; of features so small a scan would not pay, so it is said that it does."""
    store, flags = make_store(num_nodes=2003, num_edges=15_000), ["--fanout", "4,4"]
    expected, one = trained(1, store, tmp_path / "one", 64, *flags)
    settings = {"store": str(store), "out": str(tmp_path / "several"), "fanout": [4, 4], "batch_size": 32, "pack": "10MB"}
    settings |= {"hidden": 8, "epochs": 2, "threads": 1, "seed": 5, "plan": False}
    code = f"""
import ooc.loading.choose_read_strategy as choose
choose.scan_pays = lambda rows, pool: True
import ooc
ooc.train(**{settings!r})
"""
    done = run_ranks(2, "-c", code)
    assert [each.returncode for each in done] == [0, 0], done
    steps, _ = read_metrics(tmp_path / "several")
    assert [line["loss"] for line in steps] == pytest.approx(expected, abs=1e-6)
    summary = json.loads((tmp_path / "several" / "summary.json").read_text())
    assert summary["packed_bytes_written"] > 0
    assert summary["metrics"] == {split: pytest.approx(scores, abs=1e-5) for split, scores in one["metrics"].items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several", "test.ooc"]


def test_a_process_group_of_a_script_is_used_and_left(make_store: MakeStore, tmp_path: Path) -> None:
    code = f"""
import ooc, torch
from torch import distributed
distributed.init_process_group("gloo")
found = ooc.train(store={str(make_store())!r}, out={str(tmp_path / "run")!r}, fanout=[3, 3], epochs=1, threads=1, hidden=8)
values = [None, None]
distributed.all_gather_object(values, found["metrics"])
assert values[0] == values[1] and distributed.is_initialized()
assert found["config"]["out"] == {str(tmp_path / "run")!r}
"""
    done = run_ranks(2, "-c", code)
    assert [each.returncode for each in done] == [0, 0], done

"""Plans of runs on heterogeneous stores: what they say is read, written and taken is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.cli.main import main
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.planning import run_profile
from ooc.planning.measure import batches_of, lengths_in
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.build import write_hetero_store
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from ooc.training import batch_mode, compare_modes, loop
from tests.ooc.runs import configure, curve

COUNTS = {"paper": 1500, "author": 900, "tag": 600}
WRITES, WRITTEN, TAGGED, CITES = (
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
    ("tag", "of", "paper"),
    ("paper", "cites", "paper"),
)
EDGES = {WRITES: 4000, WRITTEN: 4000, TAGGED: 3000, CITES: 5000}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of two lengths; tags have none. Authorships have features of their own."""
    return write(tmp_path_factory.mktemp("plans") / "papers.ooc", {"paper": 48, "author": 20})


def write(path: Path, widths: dict[str, int]) -> Path:
    rng = np.random.default_rng(0)
    nodes: dict[str, dict[str, Any]] = {name: {"num_nodes": count} for name, count in COUNTS.items()}
    for name, width in widths.items():
        nodes[name]["x"] = rng.standard_normal((COUNTS[name], width), np.float32)
    split = np.split(rng.permutation(COUNTS["paper"]), [400, 500, 700])
    nodes["paper"] |= {"y": rng.integers(0, 3, COUNTS["paper"]), "task": "multiclass", "num_classes": 3}
    nodes["paper"] |= {"splits": dict(zip(("train", "val", "test"), map(np.sort, split[:3]), strict=True))}
    graphs = {
        key: Graph.from_edges(
            rng.integers(0, COUNTS[key[0]], count),
            rng.integers(0, COUNTS[key[2]], count),
            num_nodes=COUNTS[key[2]],
            **({} if key[0] == key[2] else {"num_sources": COUNTS[key[0]]}),
        )
        for key, count in EDGES.items()
    }
    arrays = {WRITES: {"edge_attr": rng.standard_normal((EDGES[WRITES], 4), np.float32)}}
    return write_hetero_store(path, nodes, graphs, edge_arrays=arrays)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles take a moment."""
    monkeypatch.setattr(batch_mode, "TRAIN_SECONDS", 0.1)
    for place, name in ((loop, "PLAN_SECONDS"), (compare_modes, "PLAN_SECONDS"), (compare_modes, "COMPARE_SECONDS")):
        monkeypatch.setattr(place, name, 0.1)


def settings(**more: Any) -> dict[str, Any]:
    return {"model": "rsage", "batch_size": 64, "epochs": 1, "plan": True, **more}


@pytest.mark.parametrize("tables", ["disk", pytest.param("ram", marks=pytest.mark.slow)])
def test_what_a_run_reads_and_writes_is_predicted(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: str
) -> None:
    """Features in superbatches, and embedding tables in RAM, or read and written by each batch."""
    if tables == "disk":
        monkeypatch.setattr(MemoryPlan, "table_rows", property(lambda self: 2048))
    summary = ooc.train(configure(store, tmp_path / "run", **settings(eval_splits=["test"])))
    predicted, actual = summary["plan"]["predicted"], summary["plan"]["actual"]
    for name in ("bytes_read", "rows_read", "rows_asked", "hit_rate"):
        assert predicted[name] == actual[name] > 0, name
    assert predicted["read_amplification"] is actual["read_amplification"] is None, "rows of authors are shorter"
    assert set(predicted["stages"]) == set(actual["stages"])
    assert predicted["peak_rss_bytes"] == pytest.approx(actual["peak_rss_bytes"], rel=0.15)
    if tables == "disk":
        assert predicted["history_bytes_read"] == pytest.approx(actual["history_bytes_read"], rel=0.05)
        assert predicted["history_bytes_written"] == pytest.approx(actual["history_bytes_written"], rel=0.02)
    else:
        assert predicted["history_bytes_read"] == actual["history_bytes_read"] == 0
    assert predicted["history_bytes_written"] > 0


def test_what_shared_scans_read_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the rows of all types together, and make the means of each edge type."""
    store = write(tmp_path / "papers.ooc", {"paper": 32, "author": 32})
    monkeypatch.setattr("ooc.loading.choose_read_strategy.scan_pays", lambda rows, most: True)
    summary = ooc.train(configure(store, tmp_path / "run", **settings(eval_splits=["test"], hidden=64)))
    predicted, actual = summary["plan"]["predicted"], summary["plan"]["actual"]
    for name in ("bytes_read", "rows_read", "rows_asked"):
        assert predicted[name] == actual[name] > 0, name
    assert set(predicted["stages"]) == set(actual["stages"])
    assert "sum" in predicted["stages"]


def test_training_is_the_same_with_and_without_a_plan(store: Path, tmp_path: Path) -> None:
    for name, planned in (("a", True), ("b", False)):
        ooc.train(configure(store, tmp_path / name, **settings(plan=planned, dropout=0.5, max_steps=5)))
    assert curve(tmp_path / "a") == curve(tmp_path / "b")


def test_a_plan_leaves_nothing_behind_and_names_the_tables(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it make the tables, which may be larger than the disk that the run's directory is not on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ooc.history.embedding_table.EmbeddingTable.open", None)
    flags = [str(store), "--model", "rsage", "--fanout", "3,3", "--hidden", "8", "--batch-size", "64", "--epochs", "1"]
    assert main(["plan", *flags, "--mode", "sampled"]) == 0
    printed = capsys.readouterr().out
    assert "embedding tables written" in printed
    assert "features are read: engine " in printed, "of both types alike"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_a_mode_the_others_say_why_they_are_not_compared(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [str(store), "--model", "rsage", "--fanout", "3,3", "--hidden", "8", "--batch-size", "64", "--epochs", "1"]
    assert main(["plan", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choice"]["recommended"] == "sampled"
    others = [each["fix"] for each in found["choice"]["candidates"] if each["mode"] != "sampled"]
    assert len(others) == 3
    assert all("trains on homogeneous graphs" in fix for fix in others)


def test_rows_of_edges_that_batches_read_by_themselves_are_counted(store: Path) -> None:
    with Dataset.open(store) as ds:
        loader = NeighborLoader(ds, [3, 3], ("paper", "train"), 64, seed=0)
        drawn = list(batches_of(loader.strategy.apart(), 0, len(loader)))
        alone = [run_profile._read_alone(loader.strategy.stages.load, batch) for batch in drawn]
        for _ in loader:
            pass
        assert sum(alone) == loader.topology_bytes_read > 0


def test_rows_of_several_types_are_planned_as_each_type_reads_them(store: Path) -> None:
    with Dataset.open(store) as ds:
        joined, rng = ds.joined_rows("x"), np.random.default_rng(1)
        ids = np.sort(rng.choice(joined.shape[0], 300, replace=False))
        out = np.empty((len(ids), *joined.shape[1:]), joined.dtype)
        assert int(lengths_in(joined)(ids).sum()) == joined.read(ids, out)
        assert len(lengths_in(joined)(ids[:0])) == 0

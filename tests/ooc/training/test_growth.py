"""Training on a store that grew: as on one that was ingested whole, to the bit; readers that follow."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import ooc
from ooc.config.nodes import FullConfig, TrainConfig
from ooc.history.history import NEVER
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.ingest import IngestSpec, ingest
from ooc.training.loop import train
from ooc.training.loop import train as train_whole
from ooc.training.open_run import open_run
from ooc.training.watchers import Watchers
from tests.ooc.runs import SMALL, KillAt, Killed, configure, curve, tight

N, E, NEW_N, NEW_E = 200, 1500, 20, 100
NODES: dict[str, Any] = {"label": "y", "split": "split", "x_cols": "f*"}


def tables(folder: Path) -> dict[str, str]:
    """Parquet files of the first edges and nodes, the later ones, and all."""
    rng = np.random.default_rng(0)
    every = np.concatenate([rng.integers(0, N, (2, E)), rng.integers(0, N + NEW_N, (2, NEW_E))], axis=1)
    ids = np.arange(N + NEW_N)
    described: dict[str, Any] = {
        "id": ids,
        "y": rng.integers(0, 3, len(ids)),
        "split": np.array(["train", "val", "test"])[ids % 3],
    }
    described |= {f"f{j}": column for j, column in enumerate(rng.standard_normal((16, len(ids)), np.float32))}
    edges, nodes = pa.table({"src": every[0], "dst": every[1]}), pa.table(described)
    made = {}
    for name, edge_part, node_part in (
        ("base", edges[:E], nodes[:N]),
        ("new", edges[E:], nodes[N:]),
        ("all", edges, nodes),
    ):
        for kind, part in (("edges", edge_part), ("nodes", node_part)):
            made[f"{name}-{kind}"] = str(folder / f"{name}-{kind}.parquet")
            pq.write_table(part, made[f"{name}-{kind}"])
    return made


def given(files: dict[str, str], name: str) -> dict[str, Any]:
    return {"edges": files[f"{name}-edges"], "nodes": files[f"{name}-nodes"], **NODES}


MODES: dict[str, dict[str, Any]] = {
    "sums": {},
    "windows": {"model": "gat", "heads": 2},
    "histories": {"mode": "history", "parts": 5, "layers": 2},
    "layer by layer": {"evaluate": "layerwise"},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODES)
def test_a_model_trained_after_growth_is_one_trained_on_everything(tmp_path: Path, name: str) -> None:
    files, settings = tables(tmp_path), SMALL | MODES[name] | {"memory": tight()}
    if settings.get("mode") == "history":
        del settings["fanout"], settings["batch_size"]
    for store in ("grown", "whole"):
        ingest(IngestSpec(out=tmp_path / f"{store}.ooc", **given(files, "base" if store == "grown" else "all")))
    append(AppendSpec(out=tmp_path / "grown.ooc", **given(files, "new")))
    runs = {"whole": "whole.ooc", "appended": "grown.ooc", "compacted": "grown.ooc"}
    found = {}
    for run, store in runs.items():
        if run == "compacted":
            compact(tmp_path / store)
        config = TrainConfig(store=tmp_path / store, out=tmp_path / run, **settings)
        found[run] = train(config)["metrics"], curve(config.out), torch.load(config.out / "model.pt")["model"]
    for run in ("appended", "compacted"):
        assert found[run][:2] == found["whole"][:2]
        assert all(torch.equal(each, found["whole"][2][key]) for key, each in found[run][2].items())


def test_a_run_is_resumed_on_a_store_that_grew_only_when_asked(tmp_path: Path) -> None:
    files = tables(tmp_path)
    store = ingest(IngestSpec(out=tmp_path / "s.ooc", **given(files, "base"))).path
    config = configure(store, tmp_path / "run", checkpoint_every=2, batch_size=30)
    with pytest.raises(Killed):
        train(config, watcher=KillAt(2))
    append(AppendSpec(out=store, **given(files, "new")))
    with pytest.raises(ConfigError, match=r"cannot resume .* has grown since: `grown=True` goes on"):
        train(config, resume=True)
    train(config, resume=True, grown=True)
    assert [line["epoch"] for line in lines(config.out) if "train_loss" in line] == [1, 2]
    other = ingest(IngestSpec(out=tmp_path / "o.ooc", **given(files, "all"))).path
    with pytest.raises(ConfigError, match=r"cannot resume .* another store"):
        train(configure(other, config.out, checkpoint_every=2, batch_size=30), resume=True, grown=True)


@pytest.mark.slow
def test_a_run_on_the_whole_graph_goes_on_where_that_grew(tmp_path: Path) -> None:
    files, store = tables(tmp_path), tmp_path / "store.ooc"
    ingest(IngestSpec(out=store, **given(files, "base")))
    settings: dict[str, Any] = {"store": store, "hidden": 8, "layers": 2, "placement": "disk", "threads": 1, "plan": True}
    train_whole(FullConfig(out=tmp_path / "run", epochs=2, **settings))
    append(AppendSpec(out=store, **given(files, "new")))
    train_whole(FullConfig(out=tmp_path / "run", epochs=3, **settings), resume=True, grown=True)
    plan = json.loads((tmp_path / "run" / "plan.json").read_bytes())
    with Dataset.open(store) as ds:
        assert plan["sizes"]["x"] == ds.num_nodes * ds.stored("x").row_bytes
        assert plan["asked"]["store"] == ds.fingerprint


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_when_appends_were_folded_into_the_arrays(tmp_path: Path) -> None:
    files = tables(tmp_path)
    store = ingest(IngestSpec(out=tmp_path / "s.ooc", **given(files, "base"))).path
    append(AppendSpec(out=store, **given(files, "new")))
    whole, cut = (configure(store, tmp_path / name, checkpoint_every=2, batch_size=30) for name in ("whole", "cut"))
    train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(4))
    compact(store)
    train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)


@pytest.mark.cases(1)
@pytest.mark.parametrize("lag", [0, 2])
def test_histories_of_touched_nodes_are_as_if_never_written(tmp_path: Path, lag: int) -> None:
    """Those of others stand; of new nodes there are none."""
    files = tables(tmp_path)
    store = ingest(IngestSpec(out=tmp_path / "s.ooc", **given(files, "base"))).path
    settings: dict[str, Any] = {"mode": "history", "parts": 5, "layers": 3, "hidden": 8, "history_lag": lag}
    settings |= {"seed": 5, "threads": 1, "plan": False, "epochs": 4, "checkpoint_every": 1}
    config = TrainConfig(store=store, out=tmp_path / "run", **settings)
    with pytest.raises(Killed):
        train(config, watcher=KillAt(12))
    with open_run(config, True, Watchers([])) as run:
        assert run.mode.halo is not None
        assert run.mode.halo.history is not None
        before = run.mode.halo.history.fetch(run.mode.halo.history.next_step, np.arange(N))
    append(AppendSpec(out=store, **given(files, "new")))
    with ooc.open(store) as ds:
        touched = ds.graph.degree(np.arange(N)) != np.diff(np.asarray(old_indptr(files)))
    for _ in range(2):  # killed once it had begun to
        with open_run(config, True, Watchers([]), grown=True) as run:
            assert run.state.epoch == 3
            assert run.mode.halo is not None
            assert run.mode.halo.history is not None
            after = run.mode.halo.history.fetch(run.mode.halo.history.next_step, np.arange(N + NEW_N))
        written = before.steps != NEVER
        assert (after.steps[N:] == NEVER).all()
        assert (after.steps[:N][touched] == NEVER).all()
        np.testing.assert_array_equal(after.steps[:N][~touched], before.steps[~touched])
        assert (written & touched).any()
        assert (written & ~touched).any()
        for old, new in zip(before.rows, after.rows, strict=True):
            np.testing.assert_array_equal(new[:N][~touched], old[~touched])
            assert not new[N:].any()
            assert not new[:N][touched].any()
    train(config, resume=True, grown=True)
    assert [line["epoch"] for line in lines(config.out) if "train_loss" in line] == [0, 1, 3]
    train(config, resume=True)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in curve(out).splitlines()]


def old_indptr(files: dict[str, str]) -> np.ndarray:
    """Of the first edges alone."""
    dst = pq.read_table(files["base-edges"])["dst"].to_numpy()
    return np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=N))])


def test_a_reader_that_follows_trains_the_next_epoch_on_what_was_appended(tmp_path: Path) -> None:
    files = tables(tmp_path)
    store = ingest(IngestSpec(out=tmp_path / "s.ooc", **given(files, "base"))).path
    seen, ds = [], ooc.open(store)
    for epoch in range(3):
        if epoch == 1:
            append(AppendSpec(out=store, **given(files, "new")))
        newer = ds.follow()
        if newer is not ds:
            ds.close()
        ds = newer
        loader = ooc.NeighborLoader(ds, num_neighbors=[3], input_nodes="train", batch_size=32)
        seen.append(sum(batch.batch_size for batch in loader))
    ds.close()
    assert seen == [(N + 2) // 3, (N + NEW_N + 2) // 3, (N + NEW_N + 2) // 3]

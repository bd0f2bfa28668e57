"""Runs of tables go on when the store has grown: rows as they are, new nodes from their initial rows."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.config.base import RunConfig
from ooc.config.lightgcn import LightGCNConfig
from ooc.config.tables import TableConfig
from ooc.runtime.keyed_random import Purpose, key, keyed_uniform
from ooc.stores.errors import ConfigError
from ooc.stores.io.pages import page_buffer
from ooc.training.loop import train
from ooc.training.open_run import open_run
from ooc.training.watchers import Watchers, terminal_watcher
from tests.ooc.runs import KillAt, Killed, curve

N, NEW, WIDTH = 150, 40, 4
SMALL: dict[str, Any] = {"hidden": WIDTH, "threads": 1, "val": 0.1, "test": 0.1, "init": 0.2}
KINDS = [
    {"mode": "table", "model": "complex", "buckets": 1, "ratio": 8, "batch_size": 64, "reciprocal": True},
    {"mode": "table", "model": "mf", "buckets": 3, "resident": 2, "ratio": 8, "batch_size": 64, "optimizer": "adam"},
    {"mode": "lightgcn", "eval_k": [5], "batch_size": 64, "norm_power": 0.0},
]


def links(low: int, high: int, count: int) -> np.ndarray:
    return np.random.default_rng(low).integers(low, high, (2, count))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "links.ooc"
    ooc.from_data(Data(num_nodes=N, edge_index=torch.from_numpy(links(0, N, 900))), path).close()
    return path


def config(store: Path, out: Path, kind: dict[str, Any], **settings: Any) -> RunConfig:
    made = LightGCNConfig if kind["mode"] == "lightgcn" else TableConfig
    return made(store=store, out=out, **{**SMALL, "epochs": 2, "eval_every": 1, **kind, **settings})


def grow(store: Path) -> None:
    ooc.append(store, edges=np.concatenate([links(0, N + NEW, 300), np.stack([np.arange(N, N + NEW)] * 2)], 1))


def packed_rows(run: Any) -> np.ndarray:
    """All rows of an open run with their state, before its first step."""
    mode = run.mode
    if mode.config.mode == "lightgcn":
        return (
            torch.cat([mode.steps.blocks.load(block) for block in range(len(mode.steps.columns))], 2).numpy().transpose(1, 0, 2)
        )
    found = np.zeros((mode.shape.rows, mode.shape.packed), np.float32)
    for bucket in range(mode.shape.buckets):
        buffer, ids = page_buffer(mode.shape.bucket_bytes), mode.shape.ids(bucket)
        mode.table.files.load(bucket, buffer)
        found[ids] = buffer.view(np.float32).reshape(-1, mode.shape.packed)[: len(ids)]
    return found


def test_a_run_without_epochs_left_says_so(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(store, tmp_path / "run", KINDS[0])
    train(settings)
    grow(store)
    train(settings, resume=True, grown=True, watcher=terminal_watcher())
    assert f"resume it with more than {settings.epochs} epochs to go on" in capsys.readouterr().err


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind['mode']}-{kind.get('model')}")
def test_rows_and_their_state_go_on_and_new_nodes_begin(store: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    settings = config(store, tmp_path / "run", kind)
    train(settings)
    with open_run(settings, True, Watchers([])) as run:
        before, relation = packed_rows(run), {name: each.clone() for name, each in run.model.state_dict().items()}
    grow(store)
    with pytest.raises(ConfigError, match="has grown since"):
        train(settings, resume=True)
    more = settings.model_copy(update={"epochs": 4})
    with open_run(more, True, Watchers([]), grown=True) as run:
        after = packed_rows(run)
        assert run.state.epoch == 2
        steps = run.state.total_steps
        assert all(torch.equal(each, relation[name]) for name, each in run.model.state_dict().items())
    np.testing.assert_array_equal(after[:N], before)
    new = np.empty((NEW, WIDTH), np.float32)
    keyed_uniform(np.uint64(key(0, Purpose.TABLE)), np.arange(N, N + NEW), np.float32(0.2), new)
    first = after[N:, 0] if after.ndim == 3 else after[N:, :WIDTH]
    np.testing.assert_array_equal(first, new)
    assert not np.delete(after[N:].reshape(NEW, -1), np.arange(WIDTH), axis=1).any()
    with pytest.raises(Killed):
        train(more, resume=True, grown=True, watcher=KillAt(steps + 1))
    result = train(more, resume=True, grown=True)
    assert result["epochs"] == 4
    assert len([*more.out.glob("table*")]) == 1
    with ooc.open(store) as ds:
        assert ds.num_nodes == N + NEW
        rows = ooc.embed(more.out, ds)[:]
        assert rows.shape == (N + NEW, WIDTH)
        if "norm_power" in kind:
            np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
        assert ooc.neighbors(more.out, ds, [N + 1], 3).item.shape == (1, 3)


def test_a_knowledge_graph_grows_by_entities_and_links(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)

    def triples(nodes: int, count: int) -> dict[str, list[str]]:
        ends = {name: [f"n{i:03}" for i in draw.integers(0, nodes, count)] for name in ("src", "dst")}
        kinds = np.concatenate([np.arange(3), draw.integers(0, 3, count - 3)])
        return ends | {
            "relation": [["eats", "fears", "is"][i] for i in kinds],
            "split": [["train", "val", "test"][i] for i in draw.choice(3, count, p=[0.8, 0.1, 0.1])],
        }

    how = {"edge_label": "relation", "edge_split": "split"}
    for name, nodes in (("first", 60), ("more", 80)):
        pq.write_table(pa.table(triples(nodes, 500)), tmp_path / f"{name}.parquet")
    store, run = tmp_path / "words.ooc", tmp_path / "run"
    ooc.ingest(store, edges=tmp_path / "first.parquet", **how)
    settings: dict[str, Any] = {"mode": "table", "model": "complex", "hidden": 8, "buckets": 2, "threads": 1}
    ooc.train(store=store, out=run, epochs=2, lr=1e-9, **settings)
    before = ooc.embed(run, store)[:]
    ooc.append(store, edges=tmp_path / "more.parquet", **how)
    with pytest.raises(ConfigError, match=r"was trained on another store, or on .* before it grew"):
        ooc.embed(run, store)
    result = ooc.train(out=run, resume=True, grown=True, epochs=3)
    after = ooc.embed(run, store)[:]
    np.testing.assert_allclose(after[: len(before)], before, atol=1e-6)
    assert len(after) > len(before)
    assert result["metrics"]["test"]["mrr"] > 0
    assert ooc.infer(run, store, tmp_path / "best.parquet", top=2).rows > 0


@pytest.mark.slow
def test_a_run_that_goes_on_after_growth_is_the_same_however_often_it_is_killed(store: Path, tmp_path: Path) -> None:
    once, often = (config(store, tmp_path / name, KINDS[1], checkpoint_every=2, epochs=4) for name in ("once", "often"))
    steps = train(once.model_copy(update={"epochs": 2}))["total_steps"]
    shutil.copytree(once.out, often.out)
    grow(store)
    train(once, resume=True, grown=True)
    for killed_at in (3, 9):
        with pytest.raises(Killed):
            train(often, resume=True, grown=True, watcher=KillAt(steps + killed_at))
    train(often, resume=True)
    assert curve(often.out) == curve(once.out)
    np.testing.assert_array_equal(ooc.embed(often.out, store)[:], ooc.embed(once.out, store)[:])


def visits(path: Path, users: range, items: range, count: int) -> Path:
    """Links of users and items, each of which has one at least."""
    draw = np.random.default_rng(len(users))
    most = max(len(users), len(items))
    user = np.concatenate([np.resize(users, most), draw.choice(users, count)])
    item = np.concatenate([np.resize(items, most), draw.choice(items, count)])
    split = draw.choice(["train", "val", "test"], len(user), p=[0.8, 0.1, 0.1])
    pq.write_table(pa.table({"user": [f"u{number:03}" for number in user], "item": 10 * item, "split": split}), path)
    return path


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind['mode']}-{kind.get('model')}")
def test_users_and_items_grow_and_their_rows_go_on(tmp_path: Path, kind: dict[str, Any]) -> None:
    store, key_of = tmp_path / "visits.ooc", ("user", "visits", "item")
    how: dict[str, Any] = {"src": "user", "dst": "item", "edge_split": {key_of: "split"}}
    ooc.ingest(store, edges={key_of: visits(tmp_path / "a.parquet", range(60), range(40), 600)}, **how)
    settings = config(store, tmp_path / "run", kind, val=None, test=None)
    train(settings)
    before = {name: ooc.embed(settings.out, store, node_type=name)[:] for name in ("user", "item")}
    with open_run(settings, True, Watchers([])) as run:
        rows = packed_rows(run)
    new = visits(tmp_path / "b.parquet", range(50, 85), range(30, 52), 200)
    done = ooc.append(store, edges={key_of: new}, **how).appended
    assert (done.nodes, done.parts["user"]["nodes"], done.parts["item"]["nodes"]) == (37, 25, 12)
    more = settings.model_copy(update={"epochs": 3})
    with open_run(more, True, Watchers([]), grown=True) as run:
        grown = packed_rows(run)
    assert len(grown) == 85 + 52
    np.testing.assert_array_equal(grown[:60], rows[:60])
    np.testing.assert_array_equal(grown[85 : 85 + 40], rows[60:])
    with pytest.raises(Killed):
        train(more, resume=True, grown=True, watcher=KillAt(run.state.total_steps + 1))
    assert train(more, resume=True, grown=True)["epochs"] == 3
    for name, count in (("user", 85), ("item", 52)):
        assert ooc.embed(more.out, store, node_type=name)[:].shape == (count, before[name].shape[1])
    assert ooc.infer(more.out, store, tmp_path / "best.parquet", top=2).rows > 0
    ooc.compact(store)
    assert ooc.neighbors(more.out, store, ["u080"], 3, node_type="user").item.shape == (1, 3)


@pytest.mark.slow
def test_other_modes_do_not_go_on_with_more_of_several_types(tmp_path: Path) -> None:
    store, key_of = tmp_path / "visits.ooc", ("user", "visits", "item")
    how: dict[str, Any] = {"src": "user", "dst": "item", "edge_split": {key_of: "split"}}
    ooc.ingest(store, edges={key_of: visits(tmp_path / "a.parquet", range(60), range(40), 600)}, reverse=True, **how)
    given: dict[str, Any] = {"task": "link", "mode": "sampled", "edge_type": "user:visits:item", "fanout": [3], "hidden": 4}
    given["model"] = "rsage"
    ooc.train(store=store, out=tmp_path / "run", epochs=1, threads=1, **given)
    ooc.append(store, edges={key_of: visits(tmp_path / "b.parquet", range(50, 85), range(30, 52), 200)}, **how)
    with pytest.raises(ConfigError, match="go on where a store of several types has grown"):
        ooc.train(out=tmp_path / "run", resume=True, grown=True, epochs=2)

"""`ooc split`: splits of a finished store, in one transaction."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ooc.cli.main import main
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.growth import next_version
from ooc.stores.growth import resplit as module
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.resplit import resplit
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.integrity import verify
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import configure

SHARES = (0.5, 0.25, 0.25)


def splits(store: Path) -> dict[str, list[int]]:
    with Dataset.open(store) as ds:
        return {name: ds.split(name).tolist() for name in ds.splits}


def test_splits_drawn_later_are_those_of_an_ingest(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "e.npy", rng.integers(0, 60, (2, 300)))
    np.save(tmp_path / "y.npy", rng.integers(-1, 3, 60))
    given: dict[str, Any] = {"edges": str(tmp_path / "e.npy"), "labels": tmp_path / "y.npy", "num_nodes": 60}
    ingest(IngestSpec(out=tmp_path / "a.ooc", **given))
    ingest(IngestSpec(out=tmp_path / "b.ooc", **given, random_split="0.5,0.25,0.25", seed=3))
    with Dataset.open(tmp_path / "a.ooc") as before:
        assert main(["split", str(tmp_path / "a.ooc"), "--random-split", "0.5,0.25,0.25", "--seed", "3"]) == 0
        assert before.splits == []
        assert before.graph.num_edges == 300
    assert splits(tmp_path / "a.ooc") == splits(tmp_path / "b.ooc") != {}
    assert verify(tmp_path / "a.ooc") == []


def test_splits_that_a_store_has_are_replaced_on_request(make_store: MakeStore, tmp_path: Path, capsys: Any) -> None:
    store = make_store()
    old = splits(store)
    assert main(["split", str(store), "--random-split", "0.5,0.5,0"]) == 2
    assert "has splits (train 30, val 10, test 10): --replace gives it others" in capsys.readouterr().err
    assert splits(store) == old
    np.save(tmp_path / "t.npy", np.arange(50) < 3)
    np.save(tmp_path / "v.npy", np.array([2, 7]))
    assert main(["split", str(store), "--train", f"{tmp_path}/t.npy", "--val", f"{tmp_path}/v.npy", "--replace"]) == 0
    assert "note: the splits train and val share 1 nodes" in capsys.readouterr().out
    assert splits(store) == {"train": [0, 1, 2], "val": [2, 7]}
    resplit(store, SHARES, replace=True)
    assert {name: len(rows) for name, rows in splits(store).items()} == {"train": 25, "val": 13, "test": 12}
    assert verify(store) == []


def test_runs_on_earlier_splits_are_not_resumed(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    train(configure(store, tmp_path / "run", epochs=1))
    resplit(store, SHARES, replace=True)
    with pytest.raises(ConfigError, match="it was trained with another store"):
        train(configure(store, tmp_path / "run", epochs=1), resume=True, grown=True)


def test_runs_on_splits_before_a_compaction_are_not_resumed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"src": [0, 1, 2], "dst": [1, 2, 3]}), tmp_path / "e.parquet")
    given: dict[str, Any] = {"out": tmp_path / "s.ooc", "edges": str(tmp_path / "e.parquet")}
    ingest(IngestSpec(**given, random_split="0.5,0.5,0"))
    states = []
    for _ in range(2):
        append(AppendSpec(**given))
        compact(tmp_path / "s.ooc")
        with Dataset.open(tmp_path / "s.ooc") as ds:
            states.append(ds.fingerprint)
        resplit(tmp_path / "s.ooc", SHARES, replace=True, seed=len(states))
    append(AppendSpec(**given))
    compact(tmp_path / "s.ooc")
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert [ds.grown_since(state) for state in states] == [None, None]


def test_what_cannot_be_split_is_said(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    with pytest.raises(ConfigError, match="give either `random_split`, or `train`"):
        resplit(store)
    pq.write_table(pa.table({"src": [0], "dst": [1]}), tmp_path / "more.parquet")
    append(AppendSpec(out=store, edges=str(tmp_path / "more.parquet")))
    with pytest.raises(ConfigError, match="appended data, which splits would not cover: run `ooc compact"):
        resplit(store, SHARES, replace=True)


def test_a_kill_leaves_the_earlier_splits(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    old = splits(store)
    for step in ("write_splits", "link_the_rest", "finish_store", "set_version"):

        def killed(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(next_version if step == "set_version" else module, step, killed)
            with pytest.raises(KeyboardInterrupt):
                resplit(store, SHARES, replace=True)
        assert splits(store) == old
        assert verify(store) == []
    resplit(store, SHARES, replace=True)
    assert splits(store) != old

"""Runs on events and windows that go on with a stream that has grown."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import ooc
from ooc.config.base import RunConfig
from ooc.config.events import EventsConfig
from ooc.config.snapshots import SnapshotsConfig
from ooc.stores.errors import ConfigError
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from ooc.training.open_run import open_run
from ooc.training.watchers import LineWatcher, Watchers
from tests.ooc.runs import KillAt, Killed, curve
from tests.ooc.temporal_stores import Edges

COUNT, BASE, STEP = 400, 300, 5
COMMON: dict[str, Any] = {"hidden": 8, "epochs": 2, "seed": 5, "threads": 1, "lr": 0.01, "checkpoint_every": 1}
EVENTS: dict[str, Any] = {"time_dim": 4, "num_neighbors": [3], "batch_size": 20, **COMMON}
WINDOWS: dict[str, Any] = {"identity": 4, "layers": 1, "window": "100ms", **COMMON}
MODES: dict[str, dict[str, Any]] = {
    "tgn": {"memory_dim": 6, **EVENTS},
    "tgat": {"model": "tgat", **EVENTS},
    "roland": WINDOWS,
    "sliding": {**WINDOWS, "window": "200ms", "stride": "100ms", "model": "recurrent"},
    "evolvegcn": {**WINDOWS, "model": "evolvegcn", "updates": 2},
    "counted": {**WINDOWS, "window": 15, "by": "count"},
    "labels": {**WINDOWS, "task": "nodes"},
}


def configure(name: str, store: Path, out: Path, **settings: Any) -> RunConfig:
    kind = EventsConfig if name in ("tgn", "tgat") else SnapshotsConfig
    return kind(store=store, out=out, **{**MODES[name], **settings})


def make(folder: Path) -> tuple[Edges, Path]:
    """A stream, and the store of its first events."""
    every, first = Edges(span=3000), Edges(span=3000)
    for name in ("src", "dst", "time", "msg", "state"):
        setattr(first, name, getattr(every, name)[:BASE])
    return every, first.store(folder, undirected=True)


def more(store: Path, edges: Edges, which: Any, **settings: Any) -> None:
    """Append some of the stream's events."""
    msg = {f"m{j}": edges.msg[which, j] for j in range(3)}
    path = store.parent / "more.parquet"
    pq.write_table(pa.table({"src": edges.src[which], "dst": edges.dst[which], "t": edges.time[which], **msg}), path)
    append(AppendSpec(out=store, edges=str(path), time="t", edge_features=["msg=m*"], **settings))


def cut(config: RunConfig, step: int = STEP) -> None:
    with pytest.raises(Killed):
        train(config, watcher=KillAt(step))


def same(one: Path, other: Path) -> None:
    """Losses, scores and the model of two runs, to the bit."""
    assert curve(one) == curve(other)
    a, b = (torch.load(out / "model.pt")["model"] for out in (one, other))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODES)
def test_a_run_goes_on_with_new_events_as_if_they_had_been_there(tmp_path: Path, name: str) -> None:
    """Behind the last ones, and late ones behind what the epoch has seen; folded into the arrays or not."""
    edges, store = make(tmp_path)
    config = configure(name, store, tmp_path / "run")
    cut(config)
    edges.time[-1] = edges.time[BASE - 5]
    more(store, edges, slice(BASE, COUNT))
    if name in ("tgn", "roland"):
        compact(store)
    with pytest.raises(ConfigError, match=r"cannot resume .* has grown since: `grown=True` goes on with what is there now"):
        train(config, resume=True)
    train(config, resume=True, grown=True)
    train(configure(name, store, tmp_path / "whole"))
    same(tmp_path / "run", tmp_path / "whole")
    assert len(read_metrics(config.out)[0]) > 2 * STEP


def test_negatives_of_a_file_are_not_taken_for_other_events(tmp_path: Path) -> None:
    """The file's rows are of events from validation's first on, which moves as the store grows."""
    edges, store = make(tmp_path)
    np.save(tmp_path / "negatives.npy", np.zeros((COUNT, 2), np.int64))
    config = configure("tgn", store, tmp_path / "run", eval_negatives=str(tmp_path / "negatives.npy"))
    cut(config)
    more(store, edges, slice(BASE, COUNT))
    with pytest.raises(ConfigError, match=r"negatives.npy are of events from validation's first on, which is another one now"):
        train(config, resume=True, grown=True)


class Notes(LineWatcher):
    """What a person is told."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def note(self, text: str) -> None:
        self.all.append(text)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["roland", "tgn"])
def test_late_events_among_those_that_were_seen_end_the_epoch(tmp_path: Path, name: str) -> None:
    """The numbers of events have moved, and the state of the nodes is of others."""
    edges, store = make(tmp_path)
    config = configure(name, store, tmp_path / "run")
    cut(config)
    edges.time[-1] = edges.time[3]
    more(store, edges, [-1])
    with pytest.raises(ConfigError, match=r"is through its 1 epochs.*give more `epochs`"):
        train(configure(name, store, tmp_path / "run", epochs=1), resume=True, grown=True)
    watcher = Notes()
    train(config, resume=True, grown=True, watcher=watcher)
    assert any("goes on with epoch 2, as there are late events among those" in line for line in watcher.all)
    steps, epochs = read_metrics(config.out)
    assert [line["epoch"] for line in epochs] == [1]
    assert [line["step"] for line in steps] == list(range(len(steps)))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["tgn", "roland"])
def test_a_run_that_is_through_goes_on_with_more_epochs_and_chooses_its_best_anew(tmp_path: Path, name: str) -> None:
    edges, store = make(tmp_path)
    before = train(configure(name, store, tmp_path / "run"))
    more(store, edges, slice(BASE, COUNT))
    with pytest.raises(ConfigError, match="is through its 2 epochs"):
        train(configure(name, store, tmp_path / "run"), resume=True, grown=True)
    after = train(configure(name, store, tmp_path / "run", epochs=3), resume=True, grown=True)
    assert after["best_epoch"] == 2
    assert after["steps_per_epoch"] > before["steps_per_epoch"]
    assert after["baselines"] == train(configure(name, store, tmp_path / "other", epochs=1))["baselines"]
    assert after["metrics"].keys() == {"val", "test"}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["tgn", "roland"])
def test_new_nodes_have_no_state_and_others_keep_theirs(tmp_path: Path, name: str) -> None:
    edges, store = make(tmp_path)
    config = configure(name, store, tmp_path / "run")
    cut(config)
    edges.src[-1] = edges.nodes + 1
    np.save(tmp_path / "new.npy", np.ones((2, 5), np.float32))
    held = []
    for grown in (False, True):
        if grown:
            more(store, edges, slice(BASE, COUNT), features=[f"x={tmp_path}/new.npy"])
        with open_run(config, True, Watchers([]), grown=grown) as run:
            history: Any = run.mode.history  # type: ignore[attr-defined]
            held.append(history.fetch(history.next_step, np.arange(run.dataset.num_nodes)))
    old, new = held
    assert len(new.ids) == edges.nodes + 2
    np.testing.assert_array_equal(new.steps[: edges.nodes], old.steps)
    for was, now in zip(old.rows, new.rows, strict=True):
        np.testing.assert_array_equal(now[: edges.nodes], was)
        assert was.any()
        assert not now[edges.nodes :].any()
    train(config, resume=True, grown=True)
    train(config, resume=True)


def test_a_reader_of_windows_follows_the_stream(tmp_path: Path) -> None:
    edges, store = make(tmp_path)
    with ooc.open(store) as ds:
        more(store, edges, slice(BASE, COUNT))
        with ds.follow() as newer:
            counts = [sum(each.num_edges for each in ooc.SnapshotLoader(data, "300ms")) for data in (ds, newer)]
    assert counts == [BASE, COUNT]

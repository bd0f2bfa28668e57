"""Runs on a stream of events: they go on after a kill to the same bits, whatever reads and memory; no look into the future."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ooc
from ooc.cli.main import main
from ooc.config.events import EventsConfig
from ooc.config.modes import load_config
from ooc.config.snapshots import SnapshotsConfig
from ooc.metrics.links import EdgeBank
from ooc.report.page import write_report
from ooc.sampling.time_windows import chronological
from ooc.stores.errors import ConfigError, InputError
from ooc.training.checkpoint import read_metrics
from ooc.training.event_mode import EventMode
from ooc.training.loop import train
from ooc.training.summary import score_lines
from ooc.training.watchers import LineWatcher, Watchers
from tests.ooc.runs import InterruptAt, KillAt, Killed, curve, tight
from tests.ooc.temporal_stores import Edges
from tests.waiting import no_threads

SMALL: dict[str, Any] = {"hidden": 8, "memory_dim": 6, "time_dim": 4, "num_neighbors": [3], "batch_size": 20, "epochs": 2}
SMALL |= {"seed": 5, "threads": 1, "lr": 0.01}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Edges(span=3000).store(tmp_path_factory.mktemp("events"), undirected=True)


def configure(store: Path, out: Path, **settings: Any) -> EventsConfig:
    return EventsConfig(store=store, out=out, **{**SMALL, **settings})


def model_of(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(out / "model.pt")["model"]
    return found


def same(one: Path, other: Path) -> None:
    """Losses, scores and the model of two runs, to the bit."""
    assert curve(one) == curve(other)
    a, b = model_of(one), model_of(other)
    assert all(torch.equal(a[name], b[name]) for name in a)
    metrics = [json.loads((out / "summary.json").read_text())["metrics"] for out in (one, other)]
    assert metrics[0] == metrics[1]


def test_a_run_writes_its_scores_beside_edgebanks_and_a_report(store: Path, tmp_path: Path) -> None:
    summary = train(configure(store, tmp_path / "run", ratio=2))
    steps, epochs = read_metrics(tmp_path / "run")
    assert len(steps) == summary["total_steps"] == 2 * summary["steps_per_epoch"]
    assert {line["epoch"] for line in epochs} == {0, 1}
    best = epochs[summary["best_epoch"]]
    assert best["best"]
    assert summary["metrics"] == {"val": best["val"], "test": best["test"]}
    assert summary["baselines"]["EdgeBank"].keys() == {"val", "test"}
    assert all(line["baselines"]["EdgeBank"]["val"] == summary["baselines"]["EdgeBank"]["val"] for line in epochs)
    page = write_report(tmp_path / "run").read_text()
    assert "EdgeBank" in page
    assert f"{summary['units_per_second']:,.0f}</b><span>events per second" in page
    assert "tgn" in page


def test_a_monitor_that_there_will_not_be_is_refused_at_once(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="monitor = 'auroc' is a score of one negative an event"):
        train(configure(store, tmp_path / "run", monitor="auroc", eval_ratio=3))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_split_without_events_has_no_scores_and_a_reason(store: Path, tmp_path: Path) -> None:
    summary = train(configure(store, tmp_path / "run", val=0.0, test=0.0, epochs=1))
    lines = score_lines(summary)
    assert lines == [
        f"{split}: no scores, none of the 400 events is for it: give `{split}` a larger share" for split in ("val", "test")
    ]
    assert all(line in write_report(tmp_path / "run").read_text() for line in lines)
    summary = train(configure(store, tmp_path / "other", val=0.0, epochs=1))
    assert [line.split(":")[0] for line in score_lines(summary)] == ["test", "test of EdgeBank", "negatives", "val"]
    with pytest.raises(ConfigError, match="patience needs events to validate on"):
        train(configure(store, tmp_path / "patient", val=0.0, patience=3))


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["events", "snapshots"])
def test_a_baseline_that_does_not_fit_is_told_of(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(EdgeBank, "nbytes", 10**12)
    if mode == "events":
        summary = train(configure(store, tmp_path / "run", epochs=1))
    else:
        config = {"store": store, "out": tmp_path / "run", "window": "100", "hidden": 4, "epochs": 1}
        summary = train(SnapshotsConfig(**config))
    line = "EdgeBank: no scores, what it remembers does not fit the memory: give more memory"
    lines = score_lines(summary)
    assert [line.split(":")[0] for line in lines] == ["val", "test", "negatives", "EdgeBank"]
    assert lines[-1] == line
    assert line in write_report(tmp_path / "run").read_text()


def test_passes_without_training_say_how_far_they_are(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ooc.runtime.messages.LINE_SECONDS", 0.0)
    train(configure(store, tmp_path / "run", epochs=1), watcher=LineWatcher())
    lines = capsys.readouterr().err.splitlines()
    for what, total in (("EdgeBank", 400), ("scores of val", 60), ("scores of test", 60)):
        told = [line for line in lines if line.startswith(what)]
        assert len(told) > 1
        assert all(f" of {total} events, " in line and line.endswith(" s left") for line in told)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["tgn", "tgat", "graphmixer"])
def test_the_unit_of_times_changes_nothing(tmp_path: Path, model: str) -> None:
    """As the same timestamps may be numbers of seconds, or text, which is kept in microseconds."""
    losses = []
    neighbors = {"num_neighbors": [3, 2]} if model == "tgat" else {}
    sizes = {} if model == "tgn" else {"memory_dim": EventsConfig.model_fields["memory_dim"].default}
    for unit, factor in (("s", 1), ("us", 10**6)):
        edges = Edges(span=3000)
        edges.time = edges.time * factor
        (tmp_path / unit).mkdir()
        made = edges.store(tmp_path / unit, undirected=True, time_unit=unit)
        train(configure(made, tmp_path / unit / "run", model=model, epochs=1, **neighbors, **sizes))
        losses.append([line["loss"] for line in read_metrics(tmp_path / unit / "run")[0]])
    np.testing.assert_allclose(*losses, rtol=1e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["tgn", "tgat", "graphmixer"])
def test_long_tails_of_columns_are_tamed(tmp_path: Path, model: str) -> None:
    """Values as amounts have them; a run on these is one on their asinh, taken as it is."""
    losses = []
    sizes = {} if model == "tgn" else {"memory_dim": EventsConfig.model_fields["memory_dim"].default}
    for raw in (False, True):
        edges = Edges(span=3000)
        edges.msg = np.exp(5 * edges.msg)
        edges.msg = np.arcsinh(edges.msg) if raw else edges.msg
        (tmp_path / f"{raw}").mkdir()
        made = edges.store(tmp_path / f"{raw}", undirected=True)
        train(configure(made, tmp_path / f"{raw}" / "run", model=model, epochs=1, raw=raw, max_steps=6, **sizes))
        losses.append([line["loss"] for line in read_metrics(tmp_path / f"{raw}" / "run")[0]])
    assert len(losses[0]) == 6
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["tgn", "tgat", "graphmixer"])
def test_what_is_killed_goes_on_to_the_same_bits(
    store: Path, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"model": model, "checkpoint_every": 3}
    settings |= {} if model == "tgn" else {"memory_dim": 100, "num_neighbors": [3, 2] if model == "tgat" else [3]}
    train(configure(store, tmp_path / "whole", **settings))
    for step in (2, 10, 20):
        with pytest.raises(Killed):
            train(configure(store, tmp_path / "run", **settings), resume=step > 2, watcher=KillAt(step))
    score = EventMode.score

    def killed(self: EventMode, split: str) -> Any:
        score(self, split)  # what the memory has taken up meanwhile is undone
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(EventMode, "score", killed)
        with pytest.raises(Killed):
            train(configure(store, tmp_path / "run", **settings), resume=True)
    before = curve(tmp_path / "run")
    train(configure(store, tmp_path / "run", **settings), resume=True)
    assert len(before) < len(curve(tmp_path / "run"))
    same(tmp_path / "whole", tmp_path / "run")
    assert no_threads()


@pytest.mark.slow
def test_engine_memory_and_how_far_ahead_change_nothing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(configure(store, tmp_path / "a"))
    train(configure(store, tmp_path / "b", engine="pread", memory=tight(), checkpoint_every=1))
    same(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr("ooc.loading.event_loader.PREFETCH", 1)
    monkeypatch.setattr("ooc.history.rows.ResidentRows.nbytes", lambda rows, steps: 1 << 60)  # so rows are read and written
    train(configure(store, tmp_path / "c", engine="mmap"))
    same(tmp_path / "a", tmp_path / "c")
    for step in (7, 19):
        with pytest.raises(Killed):
            train(configure(store, tmp_path / "d", checkpoint_every=2), resume=step > 7, watcher=KillAt(step))
    train(configure(store, tmp_path / "d", checkpoint_every=2), resume=True)
    same(tmp_path / "a", tmp_path / "d")


@pytest.mark.slow
def test_ctrl_c_and_max_steps_leave_a_checkpoint(store: Path, tmp_path: Path) -> None:
    train(configure(store, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        train(configure(store, tmp_path / "run"), watcher=InterruptAt(4))
    summary = train(configure(store, tmp_path / "run", max_steps=9), resume=True)
    assert summary["total_steps"] == 9 < summary["steps_per_epoch"]
    assert summary["metrics"].keys() == {"val", "test"}, "the model is scored as it stands"
    assert read_metrics(tmp_path / "run")[1][-1]["test"] == summary["metrics"]["test"]
    train(configure(store, tmp_path / "run"), resume=True)
    same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.cases(1)
@pytest.mark.parametrize(("model", "seed"), [("tgn", 0), ("tgn", 1), ("tgat", 2), ("graphmixer", 3)])
def test_the_future_changes_nothing_before_it(tmp_path: Path, model: str, seed: int) -> None:
    """From some time on events are others: losses, scores, memory rows and the parameters before are the same, to the bit."""
    settings: dict[str, Any] = {"model": model, "negatives": "historical", "seed": seed}
    settings |= {} if model == "tgn" else {"memory_dim": 100}
    found = []
    for k in range(2):
        edges = Edges(span=150, seed=seed)
        now = int(np.quantile(edges.time, 0.5))
        late = np.flatnonzero(edges.time >= now)
        if k:
            order = np.random.default_rng(seed).permutation(late)
            edges.src[late], edges.dst[late], edges.msg[late] = edges.dst[order], edges.src[order], -edges.msg[order]
        (tmp_path / str(k)).mkdir()
        with ooc.open(edges.store(tmp_path / str(k), undirected=True)) as ds:
            stream = EventMode(configure(ds.path, tmp_path / str(k) / "run", **settings), ds)
            stream.open(SimpleNamespace(watchers=Watchers([])), None, None)  # type: ignore[arg-type]
            optimizer = torch.optim.Adam(stream.model.parameters(), 0.01)
            seen: list[torch.Tensor] = []
            for batch in (batches := stream.batches(0, 0, stream.steps_per_epoch)):
                if int(batch.t[-1]) >= now:
                    break
                torch.manual_seed(len(seen))
                loss = stream.loss(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rows = [] if stream.memory is None else [torch.from_numpy(each) for each in batch.memory_request.fetched.rows]
                seen += [loss.detach(), *rows, *(each.detach().clone() for each in stream.model.parameters())]
            batches.close()  # type: ignore[attr-defined]
            stream.close()
        found.append(seen)
    assert len(found[0]) == len(found[1]) > 50
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_scores_are_of_the_same_negatives_in_every_epoch_and_of_a_file(store: Path, tmp_path: Path) -> None:
    with ooc.open(store) as ds:
        (first, last), count = chronological(ds.events)["val"], len(ds.events)
    drawn = np.random.default_rng(0).integers(0, 30, (count - first, 4))
    np.save(tmp_path / "n.npy", drawn)
    summary = train(configure(store, tmp_path / "run", eval_negatives=str(tmp_path / "n.npy")))
    assert summary["monitor"] == "mrr"
    assert summary["metrics"]["test"].keys() == {"mrr", "hits@1", "hits@3", "hits@10"}
    np.save(tmp_path / "short.npy", drawn[: last - first])
    words = f"has negatives for events {first}..{last - 1}, not for {first}..{count - 1}"
    config = configure(store, tmp_path / "other", eval_negatives=f"{tmp_path}/short.npy")
    with ooc.open(store) as ds, pytest.raises(InputError, match=words):  # refused before anything is read
        EventMode(config, ds)
    with pytest.raises(InputError, match="histrical does not exist: negatives are random, historical, or the path"):
        train(configure(store, tmp_path / "other", eval_negatives="histrical"))


def test_historical_negatives_are_counted(store: Path, tmp_path: Path) -> None:
    settings = {"negatives": "historical", "eval_negatives": "historical", "checkpoint_every": 3}
    with pytest.raises(Killed):
        train(configure(store, tmp_path / "run", **settings), watcher=KillAt(5))
    summary = train(configure(store, tmp_path / "run", **settings), resume=True)
    drawn, random = summary["historical_negatives"], summary["historical_negatives_random"]
    assert drawn >= 2 * 400
    assert 0 < random < drawn / 2
    assert f"historical negatives: {random / drawn:.1%} are random" in "\n".join(score_lines(summary))


def test_what_does_not_fit_is_refused_in_a_line(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"store": "s", "out": "o", "mode": "events"}
    for more, words in (
        ({"fanout": "3,3"}, "fanout does not apply to mode events"),
        ({"model": "tgat", "memory_dim": 8}, "memory_dim does not apply to model tgat"),
        ({"num_neighbors": "3,3"}, "one number for model tgn"),
        ({"val": 0.5, "test": 0.5}, "sum to less than 1"),
        ({"hidden": 7}, "give a multiple"),
        ({"mode": "event"}, "mode = 'event' is invalid: expected 'sampled'"),
        ({"mode": "sampled", "memory_dim": 3}, "memory_dim does not apply to mode sampled"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(None, {**base, **more})
    (tmp_path / "d").mkdir()
    directed = Edges().store(tmp_path / "d")
    for model in ("tgn", "tgat", "graphmixer"):
        with pytest.raises(InputError, match="ingest it with `undirected=True`"):
            train(load_config(None, {"store": directed, "out": tmp_path / "run", "mode": "events", "model": model}))
    assert not (tmp_path / "run").exists()
    assert main(["plan", str(store), "--mode", "events"]) == 2
    assert "has no plan" in capsys.readouterr().err
    flags = ["--mode", "events", "--epochs", "1", "--hidden", "8", "--memory-dim", "8", "--threads", "1"]
    assert main(["train", str(store), "--out", str(tmp_path / "cli"), *flags]) == 0
    out, err = capsys.readouterr()
    assert "test of EdgeBank: ap" in out
    assert "events/s" in err
    assert (out + err).count("negatives: nodes that are destinations of training events") == 1, "beside the scores"
    assert main(["infer", str(store), "--checkpoint", str(tmp_path / "cli"), "--out", str(tmp_path / "p.parquet")]) == 2
    assert "trained with mode events" in capsys.readouterr().err

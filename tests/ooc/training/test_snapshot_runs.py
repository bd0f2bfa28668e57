"""Training on windows: the same run whatever the memory, killed or not; no score knows what comes after it."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.config.modes import load_config
from ooc.config.snapshots import SnapshotsConfig
from ooc.history.rows import ResidentRows
from ooc.metrics.nodes import Scores
from ooc.metrics.tasks import LabelTask
from ooc.report.page import write_report
from ooc.runtime.messages import Pace
from ooc.sampling.negatives import RandomNegatives
from ooc.sampling.time_windows import CountWindows, TimeWindow
from ooc.stores.errors import ConfigError, InputError
from ooc.temporal.forecast_loader import WindowPair, draw, window_pairs
from ooc.temporal.window_task import edgebank, parts, split_steps, task_of
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from tests.ooc.runs import KillAt, Killed, curve, tight
from tests.ooc.temporal_stores import Edges
from tests.waiting import no_threads

SILENT = Pace(lambda _: None)
SMALL: dict[str, Any] = {"window": "40", "stride": "25", "by": "count", "hidden": 8, "identity": 4, "epochs": 2, "threads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "roland": {"dropout": 0.3},
    "recurrent": {"model": "recurrent", "conv": "gcn", "updates": 2},
    "average": {"update": "average", "live": True, "window": "50s", "stride": None, "by": "time"},
    "evolvegcn": {"model": "evolvegcn", "live": True, "updates": 2},
    "nodes": {"task": "nodes", "conv": "gin"},
    "column": {"task": "nodes", "labels": "state", "model": "recurrent"},
}


@pytest.fixture(scope="module")
def edges() -> Edges:
    return Edges()


@pytest.fixture(scope="module")
def store(edges: Edges, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edges.store(tmp_path_factory.mktemp("windows"), edge_features=["msg=m*", "state=s"], allow_nan=True)


def configure(store: Path, out: Path, kind: str = "roland", **others: Any) -> SnapshotsConfig:
    return SnapshotsConfig(store=store, out=out, **{**SMALL, "columns": ["msg"], **KINDS[kind], **others})


@pytest.fixture(scope="module", params=KINDS)
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, Path, Any]:
    """(kind, the run's directory, its summary) of a run that nothing befell."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, out, train(configure(store, out, request.param))


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nodes carry does not fit the memory."""
    monkeypatch.setattr(ResidentRows, "nbytes", lambda *_: 2**60)


@pytest.mark.cases(1)
def test_a_run_is_the_same_whatever_the_memory_and_the_engine(
    store: Path, tmp_path: Path, whole: tuple[str, Path, Any], on_disk: None
) -> None:
    kind, out, summary = whole
    settings: list[dict[str, Any]] = [{"memory": tight(), "engine": "pread"}, {"in_memory": True, "engine": "mmap"}]
    again = train(configure(store, tmp_path / "run", kind, **settings[list(KINDS).index(kind) % 2]))
    assert curve(tmp_path / "run") == curve(out)
    assert again["metrics"] == summary["metrics"]
    assert set(summary["metrics"]) == {"val", "test"}
    assert (summary["baselines"] != {}) == ("task" not in KINDS[kind])
    assert no_threads()


@pytest.mark.cases(1)
def test_a_killed_run_goes_on_to_the_bit(
    store: Path, tmp_path: Path, whole: tuple[str, Path, Any], request: pytest.FixtureRequest
) -> None:
    """Killed by an exception, in training and in the second epoch; `tools.bench.kills.runs` has the system do it anywhere."""
    kind, out, summary = whole
    if list(KINDS).index(kind) % 2:
        request.getfixturevalue("on_disk")
    cut = configure(store, tmp_path / "cut", kind, checkpoint_every=3)
    for step in (4, 14):
        with pytest.raises(Killed):
            train(cut, resume=step > 4, watcher=KillAt(step))
    resumed = train(cut, resume=True)
    assert curve(cut.out) == curve(out)
    assert resumed["metrics"] == summary["metrics"]
    one, two = (torch.load(run / "model.pt")["model"] for run in (out, cut.out))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "beside"), [("recurrent", True), ("nodes", False)])
def test_a_run_that_ends_inside_an_epoch_is_scored_and_reported(store: Path, tmp_path: Path, kind: str, beside: bool) -> None:
    summary = train(configure(store, tmp_path / "run", kind, max_steps=3))
    assert summary["total_steps"] == 3 < summary["steps_per_epoch"]
    assert summary["metrics"].keys() == {"val", "test"}
    page = write_report(tmp_path / "run").read_text()
    assert "Validation" in page
    assert ("test, EdgeBank" in page) == beside


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["average", "evolvegcn", "column"])
def test_validation_knows_nothing_of_the_test(edges: Edges, store: Path, tmp_path: Path, kind: str) -> None:
    """Events of the test have other ends, columns and order: every loss and every score of validation is the same."""
    other = Edges()
    known = 345  # behind validation's last event, 340
    order = known + np.random.default_rng(1).permutation(edges.count - known)
    for name in ("src", "dst", "msg", "state"):
        getattr(other, name)[known:] = getattr(other, name)[order]
    (tmp_path / "other").mkdir()
    permuted = other.store(tmp_path / "other", edge_features=["msg=m*", "state=s"], allow_nan=True)
    found = []
    for number, each in enumerate((store, permuted)):
        train(configure(each, tmp_path / f"{number}", kind, val=0.3, test=0.15, dropout=0.0))
        steps, epochs = read_metrics(tmp_path / f"{number}")
        found.append((steps, [line["val"] for line in epochs], [line.get("test") for line in epochs]))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] != found[1][2]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 150), st.integers(0, 150))
@settings(deadline=None)
def test_splits_of_windows_keep_to_their_events(sizes: list[int], one: int, two: int) -> None:
    ends = np.cumsum([5, *sizes]).tolist()
    steps = [
        WindowPair(number, TimeWindow(number, max(0, first - 5), first, None, None), first, last, 0)
        for number, (first, last) in enumerate(pairwise(ends))
    ]
    train_end, val_end = sorted((one, two))
    found = split_steps(steps, train_end, val_end)
    assert [span for name in ("train", "val", "test") for span in found[name]][1:-1:2] == [found["train"][1], found["val"][1]]
    for step in steps:
        (name,) = [name for name, (first, last) in found.items() if first <= step.step < last]
        assert name == ("train" if step.last <= train_end else "val" if step.last <= val_end else "test")


def test_edgebank_knows_pairs_up_to_each_windows_end(store: Path, edges: Edges) -> None:
    with ooc.open(store) as ds:
        steps = list(window_pairs(CountWindows(40, 25), ds.events))
        splits = split_steps(steps, 200, 300)
        negatives = RandomNegatives(0, 30, 3)
        found = edgebank(ds, steps, splits, negatives, 7, 10**9, SILENT)
        for split in ("val", "test"):
            ranks = []
            for step in steps[slice(*splits[split])]:
                pairs = {*zip(edges.src[: step.window.last].tolist(), edges.dst[: step.window.last].tolist(), strict=True)}
                wrong = draw(ds.events, negatives, ds.events.read(step.first, step.last), step.window.last, 7)
                for event, row in zip(range(step.first, step.last), wrong.tolist(), strict=True):
                    own = (edges.src[event], edges.dst[event]) in pairs
                    others = [(edges.src[event], node) in pairs for node in row]
                    ranks.append(1 + sum(each > own for each in others) + sum(each == own for each in others) / 2)
            assert found[split]["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)))
        assert edgebank(ds, steps, splits, negatives, 7, 10, SILENT) == {}


@pytest.mark.slow
def test_the_network_learns_what_repeats(tmp_path: Path) -> None:
    """Every node writes to one other, always the same: after some windows the model tells it from any other."""
    edges = Edges(nodes=40, count=3000)
    edges.dst = (edges.src + 7) % 40
    store = edges.store(tmp_path)
    settings = {"window": "200", "by": "count", "epochs": 20, "threads": 1, "hidden": 32, "columns": [], "lr": 0.01}
    summary = train(SnapshotsConfig(store=store, out=tmp_path / "run", **settings))
    assert summary["metrics"]["test"]["ap"] > 0.95
    assert summary["baselines"]["EdgeBank"]["test"]["ap"] > 0.95


def test_nodes_without_a_known_label_are_refused(tmp_path: Path) -> None:
    edges = Edges(nodes=40, count=2000)
    edges.state = np.where(np.arange(2000) < 1200, -1, edges.src % 3).astype(np.float32)  # those of training
    store = edges.store(tmp_path, edge_features=["msg=m*", "state=s"])
    settings: dict[str, Any] = {"window": "100", "by": "count", "epochs": 1, "task": "nodes", "val": 0.2, "test": 0.2}
    with pytest.raises(ConfigError, match="column state of training's events has no known label, so there is nothing to train"):
        train(SnapshotsConfig(store=store, out=tmp_path / "run", labels="state", **settings))


def test_classes_of_a_column_are_learned(tmp_path: Path) -> None:
    edges = Edges(nodes=40, count=2000)
    edges.state = (edges.src % 3).astype(np.float32)
    edges.msg[:, 0] = edges.state
    store = edges.store(tmp_path, edge_features=["msg=m*", "state=s"])
    settings = {"window": "200", "by": "count", "epochs": 4, "threads": 1, "columns": ["msg"], "lr": 0.03}
    summary = train(SnapshotsConfig(store=store, out=tmp_path / "run", task="nodes", labels="state", **settings))
    assert summary["metrics"]["test"]["accuracy"] > 0.95


@pytest.mark.filterwarnings("ignore:auroc of validation is undefined")
def test_no_epoch_is_the_best_by_an_undefined_score(tmp_path: Path) -> None:
    """Validation has one class alone: the last model stands, and no epoch is said to be the best."""
    edges = Edges(nodes=40, count=2000)
    edges.state = np.where((np.arange(2000) >= 1200) & (np.arange(2000) < 1600), 1, edges.src % 2).astype(np.float32)
    store = edges.store(tmp_path, edge_features=["msg=m*", "state=s"])
    settings: dict[str, Any] = {"window": "100", "by": "count", "epochs": 2, "threads": 1, "val": 0.2, "test": 0.2}
    settings |= {"task": "nodes", "labels": "state", "monitor": "auroc"}
    summary = train(SnapshotsConfig(store=store, out=tmp_path / "run", **settings))
    epochs = read_metrics(tmp_path / "run")[1]
    assert [line["best"] for line in epochs] == [False, False]
    assert summary["best_epoch"] is None
    assert summary["metrics"]["test"] == epochs[-1]["test"]


@pytest.mark.slow
def test_nodes_of_other_splits_are_not_learned_from(edges: Edges, tmp_path: Path) -> None:
    """Labels of test nodes are others: all losses and validation are the same."""
    curves = []
    for number in range(2):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        each = Edges()
        for name, nodes in {"train": range(12), "val": range(12, 20), "test": range(20, 30)}.items():
            np.save(folder / f"{name}.npy", np.array(nodes))
        each.y[20:] = (each.y[20:] + number) % 4
        masks = {name: folder / f"{name}.npy" for name in ("train", "val", "test")}
        train(configure(each.store(folder, **masks), folder / "run", "nodes", stride=None))
        steps, epochs = read_metrics(folder / "run")
        curves.append((steps, [line["val"] for line in epochs], [line.get("test") for line in epochs]))
    assert curves[0][:2] == curves[1][:2]
    assert curves[0][2] != curves[1][2]


class Some(NamedTuple):
    """What `parts` meets of a forecast."""

    src: torch.Tensor
    dst: torch.Tensor
    negative: torch.Tensor


@pytest.mark.slow
def test_scores_know_how_many_nodes_come(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that overlap score a node again and again; whether scores are exact is decided by how many that is at most."""
    most: list[int] = []
    given: list[int] = []

    class Counting(Scores):
        def __init__(self, task: str, num_classes: int, count: int, device: Any) -> None:
            super().__init__(task, num_classes, count, device)
            most.append(count)
            given.append(0)

        def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
            super().update(logits, labels)
            given[-1] += len(labels)

    monkeypatch.setattr("ooc.metrics.nodes.Scores", Counting)
    train(configure(store, tmp_path / "run", "nodes", window="200", stride="1", epochs=1))
    assert len(given) == 2
    assert all(0 < count <= bound <= 30 * 400 for count, bound in zip(given, most, strict=True))


def test_parts_of_a_forecast_are_all_of_it() -> None:
    forecast: Any = Some(torch.arange(10), torch.arange(10, 20), torch.arange(30).view(10, 3))
    found = list(parts(forecast, 12))
    assert [len(each.src) for each in found] == [3, 3, 3, 1]
    for name in ("src", "dst", "negative"):
        assert torch.equal(torch.cat([getattr(each, name) for each in found]), getattr(forecast, name))
    assert [len(each.src) for each in parts(forecast, 1)] == [1] * 10


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"conv": "gcn", "model": "evolvegcn"}, "conv does not apply to model evolvegcn"),
        ({"update": "mlp", "model": "recurrent"}, "update does not apply to model recurrent"),
        ({"labels": "state"}, "labels does not apply to task link"),
        ({"task": "nodes", "eval_ratio": "3"}, "eval_ratio does not apply to task node"),
        ({"val": "0.5", "test": "0.5"}, "sum to less than 1"),
        ({"destinations": "3"}, "destinations must be two numbers"),
        ({"batch_size": "3"}, "batch_size does not apply to mode snapshots"),
    ],
)
def test_settings_that_do_not_fit_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {"store": "s", "out": "o", "mode": "snapshots", "window": "1d", **flags})


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ({"window": "5y"}, ConfigError, "a duration is a number and one of"),
        ({"destinations": [0, 99]}, ConfigError, "the store has nodes 0..29"),
        ({"monitor": "accuracy"}, ConfigError, "monitor = 'accuracy' is no score of this run: use one of ap, auroc, mrr"),
        ({"task": "nodes", "labels": "nothing"}, InputError, "no column 'nothing'"),
        ({"task": "nodes", "labels": "msg"}, InputError, "column msg has 3 values per event"),
        ({"columns": ["nothing"]}, InputError, "no column 'nothing'"),
        ({"window": "400", "stride": None}, ConfigError, "of 0 windows none is for that; take shorter windows"),
    ],
)
def test_a_run_that_is_refused_leaves_nothing(
    store: Path, tmp_path: Path, setting: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        train(configure(store, tmp_path / "run", **({"by": "time"} if setting.get("window") == "5y" else {}), **setting))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "wanted"), [("7d", "7d"), ("3600", 3600), ("0.5", 0.5), (3600, 3600), (0.5, 0.5), ("inf", "inf"), ("1_0", "1_0")]
)
def test_lengths_are_durations_or_numbers(given: Any, wanted: Any) -> None:
    values = {"store": "s", "out": "o", "mode": "snapshots", "window": given, "stride": given}
    config = load_config(None, values)
    assert isinstance(config, SnapshotsConfig)
    assert config.span == (wanted, wanted)
    assert type(config.span[0]) is type(wanted)


def test_tasks_of_a_store(store: Path) -> None:
    with ooc.open(store) as ds:
        assert task_of(ds, "link", None) is None
        assert task_of(ds, "node", None) == LabelTask("multiclass", 4)
        assert task_of(ds, "node", "state") == LabelTask("multiclass", 3)


@pytest.mark.parametrize(
    "name", ["GraphSAGE", *(pytest.param(each, marks=pytest.mark.slow) for each in ("PNA", "GCN", "GAT", "GIN", "EdgeCNN"))]
)
def test_pygs_ready_models_train_on_windows(store: Path, tmp_path: Path, name: str) -> None:
    summary = train(configure(store, tmp_path / "run", model=f"torch_geometric.nn:{name}", epochs=1))
    assert 0 < summary["metrics"]["test"]["ap"] <= 1

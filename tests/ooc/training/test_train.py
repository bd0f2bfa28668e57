"""Training: a plain loop written out here gives the same losses; resuming gives them to the bit; nothing is lost."""

import gc
import inspect
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import SAGEConv

import ooc
from ooc.loading.base import BatchLoader
from ooc.models.convs import BlockSAGEConv
from ooc.runtime.keyed_random import Purpose, key
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, OocError, OocWarning
from ooc.training import batch_mode, checkpoint
from ooc.training import run as baserun
from ooc.training.build import make_model
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from ooc.training.mode import Mode
from tests.conftest import MakeStore
from tests.ooc.runs import SMALL, configure, curve


def test_losses_equal_those_of_a_plain_loop(make_store: MakeStore, tmp_path: Path) -> None:
    """Full-graph PyG-style training by hand: full fan-out, one batch an epoch, no dropout."""
    from ooc.models.builders import full_blocks

    store = make_store()
    settings = {"fanout": [-1, -1], "batch_size": 64, "dropout": 0.0, "weight_decay": 1e-3}
    config = configure(store, tmp_path / "run", **settings)
    summary = train(config)
    steps, epochs = read_metrics(tmp_path / "run")

    with Dataset.open(store, in_memory=True) as ds:
        graph, x, seeds = ds.graph, torch.from_numpy(ds.rows("x").array), torch.from_numpy(ds.split("train"))
        y, val = torch.from_numpy(np.asarray(ds.labels)).long(), torch.from_numpy(ds.split("val"))
        target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
        blocks = full_blocks(torch.from_numpy(np.stack([graph.indices, target])).long(), graph.num_nodes, 2)
    model = make_model(config, x.shape[1], 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=1e-3)
    for epoch in range(config.epochs):
        loss = torch.nn.functional.cross_entropy(model(x, blocks)[seeds], y[seeds])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert steps[epoch]["loss"] == pytest.approx(loss.item(), rel=1e-4)
        accuracy = (model(x, blocks)[val].argmax(1) == y[val]).float().mean().item()
        assert epochs[epoch]["val"]["accuracy"] == pytest.approx(accuracy)
    best = max(epochs, key=lambda line: line["val"]["accuracy"])
    assert summary["metrics"]["val"] == best["val"]
    assert summary["best_epoch"] == best["epoch"]


@pytest.mark.parametrize(
    "settings", [{}, {"mode": "history", "fanout": [], "layers": 2, "parts": 3}], ids=["sampled", "history"]
)
def test_a_run_leaves_nothing_in_memory(make_store: MakeStore, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Nothing waits for Python's garbage collector, which may not run for a long time: so the next run has the memory."""
    config = configure(make_store(), tmp_path / "run", **settings)
    gc.collect()
    before = {id(each) for each in gc.get_objects()}
    gc.disable()
    try:
        train(config)
        new = [each for each in gc.get_objects() if id(each) not in before]
        assert [type(each).__name__ for each in new if isinstance(each, Mode | BatchLoader)] == []
    finally:
        gc.enable()


def test_every_step_is_logged_once_and_the_summary_is_whole(make_store: MakeStore, tmp_path: Path) -> None:
    summary = train(configure(make_store(), tmp_path / "run"))
    steps, epochs = read_metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == list(range(12))
    assert [line["epoch"] for line in steps] == [e for e in range(3) for _ in range(4)]
    assert [line["epoch"] for line in epochs] == [0, 1, 2]
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["seconds_per_epoch"] == pytest.approx(4 * summary["seconds_per_batch"])
    assert summary["peak_rss_bytes"] > 1e8
    assert 30 <= summary["rows_read"] <= 50  # seeds are 30 nodes of 50; a row that fits is read once
    assert summary["bytes_read"] > 0
    assert {"sample", "read", "collate", "consumer"} <= set(summary["stages"])
    assert all(stage["work_s"] >= 0 for stage in summary["stages"].values())
    items = {name: stage["items"] for name, stage in summary["stages"].items()}
    assert 0 < items.pop("read") == items.pop("group") <= 12  # windows of some batches each
    assert set(items.values()) == {12}
    assert list(summary["metrics"]) == ["val", "test"]
    assert [reading["name"] for reading in summary["memory"]] == ["training", "scoring"]


def test_in_memory_and_threads_of_the_loader_change_nothing(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    for name, settings in {
        "disk": {},
        "ram": {"in_memory": True},
        "mmap": {"engine": "mmap"},
        "small": {"memory": "4GB"},
    }.items():
        train(configure(store, tmp_path / name, **settings))
        assert curve(tmp_path / name) == curve(tmp_path / "disk")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_split": "training"}, "no split 'training'"),
        ({"eval_splits": ["holdout"]}, "no split 'holdout'"),
        ({"monitor": "f1"}, "monitor = 'f1'"),
        ({"class_weights": [1.0]}, "class_weights"),
        ({"model": "no.such:Net"}, r"no\.such"),
        ({"memory": "50MB"}, "memory"),
        ({"weight_attr": "weight"}, "weight"),
        ({"device": "cuda"}, "CUDA"),
    ],
)
def test_a_refused_run_leaves_no_directory(make_store: MakeStore, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    if settings == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(OocError, match=words) as caught:
        train(configure(make_store(), tmp_path / "run", **settings))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_diverging_loss_ends_the_run_in_one_line(make_store: MakeStore, tmp_path: Path) -> None:
    with pytest.raises(OocError, match=r"the loss is .* lower `lr`"):
        train(configure(make_store(), tmp_path / "run", lr=1e30, optimizer="sgd"))


def test_patience_stops_early_and_the_best_model_is_scored(make_store: MakeStore, tmp_path: Path) -> None:
    config = configure(make_store(), tmp_path / "run", epochs=60, patience=3, monitor="loss", lr=0.1)
    summary = train(config)
    _, epochs = read_metrics(config.out)
    losses = [line["val"]["loss"] for line in epochs]
    assert len(epochs) == summary["best_epoch"] + 1 + 3 < 60
    assert min(losses) == losses[summary["best_epoch"]] == summary["metrics"]["val"]["loss"]


def test_eval_every_skips_epochs_but_not_the_last(make_store: MakeStore, tmp_path: Path) -> None:
    train(configure(make_store(), tmp_path / "run", eval_every=2))
    assert ["val" in line for line in read_metrics(tmp_path / "run")[1]] == [False, True, True]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("task", "num_classes", "labels"),
    [
        ("binary", 2, np.random.default_rng(0).integers(-1, 2, 50)),
        ("multilabel", 4, np.random.default_rng(0).integers(-1, 2, (50, 4))),
    ],
)
def test_other_tasks_train(make_store: MakeStore, tmp_path: Path, task: str, num_classes: int, labels: Any) -> None:
    store = make_store(y=labels, task=task, num_classes=num_classes)
    config = configure(
        store,
        tmp_path / "run",
        epochs=30,
        lr=0.02,
        dropout=0.0,
        class_weights="balanced",
        label_smoothing=0.05,
        eval_splits=["train"],
    )
    summary = train(config)
    steps, _ = read_metrics(config.out)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert summary["monitor"] == "auroc"
    assert summary["metrics"]["train"]["auroc"] > 0.7


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"activation_checkpointing": True},
        {"activation_checkpointing": "sqrt"},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"replace": True},
        {"model": "gat", "heads": 4, "residual": True, "norm": "layer"},
        {"model": "gcn", "rescale": False},
        {"model": "gin", "input_dropout": 0.1},
        {"model": "gcnii", "layers": 16, "fanout": [1] * 16, "alpha": 0.2, "theta": 0.4},
        {"model": "appnp", "alpha": 0.3},
        {"model": "sgc", "input_dropout": 0.1},
    ],
)
def test_options_reach_the_computation(make_store: MakeStore, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Each setting trains; all but recomputation, which must not, change the curve against the plain model's."""
    store = make_store()
    plain = {name: settings[name] for name in ("model", "heads") if name in settings}
    train(configure(store, tmp_path / "run", **settings))
    train(configure(store, tmp_path / "plain", **plain))
    same = curve(tmp_path / "run") == curve(tmp_path / "plain")
    assert same == ("activation_checkpointing" in settings)


class Net(torch.nn.Module):
    """What a PyG user brings: forward(x, edge_index)."""

    def __init__(self, in_channels: int, out_channels: int, width: int = 3) -> None:
        super().__init__()
        self.first, self.second = SAGEConv(in_channels, width), SAGEConv(width, out_channels)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Odd(Net):
    """Returns something else than a row of as many numbers as there are classes for each node."""

    def __init__(self, in_channels: int, out_channels: int, what: str = "") -> None:
        super().__init__(in_channels, out_channels + (what == "wide"))
        self.what = what

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        out = super().forward(x, edge_index)
        found = {"short": out.mean(0, keepdim=True), "scalar": out.sum(), "deep": out.unsqueeze(1), "dict": {"out": out}}
        return found.get(self.what, out)


class OnBlocks(torch.nn.Module):
    """Returns the rows of all sources, or those of the destinations, squeezed."""

    def __init__(self, in_channels: int, out_channels: int, all_rows: bool = True) -> None:
        super().__init__()
        self.linear, self.all_rows = torch.nn.Linear(in_channels, out_channels), all_rows

    def forward(self, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out if self.all_rows else out[: blocks[-1].num_dst].squeeze()


class WideLayers(torch.nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([BlockSAGEConv(in_channels, 4), BlockSAGEConv(4, out_channels + 1)])


class Failing(torch.nn.Module):
    """Fails in its layer after some forward passes."""

    def __init__(self, in_channels: int, out_channels: int, after: int = 0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([FailingLayer(in_channels, 4, after), BlockSAGEConv(4, out_channels)])


class FailingLayer(BlockSAGEConv):
    def __init__(self, in_channels: int, out_channels: int, after: int) -> None:
        super().__init__(in_channels, out_channels)
        self.left = after

    def forward(self, *arguments: Any) -> torch.Tensor:
        if not self.left:
            raise KeyError("mine")
        self.left -= 1
        return super().forward(*arguments)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, "mode sampled, epoch 0 step 0"),
        ({"model_args": {"after": 2}}, "mode sampled, epoch 0 step 2"),
        ({"mode": "full", "fanout": [], "batch_size": None}, "mode full, before the first step"),
        ({"mode": "history", "fanout": [], "parts": 4}, "mode history, before the first step"),
    ],
)
def test_a_failure_in_the_users_model_names_file_line_and_batch_and_leaves_no_run(
    make_store: MakeStore, tmp_path: Path, settings: dict[str, Any], place: str
) -> None:
    given = {**SMALL, "hidden": None, "model": f"{__name__}:Failing", **settings}
    given = {name: value for name, value in given.items() if value not in (None, [])}
    with pytest.raises(KeyError) as caught:
        ooc.train(store=make_store(), out=tmp_path / "run", **given)
    line = inspect.getsourcelines(FailingLayer.forward)[1] + 2
    assert caught.value.__notes__[-1].endswith(f"tests/ooc/training/test_train.py:{line}: KeyError: 'mine' ({place})")
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_after_a_checkpoint_goes_on(make_store: MakeStore, tmp_path: Path) -> None:
    given = {name: value for name, value in SMALL.items() if name != "hidden"} | {"model": f"{__name__}:Failing"}
    given |= {"store": make_store(), "out": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(KeyError):
        ooc.train(model_args={"after": 2}, **given)
    with pytest.raises(KeyError) as caught:
        ooc.train(model_args={"after": 2}, resume=True, **given)
    assert caught.value.__notes__[-1].endswith("(mode sampled, the scores of epoch 0)")


def test_a_failing_model_leaves_no_plan(make_store: MakeStore, tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught:
        ooc.plan(store=make_store(), out=tmp_path / "run", mode="full", model=f"{__name__}:Failing")
    assert caught.value.__notes__[-1].endswith("(the plan of mode full)")
    assert [path.name for path in tmp_path.iterdir()] == ["test.ooc"]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Odd", {"what": "short"}, r"Odd returns a tensor \[1, 3\] for 8 seeds: return a row for each row of x"),
        ("Odd", {"what": "scalar"}, r"Odd returns a tensor \[\] for 8 seeds"),
        ("Odd", {"what": "dict"}, "Odd returns a dict for 8 seeds"),
        ("Odd", {"what": "deep"}, r"returns a tensor \[8, 1, 3\], and labels of the multiclass task need \[8, 3\]"),
        (
            "Odd",
            {"what": "wide"},
            r"returns a tensor \[8, 4\], and labels of the multiclass task need \[8, 3\]: change the width",
        ),
        ("OnBlocks", {}, "for 8 seeds: return a row for each destination of the last block"),
        ("WideLayers", {"mode": "full"}, r"4\], and labels of the multiclass task need"),
    ],
)
def test_a_model_whose_outputs_do_not_fit_is_refused(
    make_store: MakeStore, tmp_path: Path, name: str, settings: dict[str, Any], words: str
) -> None:
    own = {name: value for name, value in settings.items() if name != "mode"}
    given: dict[str, Any] = {"mode": "full"} if "mode" in settings else {"fanout": [3, 3], "batch_size": 8}
    with pytest.raises(ConfigError, match=words):
        ooc.train(store=make_store(), out=tmp_path / "run", model=f"{__name__}:{name}", model_args=own, plan=False, **given)


def test_a_squeezed_output_of_one_seed_is_a_row(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(y=np.arange(50) % 2, task="binary", num_classes=2)
    given: dict[str, Any] = {"model": f"{__name__}:OnBlocks", "model_args": {"all_rows": False}, "fanout": [3], "plan": False}
    result = ooc.train(store=store, out=tmp_path / "run", batch_size=29, epochs=1, **given)  # of 30
    assert result["steps"] == 2


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_a_split_without_a_known_label_is_refused(make_store: MakeStore, tmp_path: Path, mode: str) -> None:
    def run(store: Path, **settings: Any) -> None:
        ooc.train(store=store, out=tmp_path / "run", mode=mode, model="sage", hidden=8, plan=False, **settings)

    store, of_one = make_store(y=np.full(50, -1), num_classes=3), make_store("one.ooc", y=np.zeros(50, np.int64), num_classes=3)
    with pytest.raises(ConfigError, match=r"split 'train' of .*test\.ooc has no known label: nothing to train on"):
        run(store)
    with pytest.raises(ConfigError, match="has no known label of a class whose weight is not 0"):
        run(of_one, class_weights=[0.0, 1.0, 1.0])


def test_an_undefined_score_chooses_no_model_and_costs_no_patience(make_store: MakeStore, tmp_path: Path) -> None:
    """Validation has nodes of one class alone, so that there is no area under a curve."""
    y = np.arange(50) % 3
    config = configure(make_store(y=y), tmp_path / "run", monitor="auroc", patience=1, epochs=4, eval_splits=["val"])
    with Dataset.open(config.store) as ds:
        y[np.asarray(ds.split("val"))] = 1
    store = make_store("one.ooc", y=y)
    with pytest.warns(OocWarning, match="auroc of validation is undefined and cannot select a model") as warned:
        result = train(configure(store, tmp_path / "run", monitor="auroc", patience=1, epochs=4, eval_splits=["val"]))
    assert len([each for each in warned if "undefined" in str(each.message)]) == 1
    assert result["best_epoch"] is None
    assert len(read_metrics(tmp_path / "run")[1]) == 4


def test_accumulation_makes_the_gradient_of_the_joint_batch(make_store: MakeStore, tmp_path: Path) -> None:
    """Six batches of 5 in two groups of three step as two batches of 15 do, without dropout and shuffle apart."""
    store = make_store()
    settings = {"dropout": 0.0, "fanout": [-1, -1], "epochs": 1, "optimizer": "sgd", "lr": 0.1}
    train(configure(store, tmp_path / "split", batch_size=5, accumulate=3, **settings))
    train(configure(store, tmp_path / "joint", batch_size=15, **settings))
    one, two = (torch.load(tmp_path / name / "model.pt")["model"] for name in ("split", "joint"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)


def test_parameters_depend_on_the_seed_alone(make_store: MakeStore, tmp_path: Path) -> None:
    config = configure(make_store(), tmp_path / "run")
    torch.manual_seed(1)
    one = make_model(config, 8, 3).state_dict()
    torch.manual_seed(2)
    two = make_model(config, 8, 3).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert key(5, Purpose.INIT) != key(6, Purpose.INIT)


@pytest.mark.alone
def test_by_default_checkpoints_take_little_of_the_time(make_store: MakeStore, tmp_path: Path, monkeypatch: Any) -> None:
    """Within CHECKPOINT_SECONDS only the last one is written, and with none between there is one a step."""
    saves: list[int] = []
    save = baserun.checkpoint.save
    monkeypatch.setattr(baserun.checkpoint, "save", lambda *a: (saves.append(1), save(*a))[1])
    monkeypatch.setattr(baserun, "CHECKPOINT_SECONDS", 3600.0)
    train(configure(make_store(), tmp_path / "rare"))
    assert len(saves) == 2  # the checkpoint and model.pt
    saves.clear()
    monkeypatch.setattr(baserun, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(baserun, "CHECKPOINT_SPACING", 0.0)
    train(configure(make_store("b.ooc"), tmp_path / "often"))
    assert len(saves) == 12 + 3 + 1


def test_a_second_run_into_a_directory_leaves_the_first_untouched(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = make_store(), tmp_path / "run"
    make_loss = batch_mode.make_loss

    def overtaken(*arguments: Any) -> Any:  # the second has found the name free when the first takes it
        monkeypatch.setattr(batch_mode, "make_loss", make_loss)
        train(configure(store, out, epochs=1))
        return make_loss(*arguments)

    monkeypatch.setattr(batch_mode, "make_loss", overtaken)
    with pytest.raises(ConfigError, match="exists already"):
        train(configure(store, out, epochs=2))
    assert json.loads((out / "config.json").read_text())["epochs"] == 1
    assert (out / "summary.json").exists()


def test_a_full_disk_at_the_start_is_named_and_leaves_nothing(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    store = make_store()
    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        train(configure(store, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_store_without_features_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no features"):
        train(configure(make_store(x=None), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_histories_are_made_when_nothing_else_is_refused(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have files and a thread, which a run that fails while it is composed would leave."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    settings: dict[str, Any] = {"mode": "history", "parts": 4, "fanout": [], "layers": 2, "tensorboard": True}
    with pytest.raises(ConfigError, match=r"pip install 'ooc\[tensorboard\]'"):
        train(configure(make_store(), tmp_path / "run", **settings))
    assert not [thread for thread in threading.enumerate() if thread.name == "ooc-history"]
    assert not (tmp_path / "run").exists()


@pytest.mark.cases(1)
@pytest.mark.parametrize("settings", [{}, {"evaluate": "layerwise"}, {"lr": 1e-9, "optimizer": "sgd"}])
def test_validation_of_the_best_model_is_scored_once(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """As plans foresee."""
    asked: list[str] = []
    foreseen: list[dict[str, int]] = []
    score = batch_mode.BatchMode.score

    def counted(self: Any, split: str, epoch: int) -> Any:
        asked.append(split)
        foreseen.append(self.times_scored(["train", "val", "test"], 3))
        return score(self, split, epoch)

    monkeypatch.setattr(batch_mode.BatchMode, "score", counted)
    store = make_store()
    summary = train(configure(store, tmp_path / "run", epochs=3, eval_splits=["val", "test"], **settings))
    assert asked == ["val", "val", "val", "test"]
    assert foreseen[0] == {"train": 0, "val": 3, "test": 1}
    _, epochs = read_metrics(tmp_path / "run")
    assert summary["metrics"]["val"] == epochs[summary["best_epoch"]]["val"]
    (tmp_path / "run" / "summary.json").unlink()
    again = train(configure(store, tmp_path / "run", epochs=3, eval_splits=["val", "test"], **settings), resume=True)
    assert asked[4:] == ["test"], "the checkpoint has what the best model scored on validation"
    assert again["metrics"] == summary["metrics"]
    old = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=False)
    del old["state"]["best_scores"]  # as earlier versions wrote it
    torch.save(old, tmp_path / "run" / "checkpoint.pt")
    (tmp_path / "run" / "summary.json").unlink()
    again = train(configure(store, tmp_path / "run", epochs=3, eval_splits=["val", "test"], **settings), resume=True)
    assert asked[5:] == ["val", "test"]
    assert again["metrics"] == summary["metrics"]


def test_without_splits_nothing_is_scored_at_the_end_but_validation_still_selects_the_model(
    make_store: MakeStore, tmp_path: Path
) -> None:
    summary = train(
        configure(make_store(), tmp_path / "run", epochs=3, eval_every=2, eval_splits=[], model="sage", batch_size=16)
    )
    assert summary["metrics"] == {}
    _, epochs = read_metrics(tmp_path / "run")
    assert ["val" in epoch for epoch in epochs] == [False, True, True]
    assert summary["best_epoch"] == max((1, 2), key=lambda k: epochs[k]["val"]["accuracy"])


def test_what_torch_cannot_allocate_is_a_memory_error_and_leaves_no_run(make_store: MakeStore, tmp_path: Path) -> None:
    config = configure(make_store(), tmp_path / "run", model="gat", heads=2**16, hidden=2**16, output_heads=2**31 - 1)
    with pytest.raises(MemoryError, match=r"torch asked for .*TB at once"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_run_says_how_the_engine_gds_reads_into_the_host_s_memory() -> None:
    told = [Mode.notes(SimpleNamespace(config=SimpleNamespace(engine=name))) for name in ("auto", "gds")]  # type: ignore[arg-type]
    assert told[0] == []
    assert told[1] == ["`engine='gds'` fills GPU memory; rows that batches gather in the host's memory are read by pread"]

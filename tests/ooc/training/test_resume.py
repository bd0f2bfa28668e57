"""Runs that end early and go on: to the bit, whatever the memory; nothing is lost."""

import dataclasses
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.config.nodes import TrainConfig
from ooc.history.history import History
from ooc.layerwise import shape as sweepshape
from ooc.layerwise.scores import ExactScores
from ooc.runtime import memory_plan
from ooc.runtime.memory_plan import divide
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.errors import BudgetError, ConfigError
from ooc.training import checkpoint
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from ooc.training.open_run import open_run
from ooc.training.watchers import Watchers
from tests.conftest import MakeStore
from tests.ooc.runs import InterruptAt, KillAt, Killed, configure, curve, tight


@pytest.mark.cases(1)
@pytest.mark.parametrize(("every", "killed_at"), [(1, 0), (1, 2), (1, 11), (3, 3), (3, 7), (None, 5)])
def test_resume_continues_to_the_bit(make_store: MakeStore, tmp_path: Path, every: int | None, killed_at: int) -> None:
    store = make_store()
    whole, cut = (
        configure(store, tmp_path / name, checkpoint_every=every, accumulate=2, grad_clip=1.0, norm="batch")
        for name in ("whole", "cut")
    )
    summary = train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(killed_at))
    resumed = train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)
    assert resumed["metrics"] == summary["metrics"]
    one, two = (torch.load(c.out / "model.pt")["model"] for c in (whole, cut))
    assert all(torch.equal(one[name], two[name]) for name in one)
    if every == 1:
        assert resumed["processes"] == (2 if killed_at > 1 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [pytest.param(0, marks=pytest.mark.slow), 23, pytest.param(60, marks=pytest.mark.slow)])
def test_features_larger_than_the_memory_train_evaluate_and_resume(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """Windows that give up rows, over epochs and the evaluations between them: the curve of all rows in memory."""
    store = make_store(num_nodes=600, num_edges=3000, x=np.random.default_rng(3).standard_normal((600, 64), np.float32))
    settings: dict[str, Any] = {"batch_size": 12, "checkpoint_every": 7}
    whole = train(configure(store, tmp_path / "whole", in_memory=True, **settings))
    small = dataclasses.replace(divide(10**9, baseline=0), max_batch=90_000, in_flight=1)
    monkeypatch.setattr(memory_plan, "divide", lambda *_, **__: small)
    cut = configure(store, tmp_path / "cut", **settings)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(killed_at))
    resumed = train(cut, resume=True)
    assert curve(cut.out) == curve(tmp_path / "whole")
    assert resumed["metrics"] == whole["metrics"]
    assert resumed["rows_read"] > 600  # rows were given up and read again


class Notes(KillAt):
    """What a person is told."""

    def __init__(self, total_steps: int = -1) -> None:
        super().__init__(total_steps)
        self.all: list[str] = []

    def note(self, text: str) -> None:
        self.all.append(text)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("dropout", "kept", "told"), [(0.5, None, True), (0.5, 2, True), (0.5, 3, False), (0.0, None, False)])
def test_a_run_whose_dropout_drew_other_numbers_goes_on_and_is_told(
    make_store: MakeStore, tmp_path: Path, dropout: float, kept: int | None, told: bool
) -> None:
    """Checkpoints of earlier versions have no number of the stream."""
    config = configure(make_store(), tmp_path / "run", dropout=dropout, checkpoint_every=1, epochs=1)
    with pytest.raises(Killed):
        train(config, watcher=KillAt(2))
    saved = checkpoint.load(config.out)
    assert saved is not None
    assert saved.pop("dropout_stream") == 3
    checkpoint.save(config.out, saved if kept is None else saved | {"dropout_stream": kept})
    notes = Notes()
    train(config, resume=True, watcher=notes)
    assert any("dropout drew other random numbers" in text for text in notes.all) is told
    saved = checkpoint.load(config.out)
    assert saved is not None
    assert saved["dropout_stream"] == 3


def test_settings_that_were_refused_are_not_those_of_the_next_resume(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = make_store(), tmp_path / "run"
    train(configure(store, out, evaluate="layerwise", max_steps=3))
    before = (out / "config.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(sweepshape, "AHEAD", 2**50)
        with pytest.raises(BudgetError, match="are left for a pass"):
            train(configure(store, out, evaluate="layerwise", max_steps=5, memory=tight()), resume=True)
    assert (out / "config.json").read_bytes() == before
    train(configure(store, out, evaluate="layerwise", max_steps=5, memory=tight()), resume=True)
    assert (out / "config.json").read_bytes() != before


def test_ctrl_c_keeps_a_checkpoint_of_that_very_step(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    train(configure(store, tmp_path / "whole"))
    config = configure(store, tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        train(config, watcher=InterruptAt(5))
    assert len(read_metrics(config.out)[0]) == 6
    state = torch.load(config.out / "checkpoint.pt")["state"]
    assert (state["epoch"], state["step"], state["total_steps"]) == (1, 2, 6)
    train(config, resume=True)
    assert curve(config.out) == curve(tmp_path / "whole")


def test_a_run_can_be_extended(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    train(configure(store, tmp_path / "whole", max_steps=10))
    short = configure(store, tmp_path / "cut", max_steps=6)
    assert train(short)["total_steps"] == 6
    assert train(short.model_copy(update={"max_steps": 10}), resume=True)["total_steps"] == 10
    assert curve(short.out) == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("began", "resumed", "words"),
    [
        ({"epochs": 2}, {"epochs": 1}, "2 epochs are trained; resume it with more than 2 epochs to go on"),
        ({"max_steps": 3}, {"max_steps": 2}, "3 steps are trained; resume it with max_steps above 3 to go on"),
        (
            {"patience": 2, "lr": 1e-12, "epochs": 9},
            {},
            "2 evaluations did not improve; resume it with patience above 2 to go on",
        ),
    ],
)
def test_a_run_with_nothing_left_to_train_says_how_to_go_on(
    make_store: MakeStore, tmp_path: Path, began: dict[str, Any], resumed: dict[str, Any], words: str
) -> None:
    config, notes = configure(make_store(), tmp_path / "run", **began), Notes()
    train(config, watcher=notes)
    assert not any("nothing is left" in text for text in notes.all)
    before = curve(config.out)
    train(config.model_copy(update=resumed), resume=True, watcher=notes)
    assert f"nothing is left to train in {config.out}: {words}" in notes.all
    assert curve(config.out) == before


def test_resume_against_something_else_is_refused_and_touches_nothing(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    config = configure(store, tmp_path / "run")
    train(config)
    before = {path.name: path.read_bytes() for path in config.out.iterdir()}
    other = make_store("other.ooc", seed=1)
    for update, words in (
        ({"store": other}, "another store"),
        ({"store": make_store("bare.ooc", x=None)}, "another store"),
        ({"model": "gin"}, "model = 'sage', not 'gin'"),
        ({"lr": 0.5}, "lr = 0.01, not 0.5"),
        ({"hidden": 16}, "hidden"),
        ({"features": {"x": "elsewhere.zarr"}}, "features"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(config.model_copy(update=update), resume=True)
    with pytest.raises(ConfigError, match="exists already"):
        train(config)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not a run"):
        train(config.model_copy(update={"out": tmp_path / "mine"}), resume=True)
    assert {path.name: path.read_bytes() for path in config.out.iterdir()} == before


def test_seconds_are_counted_up_to_a_checkpoint_and_up_to_a_failure(make_store: MakeStore, tmp_path: Path) -> None:
    with open_run(configure(make_store(), tmp_path / "run"), False, Watchers([])) as run:
        with suppress(Killed), run.booked("refresh_seconds"):
            time.sleep(0.02)
            run.checkpoint()
            saved = checkpoint.load(tmp_path / "run")
            assert saved is not None
            assert saved["spent"]["refresh_seconds"] >= 0.02
            time.sleep(0.02)
            raise Killed
        assert run.spent()["refresh_seconds"] >= 0.04
        with suppress(Killed), run.training():
            time.sleep(0.02)
            raise Killed
        found = run.spent()
        assert found["train_seconds"] >= 0.02
        assert found["refresh_seconds"] == run.spent()["refresh_seconds"], "the clock has stopped"


def test_all_parts_of_a_mode_are_closed_whatever_one_raises(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, closed = History.close, list[bool]()

    def failing(history: History) -> None:
        close(history)
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(History, "close", failing)
    monkeypatch.setattr(ExactScores, "close", lambda _, keep=True: closed.append(keep))
    settings: dict[str, Any] = {"mode": "history", "parts": 4, "fanout": [], "layers": 2}
    with (
        pytest.raises(RuntimeError, match="the disk is gone"),
        open_run(configure(make_store(), tmp_path / "run", **settings), False, Watchers([])),
    ):
        pass
    assert closed == [True]


def test_a_module_of_the_users_own_trains_and_resumes(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    own = {"model": "tests.ooc.training.test_train:Net", "model_args": {"width": 5}, "epochs": 2}
    whole, cut = configure(store, tmp_path / "whole", **own), configure(store, tmp_path / "cut", **own, checkpoint_every=1)
    train(whole)
    assert torch.load(whole.out / "model.pt")["model"]["first.lin_l.weight"].shape == (5, 8)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(5))
    train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)
    with pytest.raises(ConfigError, match="model_args"):
        train(cut.model_copy(update={"model_args": {"width": 6}}), resume=True)


def test_a_start_killed_while_its_configuration_was_written_can_be_resumed(make_store: MakeStore, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / ".config.json.123.tmp").write_text('{"sto')
    (out / "metrics.jsonl").touch()
    train(configure(make_store(), out, epochs=1), resume=True)
    assert (out / "summary.json").exists()


def test_a_run_by_labor_resumes_to_the_bit_and_by_labor_alone(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_edges=1500)
    own = {"epochs": 4, "sampler": "labor", "layer_dependency": True, "batch_dependency": 6, "importance": 1}
    whole, cut = configure(store, tmp_path / "whole", **own), configure(store, tmp_path / "cut", **own, checkpoint_every=1)
    train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(6))
    for changed in ({"sampler": "neighbor"}, {"layer_dependency": False}, {"batch_dependency": 8}, {"importance": "*"}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            train(cut.model_copy(update=changed), resume=True)
    train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)


def whole_and_resumed(store: Path, tmp_path: Path, cut_at: int, own: dict[str, Any]) -> tuple[TrainConfig, TrainConfig]:
    """A run, and one of the same curve that was cut at a step and resumed."""
    whole, cut = configure(store, tmp_path / "whole", **own), configure(store, tmp_path / "cut", **own, checkpoint_every=1)
    train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(cut_at))
    train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)
    return whole, cut


@pytest.mark.cases(1)
@pytest.mark.parametrize("cut_at", [3, 6])
def test_a_run_whose_sampler_learns_resumes_to_the_bit(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int
) -> None:
    """Inside a period of the policy's parameters and between two; a profile before the run changes nothing."""
    monkeypatch.setattr("ooc.training.learned_sampling.PERIODS", 2)
    own = {"epochs": 4, "sampler": "learned", "fanout": [12, 20], "evaluate": "layerwise", "eval_fanout": [12, 20]}
    store, own = make_store(num_edges=1500), {**own, "batch_size": 8}
    whole, cut = whole_and_resumed(store, tmp_path, cut_at, own)
    learned = [torch.load(each.out / "checkpoint.pt", weights_only=True)["sampler"] for each in (whole, cut)]
    assert torch.equal(learned[0]["parameters"], learned[1]["parameters"])
    assert learned[0]["optimizer"]["state"][0]["step"] >= 4
    assert learned[0]["parameters"][-16:].abs().max() > 0.01
    planned = configure(store, tmp_path / "planned", **own, plan=True)
    train(planned)
    assert curve(planned.out) == curve(whole.out)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("cut_at", "more"), [(3, {}), (6, {"model": "gcn", "accumulate": 3, "normalize": False})])
def test_a_run_that_draws_by_gradients_resumes_to_the_bit(
    make_store: MakeStore, tmp_path: Path, cut_at: int, more: dict[str, Any]
) -> None:
    """The norms of its last epochs are rows in its directory; a profile before the run changes nothing."""
    own = {"epochs": 4, "sampler": "gradient", "fanout": [12, 20], "evaluate": "layerwise", "eval_fanout": [12, 20]}
    store, own = make_store(num_edges=1500), {**own, "batch_size": 8, **more}
    whole, cut = whole_and_resumed(store, tmp_path, cut_at, own)
    norms = [read_all(each.out / "importance" / "latest") for each in (whole, cut)]
    assert np.array_equal(*norms)
    assert len(np.unique(norms[0])) > 20
    planned = configure(store, tmp_path / "planned", **own, plan=True)
    train(planned)
    assert curve(planned.out) == curve(whole.out)


def read_all(path: Path) -> Any:
    """All rows in a directory."""
    with closing(DiskRows.open(path)) as rows:
        out = np.empty(rows.shape, rows.dtype)
        rows.read(np.arange(len(out)), out)
        return out


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["sage", "gcn"])
def test_a_run_of_a_layer_wise_sampler_resumes_to_the_bit_and_by_it_alone(
    make_store: MakeStore, tmp_path: Path, model: str
) -> None:
    store = make_store(num_edges=1500)
    own = {"epochs": 4, "sampler": "fastgcn", "fanout": [12, 20], "model": model, "evaluate": "layerwise"}
    own |= {"eval_fanout": [12, 20]}
    whole, cut = configure(store, tmp_path / "whole", **own), configure(store, tmp_path / "cut", **own, checkpoint_every=1)
    train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(6))
    for changed in ({"sampler": "ladies"}, {"normalize": False}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            train(cut.model_copy(update=changed), resume=True)
    train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)


@pytest.mark.cases(1)
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_run_cut_inside_a_group_of_batches_is_extended_to_the_bit(make_store: MakeStore, tmp_path: Path, cut: int) -> None:
    store, settings = make_store(), {"accumulate": 3, "epochs": 2}
    train(configure(store, tmp_path / "whole", **settings))
    train(configure(store, tmp_path / "run", max_steps=cut, **settings))
    train(configure(store, tmp_path / "run", **settings), resume=True)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")

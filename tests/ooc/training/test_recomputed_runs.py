"""`--activation-checkpointing` in training on batches: curves of the plain run to the bit, whatever is recomputed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.config.modes import load_config
from ooc.planning import recomputation
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.errors import ConfigError
from ooc.training.checkpoint import read_json
from ooc.training.loop import planning, train
from tests.conftest import MakeStore
from tests.ooc.runs import KillAt, Killed, configure, curve

DEEP: dict[str, Any] = {"hidden": 32, "batch_size": 200, "epochs": 4, "dropout": 0.2, "layers": 4, "fanout": [3, 3, 3, 3]}
IN_MODES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "cluster": {"mode": "cluster", "fanout": [], "parts": 3},
    "saint": {"mode": "saint", "fanout": [], "roots": 300, "saint_coverage": 2},
}


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    x = np.random.default_rng(3).standard_normal((900, 32), np.float32)
    return make_store(num_nodes=900, num_edges=6000, x=x)


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations have less room than small runs take."""
    monkeypatch.setattr(MemoryPlan, "step_activations", property(lambda plan: 300_000))


@pytest.mark.cases(1)
@pytest.mark.usefixtures("short_of_memory")
@pytest.mark.parametrize("mode", IN_MODES)
def test_curves_are_those_of_the_plain_run_and_runs_resume_to_the_bit(store: Path, tmp_path: Path, mode: str) -> None:
    settings = {**DEEP, **IN_MODES[mode]}
    train(configure(store, tmp_path / "plain", **settings))
    for kind in ("sqrt", "auto"):
        summary = train(configure(store, tmp_path / kind, activation_checkpointing=kind, **settings))
        assert curve(tmp_path / kind) == curve(tmp_path / "plain"), kind
        assert ("recomputation" in summary) == (kind == "auto")
    assert summary["recomputation"]["segments"]
    assert summary["recomputation"]["measurements"] == 1
    assert read_json(tmp_path / "auto" / "summary.json", "")["recomputation"]["room_bytes"] == 300_000
    cut = configure(store, tmp_path / "cut", checkpoint_every=2, activation_checkpointing="auto", **settings)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(3))
    train(cut.model_copy(update={"activation_checkpointing": "sqrt"}), resume=True)
    assert curve(cut.out) == curve(tmp_path / "plain"), "and another way may go on"


@pytest.mark.cases(2)
@pytest.mark.usefixtures("short_of_memory")
@pytest.mark.parametrize(
    "settings", [{"model": "gat", "heads": 4}, {"model": "gcnii"}, {"jk": "max"}, {"norm": "batch"}], ids=str
)
def test_models_have_the_curve_of_the_plain_run(store: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    for kind in ("none", "auto"):
        train(configure(store, tmp_path / kind, activation_checkpointing=kind, **{**DEEP, "max_steps": 4}, **settings))
    assert curve(tmp_path / "auto") == curve(tmp_path / "none")


def test_where_there_is_room_all_are_kept(store: Path, tmp_path: Path) -> None:
    summary = train(configure(store, tmp_path / "run", activation_checkpointing="auto", **DEEP))
    assert summary["recomputation"]["fits"]
    assert not summary["recomputation"]["segments"]


@pytest.mark.usefixtures("short_of_memory")
def test_a_plan_says_what_is_recomputed(store: Path, tmp_path: Path) -> None:
    given = {"store": store, "mode": "sampled", "activation_checkpointing": "auto", **DEEP}
    plan: Any = ooc.plan(**given, out=tmp_path / "run")
    assert "layers are computed again" in plan.activations
    assert "at the peak of 300 kB" in plan.activations
    other: Any = ooc.plan(**{**given, "activation_checkpointing": "sqrt"}, out=tmp_path / "run")
    assert other.activations == ""


def test_a_run_beyond_its_memory_plans_with_less(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is told to have had 1 MB more than it may, from its second batch on."""
    config = configure(store, tmp_path / "run", activation_checkpointing="auto", **DEEP)
    with planning(config, tmp_path / "plan") as mode:
        limit = mode.budget.memory
        monkeypatch.setattr(recomputation, "resident_bytes", lambda: (0, limit - 1_000_000))
        planner = recomputation.planner_for(mode.model, mode.budget)
        monkeypatch.setattr(recomputation, "resident_bytes", lambda: (0, limit + 1_000_000))
        before = planner.room
        batch = next(iter(mode.batches(0, 0, 1)))
        planner(mode.model, batch)
        planner(mode.model, batch)
        assert planner.room == before - 1_000_000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"activation_checkpointing": "auto", "compile": True}, "auto does not apply to compile = true"),
        ({"activation_checkpointing": "auto", "mode": "history"}, "auto does not apply to mode history"),
        ({"activation_checkpointing": "sqrt", "mode": "history"}, "sqrt does not apply to mode history"),
        ({"activation_checkpointing": "auto", "model": "revsage"}, "activation_checkpointing does not apply to model revsage"),
        ({"activation_checkpointing": "auto", "compress": "int8"}, "save the same memory: leave one of them out"),
        ({"activation_checkpointing": "root"}, "expected 'none', 'layers', 'sqrt' or 'auto'"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {"store": "s", "out": "o", **given})


def test_a_switch_is_read_as_before() -> None:
    found = {value: load_config(None, {"store": "s", "out": "o", "activation_checkpointing": value}) for value in (True, False)}
    assert {value: each.activation_checkpointing for value, each in found.items()} == {True: "layers", False: "none"}  # type: ignore[attr-defined]

"""`--mode full`: the losses of training the whole graph in memory, in any memory, and to the bit behind any end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.cli.main import main
from ooc.config.nodes import FullConfig
from ooc.fullgraph.placement import step_profile as fullprofile
from ooc.metrics.nodes import Loss
from ooc.models.builders import full_blocks
from ooc.runtime.clock import read_trace
from ooc.runtime.keyed_random import Purpose, key
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.training.build import make_model
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import InterruptAt, KillAt, Killed, curve, tight

SETTINGS: dict[str, Any] = {"hidden": 16, "layers": 2, "epochs": 4, "seed": 5, "threads": 1, "plan": False}


def configure(store: Path, out: Path, **settings: Any) -> FullConfig:
    return FullConfig(store=store, out=out, **{**SETTINGS, **settings})


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    return make_store(num_nodes=240, num_edges=1500)


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in curve(out).splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def in_memory(config: FullConfig) -> list[float]:
    """The same training at once on all nodes, by autograd."""
    found = []
    with Dataset.open(config.store, in_memory=True) as ds:
        model = make_model(config, ds.num_features, ds.num_classes or 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
        target = np.repeat(np.arange(ds.num_nodes), np.diff(ds.graph.indptr))
        edges = torch.from_numpy(np.stack([np.asarray(ds.graph.indices, np.int64), target]))
        blocks, x = full_blocks(edges, ds.num_nodes, config.layers), torch.from_numpy(np.array(ds.rows("x").array))
        labels: Any = ds.labels
        node = torch.from_numpy(np.array(ds.split("train")))
        y = torch.from_numpy(np.array(labels))[node]
        for epoch in range(config.epochs):
            model.train()
            torch.manual_seed(key(config.seed, Purpose.TORCH, epoch, 0) >> 1)
            loss = Loss("multiclass", label_smoothing=config.label_smoothing)(model(x, blocks)[node], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "sage"},
        {"model": "gcn", "norm": "batch", "label_smoothing": 0.1},
        {"model": "gat", "heads": 2},
        {"model": "revsage", "layers": 3},
        {"model": "revgat", "heads": 2},
    ],
    ids=lambda settings: settings["model"],
)
def test_losses_are_those_of_the_whole_graph_in_memory(store: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    config = configure(store, tmp_path / "run", **settings)
    summary = train(config)
    assert summary["metrics"]["test"]["accuracy"] is not None
    assert summary["total_steps"] == config.epochs
    np.testing.assert_allclose(losses(config.out), in_memory(config), rtol=1e-4)


def test_a_run_is_the_same_in_any_memory_and_under_any_placement(store: Path, tmp_path: Path) -> None:
    train(configure(store, tmp_path / "whole"))
    want = curve(tmp_path / "whole")
    for name, more in {
        "ram": {"in_memory": True},
        "pread": {"engine": "pread"},
        "budget": {"memory": tight()},
        **{where: {"placement": where} for where in ("retained", "disk", "recomputed")},
    }.items():
        train(configure(store, tmp_path / name, **more))
        assert curve(tmp_path / name) == want


@pytest.mark.cases(1)
@pytest.mark.parametrize("watcher", [KillAt, InterruptAt])
def test_a_run_that_ended_early_goes_on_to_the_bit(store: Path, tmp_path: Path, watcher: type[KillAt]) -> None:
    train(configure(store, tmp_path / "whole"))
    for step in (0, 2):
        config = configure(store, tmp_path / f"cut-{step}", checkpoint_every=1)
        with pytest.raises((Killed, KeyboardInterrupt)):
            train(config, watcher=watcher(step))
        train(config, resume=True)
        assert curve(config.out) == curve(tmp_path / "whole")


def test_max_steps_ends_with_scores_and_more_steps_go_on(store: Path, tmp_path: Path) -> None:
    train(configure(store, tmp_path / "whole"))
    config = configure(store, tmp_path / "cut", max_steps=2)
    assert train(config)["metrics"]["val"]["accuracy"] is not None
    train(config.model_copy(update={"max_steps": None}), resume=True)
    assert curve(config.out) == curve(tmp_path / "whole")


@pytest.mark.slow
def test_a_plan_is_made_kept_and_changes_nothing(store: Path, tmp_path: Path) -> None:
    train(configure(store, tmp_path / "whole"))
    for name, more in {"fits": {}, "tight": {"memory": tight()}, "forced": {"placement": "disk"}}.items():
        config = configure(store, tmp_path / name, **{"plan": True, **more})
        train(config)
        assert curve(config.out) == curve(tmp_path / "whole")
        assert json.loads((config.out / "plan.json").read_bytes())["seconds"] > 0


def test_what_cannot_be_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a GPU"):
        train(configure(store, tmp_path / "run", placement="device"))
    with pytest.raises(BudgetError, match="of disk"):
        train(configure(store, tmp_path / "run", placement="disk", disk="1KB"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_goes_on_heeds_the_placement_and_the_disk_it_is_given_then(store: Path, tmp_path: Path) -> None:
    train(configure(store, tmp_path / "whole"))
    out = tmp_path / "run"

    def went(epochs: int, placement: str, **settings: Any) -> dict[str, Any]:
        train(configure(store, out, plan=True, epochs=epochs, placement=placement, **settings), resume=epochs > 1)
        plan: dict[str, Any] = json.loads((out / "plan.json").read_bytes())
        return plan

    forced = went(1, "recomputed")
    assert went(2, "recomputed")["runs"] == forced["runs"], "the plan it began with"
    planned = went(3, "planned")
    assert planned["placement"]["placements"] != forced["placement"]["placements"]
    with pytest.raises(ConfigError, match="leave room"):
        went(4, "disk", disk="1KB")
    went(4, "planned", disk="1KB")  # all is in memory
    assert losses(out) == losses(tmp_path / "whole")


def test_what_fits_the_memory_is_planned_without_a_disk(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(fullprofile, "disk_speed", refused)
    train(configure(store, tmp_path / "run", plan=True))
    plan = json.loads((tmp_path / "run" / "plan.json").read_bytes())
    assert set(plan["placement"]["placements"].values()) == {"retained"}


def test_nothing_is_left_but_the_runs_files(store: Path, tmp_path: Path) -> None:
    train(configure(store, tmp_path / "run", placement="disk"))
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {
        "config.json",
        "metrics.jsonl",
        "checkpoint.pt",
        "model.pt",
        "summary.json",
        "plan.json",
        "trace.json",
    }


@pytest.mark.slow
def test_the_verbs_take_such_a_run(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    flags = ["--layers", "2", "--epochs", "2", "--model", "gcn", "--no-plan"]
    assert main(["train", str(store), "--out", str(out), "--mode", "full", *flags]) == 0
    assert "test: loss" in capsys.readouterr().out
    assert main(["infer", str(store), "--checkpoint", str(out), "--out", str(tmp_path / "classes.parquet")]) == 0
    assert main(["plan", str(store), "--mode", "full", "--layers", "2", "--model", "gcn"]) == 0
    assert "seconds per epoch" in capsys.readouterr().out
    assert main(["report", str(out)]) == 0
    assert "the whole graph, exactly" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fanout": "10,5"}, "fanout does not apply to mode full"),
        ({"batch_size": 7}, "batch_size does not apply to mode full"),
        ({"placement": "attic"}, "placement = 'attic' is invalid"),
        ({"disk": "much"}, "much"),
    ],
)
def test_settings_that_mean_nothing_are_refused(store: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    from ooc.config.modes import load_config

    with pytest.raises(ConfigError, match=message):
        load_config(None, {"store": store, "out": tmp_path / "run", "mode": "full", **settings})


@pytest.mark.slow
def test_a_planned_run_keeps_its_plan_goes_on_by_it_and_shows_it(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(configure(store, tmp_path / "whole"))
    config = configure(store, tmp_path / "run", plan=True, checkpoint_every=1)
    with pytest.raises(Killed):
        train(config, watcher=KillAt(2))
    before = (config.out / "plan.json").read_bytes()
    summary = train(config, resume=True)
    assert (config.out / "plan.json").read_bytes() == before
    assert curve(config.out) == curve(tmp_path / "whole")
    assert summary["plan"]["predicted"]["seconds_per_epoch"] == json.loads(before)["seconds"]
    assert summary["plan"]["actual"]["seconds_per_epoch"] > 0
    assert 0 < summary["plan"]["actual"]["value_bytes"] <= json.loads(before)["room"]["memory"]
    assert max(sample.memory for sample in read_trace(config.out).memory) == summary["plan"]["actual"]["value_bytes"]
    assert main(["report", str(config.out)]) == 0
    page = (config.out / "report.html").read_text()
    assert "Memory of a step" in page
    assert "measured: " in page
    capsys.readouterr()
    flags = ["--mode", "full", "--hidden", "16", "--layers", "2"]
    assert main(["plan", str(store), *flags, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["placement"]["placements"]) == set(json.loads(before)["placement"]["placements"])
    assert main(["plan", str(store), *flags, "--placement", "disk"]) == 0
    assert "intermediates" in capsys.readouterr().out

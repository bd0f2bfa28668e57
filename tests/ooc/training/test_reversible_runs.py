"""Runs of reversible models, and of models with widths, jumps and blocks of their own, in every mode that has them."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.config.modes import load_config
from ooc.config.nodes import FullConfig, TrainConfig
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.models.builders import full_blocks
from ooc.models.layers import evaluating
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.build import make_model
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.runs import KillAt, Killed, configure, curve

REVERSIBLE: dict[str, Any] = {"model": "revsage", "layers": 6, "hidden": 16, "fanout": [], "eval_fanout": [], "epochs": 2}
PARTS: dict[str, Any] = {"mode": "cluster", "parts": 4, "parts_per_batch": 2}
WIDE: dict[str, Any] = {
    "layers": 2, "fanout": [3, 3], "hidden": [16, 8], "jk": "cat", "epochs": 2,
    "blocks": [{"conv": "gcn", "mlp": 12}, {"norm": "layer", "activation": "gelu"}],
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", [{}, PARTS, {"mode": "saint", "roots": 40}], ids=["sampled", "cluster", "saint"])
def test_a_killed_run_goes_on_to_the_bit(make_store: MakeStore, tmp_path: Path, mode: dict[str, Any]) -> None:
    store, more = make_store(), {**REVERSIBLE, **mode, "checkpoint_every": 1}
    whole, cut = (configure(store, tmp_path / name, **more) for name in ("whole", "cut"))
    assert whole.norm == "layer"
    train(whole)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(1))
    train(cut, resume=True)
    assert curve(cut.out) == curve(whole.out)


@pytest.mark.cases(1)
@pytest.mark.parametrize("settings", [{**REVERSIBLE, **PARTS, "evaluate": "layerwise"}, WIDE], ids=["reversible", "widths"])
def test_a_pass_over_all_nodes_gives_the_outputs_of_the_whole_graph(
    make_store: MakeStore, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = configure(make_store(), tmp_path / "run", **settings)
    train(config)
    with Dataset.open(config.store, in_memory=True) as ds:
        model = make_model(config, ds.num_features, ds.num_classes or 2)
        model.load_state_dict(torch.load(config.out / "model.pt")["model"])
        target = np.repeat(np.arange(ds.num_nodes), np.diff(ds.graph.indptr))
        edges = torch.from_numpy(np.stack([np.asarray(ds.graph.indices, np.int64), target]))
        x, found = torch.from_numpy(np.array(ds.rows("x").array)), np.empty((ds.num_nodes, ds.num_classes or 2), np.float32)
        with evaluating(model):
            want = model(x, full_blocks(edges, ds.num_nodes, config.layers)).clone()
        with closing(LayerwisePass(model, ds, tmp_path / "pass")) as scan:
            scan.run().read(np.arange(ds.num_nodes), found)
    np.testing.assert_allclose(found, want.numpy(), atol=1e-5)


def test_a_run_whose_rows_are_inverted_learns_as_one_that_keeps_them_and_resumes(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()

    def config(name: str, **more: Any) -> FullConfig:
        given: dict[str, Any] = {"store": store, "out": tmp_path / name, "layers": 6, "hidden": 16}
        given |= {"model": "revsage", "placement": "inverted", **more}
        return FullConfig(**given, epochs=4, threads=1, checkpoint_every=2)

    losses = []
    for name, placement in (("whole", "inverted"), ("kept", "retained")):
        train(config(name, placement=placement))
        rows = [json.loads(line) for line in curve(tmp_path / name).splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert len(losses[0]) == 4
    with pytest.raises(Killed):
        train(config("cut"), watcher=KillAt(3))
    train(config("cut"), resume=True)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    with pytest.raises(ConfigError, match="is for rows between reversible layers"):
        train(config("plain", model="sage"))


@pytest.mark.parametrize("mode", ["cluster", "history", "full"])
def test_widths_jumps_and_blocks_train_in_every_mode(make_store: MakeStore, tmp_path: Path, mode: str) -> None:
    settings = {**WIDE, "mode": mode, "out": tmp_path / "run", "store": make_store(), "threads": 1}
    if mode != "full":
        settings |= {"parts": 4, "parts_per_batch": 2}
    settings.pop("fanout")
    config = load_config(None, settings)
    assert train(config)["metrics"]["test"]["accuracy"] is not None


def test_what_a_mode_cannot_do_is_refused_in_a_line(make_store: MakeStore, tmp_path: Path) -> None:
    base = {"store": make_store(), "out": tmp_path / "run"}
    for settings, said in (
        ({"model": "revsage", "mode": "history"}, "histories cannot stand"),
        ({"model": "revsage", "residual": True}, "residual does not apply"),
        ({"model": "revsage", "precision": "bf16"}, "precision does not apply"),
        ({"model": "revsage", "compress": "int8"}, "compress does not apply to model revsage"),
        ({"model": "sage", "groups": 4}, "groups does not apply to model sage"),
        ({"model": "gcnii", "jk": "cat"}, "jk applies to models sage"),
        ({"model": "appnp", "hidden": "16,8"}, "a width for each layer applies to models"),
        ({"blocks": [{"width": 8}, {}]}, "'width' is no setting there"),
        ({"hidden": "16,8", "layers": 2}, "has 2 widths for 1 hidden layer "),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            load_config(None, {**base, **settings})
        assert "\n" not in str(error.value)


def test_layers_follow_from_the_widths() -> None:
    base: dict[str, Any] = {"store": "a.ooc", "out": "run"}
    assert TrainConfig(**base, hidden="256,64,256").layers == 4
    assert TrainConfig(**base, hidden="256,64,256", jk="cat").layers == 3
    assert TrainConfig(**base, hidden=(256, 64, 256)).layers == 4
    assert TrainConfig(**base, hidden="64").hidden == 64
    assert TrainConfig(**base, blocks='[{"conv": "gat"}, {}, {}]').layers == 3
    assert FullConfig(**base, blocks=[{"conv": "gat"}, {}]).layers == 2
    assert TrainConfig(**base, model="revsage", layers=112).fanout == [10, 10]

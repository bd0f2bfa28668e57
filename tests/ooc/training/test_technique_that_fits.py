"""A plan that does not fit names a technique with which it would."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.cli.main import main
from ooc.config.nodes import TrainConfig
from ooc.config.techniques import with_technique
from ooc.stores.errors import BudgetError
from ooc.training.technique_that_fits import _changes
from tests.conftest import MakeStore
from tests.ooc.runs import tight


@pytest.mark.slow
def test_the_technique_that_a_plan_names_fits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nodes, edges = 60_000, 900_000
    data = Data(
        x=torch.from_numpy(rng.normal(size=(nodes, 64)).astype(np.float32)),
        y=torch.from_numpy(rng.integers(4, size=nodes)),
        edge_index=torch.from_numpy(rng.integers(nodes, size=(2, edges))),
        train_mask=torch.ones(nodes, dtype=torch.bool),
    )
    ooc.from_data(data, tmp_path / "store").close()
    settings = {"store": tmp_path / "store", "out": tmp_path / "run", "mode": "sampled", "fanout": [15, 15]}
    for hard in ({"hidden": 2048, "batch_size": 20_000}, {"hidden": 256, "batch_size": 60_000}):
        given = {**settings, **hard, "memory": tight()}
        found = _named(given)
        changed = dict(re.findall(r"`(\w+)=([^`]*)`", found))
        assert changed
        given = {name: value for name, value in given.items() if changed.get("mode") is None or name != "fanout"}
        assert ooc.plan(**{**given, **changed}).prediction.peak_rss_bytes <= 1.1 * int(given["memory"])
    assert not (tmp_path / "run").exists()


def test_settings_that_do_not_apply_are_named_with_the_depth_that_they_gave() -> None:
    config = TrainConfig(store=Path("a.ooc"), out=Path("run"), fanout=[9, 9, 9], mode="sampled")
    found = _changes(config, with_technique(config, "cluster", None))
    assert found == "`mode=cluster`, `layers=3`, `parts=16`, without `fanout`"
    assert _changes(config, with_technique(config, "bf16", None)) == "`precision=bf16`"


def _named(settings: dict[str, Any]) -> str:
    """What the plan says of techniques, in its error where batches do not fit, in its advice where activations do not."""
    try:
        said = ooc.plan(**settings).advice
    except BudgetError as error:
        said = str(error)
    assert "; or with technique " in said, said
    return said.split("; or with technique ")[1]


def test_that_no_technique_fits_is_said_in_bounded_time(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(num_nodes=120, num_edges=900)
    words = ["plan", str(store), "--mode", "sampled", "--fanout", "2,2", "--memory", "200MB"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "leaves nothing for batches" in said
    assert said.rstrip().endswith("; no technique makes it fit")
    assert "trying technique accumulate" in said
    assert "trying technique cluster" in said
    monkeypatch.setattr("ooc.training.technique_that_fits.TRIED_SECONDS", -1.0)
    assert main(words) == 2
    assert "no technique before accumulate makes it fit" in capsys.readouterr().err

"""Runs on a store at a URL equal those on this disk to the bit, and the second epoch asks for nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.config.nodes import TrainConfig
from ooc.stores.io.remote.url import StoreUrl
from tests.ooc.runs import curve
from tools.bench.lib.range_server import Conditions, at_random, serving

pytest.importorskip("obstore")
NODES = 20_000
SMALL: dict[str, Any] = {"hidden": 8, "fanout": [3, 3], "batch_size": 512, "epochs": 3, "seed": 5, "threads": 1, "plan": False}


class Requests(ooc.Callback):
    """Requests of the server at the end of each epoch."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions, self.after = conditions, list[int]()

    def epoch(self, line: dict[str, Any]) -> None:
        self.after.append(self.conditions.counts["requests"])


@pytest.fixture
def store(make_store: Any) -> Path:
    """x has several chunks."""
    x = np.random.default_rng(0).standard_normal((NODES, 200), dtype=np.float32)
    path: Path = make_store(num_nodes=NODES, num_edges=4 * NODES, x=x)
    return path


@pytest.fixture
def conditions() -> Conditions:
    return Conditions()


@pytest.fixture
def url(store: Path, conditions: Conditions) -> Iterator[str]:
    with serving(store.parent, conditions) as base:
        yield f"{base}/{store.name}"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"mode": "history", "parts": 4, "memory": "3GB"}, marks=pytest.mark.slow),
        pytest.param({"mode": "full"}, marks=pytest.mark.slow),
        pytest.param({"in_memory": True}, marks=pytest.mark.slow),
    ],
    ids=["sampled", "history", "full", "in_memory"],
)
def test_losses_are_those_of_the_local_store(
    store: Path, url: str, conditions: Conditions, tmp_path: Path, settings: dict[str, Any]
) -> None:
    own = SMALL if "mode" not in settings else {name: SMALL[name] for name in ("hidden", "epochs", "seed")}
    ooc.train(store=store, out=tmp_path / "near", **own, **settings)
    conditions.failing, seen = at_random(0.05), Requests(conditions)
    ooc.train(store=url, out=tmp_path / "far", cache_dir=tmp_path / "c", **own, **settings, callbacks=[seen])
    assert curve(tmp_path / "far") == curve(tmp_path / "near")
    assert seen.after[0] == seen.after[-1] > 20


@pytest.mark.slow
def test_a_cache_without_room_changes_no_loss(store: Path, url: str, conditions: Conditions, tmp_path: Path) -> None:
    ooc.train(store=store, out=tmp_path / "near", **SMALL)
    conditions.failing, seen = at_random(0.01), Requests(conditions)
    ooc.train(store=url, out=tmp_path / "far", cache_dir=tmp_path / "c", cache="9MB", **SMALL, callbacks=[seen])
    assert curve(tmp_path / "far") == curve(tmp_path / "near")
    assert sum(each.stat().st_blocks * 512 for each in (tmp_path / "c").rglob("*")) <= 9_000_000


@pytest.mark.slow
def test_a_run_says_where_its_store_is_and_is_resumed(store: Path, url: str, tmp_path: Path) -> None:
    config = TrainConfig(store=url, out=tmp_path / "run", cache_dir=tmp_path / "c", **{**SMALL, "epochs": 1})
    ooc.train(config)
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["store"] == url
    assert config.store == StoreUrl(url)
    ooc.train(out=tmp_path / "run", resume=True, epochs=2)
    ooc.train(store=store, out=tmp_path / "near", **{**SMALL, "epochs": 2})
    assert curve(tmp_path / "run") == curve(tmp_path / "near")
    rows = ooc.infer(tmp_path / "run", url, cache_dir=tmp_path / "c")
    assert np.array_equal(rows[:], ooc.infer(tmp_path / "near", store)[:])

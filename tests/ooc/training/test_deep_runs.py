"""Deep models on whole parts in too little memory: what is refused names recomputing, and with it a run keeps to its memory."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.build import write_store
from ooc.stores.graph import Graph
from ooc.stores.sizes import parse_bytes
from tests.conftest import random_edges
from tests.forked import Python, python

NODES, LAYERS = 40_000, 20
SHORT = 800_000_000
"""memory in which a plan without recomputing (1.05 GB and more) does not fit, and one with it (720 MB) does; a plan may be off
by 10 %"""
DEEP: dict[str, Any] = {"mode": "cluster", "parts": 2, "layers": LAYERS, "hidden": 128, "threads": 1}
FLAGS = [word for name, value in DEEP.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a part's 20,000 nodes all layers together keep 400 MB."""
    rng = np.random.default_rng(0)
    graph = Graph.from_edges(*random_edges(NODES, 2 * NODES), NODES)
    order = rng.permutation(NODES)
    split = {"train": order[: NODES // 2], "val": order[NODES // 2 :]}
    arrays = {"x": rng.standard_normal((NODES, 16), np.float32), "y": rng.integers(0, 4, NODES)}
    return write_store(
        tmp_path_factory.mktemp("deep") / "deep.ooc", graph, **arrays, task="multiclass", num_classes=4, splits=split
    )


PLANS = """
import sys
import ooc
from tests.ooc.training.test_deep_runs import DEEP
store, memory, kind = sys.argv[1:]
plan = ooc.plan(store=store, out="none", memory=memory, activation_checkpointing=kind, **DEEP)
print(plan.needs_more, plan.advice)
"""


@pytest.mark.slow
@pytest.mark.alone
def test_a_plan_names_recomputing_with_which_it_fits(deep: Path) -> None:
    short = python("-c", PLANS, deep, str(SHORT), "none").stdout
    assert not short.startswith("0 ")
    named = re.findall(r"with technique ([\w-]+): `activation_checkpointing=(\w+)`", short)
    assert len(named) == 1, short
    assert python("-c", PLANS, deep, str(SHORT), named[0][1]).stdout.startswith("0 ")
    shown = Python("-m", "ooc.cli", "plan", deep, "--memory", str(SHORT), *FLAGS, env={"COLUMNS": "500"}).wait()
    assert shown.returncode == 0
    assert re.search(r"with technique checkpointing[\w-]*: --activation-checkpointing (layers|sqrt|auto)", shown.stdout), shown
    assert "activation_checkpointing" not in shown.stdout


@pytest.mark.slow
@pytest.mark.alone
def test_training_is_refused_without_recomputing_and_keeps_to_its_memory_with_it(deep: Path, tmp_path: Path) -> None:
    words = ["-m", "ooc.cli", "train", str(deep), *FLAGS, "--epochs", "1", "--eval-splits", "", "--max-steps", "2"]

    def trained(name: str, memory: int, kind: str) -> Any:
        given = ["--out", str(tmp_path / name), "--memory", str(memory), "--activation-checkpointing", kind]
        done = Python(*words, *given).wait()
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / name / "summary.json").read_text())

    memory = 700_000_000
    refused = python(*words, "--out", tmp_path / "none", "--memory", str(memory))
    assert refused.returncode == 2
    error = refused.stderr.splitlines()[-1]
    assert error.startswith("ooc: error: a step would take about ")
    assert "give --activation-checkpointing auto, which takes about " in error
    assert not (tmp_path / "none").exists()
    kept = trained("auto", memory, "auto")
    assert kept["recomputation"]["segments"]
    assert kept["peak_rss_bytes"] <= memory
    enough = parse_bytes(re.findall(r"--memory at least (\S+ \S+)$", error)[0])
    plain = trained("plain", int(1.02 * enough), "none")
    assert memory < plain["peak_rss_bytes"] <= 1.1 * enough, "what was refused would not have fit, and what is named is enough"
    curves = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("auto", "plain")]
    assert curves[0] == curves[1]

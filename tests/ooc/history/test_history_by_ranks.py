"""Several processes train from the same histories: as one process that accumulates as many batches, also where one is killed."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.training.checkpoint import read_metrics
from tests.conftest import MakeStore
from tests.ooc.graphs import hub_graph
from tests.ooc.ranks import run_ranks, start_ranks

N = 20_000
"""nodes: two ranges of pages and more, so that ranks write different files' pages"""
FLAGS = [
    "--mode", "history", "--parts", "14", "--parts-per-batch", "2", "--layers", "3", "--hidden", "8", "--epochs", "2", "--threads",
    "1", "--no-plan", "--seed", "2", "--history-dtype", "float32",
]  # fmt: skip




@pytest.fixture
def store(make_store: MakeStore) -> Path:
    edges = hub_graph(N).numpy()
    return make_store(num_nodes=N, src=edges[0], dst=edges[1], weight=True)


def losses(out: Path, together: int) -> list[float]:
    """Of each optimizer step, the mean over its batches, which one process logs one by one."""
    steps, _ = read_metrics(out)
    found: dict[tuple[int, int], list[float]] = {}
    per_epoch: dict[int, int] = {}
    for line in steps:
        number = per_epoch.get(line["epoch"], 0)
        per_epoch[line["epoch"]] = number + 1
        found.setdefault((line["epoch"], number // together), []).append(line["loss"])
    return [float(np.mean(each)) for _, each in sorted(found.items())]


def train(count: int, store: Path, out: Path, *flags: str, **env: str) -> dict[str, Any]:
    done = run_ranks(count, "-m", "ooc", "train", store, "--out", out, *FLAGS, *flags, **env)
    assert [each.returncode for each in done] == [0] * count, [each.stderr[-2000:] for each in done]
    assert all(each.stdout == "" == each.stderr for each in done[1:]), "rank 0 speaks"
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "flags", [("--history-lag", "0"), ("--history-lag", "1", "--refresh", "1", "--evaluate", "layerwise", "--dropout", "0.5")]
)
def test_processes_train_as_one_that_accumulates(store: Path, tmp_path: Path, count: int, flags: tuple[str, ...]) -> None:
    one = train(1, store, tmp_path / "one", *flags, "--accumulate", str(count))
    several = train(count, store, tmp_path / "several", *flags)
    assert losses(tmp_path / "several", 1) == pytest.approx(losses(tmp_path / "one", count), abs=1e-6)
    for split, scores in one["metrics"].items():
        assert several["metrics"][split] == pytest.approx(scores, abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several", "test.ooc"]

"""Several processes train from the same histories as one process that accumulates as many batches; also where one is killed."""

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
    "--mode", "history", "--parts", "14", "--parts-per-batch", "2", "--layers", "3", "--hidden", "8", "--epochs", "2",
    "--threads", "1", "--no-plan", "--seed", "2", "--history-dtype", "float32",
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


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_rank_ends_all_and_the_run_goes_on_to_the_bit(store: Path, tmp_path: Path) -> None:
    """Killed in steps, checkpoints, refreshes and between them; every step is logged once."""
    flags = ["--epochs", "6", "--refresh", "3", "--dropout", "0.5", "--checkpoint-every", "2"]
    whole = train(2, store, tmp_path / "whole", *flags)
    rng, out, started = np.random.default_rng(3), tmp_path / "cut", time.monotonic()
    for number, lines in enumerate([3, 9, 14, 21, 26]):
        more = ["--resume"] if number else []
        ranks = start_ranks(2, "-m", "ooc", "train", store, "--out", out, *FLAGS, *flags, *more)
        log = out / "metrics.jsonl"
        while ranks[0].poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < lines):
            time.sleep(0.002)
        time.sleep(float(rng.random()) * 0.05)
        victim = int(rng.integers(2))
        ranks[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        done = [each.wait(60) for each in ranks]
        assert time.monotonic() - killed < 20, "nobody waits for one that is gone"
        assert done[victim].returncode == -signal.SIGKILL
        assert done[1 - victim].returncode == 2, done[1 - victim].stderr
        assert "Traceback" not in done[1 - victim].stderr
    found = train(2, store, out, *flags, "--resume")
    assert (out / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert found["metrics"] == whole["metrics"]
    assert time.monotonic() - started < 600
    assert os.listdir(out / "history")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "flags"),
    [
        ((2, 1, 4), ("--history-lag", "1", "--refresh", "1", "--evaluate", "layerwise", "--dropout", "0.5")),
        ((4, 2, 1), ("--accumulate", "2", "--history-lag", "0")),
        ((1, 2, 1), ("--dropout", "0.5")),
    ],
)
def test_a_run_goes_on_in_another_number_of_processes(
    store: Path, tmp_path: Path, counts: tuple[int, ...], flags: tuple[str, ...]
) -> None:
    """As the run that it was, with the batches of a step that it began with, whose last one an epoch has fewer of."""
    flags = (*flags, "--parts-per-batch", "1", "--parts", "13", "--checkpoint-every", "1")
    whole = train(counts[0], store, tmp_path / "whole", *flags)
    each, out = whole["total_steps"] // 2, tmp_path / "run"
    for number, (count, steps) in enumerate(zip(counts, (each // 2, each + each // 2, 2 * each), strict=True)):
        found = train(count, store, out, *flags, "--max-steps", str(steps), *(["--resume"] if number else []))
    steps, _ = read_metrics(out)
    assert [line["step"] for line in steps] == list(range(2 * each))
    assert losses(out, 1) == pytest.approx(losses(tmp_path / "whole", 1), abs=1e-6)
    for split, scores in whole["metrics"].items():
        assert found["metrics"][split] == pytest.approx(scores, abs=1e-5)
    assert not list((out / "history").glob("rank4"))


@pytest.mark.slow
def test_processes_that_do_not_divide_the_batches_of_a_step_are_refused(store: Path, tmp_path: Path) -> None:
    train(3, store, tmp_path / "run", "--max-steps", "1")
    done = run_ranks(2, "-m", "ooc", "train", "--resume", "--out", tmp_path / "run", store, *FLAGS)
    assert [each.returncode for each in done] == [2, 2]
    assert "it began with 3 processes, whose batches 2 do not divide evenly" in "".join(each.stderr for each in done)

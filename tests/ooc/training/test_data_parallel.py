"""Several processes train as one: the same losses and scores as one process with batches as large as theirs together."""

import json
from pathlib import Path
from typing import Any

import pytest

from ooc.training.checkpoint import read_metrics
from tests.conftest import MakeStore
from tests.ooc.ranks import run_ranks

SMALL = ["--hidden", "8", "--epochs", "2", "--threads", "1", "--no-plan", "--seed", "5"]


def trained(count: int, store: Path, out: Path, batch_size: int, *flags: str) -> tuple[list[float], dict[str, Any]]:
    """(losses of the steps, the summary) of so many processes."""
    words = ["-m", "ooc", "train", store, "--out", out, *SMALL, *flags]
    done = run_ranks(count, *words, "--batch-size", str(batch_size // count))
    assert [each.returncode for each in done] == [0] * count, [each.stderr for each in done]
    assert all(each.stdout == "" == each.stderr for each in done[1:]), "rank 0 speaks"
    steps, _ = read_metrics(out)
    return [line["loss"] for line in steps], json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_as_one(make_store: MakeStore, tmp_path: Path, count: int) -> None:
    store = make_store(num_nodes=203, num_edges=1500)
    flags = ["--fanout", "4,4"]
    expected, one = trained(1, store, tmp_path / "one", 16, *flags)
    losses, several = trained(count, store, tmp_path / "several", 16, *flags)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert several["metrics"] == {split: pytest.approx(scores, abs=1e-5) for split, scores in one["metrics"].items()}
    assert several["rows_asked"] >= one["rows_asked"]
    assert several["world_size"] == count
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several", "test.ooc"]

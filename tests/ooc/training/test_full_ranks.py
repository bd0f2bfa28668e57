"""Exact training by several processes: the run of one process, its losses and scores."""

import json
from pathlib import Path
from typing import Any

import pytest

import ooc
from ooc.report.page import write_report
from ooc.stores.errors import ConfigError
from ooc.training.checkpoint import read_metrics
from tests.conftest import MakeStore
from tests.ooc.ranks import run_ranks

SMALL = ["--mode", "full", "--layers", "2", "--hidden", "8", "--epochs", "2", "--threads", "1", "--seed", "5"]


def trained(count: int, store: Path, out: Path, *flags: str) -> tuple[list[float], dict[str, Any]]:
    """(losses of the steps, the summary) of so many processes."""
    done = run_ranks(count, "-m", "ooc", "train", store, "--out", out, *SMALL, *flags)
    assert [each.returncode for each in done] == [0] * count, [each.stderr for each in done]
    assert all(each.stdout == "" == each.stderr for each in done[1:]), "rank 0 speaks"
    steps, _ = read_metrics(out)
    return [line["loss"] for line in steps], json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_as_one(make_store: MakeStore, tmp_path: Path, count: int) -> None:
    store = make_store(num_nodes=203, num_edges=1500)
    flags = ["--model", "gcn"]
    expected, one = trained(1, store, tmp_path / "one", *flags)
    losses, several = trained(count, store, tmp_path / "several", *flags)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert several["metrics"] == {split: pytest.approx(scores, abs=1e-5) for split, scores in one["metrics"].items()}
    assert several["full"]["bytes_exchanged"] > 0
    assert "sent between processes" in write_report(tmp_path / "several").read_text()
    (tmp_path / "several" / "report.html").unlink()
    assert "bytes_exchanged" not in one["full"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several", "test.ooc"]


def test_more_processes_than_nodes_are_refused(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=3, num_edges=4, splits={"train": [0], "val": [1], "test": [2]})
    done = run_ranks(4, "-m", "ooc", "train", store, "--out", tmp_path / "run", *SMALL)
    assert [each.returncode for each in done] == [2] * 4
    assert "3 nodes for 4 processes: start fewer" in "".join(each.stderr for each in done)
    assert not (tmp_path / "run").exists()


OPTIONS = [
    ["sampled", "--halo-rate", "0.5"],
    ["stale", "--halo-every", "4"],
    ["stale", "--halo-every", "8", "--halo-tolerance", "0.5"],
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", OPTIONS)
def test_less_is_sent_at_a_small_loss(make_store: MakeStore, tmp_path: Path, flags: list[str]) -> None:
    store = make_store(num_nodes=203, num_edges=1500)
    more = ["--model", "gcn", "--epochs", "8", "--dropout", "0"]
    losses, exact = trained(2, store, tmp_path / "exact", *more)
    found, fewer = trained(2, store, tmp_path / "fewer", *more, "--halo", *flags)
    again, _ = trained(2, store, tmp_path / "again", *more, "--halo", *flags)
    assert fewer["full"]["bytes_exchanged"] < 0.7 * exact["full"]["bytes_exchanged"]
    assert found[-1] == pytest.approx(losses[-1], abs=0.1)
    assert again == found, "the same in every run"


def test_a_halo_of_one_process_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=20, num_edges=40)
    (done,) = run_ranks(1, "-m", "ooc", "train", store, "--out", tmp_path / "run", *SMALL, "--halo", "stale")
    assert done.returncode == 2
    assert "halo = 'stale' applies to several processes" in done.stderr


@pytest.mark.slow
def test_a_plan_predicts_the_bytes_to_be_sent(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=203, num_edges=1500)
    settings = {"mode": "full", "model": "gcn", "layers": 2, "hidden": 8, "halo_every": 4}
    planned = ooc.plan(store=store, out=tmp_path / "plan", nproc=2, bandwidth="1MB", halo="stale", **settings).ranks
    exact, sampled, stale = planned.exchanges
    _, summary = trained(2, store, tmp_path / "run", "--model", "gcn")
    assert summary["full"]["bytes_exchanged"] == 2 * exact.nbytes
    assert sampled.nbytes == pytest.approx(0.1 * exact.nbytes, abs=1)
    assert 0.25 * exact.nbytes < stale.nbytes < 0.5 * exact.nbytes
    assert exact.seconds > stale.seconds > sampled.seconds > planned.gradient_seconds


def test_processes_are_planned_for_one_mode(make_store: MakeStore) -> None:
    with pytest.raises(ConfigError, match="give `mode` too"):
        ooc.plan(store=make_store(num_nodes=20, num_edges=40), nproc=2)

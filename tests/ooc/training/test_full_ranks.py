"""Exact training by several processes: the run of one process, its losses and scores."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ooc
from ooc.report.page import write_report
from ooc.stores.errors import ConfigError
from ooc.training.checkpoint import read_metrics
from tests.conftest import MakeStore
from tests.ooc.ranks import ended, run_ranks, start_ranks

SMALL = ["--mode", "full", "--layers", "2", "--hidden", "8", "--epochs", "2", "--threads", "1", "--seed", "5"]


def trained(count: int, store: Path, out: Path, *flags: str) -> tuple[list[float], dict[str, Any]]:
    """(losses of the steps, the summary) of so many processes."""
    done = run_ranks(count, "-m", "ooc", "train", store, "--out", out, *SMALL, *flags)
    assert [each.returncode for each in done] == [0] * count, [each.stderr for each in done]
    assert all(each.stdout == "" == each.stderr for each in done[1:]), "rank 0 speaks"
    steps, _ = read_metrics(out)
    return [line["loss"] for line in steps], json.loads((out / "summary.json").read_text())


def lines_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


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


@pytest.mark.parametrize(("name", "value"), [("halo", "stale"), ("halo_recompute", "all")])
def test_a_halo_of_one_process_is_refused(make_store: MakeStore, tmp_path: Path, name: str, value: str) -> None:
    store, flag = make_store(num_nodes=20, num_edges=40), "--" + name.replace("_", "-")
    (done,) = run_ranks(1, "-m", "ooc", "train", store, "--out", tmp_path / "run", *SMALL, flag, value)
    assert done.returncode == 2
    assert f"{name} = '{value}' applies to several processes" in done.stderr
    with pytest.raises(ConfigError, match=f"{name} applies to several processes"):
        ooc.plan(store=store, mode="full", model="gcn", **{name: value})


def test_a_bandwidth_without_a_choice_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="halo_bandwidth applies to halo_recompute = auto only"):
        ooc.plan(store=make_store(num_nodes=20, num_edges=40), mode="full", nproc=2, halo_bandwidth="1MB")


@pytest.mark.slow
def test_what_is_recomputed_is_chosen_once_a_run(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=203, num_edges=1500)
    flags = ["--model", "gcn", "--halo-recompute"]
    expected, _ = trained(1, store, tmp_path / "one", "--model", "gcn")
    bytes_sent, runs = {}, tmp_path / "runs"  # which is not there yet
    for name, more in (("none", []), ("first", []), ("all", []), ("auto", ["--halo-bandwidth", "1KB"])):
        losses, summary = trained(2, store, runs / name, *flags, name, *more)
        assert losses == pytest.approx(expected, abs=1e-6)
        bytes_sent[name] = summary["full"]["bytes_exchanged"]
        assert (summary["full"]["rows_recomputed"] > 0) is (name != "none")
    assert bytes_sent["none"] > bytes_sent["first"] > bytes_sent["all"] == 0
    assert bytes_sent["auto"] == 0, "a thousand bytes a second are few"
    kept = json.loads((runs / "auto" / "halo.json").read_text())
    assert kept["name"] in ("by cost", "all")
    assert min(kept["ways"], key=lambda way: float(way["seconds"]))["name"] == kept["name"]
    (runs / "auto" / "halo.json").write_text(json.dumps({**kept, "name": "none"}))
    more = ["--resume", "--epochs", "3", "--halo-bandwidth", "1KB"]
    resumed, summary = trained(2, store, runs / "auto", *flags, "auto", *more)
    assert len(resumed) == 3
    assert summary["full"]["rows_recomputed"] == 0, "by what the run began with"


@pytest.mark.slow
def test_killed_processes_go_on_as_one_run(make_store: MakeStore, tmp_path: Path) -> None:
    """One is killed at some moment, the other ends by itself, and the run goes on from its last checkpoint: the same losses
    and scores to the bit, every step once."""
    store = make_store(num_nodes=203, num_edges=1500)
    flags = ["--model", "gcn", "--halo-recompute", "first", "--checkpoint-every", "2", "--no-plan", "--epochs", "12"]
    expected, whole = trained(2, store, tmp_path / "whole", *flags)
    seed = int(os.environ.get("OOC_TEST_SEED", str(random.randrange(10**6))))
    moments, out = random.Random(seed), tmp_path / "killed"
    for life in range(int(os.environ.get("OOC_TEST_KILLS", "3"))):
        more = ["--resume"] if out.exists() else []
        ranks = start_ranks(2, "-m", "ooc", "train", store, "--out", out, *SMALL, *flags, *more)
        stop = lines_of(out) + moments.randrange(1, 4)
        while lines_of(out) < stop and all(each.poll() is None for each in ranks):
            time.sleep(0.001)
        time.sleep(moments.random() * 0.05)
        with suppress(ProcessLookupError):  # it has ended already
            moments.choice(ranks).send_signal(signal.SIGKILL)
        done = ended(ranks)
        assert all("Traceback" not in each.stderr for each in done), (f"life {life} of seed {seed}", done)
    losses, found = trained(2, store, out, *flags, "--resume")
    assert losses == expected, f"seed {seed}"
    assert found["metrics"] == whole["metrics"]
    assert [line["step"] for line in read_metrics(out)[0]] == list(range(12)), "every step once"


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
    settings = {**settings, "store": store, "out": tmp_path / "plan", "nproc": 2}
    del settings["halo_every"]
    for bandwidth, fewer in (("1KB", True), ("1000GB", False)):
        planned = ooc.plan(bandwidth=bandwidth, **settings).ranks
        ways = {way.name: way for way in planned.ways}
        assert list(ways) == ["none", "first", "by cost", "all"]
        assert ways["none"].nbytes == exact.nbytes > ways["first"].nbytes > ways["all"].nbytes == 0
        assert ways[planned.chosen].seconds == min(way.seconds for way in planned.ways)
        assert (ways[planned.chosen].nbytes < exact.nbytes) is fewer
        assert planned.asdict()["chosen"] == planned.chosen
    _, summary = trained(2, store, tmp_path / "first", "--model", "gcn", "--halo-recompute", "first")
    assert summary["full"]["bytes_exchanged"] == 2 * ways["first"].nbytes
    assert summary["full"]["rows_recomputed"] == ways["first"].recomputed


def test_processes_are_planned_for_one_mode(make_store: MakeStore) -> None:
    with pytest.raises(ConfigError, match="give `mode` too"):
        ooc.plan(store=make_store(num_nodes=20, num_edges=40), nproc=2)

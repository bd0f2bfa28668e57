"""Ranks that are killed, that fail, and that go on in another number."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ooc.training.checkpoint import read_metrics
from tests.conftest import MakeStore
from tests.ooc.ranks import ended, free_port, run_ranks, start_ranks

COMMON = ["--hidden", "8", "--threads", "1", "--no-plan", "--seed", "5", "--checkpoint-every", "2"]
FLAGS = ["--fanout", "4,4", *COMMON]
KILLS = int(os.environ.get("OOC_TEST_KILLS", "3"))
SEED = int(os.environ.get("OOC_TEST_SEED", str(random.randrange(10**6))))


def command(store: Path, out: Path, epochs: int = 3) -> list[str | Path]:
    return ["-m", "ooc", "train", store, "--out", out, *FLAGS, "--epochs", str(epochs)]


def results(out: Path) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """((step, loss) of every line, the scores) of a run."""
    steps, _ = read_metrics(out)
    return [(line["step"], line["loss"]) for line in steps], json.loads((out / "summary.json").read_text())["metrics"]


def lines_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sampled", "history"])
def test_killed_ranks_go_on_in_any_number_of_processes(make_store: MakeStore, tmp_path: Path, mode: str) -> None:
    """Each time one rank is killed, and the others end by themselves; the command begins again by 1, 2 or 4 processes."""
    store, moments, epochs = make_store(num_nodes=203, num_edges=1500), random.Random(SEED), 3 + KILLS // 2
    if mode == "sampled":
        first, settings = 1, ["--fanout", "4,4"]
    else:  # a step has as many batches as the run begins with processes
        first, settings = (
            2,
            ["--mode", mode, "--parts", "19", "--dropout", "0.5", "--refresh", "2", "--history-dtype", "float32"],
        )

    def words(out: Path, *more: str) -> list[str | Path]:
        own = [] if mode == "history" or "--resume" in more else ["--batch-size", str(16 // first)]
        return ["-m", "ooc", "train", store, "--out", out, *COMMON, *settings, "--epochs", str(epochs), *own, *more]

    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert [each.returncode for each in run_ranks(first, *words(whole))] == [0] * first
    expected, scores = results(whole)
    for life in range(KILLS):
        begun = out.exists()
        count = moments.choice([1, 2, 4]) if begun else first
        ranks = start_ranks(count, *words(out, *(["--resume"] if begun else [])))
        stop = lines_of(out) + moments.randrange(1, 8)
        while lines_of(out) < stop and all(each.poll() is None for each in ranks):
            time.sleep(0.001)
        began = time.monotonic()
        with suppress(ProcessLookupError):  # it has ended already
            moments.choice(ranks).send_signal(signal.SIGKILL)
        done = ended(ranks)
        assert time.monotonic() - began < 30, f"life {life} of seed {SEED}"
        assert all(each.stderr.count("Traceback") == 0 for each in done), done
    for count in (4, 2, 1):
        copied = shutil.copytree(out, tmp_path / str(count))
        done = run_ranks(count, *words(copied, "--resume"))
        assert [each.returncode for each in done] == [0] * count, done
        losses, found = results(copied)
        assert [step for step, _ in losses] == [step for step, _ in expected], "every step once"
        assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], abs=1e-4)
        assert found == {split: pytest.approx(own, abs=1e-3) for split, own in scores.items()}


@pytest.mark.slow
def test_torchrun_restarts_a_killed_run(make_store: MakeStore, tmp_path: Path) -> None:
    """The same command, without a directory of its own, goes on where it was; another command finds it taken."""
    store, work = make_store(num_nodes=203, num_edges=1500), tmp_path / "work"
    work.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--max-restarts", "1"]
    words = [*torchrun, "-m", "ooc", "train", str(store), *FLAGS, "--epochs", "10", "--batch-size", "8"]
    out = work / "runs" / "test-1"
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(words, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while lines_of(out) < 5 and process.poll() is None:
        time.sleep(0.001)
    agents = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(agents[-1]), signal.SIGKILL)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    steps, epochs = read_metrics(out)
    assert [line["step"] for line in steps] == list(range(len(steps)))
    assert len(epochs) == 10
    assert [path.name for path in (work / "runs").iterdir()] == ["test-1"]
    taken = subprocess.run([*words, "--out", str(out)], cwd=work, env=env, capture_output=True, text=True)
    assert taken.returncode != 0
    said = [line for line in taken.stderr.splitlines() if "exists already: choose another --out" in line]
    assert sum(line.startswith("ooc: error:") for line in said) == 2, "once in each life"
    assert len(said) == 3, "and in torchrun's report"


@pytest.mark.slow
def test_a_rank_of_one_of_two_hosts_is_killed(make_store: MakeStore, tmp_path: Path) -> None:
    """The other host's agent restarts its rank too and counts no restart; the processes find each other all the same."""
    store, out = make_store(num_nodes=203, num_edges=1500), tmp_path / "run"
    end = f"127.0.0.1:{free_port()}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    agent += ["--rdzv-endpoint", end, "--rdzv-id", "two", "--max-restarts", "1"]
    words = [*agent, *command(store, out, 10), "--batch-size", "8"]
    hosts = [
        subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]
    while lines_of(out) < 5 and all(host.poll() is None for host in hosts):
        time.sleep(0.001)
    workers = Path(f"/proc/{hosts[1].pid}/task/{hosts[1].pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    said = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert "cannot join" not in "".join(said)
    steps, epochs = read_metrics(out)
    assert [line["step"] for line in steps] == list(range(len(steps)))
    assert len(epochs) == 10


def test_a_rank_that_fails_ends_all_with_one_line(make_store: MakeStore, tmp_path: Path) -> None:
    store, out = make_store(), tmp_path / "run"
    out.mkdir()
    done = run_ranks(2, *command(store, out), timeout=30)
    assert [each.returncode for each in done] == [2, 2]
    lines = [line for each in done for line in each.stderr.splitlines()]
    assert lines == [f"ooc: error: {out} exists already: choose another --out, or go on with that run by --resume"]


def test_a_run_that_was_killed_before_its_first_checkpoint_keeps_its_batch(make_store: MakeStore, tmp_path: Path) -> None:
    store, out = make_store(), tmp_path / "run"
    run_ranks(2, *command(store, out, 1), "--batch-size", "4")
    (out / "checkpoint.pt").unlink()
    expected, _ = results(out)
    (done,) = run_ranks(1, *command(store, out, 1), "--resume")
    assert done.returncode == 0, done.stderr
    assert "1 process in place of 2: batch_size = 8" in done.stderr
    assert [loss for _, loss in results(out)[0]] == pytest.approx([loss for _, loss in expected], abs=1e-6)


def test_processes_that_do_not_divide_a_batch_are_refused(make_store: MakeStore, tmp_path: Path) -> None:
    store, out = make_store(), tmp_path / "run"
    run_ranks(1, *command(store, out), "--batch-size", "5", "--max-steps", "4")
    done = run_ranks(2, *command(store, out), "--batch-size", "5", "--resume", timeout=30)
    assert [each.returncode for each in done] == [2, 2]
    assert "batch_size = 5, 5 in all, which 2 do not divide evenly" in done[0].stderr
    assert done[1].stderr == ""


def test_ctrl_c_at_any_rank_takes_a_checkpoint(make_store: MakeStore, tmp_path: Path) -> None:
    store, out = make_store(num_nodes=203, num_edges=1500), tmp_path / "run"
    ranks = start_ranks(2, *command(store, out, 100_000), "--batch-size", "8")
    while lines_of(out) < 3 and ranks[0].poll() is None:
        time.sleep(0.001)
    ranks[1].send_signal(signal.SIGINT)
    done = ended(ranks)
    assert [each.returncode for each in done] == [130, 130], done
    assert done[0].stderr.splitlines()[-1].startswith("ooc: error: interrupted: ")
    assert done[1].stderr == ""
    assert (out / "checkpoint.pt").exists()


@pytest.mark.slow
def test_two_hosts_of_two_processes(make_store: MakeStore, tmp_path: Path) -> None:
    """Two of torchrun's agents, which start the script `ooc` itself."""
    store, out = make_store(num_nodes=203, num_edges=1500), tmp_path / "run"
    end = f"127.0.0.1:{free_port()}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    script = Path(sys.executable).with_name("ooc")
    words = [*agent, "--rdzv-endpoint", end, "--rdzv-id", "one", str(script), *command(store, out, 2)[2:], "--batch-size", "4"]
    hosts = [
        subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]
    said = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert sum(text.count("4 processes train together, 2 of them on this host") for text in said) == 1
    whole = tmp_path / "whole"
    run_ranks(1, *command(store, whole, 2), "--batch-size", "16")
    assert [loss for _, loss in results(out)[0]] == pytest.approx([loss for _, loss in results(whole)[0]], abs=1e-6)

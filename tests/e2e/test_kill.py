"""kill -9 at random moments of training, pushes, refreshes, sweeps and checkpoints, of stores that grow; and Ctrl-C.

A life is forked from a process that has imported everything (`tools.bench.lib.killed_process`), so it takes a fraction of a
second.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.info import describe
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.integrity import verify
from tests.conftest import MakeStore
from tests.forked import Python
from tools.bench.kills.commands import make_types
from tools.bench.lib.leftovers import differences

KILLS = os.environ.get("OOC_TEST_KILLS", "2")
"""inside each place; a hundred take some minutes"""
SEED = os.environ.get("OOC_TEST_SEED", str(random.randrange(10**6)))
"""of the moments: another one every time, named where a test fails"""


PLACES = {"push", "refresh", "sweep", "checkpoint", "training", "events", "windows"}


def killed(module: str, work: Path, *flags: str) -> dict[str, dict[str, Any]]:
    """What `tools.bench.MODULE` found, place by place."""
    flags = "--kills", KILLS, "--seed", SEED, *flags
    command = [sys.executable, "-m", f"tools.bench.{module}", str(work), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not work.exists()
    places: dict[str, dict[str, Any]] = json.loads(done.stdout)["places"]
    assert {place["kills"] for place in places.values()} == {int(KILLS)}
    return places


@pytest.mark.slow
def test_nothing_appended_is_lost_and_nothing_is_there_by_half(quick_path: Path) -> None:
    assert killed("kills.growth", quick_path / "kills").keys() == {"append", "compact", "view"}


@pytest.mark.slow
def test_what_is_killed_anywhere_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    places = killed("kills.runs", tmp_path / "kills", "--nodes", "2500")
    assert places.keys() == PLACES
    assert all(place["runs"] > 0 for place in places.values())
    assert sum(place["checked"] for place in places.values()) > 0


def lines_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


TABLES_ON_DISK = """
import sys
from ooc.cli.main import main
from ooc.runtime.memory_plan import MemoryPlan
MemoryPlan.history = property(lambda self: 2048)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_embedding_tables_of_a_killed_run_go_on_to_the_same_bits(quick_path: Path) -> None:
    """`tools.bench.kills.verbs` kills such runs anywhere."""
    words: list[Any] = [
        "-c",
        TABLES_ON_DISK,
        "train",
        make_types(quick_path / "types.ooc", 60),
        "--model",
        "rsage",
        "--no-plan",
    ]
    words += [
        "--fanout",
        "3,3",
        "--hidden",
        "8",
        "--batch-size",
        "4",
        "--epochs",
        "5",
        "--checkpoint-every",
        "2",
        "--threads",
        "1",
    ]
    whole, cut = quick_path / "whole", quick_path / "cut"
    assert Python(*words, "--out", whole).wait().returncode == 0
    process = Python(*words, "--out", cut)
    while lines_of(cut) < 7 and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait().returncode == -signal.SIGKILL
    assert Python(*words, "--out", cut, "--resume").wait().returncode == 0
    assert differences(whole, cut) == []


def test_ctrl_c_is_one_line_and_exit_code_130(make_store: MakeStore, tmp_path: Path) -> None:
    store, out = make_store(num_nodes=100, num_edges=800), tmp_path / "run"
    flags = ["--fanout", "4,4", "--hidden", "8", "--batch-size", "10", "--epochs", "100000", "--threads", "1", "--no-plan"]
    process = Python("-m", "ooc.cli", "train", store, "--out", out, *flags)
    while lines_of(out) < 5 and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    done = process.wait(timeout=120)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("ooc: error: interrupted")
    assert "Traceback" not in done.stderr
    assert (out / "checkpoint.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["append", "compact"])
def test_ctrl_c_leaves_a_store_that_grows_as_it_was(quick_path: Path, verb: str) -> None:
    store, more = quick_path / "s.ooc", quick_path / "more.npy"
    rng = np.random.default_rng(0)
    np.save(quick_path / "e.npy", rng.integers(0, 1000, (2, 1000)))
    np.save(more, rng.integers(0, 1000, (2, 1_000_000)))
    ingest(IngestSpec(out=store, edges=str(quick_path / "e.npy"), num_nodes=1000))
    if verb == "compact":
        append(AppendSpec(out=store, edges=str(more)))
    before = describe(store)
    words = [verb, str(store), *(["--edges", str(more)] if verb == "append" else [])]
    process = Python("-m", "ooc.cli", *words)
    while not list((store / "versions").glob("*.partial")) and process.poll() is None:
        time.sleep(0.0005)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    done = process.wait(timeout=60)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("ooc: error: interrupted")
    assert len(done.stderr.splitlines()) == 1
    assert describe(store) == before
    assert verify(store) == []
    assert compact(store).appends == (verb == "compact")
    assert not list((store / "versions").glob("*.partial"))  # while modules are imported, Ctrl-C ends the process at once


def test_ctrl_c_ends_the_counting_of_subgraphs(make_store: MakeStore, tmp_path: Path) -> None:
    """Which here would take longer than anybody waits."""
    store, out = make_store(num_nodes=2000, num_edges=16_000), tmp_path / "run"
    flags = ["--mode", "saint", "--roots", "5", "--saint-coverage", "10000", "--threads", "1", "--no-plan"]
    process = Python("-m", "ooc.cli", "train", store, "--out", out, *flags)
    while not (out / "saint.partial").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    done = process.wait(timeout=60)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("ooc: error: interrupted")


@pytest.mark.slow
def test_verbs_killed_at_system_calls_and_moments_are_completed_by_the_same_call(quick_path: Path) -> None:
    """A thousand kills of all verbs take about an hour; these are some."""
    places = ["ingest parquet", "append", "compact", "infer", "sampled", "events tgn", "types on disk"]
    flags = "--kills", "14", "--seed", SEED, "--places", *places
    words = [sys.executable, "-m", "tools.bench.kills.verbs", str(quick_path / "kills"), *flags]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["findings"] == []

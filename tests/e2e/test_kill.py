"""kill -9 at random moments of training, pushes, refreshes, sweeps and checkpoints; and Ctrl-C.

A life of a run is forked from a process that has imported everything (`tools.bench.kills`), so it takes a fraction of a second.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import MakeStore

KILLS = os.environ.get("OOC_TEST_KILLS", "3")
"""inside each place; a hundred take some minutes"""
SEED = os.environ.get("OOC_TEST_SEED", str(random.randrange(10**6)))
"""of the moments: another one every time, named where a test fails"""


def test_what_is_killed_anywhere_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    flags = ["--kills", KILLS, "--seed", SEED]
    command = [sys.executable, "-m", "tools.bench.kills", str(tmp_path / "kills"), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    places = json.loads(done.stdout)["places"]
    assert places.keys() == {"push", "refresh", "sweep", "checkpoint", "training", "events", "windows"}
    for place in places.values():
        assert place["kills"] == int(KILLS)
        assert place["runs"] > 0
    assert sum(place["checked"] for place in places.values()) > 0
    assert not (tmp_path / "kills").exists()


def lines_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_ctrl_c_is_one_line_and_exit_code_130(make_store: MakeStore, tmp_path: Path) -> None:
    store, out = make_store(num_nodes=100, num_edges=800), tmp_path / "run"
    flags = ["--fanout", "4,4", "--hidden", "8", "--batch-size", "10", "--epochs", "100000", "--threads", "1", "--no-plan"]
    command = [sys.executable, "-m", "ooc.cli", "train", str(store), "--out", str(out), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while lines_of(out) < 5 and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    last = errors.decode().splitlines()[-1]
    assert last.startswith("ooc: error: interrupted")
    assert "Traceback" not in errors.decode()
    assert (out / "checkpoint.pt").exists()


def test_ctrl_c_ends_the_counting_of_subgraphs(make_store: MakeStore, tmp_path: Path) -> None:
    """Which here would take longer than anybody waits."""
    store, out = make_store(num_nodes=100, num_edges=800), tmp_path / "run"
    flags = ["--mode", "saint", "--roots", "5", "--saint-coverage", "1e9", "--threads", "1", "--no-plan"]
    command = [sys.executable, "-m", "ooc.cli", "train", str(store), "--out", str(out), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while not (out / "saint.partial").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1].startswith("ooc: error: interrupted")

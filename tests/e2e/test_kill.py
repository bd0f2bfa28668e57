"""kill -9 at random moments, and --resume: metrics.jsonl ends byte for byte as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ooc.cli import main
from tests.conftest import MakeStore

KILLS = 3
STEPS = 240
MODEL = ["--fanout", "4,4", "--hidden", "8", "--norm", "batch", "--no-plan"]
FLAGS = [*MODEL, *["--batch-size", "10", "--epochs", "40", "--seed", "3", "--checkpoint-every", "5", "--threads", "1"]]


def start(store: Path, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ooc.cli", "train", str(store), "--out", str(out), *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def lines_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed_at(process: subprocess.Popen[bytes], out: Path, lines: int, delay_s: float) -> bool:
    """Kill once the run's log has grown to `lines`, a moment later. Whether that came before the run's end."""
    while lines_of(out) < lines and process.poll() is None:
        time.sleep(0.0005)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def killed_again_and_again(store: Path, out: Path, steps: int) -> bool:
    """A run and what resumes it, killed at random within the first `steps` steps. Whether each was, before the run's end."""
    moments = random.Random(steps)
    marks = sorted(moments.randrange(1, steps) for _ in range(KILLS))
    for number, mark in enumerate(marks):
        process = start(store, out, *FLAGS, *(["--resume"] if number else []))
        if not killed_at(process, out, mark, moments.random() * 0.01):
            return False
    return not (out / "summary.json").exists()


def test_a_killed_run_resumes_to_the_bit(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=100, num_edges=800)
    whole = tmp_path / "whole"
    threads = torch.get_num_threads()
    assert main(["train", str(store), "--out", str(whole), *FLAGS]) == 0
    torch.set_num_threads(threads)

    # On a busy machine the run may be over before its log is looked at again: then another one is killed earlier.
    for steps in (STEPS * 3 // 4, STEPS // 2, STEPS // 4, STEPS // 8):
        cut = tmp_path / f"cut-{steps}"
        if killed_again_and_again(store, cut, steps):
            break
    else:
        pytest.fail("no run could be killed before its end")
    process = start(store, cut, *FLAGS, "--resume")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()

    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    lines = [json.loads(text) for text in (cut / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(STEPS))
    one, two = (json.loads((out / "summary.json").read_text()) for out in (whole, cut))
    assert one["metrics"] == two["metrics"]
    assert two["processes"] > 1
    assert [name for name in os.listdir(cut) if name.endswith(".tmp")] == []


def test_ctrl_c_is_one_line_and_exit_code_130(make_store: MakeStore, tmp_path: Path) -> None:
    store, out = make_store(num_nodes=100, num_edges=800), tmp_path / "run"
    process = start(store, out, *FLAGS, "--epochs", "100000")  # not over before it is interrupted
    while lines_of(out) < 5 and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    last = errors.decode().splitlines()[-1]
    assert last.startswith("ooc: error: interrupted")
    assert "Traceback" not in errors.decode()
    assert (out / "checkpoint.pt").exists()

"""Small runs for tests, and how they end early."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ooc.config.nodes import TrainConfig
from ooc.stores.process import resident_bytes
from ooc.training.watchers import LineWatcher
from tests.forked import Python, python

SMALL: dict[str, Any] = {"model": "sage", "hidden": 8, "fanout": [3, 3], "batch_size": 8, "epochs": 3, "seed": 5, "threads": 1}
SMALL["plan"] = False  # it takes longer than such a run


class Killed(BaseException):
    """Stands for kill -9: nothing catches it and nothing is cleaned up but the log's lock."""


class KillAt(LineWatcher):
    """Ends the run after the line of so many steps is written."""

    def __init__(self, total_steps: int) -> None:
        super().__init__()
        self.total_steps = total_steps

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        if total_steps == self.total_steps:
            raise Killed


class InterruptAt(KillAt):
    """Ctrl-C during a step."""

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        if total_steps == self.total_steps:
            os.kill(os.getpid(), signal.SIGINT)


def kill_at_random(begin: Callable[[Path], Python], folder: Path, same: Callable[[Path], None], earliest: float) -> None:
    """Kill runs (-9) at random moments, complete them, and compare them with one that nobody killed.

    begin: starts or resumes the run in a directory; same: compares a completed run with that in `folder / "whole"`; earliest:
    of the moments, as a share of what a whole run takes.
    """
    python("-c", "")  # the process that they are forked from has begun
    began = time.monotonic()
    assert begin(folder / "whole").wait().returncode == 0
    took, rng, killed = time.monotonic() - began, random.Random(5), 0
    for number in range(2):
        out = folder / f"run{number}"
        for share in (earliest, rng.uniform(earliest, 1)):  # the whole run may have been a slow one
            running = begin(out)
            time.sleep(share * took)
            with suppress(ProcessLookupError):  # it has come to its end
                running.send_signal(signal.SIGKILL)
            killed += running.wait().returncode == -signal.SIGKILL
        assert begin(out).wait().returncode == 0
        same(out)
    assert killed


def tight(beside: int = 500_000_000) -> str:
    """Memory, in bytes, that a small run just goes with, whatever the tests before it left in the process."""
    return f"{resident_bytes()[0] + beside}"


def configure(store: Path, out: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(store=store, out=out, **{**SMALL, **settings})


def curve(out: Path) -> bytes:
    return (out / "metrics.jsonl").read_bytes()

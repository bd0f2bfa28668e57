"""kill -9 at random moments while histories are pushed, refreshed and committed: no damage, and the same losses to the bit.

The runs are forked from a process that has imported everything, so that a life of a run takes a fraction of a second.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ooc.config import TrainConfig
from ooc.train import train
from tests.conftest import MakeStore

KILLS = int(os.environ.get("OOC_TEST_KILLS", "4"))
"""a hundred take some minutes"""
RUNS = """
import os, sys
from pathlib import Path
from ooc.config import load_config
from ooc.train import train

train(load_config(Path(sys.argv[1]), {}))  # kernels are loaded; no thread of it is left
print("ready", flush=True)
for line in sys.stdin:
    out = line.strip()
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
        train(load_config(Path(out + ".json"), {}), resume=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("killed" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}", flush=True)
"""


def configure(store: Path, out: Path, seed: int) -> TrainConfig:
    settings: dict[str, Any] = {"layers": 3, "hidden": 8, "mode": "history", "parts": 6, "history_lag": seed % 3, "threads": 1}
    return TrainConfig(store=store, out=out, seed=seed, refresh=2, epochs=8, checkpoint_every=2, **settings)


def lives(out: Path, config: TrainConfig, chance: random.Random, most: int) -> int:
    """Begin and resume a run until it is through, killed at random moments; how often it was."""
    out.with_name(f"{out.name}.json").write_text(config.model_dump_json())
    kills = 0
    warm = out.with_name(f"{out.name}-warm.json")
    warm.write_text(config.model_copy(update={"out": out.with_name(f"{out.name}-warm"), "epochs": 2}).model_dump_json())
    with subprocess.Popen(
        [sys.executable, "-c", RUNS, str(warm)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as runs:
        assert runs.stdin is not None
        assert runs.stdout is not None
        assert runs.stdout.readline() == "ready\n"
        while True:
            print(out, file=runs.stdin, flush=True)
            child = int(runs.stdout.readline())
            if kills < most:
                time.sleep(chance.uniform(0.1, 1.5))
                with suppress(ProcessLookupError):  # it has ended
                    os.kill(child, signal.SIGKILL)
            end = runs.stdout.readline().strip()
            kills += end == "killed"
            if end != "killed":
                assert end == "exit 0"
                runs.stdin.close()
                return kills


def killed_often(make_store: MakeStore, tmp_path: Path, wanted: int) -> None:
    store, chance, kills, seed = make_store(num_nodes=100, num_edges=800), random.Random(wanted), 0, 0
    while kills < wanted:
        whole, cut = tmp_path / f"whole{seed}", tmp_path / f"cut{seed}"
        train(configure(store, whole, seed))
        kills += lives(cut, configure(store, cut, seed), chance, wanted - kills)
        assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        seed += 1


def test_a_killed_history_resumes_to_the_bit(make_store: MakeStore, tmp_path: Path) -> None:
    killed_often(make_store, tmp_path, KILLS)

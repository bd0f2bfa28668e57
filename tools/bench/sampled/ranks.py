"""Seconds an epoch of sampled training by one process and by several, each with one thread, at the same global batch.

    python -m tools.bench.sampled.ranks WORK --ranks 1 2 --rounds 3

Prints JSON: of each number of processes the seconds an epoch (the least of the rounds, in turn), the bytes read, the loss of
the steps; and how many times as fast as one process. Features are in memory, so that the model is the bottleneck.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe
from tools.bench.lib.stores import make_store


def epoch(store: Path, count: int, batch_size: int, flags: list[str]) -> dict[str, Any]:
    """The summary of a run by `count` processes of one thread, with a global batch of `batch_size` seeds."""
    with tempfile.TemporaryDirectory(dir=store.parent) as folder, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        taken.close()
        words = [sys.executable, "-m", "ooc", "train", str(store), "--out", f"{folder}/run", "--threads", "1", *flags]
        common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        ranks = [
            subprocess.Popen(
                [*words, "--batch-size", str(batch_size // count)],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(count)
        ]
        codes = [each.wait() for each in ranks]
        if any(codes):
            raise SystemExit(f"{count} processes did not end well")
        found: dict[str, Any] = json.loads(Path(folder, "run", "summary.json").read_text())
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        return found | {"loss": [json.loads(line)["train_loss"] for line in lines if "train_loss" in line][-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=600_000)
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--fanout", default="5,5,5")
    parser.add_argument("--batch-size", type=int, default=1024, help="of all processes together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of a run; an epoch is as many times longer as it has more")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    store = given.work / "ranks.ooc"
    make_store(store, nodes=given.nodes, edges=given.nodes * given.degree, width=given.width, kind="uniform")
    flags = ["--fanout", given.fanout, "--hidden", str(given.hidden), "--max-steps", str(given.steps), "--eval-every", "1000"]
    flags += ["--in-memory", "--sample-threads", "1", "--read-threads", "1", "--eval-splits", "val"]
    rounds = [{count: epoch(store, count, given.batch_size, flags) for count in given.ranks} for _ in range(given.rounds)]
    seconds = {count: min(each[count]["seconds_per_epoch"] for each in rounds) for count in given.ranks}
    found = {
        "machine": describe(),
        "seconds_per_epoch": seconds,
        "times_as_fast": {count: seconds[given.ranks[0]] / each for count, each in seconds.items()},
        "stages": {count: rounds[-1][count]["stages"] for count in given.ranks},
        "bytes_read": {count: rounds[-1][count]["bytes_read"] for count in given.ranks},
        "loss": {count: rounds[-1][count]["loss"] for count in given.ranks},
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

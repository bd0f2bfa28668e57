"""Thousands of batches from disk in one process: memory must not grow, and nothing may be left after closing.

    python -m tools.bench.sampled.soak WORK --batches 10000 --memory 1.2GB --limit 1.2GB --plot soak.png

Trains on a graph (made below WORK if missing) whose features do not fit the memory, and samples the resident memory every
--every batches. Prints JSON: the slope of a line fitted to the samples without the first tenth, its growth over the rest, and
threads and descriptors that were not there before. Exits with 1 if memory grew by more than 1 % of the given memory, or if
anything is left. --limit needs root.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.sizes import parse_bytes
from tools.bench.lib.chart import Panel, lines
from tools.bench.lib.machine import describe, limit_memory
from tools.bench.sampled.steps import learner, loader_of, sums_of, warm_up, windows_of

GROWTH_SHARE = 0.01
"""Of the memory given, what it may grow by: the fit's error, of samples that go up and down by a batch"""


def open_things() -> tuple[set[str], set[str], int]:
    """Names of Python's threads, what the descriptors stand for, and how many threads the kernel counts."""
    here = Path("/proc/self/fd")
    files = set()
    for entry in os.listdir(here):
        with suppress(FileNotFoundError):  # that of the listing itself
            files.add(f"{entry} {os.readlink(here / entry)}")
    return {thread.name for thread in threading.enumerate()}, files, len(os.listdir("/proc/self/task"))


def train(a: argparse.Namespace, fanout: list[int], sample: Callable[[int], None]) -> dict[str, float]:
    """Take a.batches steps, over as many epochs as that takes; `sample(batches so far)` now and then. What was read."""
    import ooc

    done = epochs = 0
    with ooc.open(a.store, memory=a.memory) as ds:
        step = learner(ds, len(fanout), a.hidden, 0)
        loader = loader_of(ds, None, fanout, a.batch_size, sums=sums_of(a, fanout, ds), shuffle=True)
        while done < a.batches:
            epochs += 1
            epoch = iter(loader)
            for batch in epoch:
                step(batch)
                done += 1
                if done % a.every == 0:
                    sample(done)
                if done == a.batches:
                    break
            epoch.close()
        return {"epochs": epochs, "windows": windows_of(loader), "bytes_read": loader.bytes_read}


def growth(at: list[int], resident: list[int]) -> dict[str, float]:
    """The line through the samples after the first tenth: bytes a batch, and over all that it is fitted to.

    >>> growth(list(range(0, 1100, 100)), [0, *range(500, 1500, 100)])["bytes_per_batch"]
    1.0
    """
    first = len(at) // 10
    x, y = np.array(at[first:], np.float64), np.array(resident[first:], np.float64)
    slope = float(np.polyfit(x, y, 1)[0])
    return {"bytes_per_batch": slope, "growth_bytes": slope * float(x[-1] - x[0])}


def soak(a: argparse.Namespace) -> dict[str, Any]:
    """Warm up, train, close; the samples and what they come to."""
    import ooc
    from ooc.stores.process import resident_bytes

    fanout = [int(f) for f in a.fanout.split(",")]
    with ooc.open(a.store, memory=a.memory) as ds:
        warm_up(fanout, a.hidden, sums_of(a, fanout, ds), ds, {"memory": a.memory})  # torch's and numba's threads start here
    before = open_things()
    at: list[int] = []
    resident: list[int] = []

    def sample(done: int) -> None:
        at.append(done)
        resident.append(resident_bytes()[0])

    began = time.perf_counter()
    read = train(a, fanout, sample)
    seconds = time.perf_counter() - began
    gc.collect()
    after = open_things()
    found = growth(at, resident)
    left = {
        "threads": sorted(after[0] - before[0]),
        "files": sorted(after[1] - before[1]),
        "tasks": max(0, after[2] - before[2]),
    }
    return {
        "batches": at[-1],
        "seconds_per_batch": seconds / at[-1],
        **read,
        "memory_bytes": parse_bytes(a.memory),
        "peak_rss_bytes": resident_bytes()[1],
        **found,
        "grew": found["growth_bytes"] > GROWTH_SHARE * parse_bytes(a.memory),
        "left": left,
        "clean": not any(left.values()),
        "at": at,
        "rss_bytes": resident,
    }


def main() -> None:
    """Parse the command line, make the store, train, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rows", action="store_true", help="batches with rows, not with the first layer's sums")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, default=128, help="feature columns")
    parser.add_argument("--kind", default="uniform")
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--memory", default="1.2GB", help="the budget given to ooc")
    parser.add_argument("--limit", help="memory limit counting page cache, such as 1GB")
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    if a.batches < 10 * a.every:
        parser.error(f"--batches {a.batches}: at least ten times --every ({a.every}) are needed to fit a line")
    a.work.mkdir(parents=True, exist_ok=True)
    a.store = a.work / f"{a.kind}-{a.nodes}.ooc"
    if not a.store.exists():
        make = [part for name in ("nodes", "edges", "width", "kind") for part in (f"--{name}", str(getattr(a, name)))]
        subprocess.run(
            [sys.executable, "-m", "tools.bench.lib.stores", str(a.store), *make], check=True
        )  # leaves no memory behind
    if a.limit:
        limit_memory(a.limit)
    result = soak(a)
    if a.plot:
        gb = [size / 1e9 for size in result["rss_bytes"]]
        lines(a.plot, [Panel(result["at"], {"resident": gb}, "batches", "GB", marker="-")])
    print(json.dumps({"machine": describe(), "nodes": a.nodes, "fanout": a.fanout, "limit": a.limit, **result}))
    sys.exit(int(result["grew"] or not result["clean"]))


if __name__ == "__main__":
    main()

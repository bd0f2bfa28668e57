"""LABOR with both dependencies beside neighbor sampling, from disk under a limit and in RAM: bytes and seconds.

    python -m tools.bench.sampled.labor_from_disk STORE --limit 2GB --fanout 10,10 --batches 1000 --dependency 256 1024

Runs `tools.bench.sampled.steps` on the same seeds, arm after arm, --rounds times, each with an empty page cache. Prints
JSON: of every arm the median seconds and the bytes of a batch, batches a scan and nodes a batch; of every batch dependency the
ratios to neighbor sampling, and the share by which seconds fall of that by which bytes fall; and of neighbor sampling's first
scan how many of its destinations are distinct, since batches can share no more aggregates than destinations. Needs root.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.disk_rates import Rates
from tools.bench.lib.machine import describe
from tools.bench.sampled.cost import Job, Result, run_cold
from tools.bench.sampled.trace import Trace


def arm_of(runs: list[Result]) -> Result:
    """What runs of one arm took, a batch."""
    first = runs[0]
    seconds = [run["seconds_per_batch"] for run in runs]
    return {
        "seconds_per_batch": statistics.median(seconds),
        "seconds_of_rounds": seconds,
        "bytes_per_batch": first["bytes_read"] / first["batches"],
        "batches_per_scan": first["batches"] / first["windows"] if first["windows"] else None,
        "nodes_per_batch": first["nodes_per_batch"],
        "edges_per_batch": first["edges_per_batch"],
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
    }


def beside(labor: Result, neighbor: Result) -> dict[str, float]:
    """Ratios of two arms.

    >>> beside({"bytes_per_batch": 5, "seconds_per_batch": 6}, {"bytes_per_batch": 10, "seconds_per_batch": 10})
    {'bytes': 0.5, 'seconds': 0.6, 'fall of seconds by that of bytes': 0.8}
    """
    nbytes = labor["bytes_per_batch"] / neighbor["bytes_per_batch"] if neighbor["bytes_per_batch"] else 1.0
    seconds = labor["seconds_per_batch"] / neighbor["seconds_per_batch"]
    found = {"bytes": nbytes, "seconds": seconds}
    return found | ({"fall of seconds by that of bytes": (1 - seconds) / (1 - nbytes)} if nbytes < 1 else {})


def distinct_destinations(store: Path, run: Result) -> float:
    """Of the first layer's destinations in a scan of the run, the share that are distinct."""
    batches = max(1, round(run["batches"] / run["windows"]))
    found, count = np.empty(0, np.int64), 0
    with Trace.of(store, run | {"batches": batches}) as trace:
        for drawn in trace.drawn():
            destinations = drawn.subgraph.node[: len(drawn.subgraph.indptr) - 1]
            found, count = np.union1d(found, destinations), count + len(destinations)
    return len(found) / count


def measure(a: argparse.Namespace) -> dict[str, Any]:
    """Every arm in turn, --rounds times."""
    rates, runs = Rates(a.store), dict[str, list[Result]]()
    for _ in range(a.rounds):
        for features in a.features:
            for labor in (0, *a.dependency):
                rates.measure()
                limit = a.limit if features == "disk" else None
                name = f"{features}, {f'LABOR, K = {labor}' if labor else 'neighbor'}"
                job = Job(a.store, features, a.fanout, a.batches, a.batch_size, limit, labor=labor)
                runs.setdefault(name, []).append(run_cold(job.command))
                shown = {key: runs[name][-1].get(key) for key in ("seconds_per_batch", "bytes_read", "windows", "error")}
                print(name, json.dumps(shown), file=sys.stderr)
    rates.complete()
    arms = {name: arm_of(each) for name, each in runs.items() if not any("failed" in run for run in each)}
    ratios = {}
    for name, arm in arms.items():
        neighbor = f"{name.split(',')[0]}, neighbor"
        if name != neighbor and neighbor in arms:
            ratios[name] = beside(arm, arms[neighbor])
    found: dict[str, Any] = {"arms": arms, "labor / neighbor": ratios, "disk": rates.asdict(), "machine": describe()}
    if "disk, neighbor" in arms:
        found["distinct destinations of a scan"] = distinct_destinations(a.store, runs["disk, neighbor"][0])
    return found


def main() -> None:
    """Parse the command line, run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--limit", default="2GB", help="memory limit counting page cache, of arms from disk")
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--dependency", type=int, nargs="+", default=[256])
    parser.add_argument("--features", nargs="+", choices=["ram", "disk"], default=["disk", "ram"])
    parser.add_argument("--rounds", type=int, default=1)
    print(json.dumps(measure(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()

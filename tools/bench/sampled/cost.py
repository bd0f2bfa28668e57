"""Runs of `ooc` from disk compared with the bound of their own trace; used by other benchmarks.

The clock is that of `tools.bench.sampled.steps`: from the first request to the end of the last step, with a cold cache,
including the first fill of the pipeline, under a limit that counts page cache.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.sizes import parse_bytes
from tools.bench.lib.chart import Panel, lines
from tools.bench.lib.disk_rates import Disk, Rates
from tools.bench.lib.machine import drop_page_cache
from tools.bench.sampled import bound
from tools.bench.sampled import cache_policies as policies
from tools.bench.sampled.trace import Trace

LEAST_WINDOWS, LEAST_BATCHES = 20, 300
"""A run shorter than that says little: its first window weighs too much"""
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One configuration of `tools.bench.sampled.steps`."""

    store: Path
    features: str
    fanout: str
    batches: int
    batch_size: int = 1024
    limit: str | None = None
    rows: bool = False
    """batches with rows, read by windows, not with the first layer's sums"""
    dropout: float = 0.0
    labor: int = 0
    """batch dependency of LABOR sampling; 0: neighbor sampling"""
    pack: str | None = None
    """disk to pack batches in, in place of shared scans"""

    @property
    def command(self) -> list[str]:
        """The command that runs it."""
        flags = {"features": self.features, "fanout": self.fanout, "batches": self.batches, "batch-size": self.batch_size}
        flags |= {"dropout": self.dropout} if self.dropout else {}
        flags |= {"labor": self.labor} if self.labor else {}
        flags |= {"pack": self.pack} if self.pack else {}
        words = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        limit = [] if self.limit is None else ["--limit", str(parse_bytes(self.limit))]
        return [
            sys.executable,
            "-m",
            "tools.bench.sampled.steps",
            str(self.store),
            *words,
            *limit,
            *(["--rows"] if self.rows else []),
        ]


def last_json(command: list[str]) -> Result:
    """Run a command and parse the last line it prints; {"failed": status, "error": its last lines} where it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.returncode, "error": done.stderr.strip().splitlines()[-2:]}
    result: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_cold(command: list[str]) -> Result:
    """`last_json` with an empty page cache."""
    drop_page_cache()
    return last_json(command)


def short_of(run: Result) -> list[str]:
    """What a run lacks to count: windows, batches."""
    found = {"windows": LEAST_WINDOWS, "batches": LEAST_BATCHES}
    return [f"{run[name]} {name} of {least}" for name, least in found.items() if run[name] < least]


def beside_bound(store: Path, run: Result, disk: Disk) -> Result:
    """The bound of a run from disk, and what its windows had to read, from its trace (held in memory: 4 bytes a row wanted).

    Raises RuntimeError where the windows drawn again are not those that the run read.
    """
    with Trace.of(store, run) as trace:
        size = bound.window_bytes(run["budget"])
        batches = [ids.astype(np.int32) for ids in trace.nodes()]
        least = bound.bound(list(bound.window_reads(batches, trace.row_bytes, size)), disk)
        planned = trace.planned()
        num_nodes = trace.ds.num_nodes
    if (planned["windows"], planned["rows"]) != (run["windows"], run["rows_read"]):
        raise RuntimeError(f"the trace of {store} is not the run's: {planned} beside {run['windows']}, {run['rows_read']}")
    wanted = sum(map(len, batches))
    return {
        "bound": {"window_bytes": size, **least},
        "planned": planned,
        "bytes_read_of_planned_pages": run["bytes_read"] / planned["page_bytes"],
        "seconds_of_bound": run["seconds_per_batch"] / least["seconds_per_batch"],
        "miss_ratio": run["rows_read"] / wanted,
        "belady_miss_ratio": policies.belady(policies.joined(batches), num_nodes, planned["rows_in_memory"]) / wanted,
    }


def measure(job: Job, rates: Rates, rounds: int) -> Result:
    """`rounds` runs of a job from disk, the disk measured before each and after the last; the run of median time.

    Where a run fails (a budget that is too small, say) its failure is the result.
    """
    runs: list[Result] = []
    for _ in range(rounds):
        rates.measure()
        runs.append(run_cold(job.command))
        print(json.dumps({key: runs[-1].get(key) for key in ("seconds_per_batch", "windows", "error")}), file=sys.stderr)
        if "failed" in runs[-1]:
            return runs[-1]
    rates.measure()
    rates.complete()
    seconds = [run["seconds_per_batch"] for run in runs]
    chosen = runs[seconds.index(statistics.median_low(seconds))]
    disk = rates.median()
    return {
        **{key: chosen[key] for key in ("seconds_per_batch", "batches", "windows", "peak_rss_bytes", "nodes_per_batch")},
        "seconds_per_batch_of_rounds": seconds,
        "bytes_per_batch": (chosen["bytes_read"] + chosen["topology_bytes_read"]) / chosen["batches"],
        "short_of": short_of(chosen),
        "losses_identical": all(run["losses"] == chosen["losses"] for run in runs),
        "disk": rates.asdict(),
        **beside_bound(job.store, chosen, disk),
    }


def plot(path: Path, at: list[float], results: list[Result], x: str) -> None:
    """Seconds and bytes a batch over `at`, each beside the bound's; a failed run leaves a gap."""
    good: list[Result | None] = [None if "failed" in each else each for each in results]

    def values(of: Callable[[Result], float]) -> list[float | None]:
        return [None if each is None else of(each) for each in good]

    seconds = {
        "ooc from disk": values(lambda run: run["seconds_per_batch"]),
        "bound": values(lambda run: run["bound"]["seconds_per_batch"]),
    }
    mb = {
        "ooc from disk": values(lambda run: run["bytes_per_batch"] / 1e6),
        "bound's pages": values(lambda run: run["bound"]["page_bytes"] / run["bound"]["batches"] / 1e6),
    }
    lines(path, [Panel(at, seconds, x, "seconds per batch"), Panel(at, mb, x, "MB a batch")])

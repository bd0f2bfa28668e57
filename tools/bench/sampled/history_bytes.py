"""Bytes moved by an epoch of a three-layer model, with histories and with sampled neighborhoods, under one memory limit.

    python -m tools.bench.sampled.history_bytes STORE WORK --limit 2GB --fanout 15,10,5 --parts 2500

Trains on every node of the store's training split. Arms: `ooc train --mode history` on groups of parts, and
`tools.bench.sampled.steps` on sampled batches; each runs some steps, which are extrapolated to the epoch. Counts features,
edges, and histories read and written; for the sampled arm features and edges. Prints JSON. Needs root.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe, drop_page_cache, ooc_command
from tools.bench.sampled.cost import Job, Result, run_cold


def history(a: argparse.Namespace) -> Result:
    """Steps on groups of parts with their halo."""
    run = a.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    layers = len(a.fanout.split(","))
    flags = ["--mode", "history", "--layers", str(layers), "--parts", str(a.parts), "--parts-per-batch", str(a.parts_per_batch)]
    flags += ["--history-dtype", a.history_dtype, "--hidden", str(a.hidden), "--max-steps", str(a.history_steps)]
    flags += ["--memory", a.memory or a.limit, "--eval-splits", "", "--no-plan"]
    command = [*ooc_command(a.limit), "train", str(a.store), "--out", str(run), *flags]
    drop_page_cache()
    subprocess.run(command, check=True, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    shutil.rmtree(run)
    moved = {name: summary[name] for name in ("bytes_read", "history_bytes_read", "history_bytes_written")}
    steps, epoch = summary["total_steps"], summary["steps_per_epoch"]
    return {
        "steps": steps,
        "steps_per_epoch": epoch,
        "moved": moved,
        "bytes_per_epoch": round(sum(moved.values()) / steps * epoch),
        "seconds_per_epoch": summary["seconds_per_batch"] * epoch,
        "peak_rss_bytes": summary["peak_rss_bytes"],
    }


def sampled(a: argparse.Namespace, seeds: int) -> Result:
    """Sampled batches, from disk."""
    run = run_cold(Job(a.store, "disk", a.fanout, a.steps, a.batch_size, a.limit).command)
    if "failed" in run:
        return run
    epoch = -(-seeds // a.batch_size)
    moved = {name: run[name] for name in ("bytes_read", "topology_bytes_read")}
    return {
        "steps": run["batches"],
        "steps_per_epoch": epoch,
        "moved": moved,
        "bytes_per_epoch": round(sum(moved.values()) / run["batches"] * epoch),
        "seconds_per_epoch": run["seconds_per_batch"] * epoch,
        "peak_rss_bytes": run["peak_rss_bytes"],
    }


def main() -> None:
    """Parse the command line, run both arms, print JSON."""
    from ooc.stores.dataset import Dataset

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--limit", default="2GB", help="of memory, page cache counted")
    parser.add_argument("--memory", help="memory budget of ooc; default: the limit")
    parser.add_argument("--fanout", default="15,10,5", help="of the sampled arm; the model has as many layers")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=1024, help="of the sampled arm")
    parser.add_argument("--steps", type=int, default=60, help="of the sampled arm")
    parser.add_argument("--parts", type=int, default=2500)
    parser.add_argument("--parts-per-batch", type=int, default=1)
    parser.add_argument("--history-dtype", default="float16")
    parser.add_argument("--history-steps", type=int, default=20)
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    with Dataset.open(a.store) as ds:
        seeds = len(ds.split("train"))
    arms = {"history": history(a), "sampled": sampled(a, seeds)}
    settings = {name: value for name, value in vars(a).items() if name not in ("store", "work")}
    moved, most = arms["history"]["bytes_per_epoch"], arms["sampled"].get("bytes_per_epoch")
    ratio = None if most is None else most / moved
    print(json.dumps({"machine": describe(), **settings, **arms, "sampled / history": ratio}))


if __name__ == "__main__":
    main()

"""Packed batches (`--pack`) beside shared scans: the same batches and memory limit, cold, with disk space of several sizes.

    python -m tools.bench.sampled.packed WORK --nodes 8000000 --edges 80000000 --limit 2GB --batches 66 --pack 6GB,12GB

Prints bytes read and written, and seconds, per batch as JSON, and whether the losses are equal. Needs root.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe
from tools.bench.lib.stores import make_store
from tools.bench.sampled.cost import Job, run_cold

_SHOWN = ("seconds_per_batch", "windows", "nodes_per_batch", "peak_rss_bytes")


def compare(a: argparse.Namespace, kind: str, fanout: str) -> dict[str, Any]:
    """Both ways on one graph, packing with each size."""
    store = a.work / f"{kind}-{a.nodes}.ooc"
    make_store(store, nodes=a.nodes, edges=a.edges, width=a.width, kind=kind, order="degree" if kind == "rmat" else "input")
    settings: dict[str, Any] = {"fanout": fanout, "batches": a.batches, "batch_size": a.batch_size, "limit": a.limit}
    runs = {pack: run_cold(Job(store, "disk", pack=pack, **settings).command) for pack in (None, *a.pack.split(","))}
    losses = [run["losses"] for run in runs.values() if "failed" not in run]
    arms = {"scans" if pack is None else f"packed, {pack}": _arm(run) for pack, run in runs.items()}
    return {"kind": kind, "fanout": fanout, "arms": arms, "losses_equal": all(each == losses[0] for each in losses)}


def _arm(run: dict[str, Any]) -> dict[str, Any]:
    if "failed" in run:
        return run
    moved = {f"{name}_per_batch": run[name] / run["batches"] for name in ("bytes_read", "topology_bytes_read", "bytes_written")}
    stages = {name: stage["busy_s"] / run["batches"] for name, stage in run["stages"].items()}
    return moved | {name: run[name] for name in _SHOWN} | {"stages_per_batch": stages}


def main() -> None:
    """Parse the command line, run every arm, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=8_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--kinds", nargs="+", default=["uniform"])
    parser.add_argument("--fanout", nargs="+", default=["15,10,5"])
    parser.add_argument("--batches", type=int, default=66)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--limit", default="2GB", help="of memory, page cache counted")
    parser.add_argument("--pack", default="12GB", help="disk space; several: 6GB,12GB")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    results = []
    for kind in a.kinds:
        for fanout in a.fanout:
            results.append(compare(a, kind, fanout))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    graph = {"nodes": a.nodes, "edges": a.edges, "width": a.width}
    settings = {"batches": a.batches, "batch_size": a.batch_size, "limit": a.limit}
    print(json.dumps({"machine": describe(), "graph": graph, **settings, "results": results}))


if __name__ == "__main__":
    main()

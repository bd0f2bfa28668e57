"""A graph of ogbn-papers100M's shape, made, ingested and trained on under memory limits that count page cache.

    python -m tools.bench.sampled.papers WORK --limit 8GB --ingest-limit 4GB
    python -m tools.bench.sampled.papers WORK --scale 0.01 --limit 1GB --ingest-limit 1GB --max-steps 10

Makes WORK/papers.ooc (36 GB, `tools.graphs.papers`) if it is missing, then runs one epoch of GraphSAGE for each fan-out with
`ooc train`, cold. The disk is measured before and after each. Prints a table and JSON. Needs root.

Ingest: edges are made twice while they are ingested, once to check their ends and once to sort them; "making" is the processor
time of that and of the features, measured on a part. Training: the bound is that of the bytes that were read, at the disk's
median sequential rate. With `--max-steps` an epoch is extrapolated, and says so.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ooc.stores.sizes import parse_bytes
from tools.bench.lib.disk_rates import Rates
from tools.bench.lib.machine import describe, drop_page_cache, ooc_command
from tools.graphs.papers import WIDTH, Edges, Features, Shape

PUBLISHED = {"DiskGNN, one GPU, cache of 10 %": 76.0}
"""seconds an epoch that its authors give for ogbn-papers100M, on other hardware"""
_PART = 1 << 22


def making_seconds(shape: Shape) -> float:
    """Processor seconds to make all edges twice and all features once, from a part of each."""
    edges, x = Edges(shape.nodes, shape.edges, 0), Features(shape.nodes, 0)
    parts = min(shape.edges, _PART), min(shape.nodes, _PART // WIDTH)
    makers: list[Callable[[], object]] = [lambda: edges[:, : parts[0]], lambda: x[: parts[1]]]
    seconds = []
    for make in makers:
        make()  # compiles
        begin = time.process_time()
        make()
        seconds.append(time.process_time() - begin)
    return 2 * seconds[0] * shape.edges / parts[0] + seconds[1] * shape.nodes / parts[1]


def bytes_below(folder: Path) -> int:
    """Bytes of disk of all files below a folder."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def ingest(store: Path, a: argparse.Namespace) -> dict[str, Any]:
    """Ingest in a process of its own; seconds, edges per second, peak RSS and peak disk."""
    shape, most, ended = Shape.at(a.scale), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            most[0] = max(most[0], bytes_below(a.work))

    watcher = threading.Thread(target=watch, daemon=True)
    command = [sys.executable, "-m", "tools.graphs.papers", str(store), "--scale", str(a.scale), "--limit", a.ingest_limit]
    drop_page_cache()
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    watcher.start()
    try:
        subprocess.run([*command, "--memory", a.ingest_limit], check=True, stdout=sys.stderr)
    finally:
        ended.set()
        watcher.join()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds,
        "edges_per_second": shape.edges / seconds,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "making_processor_seconds": making_seconds(shape),
        "peak_rss_bytes": after.ru_maxrss * 1024,
        "peak_disk_bytes": max(most[0], bytes_below(a.work)),
        "store_bytes": bytes_below(store),
    }


def train(store: Path, fanout: str, a: argparse.Namespace, rates: Rates) -> dict[str, Any]:
    """One epoch, or its first steps, cold."""
    run = a.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    flags = ["--fanout", fanout, "--layers", str(len(fanout.split(","))), "--hidden", str(a.hidden), "--epochs", "1"]
    flags += ["--batch-size", str(a.batch_size), "--memory", a.limit, "--eval-splits", "", *a.flags.split()]
    flags += ["--max-steps", str(a.max_steps)] if a.max_steps else []
    rates.measure()
    drop_page_cache()
    subprocess.run([*ooc_command(a.limit), "train", str(store), "--out", str(run), *flags], check=True, stdout=sys.stderr)
    rates.measure()
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    shutil.rmtree(run)
    steps, epoch = summary["steps"], summary["steps_per_epoch"]
    disk = rates.median()
    nbytes = summary["bytes_read"] / steps * epoch
    return {
        "fanout": fanout,
        "steps": steps,
        "steps_per_epoch": epoch,
        "extrapolated": steps < epoch,
        "seconds_per_epoch": summary["train_seconds"] / steps * epoch,
        "bytes_per_epoch": nbytes,
        "edge_bytes_per_epoch": summary["edge_bytes_read"] / steps * epoch,
        "bound_seconds": nbytes / disk.sequential_bytes_per_s,
        "disk": vars(disk),
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "stages": {name: stage["busy_s"] / steps for name, stage in summary["stages"].items()},
        "score_seconds": summary["evaluate_seconds"],
    }


def table(result: dict[str, Any]) -> str:
    """The result as a table in Markdown."""
    lines = []
    if found := result.get("ingest"):
        lines += ["| ingest | |", "|---|---|"]
        lines.append(f"| seconds, edges per second | {found['seconds']:.0f}, {found['edges_per_second'] / 1e6:.2f} M |")
        lines.append(
            f"| processor seconds, of these making the graph | {found['processor_seconds']:.0f}, "
            f"{found['making_processor_seconds']:.0f} |"
        )
        peaks = f"{found['peak_rss_bytes'] / 1e9:.2f} GB, {found['peak_disk_bytes'] / 1e9:.1f} GB"
        lines.append(f"| peak RSS, peak disk | {peaks} |")
        lines.append("")
    lines.append("| fan-out | seconds per epoch | GB per epoch (edges) | bound of the disk | peak RSS |")
    lines.append("|---|---|---|---|---|")
    for run in result["training"]:
        shown = f"{run['seconds_per_epoch']:.0f}" + (f" (from {run['steps']} batches)" if run["extrapolated"] else "")
        nbytes = f"{run['bytes_per_epoch'] / 1e9:.1f} ({run['edge_bytes_per_epoch'] / 1e9:.1f})"
        peak = f"{run['peak_rss_bytes'] / 1e9:.2f} GB"
        lines.append(f"| [{run['fanout']}] | {shown} | {nbytes} | {run['bound_seconds']:.0f} s | {peak} |")
    lines += [f"| {name}, published | {seconds:.0f} | | | |" for name, seconds in PUBLISHED.items()]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, ingest, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--limit", default="8GB", help="of training's memory, page cache counted")
    parser.add_argument("--ingest-limit", default="4GB", help="of the ingest's, likewise")
    parser.add_argument("--fanouts", nargs="*", default=["10,10", "15,10,5"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--max-steps", type=int, help="train on so many batches only")
    parser.add_argument("--flags", default="", help="further flags of `ooc train`, as '--sampler labor'")
    parser.add_argument("--remove", action="store_true", help="remove the store at the end")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    store = a.work / "papers.ooc"
    result: dict[str, Any] = {"machine": describe(), "scale": a.scale, "limit": parse_bytes(a.limit)}
    result |= {} if store.exists() else {"ingest_limit": parse_bytes(a.ingest_limit), "ingest": ingest(store, a)}
    print(json.dumps(result), file=sys.stderr, flush=True)
    rates = Rates(store)
    result["training"] = [train(store, fanout, a, rates) for fanout in a.fanouts]
    result["rates"] = rates.asdict()
    if a.remove:
        shutil.rmtree(store)
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

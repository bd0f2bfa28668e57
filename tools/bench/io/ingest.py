"""Ingest compared with the disk: edges per second, peak memory, and feature bytes per second against raw sequential writing.

    python -m tools.bench.io.ingest WORK --nodes 8000000 --edges 100000000 --memory 2GB [--strings]

Makes the input below WORK if missing. Prints JSON.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tools.bench.lib.machine import describe, drop_page_cache, ooc_command
from tools.graphs.make_graph import make_graph


def write_rate(path: Path, size: int) -> float:
    """Bytes per second of writing `size` bytes sequentially from one buffer, sync included."""
    piece = np.random.default_rng(0).bytes(16 << 20)
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return size // len(piece) * len(piece) / seconds


def ingest(store: Path, flags: list[str], limit: str = "") -> dict[str, float]:
    """Run `ooc ingest` in a separate process; returns its wall seconds (startup included) and peak RSS in bytes.

    `limit` is that of its memory, page cache counted.
    """
    shutil.rmtree(store, ignore_errors=True)
    drop_page_cache()
    begin = time.perf_counter()
    command = [*ooc_command(limit), "ingest", str(store), *flags]
    subprocess.run(command, check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024}


def features_rate(a: argparse.Namespace, baseline: float) -> dict[str, float]:
    """Ingest one edge and the whole feature matrix three times, each with a raw write of as many bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    one = a.work / "one.parquet"
    pq.write_table(pa.table({"src": [0], "dst": [1]}), one)
    size = (a.work / "x.npy").stat().st_size
    ours, raw = [], []
    for _ in range(3):
        raw.append(write_rate(a.work / "raw.bin", size))
        flags = ["--edges", str(one), "--features", f"x={a.work}/x.npy", "--memory", a.memory]
        ours.append(size / (ingest(a.work / "features.ooc", flags)["seconds"] - baseline))
    shutil.rmtree(a.work / "features.ooc")
    ratio = statistics.median(o / r for o, r in zip(ours, raw, strict=True))
    return {"bytes_per_second": statistics.median(ours), "raw_bytes_per_second": statistics.median(raw), "ratio": ratio}


def main() -> None:
    """Parse the command line, ingest, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=8_000_000)
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument("--width", type=int, default=0, help="feature columns; 0: edges only")
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--strings", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    a = parser.parse_args()
    if not (a.work / "edges").exists():
        make_graph(a.work, nodes=a.nodes, edges=a.edges, features=a.width, strings=a.strings)
    flags = ["--edges", f"{a.work}/edges/*.parquet", "--memory", a.memory]
    flags += [] if a.strings else ["--num-nodes", str(a.nodes)]
    runs = [ingest(a.work / "bench.ooc", flags) for _ in range(a.rounds)]
    seconds = statistics.median(run["seconds"] for run in runs)
    result = {"edges_per_second": a.edges / seconds, "seconds": seconds, "peak_rss_bytes": runs[0]["peak_rss_bytes"]}
    if a.width:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ooc.cli", "--help"], check=True, capture_output=True)
        result["features"] = features_rate(a, time.perf_counter() - start)
    shutil.rmtree(a.work / "bench.ooc")
    print(json.dumps({"machine": describe(), "edges": a.edges, "memory": a.memory, "strings": a.strings, **result}))


if __name__ == "__main__":
    main()

"""Ingest compared with the disk: edges per second, peak memory, and feature bytes per second against raw sequential writing.

    python -m tools.bench.io.ingest WORK --nodes 8000000 --edges 100000000 --memory 2GB [--strings] [--ordered] [--shards 4]

Makes the input below WORK if missing. `--ordered` sorts the edges by destination (DuckDB) and ingests these with and without
`--sorted`; `--shards` builds shards, one after the other, and joins them. Prints JSON.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.fingerprints import fingerprint
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
    """Run `ooc ingest` in a separate process; see `run`."""
    return run(store, ["ingest", str(store), *flags], limit)


def run(store: Path, words: list[str], limit: str = "") -> dict[str, float]:
    """Run a verb that writes `store` in a separate process; returns its wall seconds (startup included), processor seconds and
    peak RSS in bytes.

    `limit` is that of its memory, page cache counted.
    """
    shutil.rmtree(store, ignore_errors=True)
    drop_page_cache()
    begin = time.perf_counter()
    process = subprocess.Popen([*ooc_command(limit), *words], stdout=sys.stderr, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    seconds, processor = time.perf_counter() - begin, used.ru_utime + used.ru_stime
    return {"seconds": seconds, "processor_seconds": processor, "peak_rss_bytes": used.ru_maxrss * 1024}


def sort_edges(source: str, target: Path) -> float:
    """Write the edges of `source` in order of their destinations, as the guide does, in a separate process; returns the
    seconds."""
    query = f"COPY (SELECT src, dst FROM read_parquet('{source}') ORDER BY dst) TO '{target}' (FORMAT parquet)"
    settings = {"memory_limit": "1400MB", "temp_directory": str(target.with_suffix(".tmp"))}
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", f"import duckdb; duckdb.connect(config={settings}).execute({query!r})"],
        check=True,
        stdout=sys.stderr,
    )
    return time.perf_counter() - begin


def in_order(a: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Ingest edges in order, sorting them again and only packing them, in turn; the stores are equal."""
    table, store = a.work / "ordered.parquet", a.work / "bench.ooc"
    found: dict[str, Any] = {"sort_seconds": sort_edges(f"{a.work}/edges/*.parquet", table) if not table.exists() else None}
    arms: dict[str, list[dict[str, float]]] = {"plain": [], "sorted": []}
    prints = set()
    for _ in range(a.rounds):
        for arm, runs in arms.items():
            more = ["--sorted"] if arm == "sorted" else []
            runs.append(ingest(store, ["--edges", str(table), *flags, *more]))
            prints.add(fingerprint(store))
    assert len(prints) == 1, "the same store"
    for arm, runs in arms.items():
        middle = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        found[arm] = {"edges_per_second": a.edges / middle["seconds"], **middle}
    return found


def in_shards(a: argparse.Namespace, flags: list[str], want: str) -> dict[str, Any]:
    """Build the shards one after the other, and join them to the store of fingerprint `want`."""
    paths = [a.work / f"shard-{index}" for index in range(1, a.shards + 1)]
    runs = [ingest(path, [*flags, "--shard", f"{index}/{a.shards}"]) for index, path in enumerate(paths, 1)]
    store = a.work / "joined.ooc"
    joined = run(store, ["join", str(store), *map(str, paths)])
    assert fingerprint(store) == want, "the same store"
    for path in (store, *paths):
        shutil.rmtree(path)
    return {"shards": runs, "join": joined, "join_edges_per_second": a.edges / joined["seconds"]}


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
    parser.add_argument("--ordered", action="store_true", help="also with edges in order of their destinations")
    parser.add_argument("--shards", type=int, default=0, help="also in so many shards; 0: not")
    a = parser.parse_args()
    if not (a.work / "edges").exists():
        make_graph(a.work, nodes=a.nodes, edges=a.edges, features=a.width, strings=a.strings)
    flags = ["--edges", f"{a.work}/edges/*.parquet", "--memory", a.memory]
    flags += [] if a.strings else ["--num-nodes", str(a.nodes)]
    runs = [ingest(a.work / "bench.ooc", flags) for _ in range(a.rounds)]
    seconds = statistics.median(run["seconds"] for run in runs)
    result: dict[str, Any] = {
        "edges_per_second": a.edges / seconds,
        "seconds": seconds,
        **{key: runs[0][key] for key in ("processor_seconds", "peak_rss_bytes")},
    }
    if a.width:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ooc.cli", "--help"], check=True, capture_output=True)
        result["features"] = features_rate(a, time.perf_counter() - start)
    if a.shards:
        result["shards"] = in_shards(a, flags, fingerprint(a.work / "bench.ooc"))
    if a.ordered:
        result["ordered"] = in_order(a, flags[2:])
    shutil.rmtree(a.work / "bench.ooc")
    print(json.dumps({"machine": describe(), "edges": a.edges, "memory": a.memory, "strings": a.strings, **result}))


if __name__ == "__main__":
    main()

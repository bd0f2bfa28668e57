"""An embedding table larger than memory, beside the same training in memory: bytes beside the bound on exchanges, and edges/s.

    python -m tools.bench.sampled.tables FOLDER --nodes 20000000 --edges 200000000 --width 100 --limit 3GB
    python -m tools.bench.sampled.tables FOLDER --nodes 1000000 --edges 10000000 --limit 1100MB

Edges are drawn with a skew, both ends as nodes * u**skew in a random order of nodes. The table is trained from disk by `ooc
train` under a limit that counts page cache, and then one that fits memory and has no buckets, with the same width, batches and
negatives and as many edges a node; one after the other, for `--rounds` rounds. Compared are bytes of buckets read and written,
but for those of checkpoints, with those of BETA's swaps and of the least that any order has; and edges a second of whole steps,
waits for buckets included.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ooc.runtime.keyed_random import KeyedPermutation
from tools.bench.lib.machine import describe, drop_page_cache, ooc_command

_PIECE = 2**22


def make_edges(folder: Path, nodes: int, edges: int, skew: float, seed: int = 0) -> None:
    """Write edges as Parquet files of `_PIECE` rows with the columns src and dst."""
    folder.mkdir(parents=True)
    order = KeyedPermutation(nodes, seed)[:].astype(np.int32)
    for number, first in enumerate(range(0, edges, _PIECE)):
        rng = np.random.default_rng([seed, number])
        ends = rng.random((2, min(_PIECE, edges - first)))
        src, dst = (order[np.minimum(nodes - 1, (each**skew * nodes).astype(np.int64))] for each in ends)
        pq.write_table(pa.table({"src": src, "dst": dst}), folder / f"{number:04}.parquet")


def make_store(store: Path, nodes: int, edges: int, skew: float) -> None:
    """Ingest such edges, unless the store is there."""
    if store.exists():
        return
    files = store.with_name(store.name + ".files")
    shutil.rmtree(files, ignore_errors=True)
    make_edges(files, nodes, edges, skew)
    flags = ["--edges", f"{files}/*.parquet", "--num-nodes", str(nodes), "--memory", "2GB"]
    subprocess.run([*ooc_command(), "ingest", str(store), *flags], check=True, stdout=sys.stderr)
    shutil.rmtree(files)


def trained(store: Path, out: Path, limit: str, settings: list[str]) -> dict[str, Any]:
    """What summary.json says of a run, which is removed."""
    shutil.rmtree(out, ignore_errors=True)
    drop_page_cache()
    memory = ["--memory", limit] if limit else []
    command = [*ooc_command(limit), "train", str(store), "--out", str(out), "--task", "link", "--mode", "table", *settings]
    subprocess.run([*command, *memory], check=True, stdout=sys.stderr)
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    found["steps_lines"] = [line for line in map(json.loads, (out / "metrics.jsonl").open()) if "steps" in line]
    shutil.rmtree(out)
    return found


def figures(found: dict[str, Any], edges_a_step: float) -> dict[str, Any]:
    """Bytes beside the bounds, and edges a second."""
    table, epochs = found["table"], found["total_steps"] / found["steps_per_epoch"]
    exchanged = found["table_bytes_read"] + found["table_bytes_written"] - found["checkpoint_bytes_written"]
    swap = 2 * table["bucket_bytes"]
    return {
        "buckets": table["buckets"],
        "resident": table["resident"],
        "in_memory": table["in_memory"],
        "bucket_bytes": table["bucket_bytes"],
        "epochs": epochs,
        "bytes_exchanged": exchanged,
        "bytes_of_checkpoints": found["checkpoint_bytes_written"],
        "of_beta_swaps": exchanged / (swap * table["swaps"] * epochs) if table["swaps"] else None,
        "of_least_swaps": exchanged / (swap * table["least_swaps"] * epochs) if table["swaps"] else None,
        "edge_bytes_read": found["edge_bytes_read"],
        "edges_per_s": edges_a_step / found["seconds_per_batch"],
        "waited_s": found["stages"]["buckets"]["wait_s"],
        "train_seconds": found["train_seconds"],
        "peak_rss_bytes": found["peak_rss_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for stores and runs")
    parser.add_argument("--nodes", type=int, default=20_000_000)
    parser.add_argument("--edges", type=int, default=200_000_000)
    parser.add_argument("--fitting", type=int, default=20, help="the table that fits has so many times fewer nodes and edges")
    parser.add_argument("--skew", type=float, default=2.0)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--model", default="complex")
    parser.add_argument("--batch-size", type=int, default=10_000)
    parser.add_argument("--ratio", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--limit", default="3GB", help="of the run from disk, page cache counted")
    parser.add_argument("--rounds", type=int, default=1)
    a = parser.parse_args()
    shared = ["--model", a.model, "--hidden", str(a.width), "--batch-size", str(a.batch_size), "--ratio", str(a.ratio)]
    shared += ["--val", "0", "--test", "0", "--eval-every", "1000", "--eval-splits", "", "--checkpoint-every", str(10**9)]
    small = max(1, a.nodes // a.fitting), max(1, a.edges // a.fitting)
    stores = {"disk": a.folder / "disk.ooc", "memory": a.folder / "memory.ooc"}
    a.folder.mkdir(parents=True, exist_ok=True)
    make_store(stores["disk"], a.nodes, a.edges, a.skew)
    make_store(stores["memory"], *small, a.skew)
    found: dict[str, list[dict[str, Any]]] = {"disk": [], "memory": []}
    for _ in range(a.rounds):
        for name, limit in (("disk", a.limit), ("memory", "")):
            epochs = str(a.epochs if name == "disk" else max(2, a.epochs))
            steps = ["--max-steps", str(a.max_steps)] if a.max_steps else []
            run = trained(stores[name], a.folder / "run", limit, [*shared, "--epochs", epochs, *steps])
            count = a.edges if name == "disk" else small[1]
            found[name].append(figures(run, count / run["steps_per_epoch"]))
            print(json.dumps({name: found[name][-1]}), file=sys.stderr)
    rates = [one["edges_per_s"] / two["edges_per_s"] for one, two in zip(found["disk"], found["memory"], strict=True)]
    print(
        json.dumps({"machine": describe(), **vars(a), "folder": str(a.folder), **found, "of_memory": statistics.median(rates)})
    )


if __name__ == "__main__":
    main()

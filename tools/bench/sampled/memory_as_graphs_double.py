"""Peak memory as the graph doubles: `ooc train` with the same batch and budget on N and on 2N nodes, in one run.

    python -m tools.bench.sampled.memory_as_graphs_double WORK --nodes 2000000 --memory 1.5GB

Prints JSON: peak RSS of both runs (the median of --rounds), their difference, and the growth explained by indptr (8 bytes per
node) and labels.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe
from tools.graphs.make_graph import make_graph


def prepare(folder: Path, nodes: int, a: argparse.Namespace) -> Path:
    """Make and ingest a graph of `nodes` nodes and 10 edges each, where it is not there yet; returns the store."""
    store = folder / "graph.ooc"
    if not store.exists():
        make_graph(folder, nodes=nodes, edges=10 * nodes, features=a.width, train_share=0.5, eval_share=0.001)
        flags = ["--edges", f"{folder}/edges/*.parquet", "--features", f"x={folder}/x.npy", "--labels", f"{folder}/y.npy"]
        splits = [part for name in ("train", "val", "test") for part in (f"--{name}", f"{folder}/{name}.npy")]
        ooc("ingest", store, *flags, *splits, "--memory", a.memory)
    return store


def ooc(*words: object) -> None:
    """Run one `ooc` command quietly; a failure ends the benchmark."""
    subprocess.run([sys.executable, "-m", "ooc.cli", *map(str, words)], check=True, stdout=sys.stderr)


def measure(nodes: int, a: argparse.Namespace) -> dict[str, Any]:
    """Train `--batches` steps, and score two splits, in a process of its own; what its summary says of memory."""
    folder = a.work / str(nodes)
    store, run = prepare(folder, nodes, a), folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    model = ["--model", "sage", "--hidden", 256, "--layers", 2, "--fanout", "10,10", "--batch-size", 1024]
    limits = ["--max-steps", a.batches, "--eval-splits", "val,test", "--memory", a.memory]
    ooc("train", store, "--out", run, *model, *limits)
    summary = json.loads((run / "summary.json").read_text())
    labels = sum(part.stat().st_size for part in (store / "node/node/y").rglob("*") if part.is_file())
    return {
        "nodes": nodes,
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "memory_bytes": summary["memory_budget_bytes"],
        "indptr_and_label_bytes": 8 * (nodes + 1) + labels,
    }


def main() -> None:
    """Parse the command line, measure both sizes, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="1.5GB")
    a = parser.parse_args()
    runs = [[measure(nodes, a) for nodes in (a.nodes, 2 * a.nodes)] for _ in range(a.rounds)]
    small, large = (statistics.median(pair[i]["peak_rss_bytes"] for pair in runs) for i in (0, 1))
    explained = runs[0][1]["indptr_and_label_bytes"] - runs[0][0]["indptr_and_label_bytes"]
    print(json.dumps({"machine": describe(), "growth_bytes": large - small, "explained_bytes": explained, "runs": runs}))


if __name__ == "__main__":
    main()

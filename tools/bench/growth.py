"""Peak memory as the graph doubles: the same batch and budget on N and on 2N nodes, in one run.

    python -m tools.bench.growth WORK --nodes 2000000 --memory 1.5GB

Prints JSON: peak RSS of both runs, how much it grew, and the growth that indptr (8 bytes a node) and labels explain.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench.compare import last_json
from tools.make_graph import make_graph


def measure(folder: Path, nodes: int, a: argparse.Namespace) -> dict[str, Any]:
    """Make and ingest a graph of `nodes` nodes and 10 edges each, then run the steps in a process of its own."""
    store = folder / "graph.ooc"
    if not store.exists():
        make_graph(folder, nodes=nodes, edges=10 * nodes, features=a.width)
        flags = ["--edges", f"{folder}/edges/*.parquet", "--features", f"x={folder}/x.npy", "--labels", f"{folder}/y.npy"]
        subprocess.run([sys.executable, "-m", "ooc.cli", "ingest", str(store), *flags, "--memory", a.memory], check=True)
    steps = [sys.executable, "-m", "tools.bench.steps", str(store), "--memory", a.memory, "--batches", str(a.batches)]
    labels = sum(part.stat().st_size for part in (store / "node/node/y").rglob("*") if part.is_file())
    return last_json(steps) | {"nodes": nodes, "indptr_and_label_bytes": 8 * (nodes + 1) + labels}


def main() -> None:
    """Parse the command line, measure both sizes, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--memory", default="1.5GB")
    a = parser.parse_args()
    small, large = (measure(a.work / str(nodes), nodes, a) for nodes in (a.nodes, 2 * a.nodes))
    growth = large["peak_rss_bytes"] - small["peak_rss_bytes"]
    allowed = large["indptr_and_label_bytes"] - small["indptr_and_label_bytes"]
    print(json.dumps({"small": small, "large": large, "growth_bytes": growth, "explained_bytes": allowed}))


if __name__ == "__main__":
    main()

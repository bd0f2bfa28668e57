"""`ooc` beside PyG's NeighborLoader and DGL GraphBolt: the same graph, fan-out, batch and model, arms interleaved in one run.

    python -m tools.bench.compare WORK --peers DIR --pyg-python PY --graphbolt-python PY --limit 2GB

WORK holds (or receives) the graph and its store. DIR holds `pyg_neighborloader.py` and `graphbolt.py`, which take --x --y
--indptr --indices --features --limit --fanout --batches and print a JSON line; their interpreters need those packages.
Prints JSON: each arm's seconds a batch (median over --rounds), and the ratios. Needs root for the limit and the cold cache.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.machine import describe, drop_page_cache
from tools.make_graph import make_graph


def prepare(work: Path, nodes: int, edges: int, features: int, kind: str) -> Path:
    """Make and ingest the graph where WORK lacks it, and export its CSC for the peers; returns the store."""
    store = work / "graph.ooc"
    if not (work / "x.npy").exists():
        make_graph(work, nodes=nodes, edges=edges, features=features, kind=kind)
    if not store.exists():
        flags = ["--edges", f"{work}/edges/*.parquet", "--features", f"x={work}/x.npy", "--labels", f"{work}/y.npy"]
        subprocess.run([sys.executable, "-m", "ooc.cli", "ingest", str(store), *flags, "--memory", "2GB"], check=True)
    if not (work / "indices.npy").exists():
        import ooc

        with ooc.open(store) as ds:
            np.save(work / "indptr.npy", ds.graph.indptr)
            np.save(work / "indices.npy", ds.graph.indices)
    return store


def last_json(command: list[str]) -> dict[str, Any]:
    """Run a command and parse the last line it prints."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.returncode, "error": done.stderr.strip().splitlines()[-1:]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def arms(a: argparse.Namespace, store: Path) -> dict[str, list[str]]:
    """The command of every arm."""
    arrays = [part for name in ("x", "y", "indptr", "indices") for part in (f"--{name}", str(a.work / f"{name}.npy"))]
    ours = [sys.executable, "-m", "tools.bench.steps", str(store), "--fanout", a.fanout]
    found = {"ooc ram": [*ours, "--features", "ram", "--batches", str(a.batches)]}
    if not a.ram_only:
        found["ooc disk"] = [*ours, "--features", "disk", "--limit", a.limit, "--batches", str(a.batches)]
    peer_limit = a.limit.upper().removesuffix("B")
    for name, python, script in (
        ("pyg", a.pyg_python, "pyg_neighborloader.py"),
        ("graphbolt", a.graphbolt_python, "graphbolt.py"),
    ):
        if python is None:
            continue
        base = [python, str(a.peers / script), *arrays, "--fanout", a.fanout]
        found[f"{name} ram"] = [*base, "--batches", str(a.peer_batches)]
        if name == "pyg":
            found["pyg trim ram"] = [*base, "--trim", "--batches", str(a.peer_batches)]
            if not a.ram_only:
                found["pyg memmap"] = [*base, "--features", "memmap-random", "--limit", peer_limit, "--batches", "3"]
    return found


def main() -> None:
    """Parse the command line, run every arm in turn, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--nodes", type=int, default=8_000_000)
    parser.add_argument("--edges", type=int, default=80_000_000)
    parser.add_argument("--width", type=int, default=128, help="feature columns")
    parser.add_argument("--kind", default="uniform")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--pyg-python")
    parser.add_argument("--graphbolt-python")
    parser.add_argument("--limit", default="2GB")
    parser.add_argument("--fanout", default="10,10")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--peer-batches", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ram-only", action="store_true")
    a = parser.parse_args()
    store = prepare(a.work, a.nodes, a.edges, a.width, a.kind)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(a.rounds):
        for name, command in arms(a, store).items():
            drop_page_cache()
            runs.setdefault(name, []).append(last_json(command))
            print(name, json.dumps(runs[name][-1]), file=sys.stderr)
    seconds = {
        name: statistics.median(r["seconds_per_batch"] for r in results)
        for name, results in runs.items()
        if all("seconds_per_batch" in r for r in results)
    }
    ratios = {
        f"{other} / {mine}": seconds[other] / seconds[mine]
        for mine, others in (("ooc ram", ("pyg ram", "pyg trim ram", "graphbolt ram")), ("ooc disk", ("pyg memmap", "ooc ram")))
        for other in others
        if mine in seconds and other in seconds
    }
    print(json.dumps({"machine": describe(), "seconds_per_batch": seconds, "ratios": ratios, "runs": runs}))


if __name__ == "__main__":
    main()

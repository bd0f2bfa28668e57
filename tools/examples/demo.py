"""The demo: generate a learnable graph, ingest it, train on it out of core, write the report.

    python -m tools.examples.demo DIR

Every step but the first is an `ooc` command, which is printed.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.graphs.make_graph import make_graph

NODES, EDGES, FEATURES, CLASSES = 1_000_000, 10_000_000, 128, 16


def ooc(*words: object) -> None:
    """Run one `ooc` command, shown as a user would type it; end the demo where it fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ ooc {shlex.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "ooc.cli", *arguments], check=False).returncode
    if code:
        sys.exit(code)


def main() -> None:
    """Make, ingest, train, report below DIR."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--edges", type=int, default=EDGES)
    a = parser.parse_args()
    begin = time.perf_counter()
    files, store, run = a.dir / "files", a.dir / "demo.ooc", a.dir / "run"
    for old in (files, store, run):
        shutil.rmtree(old, ignore_errors=True)
    print(f"making {a.nodes:,} nodes x {FEATURES} float32 and {a.edges:,} edges in {files}", flush=True)
    make_graph(
        files,
        nodes=a.nodes,
        edges=a.edges,
        features=FEATURES,
        classes=CLASSES,
        kind="communities",
        train_share=0.1,
        eval_share=0.01,
    )
    arrays = ["--features", f"x={files}/x.npy", "--labels", f"{files}/y.npy"]
    splits = [part for name in ("train", "val", "test") for part in (f"--{name}", f"{files}/{name}.npy")]
    ooc("ingest", store, "--edges", f"{files}/edges/*.parquet", *arrays, *splits, "--memory", "1GB")
    ooc("info", store)
    model = ["--model", "sage", "--hidden", 128, "--layers", 2, "--fanout", "10,10", "--batch-size", 1024]
    ooc("train", store, "--out", run, *model, "--epochs", 2, "--lr", 0.005, "--memory", "1.5GB")
    ooc("report", run)
    print(f"\nthe demo took {time.perf_counter() - begin:.0f} s; open {run / 'report.html'}")


if __name__ == "__main__":
    main()

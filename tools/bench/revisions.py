"""Two revisions of the code compared: sampled training, a layer-wise pass and an exact step, interleaved.

    python -m tools.bench.revisions WORK --old CHECKOUT --rounds 3

WORK has the graphs, which are made if missing. CHECKOUT is a working tree of the other revision. Every case runs in a separate
process, old and new in turn, with a cold page cache; cases from disk under a memory limit that counts page cache (needs root).
A first round compiles the kernels and does not count; --compiled leaves it out. Prints JSON: the seconds of each round, and
the median of the new revision divided by that of the old one.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.lib.machine import describe, drop_page_cache, limit_memory

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("tools.bench.sampled.steps", "tools.bench.steps")
PASS = ("tools.bench.full.layerwise", "tools.bench.sweep")
"""The names of a benchmark in the revisions that can be compared, the newest first."""

Case = Callable[[Path], float]
"""Runs a case in a working tree and returns its seconds."""


def run(tree: Path, modules: tuple[str, ...], words: list[str], limit: str | None = None) -> str:
    """What `python -m MODULE WORDS` prints in a working tree.

    Args:
        tree: The working tree, whose packages are imported.
        modules: Names of the module; the first that the tree has is run.
        words: Its arguments.
        limit: Of the process's memory, page cache counted; None: no limit.
    """
    module = next(name for name in modules if (tree / name.replace(".", "/")).with_suffix(".py").exists())
    drop_page_cache()
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        preexec_fn=None if limit is None else partial(limit_memory, limit),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {module} failed: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    return done.stdout


def steps(store: Path, fanout: str, batches: int, limit: str | None, tree: Path) -> float:
    """Seconds per batch of sampled training, in RAM or, under a limit, from disk."""
    where = ["--features", "ram"] if limit is None else ["--features", "disk", "--memory", limit]
    out = run(tree, STEPS, [str(store), "--fanout", fanout, "--batches", str(batches), *where], limit)
    return float(json.loads(out.splitlines()[-1])["seconds_per_batch"])


def layerwise_pass(store: Path, work: Path, limit: str, tree: Path) -> float:
    """Seconds of a layer-wise pass over all nodes."""
    out = run(tree, PASS, [str(work / "pass"), "--child", "--store", str(store), "--limit", limit])
    return float(json.loads(out.splitlines()[-1])["seconds"])


def exact_step(store: Path, work: Path, limit: str, tree: Path) -> float:
    """Median seconds of the steps of exact training after the first."""
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    words = ["train", str(store), "--out", str(out), "--mode", "full", "--hidden", "256", "--layers", "3", "--epochs", "3"]
    run(tree, ("ooc.cli.__main__", "ooc.cli"), [*words, "--memory", limit, "--eval-every", "3", "--eval-splits", "val"], limit)
    return statistics.median(json.loads((out / "summary.json").read_bytes())["full"]["step_seconds"][1:])


def cases(work: Path, nodes: int, limit: str) -> dict[str, Case]:
    """Name -> case, over a graph of `nodes` nodes and, for exact steps, one a quarter of its size."""
    from tools.bench.lib.stores import make_store

    large, small = work / f"{nodes}.ooc", work / f"{nodes // 4}.ooc"
    for store, count in ((large, nodes), (small, nodes // 4)):
        make_store(store, nodes=count, edges=10 * count, width=128, kind="uniform")
    found: dict[str, Case] = {}
    for fanout, batches in (("10,10", 300), ("15,10,5", 60)):
        found[f"RAM [{fanout}]"] = partial(steps, large, fanout, batches, None)
        found[f"disk [{fanout}]"] = partial(steps, large, fanout, batches, limit)
    found["layer-wise pass"] = partial(layerwise_pass, large, work, limit)
    found["exact step"] = partial(exact_step, small, work, limit)
    return found


def compare(old: Path, all_cases: dict[str, Case], rounds: int, compiled: bool) -> dict[str, Any]:
    """Seconds of every case and round in both trees, and the medians' ratio. compiled: whether the first round is left out."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"old": [], "new": []} for name in all_cases}
    for number in range(compiled, rounds + 1):
        for name, case in all_cases.items():
            order = [("old", old), ("new", ROOT)] if number % 2 else [("new", ROOT), ("old", old)]
            for which, tree in order:
                took = case(tree)
                if number:
                    seconds[name][which].append(took)
                print(f"round {number} {name} {which}: {took:.4g} s", file=sys.stderr, flush=True)
    ratios = {name: statistics.median(each["new"]) / statistics.median(each["old"]) for name, each in seconds.items()}
    return {"seconds": seconds, "new_to_old": ratios, "machine": describe()}


def main() -> None:
    """Parse the command line, compare and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--old", type=Path, required=True, help="a working tree of the other revision")
    parser.add_argument("--nodes", type=int, default=4_000_000)
    parser.add_argument("--limit", default="1500MB", help="of what reads from disk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="cases whose name begins so")
    parser.add_argument("--compiled", action="store_true", help="both revisions have compiled their kernels here before")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    chosen = {name: case for name, case in cases(a.work, a.nodes, a.limit).items() if name.startswith(a.only or "")}
    print(json.dumps(compare(a.old.resolve(), chosen, a.rounds, a.compiled)))


if __name__ == "__main__":
    main()

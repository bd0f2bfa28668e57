"""Predictions compared with measurements: `ooc train` on several configurations, each with the plan made before it starts.

    python -m tools.bench.sampled.predictions STORE WORK --memory 2GB --steps 240 --rounds 3 --plot plan.png

The store needs a training split; `--steps` ends every run. Arms: features on disk under --memory; all in memory; small fan-out;
a wide model of another kind with less memory. Rounds are interleaved. Prints JSON: for every arm and quantity, the ratio of
predicted to actual in every round.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ooc.stores.sizes import format_bytes, parse_bytes
from tools.bench.lib.machine import describe

QUANTITIES = {"seconds_per_epoch": 0.25, "peak_rss_bytes": 0.10, "bytes_read": None, "rows_read": None, "hit_rate": None}
"""and how far from 1 the ratio may be"""


def arms(memory: int) -> dict[str, list[str]]:
    """Flags of every configuration."""
    sage = ["--model", "sage", "--hidden", "256"]
    limit = ["--memory", str(memory)]
    return {
        f"SAGE [10,10], {format_bytes(memory)}": [*sage, "--fanout", "10,10", *limit],
        "SAGE [10,10], in memory": [*sage, "--fanout", "10,10", "--in-memory"],
        f"SAGE [5,5], {format_bytes(memory)}": [*sage, "--fanout", "5,5", *limit],
        f"GCN 512 [10,5], {format_bytes(memory * 3 / 4)}": [
            *("--model", "gcn", "--hidden", "512", "--fanout", "10,5"),
            *("--memory", str(memory * 3 // 4)),
        ],
    }


def measure(flags: list[str], a: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own: {"predicted": ..., "actual": ..., "advice": ...} of its summary."""
    run = a.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    limits = ["--batch-size", str(a.batch_size), "--max-steps", str(a.steps), "--eval-splits", "val", "--lr", "0.001"]
    command = [sys.executable, "-m", "ooc.cli", "train", str(a.store), "--out", str(run), "--plan", *flags, *limits]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())["plan"]
    return found


def ratios(found: dict[str, Any]) -> dict[str, float | None]:
    """Predicted by actual; None where nothing was to be read."""
    return {name: found["predicted"][name] / found["actual"][name] if found["actual"][name] else None for name in QUANTITIES}


def plot(results: dict[str, Any], path: Path) -> None:
    """A dot a round: predicted by actual, with the bounds shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
    for axes, name in zip(panels, ("seconds_per_epoch", "peak_rss_bytes"), strict=True):
        bound = QUANTITIES[name] or 0.0
        axes.axvspan(1 - bound, 1 + bound, color="#e4e7eb")
        axes.axvline(1, color="#1f2933", linewidth=1)
        for row, arm in enumerate(results["arms"]):
            values = [one["ratio"][name] for one in results["arms"][arm]]
            axes.plot(values, [-row] * len(values), "o", color="#2563a8", alpha=0.7)
        axes.set(xlabel=f"{name.replace('_', ' ')}: predicted by actual")
        left, right = axes.get_xlim()
        axes.set_xlim(min(0.5, left), max(1.5, right))  # no dot is left out
    panels[0].set_yticks([-row for row in range(len(results["arms"]))], list(results["arms"]))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Parse the command line, run every arm in turns, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("2GB"))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms(a.memory)}
    for _ in range(a.rounds):
        for name, flags in arms(a.memory).items():
            one = measure(flags, a)
            found[name].append({"ratio": ratios(one), **one})
            print(name, found[name][-1]["ratio"], file=sys.stderr)
    results = {"machine": describe(), "bounds": QUANTITIES, "arms": found}
    if a.plot:
        plot(results, a.plot)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

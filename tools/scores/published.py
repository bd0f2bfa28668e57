"""Published scores, reproduced: train the same model with several seeds or splits and print mean and spread.

    python -m tools.scores.published planetoid DATA/planetoid OUT   # GCN, full fan-out, ten seeds each
    python -m tools.scores.published tolokers DATA/tolokers OUT     # SAGE, ten splits
    python -m tools.scores.published modes DATA OUT --runs 5        # mini-batches: see tools/scores/modes.py
    python -m tools.scores.published full DATA OUT                  # mode full: see tools/scores/full_batch.py
    python -m tools.scores.published events DATA OUT                # event streams: see tools/scores/events.py
    python -m tools.scores.published acm DATA/acm OUT               # heterogeneous: see tools/scores/hetero.py
    python -m tools.scores.published deep DATA OUT                  # 28 reversible layers: see tools/scores/deep.py
    python -m tools.scores.published labor DATA OUT                 # LABOR beside neighbor sampling: see tools/scores/labor.py
    python -m tools.scores.published samplers DATA OUT              # at equal bytes: see tools/scores/samplers.py
    python -m tools.scores.published reduced DATA OUT               # narrower features: see tools/scores/reduced.py

DATA has `{cora,citeseer,pubmed}.npz` or `tolokers.npz` (x, y, edge_index and masks; see `ooc ingest --npz`), for modes, full,
labor, samplers, reduced and deep in `planetoid/` and `tolokers/`, for events `collegemsg/CollegeMsg.txt`. Prints JSON.

Published: GCN accuracy 81.5, 70.3, 79.0 (Kipf & Welling, 2017); tolokers SAGE ROC AUC 82.43 (Platonov et al., 2023).
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tools.scores import deep, events, hetero, labor, reduced, samplers
from tools.scores.full_batch import accuracy, curves
from tools.scores.kept import spread
from tools.scores.modes import modes
from tools.scores.stores import ingest

PUBLISHED = {"cora": 81.5, "citeseer": 70.3, "pubmed": 79.0, "tolokers": 82.43}
GCN = {
    "model": "gcn", "hidden": 16, "layers": 2, "fanout": [-1, -1], "batch_size": 1024, "epochs": 200,
    "lr": 0.01, "weight_decay": 5e-4, "dropout": 0.5, "threads": 1,
}  # fmt: skip
SAGE = {
    "model": "sage", "hidden": 128, "layers": 3, "fanout": [-1, -1, -1], "batch_size": 8192, "epochs": 250,
    "lr": 0.01, "dropout": 0.2, "norm": "layer", "residual": True, "eval_every": 5, "monitor": "auroc",
}  # fmt: skip


def score(store: Path, run: Path, settings: dict[str, Any], metric: str, seed: int) -> float:
    """Train once; the test score, in points, of the best epoch on validation."""
    from ooc.config.nodes import TrainConfig
    from ooc.training.loop import train

    shutil.rmtree(run, ignore_errors=True)
    summary = train(TrainConfig(store=store, out=run, seed=seed, **settings))
    return 100 * float(summary["metrics"]["test"][metric])


def planetoid(data: Path, out: Path, runs: int) -> dict[str, list[float]]:
    """GCN test accuracy per seed, row-normalised features."""
    found = {}
    for name in ("cora", "citeseer", "pubmed"):
        ingest(data / f"{name}.npz", out / f"{name}.ooc", normalize="row")
        found[name] = [score(out / f"{name}.ooc", out / f"{name}-run", GCN, "accuracy", seed) for seed in range(runs)]
        print(name, found[name], file=sys.stderr)
    return found


def tolokers(data: Path, out: Path, runs: int) -> dict[str, list[float]]:
    """SAGE test ROC AUC per split."""
    found: list[float] = []
    for split in range(runs):
        store = out / f"tolokers-{split}.ooc"
        ingest(data / "tolokers.npz", store, undirected=True, split_index=split)
        found.append(score(store, out / "tolokers-run", SAGE, "auroc", split))
        print(split, found[-1], file=sys.stderr)
    return {"tolokers": found}


def main() -> None:
    """Parse the command line, train, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["planetoid", "tolokers", "modes", "full", "events", "acm", "labor", "samplers", "reduced", "deep"]
    parser.add_argument("what", choices=names)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=10, help="seeds or splits")
    parser.add_argument(
        "--only", help="of modes, labor, samplers and reduced: a case (pubmed); of modes pubmed/cluster; of events: a model"
    )
    parser.add_argument("--seed", type=int, help="of the modes, events, acm, labor, samplers and reduced: this one alone")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    seeds = list(range(a.runs)) if a.seed is None else [a.seed]
    if a.what == "modes":
        print(json.dumps(modes(a.data, a.out, seeds, a.only), indent=1))
        return
    if a.what == "deep":
        print(json.dumps(deep.scores(a.data, a.out, seeds), indent=1))
        return
    compared = {"labor": labor.scores, "samplers": samplers.scores, "reduced": reduced.scores}
    if a.what in compared:
        print(json.dumps(compared[a.what](a.data, a.out, seeds, a.only), indent=1))
        return
    if a.what == "full":
        print(json.dumps({"curves": curves(a.data, a.out), "pubmed": spread(accuracy(a.data, a.out, a.runs))}, indent=1))
        return
    if a.what == "events":
        scores = events.events(a.data, a.out, seeds, a.only)
        print(json.dumps({name: {"published": events.PUBLISHED[name], **spread(each)} for name, each in scores.items()}))
        return
    if a.what == "acm":
        found = hetero.scores(a.data, a.out, seeds)
        print(json.dumps({name: spread(each) for name, each in found.items()}))
        return
    found = (planetoid if a.what == "planetoid" else tolokers)(a.data, a.out, a.runs)
    print(json.dumps({name: {"published": PUBLISHED[name], **spread(scores)} for name, scores in found.items()}))


if __name__ == "__main__":
    main()

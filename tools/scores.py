"""Published scores, repeated: train the same model over several seeds or splits and print mean and spread.

    python -m tools.scores planetoid DATA/planetoid OUT        # GCN, full fan-out, ten seeds each
    python -m tools.scores tolokers DATA/tolokers OUT          # SAGE, ten splits
    python -m tools.scores modes DATA OUT --runs 5             # PubMed and tolokers: subgraphs beside the whole graph
    python -m tools.scores modes DATA OUT --only pubmed/saint  # one of them

DATA holds `{cora,citeseer,pubmed}.npz` or `tolokers.npz` (x, y, edge_index and masks; see `ooc ingest --npz`). Prints JSON.
Published: GCN accuracy 81.5, 70.3, 79.0 (Kipf & Welling, 2017); tolokers SAGE ROC AUC 82.43 (Platonov et al., 2023).
"""

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

PUBLISHED = {"cora": 81.5, "citeseer": 70.3, "pubmed": 79.0, "tolokers": 82.43}
GCN = {
    "model": "gcn", "hidden": 16, "layers": 2, "fanout": [-1, -1], "batch_size": 1024, "epochs": 200,
    "lr": 0.01, "weight_decay": 5e-4, "dropout": 0.5, "threads": 1,
}  # fmt: skip
SAGE = {
    "model": "sage", "hidden": 128, "layers": 3, "fanout": [-1, -1, -1], "batch_size": 8192, "epochs": 250,
    "lr": 0.01, "dropout": 0.2, "norm": "layer", "residual": True, "eval_every": 5, "monitor": "auroc",
}  # fmt: skip

PARTS = {"pubmed": 200, "tolokers": 100}
"""Of the stores for the modes; a batch is a tenth of the nodes, so there are ten an epoch and none above an eighth of them"""
FULL: dict[str, dict[str, Any]] = {
    "pubmed": GCN,
    "tolokers": SAGE | {"batch_size": 11_758},
}
SUBGRAPHS: dict[str, dict[str, dict[str, Any]]] = {
    "pubmed": {
        "cluster": {"mode": "cluster", "parts_per_batch": 20, "epochs": 60, "lr": 0.005},
        "saint": {"mode": "saint", "roots": 700, "walk_length": 2, "epochs": 60, "lr": 0.005},
    },
    "tolokers": {
        "cluster": {"mode": "cluster", "parts_per_batch": 10, "epochs": 60},
        "saint": {"mode": "saint", "saint": "node", "roots": 1300, "epochs": 60},
    },
}
"""What differs from FULL: the same model, with as many steps as it needs"""


def ingest(npz: Path, store: Path, **options: Any) -> None:
    """Build a store from an npz file, anew."""
    from stores.ingest import IngestSpec
    from stores.ingest import ingest as build

    shutil.rmtree(store, ignore_errors=True)
    build(IngestSpec(out=store, npz=npz, **options))


def score(store: Path, run: Path, settings: dict[str, Any], metric: str, seed: int) -> float:
    """Train once; the test score, in points, of the best epoch on validation."""
    from ooc.config import TrainConfig
    from ooc.train import train

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


def modes(data: Path, out: Path, runs: int, only: str | None) -> dict[str, list[float]]:
    """Test scores per seed of the same model trained on the whole graph and on subgraphs."""
    found: dict[str, list[float]] = {}
    files = {"pubmed": data / "planetoid/pubmed.npz", "tolokers": data / "tolokers/tolokers.npz"}
    options: dict[str, dict[str, Any]] = {
        "pubmed": {"normalize": "row"},
        "tolokers": {"undirected": True, "split_index": 0},
    }
    for name, full in FULL.items():
        settings = {"full": full} | {mode: _subgraphs(full, more) for mode, more in SUBGRAPHS[name].items()}
        wanted = [mode for mode in settings if only in (None, name, f"{name}/{mode}")]
        store = out / f"{name}-parts.ooc"
        if wanted:
            ingest(files[name], store, parts=PARTS[name], **options[name])
        for mode in wanted:
            metric = settings[mode].get("monitor", "accuracy")
            found[f"{name}/{mode}"] = [score(store, out / f"{name}-run", settings[mode], metric, seed) for seed in range(runs)]
            print(name, mode, found[f"{name}/{mode}"], file=sys.stderr)
    return found


def _subgraphs(full: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The settings of a mode: the fan-out is that of evaluation."""
    rest = {key: value for key, value in full.items() if key != "fanout"}
    return rest | {"plan": False} | more


def main() -> None:
    """Parse the command line, train, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["planetoid", "tolokers", "modes"])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=10, help="seeds or splits")
    parser.add_argument("--only", help="of the modes: pubmed, or pubmed/cluster")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.what == "modes":
        found = modes(a.data, a.out, a.runs, a.only)
    else:
        found = (planetoid if a.what == "planetoid" else tolokers)(a.data, a.out, a.runs)
    table = {
        name: {
            "published": PUBLISHED.get(name),
            "mean": round(statistics.mean(scores), 2),
            "deviation": round(statistics.stdev(scores), 2) if len(scores) > 1 else None,
            "scores": [round(s, 2) for s in scores],
        }
        for name, scores in found.items()
    }
    print(json.dumps(table))


if __name__ == "__main__":
    main()

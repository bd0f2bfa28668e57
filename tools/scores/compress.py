"""Loss curves with compressed activations beside the exact ones: the same runs, seeds and batches, and only `compress` differs.

    python -m tools.scores.compress DATA OUT                       # every case, 50 epochs, five seeds
    python -m tools.scores.compress DATA OUT --only tolokers --seeds 3

GraphSAGE with 60 % of PubMed's labels (`pubmed`), which it learns by heart, and on tolokers; and on PubMed's public split
(`public`) the GCN of `tools.scores.published`, whose dropout and weight decay keep the loss well above zero. A curve is the
mean training loss of each epoch, over the seeds. Printed is by how many percent it is off the exact one: on average over the
epochs, at most, and over the last ten, and the same of exact runs with other seeds, by which a curve moves anyway. Each run's
result is saved in OUT/kept, so that a killed command continues. Prints JSON.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.scores import published
from tools.scores.kept import Settings, kept

EPOCHS, LAST = 50, 10
SAGE: Settings = {
    "model": "sage", "hidden": 128, "layers": 2, "fanout": [10, 10], "dropout": 0.2, "batch_size": 1024, "epochs": EPOCHS,
    "lr": 0.003, "threads": 1, "plan": False, "eval_every": EPOCHS, "eval_splits": ["test"],
}  # fmt: skip
GCN = {**published.GCN, "epochs": EPOCHS, "plan": False, "eval_every": EPOCHS, "eval_splits": ["test"]}
CASES: dict[str, tuple[str, Settings, Settings]] = {
    "pubmed": ("planetoid/pubmed.npz", {"random_split": "0.6,0.2,0.2", "normalize": "row"}, SAGE | {"norm": "layer"}),
    "public": ("planetoid/pubmed.npz", {"normalize": "row"}, GCN),
    "tolokers": (
        "tolokers/tolokers.npz",
        {"undirected": True, "split_index": 0},
        SAGE | {"norm": "layer", "monitor": "auroc"},
    ),
}
"""npz, how it is ingested, and how a model is trained on it"""
KINDS = (None, "int8", "int4", "int2")


def curve(data: Path, out: Path, name: str, compress: str | None, seed: int) -> list[float]:
    """The mean loss of each epoch of a run, new or from OUT/kept."""
    npz, how, settings = CASES[name]
    settings = {**settings, "seed": seed, **({} if compress is None else {"compress": compress})}

    def run() -> Settings:
        from ooc.config.nodes import TrainConfig
        from ooc.stores.ingest import IngestSpec, ingest
        from ooc.training.checkpoint import read_metrics
        from ooc.training.loop import train

        store, folder = out / f"{name}.ooc", out / f"run-{name}"
        if not store.exists():
            ingest(IngestSpec(out=store, npz=data / npz, **how))
        shutil.rmtree(folder, ignore_errors=True)
        summary = train(TrainConfig(store=store, out=folder, **settings))
        steps, _ = read_metrics(folder)
        losses = np.array([line["loss"] for line in steps]).reshape(EPOCHS, -1)
        shutil.rmtree(folder)
        return {"losses": losses.mean(1).tolist(), "test": summary["metrics"]["test"], "seconds": summary["train_seconds"]}

    file = out / "kept" / f"{name}-{compress or 'exact'}-{seed}.json"
    return list(kept(file, {"npz": npz, "ingest": how, "train": settings}, run)["losses"])


def off(found: NDArray[np.float64], exact: NDArray[np.float64]) -> dict[str, float]:
    """By how many percent a curve is off another: on average, at most, and the mean of the last epochs."""
    share = 100 * (found / exact - 1)
    last = 100 * (found[-LAST:].mean() / exact[-LAST:].mean() - 1)
    return {"mean": round(abs(share).mean(), 2), "most": round(abs(share).max(), 2), f"last {LAST}": round(last, 2)}


def _mean(curves: list[list[float]]) -> NDArray[np.float64]:
    """The mean of some curves, by epoch."""
    found: NDArray[np.float64] = np.array(curves).mean(axis=0)
    return found


def differences(data: Path, out: Path, name: str, seeds: int) -> dict[str, dict[str, float]]:
    """Kind -> `off` of the mean curve over the seeds."""
    curves = {kind: _mean([curve(data, out, name, kind, seed) for seed in range(seeds)]) for kind in KINDS}
    others = _mean([curve(data, out, name, None, 100 + seed) for seed in range(seeds)])
    found = {str(kind): off(curves[kind], curves[None]) for kind in KINDS[1:]}
    return {**found, "exact, other seeds": off(others, curves[None])}


def main() -> None:
    """Parse the command line, train, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=[*CASES])
    parser.add_argument("--seeds", type=int, default=5)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    names = [a.only] if a.only else [*CASES]
    print(json.dumps({name: differences(a.data, a.out, name, a.seeds) for name in names}, indent=1))


if __name__ == "__main__":
    main()

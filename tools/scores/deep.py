"""Scores of a reversible model of 28 layers beside a plain one of 3 layers: tolokers, the same parts, steps and hidden width.

    python -m tools.scores.published deep DATA OUT                # both models, ten seeds each
    python -m tools.scores.published deep DATA OUT --seed 3       # one seed; its result is saved for the others

Validation selects the epoch; scores are exact, from all edges. A batch has a quarter of the nodes. Each run's result is saved
in OUT/kept, so a killed command continues, and a complete one prints at once.
"""

from collections.abc import Sequence
from pathlib import Path

from tools.scores.kept import Settings, file_named, kept, spread
from tools.scores.modes import WHOLE, store_of, trained

INGEST: Settings = {"undirected": True, "split_index": 0, "parts": 1600}
COMMON: Settings = {
    "mode": "cluster", "parts_per_batch": 400, "hidden": 64, "norm": "layer", "epochs": 250, "eval_every": 50,
    "monitor": "auroc", "evaluate": "layerwise", "lr_schedule": "cosine", "lr_warm_up": 5, "threads": 1, "plan": False,
}  # fmt: skip
MODELS: dict[str, Settings] = {
    "sage, 3 layers": {"model": "sage", "layers": 3, "residual": True, "lr": 0.01, "dropout": 0.2},
    "revsage, 28 layers": {"model": "revsage", "layers": 28, "groups": 2, "lr": 0.01, "dropout": 0.2},
}
"""Validation of seed 0 selected learning rates and dropout"""


def scores(data: Path, out: Path, seeds: Sequence[int]) -> dict[str, Settings]:
    """Model -> mean, deviation and test ROC AUC of every seed, in points."""
    npz = data / "tolokers" / "tolokers.npz"
    found: dict[str, Settings] = {}
    for name, own in MODELS.items():
        results = []
        for seed in seeds:
            settings = COMMON | own | {"batch_size": WHOLE, "seed": seed}
            run = f"deep-{own['model']}-{seed}"

            def train(run: str = run, settings: Settings = settings) -> Settings:
                return trained(store_of(npz, INGEST, out), out / f"run-{run}", settings, "auroc")

            asked = {"npz": file_named(npz), "ingest": INGEST, "train": settings}
            results.append(kept(out / "kept" / f"{run}.json", asked, train))
        found[name] = spread([result["test"] for result in results])
    return found

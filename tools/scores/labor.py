"""Scores of LABOR beside neighbor sampling: the same model, fan-outs, seeds and number of epochs, and only `sampler` differs.

    python -m tools.scores.published labor DATA OUT                      # every case and sampler, ten seeds each
    python -m tools.scores.published labor DATA OUT --only pubmed        # one case

Fan-outs are far below the degrees, so that sampling matters, and an epoch has 40 batches or more, so that K is felt: with
K = 256 a source keeps its random number for several epochs. Validation selects the epoch; scores are exact, from all edges.
Each run's result is saved in OUT/kept, so a killed command continues, and a complete one prints at once.
"""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.scores.kept import Settings, kept, spread
from tools.scores.stores import graph_of_classes

PERIODS = (1, 16, 64, 256)
"""K: batches for which a source keeps its number"""
SAGE: Settings = {
    "model": "sage", "hidden": 64, "layers": 2, "fanout": [5, 5], "dropout": 0.5, "threads": 1, "plan": False,
    "evaluate": "layerwise", "eval_splits": ["test"],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A data set, and how all samplers train on it."""

    metric: str
    settings: Settings
    npz: str | None = None
    """None: a made graph"""
    ingest: Settings = field(default_factory=dict)


CASES: dict[str, Case] = {
    "pubmed": Case(
        "accuracy",
        {"epochs": 30, "lr": 0.005, "batch_size": 256, "eval_every": 2},
        "planetoid/pubmed.npz",
        {"random_split": "0.6,0.2,0.2", "normalize": "row"},
    ),
    "tolokers": Case(
        "auroc",
        {"epochs": 60, "lr": 0.01, "batch_size": 128, "eval_every": 4, "dropout": 0.2, "norm": "layer"},
        "tolokers/tolokers.npz",
        {"undirected": True, "split_index": 0},
    ),
    "made": Case("accuracy", {"epochs": 30, "lr": 0.002, "batch_size": 256, "eval_every": 3}),
}


def samplers() -> dict[str, Settings]:
    """The samplers compared, by name."""
    labor = {"sampler": "labor", "layer_dependency": True}
    return {"neighbor": {}} | {f"labor, K = {period}": labor | {"batch_dependency": period} for period in PERIODS}


def scores(data: Path, out: Path, seeds: Sequence[int], only: str | None) -> dict[str, Settings]:
    """For "case/sampler" the test scores over the seeds, and by how much their mean is below neighbor sampling's."""
    lines: dict[str, Settings] = {}
    for name, case in CASES.items():
        if only not in (None, name):
            continue
        found: dict[str, list[float]] = {}
        for sampler, how in samplers().items():
            found[sampler] = [_result(name, case, data, out, how, seed) for seed in seeds]
            below = statistics.mean(found["neighbor"]) - statistics.mean(found[sampler])
            lines[f"{name}/{sampler}"] = {**spread(found[sampler]), "below_neighbor": round(below, 2)}
    return lines


def _result(name: str, case: Case, data: Path, out: Path, how: Settings, seed: int) -> float:
    """The test score of a run, in points, new or from OUT/kept."""
    settings = SAGE | case.settings | how | {"monitor": case.metric, "seed": seed}
    asked = {"npz": case.npz, "ingest": case.ingest, "train": settings}
    kind = f"labor-{how['batch_dependency']}" if how else "neighbor"

    def run() -> Settings:
        return _trained(_store(name, case, data, out), out / f"run-{name}", settings, case.metric)

    return float(kept(out / "kept" / f"{name}-{kind}-{seed}.json", asked, run)["test"])


def _trained(store: Path, run: Path, settings: Settings, metric: str) -> Settings:
    from ooc.config.nodes import TrainConfig
    from ooc.training.loop import train

    shutil.rmtree(run, ignore_errors=True)
    summary = train(TrainConfig(store=store, out=run, **settings))
    return {
        "test": 100 * float(summary["metrics"]["test"][metric]),
        "best_epoch": summary["best_epoch"],
        "batches_an_epoch": summary["steps_per_epoch"],
        "seconds": summary["train_seconds"],
    }


def _store(name: str, case: Case, data: Path, out: Path) -> Path:
    """The store, ingested where it is not there."""
    from ooc.stores.ingest import IngestSpec, ingest

    store = out / f"{name}.ooc"
    if not store.exists():
        npz = _made(out / "made.npz") if case.npz is None else data / case.npz
        ingest(IngestSpec(out=store, npz=npz, **case.ingest))
    return store


def _made(npz: Path) -> Path:
    """A graph whose classes show in its edges and its features, but faintly."""
    return graph_of_classes(npz, 20_000, classes=10, told=0.35)

"""Scores of narrower features beside all columns: the same model, seeds and number of epochs, and only the store differs.

    python -m tools.scores.published reduced DATA OUT                      # every case and map, ten seeds each
    python -m tools.scores.published reduced DATA OUT --only split/pca:32  # one of them

PubMed has 500 columns. In the case `split`, GraphSAGE trains on 60 % of the nodes, in `public` a GCN on the 60 nodes of the
public split. Features stay on disk. Bytes read are those of a run's batches, and apart from them those of its scores, edges
included. Validation selects the epoch; scores are exact. Each run's result is saved in OUT/kept, so a killed command continues,
and a complete one prints at once.
"""

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.scores.kept import Settings, kept, spread

MAPS = ("all", "pca:32", "pca:64", "pca:128", "svd:32", "random:32", "variance:32", "mutual:32")
COMMON: Settings = {"threads": 1, "plan": False, "evaluate": "layerwise", "eval_splits": ["test"], "monitor": "accuracy"}
CASES: dict[str, tuple[Settings, Settings]] = {
    "split": (
        {"random_split": "0.6,0.2,0.2"},
        {"model": "sage", "hidden": 64, "layers": 2, "fanout": [5, 5], "dropout": 0.2, "batch_size": 512, "lr": 0.02}
        | {"epochs": 15, "eval_every": 3},
    ),
    "public": (
        {},
        {"model": "gcn", "hidden": 16, "layers": 2, "fanout": [-1, -1], "dropout": 0.5, "batch_size": 1024, "lr": 0.05}
        | {"epochs": 200, "eval_every": 10, "weight_decay": 5e-4},
    ),
}
"""case -> settings of the ingest, of the training"""
BYTES = ("features", "store", "bytes_read", "scores_read")


def scores(data: Path, out: Path, seeds: Sequence[int], only: str | None) -> dict[str, Settings]:
    """For "case/map" the test scores over the seeds, how far their mean is below that of all columns, and bytes."""
    lines: dict[str, Settings] = {}
    for case in CASES:
        means: dict[str, float] = {}
        for how in MAPS:
            if only not in (None, case, f"{case}/{how}"):
                continue
            found = [_result(case, how, data, out, seed) for seed in seeds]
            line = spread([each["test"] for each in found])
            means[how] = statistics.mean(each["test"] for each in found)
            if "all" in means:
                line["below_all"] = round(means["all"] - means[how], 2)
            lines[f"{case}/{how}"] = line | {name: found[0][name] for name in BYTES}
    return lines


def _result(case: str, how: str, data: Path, out: Path, seed: int) -> Settings:
    """A run's test score in points, and bytes of its features, of its store and of what it read; new or from OUT/kept."""
    ingest, train = CASES[case]
    settings = COMMON | train | {"seed": seed}

    def run() -> Settings:
        store = _store(case, how, data, out)
        return _sizes(store) | _trained(store, out / f"run-{case}-{how.replace(':', '-')}", settings)

    name = f"{case}-{how.replace(':', '-')}-{seed}.json"
    return kept(out / "kept" / name, {"ingest": ingest, "map": how, "train": settings}, run)


def _trained(store: Path, run: Path, settings: Settings) -> Settings:
    from ooc.config.nodes import TrainConfig
    from ooc.training.loop import train

    shutil.rmtree(run, ignore_errors=True)
    summary = train(TrainConfig(store=store, out=run, **settings))
    return {
        "test": 100 * float(summary["metrics"]["test"]["accuracy"]),
        "best_epoch": summary["best_epoch"],
        "bytes_read": summary["bytes_read"],
        "scores_read": summary["sweeps"]["read"],
        "seconds": summary["train_seconds"],
    }


def _sizes(store: Path) -> Settings:
    from ooc.stores.info import describe

    fields = describe(store)
    return {"features": fields["arrays"]["node/node/x"]["bytes"], "store": fields["bytes"]}


def _store(case: str, how: str, data: Path, out: Path) -> Path:
    """The store, ingested where it is not there."""
    from ooc.stores.ingest import IngestSpec, ingest
    from ooc.stores.ingest.reductions import METHODS

    store = out / f"{case}-{how.replace(':', '-')}.ooc"
    if not store.exists():
        argument: dict[str, Any] = {}
        if how != "all":
            argument = {"reduce" if how.partition(":")[0] in METHODS["reduce"] else "select": how}
        ingest(IngestSpec(out=store, npz=data / "planetoid" / "pubmed.npz", **CASES[case][0], **argument))
    return store

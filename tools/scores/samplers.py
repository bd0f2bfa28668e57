"""Scores of samplers beside uniform neighbor sampling at equal bytes read: only `sampler` and the nodes it draws differ.

    python -m tools.scores.published samplers DATA OUT                      # every case and sampler, ten seeds each
    python -m tools.scores.published samplers DATA OUT --only pubmed        # one case
    python -m tools.scores.published samplers DATA OUT --only pubmed/ladies # one sampler

The rows that a batch wants are counted, and the nodes a layer of each sampler are chosen so that its batches want as many as
those of neighbor sampling, before anything is trained. Bytes are those of the rows wanted, which are what is read where nothing
stays in memory. Fan-outs are far below the degrees, so that sampling matters. Validation selects the epoch; scores are exact,
from all edges. Each run's result is saved in OUT/kept, so a killed command continues, and a complete one prints at once.
"""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tools.scores.kept import Settings, kept, spread
from tools.scores.stores import graph_of_classes, ingest

COMMON: Settings = {
    "model": "sage", "hidden": 64, "layers": 2, "dropout": 0.5, "threads": 1, "plan": False, "evaluate": "layerwise",
    "eval_splits": ["test"],
}  # fmt: skip
COUNTED = 40
"""batches whose rows are counted to choose the nodes a layer"""
CLOSE = 0.01
"""share by which the rows of a batch may differ from neighbor sampling's"""
SAMPLERS: dict[str, Settings] = {
    "neighbor": {},
    "labor": {"sampler": "labor"},
    "ladies": {"sampler": "ladies"},
    "ladies, unbiased": {"sampler": "ladies", "normalize": False},
    "fastgcn": {"sampler": "fastgcn"},
    "degree": {"sampler": "degree"},
    "gradient": {"sampler": "gradient"},
    "learned": {"sampler": "learned"},
}
OF_RUNS = ("gradient", "learned")
"""samplers that learn in a run, and begin with all nodes equally important: their nodes a layer are chosen by that"""
OWN_ROWS = ("neighbor", "labor")
"""samplers of a fan-out, which is that of the case: LABOR's batches want fewer rows"""


@dataclass(frozen=True)
class Case:
    """A data set, and how all samplers train on it."""

    metric: str
    fanout: tuple[int, int]
    """of neighbor sampling"""
    settings: Settings
    npz: str | None = None
    """None: the made graph"""
    ingest: Settings = field(default_factory=dict)


CASES: dict[str, Case] = {
    "pubmed": Case(
        "accuracy",
        (2, 2),
        {"epochs": 8, "lr": 0.01, "batch_size": 256, "eval_every": 2},
        "planetoid/pubmed.npz",
        {"random_split": "0.6,0.2,0.2", "normalize": "row"},
    ),
    "tolokers": Case(
        "auroc",
        (3, 3),
        {"epochs": 10, "lr": 0.02, "batch_size": 128, "eval_every": 2, "dropout": 0.2, "norm": "layer"},
        "tolokers/tolokers.npz",
        {"undirected": True, "split_index": 0},
    ),
    "heterophilous": Case("accuracy", (3, 3), {"epochs": 8, "lr": 0.01, "batch_size": 256, "eval_every": 2}),
}


def scores(data: Path, out: Path, seeds: Sequence[int], only: str | None) -> dict[str, Settings]:
    """For "case/sampler" the test scores over the seeds, by how much their mean is above neighbor sampling's, and megabytes of
    rows that an epoch's batches want. Seeds come one after the other, so that a killed command has whole ones."""
    chosen = [(case, name) for case in CASES for name in SAMPLERS if only in (None, case, f"{case}/{name}")]
    found: dict[tuple[str, str], list[Settings]] = {each: [] for each in chosen}
    for seed in seeds:
        for case, name in chosen:
            found[case, name].append(_result(case, name, data, out, seed))
    lines: dict[str, Settings] = {}
    for (case, name), results in found.items():
        line = spread([each["test"] for each in results])
        if base := found.get((case, "neighbor")):
            differences = [own["test"] - its["test"] for own, its in zip(results, base, strict=True)]
            line["above_neighbor"] = round(statistics.mean(differences), 2)
            if len(seeds) > 1:
                line["error"] = round(statistics.stdev(differences) / len(seeds) ** 0.5, 2)
        line["nodes"] = results[0]["fanout"]
        line["megabytes_an_epoch"] = round(statistics.mean(each["bytes"] for each in results) / 1e6, 1)
        lines[f"{case}/{name}"] = line
    return lines


def _result(name: str, sampler: str, data: Path, out: Path, seed: int) -> Settings:
    """A run's test score in points, its nodes a layer and the bytes of rows that its epochs want; new or from OUT/kept."""
    case, how = CASES[name], SAMPLERS[sampler]
    settings = COMMON | case.settings | how | {"monitor": case.metric, "seed": seed}
    asked = {"npz": case.npz, "ingest": case.ingest, "fanout": case.fanout, "train": settings}

    def run() -> Settings:
        store = _store(name, case, data, out)
        fanout = list(case.fanout) if sampler in OWN_ROWS else _nodes(store, name, sampler)
        return _trained(store, out / f"run-{name}", settings | {"fanout": fanout}, case.metric)

    return kept(out / "kept" / f"{name}-{sampler.replace(', ', '-')}-{seed}.json", asked, run)


def _trained(store: Path, run: Path, settings: Settings, metric: str) -> Settings:
    from ooc.config.nodes import TrainConfig
    from ooc.training.loop import train

    shutil.rmtree(run, ignore_errors=True)
    summary = train(TrainConfig(store=store, out=run, **settings))
    return {
        "test": 100 * float(summary["metrics"]["test"][metric]),
        "fanout": settings["fanout"],
        "bytes": _row_bytes(store) * summary["rows_asked"] / settings["epochs"],
        "seconds": summary["train_seconds"],
    }


@cache
def _row_bytes(store: Path) -> int:
    import ooc

    with ooc.open(store) as ds:
        return int(ds.stored("x").row_bytes)


@cache
def _rows(store: Path, name: str, sampler: str, fanout: tuple[int, ...]) -> tuple[float, ...]:
    """Mean new nodes of each hop of a batch, the seeds first."""
    import ooc
    from ooc.sampling.layer_wise import LayerWise, NodeImportance

    how, case = dict(SAMPLERS[sampler]), CASES[name]
    kind = how.get("sampler", "neighbor")
    with ooc.open(store) as ds:
        importance = NodeImportance(kind, np.ones(ds.num_nodes, np.float32)) if kind in OF_RUNS else kind
        drawn = kind if sampler in OWN_ROWS else LayerWise(importance, how.get("normalize", True))
        given: dict[str, Any] = {"batch_size": case.settings["batch_size"], "shuffle": True, "seed": 99, "features": False}
        loader = ooc.NeighborLoader(ds, list(fanout), "train", sampler=drawn, **given)
        counts = [batch.num_sampled_nodes for batch, _ in zip(loader, range(COUNTED), strict=False)]
    return tuple(np.mean(counts, axis=0).tolist())


@cache
def _nodes(store: Path, name: str, sampler: str) -> list[int]:
    """Nodes a layer whose batches want as many rows as neighbor sampling's: in the ratio of its hops, by bisection."""
    _, first, second = _rows(store, name, "neighbor", CASES[name].fanout)
    wanted, low, high = sum(_rows(store, name, "neighbor", CASES[name].fanout)), 0.25, 8.0
    for _ in range(12):
        scale = (low * high) ** 0.5
        nodes = round(first * scale), round(second * scale)
        rows = sum(_rows(store, name, sampler, nodes))
        if abs(rows - wanted) < CLOSE * wanted:
            break
        low, high = (low, scale) if rows > wanted else (scale, high)
    return list(nodes)


def _store(name: str, case: Case, data: Path, out: Path) -> Path:
    """The store, ingested where it is not there."""
    store = out / f"{name}.ooc"
    if not store.exists():
        npz = heterophilous(out / "heterophilous.npz") if case.npz is None else data / case.npz
        ingest(npz, store, **case.ingest)
    return store


def heterophilous(npz: Path, num_nodes: int = 10_000, told: float = 0.5) -> Path:
    """A graph whose edges go from class to class, so that neighbors tell the class without being of it."""
    return graph_of_classes(npz, num_nodes, classes=8, told=told, before=1)

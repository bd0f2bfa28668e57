"""Scores of mini-batch training compared with full-batch training of the same model: clusters, random subgraphs, histories.

    python -m tools.scores.published modes DATA OUT --runs 5                   # every case and mode
    python -m tools.scores.published modes DATA OUT --only pubmed/history      # one of them; `--only gcnii`: a case
    python -m tools.scores.published modes DATA OUT --only gcnii --seed 3      # one seed; its result is saved for the others

A batch has at most an eighth of the nodes, and an epoch at least ten batches. Validation selects the epoch, and selected the
settings. Each run's result is saved in OUT/kept, so a killed command continues, and a complete one prints at once.
"""

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.scores.kept import Settings, file_named, kept, spread

WHOLE = 1 << 20
"""nodes a batch of evaluation, and of full-batch training: all of them"""
HISTORY_ONLY = ("history_dtype", "history_lag", "refresh", "drift_tolerance")
"""settings that mean nothing where zeros stand in place of histories"""


@dataclass(frozen=True)
class Case:
    """A data set and a model."""

    npz: str
    ingest: Settings
    """beside parts"""
    metric: str
    full: Settings
    """training on the whole graph in one batch"""
    modes: dict[str, Settings]
    """of each mode what differs; "zero" is made from "history" """
    parts: dict[str, int]
    """of the store that a mode reads, where not those of `ingest` """


def _case(
    npz: str,
    ingest: Settings,
    metric: str,
    common: Settings,
    full: Settings,
    modes: dict[str, Settings],
    parts: dict[str, int] | None = None,
) -> Case:
    common = {"threads": 1, "plan": False, "evaluate": "layerwise", "monitor": metric, "batch_size": WHOLE, **common}
    full = common | {"fanout": [-1] * common["layers"]} | full
    settings = {name: common | {"mode": name} | more for name, more in modes.items()}
    if "history" in settings:
        kept = {name: value for name, value in settings["history"].items() if name not in HISTORY_ONLY}
        settings["zero"] = kept | {"history": "zero"}
    return Case(npz, ingest, metric, full, settings, parts or {})


PUBMED: Settings = {"normalize": "row", "parts": 200}
TOLOKERS: Settings = {"undirected": True, "split_index": 0, "parts": 100}
GCN: Settings = {"model": "gcn", "hidden": 16, "layers": 2, "weight_decay": 5e-4, "dropout": 0.5}
SAGE: Settings = {"model": "sage", "hidden": 128, "layers": 3, "dropout": 0.2, "norm": "layer", "residual": True}
GCNII: Settings = {"model": "gcnii", "hidden": 64, "layers": 16, "dropout": 0.5, "alpha": 0.1, "theta": 0.4}
SMALL: Settings = {"epochs": 100, "lr": 0.005, "eval_every": 2}

CASES: dict[str, Case] = {
    "pubmed": _case(
        "planetoid/pubmed.npz",
        PUBMED,
        "accuracy",
        GCN,
        {"epochs": 200, "lr": 0.01},
        {
            "cluster": {"parts_per_batch": 20, "epochs": 60, "lr": 0.005},
            "saint": {"roots": 700, "walk_length": 2, "epochs": 150, "lr": 0.005},
            "history": {"parts_per_batch": 20, "epochs": 60, "lr": 0.005},
        },
    ),
    "tolokers": _case(
        "tolokers/tolokers.npz",
        TOLOKERS,
        "auroc",
        SAGE | {"eval_every": 5, "lr": 0.01},
        {"epochs": 250},
        {
            "cluster": {"parts_per_batch": 160, **SMALL},
            "saint": {"saint": "edge", "roots": 650, **SMALL},
            "history": {"parts_per_batch": 10, **SMALL},
        },
        {"cluster": 1600},
    ),
    "gcnii": _case(
        "planetoid/pubmed.npz",
        PUBMED | {"parts": 10},
        "accuracy",
        GCNII | {"eval_every": 2, "lr": 0.01},
        {"epochs": 200, "weight_decay": 5e-4},
        {"history": {"parts_per_batch": 1, "epochs": 130, "accumulate": 10, "weight_decay": 1.5e-4}},
    ),
}
"""Published models (Kipf & Welling, 2017; Platonov et al., 2023; Chen et al., 2020); a mode takes as many steps as it needs"""


def modes(data: Path, out: Path, seeds: Sequence[int], only: str | None) -> dict[str, Settings]:
    """For "case/mode" the scores of every seed and what they stand beside (see `table`); `only`: a case, or one such name."""
    found: dict[str, dict[int, Settings]] = {}
    for name, case in CASES.items():
        for mode, settings in {"full": case.full, **case.modes}.items():
            if not _wanted(name, mode, only):
                continue
            results = found[f"{name}/{mode}"] = {}
            for seed in seeds:
                results[seed] = result_of(case, mode, data, out, f"{name}-{mode}-{seed}", settings | {"seed": seed})
    return table(found)


def _wanted(name: str, mode: str, only: str | None) -> bool:
    """A mode's scores stand beside those of the whole graph, and those with histories beside those without."""
    if only is None or only == name:
        return True
    case, _, one = only.partition("/")
    return case == name and (mode in (one, "full") or (one, mode) == ("history", "zero"))


def result_of(case: Case, mode: str, data: Path, out: Path, name: str, settings: Settings) -> Settings:
    """The result of a run, new or from OUT/kept."""
    npz = data / case.npz
    ingested = case.ingest | {"parts": case.parts.get(mode, case.ingest["parts"])}
    asked = {"npz": file_named(npz), "ingest": ingested, "train": settings}

    def run() -> Settings:
        return trained(store_of(npz, ingested, out), out / f"run-{name}", settings, case.metric)

    return kept(out / "kept" / f"{name}.json", asked, run)


def store_of(npz: Path, ingested: Settings, out: Path) -> Path:
    """The store, ingested where it is not there."""
    from ooc.stores.ingest import IngestSpec, ingest

    store = out / f"{npz.stem}-{ingested['parts']}.ooc"
    if not store.exists():
        ingest(IngestSpec(out=store, npz=npz, **ingested))
    return store


def trained(store: Path, run: Path, settings: Settings, metric: str) -> Settings:
    """Train once: scores in points, at the best epoch on validation, and what batches and histories were like."""
    from ooc.config.nodes import TrainConfig
    from ooc.training.loop import train

    shutil.rmtree(run, ignore_errors=True)
    config = TrainConfig(store=store, out=run, **settings)
    summary = train(config)
    scores, histories, (nodes, most) = summary["metrics"], summary["histories"] or {}, batch_bounds(config)
    met = summary["history_met"] / summary["steps"] / nodes
    return {
        "test": 100 * scores["test"][metric],
        "val": 100 * scores["val"][metric],
        "best_epoch": summary["best_epoch"],
        "batches_an_epoch": summary["steps_per_epoch"],
        "largest_batch": most / nodes,
        "with_halo": met or None,
        "share_pulled": histories.get("share_pulled"),
        "share_unwritten": histories.get("share_unwritten"),
        "age_steps": histories.get("age_steps"),
        "seconds": summary["train_seconds"] + summary["refresh_seconds"],
    }


def batch_bounds(config: Any) -> tuple[int, int]:
    """(nodes of the graph, nodes of a batch at most): the largest parts together, all draws distinct, or the whole graph."""
    from ooc.sampling.cluster import parts_of
    from ooc.sampling.saint import Draw
    from ooc.stores.dataset import Dataset

    with Dataset.open(config.store) as dataset:
        if config.mode == "sampled":
            return dataset.num_nodes, dataset.num_nodes
        if config.mode == "saint":
            length = config.walk_length if config.saint == "walk" else 1
            return dataset.num_nodes, Draw(config.saint, config.roots, length).most_nodes
        sizes = np.sort(np.diff(parts_of(dataset.graph, config.parts)))
        return dataset.num_nodes, int(sizes[-config.parts_per_batch :].sum())


def table(found: dict[str, dict[int, Settings]]) -> dict[str, Settings]:
    """Mean and deviation of each, beside full-batch training, and where histories are used beside zeros in their place."""
    means = {name: statistics.mean(_tests(results)) for name, results in found.items()}
    lines: dict[str, Settings] = {}
    for name, results in found.items():
        case, _, mode = name.partition("/")
        first, full, zero = next(iter(results.values())), means.get(f"{case}/full"), means.get(f"{case}/zero")
        line: Settings = {
            **spread(_tests(results)),
            "validation": round(statistics.mean(r["val"] for r in results.values()), 2),
        }
        line |= {"batches_an_epoch": first["batches_an_epoch"], "largest_batch": round(first["largest_batch"], 4)}
        if mode != "full" and full is not None:
            line |= {"full_batch": round(full, 2), "below_full_batch": round(full - means[name], 2)}
        if mode == "history":
            line |= {key: _mean(results, key) for key in ("share_pulled", "share_unwritten", "age_steps", "with_halo")}
            line["histories_zeroed"] = None if zero is None else round(zero, 2)
        lines[name] = line | {"seconds": _mean(results, "seconds")}
    return lines


def _tests(results: dict[int, Settings]) -> list[float]:
    return [result["test"] for result in results.values()]


def _mean(results: dict[int, Settings], key: str) -> float | None:
    """Over the seeds; None where it has no meaning."""
    values = [result[key] for result in results.values() if result[key] is not None]
    return round(statistics.mean(values), 4) if values else None

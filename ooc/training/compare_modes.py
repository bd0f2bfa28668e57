"""The modes of a run tried one after the other on its store, shortly, for `ooc.planning.choose`; then the one chosen is
planned.

Each is composed as training would compose it and profiled as `ooc plan --mode` does, but for its scores, which all share.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ooc.config.base import parse
from ooc.config.nodes import OWN, TrainConfig
from ooc.layerwise.shape import parts_of as layers_of
from ooc.planning.choose import MODES, Candidate, Mode, ModeChoice, choose
from ooc.planning.plan import Plan
from ooc.planning.trials import apart, batches_of
from ooc.training.node_loop import planning, trial_step
from ooc.training.node_run import Job
from ooc.training.open_run import open_dataset
from ooc.training.plan import PLAN_SECONDS, plan_of
from stores.dataset import Dataset
from stores.errors import BudgetError, ConfigError, OocError

COMPARE_SECONDS = 0.5
"""What each part of a mode's profile may take"""
BATCHES = 16
"""an epoch's, of parts, where memory allows as large ones"""
MOST_PARTS = 2**14
CLOSE = 1.1
"""A prediction may be off by so much: batches keep to the memory, or are refused"""
LOOKED_AT = 3
"""batches that tell what a mode loses"""


def compare(config: TrainConfig) -> tuple[ModeChoice, Plan]:
    """(every mode tried, and the one to choose; the plan of that one).

    config: without a mode; what it sets for sampling alone is left out elsewhere. Nothing is written.
    Raises BudgetError where no mode fits the memory, ConfigError and StoreError where the store cannot be trained on at all.

    >>> compare(TrainConfig(store="papers.ooc", out="run", layers=8, memory="2GB"))[0].recommended
    'history'
    """
    # One data set for all modes: so they have the same memory, whatever the ones before have loaded.
    with tempfile.TemporaryDirectory(prefix="ooc-plan-") as folder, open_dataset(config) as dataset:
        found = [_candidate(config, mode, dataset, Path(folder)) for mode in MODES]
        chosen = choose(found, config.layers)
        if chosen.best.fix is not None:
            raise BudgetError(chosen.best.fix)
        settings = of_mode(config, chosen.recommended, chosen.best.settings)
        with planning(settings, Path(folder) / "best", dataset) as job:
            return chosen, plan_of(job, trial_step, PLAN_SECONDS, variants=True)


def of_mode(config: TrainConfig, mode: Mode, more: dict[str, Any]) -> TrainConfig:
    """`config` in a mode, with `more` settings, without those that mean nothing there."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    if mode != "sampled":
        given = {name: value for name, value in given.items() if name not in (*OWN["sampled"], "fanout", "eval_fanout")}
    if more.get("evaluate") == "layerwise":
        given.pop("eval_batch_size", None)
    return parse(TrainConfig, {**given, "layers": config.layers, "mode": mode, **more})


def _candidate(config: TrainConfig, mode: Mode, dataset: Dataset, folder: Path) -> Candidate:
    """A mode tried, with the largest batches of parts that fit."""
    refused = Candidate(mode, {}, fix=f"{dataset.num_nodes} nodes do not make {BATCHES} parts")
    ways: Iterable[dict[str, Any]] = _of_parts(dataset) if mode in ("cluster", "history") else [{}]
    for number, more in enumerate(ways):
        try:
            return _tried(config, mode, dataset, folder / f"{mode}{number}", more)
        except BudgetError as error:
            refused = Candidate(mode, more, fix=str(error))
        except ConfigError as error:
            if mode == "sampled":
                raise
            return Candidate(mode, more, fix=str(error))
    return refused


def _of_parts(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Settings for batches of parts, smaller and smaller: fewer parts a batch of those the store has, or more ranges."""
    graph = dataset.graph
    if graph.parts is not None:
        many = max(1, (len(graph.parts) - 1) // BATCHES)
        while many:
            yield {"parts_per_batch": many}
            many //= 2
        return
    parts = BATCHES
    while parts <= min(MOST_PARTS, graph.num_nodes):
        yield {"parts": parts}
        parts *= 2


def _tried(config: TrainConfig, mode: Mode, dataset: Dataset, folder: Path, more: dict[str, Any]) -> Candidate:
    with planning(of_mode(config, mode, more), folder, dataset) as job:
        if mode != "sampled" and "evaluate" not in config.model_fields_set and _sweeps(job):
            more = {**more, "evaluate": "layerwise"}
        lost = _lost(job)
        job = replace(job, config=of_mode(config, mode, more), evaluators={})
        plan = plan_of(job, trial_step, COMPARE_SECONDS, variants=False)
        found, share = plan.prediction, job.steps_per_epoch / max(1, plan.steps)
        budget = job.loader.budget
        fits = found.peak_rss_bytes <= CLOSE * budget.memory
        fix = None if fits else f"the memory is too little, --memory {_rounded(found.peak_rss_bytes)} would do"
        return Candidate(
            mode,
            more,
            fix=fix,
            seconds=found.seconds_per_epoch,
            peak_bytes=found.peak_rss_bytes,
            features_read=round((found.bytes_read - found.edge_bytes_read) * share),
            edges_read=round(found.edge_bytes_read * share),
            histories_read=round(found.history_bytes_read * share),
            histories_written=round(found.history_bytes_written * share),
            lost=lost,
            weighed=mode != "saint" or not (config.model == "gat" or ":" in config.model),
        )


def _rounded(nbytes: int) -> str:
    return f"{-(-nbytes // 10**8) / 10:g}GB"


def _sweeps(job: Job) -> bool:
    """Whether a sweep can score the model."""
    try:
        layers_of(job.model)
    except OocError:
        return False
    return True


def _lost(job: Job) -> float:
    """What the first batches of parts lose: edges dropped, or rows from histories."""
    if job.config.mode not in ("cluster", "history"):
        return 0.0
    kept = all_of_them = 0
    for drawn in islice(batches_of(apart(job.loader.work), 0, job.steps_per_epoch), LOOKED_AT):
        subgraph = drawn.subgraph
        own = subgraph.node[: subgraph.num_nodes[0]]
        if job.config.mode == "history":
            kept, all_of_them = kept + len(own), all_of_them + len(subgraph.node)
        else:
            indptr = np.asarray(job.dataset.graph.indptr)
            kept, all_of_them = kept + len(subgraph.source), all_of_them + int((indptr[own + 1] - indptr[own]).sum())
    return 1 - kept / max(1, all_of_them)

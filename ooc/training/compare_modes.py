"""Tries each mode of a run on its store for a moment, for `ooc.planning.choose_mode`, and plans the one chosen.

Each is composed as training would compose it and profiled as `ooc plan --mode` does, but for its scores, which all share.
"""

from itertools import islice
from pathlib import Path
from typing import Any

from ooc.config.nodes import PARTS_AN_EPOCH, TrainConfig, in_mode
from ooc.layerwise.shape import has_layers
from ooc.planning.choose_mode import Candidate, ModeChoice, choose
from ooc.planning.measure import batches_of
from ooc.planning.run_plan import CLOSE, Plan
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.working import scratch_folder
from ooc.training.batch_mode import BatchMode
from ooc.training.loop import PLAN_SECONDS, planning
from ooc.training.open_run import check_types, open_dataset
from ooc.training.registry import MODES

TRIED = {
    mode: made
    for (task, mode), made in MODES.items()
    if task == TrainConfig.model_fields["task"].default and issubclass(made, BatchMode)
}
"""The modes that are compared"""
COMPARE_SECONDS = 0.5
"""What each part of a mode's profile may take"""
LOOKED_AT = 3
"""batches that show what a mode loses"""


def compare(config: TrainConfig) -> tuple[ModeChoice, Plan]:
    """(every mode tried, and the one to choose; the plan of that one).

    config: without a mode; its settings rule out the modes that do not have them. Nothing is written.
    Raises BudgetError where no mode fits the memory, ConfigError and StoreError where the store cannot be trained on at all.
    """
    # One data set for all modes: so they have the same memory, whatever the ones before have loaded.
    with scratch_folder(None, "ooc-plan") as folder, open_dataset(config) as dataset:
        ranked = sorted(TRIED, key=lambda name: TRIED[name].traits.rank)
        found = [_candidate(config, name, dataset, folder) for name in ranked]
        chosen = choose(found, config.layers)
        if chosen.best.fix is not None:
            raise BudgetError(chosen.best.fix)
        settings = in_mode(config, chosen.recommended, chosen.best.settings)
        with planning(settings, folder / "best", dataset) as mode:
            return chosen, mode.predict(PLAN_SECONDS, variants=True)


def _candidate(config: TrainConfig, name: str, dataset: Dataset, folder: Path) -> Candidate:
    """A mode tried, with the largest batches of parts that fit."""
    made = TRIED[name]
    try:
        check_types(config.model_copy(update={"mode": name}), dataset)
    except ConfigError as error:
        return Candidate(name, made.traits, {}, fix=str(error))
    refused = Candidate(name, made.traits, {}, fix=f"{dataset.num_nodes} nodes do not make {PARTS_AN_EPOCH} parts")
    for number, more in enumerate(made.choices(dataset)):
        try:
            return _tried(config, name, dataset, folder / f"{name}{number}", more)
        except BudgetError as error:
            refused = Candidate(name, made.traits, more, fix=str(error))
        except ConfigError as error:
            if made.traits.rank == 0:
                raise
            return Candidate(name, made.traits, more, fix=str(error))
    return refused


def _tried(config: TrainConfig, name: str, dataset: Dataset, folder: Path, more: dict[str, Any]) -> Candidate:
    with planning(in_mode(config, name, more), folder, dataset) as mode:
        if mode.prefers_exact and "evaluate" not in config.model_fields_set and has_layers(mode.model):
            more = {**more, "evaluate": "layerwise"}
        lost = _lost(mode)
        mode.config, mode.evaluators = in_mode(config, name, more).model_copy(update={"out": mode.config.out}), {}
        plan: Plan = mode.predict(COMPARE_SECONDS, variants=False)
        found, share = plan.prediction, mode.steps_per_epoch / max(1, plan.steps)
        fits = found.peak_rss_bytes <= CLOSE * mode.batch_budget.memory
        enough = f"{-(-found.peak_rss_bytes // 10**8) / 10:g}GB"
        fix = None if fits else f"the memory is too little, {enough} would do"
        return Candidate(
            name,
            mode.traits,
            more,
            fix=fix,
            seconds=found.seconds_per_epoch,
            peak_bytes=found.peak_rss_bytes,
            features_read=round((found.bytes_read - found.edge_bytes_read) * share),
            edges_read=round(found.edge_bytes_read * share),
            histories_read=round(found.history_bytes_read * share),
            histories_written=round(found.history_bytes_written * share),
            lost=lost,
            weighed=mode.weighed,
        )


def _lost(mode: BatchMode) -> float:
    """What the first batches lose: the share of edges dropped, or of rows that come from histories."""
    if not mode.loses:
        return 0.0
    first = islice(batches_of(mode.loader.strategy.apart(), 0, mode.steps_per_epoch), LOOKED_AT)
    met = [mode.met(drawn.subgraph) for drawn in first]
    return 1 - sum(kept for kept, _ in met) / max(1, sum(whole for _, whole in met))

"""`ooc.train` and `ooc.plan`: what the verbs of the command line do, with a configuration or keyword arguments."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ooc.config.base import RunConfig
from ooc.config.modes import settings_of
from ooc.config.nodes import TrainConfig
from ooc.loading.arguments import check_store
from ooc.planning.run_plan import Plan
from ooc.planning.table_plan import TablePlan
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.sizes import format_bytes, parse_bytes
from ooc.training import loop
from ooc.training.callbacks import Callback
from ooc.training.compare_modes import compare
from ooc.training.full_mode import FullPlan
from ooc.training.technique_that_fits import Note, silent, technique_that_fits
from ooc.training.watchers import terminal_watcher

BANDWIDTH = "1GB"
"""bytes a second between processes where none are given: ten gigabits"""


def train(
    config: RunConfig | Path | str | None = None,
    *,
    resume: bool = False,
    grown: bool = False,
    callbacks: Sequence[Callback] = (),
    allow_code: bool = False,
    progress: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train a model on a store and write the run's files.

    Args:
        config: A `TrainConfig`, `LinkConfig`, `FullConfig`, `EventsConfig` or `SnapshotsConfig`, or a TOML or JSON file.
        resume: Continue the run in `out` from its last checkpoint, inside its epoch, to the bit.
        grown: With `resume`, continue although the store has grown since.
        callbacks: Follow the run, besides the loggers of `log`; see `Callback`.
        allow_code: With `resume` and without `config` and `model`: import the model class that the run names, because you
            trust the run.
        progress: Show the progress as the command line does: bars on a terminal, lines elsewhere.
        settings: Settings by name, such as `store`, `out`, `mode`, `model`, `fanout`, `epochs`, `memory`; they override
            `config`. The flags of `ooc train` have the same names. Without `out`, the run is runs/STORE-1, -2, ... `store` is a
            path, or a data set, which is opened again; without `config` with the settings of its `ooc.open`.

    Returns:
        The summary, as in OUT/summary.json: `metrics` (split -> scores), `config`, times, bytes and memory.

    Raises:
        ConfigError: If settings, store or checkpoint do not fit.
        BudgetError: If the memory is too small.
        KeyboardInterrupt: After Ctrl-C; a checkpoint is kept.

    >>> ooc.train(store="cora.ooc", model="gcn", fanout=[-1, -1])["metrics"]["test"]["accuracy"]
    0.815
    >>> ooc.train(out="runs/cora-1", resume=True, epochs=200)
    """
    wrong = [each for each in callbacks if not isinstance(each, Callback)] if isinstance(callbacks, Sequence) else [callbacks]
    if wrong:
        raise ConfigError(f"callbacks must be a list of objects of ooc.Callback, not of {type(wrong[0]).__name__}")
    found = settings_of(config, _with_path(settings, config is None), resume, allow_code)
    watcher = terminal_watcher() if progress else None
    return loop.train(found, resume=resume, watcher=watcher, grown=grown, callbacks=callbacks)


def plan(
    config: RunConfig | Path | str | None = None, *, nproc: int = 1, bandwidth: int | str = BANDWIDTH, **settings: Any
) -> Plan | FullPlan | TablePlan:
    """Predict memory, time, bytes and bottleneck of `train` with the same settings; nothing is left on disk.

    Args:
        config: As of `train`.
        nproc: Processes that would train together; of more than one, `ranks` of the plan says what they send.
        bandwidth: Bytes a second that one of them sends, such as "1GB".
        settings: As of `train`. Without a `mode`, all modes on batches of nodes are tried briefly, and the best is planned.

    Returns:
        A `Plan`: `prediction`, `budget`, `advice`, and `choice` with the modes compared, if none was given. Of mode full, a
        `FullPlan`; of modes table and lightgcn, a `TablePlan`, which predicts memory and bytes.

    Raises:
        ConfigError: If the mode has no plan, or settings and store do not fit.
        BudgetError: If the memory is too small.

    >>> ooc.plan(store="papers.ooc", mode="sampled", memory="2GB").prediction.seconds_per_epoch
    """
    return plan_of(settings_of(config, _with_path(settings, config is None)), nproc, bandwidth)


def _with_path(settings: dict[str, Any], alone: bool) -> dict[str, Any]:
    """Settings whose store may be a data set: then its path and, if there is no configuration (`alone`), how it was opened."""
    store = settings.get("store")
    if store is not None:
        check_store(store, "store")
    if not isinstance(store, Dataset):
        return settings
    return {**(store.settings if alone else {}), **settings, "store": store.path}


def plan_of(
    config: RunConfig, nproc: int = 1, bandwidth: int | str = BANDWIDTH, note: Note = silent
) -> Plan | FullPlan | TablePlan:
    """The plan of a configuration, of the best mode if it leaves the mode open. nproc, bandwidth: as of `plan`; note: called
    with a line for every technique that is tried as the plan does not fit."""
    if nproc < 1:
        raise ConfigError(f"nproc = {nproc} is invalid: give a number of processes")
    for name, alone in (("halo", "exact"), ("halo_recompute", "none")):
        if nproc == 1 and getattr(config, name, alone) != alone:
            raise ConfigError(f"{name} applies to several processes: give `nproc`, or leave it out")
    if nproc > 1 and config.leaves_mode_open:
        raise ConfigError("nproc is of one mode: give `mode` too")
    if config.leaves_mode_open:
        choice, made = compare(cast(TrainConfig, config))
        return replace(made, choice=choice)
    try:
        found = cast("Plan | FullPlan | TablePlan", loop.plan(config, nproc, parse_bytes(bandwidth, "bandwidth")))
    except BudgetError as error:
        raise BudgetError(f"{error}{technique_that_fits(config, note)}") from error
    if not found.needs_more:
        return found
    enough = format_bytes(found.needs_more)
    advice = f"The predicted peak is above the memory: give {enough}, or a smaller batch{technique_that_fits(config, note)}."
    return replace(cast(Plan, found), advice=f"{advice} {cast(Plan, found).advice}")

"""What a run does for its histories between two epochs: measure the drift, refresh where it is due."""

import time
from contextlib import closing
from typing import Any

from ooc.history.drift import Drift, LayerDrift
from ooc.history.history import History
from ooc.history.refresh import Refresh, Refresher, refresh
from ooc.layerwise.sweep import LayerwisePass
from ooc.runtime.keyed_random import Purpose, key
from ooc.training.node_run import Job
from stores.errors import BudgetError
from stores.io.atomic import remove_tree

SWEEP = "refresh"
"""folder of a refresh's sweep while it is under way"""


def end_of_epoch(job: Job, scored: bool = False) -> dict[str, Any] | None:
    """Look after the histories behind an epoch's last step, or go on with a refresh that was interrupted there.

    scored: the model is scored next, so that one sweep serves both where scores are by sweeps. Returns what the epoch's line in
    metrics.jsonl says of it: "drift", a relative error for each inner layer, with "drift_error" and "drift_noise", of which it
    is the difference, and "drift_chance" (see `LayerDrift`); "refreshed", true where they were refreshed afterwards.
    """
    if job.halo is None or job.halo.history is None:
        return None
    history, config, began = job.halo.history, job.config, time.perf_counter()
    history.end_epoch()
    if job.refresh is None:
        found = _drift(job, history)
        due = config.refresh not in (None, "auto") and (job.state.epoch + 1) % int(config.refresh or 1) == 0
        if config.refresh == "auto":
            due = found is not None and found.passes(config.drift_tolerance)
        line = {} if found is None else found.asdict()
        if not due:
            job.book("refresh_seconds", began)
            return line
        job.refresh = Refresh(line=line)
    if not job.refresh.done:
        _refresh(job, history, scored)
    remove_tree(config.out / SWEEP)  # after the checkpoint that says so
    job.book("refresh_seconds", began)
    return {**job.refresh.line, "refreshed": True}


def _drift(job: Job, history: History) -> LayerDrift | None:
    """How far the histories have drifted; None where not even one node's neighbors fit the memory and nothing depends on it."""
    assert job.halo is not None
    drift = Drift(job.model, job.dataset, history, job.device, job.config.precision)
    sample = key(job.config.seed, Purpose.DRIFT, job.state.epoch)
    try:
        return drift.measure(sample, job.loader.budget.max_batch)
    except BudgetError as error:
        if job.config.refresh == "auto":
            raise
        if not job.halo.told:
            job.watchers.note(f"the histories' drift is not measured: {error}")
        job.halo.told = True
        return None


def _refresh(job: Job, history: History, scored: bool) -> None:
    assert job.refresh is not None

    def commit() -> None:
        job.checkpoint()
        job.checkpoint_if_due()  # after Ctrl-C

    refresher = Refresher(history, job.refresh, commit)
    if scored and job.exact is not None and job.config.val_split in job.exact.splits:
        refresh(job.exact, refresher)
        return
    engine = "auto" if job.config.engine == "gds" else job.config.engine
    layers, folder = len(history.rows), job.config.out / SWEEP
    with closing(LayerwisePass(job.model, job.dataset, folder, budget=job.budget, upto=layers, engine=engine)) as sweep:
        try:
            refresh(sweep, refresher)
        finally:
            history.counts.bytes_read += sweep.spent.read
            history.counts.bytes_written += sweep.spent.written

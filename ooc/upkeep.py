"""What a run does for its histories between two epochs: measure the drift, refresh where it is due."""

import time
from typing import Any

from ooc.history import History
from ooc.order import Purpose, key
from ooc.refresh import Drift, Refresh, Refresher, passes, refresh
from ooc.run import Job
from stores.errors import BudgetError

SWEEP = "refresh"
"""folder of a refresh's sweep while it is under way"""


def end_of_epoch(job: Job) -> dict[str, Any] | None:
    """Look after the histories behind an epoch's last step, or go on with a refresh that was interrupted there.

    Returns what the epoch's line in metrics.jsonl says of it: "drift", a relative error for each inner layer; "refreshed", true
    where they were refreshed afterwards.
    """
    if job.halo is None or job.halo.history is None:
        return None
    history, config, began = job.halo.history, job.config, time.perf_counter()
    history.end_epoch()
    if job.refresh is None:
        found = _drift(job, history)
        due = config.refresh not in (None, "auto") and (job.state.epoch + 1) % int(config.refresh or 1) == 0
        if config.refresh == "auto":
            due = passes(found or [], config.drift_tolerance)
        job.refresh = Refresh(drift=found) if due else None
    else:
        found = job.refresh.drift
    line: dict[str, Any] = {} if found is None else {"drift": found}
    if job.refresh is not None:
        _refresh(job, history)
        line["refreshed"] = True
    job.book("refresh_seconds", began)
    return line


def _drift(job: Job, history: History) -> list[float] | None:
    """How far the histories have drifted; None where the sample does not fit the memory and nothing depends on it."""
    drift = Drift(job.model, job.dataset, history, job.device, job.config.precision)
    sample = key(job.config.seed, Purpose.DRIFT, job.state.epoch)
    try:
        return drift.measure(sample, job.loader.budget.max_batch)
    except BudgetError:
        if job.config.refresh == "auto":
            raise
        return None


def _refresh(job: Job, history: History) -> None:
    assert job.refresh is not None

    def commit() -> None:
        job.checkpoint()
        job.checkpoint_if_due()  # after Ctrl-C

    refresher = Refresher(history, job.refresh, commit)
    engine = "auto" if job.config.engine == "gds" else job.config.engine
    refresh(job.model, job.dataset, job.config.out / SWEEP, refresher, engine)
    job.refresh = None

"""The plan of a composed run: its profile is taken on a model of its own, then `ooc.planning.plan` predicts."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.config.nodes import TrainConfig
from ooc.history.drift import drift_row_bytes, drift_sample
from ooc.history.halo import AHEAD, Halo, HaloLoader
from ooc.layerwise.plan import ram_bytes
from ooc.layerwise.shape import besides_bytes
from ooc.layerwise.sweep import LayerwisePass
from ooc.metrics.nodes import out_channels
from ooc.models.contexts import autocast, evaluating
from ooc.models.user import forward_batch
from ooc.planning.plan import Plan, RunFacts, Upkeep, plan
from ooc.planning.profile import RunTrial, profile
from ooc.planning.simulate_history import STAMP_BYTES, HistoryShape
from ooc.planning.simulate_superbatches import cost_of
from ooc.planning.trials import lengths_of
from ooc.runtime.keyed_random import Purpose, key
from ooc.training.history_upkeep import SWEEP as REFRESH
from ooc.training.node_run import SWEEP, Job
from ooc.training.open_run import make_model, make_optimizer
from stores.arrays.rows import ArrayRows
from stores.errors import BudgetError
from stores.io.pages import PAGE_BYTES
from stores.io.read_plan import ReadCost, plan_by_cost
from stores.process import resident_bytes

TRAIN_SECONDS, PLAN_SECONDS = 1.0, 2.0
"""What each part of the profile may take before training, and for `ooc plan`"""


def plan_of(job: Job, step: Callable[[Job, Any], None], seconds: float, variants: bool) -> Plan:
    """The plan of `job` from its beginning. step: what training does with a batch, but for the log.

    Raises what sampling and reading raise: BudgetError where a batch does not fit.

    >>> plan_of(job, trial_step, PLAN_SECONDS, variants=True).prediction.bottleneck
    'read'
    """
    config = job.config
    steps = min(config.max_steps or 1 << 62, config.epochs * job.steps_per_epoch)
    with torch.random.fork_rng(devices=[]):
        found = profile(_trial(job, step, steps), seconds, variants)
    epochs = -(-steps // max(1, job.steps_per_epoch))
    scored = dict.fromkeys(job.evaluators, 0)
    for split in config.eval_splits:
        scored[split] = 1
    scored[config.val_split] = scored.get(config.val_split, 0) + -(-epochs // config.eval_every)
    upkeep = _upkeep(job, steps, found.asked)
    made = plan(found, job.loader.budget, RunFacts(job.steps_per_epoch, steps, job.row_bytes, scored, upkeep))
    return replace(made, reading=job.dataset.reading("x"))


def _trial(job: Job, step: Callable[[Job, Any], None], steps: int) -> RunTrial:
    """The job's loaders with another model of the same shape."""
    config, device = job.config, job.device
    channels = out_channels(str(job.dataset.task), job.dataset.num_classes or 2)
    model = make_model(config, job.dataset.num_features, channels).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    halo = None if job.halo is None else Halo(job.halo.widths, None, job.halo.parts)
    other = replace(job, model=model, optimizer=make_optimizer(config, model), scaler=scaler, halo=halo)

    def train(batch: Any) -> None:
        model.train()
        step(other, batch.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # training waits for every loss too

    def score(batch: Any) -> None:
        with evaluating(model), autocast(device, config.precision):
            forward_batch(model, batch.to(device))

    first, epochs = min(steps, job.steps_per_epoch), -(-steps // max(1, job.steps_per_epoch))
    return RunTrial(job.loader, job.evaluators, train, score, first, epochs, histories_of(job))


def histories_of(job: Job) -> HistoryShape | None:
    """What is known of the histories of a run before there are any; None where it has none."""
    config, halo = job.config, job.halo
    if halo is None or config.history == "zero" or not halo.widths:
        return None
    itemsize = 2 if config.history_dtype == "float16" else 4
    cost = cost_of(job.loader.work.x if halo.history is None else halo.history.rows[0])
    return HistoryShape(
        num_nodes=job.dataset.num_nodes,
        row_bytes=tuple(itemsize * width for width in halo.widths),
        hot_bytes=job.loader.kept_bytes if isinstance(job.loader, HaloLoader) else 0,
        lag=config.history_lag,
        ahead=AHEAD,
        widest=max(halo.widths) if itemsize == 2 else 0,
        lengths=partial(_lengths, count=job.dataset.num_nodes, cost=cost),
        cost=cost,
    )


def _lengths(ids: NDArray[np.int64], row_bytes: int, count: int, cost: ReadCost) -> NDArray[np.int64]:
    return plan_by_cost(ids, row_bytes, cost, count=count, alignment=PAGE_BYTES).length


def _upkeep(job: Job, steps: int, asked: float) -> Upkeep:
    """What the run does besides batches. asked: nodes of a batch."""
    config, histories, peak, read, written = job.config, histories_of(job), 0, 0, 0
    every = config.refresh if histories is not None and isinstance(config.refresh, int) else 0
    whole, epochs = steps // job.steps_per_epoch, -(-steps // job.steps_per_epoch)
    if config.evaluate == "layerwise":
        peak = _swept(job, SWEEP, None)[0]
    if histories is not None and every:
        refreshed = range(every, whole + 1, every)
        apart = sum(not _scored_by_sweep(config, epoch) for epoch in refreshed)  # the others share the sweep of the scores
        refresh_peak, *found = _swept(job, REFRESH, len(histories.row_bytes)) if apart else (0, 0, 0)
        rows = job.dataset.num_nodes * (histories.node_bytes + STAMP_BYTES)
        peak, read, written = max(peak, refresh_peak), apart * found[0], apart * found[1] + len(refreshed) * rows
    swept = [epoch for epoch in range(1, epochs) if (every and epoch % every == 0) or _scored_by_sweep(config, epoch)]
    return Upkeep(
        beforehand=config.saint_coverage * job.dataset.num_nodes / max(1.0, asked) if config.mode == "saint" else 0.0,
        lag=0 if histories is None else histories.lag,
        fills=len({1, *swept}) if epochs > 1 else 0,
        refresh_read=read,
        refresh_written=written,
        drift_read=0 if histories is None else _drift_read(job, histories),
        emptied=len(swept) / max(1, epochs - 1),
        scan_peak=peak,
    )


def _drift_read(job: Job, histories: HistoryShape) -> int:
    """Bytes that measuring the drift reads: features around some nodes, histories there, and those of the nodes themselves."""
    x, read = job.loader.work.x, 0
    sample = key(job.config.seed, Purpose.DRIFT, 0)
    row_bytes = drift_row_bytes(job.dataset.num_features, job.halo.widths if job.halo is not None else [0])
    try:
        layers = len(histories.row_bytes)
        for field in drift_sample(job.dataset.graph, sample, layers, job.loader.budget.max_batch, row_bytes):
            node = np.sort(field.node)
            read += 0 if x is None or isinstance(x, ArrayRows) else int(lengths_of(x)(node).sum())
            below = histories.row_bytes[: layers - len(field.num_edges)]
            read += sum(int(histories.lengths(node, each).sum()) for each in below)
            own = np.sort(field.node[: field.num_nodes[0]])
            read += sum(int(histories.lengths(own, each).sum()) for each in histories.row_bytes)
    except BudgetError:
        return 0  # nor will training measure it
    return read


def _swept(job: Job, folder: str, upto: int | None) -> tuple[int, int, int]:
    """(the process's bytes at most, bytes read, bytes written) of a sweep over all nodes."""
    beside = 0 if upto is not None or job.exact is None else job.exact.beside
    settings: dict[str, Any] = {"upto": upto, "beside": beside, "budget": job.budget}
    with closing(LayerwisePass(job.model, job.dataset, job.config.out / folder, **settings)) as scan:
        whole, under_way = ram_bytes(scan.shape), besides_bytes(scan.shape, job.dataset.graph)
        taken = whole + min(whole, under_way) if scan.plan.in_ram else scan.plan.memory + under_way
        most = min(resident_bytes()[0] + taken, job.loader.budget.memory)  # libraries are loaded by the profile
        return most, *scan.plan.moved(scan.shape)


def _scored_by_sweep(config: TrainConfig, epoch: int) -> bool:
    """Whether a sweep scores the model behind so many epochs."""
    return config.evaluate == "layerwise" and (epoch % config.eval_every == 0 or epoch == config.epochs)

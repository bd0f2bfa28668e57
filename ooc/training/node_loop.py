"""The training loop.

Every step reseeds torch's generators from (seed, epoch, step), so a resumed run draws the dropout of the one that was
never interrupted. A checkpoint is taken between optimizer steps only: no gradient has to be saved.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ooc.config.nodes import TrainConfig
from ooc.loading.subgraph_loaders import SaintLoader
from ooc.models.contexts import autocast
from ooc.planning.plan import Plan
from ooc.runtime.keyed_random import Purpose, key
from ooc.training import checkpoint
from ooc.training.compose import open_job
from ooc.training.history_upkeep import end_of_epoch
from ooc.training.loop import finite, interruptible
from ooc.training.node_run import Job
from ooc.training.plan import PLAN_SECONDS, TRAIN_SECONDS, plan_of
from ooc.training.watchers import Watcher, Watchers
from stores.dataset import Dataset

LEAST_COVERAGE = 1e-9
"""a subgraph, where the coefficients of GraphSAINT do not matter"""


def train(config: TrainConfig, resume: bool = False, watcher: Watcher | None = None, grown: bool = False) -> dict[str, Any]:
    """Train, write the run's files into `config.out`, and return the summary (RUN/summary.json).

    resume: continue the run that is there, inside its epoch, to the bit. watcher: who is shown progress. grown: continue it,
    from its next epoch, though the store has grown since (see `ooc.training.grown`).
    Raises ConfigError where settings, store or checkpoint do not fit, KeyboardInterrupt after Ctrl-C (a checkpoint is kept).

    >>> train(TrainConfig(store="cora.ooc", out="run", model="gcn"))["metrics"]["test"]["accuracy"]
    0.815
    """
    with open_job(config, resume, Watchers([watcher] if watcher else []), grown=grown) as job:
        if isinstance(job.loader, SaintLoader):  # here, where Ctrl-C ends it, and not in a thread of the first epoch
            job.watchers.note(f"GraphSAINT counts how often nodes come, over {config.saint_coverage:g} times as many drawn")
            job.loader.prepare()
        if config.plan and not job.state.total_steps:
            made = plan_of(job, trial_step, TRAIN_SECONDS, variants=False)
            checkpoint.write_json(config.out / checkpoint.PLAN, made.asdict())
            job.watchers.note(f"plan: {made}")
        with job.measure("training"):
            fit(job)
        return job.finish()


def plan(config: TrainConfig) -> Plan:
    """What training by `config` would take; nothing is written (`config.out` does not count).

    Raises as `train` does before its first step: BudgetError where the memory is too little.

    >>> plan(TrainConfig(store="papers.ooc", out="run", memory="2GB")).prediction.seconds_per_epoch
    """
    with tempfile.TemporaryDirectory(prefix="ooc-plan-") as folder, planning(config, Path(folder) / "run") as job:
        return plan_of(job, trial_step, PLAN_SECONDS, variants=True)


@contextmanager
def planning(config: TrainConfig, folder: Path, dataset: Dataset | None = None) -> Iterator[Job]:
    """The run of `config`, composed in `folder` to be planned: neither histories, as large as all hidden rows, nor the counts
    of many subgraphs are made for it."""
    unlike = {"out": folder, "tensorboard": False, "history": "zero", "saint_coverage": LEAST_COVERAGE}
    with open_job(config.model_copy(update=unlike), False, Watchers([]), dataset) as job:
        yield replace(job, config=config)


def trial_step(job: Job, batch: Any) -> None:
    """A batch of training, for the profile."""
    job.scaler.scale(forward_loss(job, batch)).backward()  # type: ignore[no-untyped-call]
    optimizer_step(job)


def fit(job: Job) -> None:
    """Epochs until there are enough, `max_steps` is reached, or validation has not improved for `patience` evaluations."""
    config, state = job.config, job.state
    job.watchers.start(state.epoch, state.step, config.epochs, job.steps_per_epoch)
    with interruptible(job):
        while state.epoch < config.epochs and not job.out_of_patience and job.steps_left > 0:
            train_epoch(job)
            if state.step < job.steps_per_epoch:
                break  # max_steps ends the run inside the epoch
            last = state.epoch + 1 == config.epochs
            due = last or (state.epoch + 1) % config.eval_every == 0
            histories = end_of_epoch(job, scored=due)
            job.end_nodes(job.validate() if due else None, histories)
            job.checkpoint_if_due(epoch_end=True)
    job.checkpoint()
    if state.step:
        job.end_nodes(job.validate())  # after the checkpoint: a resumed run with more steps rolls this line back


def train_epoch(job: Job) -> None:
    """From the cursor to the end of its epoch, or to `max_steps`.

    `max_steps` may cut the last group of accumulated batches short. A run with more steps would not do so, and is to go on
    from before it: the checkpoint is taken there, and none after it.
    """
    config, state, model = job.config, job.state, job.model
    start, last = state.step, min(job.steps_per_epoch, state.step + job.steps_left)
    model.train()
    with job.batches() as batches:
        for step, batch in zip(range(start, last), batches, strict=False):
            first = max(step - step % config.accumulate, start)
            group = min(step - step % config.accumulate + config.accumulate, last) - first
            if step == first and step + config.accumulate > last and last < job.steps_per_epoch:
                job.checkpoint()
            torch.manual_seed(key(config.seed, Purpose.TORCH, state.epoch, step) >> 1)
            loss = forward_loss(job, batch)
            job.scaler.scale(loss / group).backward()  # type: ignore[no-untyped-call]
            if step + 1 == first + group:
                optimizer_step(job)
            job.end_step(finite(loss, state.epoch, step))
            if step + 1 == first + group:
                job.checkpoint_if_due()


def forward_loss(job: Job, batch: Any) -> Tensor:
    """The batch's mean loss over its labelled seeds; of GraphSAINT's the sum, each node's times its coefficient."""
    with autocast(job.device, job.config.precision):
        logits = job.forward(batch)
    return job.loss(logits, batch.y[: batch.batch_size], getattr(batch, "node_norm", None))


def optimizer_step(job: Job) -> None:
    """Clip, step, clear."""
    if job.config.grad_clip is not None:
        job.scaler.unscale_(job.optimizer)
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.config.grad_clip)
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad(set_to_none=True)

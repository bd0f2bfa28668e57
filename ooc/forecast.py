"""The plan of a composed run: its profile is taken on a model of its own, then `ooc.planner` predicts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ooc.compose import make_model, make_optimizer
from ooc.evaluate import autocast, evaluating
from ooc.metrics import out_channels
from ooc.planner import Plan, Run, plan
from ooc.profiling import Trial, profile
from ooc.run import Job
from ooc.user_models import forward_batch

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
    return plan(found, job.loader.budget, Run(job.steps_per_epoch, steps, job.row_bytes, scored))


def _trial(job: Job, step: Callable[[Job, Any], None], steps: int) -> Trial:
    """The job's loaders with another model of the same shape."""
    config, device = job.config, job.device
    channels = out_channels(str(job.dataset.task), job.dataset.num_classes or 2)
    model = make_model(config, job.dataset.num_features, channels).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    other = replace(job, model=model, optimizer=make_optimizer(config, model), scaler=scaler)

    def train(batch: Any) -> None:
        model.train()
        step(other, batch.to(device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # training waits for every loss too

    def score(batch: Any) -> None:
        with evaluating(model), autocast(device, config.precision):
            forward_batch(model, batch.to(device))

    first, epochs = min(steps, job.steps_per_epoch), -(-steps // max(1, job.steps_per_epoch))
    return Trial(job.loader, job.evaluators, train, score, first, epochs)

"""The training loop of every mode.

Every step reseeds torch's generators from (seed, epoch, step), so a resumed run draws the dropout of the one that was
never interrupted. Checkpoints are taken between optimizer steps only: no gradient has to be saved.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ooc.config.base import RunConfig
from ooc.runtime.device_full import device_full
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import DevicePlan
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.working import scratch_folder
from ooc.training.callbacks import Callback
from ooc.training.checkpoint import nearest_folder
from ooc.training.failures import failures_placed
from ooc.training.open_run import check_types, open_dataset, open_run
from ooc.training.registry import mode_of
from ooc.training.run import Run
from ooc.training.watchers import Watchers

PLAN_SECONDS = 2.0
"""What each part of the profile may take for `plan`"""


def train(
    config: RunConfig,
    resume: bool = False,
    watcher: Callback | None = None,
    grown: bool = False,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train, and write the run's files into `config.out`.

    Args:
        config: The settings of any mode.
        resume: Continue the run that is there, inside its epoch, to the bit.
        watcher: Shows the progress: see `ooc.training.watchers.terminal_watcher`.
        grown: With `resume`, continue though the store has grown since (see `ooc.training.open_run.touched_since`).
        callbacks: Follow the run, besides the loggers of `config.log`; see `ooc.Callback`.

    Returns:
        The summary, as in RUN/summary.json.

    Raises:
        ConfigError: Settings, store or checkpoint do not fit.
        BudgetError: The memory is too little, or that of the GPU is full.
        KeyboardInterrupt: Ctrl-C; a checkpoint is kept.

    >>> train(TrainConfig(store="cora.ooc", out="run", model="gcn"))["metrics"]["test"]["accuracy"]
    0.815
    """
    if grown and not resume:
        raise ConfigError("`grown=True` continues a run whose store has grown: give `resume=True` too")
    booked: DevicePlan | None = None
    run: Run | None = None
    try:
        with (
            failures_placed(lambda: f"mode {config.mode}, {run.place if run else 'before the first step'}"),
            open_run(config, resume, Watchers([*([watcher] if watcher else []), *callbacks]), grown=grown) as run,
        ):
            booked = run.mode.budget.device
            run.mode.prepare()
            with run.measure("training"):
                fit(run)
            return run.finish()
    except torch.OutOfMemoryError as error:
        raise BudgetError(device_full(error, booked, mode_of(config).saves_device)) from error


def plan(config: RunConfig, nproc: int = 1, bandwidth: int = 0) -> Any:
    """What training by `config` would take; nothing is left on disk. nproc, bandwidth: as of `ooc.plan`, in bytes a second.

    Returns:
        `ooc.planning.run_plan.Plan`, `ooc.training.full_mode.FullPlan` of exact training, or
        `ooc.planning.table_plan.TablePlan` of modes table and lightgcn.

    Raises:
        ConfigError: There is no plan of the mode; else as `train` before its first step.
        BudgetError: The memory is too little.

    >>> plan(TrainConfig(store="papers.ooc", out="run", memory="2GB")).prediction.seconds_per_epoch
    """
    above = nearest_folder(config.out)
    with (
        scratch_folder(above if mode_of(config).plans_disk else None, "ooc-plan") as folder,
        planning(config, folder / "run") as mode,
    ):
        found = mode.predict(PLAN_SECONDS, variants=True)
        return found if nproc == 1 else replace(found, ranks=mode.predict_ranks(nproc, bandwidth))


@contextmanager
def planning(config: RunConfig, folder: Path, dataset: Dataset | None = None) -> Iterator[Any]:
    """The mode of `config`, open in `folder` where its plan takes measurements, to be planned."""
    kind = mode_of(config)
    with failures_placed(lambda: f"the plan of mode {config.mode}"), ExitStack() as opened:
        if kind.plans_unopened:
            data = dataset or opened.enter_context(open_dataset(config))
            check_types(config, data)
            yield opened.enter_context(closing(kind(config, data)))
            return
        composed = kind.planned(config).model_copy(update={"out": folder, "tensorboard": False, "log": []})
        run = opened.enter_context(open_run(composed, False, Watchers([]), dataset))
        run.mode.config = config.model_copy(update={"out": folder})
        yield run.mode


def fit(run: Run) -> None:
    """Epochs until there are enough, `max_steps` is reached, or validation has not improved for `patience` evaluations."""
    config, state, mode = run.config, run.state, run.mode
    run.watchers.start(state.epoch, state.step, config.epochs, mode.steps_per_epoch, mode.rate)
    with interruptible(run):
        while state.epoch < config.epochs and not run.out_of_patience and (run.steps_left > 0 or run.epoch_is_trained):
            train_epoch(run)
            if not run.epoch_is_trained:
                break  # max_steps ends the run inside the epoch
            scored = mode.is_scored(state.epoch, run.steps_left)
            line = mode.end_epoch(scored)
            run.end_epoch((run.evaluate() if scored else {}) | line)
            run.checkpoint_if_due(epoch_end=True)
    run.checkpoint()
    if run.out_of_patience and state.epoch < config.epochs:
        count = config.patience
        run.watchers.note(
            f"{mode.monitor} on validation did not improve in {count} evaluation{'s' * (count != 1)}: training ends"
        )
    if state.step:
        run.end_epoch(run.evaluate())  # after the checkpoint: a resumed run with more steps rolls this line back


def train_epoch(run: Run) -> None:
    """From the cursor to the end of its epoch, or to `max_steps`, which may cut the last group of accumulated batches short.

    A run with more steps would not cut it short, and is to go on from before it: the last checkpoint is taken there.
    """
    config, state, mode = run.config, run.state, run.mode
    run.model.train()
    if run.epoch_is_trained:  # a checkpoint between an epoch's last step and its scores
        return
    start, stop = state.step, min(mode.steps_per_epoch, state.step + run.steps_left)
    with closing(mode.batches(state.epoch, start, stop)) as batches, run.training():  # type: ignore[type-var]
        for batch in batches:
            step = state.step
            first, last = group_of(step, mode.accumulate, start, stop)
            if step == first and step + mode.accumulate > stop and stop < mode.steps_per_epoch:
                run.checkpoint()
            torch.manual_seed(key(config.seed, Purpose.TORCH, state.epoch, step) >> 1)
            loss = mode.step(batch, last - first, step + 1 == last)
            if step + 1 == last:
                mode.update(run.optimizer)
            run.end_step(loss)
            if step + 1 == last:
                run.checkpoint_if_due()
            if state.step == stop and run.steps_left <= 0:
                break
        run.log_losses()


def group_of(step: int, size: int, start: int, stop: int) -> tuple[int, int]:
    """(first, last) step of the group of `size` batches that `step` is in, as far as it lies between start and stop.

    >>> group_of(4, 3, 0, 5)
    (3, 5)
    """
    first = step - step % size
    return max(first, start), min(first + size, stop)


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Ctrl-C finishes the step (see `Run.interrupt`), takes a checkpoint and raises KeyboardInterrupt; a second one raises
    at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        run.interrupt()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

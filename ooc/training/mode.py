"""What differs between the kinds of runs: a `Mode` makes batches, computes steps and scores, and keeps state of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ooc.config.base import RunConfig
from ooc.history.history import Growth
from ooc.runtime.memory_plan import MemoryPlan
from ooc.training.build import pick_device
from ooc.training.run_state import RunState
from ooc.training.watchers import BATCHES, Rate, Watchers
from stores.arrays.rows import Ids
from stores.dataset import Dataset
from stores.errors import ConfigError

Scores = dict[str, float | None]


class RunContext(Protocol):
    """A run as its mode sees it; see `ooc.training.run.Run`."""

    state: RunState
    watchers: Watchers
    interrupted: bool

    def judge(self, scores: Scores) -> bool:
        """Whether the model is the best so far by its scores on validation; then it is kept."""

    def booked(self, name: str) -> AbstractContextManager[None]:
        """Count the seconds of a block among those of `name` in the run's account."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Record the memory of a block for the summary."""

    def checkpoint(self) -> None:
        """Save everything a resumed run needs."""

    def checkpoint_if_due(self, epoch_end: bool = False) -> None:
        """Take a checkpoint where one is due; after Ctrl-C take one and raise KeyboardInterrupt."""


class Mode(ABC):
    """What a run does in a step, and what it is scored by. `ooc.training.loop` runs any of them.

    A mode is made before anything is written: what does not fit is refused there. `open` then makes its files in the run's
    directory. Every epoch has the same `steps_per_epoch`, and a batch depends on (seed, epoch, step) alone.

    Args:
        config: The settings, of the class that `ooc.config.modes.classes` has for the mode.
        dataset: The open store; it stays open longer than the mode.

    Raises:
        ConfigError: Settings and store do not fit each other.
        BudgetError: A batch does not fit the memory.
    """

    auto_device: ClassVar[str] = "auto"
    """what --device auto means"""
    plans_disk: ClassVar[bool] = False
    """whether a plan measures the disk that the run's directory is on"""

    model: nn.Module
    """on the device, its parameters drawn from the seed"""
    monitor: str
    """the score on validation that chooses the best model; of "loss" less is better"""
    budget: MemoryPlan
    """how the process's memory is divided for the mode"""
    run: RunContext
    """from `open` on"""
    accumulate: int = 1
    """batches whose gradients make one optimizer step"""
    rate: Rate = BATCHES

    def __init__(self, config: RunConfig, dataset: Dataset) -> None:
        self.config, self.dataset = config, dataset
        self.device = pick_device(self.auto_device if config.device == "auto" else config.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        """`config` as it is composed to be planned, without what takes long to make. ConfigError where there is no plan."""
        raise ConfigError(
            f"`ooc plan` does not support mode {config.mode}: try `ooc train ... --mode {config.mode} "
            "--max-steps 200`, whose summary.json has the cost of a batch"
        )

    def predict(self, seconds: float, variants: bool) -> Any:
        """The plan of the whole run, of modes that have one.

        Args:
            seconds: What each part of the profile may take.
            variants: Whether to say what other settings would take.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Batches an epoch, 1 or more."""

    @property
    def seeds_per_step(self) -> int:
        """What `seeds_per_second` of the summary counts, a batch."""
        return 1

    @abstractmethod
    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        """Make the mode's files in the run's directory, or take them up.

        Args:
            run: What this is the mode of.
            saved: The checkpoint to go on from, None for a new run; parameters and optimizer are the run's to restore.
            growth: What a store that has grown since means for the run, None where it has not.
        """

    def notes(self) -> list[str]:
        """What a person should know once the mode is open."""
        return []

    def prepare(self) -> None:  # noqa: B027 - most modes have nothing to do
        """Do what takes long, right before training: Ctrl-C ends it."""

    @abstractmethod
    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """The batches of steps `step` to `stop` of an epoch, in order; the iterator has `close`."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The batch's loss, with its graph; state that the batch leaves behind is kept."""

    def step(self, batch: Any, share: int) -> Tensor:
        """Add a batch's gradients, divided by `share`, to those of the parameters.

        Returns:
            The batch's loss.
        """
        loss = self.loss(batch)
        self.scaler.scale(loss / share).backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients, make an optimizer step, and clear them."""
        if self.config.grad_clip is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def is_scored(self, epoch: int, steps_left: int) -> bool:
        """Whether the model is scored at the end of an epoch; steps_left: those that `max_steps` still allows."""
        return epoch + 1 == self.config.epochs or (epoch + 1) % self.config.eval_every == 0

    def end_epoch(self, scored: bool) -> dict[str, Any]:
        """An epoch's last step is done; scored: whether `evaluate` comes next.

        Returns:
            What the epoch's line in metrics.jsonl says besides scores.
        """
        return {}

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Score the model on validation and judge it.

        Returns:
            What the epoch's line in metrics.jsonl says of it: split -> scores, and "best"; nothing where nothing is scored.
        """

    @abstractmethod
    def final_scores(self) -> dict[str, Scores]:
        """Split -> scores of the best model, which is the run's now."""

    @abstractmethod
    def state(self, cursor: RunState) -> dict[str, Any]:
        """What a checkpoint at `cursor` holds of the mode, by keys that no other part of a checkpoint has."""

    def progress(self) -> int:
        """How far the mode is at the run's cursor: a checkpoint is not taken twice at the same cursor and progress."""
        return 0

    def commit(self) -> None:  # noqa: B027 - nor rows on disk
        """The checkpoint is saved: rows on disk as they are belong to it."""

    @abstractmethod
    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        """How a run goes on with a store that has grown.

        Args:
            saved: The checkpoint, taken before.
            touched: Nodes whose features or in-edges have changed, int64[k].

        Returns:
            The checkpoint to go on from, and what `open` is to know.
        """

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """What this process has read, by names of `summary.COUNTS`, and the "stages" of the training's pipeline."""

    @abstractmethod
    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """The run is over: write the trace, remove files that only a running one needs.

        Args:
            result: What summary.json says of every run.

        Returns:
            What it says of this mode besides.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back files and threads; idempotent, and allowed before `open`."""


def next_epoch(saved: dict[str, Any]) -> RunState:
    """The cursor of a checkpoint, at the beginning of the epoch that is the first to see what is new."""
    state = RunState(**saved["state"])
    state.epoch, state.step, state.loss_sum = state.epoch + (state.step > 0), 0, 0.0
    return state

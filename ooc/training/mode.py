"""What differs between the kinds of runs: a `Mode` makes batches, computes steps and scores, and keeps state of its own."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from ooc.config.base import RunConfig
from ooc.history.history import Growth
from ooc.loading.choose_pool import device_plan
from ooc.planning.over_ranks import RanksPlan, gradients_over_ranks
from ooc.runtime.crew import few, threads_kept
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.build import device_model_bytes, make_optimizer, pick_device, use_tf32
from ooc.training.callbacks import BATCHES, Rate
from ooc.training.compressed_gradients import CompressedGradients
from ooc.training.data_parallel import GlobalStep
from ooc.training.schedules import scheduled
from ooc.training.trained_table import TrainedTable
from ooc.training.watchers import Watchers

Scores = dict[str, float | None]


@dataclass
class RunState:
    """Where a run is: the part of a checkpoint that every mode shares."""

    epoch: int = 0
    step: int = 0
    """batches done in this epoch"""
    total_steps: int = 0
    loss_sum: float = 0.0
    """of this epoch's steps"""
    best_score: float | None = None
    best_epoch: int | None = None
    best_scores: Scores | None = None
    """of the best epoch on validation, with those that do not choose it"""
    stale: int = 0
    """evaluations since the best one"""
    lr_scale: float = 1.0
    """of the learning rate, where it falls on a plateau"""
    lr_stale: int = 0
    """evaluations since the best one, or since it fell"""

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Self:
        """That of a checkpoint. Earlier versions had schedules in mode table alone, whose numbers were beside its files."""
        table = saved.get("table") or {}
        names = {"lr_scale": "lr_scale", "since_better": "lr_stale"}
        return cls(**{**{names[name]: table[name] for name in names if name in table}, **saved["state"]})

    @classmethod
    def next_epoch(cls, saved: dict[str, Any]) -> Self:
        """That of a checkpoint, at the beginning of the epoch that is the first to see what is new in the store."""
        state = cls.of(saved)
        state.epoch, state.step, state.loss_sum = state.epoch + (state.step > 0), 0, 0.0
        state.best_scores = None  # of the store as it was
        return state

    @classmethod
    def next_epoch_unchosen(cls, saved: dict[str, Any]) -> Self:
        """As `next_epoch`, where the best model is to be chosen anew."""
        state = cls.next_epoch(saved)
        state.best_score, state.best_epoch, state.stale = None, None, 0
        return state


class RunContext(Protocol):
    """A run as its mode sees it: see `ooc.training.run.Run`."""

    state: RunState
    watchers: Watchers
    interrupted: bool

    def judge(self, scores: Scores) -> bool: ...
    def booked(self, name: str) -> AbstractContextManager[None]: ...
    def measure(self, name: str) -> AbstractContextManager[None]: ...
    def stoppable(self) -> AbstractContextManager[None]: ...
    def checkpoint(self) -> None: ...
    def checkpoint_if_due(self, epoch_end: bool = False) -> None: ...


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.zero_grad()` of torch's optimizers, without a record for torch's profiler, which takes longer than clearing
    the gradients of a small model."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class Mode(ABC):
    """What a run does in a step, and what it is scored by. `ooc.training.loop` runs any of them.

    A mode is made before anything is written: what does not fit is refused there, by a ConfigError or a BudgetError. `open`
    then makes its files in the run's directory. Every epoch has the same `steps_per_epoch`, and a batch depends on (seed,
    epoch, step) alone. The data set stays open longer than the mode.
    """

    auto_device: ClassVar[str] = "auto"
    """what --device auto means"""
    typed: ClassVar[bool] = False
    """whether it trains on heterogeneous graphs too"""
    ranked: ClassVar[bool] = False
    """whether several processes train together"""
    has_table: ClassVar[bool] = False
    """whether a run's outputs are a table's: see `trained_table`"""
    plans_disk: ClassVar[bool] = False
    """whether a plan measures the disk that the run's directory is on"""
    plans_unopened: ClassVar[bool] = False
    """whether `predict` needs no open run, as nothing is measured"""

    saves_device: ClassVar[str]
    """what takes less of a GPU's memory, for people: settings that the mode accepts"""

    model: nn.Module
    """on the device, its parameters drawn from the seed"""
    monitor: str
    """the score on validation that chooses the best model; see `ooc.metrics.tasks.LOWER_IS_BETTER`"""
    budget: MemoryPlan
    """how the process's memory is divided for the mode"""
    run: RunContext
    """from `open` on"""
    accumulate: int = 1
    """batches whose gradients make one optimizer step"""
    rate: Rate = BATCHES

    def __init__(self, config: RunConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        self.config, self.dataset, self.ranks = config, dataset, ranks
        self.opened = ExitStack()
        """closes what the mode opens, the last first"""
        if not (ranks.alone or self.ranked):
            raise ConfigError(
                f"mode {config.mode} trains in one process, and there are {ranks.world_size}: start it without torchrun"
            )
        self.device = pick_device(self.auto_device if config.device == "auto" else config.device)
        if self.device.type == "cuda" and ranks.local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ConfigError(
                f"process {ranks.local_rank + 1} of this host has no GPU: start {count} a host, or `device='cpu'`"
            )
        if config.tf32:
            use_tf32(self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)

    def _book_states(self, row_bytes: int, most: int) -> None:
        """Book the rows of histories, or of the memory of nodes, that a batch has on the GPU. row_bytes: of a node; most: of a
        batch, as the host's memory bounds it."""
        device = device_plan(self.device, None, device_model_bytes(self.config, self.model))
        if device is not None:
            self.budget = replace(self.budget, device=device.with_states(min(self.dataset.num_nodes * row_bytes, most)))

    @classmethod
    def trained_table(cls, run: Path, config: Any, dataset: Dataset, ended: Any) -> AbstractContextManager[TrainedTable]:
        """The table of a run that has ended, open over a data set. ended: what the run ended with."""
        raise NotImplementedError

    @property
    def engine(self) -> str:
        """How rows are read into the host's memory."""
        return "auto" if self.config.engine == "gds" else self.config.engine

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        """`config` as it is composed to be planned, without what takes long to make. ConfigError where there is no plan."""
        raise ConfigError(
            f"mode {config.mode} has no plan: train with `max_steps=200`, and summary.json has the cost of a batch"
        )

    def predict(self, seconds: float, variants: bool) -> Any:
        """The plan of the whole run, of modes that have one. seconds: what each part of the profile may take; variants: whether
        to say what other settings would take."""
        raise NotImplementedError

    def predict_ranks(self, nproc: int, bandwidth: int) -> RanksPlan:
        """What so many processes would send to each other; bandwidth: bytes a second of one."""
        nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return gradients_over_ranks(nbytes, nproc, bandwidth)

    def chosen(self) -> dict[str, Any]:
        """What the mode chose for the `automatic` settings of its configuration."""
        return {}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""
        return make_optimizer(self.config, self.model)

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
        """Make the mode's files in the run's directory, or take them up as they were at the checkpoint `saved`, None for a new
        run; parameters and optimizer are the run's to restore. growth: what a store that has grown since means for the run."""

    def notes(self) -> list[str]:
        """What a person should know once the mode is open."""
        if self.config.engine != "gds":
            return []
        return ["`engine='gds'` fills GPU memory; rows that batches gather in the host's memory are read by pread"]

    def prepare(self) -> None:  # noqa: B027 - most modes have nothing to do
        """Do what takes long, right before training: Ctrl-C ends it."""

    @abstractmethod
    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """The batches of steps `step` to `stop` of an epoch, in order; the iterator has `close`. A rank without a share of the
        last one has None in its place."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The batch's loss, with its graph; state that the batch leaves behind is kept."""

    def weight(self, batch: Any) -> Tensor:
        """How much the batch's loss counts in the mean of those of all ranks: of how many labels it is the mean."""
        return torch.ones((), device=self.device)

    @cached_property
    def global_step(self) -> GlobalStep:
        """Gradients of all ranks; made once the parameters are restored, which are rank 0's on all ranks then."""
        return GlobalStep(self, self.ranks, self.compressed)

    @cached_property
    def compressed(self) -> CompressedGradients:
        """How the gradients that ranks exchange are compressed."""
        return CompressedGradients(self.config, self.ranks)

    def step(self, batch: Any, share: float, last: bool = True) -> Tensor:
        """Add a batch's gradients, divided by `share`, to those of the parameters; the batch's loss, on several ranks that of
        the global batch. last: whether `update` comes next."""
        if not self.ranks.alone:
            return self.global_step.backward(batch, self.scaler, share, last)
        loss = self.loss(batch)
        with threads_kept():
            self.scaler.scale(loss / share).backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradients, make an optimizer step at the rate of the schedule, and clear them."""
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        if self.config.grad_clip is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.trained(), self.config.grad_clip)
        with few(sum(each.numel() for group in optimizer.param_groups for each in group["params"])):
            self.scaler.step(optimizer)
        self.scaler.update()
        clear_gradients(optimizer)

    @property
    def lr(self) -> float:
        """The learning rate of the step under way."""
        state = self.run.state
        return self.config.lr * state.lr_scale * scheduled(self.config, state.epoch, state.step, self.steps_per_epoch)

    def trained(self) -> Iterable[Tensor]:
        """What has gradients in a step, which are clipped together."""
        return self.model.parameters()

    def is_scored(self, epoch: int, steps_left: int) -> bool:
        """Whether the model is scored at the end of an epoch; steps_left: those that `max_steps` still allows."""
        return epoch + 1 == self.config.epochs or (epoch + 1) % self.config.eval_every == 0

    def end_epoch(self, scored: bool) -> dict[str, Any]:
        """What the epoch's line in metrics.jsonl says besides scores. The last step is done; scored: `evaluate` comes next."""
        return {}

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Score the model on validation and judge it. What the epoch's line in metrics.jsonl says of it: split -> scores, and
        "best"; nothing where nothing is scored."""

    def ended(self) -> dict[str, Any]:
        """What the file of the run's model holds besides its parameters, which are the run's now: names of rows on disk that
        outputs depend on too. `finish` removes those of an earlier end."""
        return {}

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
        """(the checkpoint to go on from, what `open` is to know) for a store that has grown since the checkpoint `saved`.
        touched: nodes whose features or in-edges have changed, int64[k]."""

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """What this process has read, by names of `summary.COUNTS`, and the "stages" of the training's pipeline."""

    @abstractmethod
    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """The run is over: write the trace, remove files that only a running one needs. What summary.json says of the mode,
        besides `result`, what it says of every run."""

    def close(self) -> None:
        """Give back files and threads, each whatever closing another raises; idempotent, and allowed before `open`.

        The run goes too: it has this mode, and what refers to each other stays in memory until Python's garbage collector runs.
        """
        try:
            self.opened.close()
        finally:
            vars(self).pop("run", None)

"""A training run, whatever its mode: its cursor, its checkpoints, its account, its results."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ooc.config.base import RunConfig
from ooc.metrics.tasks import LOWER_IS_BETTER
from ooc.models.dropout import STREAM
from ooc.runtime.memory import MemoryMeter
from ooc.runtime.messages import warn_user
from ooc.runtime.ranks import Ranks
from ooc.runtime.transfer import on_host
from ooc.stores.dataset import Dataset
from ooc.stores.errors import OocError
from ooc.stores.jit import COMPILATIONS
from ooc.training import checkpoint, summary
from ooc.training.mode import Mode, RunState, Scores
from ooc.training.step_losses import StepLoss, StepLosses
from ooc.training.watchers import Watchers

MODEL = "model.pt"
CHECKPOINT_SPACING = 20
"""By default so many times what a checkpoint took lies between two: at most a twentieth of the time is theirs ..."""
CHECKPOINT_SECONDS = 2.0
"""... and come no more often than this."""


class ScoringStopped(KeyboardInterrupt):
    """Ctrl-C inside `Run.stoppable`: nothing that a checkpoint saves has changed there."""


@dataclass
class Run:
    """A composed run: see `ooc.training.open_run.compose`."""

    config: RunConfig
    dataset: Dataset
    mode: Mode
    optimizer: torch.optim.Optimizer
    log: checkpoint.MetricsLog
    watchers: Watchers
    meter: MemoryMeter
    state: RunState = field(default_factory=RunState)
    best_model: dict[str, Tensor] | None = None
    spent_before: dict[str, Any] = field(default_factory=summary.nothing_spent)
    """by earlier processes of this run, up to the checkpoint"""
    interrupted: bool = False

    def __post_init__(self) -> None:
        self._spent = {**summary.nothing_spent(), "processes": 1}
        self._clocks: dict[str, float] = {}  # of the blocks under way: up to when their seconds are booked
        self._saved_at, self._save_seconds = time.monotonic(), 0.0
        self._saved_cursor: tuple[Any, ...] = ()
        self._losses = StepLosses(self.mode.device)
        self._stoppable = self._undefined = False

    @property
    def model(self) -> nn.Module:
        return self.mode.model

    @property
    def ranks(self) -> Ranks:
        return self.mode.ranks

    @property
    def epoch_is_trained(self) -> bool:
        """Whether the cursor stands behind an epoch's last step, and before its scores."""
        return self.state.step >= self.mode.steps_per_epoch

    @property
    def steps_left(self) -> int:
        """Batches until `max_steps`; a very large number without it."""
        return (self.config.max_steps or 1 << 62) - self.state.total_steps

    @property
    def out_of_patience(self) -> bool:
        return self.config.patience is not None and self.state.stale >= self.config.patience

    @property
    def place(self) -> str:
        """Where the run stands, for a person."""
        state = self.state
        if state.epoch >= self.config.epochs:
            return "the scores at the end"
        return f"the scores of epoch {state.epoch}" if self.epoch_is_trained else f"epoch {state.epoch} step {state.step}"

    @contextmanager
    def booked(self, name: str) -> Iterator[None]:
        """Count the seconds of a block, but for those of checkpoints, among those of `name` in the run's account."""
        self._clocks[name] = time.perf_counter()
        try:
            yield
        finally:
            self._account()
            del self._clocks[name]

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the seconds of a block as training."""
        with self.booked("train_seconds"):
            yield
            if self.mode.device.type == "cuda":
                torch.cuda.synchronize(self.mode.device)

    def _account(self) -> None:
        """Book the seconds of the blocks under way, up to now."""
        now = time.perf_counter()
        for name, since in self._clocks.items():
            self._spent[name] += now - since
            self._clocks[name] = now

    def end_step(self, loss: Tensor) -> None:
        """Log a batch, on a GPU those whose losses are there by now, and move the cursor behind it."""
        state = self.state
        place = state.epoch, state.step, state.total_steps
        self._log_losses(self._losses.put(place, loss))
        state.step += 1
        state.total_steps += 1
        self._spent["steps"] += 1

    def log_losses(self) -> None:
        """Log the batches that are not logged yet."""
        self._log_losses(self._losses.rest())

    def _log_losses(self, losses: Iterable[StepLoss]) -> None:
        """Raises OocError where a loss is no number any more."""
        for epoch, step, total_steps, value in losses:
            if not math.isfinite(value) and self.ranks.first:
                raise OocError(
                    f"the loss is {value} at epoch {epoch} step {step}: lower `lr`, set `grad_clip`, or use `precision='fp32'`"
                )
            self.log.write({"epoch": epoch, "step": total_steps, "loss": value})
            self.watchers.step(epoch, step, total_steps, value)
            self.state.loss_sum += value

    def interrupt(self) -> None:
        """Ctrl-C: end at the next step's or epoch's end, and inside `stoppable` at once."""
        self.interrupted = True
        if self._stoppable:
            raise ScoringStopped

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """A block that Ctrl-C ends at once, as it changes nothing that a checkpoint saves."""
        self._stoppable = True
        try:
            if self.interrupted:
                raise ScoringStopped
            yield
        finally:
            self._stoppable = False

    def evaluate(self) -> dict[str, Any]:
        """Score the model; what the epoch's line says of it. Where Ctrl-C ends that, a resumed run scores it."""
        with self.booked("evaluate_seconds"):
            before = self.state.lr_scale
            try:
                line = self.mode.evaluate()
            except ScoringStopped:
                self.checkpoint()
                raise
            fell = self.state.lr_scale != before
            return {**line, "lr": self.config.lr * self.state.lr_scale} if fell else line

    def judge(self, scores: Scores) -> bool:
        """Whether the model is the best so far by its scores on validation; then it is kept."""
        state, monitor = self.state, self.mode.monitor
        value = scores[monitor]
        if value is None:
            self._say_undefined(monitor)
            return False
        if monitor in LOWER_IS_BETTER:
            value = -value
        better = state.best_score is None or value > state.best_score
        if better:
            state.best_score, state.best_epoch, state.best_scores, state.stale = value, state.epoch, scores, 0
            self.best_model = {name: tensor.clone() for name, tensor in on_host(self.model.state_dict().items())}
        else:
            state.stale += 1
        if self.config.lr_schedule == "plateau":
            state.lr_stale = 0 if better else state.lr_stale + 1
            if state.lr_stale >= self.config.lr_patience:
                state.lr_scale, state.lr_stale = state.lr_scale * self.config.lr_factor, 0
        return better

    def _say_undefined(self, monitor: str) -> None:
        """Say once in a process that the score is undefined: it selects no model and costs no patience."""
        if self.ranks.first and not self._undefined:
            warn_user(f"{monitor} of validation is undefined and cannot select a model: give another `monitor` or `val_split`")
        self._undefined = True

    def end_epoch(self, more: dict[str, Any]) -> None:
        """Log an epoch, with what else there is to say of it, and move the cursor to the next."""
        state = self.state
        line: dict[str, Any] = {"epoch": state.epoch, "steps": state.step, "train_loss": state.loss_sum / max(state.step, 1)}
        line |= more
        self.log.write(line)
        self.watchers.epoch(line)
        state.epoch, state.step, state.loss_sum = state.epoch + 1, 0, 0.0

    def checkpoint_if_due(self, epoch_end: bool = False) -> None:
        """At a step's end: take a checkpoint where one is due; after Ctrl-C take one and raise KeyboardInterrupt.

        On all ranks at once: by rank 0's clock, and after Ctrl-C at any of them."""
        every = self.config.checkpoint_every
        if every is not None:
            due = epoch_end or self.state.step % every == 0
        else:
            interval = max(CHECKPOINT_SECONDS, CHECKPOINT_SPACING * self._save_seconds)
            due = time.monotonic() - self._saved_at >= interval
        due, interrupted = self.ranks.any(due and self.ranks.first, self.interrupted)
        if due or interrupted:
            self.checkpoint()
        if interrupted:
            raise KeyboardInterrupt

    def checkpoint(self) -> None:
        """Save everything a resumed run needs, atomically; not twice at one cursor, nor inside a group of batches."""
        state, mode = self.state, self.mode
        cursor = state.epoch, state.step, mode.progress()
        if cursor == self._saved_cursor or (state.step % mode.accumulate and not self.epoch_is_trained):
            return
        self.log_losses()
        self._account()
        began = time.perf_counter()
        kept = {
            "state": asdict(state),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best_model": self.best_model,
            "metrics_bytes": self.log.sync(),
            "spent": self.spent(),
            **mode.state(state),
            "compressed": mode.compressed.state(),
            **environment(mode),
        }
        if self.ranks.first:
            checkpoint.save(self.config.out, kept)
        mode.commit()
        self._save_seconds = time.perf_counter() - began
        self._spent["checkpoint_seconds"] += self._save_seconds
        self._saved_at, self._saved_cursor = time.monotonic(), cursor
        self._clocks = dict.fromkeys(self._clocks, time.perf_counter())

    def spent(self) -> dict[str, Any]:
        """Seconds, bytes and rows up to now, earlier processes included: bytes and rows of all ranks, and rank 0's seconds."""
        peaks = {"peak_rss_bytes": self.meter.peak, "peak_cuda_bytes": self.meter.cuda_peak}
        found = self.mode.counts()
        own = {**self._spent, **peaks, **found, "stages": self._worked(found["stages"])}
        return summary.add(self.spent_before, summary.of_ranks(self.ranks.gather(own)))

    def _worked(self, stages: summary.Stages) -> summary.Stages:
        """With the model's work on its last batch, which the pipeline misses, as the loop asks for no other one."""
        if "consumer" in stages:
            seconds = max(0.0, self._spent["train_seconds"] - stages["consumer"]["wait_s"])
            stages["consumer"] |= {"work_s": seconds, "busy_s": seconds}
        return stages

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the memory of a block for the summary."""
        with MemoryMeter(name) as meter:
            yield
        self._spent["memory"].append(meter.reading._asdict())

    def finish(self) -> dict[str, Any]:
        """Score the best model, and write it and the summary, which is rank 0's on all ranks."""
        if self.best_model is not None:
            self.model.load_state_dict(self.best_model)
        state, config, mode = self.state, self.config, self.mode
        ended = {"model": self.model.state_dict(), **mode.ended()}
        if self.ranks.first:
            checkpoint.save(config.out, ended, MODEL)
        result = {
            "metrics": mode.final_scores(),
            "monitor": mode.monitor,
            "best_epoch": state.best_epoch,
            "epochs": state.epoch,
            "total_steps": state.total_steps,
            **summary.summarize(self.spent(), mode.steps_per_epoch, mode.seeds_per_step),
            "memory_budget_bytes": config.memory_bytes,
            "device": str(mode.device),
            "threads": torch.get_num_threads(),
            "world_size": self.ranks.world_size,
            "kernels_compiled": COMPILATIONS.count,
            "store_fingerprint": self.dataset.fingerprint,
            "config": config.model_dump(mode="json"),
            "versions": summary.versions(),
        }
        result |= mode.finish(result)
        result = self.ranks.broadcast(result)
        if self.ranks.first:
            checkpoint.write_json(config.out / checkpoint.SUMMARY, result)
        self.watchers.finish(result)
        return result

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up a checkpoint: parameters, optimizer, best model, cursor."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.best_model, self.spent_before = saved["best_model"], saved["spent"]
        self.mode.compressed.load(saved.get("compressed"), self.mode.device)
        self.state = RunState.of(saved)


def environment(mode: Mode) -> dict[str, Any]:
    """What a checkpoint was taken with. A resumed run goes on to the bit where all is the same again; see
    `ooc.training.open_run.check_environment`."""
    return {
        "device": mode.device.type,
        "threads": torch.get_num_threads(),
        "dropout_stream": STREAM,
        "world_size": mode.ranks.world_size,
        "of_a_rank": {name: getattr(mode.config, name) for name in mode.config.of_a_rank},
        "store_fingerprint": mode.dataset.fingerprint,
        "model_fingerprint": checkpoint.fingerprint(mode.model.state_dict()),
    }

"""What every training run has, whatever its batches are: its cursor, its checkpoints, its account."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ooc.config.base import RunConfig
from ooc.runtime.memory import MemoryMeter
from ooc.training import checkpoint, summary
from ooc.training.state import RunState
from ooc.training.watchers import Watchers
from stores.dataset import Dataset

SUMMARY = "summary.json"
MODEL = "model.pt"
CHECKPOINT_SPACING = 20
"""By default so many times what a checkpoint took lies between two: at most a twentieth of the time is theirs ..."""
CHECKPOINT_SECONDS = 2.0
"""... and come no more often than this."""


@dataclass(kw_only=True)
class Run:
    """A composed run, whatever it trains on: see `ooc.training.node_run.Job`, and `ooc.training.temporal_run.TemporalRun`."""

    config: RunConfig
    dataset: Dataset
    device: torch.device
    model: nn.Module
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
        self._tick: float | None = None  # while the clock of the training steps runs
        self._saved_at, self._save_seconds = time.monotonic(), 0.0
        self._saved_cursor: tuple[Any, ...] = ()

    @property
    def steps_left(self) -> int:
        """Batches until `max_steps`; a very large number without it."""
        return (self.config.max_steps or 1 << 62) - self.state.total_steps

    @property
    def out_of_patience(self) -> bool:
        return self.config.patience is not None and self.state.stale >= self.config.patience

    @contextmanager
    def training(self) -> Iterator[None]:
        """With the clock of the training steps running."""
        self._tick = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._account()
        self._tick = None

    def _account(self) -> None:
        """Book the time since the last booking as training."""
        if self._tick is not None:
            now = time.perf_counter()
            self._spent["train_seconds"] += now - self._tick
            self._tick = now

    def book(self, name: str, began: float) -> None:
        """Count the seconds since `began` (of `time.perf_counter`) to those of `name` in the run's account."""
        self._spent[name] += time.perf_counter() - began

    def end_step(self, loss: float) -> None:
        """Log a batch and move the cursor behind it."""
        state = self.state
        self.log.write({"epoch": state.epoch, "step": state.total_steps, "loss": loss})
        self.watchers.step(state.epoch, state.step, state.total_steps, loss)
        state.step += 1
        state.total_steps += 1
        state.loss_sum += loss
        self._spent["steps"] += 1

    def judge(self, value: float | None) -> bool:
        """Whether the model is the best so far, by a score of which more is better; then it is kept."""
        state = self.state
        better = value is not None and (state.best_score is None or value > state.best_score)
        if better:
            state.best_score, state.best_epoch, state.stale = value, state.epoch, 0
            self.best_model = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        else:
            state.stale += 1
        return better

    def end_epoch(self, more: dict[str, Any]) -> None:
        """Log an epoch, with what else there is to say of it, and move the cursor to the next."""
        state = self.state
        line: dict[str, Any] = {"epoch": state.epoch, "steps": state.step, "train_loss": state.loss_sum / max(state.step, 1)}
        line |= more
        self.log.write(line)
        self.watchers.epoch(line)
        state.epoch, state.step, state.loss_sum = state.epoch + 1, 0, 0.0

    def checkpoint_if_due(self, epoch_end: bool = False) -> None:
        """At a step's end: take a checkpoint where one is due; after Ctrl-C take one and raise KeyboardInterrupt."""
        every = self.config.checkpoint_every
        if every is not None:
            due = epoch_end or self.state.step % every == 0
        else:
            interval = max(CHECKPOINT_SECONDS, CHECKPOINT_SPACING * self._save_seconds)
            due = time.monotonic() - self._saved_at >= interval
        if due or self.interrupted:
            self.checkpoint()
        if self.interrupted:
            raise KeyboardInterrupt

    def checkpoint(self) -> None:
        """Save everything a resumed run needs, atomically; not twice at one cursor."""
        cursor = self._cursor()
        if cursor == self._saved_cursor:
            return
        self._account()
        began = time.perf_counter()
        checkpoint.save(
            self.config.out,
            {
                "state": asdict(self.state),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "best_model": self.best_model,
                "metrics_bytes": self.log.sync(),
                "spent": self.spent(),
                **self._kept(),
                **environment(self.device, self.dataset, self.model),
            },
        )
        self._commit()
        self._save_seconds = time.perf_counter() - began
        self._spent["checkpoint_seconds"] += self._save_seconds
        self._saved_at, self._saved_cursor = time.monotonic(), cursor
        self._tick = None if self._tick is None else time.perf_counter()

    def _cursor(self) -> tuple[Any, ...]:
        """Where a checkpoint stands."""
        return self.state.epoch, self.state.step

    def _kept(self) -> dict[str, Any]:
        """What else a checkpoint holds."""
        raise NotImplementedError

    def _commit(self) -> None:
        """The checkpoint is saved: rows on disk as they are belong to it."""

    def spent(self) -> dict[str, Any]:
        """Seconds, bytes and rows up to now, earlier processes included."""
        now = {**self._spent, "peak_rss_bytes": self.meter.peak, "peak_cuda_bytes": self.meter.cuda_peak, **self._read()}
        return summary.add(self.spent_before, now)

    def _read(self) -> dict[str, Any]:
        """Bytes and rows, by the names of `summary.COUNTS`, and "stages"."""
        raise NotImplementedError

    def worked(self, stages: summary.Stages) -> summary.Stages:
        """The times of a training pipeline's stages, with the model's work on the batch it had last: the loop does not ask for
        another one, so the pipeline misses it."""
        if "consumer" in stages:
            seconds = max(0.0, self._spent["train_seconds"] - stages["consumer"]["wait_s"])
            stages["consumer"] |= {"work_s": seconds, "busy_s": seconds}
        return stages

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the memory of a stretch of the run for the summary."""
        with MemoryMeter(name) as meter:
            yield
        self._spent["memory"].append(meter.reading.asdict())

    def result(self, steps_per_epoch: int, batch_size: int) -> dict[str, Any]:
        """What summary.json says of every run."""
        state, config = self.state, self.config
        return {
            "best_epoch": state.best_epoch,
            "epochs": state.epoch,
            "total_steps": state.total_steps,
            **summary.summarize(self.spent(), steps_per_epoch, batch_size),
            "memory_budget_bytes": config.memory_bytes,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "store_fingerprint": self.dataset.fingerprint,
            "config": config.model_dump(mode="json"),
            "versions": summary.versions(),
        }

    def take_best(self) -> None:
        """The best model so far, where one was judged, becomes the run's, and is written."""
        if self.best_model is not None:
            self.model.load_state_dict(self.best_model)
        checkpoint.save(self.config.out, {"model": self.model.state_dict()}, MODEL)

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up a checkpoint: parameters, optimizer, best model, cursor."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.best_model, self.spent_before = saved["best_model"], saved["spent"]
        self.state = RunState(**saved["state"])

    def close(self) -> None:
        """Give back what the run has opened beside the store and its log; idempotent."""


def environment(device: torch.device, dataset: Dataset, model: nn.Module) -> dict[str, Any]:
    """What must be the same again for a resumed run to go on to the bit."""
    return {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "world_size": 1,
        "store_fingerprint": dataset.fingerprint,
        "model_fingerprint": checkpoint.fingerprint(model.state_dict()),
    }

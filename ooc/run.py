"""A run and its state: what the loop of `ooc.train` works with, its checkpoints and its results."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ooc import checkpoint, summary
from ooc.config import TrainConfig
from ooc.epochs import BatchLoader
from ooc.evaluate import evaluate
from ooc.exact import ExactScores
from ooc.halo import Halo
from ooc.loaders import NeighborLoader
from ooc.memory import MemoryMeter
from ooc.metrics import DEFAULT_MONITOR, Loss
from ooc.progress import Watchers
from ooc.refresh import Refresh
from ooc.trace import write_trace
from ooc.user_models import forward_batch
from stores.dataset import Dataset
from stores.rows import ArrayRows

SUMMARY = "summary.json"
MODEL = "model.pt"
SWEEP = "sweep"
"""folder of a sweep's rows while there is one"""
CHECKPOINT_SHARE = 20
"""By default checkpoints take at most a twentieth of the time ..."""
CHECKPOINT_SECONDS = 2.0
"""... and come no more often than this."""


@dataclass
class State:
    """Where a run stands: with model, optimizer and scaler all that a checkpoint holds."""

    epoch: int = 0
    step: int = 0
    """batches done in this epoch"""
    total_steps: int = 0
    loss_sum: float = 0.0
    """of this epoch's steps"""
    best_score: float | None = None
    best_epoch: int | None = None
    stale: int = 0
    """evaluations since the best one"""


@dataclass
class Job:
    """A composed run (see `ooc.compose`)."""

    config: TrainConfig
    dataset: Dataset
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loss: Loss
    loader: BatchLoader
    evaluators: dict[str, NeighborLoader]
    log: checkpoint.MetricsLog
    watchers: Watchers
    meter: MemoryMeter
    state: State = field(default_factory=State)
    best_model: dict[str, Tensor] | None = None
    spent_before: dict[str, Any] = field(default_factory=summary.nothing_spent)
    """by earlier processes of this run, up to the checkpoint"""
    halo: Halo | None = None
    """of the mode "history" """
    refresh: Refresh | None = None
    """the one under way"""
    exact: ExactScores | None = None
    """scores by sweeps, where they are configured"""
    interrupted: bool = False

    def __post_init__(self) -> None:
        self._spent = {**summary.nothing_spent(), "processes": 1}
        self._tick: float | None = None  # while the clock of the training steps runs
        self._saved_at, self._save_seconds = time.monotonic(), 0.0
        self._saved_cursor: tuple[int, int, int | None] = (-1, -1, None)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.loader)

    @property
    def seeds_per_step(self) -> int:
        """On average, where batches are made of parts."""
        sampled = self.config.mode == "sampled"
        return self.config.batch_size if sampled else -(-self.dataset.num_nodes // self.steps_per_epoch)

    @property
    def row_bytes(self) -> int:
        """Of a row of features on disk; 0 where they are in memory."""
        x = self.loader.work.x
        return 0 if x is None or isinstance(x, ArrayRows) else x.row_bytes

    @property
    def steps_left(self) -> int:
        """Batches until `max_steps`; a very large number without it."""
        return (self.config.max_steps or 1 << 62) - self.state.total_steps

    @property
    def out_of_patience(self) -> bool:
        return self.config.patience is not None and self.state.stale >= self.config.patience

    @property
    def monitor(self) -> str:
        return self.config.monitor or DEFAULT_MONITOR[str(self.dataset.task)]

    @contextmanager
    def batches(self) -> Iterator[Iterator[Any]]:
        """The batches from the cursor to the epoch's end, with the clock running from the first request to the last step."""
        if self.state.step >= self.steps_per_epoch:  # a checkpoint between an epoch's last step and its evaluation
            yield iter(())
            return
        self.loader.load_state_dict({"epoch": self.state.epoch, "step": self.state.step})
        self.loader.stop_before(self.state.step + self.steps_left)
        self._tick = time.perf_counter()
        with closing(iter(self.loader)) as batches:
            yield batches
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

    def forward(self, batch: Any) -> Tensor:
        """The model's rows for the batch's seeds."""
        keep_little = self.config.activation_checkpointing
        if self.halo is not None:
            return self.halo.forward(self.model, batch, keep_little)
        return forward_batch(self.model, batch, checkpoint=keep_little)

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

    def validate(self) -> dict[str, float | None] | None:
        """Scores on validation, and the best model so far with them; None where there is no such split."""
        state, scores = self.state, self.score(self.config.val_split, self.state.epoch)
        if scores is None:
            return None
        value = scores[self.monitor]
        value = None if value is None else (-value if self.monitor == "loss" else value)
        if value is not None and (state.best_score is None or value > state.best_score):
            state.best_score, state.best_epoch, state.stale = value, state.epoch, 0
            self.best_model = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        else:
            state.stale += 1
        return scores

    def score(self, split: str, epoch: int) -> dict[str, float | None] | None:
        """Scores of a split with the draws of `epoch`, None where the store has none of that name."""
        began = time.perf_counter()
        if self.exact is not None:
            scores = self.exact.score(split) if split in self.exact.splits else None
            self.book("evaluate_seconds", began)
            return scores
        loader = self.evaluators.get(split)
        if loader is None:
            return None
        scores = evaluate(
            self.model,
            loader,
            str(self.dataset.task),
            self.dataset.num_classes or 2,
            loader.num_seeds,
            epoch=epoch,
            device=self.device,
            precision=self.config.precision,
        )
        self.book("evaluate_seconds", began)
        return scores

    def end_epoch(self, scores: dict[str, float | None] | None, histories: dict[str, Any] | None = None) -> None:
        """Log an epoch, with what befell its histories, and move the cursor to the next."""
        state = self.state
        line: dict[str, Any] = {"epoch": state.epoch, "steps": state.step, "train_loss": state.loss_sum / max(state.step, 1)}
        if scores is not None:
            line |= {"val": scores, "best": state.best_epoch == state.epoch}
        line |= histories or {}
        self.log.write(line)
        self.watchers.epoch(line)
        state.epoch, state.step, state.loss_sum = state.epoch + 1, 0, 0.0

    def checkpoint_if_due(self, epoch_end: bool = False) -> None:
        """At a step's end: take a checkpoint where one is due; after Ctrl-C take one and raise KeyboardInterrupt."""
        every = self.config.checkpoint_every
        if every is not None:
            due = epoch_end or self.state.step % every == 0
        else:
            interval = max(CHECKPOINT_SECONDS, CHECKPOINT_SHARE * self._save_seconds)
            due = time.monotonic() - self._saved_at >= interval
        if due or self.interrupted:
            self.checkpoint()
        if self.interrupted:
            raise KeyboardInterrupt

    def checkpoint(self) -> None:
        """Save everything a resumed run needs, atomically; not twice at one cursor, nor inside a group of batches."""
        under_way = None if self.refresh is None else self.refresh.notes
        cursor = (self.state.epoch, self.state.step, under_way)
        cut = self.state.step % self.config.accumulate != 0 and self.state.step < self.steps_per_epoch
        if cut or cursor == self._saved_cursor:
            return
        self._account()
        began = time.perf_counter()
        checkpoint.save(
            self.config.out,
            {
                "state": asdict(self.state),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "best_model": self.best_model,
                "metrics_bytes": self.log.sync(),
                "spent": self.spent(),
                "halo": None if self.halo is None else self.halo.state(),
                "refresh": None if self.refresh is None else asdict(self.refresh),
                **environment(self.device, self.dataset, self.model),
            },
        )
        if self.halo is not None:
            self.halo.commit()
        self._save_seconds = time.perf_counter() - began
        self._spent["checkpoint_seconds"] += self._save_seconds
        self._saved_at, self._saved_cursor = time.monotonic(), cursor
        self._tick = None if self._tick is None else time.perf_counter()

    def spent(self) -> dict[str, Any]:
        """Seconds, bytes and rows up to now, earlier processes included."""
        stages = self.loader.times()
        if "consumer" in stages:  # the loop does not ask for a batch after the last, so the pipeline misses that one's work
            worked = max(0.0, self._spent["train_seconds"] - stages["consumer"]["wait_s"])
            stages["consumer"] |= {"work_s": worked, "busy_s": worked}
        now = {
            **self._spent,
            "peak_rss_bytes": self.meter.peak,
            "peak_cuda_bytes": self.meter.cuda_peak,
            "bytes_read": self.loader.bytes_read,
            "edge_bytes_read": self.loader.topology_bytes_read,
            "rows_read": self.loader.rows_read,
            "rows_asked": self.loader.rows_asked,
            "stages": stages,
            **(self.halo.spent() if self.halo is not None else {}),
        }
        return summary.add(self.spent_before, now)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the memory of a stretch of the run for the summary."""
        with MemoryMeter(name) as meter:
            yield
        self._spent["memory"].append(meter.reading.asdict())

    def finish(self) -> dict[str, Any]:
        """Score the splits at the best model on validation, and write the model and the summary."""
        config, state = self.config, self.state
        epoch = (
            state.epoch if state.best_epoch is None else state.best_epoch
        )  # with its draws, validation scores as it did then
        if self.best_model is not None:
            self.model.load_state_dict(self.best_model)
        checkpoint.save(config.out, {"model": self.model.state_dict()}, MODEL)
        with self.measure("scoring"):
            found = {split: self.score(split, epoch) for split in config.eval_splits}
        metrics = {split: scores for split, scores in found.items() if scores is not None}
        spent = self.spent()
        result = {
            "metrics": metrics,
            "monitor": self.monitor,
            "best_epoch": state.best_epoch,
            "epochs": state.epoch,
            "total_steps": state.total_steps,
            **summary.summarize(spent, self.steps_per_epoch, self.seeds_per_step),
            "histories": summary.histories(spent),
            "sweeps": None if self.exact is None else {"read": self.exact.bytes_read, "written": self.exact.bytes_written},
            "plan": summary.account(spent, self.steps_per_epoch, self.row_bytes, checkpoint.read_plan(config.out)),
            "memory_budget_bytes": config.memory_bytes,
            "budget": asdict(self.loader.budget),
            "reading": self.dataset.reading("x"),
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "store_fingerprint": self.dataset.fingerprint,
            "config": config.model_dump(mode="json"),
            "versions": summary.versions(),
        }
        if self.exact is not None:
            self.exact.close(keep=False)
        write_trace(config.out, self.loader.spans())
        checkpoint.write_json(config.out / SUMMARY, result)
        return result


def environment(device: torch.device, dataset: Dataset, model: nn.Module) -> dict[str, Any]:
    """What must be the same again for a resumed run to go on to the bit."""
    return {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "world_size": 1,
        "store_fingerprint": dataset.fingerprint,
        "model_fingerprint": checkpoint.fingerprint(model.state_dict()),
    }

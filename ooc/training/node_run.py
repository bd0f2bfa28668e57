"""A run on nodes: what the loop of `ooc.training.node_loop` works with, its scores and its results."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.config.nodes import NodeConfig, TrainConfig
from ooc.history.halo import Halo
from ooc.history.refresh import Refresh
from ooc.layerwise.scores import ExactScores
from ooc.loading.base import BatchLoader
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.subgraph_loaders import SaintLoader
from ooc.metrics.nodes import DEFAULT_MONITOR, Loss
from ooc.models.user import forward_batch
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.trace import write_trace
from ooc.training import checkpoint, summary
from ooc.training.evaluate import evaluate
from ooc.training.run import SUMMARY, Run
from stores.arrays.rows import ArrayRows

SWEEP = "sweep"
"""folder of a sweep's rows while there is one"""


@dataclass(kw_only=True)
class NodeRun(Run):
    """A composed run on nodes, of batches of them (`Job`) or of all at once (`ooc.training.full_run`)."""

    config: NodeConfig
    loss: Loss
    exact: ExactScores | None = None
    """scores by sweeps, where they are configured"""

    @property
    def monitor(self) -> str:
        return self.config.monitor or DEFAULT_MONITOR[str(self.dataset.task)]

    def score(self, split: str, epoch: int) -> dict[str, float | None] | None:
        """Scores of a split with the draws of `epoch`, None where the store has none of that name."""
        raise NotImplementedError

    def score_exactly(self, split: str) -> dict[str, float | None] | None:
        """The same by a sweep over all nodes."""
        assert self.exact is not None, "scores by sweeps are configured"
        began = time.perf_counter()
        scores = self.exact.score(split) if split in self.exact.splits else None
        self.book("evaluate_seconds", began)
        return scores

    def validate(self) -> dict[str, float | None] | None:
        """Scores on validation, and the best model so far with them; None where there is no such split."""
        scores = self.score(self.config.val_split, self.state.epoch)
        if scores is None:
            return None
        value = scores[self.monitor]
        self.judge(None if value is None else (-value if self.monitor == "loss" else value))
        return scores

    def final_scores(self) -> dict[str, Any]:
        """Take the best model, write it, and score its splits."""
        state = self.state
        epoch = state.epoch if state.best_epoch is None else state.best_epoch  # with its draws, validation scores as then
        self.take_best()
        with self.measure("scoring"):
            found = {split: self.score(split, epoch) for split in self.config.eval_splits}
        return {split: scores for split, scores in found.items() if scores is not None}

    def end_nodes(self, scores: dict[str, float | None] | None, more: dict[str, Any] | None = None) -> None:
        """Log an epoch, with its scores and what else befell it, and move the cursor to the next."""
        scored = {} if scores is None else {"val": scores, "best": self.state.best_epoch == self.state.epoch}
        self.end_epoch(scored | (more or {}))


@dataclass(kw_only=True)
class Job(NodeRun):
    """A composed run on batches (see `ooc.training.compose`)."""

    config: TrainConfig
    budget: MemoryPlan
    scaler: torch.amp.GradScaler
    loader: BatchLoader
    evaluators: dict[str, NeighborLoader]
    halo: Halo | None = None
    """of the mode "history" """
    refresh: Refresh | None = None
    """the one under way, or done behind this epoch's last step"""

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

    @contextmanager
    def batches(self) -> Iterator[Iterator[Any]]:
        """The batches from the cursor to the epoch's end, with the clock running from the first request to the last step."""
        if self.state.step >= self.steps_per_epoch:  # a checkpoint between an epoch's last step and its evaluation
            yield iter(())
            return
        if self.exact is not None:
            self.exact.make_room()
        if self.halo is not None:
            self.halo.begin_epoch()
        self.loader.load_state_dict({"epoch": self.state.epoch, "step": self.state.step})
        self.loader.stop_before(self.state.step + self.steps_left)
        with closing(iter(self.loader)) as batches, self.training():
            yield batches

    def forward(self, batch: Any) -> Tensor:
        """The model's rows for the batch's seeds."""
        keep_little = self.config.activation_checkpointing
        if self.halo is not None:
            return self.halo.forward(self.model, batch, keep_little)
        return forward_batch(self.model, batch, checkpoint=keep_little)

    def score(self, split: str, epoch: int) -> dict[str, float | None] | None:
        """Scores of a split with the draws of `epoch`, None where the store has none of that name."""
        if self.exact is not None:
            if self.halo is not None:
                self.halo.make_room()
            return self.score_exactly(split)
        began = time.perf_counter()
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

    def end_nodes(self, scores: dict[str, float | None] | None, more: dict[str, Any] | None = None) -> None:
        super().end_nodes(scores, more)
        self.refresh = None

    def checkpoint(self) -> None:
        """Save everything a resumed run needs, atomically; not twice at one cursor, nor inside a group of batches."""
        if self.state.step % self.config.accumulate == 0 or self.state.step >= self.steps_per_epoch:
            super().checkpoint()

    def _cursor(self) -> tuple[Any, ...]:
        return (*super()._cursor(), None if self.refresh is None else self.refresh.notes)

    def _kept(self) -> dict[str, Any]:
        return {
            "scaler": self.scaler.state_dict(),
            "halo": None if self.halo is None else self.halo.state(),
            "refresh": None if self.refresh is None else asdict(self.refresh),
        }

    def _commit(self) -> None:
        if self.halo is not None:
            self.halo.commit()

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up a checkpoint: with what every run has, the scaler, and a refresh under way."""
        super().restore(saved)
        self.scaler.load_state_dict(saved["scaler"])
        self.refresh = None if saved.get("refresh") is None else Refresh(**saved["refresh"])

    def _read(self) -> dict[str, Any]:
        return {
            "bytes_read": self.loader.bytes_read,
            "edge_bytes_read": self.loader.topology_bytes_read,
            "rows_read": self.loader.rows_read,
            "rows_asked": self.loader.rows_asked,
            "stages": self.worked(self.loader.times()),
            **(self.halo.spent() if self.halo is not None else {}),
        }

    def finish(self) -> dict[str, Any]:
        """Score the splits at the best model on validation, and write the model and the summary."""
        config, metrics = self.config, self.final_scores()
        spent = self.spent()
        result = {
            "metrics": metrics,
            "monitor": self.monitor,
            **self.result(self.steps_per_epoch, self.seeds_per_step),
            "histories": summary.histories(spent),
            "sweeps": None if self.exact is None else {"read": self.exact.bytes_read, "written": self.exact.bytes_written},
            "plan": summary.account(spent, self.steps_per_epoch, self.row_bytes, checkpoint.read_plan(config.out)),
            "budget": asdict(self.loader.budget),
            "reading": self.dataset.reading("x"),
        }
        if self.exact is not None:
            self.exact.close(keep=False)
        write_trace(config.out, self.loader.spans())
        checkpoint.write_json(config.out / SUMMARY, result)
        return result

    def close(self) -> None:
        """End what works in the background, and give back what the loaders hold; idempotent."""
        if self.halo is not None:
            self.halo.close()
        if isinstance(self.loader, SaintLoader):
            self.loader.close()
        if self.exact is not None:
            self.exact.close()

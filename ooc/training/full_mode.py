"""The mode "full": a step's gradient is that of all labelled nodes of the training split, and a step is an epoch."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ooc.config.base import RunConfig
from ooc.config.full import FullConfig
from ooc.fullgraph.ir import Program, TensorPlacement
from ooc.fullgraph.placement.step_plan import StepPlan
from ooc.fullgraph.step import FullGraph
from ooc.history.history import Growth
from ooc.metrics.nodes import Loss
from ooc.runtime.clock import write_trace
from ooc.runtime.memory import keep_large_blocks, return_freed
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.messages import Pace
from ooc.training import checkpoint
from ooc.training.build import model_bytes
from ooc.training.full_placement import FOLDER, asked_of, place, scores_beside
from ooc.training.mode import RunContext, Scores
from ooc.training.node_mode import EXACT_FOLDER, NodeMode
from ooc.training.run_state import RunState
from ooc.training.tasks import labels_of, make_loss
from stores.dataset import Dataset
from stores.errors import ConfigError
from stores.sizes import format_bytes


class SplitLoss:
    """The loss of a split's labelled nodes, a few rows at a time: what they add to the mean over all of them.

    >>> SplitLoss(loss, ds, "train")(8192, logits)  # of nodes 8192, 8193, ...: [n, C]; None where none of them counts
    """

    def __init__(self, loss: Loss, dataset: Dataset, split: str) -> None:
        self._loss, self._dataset, self._members = loss, dataset, dataset.members(split)
        self.total = sum(loss.weight(labels) for labels in labels_of(dataset, split))
        if not self.total:
            raise ConfigError(f"split {split!r} of {dataset.path} has no known label: nothing to train on")

    def __call__(self, first: int, logits: Tensor) -> Tensor | None:
        node = np.arange(first, first + len(logits))
        at = np.flatnonzero(self._members.contains(node))
        if not len(at):
            return None
        labels: Any = self._dataset.labels
        known = torch.from_numpy(np.asarray(labels[node[at]]))
        if not self._loss.weight(known):
            return None
        return self._loss.part(logits[torch.from_numpy(at)], known) / self.total


@dataclass(frozen=True)
class FullPlan:
    """What exact training would take: the values and ops of a step, and the plan of one."""

    program: Program
    step: StepPlan

    def asdict(self) -> dict[str, Any]:
        """The step's plan as plain values."""
        return self.step.asdict()


class FullMode(NodeMode):
    """Exact training on the whole graph; see `Mode`. On a GPU only where --device asks for it."""

    config: FullConfig
    auto_device = "cpu"
    plans_disk = True
    steps_per_epoch = 1

    def __init__(self, config: FullConfig, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.budget = plan_memory(dataset, model_bytes(config, self.model))
        self.split_loss = SplitLoss(make_loss(config, dataset, self.task, self.device), dataset, config.train_split)
        self.model.train()
        self.full = FullGraph(self.model, dataset, config.out / FOLDER, budget=self.budget, engine=self.engine)
        self.plan: StepPlan | None = None
        """as predicted before the first step"""
        self.seconds: list[float] = []
        """of every step of this process"""

    @property
    def seeds_per_step(self) -> int:
        return self.dataset.num_nodes

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        """See `Mode`; places the values of a step."""
        self.run, config, full = run, self.config, self.full
        keep_large_blocks(True)  # as steps do: their ops are timed
        self.plan = place(config, full, config.out, self.split_loss)
        self.exact = scores_beside(full, config.out / EXACT_FOLDER, self.engine)
        beside = self.exact.memory_bytes
        self._both_fit = beside is not None and full.most_bytes + beside <= full.room
        """whether memory has room for what steps and scores keep at once"""
        if self.plan is not None:
            planned = {**self.plan.asdict(), "asked": asked_of(config, full)}
            checkpoint.write_json(config.out / checkpoint.PLAN, planned)
            peak = format_bytes(self.plan.peak[0])
            run.watchers.note(f"plan: an epoch takes {self.plan.seconds:.3g} s, values and sums {peak} of memory")

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """One: the whole graph."""
        yield None

    def loss(self, batch: Any) -> Tensor:
        """A step has its own backward."""
        raise NotImplementedError

    def step(self, batch: Any, share: int) -> Tensor:
        """One exact step."""
        assert self.exact is not None
        if not self._both_fit:
            self.exact.make_room()
        pace = Pace(self.run.watchers.note)

        def progress(what: str, done: int, total: int) -> None:
            pace(what, done, total, "edges" if what == "edges" else "nodes")
            if self.run.interrupted:
                raise KeyboardInterrupt

        began = time.perf_counter()
        loss = self.full.step(self.split_loss, progress)
        self.seconds.append(time.perf_counter() - began)
        return torch.tensor(loss)

    def is_scored(self, epoch: int, steps_left: int) -> bool:
        """Also where `max_steps` ends the run."""
        return steps_left <= 0 or super().is_scored(epoch, steps_left)

    def score(self, split: str, epoch: int) -> Scores | None:
        assert self.exact is not None
        if not self._both_fit:
            if self.exact.beside:
                self.full.trim()
            else:
                self.full.make_room()
        return_freed()
        return super().score(split, epoch)

    def state(self, cursor: RunState) -> dict[str, Any]:
        """Nothing: a step ends before a checkpoint."""
        return {}

    def counts(self) -> dict[str, Any]:
        return {"bytes_read": self.full.traffic.bytes_read, "stages": {}}

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        traffic = self.full.traffic
        found = {
            **super().finish(result),
            "full": {
                "bytes_read": traffic.bytes_read,
                "bytes_written": traffic.bytes_written,
                "step_seconds": self.seconds,
                "op_seconds": traffic.seconds,
                "ops": traffic.ops,
                "busy_seconds": traffic.busy(),
            },
            **self._compared(),
        }
        self.full.discard()
        write_trace(self.config.out, traffic.spans(), traffic.samples)
        return found

    def _compared(self) -> dict[str, Any]:
        """What was predicted of this process's steps, beside what they took."""
        traffic, steps = self.full.traffic, len(self.seconds)
        if self.plan is None or not steps:
            return {}
        read, written = self.plan.moved(TensorPlacement.DISK)
        predicted = {
            "seconds_per_epoch": self.plan.seconds,
            "value_bytes": self.plan.peak[0],
            "bytes_read": steps * read,
            "bytes_written": steps * written,
        }
        actual = {
            "seconds_per_epoch": statistics.median(self.seconds),
            "value_bytes": max((sample.memory for sample in traffic.samples), default=0),
            "bytes_read": traffic.bytes_read,
            "bytes_written": traffic.bytes_written,
        }
        return {"plan": {"predicted": predicted, "actual": actual, "advice": None}}

    @classmethod
    def planned(cls, config: RunConfig) -> RunConfig:
        return config.model_copy(update={"plan": True})

    def predict(self, seconds: float, variants: bool) -> FullPlan:
        """See `Mode`; made by `open`."""
        assert self.plan is not None, "`planned` has a plan made"
        return FullPlan(self.full.program, self.plan)

    def close(self) -> None:
        self.full.close()
        super().close()

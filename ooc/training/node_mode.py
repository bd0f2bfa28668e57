"""What modes on nodes share: the task, labels by split and the loss, the model, scores by split."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from ooc.config.nodes import NodeConfig
from ooc.history.history import Growth
from ooc.layerwise.scores import ExactScores
from ooc.metrics.nodes import DEFAULT_MONITOR, Loss, class_weights, metric_names, out_channels
from ooc.models.pyg_models import degree_histogram
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.build import make_model
from ooc.training.mode import Mode, RunState, Scores

EXACT_FOLDER = "sweep"
"""of the rows of exact scores, in the run's directory"""
LABELS_AT_ONCE = 2**18


class NodeMode(Mode):
    """Training on the nodes of a split; see `Mode`. exact: exact scores, where they are configured; best_scores: of the best
    model on validation, if this process has chosen it."""

    config: NodeConfig
    exact: ExactScores | None = None
    best_scores: Scores | None = None

    def __init__(self, config: NodeConfig, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.task = check_task(config, dataset)
        self.classes = dataset.num_classes or 2
        self.model = self._make_model()
        self.monitor = config.monitor or DEFAULT_MONITOR[self.task]

    def _make_model(self) -> torch.nn.Module:
        channels = out_channels(self.task, self.classes)
        degrees = partial(degree_histogram, self.dataset.graph)
        return make_model(self.config, self.dataset.num_features, channels, degrees).to(self.device)

    @property
    def batch_budget(self) -> MemoryPlan:
        """What is left for batches, and all else."""
        return self.budget

    def notes(self) -> list[str]:
        """The memory, and how features are read."""
        memory = [] if self.config.memory is None else [str(self.batch_budget)]
        return [*memory, f"features are read: {self.dataset.reading('x')}"]

    def score(self, split: str, epoch: int) -> Scores | None:
        """Scores of a split with the draws of `epoch`, None where the store has none of that name."""
        assert self.exact is not None, "exact scores are configured"
        return self.exact.score(split) if split in self.exact.splits else None

    def evaluate(self) -> dict[str, Any]:
        """See `Mode`; {"val": scores, "best": whether they are the best so far}."""
        scores = self.score(self.config.val_split, self.run.state.epoch)
        if scores is None:
            return {}
        best = self.run.judge(scores)
        if best:
            self.best_scores = scores
        return {"val": scores, "best": best}

    def final_scores(self) -> dict[str, Scores]:
        """Of `eval_splits`, with the draws that chose the model; validation's are known, if this process chose it."""
        state = self.run.state
        epoch = state.epoch if state.best_epoch is None else state.best_epoch
        with self.run.measure("scoring"), self.run.booked("evaluate_seconds"):
            known = {} if self.best_scores is None else {self.config.val_split: self.best_scores}
            found = {split: known[split] if split in known else self.score(split, epoch) for split in self.config.eval_splits}
        return {split: scores for split, scores in found.items() if scores is not None}

    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        """See `Mode`: with the next epoch, as batches are others now."""
        state = RunState.next_epoch(saved)
        return saved | {"state": asdict(state), "refresh": None}, Growth(touched, state.epoch)

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        stats = None if self.exact is None else self.exact.stats
        moved = None if stats is None else {"read": stats.bytes_read, "written": stats.bytes_written}
        if self.exact is not None:
            self.exact.close(keep=False)
        about = {"reading": self.dataset.reading("x"), "class_names": self.dataset.class_names}
        return {"sweeps": moved, "budget": asdict(self.batch_budget), **about}


def check_task(config: NodeConfig, dataset: Dataset) -> str:
    """The store's task. Raises ConfigError where the store cannot be trained on, or not so."""
    task, splits = dataset.task, ", ".join(dataset.splits) or "none"
    if task is None:
        raise ConfigError(f"{config.store} holds no labels to train on: ingest it with `label` or `labels`")
    if not dataset.num_features:
        raise ConfigError(f"{config.store} holds no features to train on: ingest it with `features` or `x_cols`")
    if config.train_split not in dataset.splits:
        raise ConfigError(f"{config.store} has no split {config.train_split!r} to train on (it has: {splits})")
    if not len(dataset.members(config.train_split)):
        raise ConfigError(f"split {config.train_split!r} of {config.store} is empty: nothing to train on")
    unknown = sorted({config.val_split, *config.eval_splits} - {"val", "test", "train"} - set(dataset.splits))
    if unknown:
        raise ConfigError(f"{config.store} has no split {unknown[0]!r} (it has: {splits})")
    if config.monitor is not None and config.monitor not in metric_names(task):
        raise ConfigError(
            f"monitor = {config.monitor!r} is no metric of a {task} task: use one of {', '.join(metric_names(task))}"
        )
    if config.patience is not None and config.val_split not in dataset.splits:
        raise ConfigError(f"patience needs a validation split, and {config.store} has no {config.val_split!r}: leave it out")
    return task


def labels_of(dataset: Dataset, split: str) -> Iterator[torch.Tensor]:
    """Labels of a split's nodes, [k] or [k, C], a piece at a time."""
    labels, members = dataset.labels, dataset.members(split)
    assert labels is not None
    for start in range(0, len(members), LABELS_AT_ONCE):
        node = members[np.arange(start, min(start + LABELS_AT_ONCE, len(members)))]
        yield torch.from_numpy(np.asarray(labels[node]))


def make_loss(config: NodeConfig, dataset: Dataset, task: str, device: torch.device) -> Loss:
    """The task's loss with class weights from the training split's labels."""
    weights = class_weights(config.class_weights, task, dataset.num_classes or 2, labels_of(dataset, config.train_split))
    return Loss(task, None if weights is None else weights.to(device), config.label_smoothing)

"""What labels ask of a model, whether they are of nodes, edges or graphs: its outputs, loss and scores."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from ooc.config.base import changed
from ooc.config.labels import LabelConfig
from ooc.metrics import nodes as classes
from ooc.metrics.losses import LabelLoss
from ooc.metrics.numbers import SCORES, LossName, RegressionLoss, RegressionScores
from ooc.runtime.ranks import Ranks
from ooc.stores.errors import ConfigError
from ooc.stores.labels import Task

LOWER_IS_BETTER = frozenset(("loss", "mse", "mae", "rmse"))
"""scores of which less is better; of all others more is"""
_OF_CLASSES = ("label_smoothing", "class_weights")
_OF_TARGETS = ("loss", "huber_delta")
"""settings of labels that are classes, or numbers"""


class Labelled(Protocol):
    """What has labels: a data set, its manifest, or the nodes or edges of a type."""

    @property
    def task(self) -> Task | None: ...
    @property
    def num_classes(self) -> int | None: ...


class LabelScores(Protocol):
    """Scores that are collected batch by batch."""

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch: outputs [b, channels], labels [b] or [b, channels]."""

    def merge(self, ranks: Ranks) -> None:
        """Add what the other ranks have collected."""

    def compute(self) -> dict[str, float | None]:
        """Return every score by name, None if it is undefined."""


@dataclass(frozen=True)
class LabelTask:
    """What is learned of labels.

    kind: "multiclass", "binary" or "multilabel" (classes; see `ooc.metrics.nodes`) or "regression" (numbers; see
    `ooc.metrics.numbers`). num_classes: classes, label columns, or targets. loss_name, huber_delta: of a regression.

    >>> task = LabelTask.of(ds)
    >>> model = GraphSAGE(ds.num_features, 64, 2, task.channels)
    >>> loss = task.loss()(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])
    """

    kind: Task
    num_classes: int
    loss_name: LossName = "mse"
    huber_delta: float = 1.0

    @classmethod
    def of(cls, labelled: Labelled, config: LabelConfig | None = None) -> Self:
        """Return the task of labels, with the loss that `config` sets.

        Raises:
            ConfigError: If there are no labels, or a setting or the monitor does not apply to them.
        """
        kind = labelled.task
        if kind is None:
            raise ConfigError("there are no labels to learn: ingest them with `label` or `labels`")
        count = labelled.num_classes or (1 if kind == "regression" else 2)
        if config is None:
            return cls(kind, count)
        _refuse_settings_of_others(kind, config)
        task = cls(kind, count, "mse" if config.loss == "auto" else config.loss, config.huber_delta)
        if config.monitor is not None and config.monitor not in task.metric_names:
            raise ConfigError(
                f"monitor = {config.monitor!r} is no metric of a {kind} task: use one of {', '.join(task.metric_names)}"
            )
        return task

    @property
    def channels(self) -> int:
        """Outputs of the model for each row: one for a binary task, else one per class, label column or target."""
        return classes.out_channels(self.kind, self.num_classes)

    @property
    def metric_names(self) -> list[str]:
        """Names of the scores, each of which can be monitored."""
        return list(SCORES) if self.kind == "regression" else classes.metric_names(self.kind)

    @property
    def monitor(self) -> str:
        """The score that selects the best model where nothing else is configured."""
        return "rmse" if self.kind == "regression" else classes.DEFAULT_MONITOR[self.kind]

    @property
    def unknown(self) -> float:
        """The label of what has none."""
        return float("nan") if self.kind == "regression" else -1

    def loss(
        self, config: LabelConfig | None = None, labels: Iterable[Tensor] = (), device: torch.device | str = "cpu"
    ) -> LabelLoss:
        """Return the training loss.

        Args:
            config: Label smoothing and class weights.
            labels: Of the training split, in pieces [k] or [k, C], which class_weights="balanced" counts.
            device: Where the outputs are.
        """
        if self.kind == "regression":
            return RegressionLoss(self.loss_name, self.huber_delta)
        if config is None:
            return classes.Loss(self.kind)
        weights = classes.class_weights(config.class_weights, self.kind, self.num_classes, labels)
        return classes.Loss(self.kind, None if weights is None else weights.to(device), config.label_smoothing)

    def scores(self, count: int, device: torch.device | str = "cpu") -> LabelScores:
        """Return an empty collection of the task's scores, for `count` rows to come."""
        if self.kind == "regression":
            return RegressionScores(self.num_classes, RegressionLoss(self.loss_name, self.huber_delta), device)
        return classes.Scores(self.kind, self.num_classes, count, device)


def _refuse_settings_of_others(kind: Task, config: LabelConfig) -> None:
    """Raise ConfigError for a setting of classes where labels are numbers, or the other way round."""
    numbers = kind == "regression"
    whose, labels = ("classes", "targets of a regression") if numbers else ("targets of a regression", kind)
    for name in changed(config, *(_OF_CLASSES if numbers else _OF_TARGETS)):
        raise ConfigError(f"{name} = {getattr(config, name)!r} is for {whose}, and the labels are {labels}: leave it out")

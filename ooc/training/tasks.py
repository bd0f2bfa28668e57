"""What a run on nodes is to learn: the store's task, its labels by split, and the loss."""

from collections.abc import Iterator

import numpy as np
import torch

from ooc.config.nodes import NodeConfig
from ooc.metrics.nodes import Loss, class_weights, metric_names
from stores.dataset import Dataset
from stores.errors import ConfigError

_LABELS_AT_ONCE = 2**18


def check_task(config: NodeConfig, dataset: Dataset) -> str:
    """The store's task. Raises ConfigError where the store cannot be trained on, or not so."""
    task, splits = dataset.task, ", ".join(dataset.splits) or "none"
    if task is None:
        raise ConfigError(f"{config.store} holds no labels to train on: ingest it with --label or --labels")
    if not dataset.num_features:
        raise ConfigError(f"{config.store} holds no features to train on: ingest it with --features x=FILE")
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
    for start in range(0, len(members), _LABELS_AT_ONCE):
        node = members[np.arange(start, min(start + _LABELS_AT_ONCE, len(members)))]
        yield torch.from_numpy(np.asarray(labels[node]))


def make_loss(config: NodeConfig, dataset: Dataset, task: str, device: torch.device) -> Loss:
    """The task's loss with class weights from the training split's labels."""
    weights = class_weights(config.class_weights, task, dataset.num_classes or 2, labels_of(dataset, config.train_split))
    return Loss(task, None if weights is None else weights.to(device), config.label_smoothing)

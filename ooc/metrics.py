"""Losses and scores by task: torchmetrics for the scores, torch's functional losses for training.

Tasks: "multiclass" (labels int64[b], logits [b, C]), "binary" (labels [b], logits [b, 1]) and "multilabel" (labels and
logits [b, C]). A label below 0 or NaN is unknown, and counts neither in the loss nor in the scores.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryF1Score,
    BinaryPrecision,
    BinaryRecall,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
    MultilabelAccuracy,
    MultilabelAUROC,
    MultilabelAveragePrecision,
    MultilabelF1Score,
    MultilabelPrecision,
    MultilabelRecall,
)

from stores.errors import ConfigError

EXACT_SCORES = 1 << 25
"""Up to so many predicted numbers the ranking metrics keep them all (128 MiB); beyond, they count in `BINS` thresholds."""
BINS = 1000

DEFAULT_MONITOR = {"multiclass": "accuracy", "binary": "auroc", "multilabel": "auroc"}

_FAMILIES: dict[str, dict[str, Callable[..., Metric]]] = {
    "multiclass": {
        "accuracy": MulticlassAccuracy,
        "precision": MulticlassPrecision,
        "recall": MulticlassRecall,
        "f1": MulticlassF1Score,
        "auroc": MulticlassAUROC,
        "average_precision": MulticlassAveragePrecision,
    },
    "multilabel": {
        "accuracy": MultilabelAccuracy,
        "precision": MultilabelPrecision,
        "recall": MultilabelRecall,
        "f1": MultilabelF1Score,
        "auroc": MultilabelAUROC,
        "average_precision": MultilabelAveragePrecision,
    },
    "binary": {
        "accuracy": BinaryAccuracy,
        "precision": BinaryPrecision,
        "recall": BinaryRecall,
        "f1": BinaryF1Score,
        "auroc": BinaryAUROC,
        "average_precision": BinaryAveragePrecision,
    },
}
_AVERAGED = ("precision", "recall", "f1")


def metric_names(task: str) -> list[str]:
    """What `Scores` reports for a task; each can be monitored.

    >>> metric_names("binary")
    ['loss', 'accuracy', 'precision', 'recall', 'f1', 'auroc', 'average_precision']
    """
    if task == "binary":
        return ["loss", *_FAMILIES[task]]
    averaged = [f"{name}_{average}" for name in _AVERAGED for average in ("macro", "micro")]
    return ["loss", "accuracy", *averaged, "auroc", "average_precision"]


def out_channels(task: str, num_classes: int) -> int:
    """Logits a node: one for a binary task, else one a class or label."""
    return 1 if task == "binary" else num_classes


def known_labels(labels: Tensor) -> Tensor:
    """bool, of the labels' shape: which are known (neither negative nor NaN)."""
    return labels >= 0


class Loss:
    """The training loss of a task, over known labels alone: cross entropy, or binary cross entropy on logits.

    class_weights: float32[C] or None: of the classes, or of the positives of each label (binary: one number).

    >>> float(Loss("multiclass")(torch.zeros(4, 2), torch.tensor([0, 1, 1, -1])))
    0.6931471824645996
    """

    def __init__(self, task: str, class_weights: Tensor | None = None, label_smoothing: float = 0.0) -> None:
        if task not in _FAMILIES:
            raise ConfigError(f"no loss for the task {task!r}: it must be one of {', '.join(_FAMILIES)}")
        self.task, self.class_weights, self.label_smoothing = task, class_weights, label_smoothing

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, known = logits.float(), known_labels(labels)
        if self.task == "multiclass":
            if not known.any():
                return logits.sum() * 0.0
            smooth = self.label_smoothing
            return F.cross_entropy(logits[known], labels[known].long(), self.class_weights, label_smoothing=smooth)
        logits = logits.view(labels.shape)
        target = torch.where(known, labels, 0).to(logits.dtype)
        target = target * (1 - self.label_smoothing) + self.label_smoothing / 2
        each = F.binary_cross_entropy_with_logits(logits, target, pos_weight=self.class_weights, reduction="none")
        return torch.where(known, each, 0).sum() / known.sum().clamp(min=1)


def class_weights(setting: str | list[float], task: str, num_classes: int, labels: Tensor) -> Tensor | None:
    """float32 weights from the setting "none", "balanced" or a list, for the known `labels` of the training split.

    "balanced" gives every class the same total (multi-class), or the positives of a label the total of its negatives.
    Raises ConfigError where a list's length does not fit.
    """
    channels = out_channels(task, num_classes)
    if setting == "none":
        return None
    if isinstance(setting, list):
        if len(setting) != channels:
            raise ConfigError(f"class_weights has {len(setting)} numbers, the {task} task needs {channels}")
        return torch.tensor(setting, dtype=torch.float32)
    known = known_labels(labels)
    if task == "multiclass":
        counts = torch.bincount(labels[known].long(), minlength=num_classes).double()
        weights = torch.where(counts > 0, counts.sum() / (num_classes * counts.clamp(min=1)), 1.0)
    else:
        labels, known = labels.view(-1, channels), known.view(-1, channels)
        positive = ((labels > 0) & known).sum(0).double()
        weights = torch.where(positive > 0, (known.sum(0) - positive) / positive.clamp(min=1), 1.0)
    return weights.float()


def _metrics(task: str, num_classes: int, thresholds: int | None) -> MetricCollection:
    sizes: dict[str, Any] = {}
    if task != "binary":
        sizes["num_classes" if task == "multiclass" else "num_labels"] = num_classes
    if task == "multilabel":
        sizes["ignore_index"] = -1  # the others drop unknown labels before
    family, chosen = _FAMILIES[task], {}
    for name, metric in family.items():
        if name in ("auroc", "average_precision"):
            chosen[name] = metric(**sizes, thresholds=thresholds, validate_args=False)
        elif task == "binary":
            chosen[name] = metric(validate_args=False)
        elif name == "accuracy":  # of nodes, or of single labels
            chosen[name] = metric(**sizes, average="micro", validate_args=False)
        else:
            for average in ("macro", "micro"):
                chosen[f"{name}_{average}"] = metric(**sizes, average=average, validate_args=False)
    return MetricCollection(dict(chosen))


class Scores:
    """Scores of a task, gathered batch by batch: loss, accuracy, precision, recall, F1, AUROC, average precision.

    count: seeds to come; it decides whether ranking metrics are exact or binned (see EXACT_SCORES).

    >>> scores = Scores("binary", 2, count=2)
    >>> scores.update(torch.tensor([[2.0], [-1.0]]), torch.tensor([1, 0]))
    >>> scores.compute()["auroc"]
    1.0
    """

    def __init__(self, task: str, num_classes: int, count: int, device: torch.device | str = "cpu") -> None:
        self.task, self._channels = task, out_channels(task, num_classes)
        exact = count * self._channels <= EXACT_SCORES
        self._metrics = _metrics(task, num_classes, None if exact else BINS).to(device)
        self._loss, self._loss_sum, self._known = Loss(task), 0.0, 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """logits [b, C] (binary: [b, 1]), labels [b] or [b, C]."""
        logits, known = logits.float(), known_labels(labels)
        count = int(known.sum())
        if not count:
            return
        self._loss_sum += float(self._loss(logits, labels)) * count
        self._known += count
        if self.task == "multiclass":
            self._metrics.update(logits[known].softmax(1), labels[known].long())
        elif self.task == "binary":
            self._metrics.update(logits.view(-1)[known.view(-1)].sigmoid(), labels.view(-1)[known.view(-1)].long())
        else:
            self._metrics.update(logits.sigmoid(), torch.where(known, labels, -1).long())

    def compute(self) -> dict[str, float | None]:
        """Every score by name, None where it is undefined (no known label, or NaN)."""
        if not self._known:
            return dict.fromkeys(metric_names(self.task))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes absent from a split: torchmetrics leaves them out of the mean
            values = {name: float(value) for name, value in self._metrics.compute().items()}
        values["loss"] = self._loss_sum / self._known
        return {name: values[name] if values[name] == values[name] else None for name in metric_names(self.task)}

"""Losses and scores of classes by task.

The labels may be of nodes, edges or graphs; `ooc.metrics.tasks` has the loss and scores of any labels. Tasks are "multiclass"
(labels int64[b], logits [b, C]), "binary" (labels [b], logits [b, 1]) and "multilabel" (labels and logits [b, C]). Labels below
0 or NaN are unknown and count neither in the loss nor in the scores.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.metrics.class_scores import ClassCounts, ExactRanking
from ooc.metrics.losses import LabelLoss
from ooc.runtime.determinism import order_free
from ooc.runtime.ranks import Ranks
from ooc.stores.errors import ConfigError

EXACT_SCORES = 1 << 22
"""up to this many predicted numbers (16 MiB), ranking metrics are exact; beyond, they use `BINS` bins per class"""
NUMBERS_AT_ONCE = 1 << 18
"""logits that are scored at once, in up to ten arrays of float64"""
BINS = 2048
LINEAR, MOST_ODDS = 16.0, 1e5
"""bins are equally wide from -16 to 16 in log-odds, which separates small probabilities of many classes, and grow beyond it in
proportion, up to 100,000, so that the scores of confident models do not share one bin"""
_UNKNOWN = -1
_OUTER = BINS // 8
"""bins beyond 16, and as many below -16"""

DEFAULT_MONITOR = {"multiclass": "accuracy", "binary": "auroc", "multilabel": "auroc"}

_RANKING = ("auroc", "average_precision")
_AVERAGED = ("precision", "recall", "f1")


def metric_names(task: str) -> list[str]:
    """Names of the scores that `Scores` reports for a task; each can be monitored.

    >>> metric_names("binary")
    ['loss', 'accuracy', 'precision', 'recall', 'f1', 'auroc', 'average_precision']
    """
    if task == "binary":
        return ["loss", "accuracy", *_AVERAGED, *_RANKING]
    averaged = [f"{name}_{average}" for name in _AVERAGED for average in ("macro", "micro")]
    return ["loss", "accuracy", *averaged, *_RANKING]


def out_channels(task: str, num_classes: int) -> int:
    """Number of logits per node: one for a binary task, else one per class or label."""
    return 1 if task == "binary" else num_classes


def known_labels(labels: Tensor) -> Tensor:
    """Return which labels are known (neither negative nor NaN), as bool of their shape."""
    return labels >= 0


class Loss(LabelLoss):
    """The training loss of a task on known labels: cross entropy, or binary cross entropy on logits.

    `class_weights` (float32[C] or None) are those of the classes, or of the positives of each label (binary: one number).
    """

    def __init__(self, task: str, class_weights: Tensor | None = None, label_smoothing: float = 0.0) -> None:
        if task not in DEFAULT_MONITOR:
            raise ConfigError(f"task {task!r} has no loss: use one of {', '.join(DEFAULT_MONITOR)}")
        self.task, self.class_weights, self.label_smoothing = task, class_weights, label_smoothing
        self._weighty = 0 if class_weights is None else int(class_weights.argmax())

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        if self.task != "multiclass":
            return super().__call__(logits, labels, weights)
        known = known_labels(labels)
        if weights is not None:
            return (self._crossed(logits, labels, known, "none") * weights).sum()
        if not len(labels):
            return logits.sum() * 0.0
        some = known.any() if self.class_weights is None else self.weighed(labels) > 0
        # Without a known label that has a weight the mean is 0 / 0: that of any class with a weight, times 0, is 0 and has
        # gradients. The host does not wait.
        return self._crossed(logits, torch.where(some, labels, self._weighty), known | ~some, "mean") * some

    def part(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.task != "multiclass":
            return super().part(logits, labels)
        return self._crossed(logits, labels, known_labels(labels), "sum")

    def weight(self, labels: Tensor) -> float:
        """Weight of these labels in a mean: the number of known ones, weighted by class in multi-class tasks."""
        if self.task != "multiclass" or self.class_weights is None:
            return super().weight(labels)
        known = known_labels(labels)
        return float(self.class_weights.cpu()[labels[known].long()].sum(dtype=torch.float64))

    def weighed(self, labels: Tensor) -> Tensor:
        if self.task != "multiclass" or self.class_weights is None:
            return super().weighed(labels)
        known = known_labels(labels)
        return (self.class_weights[torch.where(known, labels, 0).long()].double() * known).sum()

    def _crossed(self, logits: Tensor, labels: Tensor, known: Tensor, reduction: str) -> Tensor:
        """Cross entropy of the known labels; 0 for the others, where each row has its own."""
        labels = torch.where(known, labels.long(), _UNKNOWN)
        smooth, weights = self.label_smoothing, self.class_weights
        return F.cross_entropy(
            logits.float(), labels, weights, label_smoothing=smooth, reduction=reduction, ignore_index=_UNKNOWN
        )

    def known(self, labels: Tensor) -> Tensor:
        return known_labels(labels)

    def _each(self, logits: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        """Binary cross entropy of every number, in the labels' shape; 0 for unknown labels."""
        logits = logits.view(labels.shape)
        target = torch.where(known, labels, 0).to(logits.dtype)
        target = target * (1 - self.label_smoothing) + self.label_smoothing / 2
        each = F.binary_cross_entropy_with_logits(logits, target, pos_weight=self.class_weights, reduction="none")
        return torch.where(known, each, 0)


def class_weights(setting: str | list[float], task: str, num_classes: int, labels: Iterable[Tensor]) -> Tensor | None:
    """Return float32 weights from the setting "none", "balanced" or a list, for the training split's known labels.

    "balanced" gives every class the same total (multi-class), or the positives of a label the total of its negatives. `labels`
    come in pieces, [k] or [k, C]. Raises ConfigError if a list has the wrong length.
    """
    channels = out_channels(task, num_classes)
    if setting == "none":
        return None
    if isinstance(setting, list):
        if len(setting) != channels:
            raise ConfigError(f"class_weights has {len(setting)} numbers, but the {task} task needs {channels}")
        if task == "multiclass" and not any(setting):
            raise ConfigError("class_weights are all 0: give at least one class a weight")
        return torch.tensor(setting, dtype=torch.float32)
    counts, known_counts = torch.zeros(channels, dtype=torch.int64), torch.zeros(channels, dtype=torch.int64)
    for piece in labels:
        known = known_labels(piece)
        if task == "multiclass":
            counts += torch.bincount(piece[known].long(), minlength=num_classes)
        else:
            counts += ((piece > 0) & known).view(-1, channels).sum(0)
            known_counts += known.view(-1, channels).sum(0)
    positive = counts.double()
    if task == "multiclass":
        weights = torch.where(positive > 0, positive.sum() / (num_classes * positive.clamp(min=1)), 1.0)
    else:
        weights = torch.where(positive > 0, (known_counts - positive) / positive.clamp(min=1), 1.0)
    return weights.float()


class BinnedRanking:
    """AUROC and average precision per class from histograms of log-odds, int64[2, C, BINS], for any number of seeds.

    Scores in one bin count as tied, so a value is off by at most the share of pairs in a common bin.
    """

    def __init__(self, channels: int, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(2, channels, BINS, dtype=torch.int64, device=device)

    def update(self, odds: Tensor, positive: Tensor, known: Tensor) -> None:
        """Add log-odds [b, C], positive and known bool[b, C]."""
        channels = self._counts.shape[1]
        cell = (positive * channels + torch.arange(channels, device=odds.device)) * BINS + bins_of(odds)
        self._counts += torch.bincount(cell[known], minlength=self._counts.numel()).view_as(self._counts)

    def merge(self, ranks: Ranks) -> None:
        """Add what the other ranks have counted."""
        ranks.sum(self._counts)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores, float64[C] each; NaN for a class without positives or without negatives."""
        negative, positive = self._counts.double().flip(2)  # highest scores first
        true, false = positive.cumsum(1), negative.cumsum(1)
        below = false[:, -1:] - false + negative / 2  # ties count half
        total = true[:, -1]
        precision = true / (true + false).clamp(min=1)
        return {
            "auroc": (positive * below).sum(1) / (total * false[:, -1]),
            "average_precision": (positive * precision).sum(1) / total,
        }


def bins_of(odds: Tensor) -> Tensor:
    """The bins of log-odds, int64 of their shape, in ascending order; infinite ones are in the outermost bins, NaN in the
    first.

    >>> bins_of(torch.tensor([-torch.inf, 0.0, 20.0, torch.inf]))
    tensor([   0, 1024, 1798, 2047])
    """
    odds = odds.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    size = odds.abs()
    inner = size * ((BINS // 2 - _OUTER) / LINEAR)
    outer = BINS // 2 - _OUTER + (size / LINEAR).log() * (_OUTER / math.log(MOST_ODDS / LINEAR))
    place = torch.where(size < LINEAR, inner, outer).clamp(max=BINS // 2 - 1)
    return torch.where(odds < 0, BINS // 2 - 1 - place.long(), BINS // 2 + place.long())


def log_odds(logits: Tensor, task: str) -> Tensor:
    """Log-odds of each class or label, [b, C], without passing through probabilities, which round to 0 and 1.

    Those of a class are its logit against the log-sum-exp of the others: log p - log(1 - p), in float64.
    """
    if task != "multiclass":
        return logits
    log_p = logits.double().log_softmax(1)
    best = log_p.argmax(1, keepdim=True)
    others = log_p.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)  # 1 - p of the likeliest would cancel
    rest = torch.log1p(-log_p.exp().clamp(max=0.5))
    return log_p - rest.scatter(1, best, others)


class Scores:
    """Scores of a task, collected batch by batch: loss, accuracy, precision, recall, F1, AUROC, average precision.

    AUROC and average precision are means over the classes (labels) with both positives and negatives. `count` is the number of
    seeds to come, which decides whether ranking metrics are exact or binned (see EXACT_SCORES).
    """

    def __init__(self, task: str, num_classes: int, count: int, device: torch.device | str = "cpu") -> None:
        self.task, self._channels = task, out_channels(task, num_classes)
        self._counts = ClassCounts(task, self._channels, device)
        binned = count * self._channels > EXACT_SCORES
        self._ranking = BinnedRanking(self._channels, device) if binned else ExactRanking(task, self._channels)
        self._loss, self._loss_sum, self._known = Loss(task), 0.0, 0
        self._positives = torch.zeros(self._channels, dtype=torch.int64, device=device)
        self._negatives = torch.zeros_like(self._positives)

    @order_free()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits [b, C] (binary: [b, 1]), labels [b] or [b, C]."""
        logits, known = logits.float(), known_labels(labels)
        count = int(known.sum())
        if not count:
            return
        self._loss_sum += float(self._loss(logits, labels)) * count
        self._known += count
        rows = max(1, NUMBERS_AT_ONCE // self._channels)
        for first in range(0, len(logits), rows):
            piece = slice(first, first + rows)
            if bool(known[piece].any()):
                self._count(logits[piece], labels[piece], known[piece])

    def _count(self, logits: Tensor, labels: Tensor, known: Tensor) -> None:
        """Add a part of a batch, some of whose labels are known, to all scores but the loss."""
        if self.task == "multilabel":
            probability, target = logits.sigmoid(), torch.where(known, labels, -1).long()
            positive = target > 0
        else:
            binary, known = self.task == "binary", known.view(-1)
            logits, target = (logits.view(-1) if binary else logits)[known], labels.view(-1)[known].long()
            probability = logits.sigmoid() if binary else logits.softmax(1)
            positive = (target > 0).view(-1, 1) if binary else F.one_hot(target, self._channels).bool()
            known = torch.ones_like(positive)
        self._positives += (positive & known).sum(0)
        self._negatives += (~positive & known).sum(0)
        self._counts.update(probability, target)
        if isinstance(self._ranking, BinnedRanking):
            self._ranking.update(log_odds(logits, self.task).view_as(positive), positive, known)
        else:
            self._ranking.update(probability, target)

    def merge(self, ranks: Ranks) -> None:
        """Add what the other ranks have collected, so that all have the scores of all batches."""
        sums = torch.tensor([self._loss_sum, self._known], dtype=torch.float64, device=self._positives.device)
        loss, known = ranks.sum(sums).tolist()
        self._loss_sum, self._known = loss, round(known)
        ranks.sum(self._positives)
        ranks.sum(self._negatives)
        self._counts.merge(ranks)
        self._ranking.merge(ranks)

    @order_free()
    def compute(self) -> dict[str, float | None]:
        """Return every score, None if it is undefined (no known label, no class with both kinds, or NaN)."""
        if not self._known:
            return dict.fromkeys(metric_names(self.task))
        values = {name: float(value) for name, value in self._counts.compute().items()}
        both = (self._positives > 0) & (self._negatives > 0)
        values |= {name: float(value[both].mean()) for name, value in self._ranking.compute().items()}
        values["loss"] = self._loss_sum / self._known
        return {name: values[name] if values[name] == values[name] else None for name in metric_names(self.task)}

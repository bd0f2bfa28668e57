"""Scores of predicted classes from counts, and exact ranking scores, batch by batch in torch alone.

torchmetrics has the same scores, which tests compare with these to the bit; but importing it takes 40 MB, and 68 MB with 40 MB
of library pages where SciPy and Matplotlib are installed, and 1.4 s. A run has that memory for batches instead.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.runtime.ranks import Ranks


class ClassCounts:
    """Accuracy, precision, recall and F1 from true and false positives and negatives of every class or label, int64[C].

    In memory of the order of the classes, not of their square.
    """

    def __init__(self, task: str, channels: int, device: torch.device | str = "cpu") -> None:
        self._task = task
        self._true, self._false, self._missed, self._rest = torch.zeros(4, channels, dtype=torch.int64, device=device)

    def update(self, probability: Tensor, target: Tensor) -> None:
        """Add probabilities [n, C] and classes int64[n]; binary: both [n]; multilabel: both [n, C], -1 for an unknown label."""
        if self._task == "multiclass":
            self._update_classes(probability.argmax(1), target)
            return
        predicted = (probability > 0.5).view(len(target), -1)
        target = target.view(len(target), -1)
        self._true += (predicted & (target == 1)).sum(0)
        self._false += (predicted & (target == 0)).sum(0)
        self._missed += (~predicted & (target == 1)).sum(0)
        self._rest += (~predicted & (target == 0)).sum(0)

    def _update_classes(self, predicted: Tensor, target: Tensor) -> None:
        channels = len(self._true)
        true = torch.bincount(target[predicted == target], minlength=channels)
        false = torch.bincount(predicted, minlength=channels) - true
        missed = torch.bincount(target, minlength=channels) - true
        self._true += true
        self._false += false
        self._missed += missed
        self._rest += len(target) - true - false - missed

    def merge(self, ranks: Ranks) -> None:
        """Add what the other ranks have counted."""
        for each in (self._true, self._false, self._missed, self._rest):
            ranks.sum(each)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores, float32 each, means over classes as NAME_macro; 0 where nothing is counted."""
        total = [each.sum() for each in (self._true, self._false, self._missed, self._rest)]
        true, false, missed, rest = total
        right = true if self._task == "multiclass" else true + rest  # what is no class's label is not right or wrong
        found = {"accuracy": _ratio(right, true + missed if self._task == "multiclass" else true + false + missed + rest)}
        if self._task == "binary":
            return found | _rates(true, false, missed)
        each = {f"{name}_macro": self._mean(rate) for name, rate in _rates(self._true, self._false, self._missed).items()}
        return found | each | {f"{name}_micro": rate for name, rate in _rates(true, false, missed).items()}

    def _mean(self, rate: Tensor) -> Tensor:
        """Over the labels, or over the classes that are predicted or true."""
        weight = torch.ones_like(rate)
        if self._task == "multiclass":
            weight = (self._true + self._false + self._missed > 0).float()
        return _ratio(weight * rate, weight.sum()).sum()


def _rates(true: Tensor, false: Tensor, missed: Tensor) -> dict[str, Tensor]:
    """Precision, recall and F1."""
    f1 = _ratio(2.0 * true, 2.0 * true + 1.0 * missed + false)
    return {"precision": _ratio(true, true + false), "recall": _ratio(true, true + missed), "f1": f1}


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole as float32, 0 where the whole is 0."""
    part, whole = part.float(), whole.float()
    return torch.where(whole != 0, part / whole, 0.0)


class ExactRanking:
    """AUROC and average precision per class from all probabilities, which it keeps."""

    def __init__(self, task: str, channels: int) -> None:
        self._task, self._channels = task, channels
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(self, probability: Tensor, target: Tensor) -> None:
        """Add a batch; see `ClassCounts.update`."""
        self._kept.append((probability, target))

    def merge(self, ranks: Ranks) -> None:
        """Take the probabilities of all ranks."""
        if not ranks.alone:
            of_ranks = ranks.gather([(probability.cpu(), target.cpu()) for probability, target in self._kept])
            self._kept = [each for kept in of_ranks for each in kept]

    def compute(self) -> dict[str, Tensor]:
        """Return the scores, float32[C] each, 0 or NaN for a class without positives or without negatives."""
        probability, target = (torch.cat(each) for each in zip(*self._kept, strict=True))
        found: dict[str, list[Tensor]] = {"auroc": [], "average_precision": []}
        for channel in range(self._channels):
            score = probability.view(len(target), -1)[:, channel]
            if self._task == "multiclass":
                positive = target == channel
            else:
                own = target.view(len(target), -1)[:, channel]
                score, positive = score[own >= 0], own[own >= 0] == 1
            true, false = _ranked_counts(score, positive)
            found["auroc"].append(_area(true, false))
            found["average_precision"].append(_average_precision(true, false))
        return {name: torch.stack(each) for name, each in found.items()}


def _ranked_counts(score: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """True and false positives, int64[k], of the rows that score at least each of the k different scores, highest first."""
    order = score.argsort(descending=True)
    score, positive = score[order], positive[order]
    last = F.pad(torch.where(score[1:] != score[:-1])[0], [0, 1], value=len(score) - 1)
    true = positive.long().cumsum(0)[last]
    return true, 1 + last - true


def _area(true: Tensor, false: Tensor) -> Tensor:
    """The area under the curve of true over false positives, by trapezoids."""
    true, false = F.pad(true, [1, 0]), F.pad(false, [1, 0])
    return torch.trapz(true / true[-1], false / false[-1])


def _average_precision(true: Tensor, false: Tensor) -> Tensor:
    """The mean of the precision over the gains of recall; highest scores last, which is the order that it is summed in."""
    precision, recall = (true / (true + false)).flip(0), F.pad((true / true[-1]).flip(0), [0, 1])
    return -((recall[1:] - recall[:-1]) * precision).sum()

"""Loss and scores of a regression: targets [b] or [b, T], outputs [b, T]. NaN is an unknown target and counts nowhere."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.metrics.losses import LabelLoss
from ooc.runtime.ranks import Ranks

NUMBERS_AT_ONCE = 1 << 18
"""outputs that are scored at once, in up to ten arrays of float64"""
SCORES = ["loss", "mse", "mae", "rmse", "r2"]

LossName = Literal["mse", "mae", "huber"]


class RegressionLoss(LabelLoss):
    """Squared error, absolute error, or Huber's: half the squared error up to `delta`, linear beyond.

    >>> RegressionLoss("mae")(torch.tensor([[1.0], [5.0]]), torch.tensor([3.0, torch.nan]))
    tensor(2.)
    """

    def __init__(self, name: LossName = "mse", delta: float = 1.0) -> None:
        self.name, self.delta = name, delta

    def known(self, labels: Tensor) -> Tensor:
        return ~labels.isnan()

    def _each(self, outputs: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        outputs = outputs.view(labels.shape)
        target = torch.where(known, labels, 0).to(outputs.dtype)
        if self.name == "mse":
            each = F.mse_loss(outputs, target, reduction="none")
        elif self.name == "mae":
            each = F.l1_loss(outputs, target, reduction="none")
        else:
            each = F.huber_loss(outputs, target, reduction="none", delta=self.delta)
        return torch.where(known, each, 0)


class DeterminationScore:
    """R2 of each target: 1 - residual / total sum of squares, in float64, batch by batch.

    torchmetrics' counts every row for all targets; here a row counts for the targets that are known. Sums are of targets less
    the first known one, so that a mean far from 0 does not cancel them.
    """

    def __init__(self, targets: int, device: torch.device | str = "cpu") -> None:
        self._count, self._sum, self._square, self._residual = torch.zeros(4, targets, dtype=torch.float64, device=device)
        self._shift = torch.full((targets,), torch.nan, dtype=torch.float64, device=device)

    def update(self, outputs: Tensor, labels: Tensor, known: Tensor) -> None:
        """Add outputs and labels, float64[b, T], where they are known, bool[b, T]."""
        new = self._shift.isnan() & known.any(0)
        if bool(new.any()):
            first = labels.gather(0, known.int().argmax(0)[None])[0]
            self._shift = torch.where(new, first, self._shift)
        moved = torch.where(known, labels - self._shift, 0)
        self._count += known.sum(0)
        self._sum += moved.sum(0)
        self._square += moved.square().sum(0)
        self._residual += torch.where(known, labels - outputs, 0).square().sum(0)

    def merge(self, ranks: Ranks) -> None:
        """Add what the other ranks have collected; sums are moved to the first shift that a rank has."""
        if ranks.alone:
            return
        own = torch.stack([self._shift, self._count, self._sum, self._square, self._residual]).cpu()
        of_ranks = torch.stack(ranks.gather(own))
        shifts = of_ranks[:, 0]
        known = ~shifts.isnan()
        shift = shifts.gather(0, known.int().argmax(0)[None])[0]
        count, total, square, residual = of_ranks[:, 1:].unbind(1)
        moved = torch.where(known, shifts - shift, 0)
        square = square + 2 * moved * total + count * moved.square()
        found = shift, count.sum(0), (total + count * moved).sum(0), square.sum(0), residual.sum(0)
        device = self._shift.device
        self._shift, self._count, self._sum, self._square, self._residual = (each.to(device) for each in found)

    def compute(self) -> float:
        """Return the mean over the targets with two different known values, NaN if there are none."""
        total = self._square - self._sum.square() / self._count.clamp(min=1)
        defined = (self._count > 1) & (total > 0)
        return float((1 - self._residual / total)[defined].mean())


class RegressionScores:
    """Scores of a regression, collected batch by batch in float64: loss, mse, mae, rmse over all known targets; r2.

    With several targets, `r2` is the mean over them, each by its own known rows; the others are over all known numbers, as the
    loss is.
    """

    def __init__(self, targets: int, loss: RegressionLoss, device: torch.device | str = "cpu") -> None:
        self._targets, self._loss, self._loss_sum, self._known = targets, loss, 0.0, 0
        self._squares, self._sizes = torch.zeros(2, dtype=torch.float64, device=device)
        self._r2 = DeterminationScore(targets, device)

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch: outputs [b, T], labels [b] or [b, T]."""
        outputs, labels = outputs.view(-1, self._targets), labels.view(-1, self._targets)
        rows = max(1, NUMBERS_AT_ONCE // self._targets)
        for first in range(0, len(labels), rows):
            self._add(outputs[first : first + rows].float(), labels[first : first + rows])

    def _add(self, outputs: Tensor, labels: Tensor) -> None:
        known = self._loss.known(labels)
        count = int(known.sum())
        if not count:
            return
        self._known += count
        self._loss_sum += float(self._loss.part(outputs, labels))
        outputs, labels = outputs.double(), labels.double()
        error = outputs[known] - labels[known]
        self._squares += (error * error).sum()
        self._sizes += error.abs().sum()
        self._r2.update(outputs, labels, known)

    def merge(self, ranks: Ranks) -> None:
        """Add what the other ranks have collected, so that all have the scores of all batches."""
        sums = torch.tensor([self._loss_sum, self._known], dtype=torch.float64, device=self._squares.device)
        loss, known = ranks.sum(sums).tolist()
        self._loss_sum, self._known = loss, round(known)
        self._squares = ranks.sum(self._squares.clone())
        self._sizes = ranks.sum(self._sizes.clone())
        self._r2.merge(ranks)

    def compute(self) -> dict[str, float | None]:
        """Return every score, None if it is undefined: no known target, none that varies (r2), or no finite number."""
        if not self._known:
            return dict.fromkeys(SCORES)
        values = {"mse": float(self._squares) / self._known, "mae": float(self._sizes) / self._known}
        values |= {"loss": self._loss_sum / self._known, "r2": self._r2.compute()}
        values["rmse"] = math.sqrt(values["mse"]) if values["mse"] >= 0 else math.nan
        return {name: values[name] if math.isfinite(values[name]) else None for name in SCORES}

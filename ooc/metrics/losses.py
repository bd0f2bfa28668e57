"""Losses on labels as a mean over the known ones, of a batch or added up over parts of all rows."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LabelLoss(ABC):
    """A training loss on known labels. `known` says which are; `_each` has the loss of every number."""

    @abstractmethod
    def known(self, labels: Tensor) -> Tensor:
        """Return which labels are known, as bool of their shape."""

    @abstractmethod
    def _each(self, outputs: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        """The loss of every number, in the labels' shape; 0 for unknown labels."""

    def __call__(self, outputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean over known labels, or with weights (float32[n]) the weighted sum of the rows' losses.

        Args:
            outputs: Of the model, [n, channels].
            labels: [n] or [n, channels].
            weights: Of the rows.

        Returns:
            The loss, a float32 scalar with its graph; 0 if no label is known.
        """
        known = self.known(labels)
        each = self._each(outputs.float(), labels, known)
        if weights is None:
            return each.sum() / known.sum().clamp(min=1)
        rows = each.view(len(each), -1).sum(1) / known.view(len(each), -1).sum(1).clamp(min=1)
        return (rows * weights).sum()

    def part(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over the known labels of some rows; divided by the `weight` of all labels, these sum to the mean."""
        return self._each(outputs.float(), labels, self.known(labels)).sum()

    def weighed(self, labels: Tensor) -> Tensor:
        """Return `weight` as a float64 scalar where the labels are; the host does not wait for a GPU."""
        return self.known(labels).sum(dtype=torch.float64)

    def weight(self, labels: Tensor) -> float:
        """Weight of these labels in a mean: the number of known ones."""
        return float(self.known(labels).sum())

"""Losses of scored links: binary cross entropy, BPR, softmax over negatives or all candidates, self-adversarial negatives."""

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.stores.errors import ConfigError

LinkLossName = Literal["bce", "bpr", "softmax", "adversarial"]


class LinkLoss:
    """The training loss of links against negatives.

    "bce" is the binary cross entropy over all scores, true ones 1 and others 0, as in PyG's examples. "bpr" is
    -log sigmoid(positive - negative) (Rendle et al., 2009). "softmax" is the cross entropy of each true score among its
    negatives' (sampled softmax), which all links of a batch may share. "adversarial" is the binary cross entropy of a link
    and of its negatives, weighted by the softmax of their scores, which has no gradient (self-adversarial negatives, Sun et
    al., 2019).

    Args:
        name: Which one.
        population: Of "softmax": how many candidates there are, of which the negatives are a uniform sample. Each negative then
            counts for as many of them, so the loss is near that over all candidates. None: as one.
        margin: Of "adversarial": is added to all scores, as distances need it.
        temperature: Of "adversarial": the scores are multiplied by it before their softmax.

    Raises:
        ConfigError: The name is unknown.

    >>> LinkLoss("bpr")(torch.tensor([2.0]), torch.tensor([[2.0]]))
    tensor(0.6931)
    """

    def __init__(
        self, name: str = "bce", *, population: int | None = None, margin: float = 0.0, temperature: float = 1.0
    ) -> None:
        if name not in get_args(LinkLossName):
            raise ConfigError(f"loss {name!r} is unknown: use one of {', '.join(get_args(LinkLossName))}")
        self.name, self.population, self.margin, self.temperature = name, population, margin, temperature

    def weight(self, links: int, negatives: int) -> float:
        """Return how many terms the mean of so many links and negatives has; in all, those of "bpr" are a negative's."""
        return {"bce": links + negatives, "bpr": negatives}.get(self.name, links)

    def __call__(self, positive: Tensor, negative: Tensor, known: Tensor | None = None) -> Tensor:
        """Return the mean loss.

        Args:
            positive: Scores of true links, [b].
            negative: Scores of their negatives, [b, m]; of "bce" in any shape.
            known: Which of `negative` are true links after all, bool in its shape, and do not count; None for none.

        Returns:
            A scalar; 0 without links.
        """
        positive, negative = positive.float(), negative.float()
        if self.name in ("bce", "bpr"):
            return self._pairwise(positive, negative, known)
        hidden = negative if known is None else negative.masked_fill(known, -torch.inf)
        if self.name == "adversarial":
            return self._adversarial(positive, negative, hidden)
        if self.population is not None and negative.size(-1):
            positive = positive - math.log(self.population / negative.size(-1))  # as if it were added to all negatives
        total: Tensor = _Softmax.apply(positive, hidden)  # type: ignore[no-untyped-call]
        return total / max(1, positive.numel())

    def _pairwise(self, positive: Tensor, negative: Tensor, known: Tensor | None) -> Tensor:
        """The losses that are sums over single scores or pairs of them."""
        counts = torch.ones_like(negative) if known is None else (~known).to(negative.dtype)
        if self.name == "bce":
            total = F.softplus(-positive).sum() + (F.softplus(negative) * counts).sum()
            return total / (positive.numel() + counts.sum()).clamp(min=1)
        each = F.softplus(negative - positive.unsqueeze(-1))
        return (each * counts).sum() / counts.sum().clamp(min=1)

    def _adversarial(self, positive: Tensor, negative: Tensor, hidden: Tensor) -> Tensor:
        """hidden: the negatives' scores, -inf where they do not count."""
        share = (hidden.detach() * self.temperature).softmax(-1).nan_to_num()  # of a link without any that counts: 0
        each = F.softplus(-self.margin - positive) + (share * F.softplus(self.margin + negative)).sum(-1)
        return each.sum() / max(1, 2 * positive.numel())


class _Softmax(torch.autograd.Function):
    """The sum of the cross entropies of scores [b] among those of negatives [b, m], -inf for those that do not count.

    The gradient is made of what the sum needs anyway, in place: most of a step's time is spent on passes over [b, m].
    """

    @staticmethod
    def forward(ctx: Any, positive: Tensor, hidden: Tensor) -> Tensor:
        most = torch.maximum(hidden.amax(-1), positive) if hidden.size(-1) else positive
        share, own = (hidden - most.unsqueeze(-1)).exp_(), (positive - most).exp_()
        total = share.sum(-1).add_(own)
        ctx.save_for_backward(share.div_(total.unsqueeze(-1)), own / total)
        return (total.log() + (most - positive)).sum()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, Tensor]:
        share, own = ctx.saved_tensors
        return (own - 1) * gradient[0], share * gradient[0]


def loss_of_all(scores: Tensor, true: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean cross entropy of the true candidate among all: 1-vs-all, and the prediction of relations.

    Args:
        scores: Of all candidates, [b, m].
        true: Which of them is true, int64[b].
        smoothing: Share of the target that is spread over all candidates (label smoothing).

    Returns:
        A scalar; 0 without links.

    >>> loss_of_all(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor(1.3863)
    """
    total = F.cross_entropy(scores.float(), true, reduction="sum", label_smoothing=smoothing)
    return total / max(1, len(true))

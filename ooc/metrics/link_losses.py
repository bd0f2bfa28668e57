"""Losses of scored links: binary cross entropy, BPR, and softmax over shared negatives."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.stores.errors import ConfigError

LinkLossName = Literal["bce", "bpr", "softmax"]


class LinkLoss:
    """The training loss of links against negatives.

    "bce" is the binary cross entropy over all scores, true ones 1 and others 0, as in PyG's examples. "bpr" is
    -log sigmoid(positive - negative) (Rendle et al., 2009). "softmax" is the cross entropy of each true score among its
    negatives' (sampled softmax), which all links of a batch may share.

    Args:
        name: Which one.

    Raises:
        ConfigError: The name is unknown.

    >>> LinkLoss("bpr")(torch.tensor([2.0]), torch.tensor([[2.0]]))
    tensor(0.6931)
    """

    def __init__(self, name: str = "bce") -> None:
        if name not in get_args(LinkLossName):
            raise ConfigError(f"loss {name!r} is unknown: use one of {', '.join(get_args(LinkLossName))}")
        self.name = name

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
        counts = torch.ones_like(negative) if known is None else (~known).to(negative.dtype)
        if self.name == "bce":
            total = F.softplus(-positive).sum() + (F.softplus(negative) * counts).sum()
            return total / (positive.numel() + counts.sum()).clamp(min=1)
        if self.name == "bpr":
            each = F.softplus(negative - positive.unsqueeze(-1))
            return (each * counts).sum() / counts.sum().clamp(min=1)
        scores = torch.cat([positive.unsqueeze(-1), negative.masked_fill(counts == 0, -torch.inf)], -1)
        return (scores.logsumexp(-1) - positive).sum() / max(1, positive.numel())

"""Scores of link prediction, in the way of the Temporal Graph Benchmark: a true destination against its negatives.

AP and ROC AUC treat every pair alike and are for one negative an event; the rank of the true destination among its own
negatives gives MRR and Hits@k, for any number of them. Ties count half, so a model that says the same of all gains nothing.
(Huang et al., "Temporal Graph Benchmark for Machine Learning on Temporal Graphs", NeurIPS 2023.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

HITS = (1, 3, 10)


class LinkScores:
    """Collects scores batch by batch: logits or probabilities, but of one kind. hits: the k of Hits@k.

    Memory: AP and ROC AUC are exact and keep 16 bytes a pair; ranks keep nothing.

    >>> scores = LinkScores()
    >>> scores.update(positive, negative)  # float[k], float[k, r]
    >>> scores.compute()["mrr"]
    0.5833
    """

    def __init__(self, hits: Sequence[int] = HITS) -> None:
        self._hits = tuple(hits)
        self._ap, self._auroc = BinaryAveragePrecision(), BinaryAUROC()
        self._pairs = False
        self._events = 0
        self._inverse = torch.zeros((), dtype=torch.float64)
        self._within = torch.zeros(len(self._hits), dtype=torch.float64)

    def update(self, positive: Tensor, negative: Tensor) -> None:
        """positive: [k], of the true destinations; negative: [k] or [k, r], of each one's negatives."""
        positive = positive.detach().cpu().double()
        negative = negative.detach().cpu().double().reshape(len(positive), -1)
        above, equal = (negative > positive[:, None]).sum(1), (negative == positive[:, None]).sum(1)
        rank = 1 + above + equal / 2
        self._events += len(positive)
        self._inverse += (1 / rank).sum()
        self._within += torch.stack([(rank <= k).sum() for k in self._hits])
        if negative.size(1) == 1:
            self._pairs = True
            values = torch.cat(
                [positive, negative[:, 0]]
            ).sigmoid()  # in 0..1 whatever they are, else torchmetrics decides by batch
            target = torch.cat([torch.ones(len(positive)), torch.zeros(len(positive))]).long()
            self._ap.update(values, target)
            self._auroc.update(values, target)

    def compute(self) -> dict[str, float]:
        """mrr, hits@k, and with one negative an event ap and auroc; empty before the first event."""
        if not self._events:
            return {}
        found = {"ap": float(self._ap.compute()), "auroc": float(self._auroc.compute())} if self._pairs else {}
        found["mrr"] = float(self._inverse / self._events)
        within = (self._within / self._events).tolist()
        return found | {f"hits@{k}": share for k, share in zip(self._hits, within, strict=True)}

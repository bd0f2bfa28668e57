"""Scores of ranked lists: Recall@k, NDCG@k, Hits@k and MRR of the items that were to be found for each source."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ooc.stores.errors import ConfigError


class RankingScores:
    """Collects ranked lists, source by source; sources with nothing to find do not count.

    recall@k is the share of a source's items that are among its first k, ndcg@k their discounted gain divided by the largest
    possible, hits@k whether one is among them, and mrr the inverse rank of the first, 0 where none is in the list. Each is the
    mean over sources, as LightGCN and others report them.

    Args:
        ks: The values of k.

    Raises:
        ConfigError: A k is not 1 or more.

    >>> scores = RankingScores(ks=[2])
    >>> scores.update(torch.tensor([[4, 7, 1]]), [torch.tensor([7, 9])])
    >>> scores.compute()["recall@2"]
    0.5
    """

    def __init__(self, ks: Sequence[int] = (10, 20, 50)) -> None:
        if not ks or any(k != int(k) or k < 1 for k in ks):
            raise ConfigError(f"ks must be whole numbers of 1 or more, such as [10, 20], not {list(ks)}")
        self.ks = [int(k) for k in ks]
        self._sources = 0
        self._sums = dict.fromkeys((*(f"{kind}@{k}" for kind in ("recall", "ndcg", "hits") for k in self.ks), "mrr"), 0.0)

    def update(self, ranked: Tensor, wanted: Sequence[Tensor]) -> None:
        """Add sources.

        Args:
            ranked: Items of each source from the best on, int64[b, m], m at least the largest k; -1 fills a shorter list.
            wanted: The distinct items to find for each, int64[k_i].
        """
        for row, items in zip(ranked, wanted, strict=True):
            if len(items):
                self._add((torch.isin(row, items.to(row.device)) & (row >= 0)).cpu(), len(items))

    def _add(self, found: Tensor, count: int) -> None:
        gain = found.double() / torch.arange(2, len(found) + 2, dtype=torch.float64).log2()
        best = 1 / torch.arange(2, max(self.ks) + 2, dtype=torch.float64).log2()
        self._sources += 1
        for k in self.ks:
            self._sums[f"recall@{k}"] += float(found[:k].sum()) / count
            self._sums[f"ndcg@{k}"] += float(gain[:k].sum() / best[: min(k, count)].sum())
            self._sums[f"hits@{k}"] += float(found[:k].any())
        if found.any():
            self._sums["mrr"] += 1 / (1 + int(found.int().argmax()))

    def compute(self) -> dict[str, float]:
        """Return the scores; empty without sources."""
        return {name: total / self._sources for name, total in self._sums.items()} if self._sources else {}

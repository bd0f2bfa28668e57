"""Scores of ranked lists: Recall@k, NDCG@k, Hits@k and MRR of the items that were to be found for each source."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
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
        if not ks or any(not isinstance(k, int | np.integer) or k < 1 for k in ks):
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
        count = np.array([len(items) for items in wanted], np.int64)
        if len(ranked) != len(count):
            raise ConfigError(f"there are {len(ranked)} lists and items to find for {len(count)} sources: give as many")
        row, some = ranked.detach().cpu().numpy(), count > 0
        if some.any():
            items = np.concatenate([each.detach().cpu().numpy() for each in wanted])
            of, most = np.repeat(np.arange(len(count)), count), max(int(row.max(initial=0)), int(items.max())) + 1
            found = np.isin(row + np.arange(len(row))[:, None] * most, items + of * most) & (row >= 0)
            self._add(found[some], count[some])

    def _add(self, found: NDArray[np.bool_], count: NDArray[np.int64]) -> None:
        """Add sources, of which `found` [b, m] are the places in their lists of items to find, `count` [b] in all."""
        length = max(*self.ks, found.shape[1])
        gain = 1 / np.log2(np.arange(2, length + 2))
        gained, best = np.cumsum(found * gain[: found.shape[1]], axis=1), np.cumsum(gain)
        self._sources += len(found)
        for k in self.ks:
            inside = found[:, :k]
            self._sum(f"recall@{k}", inside.sum(1) / count)
            self._sum(f"ndcg@{k}", gained[:, :k][:, -1] / best[np.minimum(k, count) - 1])
            self._sum(f"hits@{k}", np.any(inside, axis=1))
        self._sum("mrr", np.any(found, axis=1) / (1 + found.argmax(1)))

    def _sum(self, name: str, value: Any) -> None:
        """Add the sources one after another, so that a sum does not depend on how many are added at once."""
        self._sums[name] = float(np.add.accumulate(np.concatenate([[self._sums[name]], value]))[-1])

    def compute(self) -> dict[str, float]:
        """Return the scores; empty without sources."""
        return {name: total / self._sources for name, total in self._sums.items()} if self._sources else {}

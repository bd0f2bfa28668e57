"""Scores of ranked lists against torchmetrics and plain loops."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.retrieval import retrieval_normalized_dcg

from ooc.metrics.ranking import RankingScores
from ooc.stores.errors import ConfigError


def test_they_are_those_of_loops_and_of_torchmetrics() -> None:
    rng = np.random.default_rng(0)
    items, sources, ks = 40, 30, [1, 5, 20]
    score = rng.random((sources, items))
    ranked = np.argsort(-score, axis=1)
    wanted = [rng.choice(items, rng.integers(0, 12), replace=False) for _ in range(sources)]
    scores = RankingScores(ks)
    for half in (slice(0, 17), slice(17, None)):
        scores.update(torch.from_numpy(ranked[half, :20].copy()), [torch.from_numpy(each) for each in wanted[half]])
    found = scores.compute()
    some = [i for i in range(sources) if len(wanted[i])]
    relevance = np.array([np.isin(np.arange(items), wanted[i]) for i in some])
    for k in ks:
        inside = [set(ranked[i, :k]) & set(wanted[i]) for i in some]
        assert found[f"recall@{k}"] == pytest.approx(
            np.mean([len(a) / len(wanted[i]) for a, i in zip(inside, some, strict=True)])
        )
        assert found[f"hits@{k}"] == pytest.approx(np.mean([bool(each) for each in inside]))
        each = [
            retrieval_normalized_dcg(*map(torch.from_numpy, pair), top_k=k) for pair in zip(score[some], relevance, strict=True)
        ]
        assert found[f"ndcg@{k}"] == pytest.approx(float(np.mean(each)), rel=1e-5)
    ranks = [min([int(np.flatnonzero(ranked[i] == item)[0]) for item in wanted[i]]) for i in some]
    assert found["mrr"] == pytest.approx(np.mean([1 / (rank + 1) if rank < 20 else 0 for rank in ranks]))


def test_short_lists_and_no_sources() -> None:
    scores = RankingScores([3])
    assert scores.compute() == {}
    scores.update(torch.tensor([[2, -1, -1]]), [torch.tensor([2, -1, 5])[:1]])
    assert scores.compute() == {"recall@3": 1, "ndcg@3": 1, "hits@3": 1, "mrr": 1}
    with pytest.raises(ConfigError, match="whole numbers of 1 or more"):
        RankingScores([0])

"""Scores of links against their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.linkscores import LinkScores

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
LEVELS = st.integers(-3, 4)


@LAWS
@given(data=st.data(), ratio=st.integers(1, 6), batches=st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_ranks_count_ties_half(data: st.DataObject, ratio: int, batches: list[int]) -> None:
    scores, ranks = LinkScores(), []
    for size in batches:
        rows = [data.draw(st.lists(LEVELS, min_size=ratio + 1, max_size=ratio + 1)) for _ in range(size)]
        table = torch.tensor(rows, dtype=torch.float32)
        scores.update(table[:, 0], table[:, 1:])
        for own, *others in rows:  # TGB's: between the optimistic and the pessimistic rank
            optimistic, pessimistic = sum(o > own for o in others), sum(o >= own for o in others)
            ranks.append((optimistic + pessimistic) / 2 + 1)
    found = scores.compute()
    assert found["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    for k in (1, 3, 10):
        assert found[f"hits@{k}"] == pytest.approx(np.mean([rank <= k for rank in ranks]))
    assert ("ap" in found) == (ratio == 1)


@LAWS
@given(pairs=st.lists(st.tuples(LEVELS, LEVELS), min_size=1, max_size=30), cut=st.integers(0, 30))
def test_ap_and_auc_are_of_all_pairs_together(pairs: list[tuple[int, int]], cut: int) -> None:
    """However they come in batches, and whether or not all of a batch lie between 0 and 1."""
    scores, table = LinkScores(), torch.tensor(pairs, dtype=torch.float32)
    for part in (table[:cut], table[cut:]):
        if len(part):
            scores.update(part[:, 0], part[:, 1])
    own, other = (np.array(column, float) for column in zip(*pairs, strict=True))
    auc = np.mean((own[:, None] > other) + (own[:, None] == other) / 2)
    found = scores.compute()
    assert found["auroc"] == pytest.approx(auc, abs=1e-6)
    ap, before = 0.0, 0.0
    for level in sorted({*own, *other}, reverse=True):
        recall = np.mean(own >= level)
        ap += (recall - before) * (own >= level).sum() / ((own >= level).sum() + (other >= level).sum())
        before = recall
    assert found["ap"] == pytest.approx(ap, abs=1e-6)


def test_nothing_was_scored() -> None:
    assert LinkScores().compute() == {}

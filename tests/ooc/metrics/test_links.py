"""Scores of links against their definitions."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from ooc.metrics.links import LinkScores
from ooc.stores.errors import OocError
from tests.scale import few

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
LEVELS = st.integers(-3, 4)
SCORES = LEVELS | st.floats(width=32, allow_nan=False) | st.just(-0.0)


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
@given(
    pairs=st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=60),
    cut=st.integers(0, 60),
    max_bytes=st.integers(1, 2000),
)
def test_ap_and_auc_are_of_all_pairs_together(pairs: list[tuple[float, float]], cut: int, max_bytes: int) -> None:
    """However they come in batches, whether or not all of one lie between 0 and 1, and whatever memory there is for them."""
    scores, table = LinkScores(max_bytes=max_bytes), torch.tensor(pairs, dtype=torch.float32)
    for part in (table[:cut], table[cut:]):
        if len(part):
            scores.update(part[:, 0], part[:, 1])
    own, other = (np.array(column, float) for column in zip(*pairs, strict=True))
    auc = np.mean((own[:, None] > other) + (own[:, None] == other) / 2)
    found = scores.compute()
    assert found["auroc"] == pytest.approx(auc, abs=1e-12)
    ap, before = 0.0, 0.0
    for level in sorted({*own, *other}, reverse=True):
        recall = np.mean(own >= level)
        ap += (recall - before) * (own >= level).sum() / ((own >= level).sum() + (other >= level).sum())
        before = recall
    assert found["ap"] == pytest.approx(ap, abs=1e-12)
    assert scores.compute() == found


@pytest.mark.slow
def test_many_pairs_take_the_memory_that_is_given_and_no_more(tmp_path: Path) -> None:
    """Against torchmetrics, which keeps them all; the scores of a quarter are one and the same."""
    rng = np.random.default_rng(0)
    pairs = few(150_000, 300_000)
    own, other = rng.normal(0.5, 1, pairs).astype(np.float32), rng.normal(0, 1, pairs).astype(np.float32)
    own[::4] = other[::5] = 0.25
    small, whole = LinkScores(max_bytes=2**18, folder=tmp_path), LinkScores()
    tracemalloc.start()
    for start in range(0, len(own), 1000):
        small.update(*(torch.from_numpy(each[start : start + 1000]) for each in (own, other)))
    found = small.compute()
    assert tracemalloc.get_traced_memory()[1] < 2 * 2**18 < own.nbytes  # what batches take is in it
    tracemalloc.stop()
    assert not list(tmp_path.iterdir()), "the file has no name"
    whole.update(torch.from_numpy(own), torch.from_numpy(other))
    assert found["ap"] == pytest.approx(whole.compute()["ap"], rel=1e-12)
    values, target = torch.from_numpy(np.concatenate([own, other])).sigmoid(), torch.arange(2 * len(own)) < len(own)
    assert found["ap"] == pytest.approx(float(binary_average_precision(values, target.long())), abs=1e-4)
    assert found["auroc"] == pytest.approx(float(binary_auroc(values, target.long())), abs=1e-4)


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(OocError, match="scored a link with NaN"):
        LinkScores().update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, torch.nan]))


def test_nothing_was_scored() -> None:
    assert LinkScores().compute() == {}

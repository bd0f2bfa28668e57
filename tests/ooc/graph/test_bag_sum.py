"""Sums of bags of rows: those of hubs, by all threads, are embedding_bag's to the bit."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ooc.graph import bag_sum as module
from ooc.graph.bag_sum import bag_sum

BAGS = {
    "between others": [3, 0, 64, 200, 5, 90, 1, 0],
    "first and last": [64, 7, 0, 100],
    "alone": [300],
    "one behind the other": [70, 64, 65],
    "none": [3, 63, 0, 63],
}


def inputs(counts: list[int], width: int, weighted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(index, rows, indptr, value) of bags of so many rows."""
    made = torch.Generator().manual_seed(1)
    indptr = torch.from_numpy(np.cumsum([0, *counts]))
    index = torch.randint(50, (int(indptr[-1]),), generator=made)
    value = torch.rand(len(index), generator=made) if weighted else None
    return index, torch.randn(50, width, generator=made), indptr, value


@pytest.fixture(autouse=True)
def small_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUB_EDGES", 64)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 32, 50, 128])
@pytest.mark.parametrize("counts", BAGS.values(), ids=BAGS)
def test_hubs_are_summed_to_the_bit(counts: list[int], width: int, weighted: bool, threads: int) -> None:
    index, rows, indptr, value = inputs(counts, width, weighted)
    expected = F.embedding_bag(index, rows, indptr, mode="sum", include_last_offset=True, per_sample_weights=value)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(bag_sum(index, rows, indptr, value), expected)
    finally:
        torch.set_num_threads(before)


def test_a_hub_is_shared_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has some of the columns, all of them together each column once."""
    asked: list[tuple[int, int]] = []
    kernel = module._add_scaled_rows
    monkeypatch.setattr(module, "_add_scaled_rows", lambda *args: (asked.append(args[3:5]), kernel(*args)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    bag_sum(*inputs([5, 100], 100, weighted=True))
    assert sorted(asked) == [(0, 32), (32, 64), (64, 100)]


def test_float64_is_summed_by_torch() -> None:
    index, rows, indptr, value = inputs([100, 3], 40, weighted=True)
    assert value is not None
    expected = [(rows.double()[index[a:b]] * value[a:b, None].double()).sum(0) for a, b in pairwise(indptr)]
    torch.testing.assert_close(bag_sum(index, rows.double(), indptr, value), torch.stack(expected))

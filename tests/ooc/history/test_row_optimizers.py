"""Optimizers of rows against torch's, and against loops."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.history.row_optimizers import RowOptimizer, gather_rows, packed_width
from ooc.stores.errors import ConfigError

COUNT, WIDTH = 50, 7


def batches(steps: int, most: int = 200) -> list[Any]:
    rng = np.random.default_rng(3)
    found = []
    for _ in range(steps):
        at = rng.integers(0, COUNT // 2, int(rng.integers(1, most)))
        found.append((at, rng.normal(size=(len(at), WIDTH)).astype(np.float32)))
    return found


def of_torch(kind: Any, **options: Any) -> Any:
    rows = torch.nn.Parameter(torch.linspace(-1, 1, COUNT * WIDTH).view(COUNT, WIDTH).clone())
    optimizer = kind([rows], lr=0.05, **options)
    for at, gradient in batches(6):
        rows.grad = torch.sparse_coo_tensor(torch.from_numpy(at)[None], torch.from_numpy(gradient), (COUNT, WIDTH)).coalesce()
        optimizer.step()
    return rows.detach().numpy()


def ours(name: str) -> Any:
    optimizer = RowOptimizer(name, WIDTH)
    packed = np.zeros((COUNT, optimizer.packed_width), np.float32)
    packed[:, :WIDTH] = np.linspace(-1, 1, COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH)
    for at, gradient in batches(6):
        optimizer.step(packed, at, gradient, 0.05)
    return packed


def test_adagrad_is_torchs() -> None:
    np.testing.assert_allclose(ours("adagrad")[:, :WIDTH], of_torch(torch.optim.Adagrad), rtol=2e-5, atol=1e-6)


def test_adam_is_torchs_sparse_adam() -> None:
    np.testing.assert_allclose(ours("adam")[:, :WIDTH], of_torch(torch.optim.SparseAdam), rtol=2e-5, atol=1e-6)


def test_rowwise_adagrad_is_a_loop() -> None:
    rows, square = np.linspace(-1, 1, COUNT * WIDTH).reshape(COUNT, WIDTH), np.zeros(COUNT)
    for at, gradient in batches(6):
        for row in np.unique(at):
            total = gradient[at == row].astype(np.float64).sum(0)
            square[row] += (total**2).mean()
            rows[row] -= 0.05 * total / (np.sqrt(square[row]) + 1e-10)
    found = ours("rowwise_adagrad")
    np.testing.assert_allclose(found[:, :WIDTH], rows, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[:, WIDTH], square, rtol=1e-4)


@given(st.permutations(range(COUNT)), st.sampled_from(["adagrad", "rowwise_adagrad", "adam"]), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_where_a_row_lies_changes_no_bit(place: list[int], name: str, seed: int) -> None:
    at, rng = np.array(place), np.random.default_rng(seed)
    packed = rng.random((COUNT, packed_width(name, WIDTH)), np.float32)
    elsewhere = np.empty_like(packed)
    elsewhere[at] = packed
    one, other = RowOptimizer(name, WIDTH), RowOptimizer(name, WIDTH)
    for ids, gradient in batches(3):
        one.step(packed, ids, gradient, 0.1)
        other.step(elsewhere, at[ids], gradient, 0.1)
    assert (elsewhere[at] == packed).all()


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam"])
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    rng, threads = np.random.default_rng(0), torch.get_num_threads()
    packed = rng.random((20_000, packed_width(name, WIDTH)), np.float32)
    at, gradient = rng.integers(0, 20_000, 30_000), rng.random((30_000, WIDTH), np.float32)
    found = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            own = packed.copy()
            RowOptimizer(name, WIDTH).step(own, at, gradient, 0.1)
            rows = np.empty((30_000, WIDTH), np.float32)
            gather_rows(own, at, rows)
            assert (rows == own[at, :WIDTH]).all()
            found.append(own)
    finally:
        torch.set_num_threads(threads)
    assert (found[0] == found[1]).all()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="use one of adagrad"):
        RowOptimizer("lion", 4)

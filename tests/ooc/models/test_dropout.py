"""Dropout against its definition and a plain reference of its kernel."""

from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ooc.models.dropout import Dropout, DropoutKeys, dropout
from ooc.runtime import parts
from ooc.runtime.keyed_dropout import LEVELS, drop, drop_rows
from ooc.runtime.keyed_random import Purpose, key, mix
from ooc.runtime.restoring import settings_restored


def number(key: int, position: int) -> int:
    """The number of a position, by plain integers."""
    own = mix((key ^ ((position >> 32) * 0x9E3779B97F4A7C15)) % 2**64)
    h = ((position % 2**32) * 0x9E3779B9 + own % 2**32) % 2**32
    h = (h ^ (h >> 16)) * 0x7FEB352D % 2**32
    h = (h ^ (h >> 15) ^ (own >> 32)) * 0x846CA68B % 2**32
    return h ^ (h >> 16)


@settings(deadline=None)
@given(
    st.integers(0, 2**62 - 1),
    st.integers(0, 100) | st.integers(2**32 - 40, 2**32 + 40) | st.integers(0, 2**50),
    st.integers(0, LEVELS - 1),
    st.integers(0, 70),
)
def test_the_kernel_equals_plain_python(key: int, begin: int, dropped: int, size: int) -> None:
    x = np.linspace(-1, 1, size).astype(np.float32)
    found = np.full(size, np.nan, np.float32)
    drop(np.uint64(key), begin, dropped, np.float32(1.5), x, found)
    kept = [number(key, begin + i) >= dropped for i in range(size)]
    assert found.tolist() == np.where(kept, x * np.float32(1.5), 0).tolist()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.6, 0.999])
def test_the_share_of_zeros_is_p_and_the_mean_is_kept(p: float) -> None:
    torch.manual_seed(0)
    n = 400_000
    out = dropout(torch.ones(n // 8, 8), p, training=True)
    zeros = (out == 0).double()
    assert abs(zeros.mean() - p) < 5 * (p * (1 - p) / n) ** 0.5
    assert torch.allclose(out[out != 0], torch.tensor(1 / (1 - p)), rtol=1e-2)
    assert abs(out.mean() - 1) < 5 * (p / (1 - p) / n) ** 0.5
    deviation = 5 * (p * (1 - p) / (n / 8)) ** 0.5
    assert ((zeros.mean(0) - p).abs() < deviation).all()
    centred = zeros - p
    assert ((centred[:, 1:] * centred[:, :-1]).mean(0).abs() < 5 * p * (1 - p) / (n / 8) ** 0.5).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_drops_the_same(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(parts, "LEAST", 100)
    x, row = np.ones((501, 7), np.float32), np.arange(501)[::-1] * 3
    expected, found = np.empty_like(x), torch.ones(501, 7, requires_grad=True)
    with settings_restored():
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        out = dropout(found, 0.5, True)
        out.sum().backward()
        torch.manual_seed(3)
        stream = np.uint64(int(torch.randint(1 << 62, ())))
        drop(stream, 0, LEVELS // 2, np.float32(2), x.reshape(-1), expected.reshape(-1))
        assert np.array_equal(out.detach().numpy(), expected)
        assert np.array_equal(found.grad.numpy(), expected)
        drop_rows(stream, LEVELS // 2, np.float32(2), row, x, expected)
        draws = DropoutKeys()
        draws.keys["a"] = [int(stream)]
        with draws.part("a", {"sources": row}):
            assert np.array_equal(dropout(torch.ones(501, 7), 0.5, True).numpy(), expected)


def signs(streams: Iterable[int], begin: int, size: int, p: float = 0.5) -> NDArray[np.float64]:
    """[streams, size]: what each stream drops (1) and keeps (-1) at p = 1/2; centred, of variance 1, at any p."""
    found, ones = [], np.ones(size, np.float32)
    for stream in streams:
        out = np.empty(size, np.float32)
        drop(np.uint64(stream), begin, round(p * LEVELS), np.float32(1), ones, out)
        found.append(((out == 0) - p) / (p * (1 - p)) ** 0.5)
    return np.array(found)


def keys_of_calls() -> Iterator[int]:
    """As steps draw them: of two seeds, epochs and steps, three calls each, and keys that differ in a bit."""
    for seed, epoch, step in product(range(2), range(2), range(2)):
        torch.manual_seed(key(seed, Purpose.TORCH, epoch, step) >> 1)
        yield from (int(torch.randint(1 << 62, ())) for _ in range(3))
    yield from (5, 4, 7, 5 + 2**31, 5 + 2**32, 5 + 2**61)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("begin", "p"), [(0, 0.5), (2**32 - 1000, 0.5), (0, 0.1), (12_345, 0.9)])
def test_streams_are_independent_of_each_other_and_of_themselves_some_elements_later(begin: int, p: float) -> None:
    size = 1 << 16
    drawn = signs(keys_of_calls(), begin, size, p)
    for lag in (0, 1, 2, 3, 4, 16, 127, 128, 256, 4096):
        count = size - lag
        correlation = drawn[:, : size - lag] @ drawn[:, lag:].T / count
        if lag == 0:
            np.fill_diagonal(correlation, 0)
        assert abs(correlation).max() < 5.5 / count**0.5, lag


def test_sums_of_rows_and_columns_and_bytes_of_bits_are_as_those_of_fair_coins() -> None:
    (drawn,) = signs([key(3, Purpose.TORCH)], 0, 1 << 20)
    for width in (128, 256, 1000, 1024):
        matrix = drawn[: drawn.size // width * width].reshape(-1, width)
        for axis in (0, 1):
            sums = matrix.sum(axis) / matrix.shape[axis] ** 0.5
            assert abs(sums.var() - 1) < 5 * (2 / len(sums)) ** 0.5
            assert abs(sums).max() < 5.5
    count = np.bincount(np.packbits(drawn > 0), minlength=256)
    expected = drawn.size / 8 / 256
    assert abs(((count - expected) ** 2 / expected).sum() - 255) < 5 * (2 * 255) ** 0.5


def test_a_bit_of_the_position_changes_every_bit_of_the_number_half_of_the_time() -> None:
    rng = np.random.default_rng(0)
    tries = 1500
    stream = [(int(k), int(at)) for k, at in zip(rng.integers(2**62, size=tries), rng.integers(2**34, size=tries), strict=True)]
    numbers = np.array([number(k, at) for k, at in stream], np.uint32)
    for bit in (0, 1, 2, 7, 8, 15, 16, 20, 31, 32, 33):
        others = np.array([number(k, at ^ (1 << bit)) for k, at in stream], np.uint32)
        changed = np.unpackbits((numbers ^ others).view(np.uint8).reshape(-1, 4), axis=1).mean(0)
        assert abs(changed - 0.5).max() < 5.5 * 0.5 / tries**0.5, bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_gradient_passes_where_the_value_does(dtype: torch.dtype) -> None:
    x = torch.ones(9, 5, dtype=dtype, requires_grad=True)
    out = dropout(x, 0.5, training=True)
    out.sum().backward()
    assert out.dtype == dtype
    assert torch.equal(x.grad, out.detach())


def test_what_is_dropped_passes_no_gradient_infinite_ones_either_and_nothing_is_kept() -> None:
    kept: list[torch.Tensor] = []
    x = torch.randn(40, 6).t().requires_grad_()  # not contiguous
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: None):
        out = dropout(x, 0.5, training=True)
    assert kept == []
    out.backward(torch.full_like(out, torch.inf))
    assert torch.equal(x.grad, torch.where(out == 0, 0, torch.inf))


def test_the_gradient_has_a_gradient() -> None:
    x = torch.ones(50, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.5, training=True)
    (first,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 6 * out.detach() ** 3)  # x is one, so out is the factor


def test_the_seed_decides_and_draws_differ() -> None:
    x = torch.ones(1000)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5, True), dropout(x, 0.5, True)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(x, 0.5, True))
    assert not torch.equal(first, second)


def test_nothing_is_dropped_in_evaluation_or_at_zero() -> None:
    x = torch.ones(5)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0, training=True) is x


def test_the_module_drops_in_training_only() -> None:
    module, x = Dropout(0.3), torch.ones(50, 8)
    torch.manual_seed(3)
    found = module(x)
    torch.manual_seed(3)
    assert torch.equal(found, dropout(x, 0.3, training=True))
    assert module.eval()(x) is x
    assert repr(module) == "Dropout(p=0.3)"

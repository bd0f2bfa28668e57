"""Dropout against its definition and a plain reference of its kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.models.dropout import LEVELS, Dropout, drop, dropout
from ooc.runtime.keyed_random import mix


@settings(deadline=None)
@given(st.integers(0, 2**62 - 1), st.integers(0, LEVELS), st.integers(0, 70))
def test_the_kernel_equals_plain_python(key: int, dropped: int, size: int) -> None:
    x = np.linspace(-1, 1, size).astype(np.float32)
    found = np.full(size, np.nan, np.float32)
    drop(np.uint64(key), dropped, np.float32(1.5), x, found)
    words = [mix((key + word * 0x9E3779B97F4A7C15) % 2**64) for word in range(size // 4 + 1)]
    kept = [(words[i // 4] >> 16 * (i % 4)) % LEVELS >= dropped for i in range(size)]
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

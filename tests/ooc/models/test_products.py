"""Products by our own kernel: the sums that they say they are, whatever the pieces, the threads and the shapes."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.models import products
from ooc.models.memory_efficient import sum_of_products
from ooc.runtime.restoring import settings_restored

ROWS, WIDE, FEW = 2 * products.ROWS_AT_ONCE + 77, 4 * products.COLUMNS_AT_ONCE + 40, 8


def fused(a: float, b: float, c: np.float32) -> np.float32:
    """a * b + c, rounded once: the product of two float32 is exact in float64, and the extended sum nearly so."""
    return np.float32(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))


def in_runs(a: NDArray[np.float32], b: NDArray[np.float32], start: np.float32) -> np.float32:
    """start + the sum of a[k] * b[k], as the kernel says it adds up."""
    run = len(a) // 2 if products.RUN < len(a) < 2 * products.RUN else products.RUN
    for first in range(0, len(a), run):
        own = np.float32(0)
        for x, y in zip(a[first : first + run], b[first : first + run], strict=True):
            own = fused(x, y, own)
        start = np.float32(start + own)
    return start


@pytest.mark.parametrize("depth", [1, 100, 192, 193, 300, 384, 500])
@pytest.mark.parametrize("columns", [3, 64, 100])
def test_a_product_is_a_fused_sum_in_runs(depth: int, columns: int) -> None:
    """Shapes that tiles do not divide; the left factor as it lies, and transposed."""
    numbers = np.random.default_rng(depth)
    a, b, before = (numbers.standard_normal(size, np.float32) for size in ((7, depth), (depth, columns), (7, columns)))
    found = []
    for left in (a, np.ascontiguousarray(a.T).T):
        out = before.copy()
        products.add_product(left, b, out)
        found.append(out)
    assert np.array_equal(*found)
    assert np.allclose(found[0], before + a.astype(np.float64) @ b, atol=1e-4)
    for i, j in ((0, 0), (3, columns // 2), (6, columns - 1)):
        assert found[0][i, j] == in_runs(a[i], b[:, j], before[i, j])


def outputs(bias: Tensor, *pairs: Tensor) -> list[Tensor]:
    """The sum of products, and the gradients of all that want one."""
    out = sum_of_products(bias, *pairs)
    torch.manual_seed(9)
    wanted = [each for each in (bias, *pairs) if each.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * torch.randn_like(out)).sum(), wanted)]


@pytest.mark.parametrize("few", [False, True])
def test_products_in_pieces_have_the_bits_of_one_thread_and_torch_s_values(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns that pieces do not divide evenly, and products beside them that are too small."""
    torch.manual_seed(0)
    monkeypatch.setattr(products, "LEAST_PRODUCT", 2**20)
    x, y, z = torch.randn(ROWS, 120), torch.randn(ROWS, 100, requires_grad=True), torch.randn(ROWS, FEW)
    bias, *weights = (torch.randn(WIDE, *size).requires_grad_() for size in ((), (120,), (100,), (FEW,)))
    pairs = (x, weights[0], z, weights[2]) if few else (x, weights[0], y, weights[1])
    found = []
    with settings_restored():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(outputs(bias, *pairs))
        monkeypatch.setattr(products, "LEAST_PRODUCT", 2**62)
        by_torch = outputs(bias, *pairs)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(found[0], by_torch, strict=True))


def test_products_have_the_type_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not torch's default one."""
    monkeypatch.setattr(products, "LEAST_PRODUCT", 1)
    x, weight, bias = torch.randn(9, 5).requires_grad_(), torch.randn(7, 5).requires_grad_(), torch.randn(7).requires_grad_()
    torch.set_default_dtype(torch.float64)
    try:
        found = torch.autograd.grad(sum_of_products(bias, x, weight).sum(), [x, bias, weight])
        assert {each.dtype for each in (sum_of_products(bias, x, weight), *found)} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


def test_input_gradients_are_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_PRODUCT", 2**20)
    rows, matrix, out = torch.randn(ROWS, 100), torch.randn(100, WIDE), torch.randn(ROWS, WIDE)
    wanted = out.double() + rows.double() @ matrix.double()
    products.add_mapped(rows, matrix, out)
    assert torch.allclose(out.double(), wanted, atol=1e-4)
    assert torch.allclose(products.mapped(rows, matrix).double(), rows.double() @ matrix.double(), atol=1e-4)

"""Products in pieces, by either library: the values of float64, and bits that do not depend on threads."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ooc.models import products
from ooc.models.memory_efficient import sum_of_products
from ooc.models.products import WeightGradients, multiply, numbers_of_sums, weight_gradients
from ooc.runtime import onednn
from ooc.runtime.product_kernels import BLOCKS_BY_ONEDNN, BY_MKL, SUMS_BY_MKL, SUMS_BY_ONEDNN, here
from ooc.runtime.restoring import settings_restored
from ooc.runtime.row_kernels import WAY
from ooc.runtime.shared_products import share
from ooc.runtime.shared_work import share_work
from tests.ooc.models.test_memory_efficient import gradients

needs_onednn = pytest.mark.skipif(not (here() and onednn.here()), reason="this torch has no oneDNN that kernels can call")


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """oneDNN's products, whatever the processor is, small ones too; yields the way of every share that is made."""
    used: list[int] = []

    def noted(*args: Any, **options: Any) -> bool:
        done = share(*args, **options)
        if done:
            used.append(options.get("way", BY_MKL))
        return done

    def noted_work(phases: Any, threads: int) -> None:
        used.append(phases[0][0].numbers[WAY])
        share_work(phases, threads)

    monkeypatch.setattr(products, "share", noted)
    monkeypatch.setattr(products, "share_work", noted_work)
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST_SHARED", 1)
    monkeypatch.setattr(products, "LEAST_BY_ONEDNN", 1)
    with settings_restored():
        yield used


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("more_rows", "more_columns"), [(77, 40), (1, 1), (3, 2)])
def test_products_by_mkl_in_pieces_have_the_bits_of_one_thread(
    threads: int, more_rows: int, more_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns that pieces do not divide evenly, and products beside them that are too small. The gradient of a bias is
    added up in another order."""
    torch.manual_seed(0)
    rows, wide, few = 2 * products.ROWS_AT_ONCE + more_rows, 256 + more_columns, 8
    x, y, z = torch.randn(rows, 120), torch.randn(rows, 100, requires_grad=True), torch.randn(rows, few)
    bias, *weights = (torch.randn(wide, *size).requires_grad_() for size in ((), (120,), (100,), (few,)))
    found = []
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with settings_restored():
        for count, least in ((1, 2**62), (threads, 2**20)):
            torch.set_num_threads(count)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(products, "LEAST_SHARED", least)
                for pairs in ((x, weights[0], y, weights[1]), (x, weights[0], z, weights[2]), (y, weights[1])):
                    out = sum_of_products(bias, *pairs)
                    found.append([out, *gradients(out, [bias, y, *weights])])
    for one, pieces in zip(found[:3], found[3:], strict=True):
        assert all((a is None) == (b is None) for a, b in zip(one, pieces, strict=True))
        assert torch.allclose(one.pop(1), pieces.pop(1), atol=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(one, pieces, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("size", [700, 3 * products.ROWS_OF_SUM + 5])
@pytest.mark.parametrize("by_columns", [False, True])
def test_products_by_mkl_have_the_same_bits_in_any_number_of_threads(
    size: int, by_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sum, or sums of ranges of the rows; of several pairs; and of rows that lie by columns, which torch multiplies."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    torch.manual_seed(0)
    grad = torch.randn(size, 260)
    rows = [torch.randn(width, size).t() if by_columns else torch.randn(size, width) for width in (128, 90)]
    bias, weights = torch.randn(260), [torch.randn(260, each.size(1)) for each in rows]
    pairs = [*itertools.chain(*zip(rows, weights, strict=True))]
    found = []
    with settings_restored():
        for threads in (1, 2, 3, 5, 16):
            torch.set_num_threads(threads)
            found.append([*products.weight_gradients(grad, rows), products.added_products(bias, pairs)])
    wide = grad.double()
    given = sum((x.double() @ w.double().t() for x, w in zip(rows, weights, strict=True)), start=bias.double())
    for own, exact in zip(found[0], [*(wide.t() @ each.double() for each in rows), wide.sum(0), given], strict=True):
        assert own.is_contiguous()
        assert torch.allclose(own.double(), exact, atol=1e-3)
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))


@pytest.mark.parametrize(("features", "width"), [(128, 1), (1, 128), (1, 1), (64, 3)])
@pytest.mark.parametrize("by_columns", [False, True])
def test_narrow_products_are_those_of_torch(
    features: int, width: int, by_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one output or feature, and of rows that lie by columns, whatever the number of threads."""
    monkeypatch.setattr(products, "LEAST_SHARED", 1)
    monkeypatch.setattr(products, "LEAST_PRODUCT", 1)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    torch.manual_seed(0)
    rows = (torch.randn(features, 6000).t() if by_columns else torch.randn(6000, features)).requires_grad_()
    leaves = [torch.randn(width).requires_grad_(), rows, torch.randn(width, features).requires_grad_()]
    found = []
    with settings_restored():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = sum_of_products(*leaves)
            found.append([out, *gradients(out, leaves)])
    wanted = F.linear(leaves[1], leaves[2], leaves[0])
    for own, other in zip(found[0], [wanted, *gradients(wanted, leaves)], strict=True):
        assert own is not None
        assert other is not None
        assert torch.allclose(own, other, atol=1e-3, rtol=1e-4)
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))


@pytest.mark.parametrize("wrong", ["features", "bias"])
def test_matrices_that_do_not_fit_are_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_SHARED", 1)
    weight, bias = torch.randn(8, 5 if wrong == "features" else 4), torch.randn(7 if wrong == "bias" else 8)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        sum_of_products(bias, torch.randn(600, 4), weight)


def test_products_in_pieces_have_the_type_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not torch's default one."""
    monkeypatch.setattr(products, "LEAST_PRODUCT", 1)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 5), torch.randn(7, 5).requires_grad_(), torch.randn(7).requires_grad_()
    torch.set_default_dtype(torch.float64)
    try:
        out = sum_of_products(bias, x, weight)
        found = gradients(out, [bias, weight])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(out, F.linear(x, weight, bias), atol=1e-6)
    assert {each.dtype for each in (out, *found) if each is not None} == {torch.float32}


@needs_onednn
@pytest.mark.parametrize("size", [512, 1024, 3 * 512 + 77, 40 * 512 + 1])
def test_products_by_onednn_are_those_of_float64_and_of_any_number_of_threads(ways: list[int], size: int) -> None:
    torch.manual_seed(0)
    x, y, grad = torch.randn(size, 12), torch.randn(size, 9), torch.randn(size, 20)
    bias, of_x, of_y, before = torch.randn(20), torch.randn(20, 12), torch.randn(20, 9), torch.randn(size, 20)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out, added = torch.empty(size, 20), before.clone()
        multiply(out, [(x, of_x), (y, of_y)], bias)
        multiply(added, [(grad, torch.eye(20).t())], add=True)
        found.append([out, added, *weight_gradients(grad, [x, y])])
    assert ways == 3 * [BLOCKS_BY_ONEDNN, BLOCKS_BY_ONEDNN, SUMS_BY_ONEDNN]
    x, y, wide = x.double(), y.double(), grad.double()
    wanted = [
        x @ of_x.double().t() + y @ of_y.double().t() + bias, before + wide,
        wide.t() @ x, wide.t() @ y, wide.sum(0),
    ]  # fmt: skip
    for own, exact in zip(found[0], wanted, strict=True):
        assert torch.allclose(own.double(), exact, atol=1e-5 * size**0.5)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.skipif(not here(), reason="torch is built without MKL")
@pytest.mark.parametrize("way", [SUMS_BY_MKL, pytest.param(SUMS_BY_ONEDNN, marks=needs_onednn)])
@pytest.mark.parametrize(("size", "ranges"), [(512, 1), (513, 1), (1500, 2), (1500, 3), (1500, 7), (5000, 4)])
def test_gradients_of_weights_in_ranges_are_the_product(
    way: int, size: int, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in more ranges than blocks, of which some are of no row."""
    torch.manual_seed(0)
    monkeypatch.setattr(products, "_ranges_of_sums", lambda *given: ranges)
    grad, x, y = torch.randn(size, 20), torch.randn(size, 12), torch.randn(size, 9)
    found = []
    for threads in (1, 2, 4):
        memory = torch.full((numbers_of_sums(size, 20, [12, 9], way),), torch.nan)
        made = WeightGradients.of(grad, [x, y], way, memory)
        share_work(made.works, threads)
        found.append(made.found)
    wide = grad.double()
    for own, exact in zip(found[0], (wide.t() @ x.double(), wide.t() @ y.double(), wide.sum(0)), strict=True):
        assert torch.allclose(own.double(), exact, atol=1e-3)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_onednn
def test_few_rows_and_a_torch_that_is_not_to_use_onednn_have_products_by_mkl(
    ways: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(511, 4), torch.randn(3, 4)
    out = torch.empty(511, 3)
    multiply(out, [(x, weight)])
    assert torch.allclose(out, F.linear(x, weight), atol=1e-6)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    multiply(torch.empty(1024, 3), [(torch.randn(1024, 4), weight)])
    assert {*ways} == {BY_MKL}


@needs_onednn
@pytest.mark.parametrize("width", [7, 1])
def test_gradients_of_a_sum_of_products_by_onednn_are_those_of_autograd(ways: list[int], width: int) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(*shape).requires_grad_() for shape in ((width,), (1100, 5), (width, 5), (1100, 6), (width, 6))]
    own = gradients(sum_of_products(*leaves), leaves)
    wanted = gradients(F.linear(leaves[1], leaves[2], leaves[0]) + F.linear(leaves[3], leaves[4]), leaves)
    made = {BLOCKS_BY_ONEDNN, SUMS_BY_ONEDNN} if width > 1 else {BLOCKS_BY_ONEDNN}  # torch makes those of one column
    assert {*ways} - {BY_MKL} == made
    for a, b in zip(own, wanted, strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-4)

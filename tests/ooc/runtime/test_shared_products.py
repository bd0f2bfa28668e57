"""Products that threads share in a kernel: the bits of torch's own in one thread, whoever helps and however late."""

import os
import threading
from itertools import product as combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from ooc.runtime import shared_products
from ooc.runtime.crew import single_threaded
from ooc.runtime.shared_products import product, share

pytestmark = pytest.mark.skipif(not shared_products.here(), reason="torch is built without MKL")


def numbers(rows: int, columns: int, lies: str = "rows") -> Tensor:
    """A matrix that lies by rows, by columns, or as a range of the columns or rows of a larger one."""
    if lies == "columns":
        return torch.randn(columns, rows).t()
    if lies == "part":
        return torch.randn(rows, columns + 5)[:, 2 : 2 + columns]
    if lies == "part of columns":
        return torch.randn(columns, rows + 7)[:, 3 : 3 + rows].t()
    return torch.randn(rows, columns)


def alone(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None, add: bool = False) -> Tensor:
    with single_threaded():
        if bias is not None:
            return torch.addmm(bias, left, right)
        return torch.addmm(out, left, right) if add else torch.mm(left, right)


LIES = ("rows", "columns", "part", "part of columns")


@pytest.mark.parametrize(("lies_left", "lies_right"), [*combinations(LIES, LIES)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_call_has_the_bits_of_torch(lies_left: str, lies_right: str, threads: int) -> None:
    torch.manual_seed(0)
    left, right, bias = numbers(300, 70, lies_left), numbers(70, 33, lies_right), torch.randn(33)
    assert shared_products.fits(left, right)
    outs = [torch.randn(300, 33) for _ in range(3)]
    wanted = [alone(outs[0], left, right), alone(outs[1], left, right, bias), alone(outs[2], left, right, add=True)]
    share(
        [product(outs[0], left, right), product(outs[1], left, right, bias), product(outs[2], left, right, add=True)], threads
    )
    for out, exact in zip(outs, wanted, strict=True):
        assert torch.equal(out, exact)
        assert torch.allclose(wanted[0].double(), left.double() @ right.double(), atol=1e-4)


@pytest.mark.parametrize("ranges", [1, 2, 5])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_ranges_of_rows_have_the_bits_of_all_at_once(ranges: int, threads: int) -> None:
    """Two products added up, into a range of the columns of a larger matrix, of which the others stay."""
    torch.manual_seed(0)
    (x, y), (v, w), bias = (
        (torch.randn(1003, 40), torch.randn(1003, 24)),
        (torch.randn(40, 50), torch.randn(24, 50)),
        torch.randn(50),
    )
    whole = torch.randn(1003, 60)
    wanted = whole.clone()
    with single_threaded():
        wanted[:, 4:54] = torch.addmm(bias, x, v).addmm_(y, w)
    out = whole[:, 4:54]
    share([product(out, x, v, bias), product(out, y, w, add=True)], threads, ranges)
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize("size", [(0, 3, 2), (3, 0, 2), (1, 1, 1)])
def test_matrices_without_rows_or_columns_between(size: tuple[int, int, int]) -> None:
    rows, between, columns = size
    left, right, out = torch.ones(rows, between), torch.ones(between, columns), torch.full((rows, columns), 7.0)
    share([product(out, left, right)], threads=2)
    assert torch.equal(out, torch.full((rows, columns), float(between)))


def test_others_than_float32_on_the_cpu_by_rows_or_columns_do_not_fit() -> None:
    fitting = torch.randn(4, 6)
    assert shared_products.fits(fitting, fitting.t())
    wrong = [fitting.double(), fitting[:, ::2], fitting.flatten(), fitting.to("meta"), fitting.bfloat16()]
    assert not any(shared_products.fits(fitting, each) for each in wrong)


def test_thousands_of_short_shares_are_complete() -> None:
    """Helpers that wake late find the work of a later share."""
    torch.manual_seed(0)
    left, right, out = torch.randn(64, 8), torch.randn(8, 8), torch.empty(64, 8)
    wanted = alone(out, left, right)
    for number in range(3000):
        out.fill_(number)
        share([product(out, left, right)], threads=4, ranges=1 + number % 7)
        assert torch.equal(out, wanted)


def test_several_callers_at_once_have_their_own_products() -> None:
    torch.manual_seed(0)
    lefts, right, wrong = [torch.randn(200, 30) for _ in range(4)], torch.randn(30, 20), list[int]()

    def run(number: int) -> None:
        out = torch.empty(200, 20)
        for _ in range(300):
            out.zero_()
            share([product(out, lefts[number], right)], threads=3, ranges=4)
            if not torch.equal(out, alone(out, lefts[number], right)):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not wrong


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_done_beside_may_fail(threads: int) -> None:
    left, right, out = torch.ones(40, 5), torch.ones(5, 6), torch.zeros(40, 6)
    with pytest.raises(ValueError, match="beside"):
        share([product(out, left, right)], threads, ranges=4, beside=lambda: int("beside"))
    if threads > 1:  # helpers may have begun, so all is done
        assert torch.equal(out, torch.full((40, 6), 5.0))
    done = list[int]()
    share([product(out, left, right)], threads, ranges=4, beside=lambda: done.append(1))
    assert done == [1]
    assert torch.equal(out, torch.full((40, 6), 5.0))


def test_a_helper_takes_pieces_while_the_caller_is_busy() -> None:
    left, right, out = torch.ones(64, 4), torch.ones(4, 4), torch.zeros(64, 4)

    def wait() -> None:
        deadline = threading.Event()
        for _ in range(2000):
            if bool((out != 0).all()):
                return
            deadline.wait(0.01)

    def beside() -> None:
        wait()
        seen.append(bool((out != 0).all()))

    seen = list[bool]()
    share([product(out, left, right)], threads=2, ranges=8, beside=beside)
    assert seen == [True]


def test_a_forked_process_has_helpers_of_its_own() -> None:
    left, right, out = torch.ones(40, 5), torch.ones(5, 6), torch.zeros(40, 6)
    share([product(out, left, right)], threads=2, ranges=4)
    out.zero_()
    child = os.fork()
    if child == 0:
        share([product(out, left, right)], threads=2, ranges=4)
        os._exit(0 if bool((out == 5).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_plain_reference() -> None:
    """`sgemm` adds up as float64 does, but for rounding."""
    rng = np.random.default_rng(0)
    left, right, bias = (rng.standard_normal(size).astype(np.float32) for size in ((97, 31), (31, 18), (18,)))
    out = torch.empty(97, 18)
    share([product(out, torch.from_numpy(left), torch.from_numpy(right), torch.from_numpy(bias))], threads=2, ranges=3)
    np.testing.assert_allclose(out.numpy(), left.astype(np.float64) @ right + bias, atol=1e-5)

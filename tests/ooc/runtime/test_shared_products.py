"""Products that threads share in a kernel: the bits of torch's own in one thread, whoever helps and however late."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product as combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from ooc.runtime import onednn, shared_products, shared_work
from ooc.runtime.crew import single_threaded
from ooc.runtime.product_kernels import BLOCKS_BY_ONEDNN, BY_MKL
from ooc.runtime.row_kernels import RANGES, ROWS, WAY
from ooc.runtime.shared_products import SharedProduct, share
from tests.waiting import in_threads

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
def test_a_product_has_the_bits_of_torch(lies_left: str, lies_right: str, threads: int) -> None:
    torch.manual_seed(0)
    left, right, bias = numbers(300, 70, lies_left), numbers(70, 33, lies_right), torch.randn(33)
    outs = [torch.randn(300, 33) for _ in range(3)]
    wanted = [alone(outs[0], left, right), alone(outs[1], left, right, bias), alone(outs[2], left, right, add=True)]
    bare, with_bias = SharedProduct(outs[0], left, right), SharedProduct(outs[1], left, right, bias)
    assert share([bare, with_bias, SharedProduct(outs[2], left, right, add=True)], threads)
    for out, exact in zip(outs, wanted, strict=True):
        assert torch.equal(out, exact)
        assert torch.allclose(wanted[0].double(), left.double() @ right.double(), atol=1e-4)


@pytest.mark.parametrize("lies", ["rows", "part"])
@pytest.mark.parametrize("ranges", [1, 2, 5])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_ranges_of_rows_have_the_bits_of_all_at_once(lies: str, ranges: int, threads: int) -> None:
    """Two products added up, into a range of the columns of a larger matrix, of which the others stay."""
    torch.manual_seed(0)
    x, y, v, w = numbers(1003, 40, lies), numbers(1003, 24, lies), torch.randn(40, 50), torch.randn(24, 50)
    bias, whole = torch.randn(50), torch.randn(1003, 60)
    wanted = whole.clone()
    with single_threaded():
        wanted[:, 4:54] = torch.addmm(bias, x, v).addmm_(y, w)
    out = whole[:, 4:54]
    assert share([SharedProduct(out, x, v, bias), SharedProduct(out, y, w, add=True)], threads, ranges)
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize("size", [(0, 3, 2), (3, 0, 2), (2, 1, 2), (0, 0, 0)])
def test_matrices_of_few_rows_and_columns(size: tuple[int, int, int]) -> None:
    rows, between, columns = size
    left, right, out = torch.ones(rows, between), torch.ones(between, columns), torch.full((rows, columns), 7.0)
    assert share([SharedProduct(out, left, right)], threads=2)
    assert torch.equal(out, torch.full((rows, columns), float(between)))


def test_layouts_say_where_every_number_lies() -> None:
    """Of all small matrices, also where dimensions of one or no number have any stride."""
    known = 0
    for rows, columns, by_row, by_column in combinations(range(4), range(4), range(6), range(6)):
        found = shared_products._layout(torch.as_strided(torch.zeros(100), (rows, columns), (by_row, by_column)))
        if found is None:
            continue
        (layout, leading), known = found, known + 1
        by_rows = layout == ord("N")
        assert leading >= max(1, columns if by_rows else rows)
        for i, j in combinations(range(rows), range(columns)):
            assert i * by_row + j * by_column == (i * leading + j if by_rows else j * leading + i)
    assert known > 400


def wrong_products() -> dict[str, tuple[SharedProduct, int]]:
    """Products that torch has to make or refuse, and ranges."""
    x, w, out = torch.randn(6, 4), torch.randn(4, 5), torch.empty(6, 5)
    fake = torch.empty(6, 4, device="meta")
    return {
        "float64": (SharedProduct(out, x.double(), w), 0),
        "meta": (SharedProduct(out, fake, w), 0),
        "gaps": (SharedProduct(out, torch.randn(12, 8)[::2, ::2], w), 0),
        "expanded": (SharedProduct(out, x, torch.randn(1, 5).expand(4, 5)), 0),
        "overlapping": (SharedProduct(out, x, torch.randn(20).as_strided((4, 5), (2, 1))), 0),
        "negated": (SharedProduct(out, torch._neg_view(x), w), 0),
        "subclass": (SharedProduct(out, x.as_subclass(Named), w), 0),
        "inner sizes": (SharedProduct(out, x, torch.randn(3, 5)), 0),
        "rows": (SharedProduct(out, torch.randn(5, 4), w), 0),
        "columns": (SharedProduct(out, x, torch.randn(4, 6)), 0),
        "vector": (SharedProduct(out, x, torch.randn(4)), 0),
        "one column": (SharedProduct(torch.empty(6, 1), x, torch.randn(4, 1)), 0),
        "one row": (SharedProduct(torch.empty(1, 5), torch.randn(1, 4), w), 0),
        "length of bias": (SharedProduct(out, x, w, torch.randn(4)), 0),
        "type of bias": (SharedProduct(out, x, w, torch.randn(5).double()), 0),
        "gaps of bias": (SharedProduct(out, x, w, torch.randn(10)[::2]), 0),
        "out by columns": (SharedProduct(torch.empty(5, 6).t(), x, w), 0),
        "left by columns in ranges": (SharedProduct(out, torch.randn(4, 6).t(), w), 2),
    }


class Named(torch.Tensor):
    """A subclass, which may mean anything."""


@pytest.mark.parametrize("name", wrong_products())
def test_what_kernels_cannot_multiply_is_left_to_torch(name: str) -> None:
    wrong, ranges = wrong_products()[name]
    untouched = torch.zeros(6, 5)
    assert not share([SharedProduct(untouched, torch.ones(6, 4), torch.ones(4, 5)), wrong], 2, ranges)
    assert not untouched.any()


def test_products_in_ranges_have_the_same_rows() -> None:
    w = torch.randn(4, 5)
    products = [SharedProduct(torch.empty(rows, 5), torch.randn(rows, 4), w) for rows in (6, 8)]
    assert not share(products, threads=2, ranges=2)
    assert share(products, threads=2)


def test_tensors_of_torch_func_are_left_to_torch() -> None:
    def total(x: Tensor) -> Tensor:
        assert not share([SharedProduct(torch.empty(6, 5), x, torch.ones(4, 5))], threads=2)
        return x.sum()

    assert torch.equal(torch.func.grad(total)(torch.zeros(6, 4)), torch.ones(6, 4))


def test_autograd_knows_that_a_product_has_changed() -> None:
    out = torch.zeros(6, 5)
    before = out._version
    share([SharedProduct(out, torch.ones(6, 4), torch.ones(4, 5))], threads=2)
    assert out._version > before
    with torch.inference_mode():
        out = torch.zeros(6, 5)
        assert share([SharedProduct(out, torch.ones(6, 4), torch.ones(4, 5))], threads=2)


def test_the_plain_reference() -> None:
    """`sgemm` adds up as float64 does, but for rounding."""
    rng = np.random.default_rng(0)
    left, right, bias = (rng.standard_normal(size).astype(np.float32) for size in ((97, 31), (31, 18), (18,)))
    out = torch.empty(97, 18)
    product = SharedProduct(out, torch.from_numpy(left), torch.from_numpy(right), torch.from_numpy(bias))
    assert share([product], threads=2, ranges=3)
    np.testing.assert_allclose(out.numpy(), left.astype(np.float64) @ right + bias, atol=1e-5)


needs_onednn = pytest.mark.skipif(not onednn.here(), reason="torch has no oneDNN that kernels can call")


@needs_onednn
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("size", [512, 513, 1024, 1501])
def test_blocks_by_onednn_are_the_product(lies: str, size: int) -> None:
    """Into a range of the columns of a larger matrix, of which the others stay; the bits are those of one thread."""
    torch.manual_seed(0)
    x, y, v, w = numbers(size, 40), numbers(size, 24, "part"), numbers(40, 50, lies), numbers(24, 50, lies)
    bias, before = torch.randn(50), torch.randn(size, 60)
    wanted = before.double()
    wanted[:, 4:54] = x.double() @ v.double() + y.double() @ w.double() + bias
    found = []
    for threads in (1, 2, 4):
        whole = before.clone()
        out = whole[:, 4:54]
        products = [SharedProduct(out, x, v, bias), SharedProduct(out, y, w, add=True)]
        assert share(products, threads, ranges=1, way=BLOCKS_BY_ONEDNN)
        found.append(whole)
    assert torch.allclose(found[0].double(), wanted, atol=1e-4)
    assert torch.equal(found[0][:, [*range(4), *range(54, 60)]], before[:, [*range(4), *range(54, 60)]])
    assert all(torch.equal(found[0], other) for other in found[1:])


def wrong_for_onednn() -> dict[str, SharedProduct]:
    """Products that are not made in blocks."""
    right = torch.randn(4, 8)
    return {
        "few rows": SharedProduct(torch.empty(511, 8), torch.randn(511, 4), right),
        "left by columns": SharedProduct(torch.empty(600, 8), torch.randn(4, 600).t(), right),
    }


@needs_onednn
@pytest.mark.parametrize("name", wrong_for_onednn())
def test_what_onednn_is_not_given_is_left_to_torch(name: str) -> None:
    assert not share([wrong_for_onednn()[name]], threads=2, ranges=1, way=BLOCKS_BY_ONEDNN)


WITHOUT_MEMORY = """
import resource, sys, time
import torch
from ooc.runtime.product_kernels import BLOCKS_BY_ONEDNN
from ooc.runtime.shared_products import SharedProduct, share
wide, threads = 2**17, int(sys.argv[1])
left, right, out = torch.ones(600, 2), torch.ones(2, wide), torch.zeros(600, wide)
small = SharedProduct(out[:, :4], left, right[:, :4])
assert share([small], threads, 1, way=BLOCKS_BY_ONEDNN)
time.sleep(2)  # the helper loads its kernel, for which there is room now
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
try:
    share([SharedProduct(out, left, right)], threads, 1, way=BLOCKS_BY_ONEDNN)
except MemoryError as error:
    print(error)
assert share([small], threads, 1, way=BLOCKS_BY_ONEDNN)
print(float(out[:, :4].sum()))
"""
"""a product whose blocks take 256 MiB, where there are 64"""


@needs_onednn
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_that_memory_has_no_room_for_says_so(threads: int) -> None:
    command = [sys.executable, "-c", WITHOUT_MEMORY, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "oneDNN has no memory left to multiply\n4800.0\n"), done.stderr


@pytest.fixture
def switching() -> Iterator[None]:
    """The interpreter gives other threads their turn as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


Large = tuple[SharedProduct, Tensor]


@pytest.fixture(scope="module")
def large() -> Large:
    """A product of several milliseconds, so that helpers are at work when the caller is done, and what it is."""
    torch.manual_seed(0)
    product = SharedProduct(torch.empty(4096, 256), torch.randn(4096, 256), torch.randn(256, 256))
    return product, alone(*product)


@pytest.mark.parametrize("looks", [0, 20_000])
def test_large_pieces_are_waited_for(looks: int, large: Large, switching: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "LOOKS", looks)
    product, wanted = large
    for number in range(40):
        product.out.zero_()
        share([product], threads=3, ranges=2 + number % 4)
        assert torch.equal(product.out, wanted)


def test_thousands_of_short_shares_are_complete() -> None:
    """Helpers that wake late find the work of a later share."""
    torch.manual_seed(0)
    left, right, out = torch.randn(64, 8), torch.randn(8, 8), torch.empty(64, 8)
    wanted = alone(out, left, right)
    for number in range(3000):
        out.fill_(number)
        share([SharedProduct(out, left, right)], threads=4, ranges=1 + number % 7)
        assert torch.equal(out, wanted)


def test_several_callers_at_once_have_their_own_products(switching: None) -> None:
    torch.manual_seed(0)
    right, wrong = torch.randn(64, 64), list[int]()
    products = [SharedProduct(torch.empty(2000, 64), torch.randn(2000, 64), right) for _ in range(4)]
    wanted = [alone(*each) for each in products]

    def run(number: int) -> None:
        out = products[number].out
        for _ in range(100):
            out.zero_()
            share([products[number]], threads=3, ranges=4)
            if not torch.equal(out, wanted[number]):
                wrong.append(number)

    in_threads(4, run)
    assert not wrong


def let_a_helper_do_all(product: SharedProduct) -> None:
    """Put the pieces of a product on the board and take none of them."""
    helpers, board = shared_work._helpers, shared_work._helpers.board
    calls = shared_products._calls([product], True, BY_MKL)
    assert calls is not None
    work = shared_work.Work(8, {RANGES: 8, ROWS: len(product.out), WAY: BY_MKL}, calls)
    tables = shared_work._tables([[work]])
    helpers._add()
    for at, table in zip((shared_work._OF_CALLS, shared_work._OF_WORKS, shared_work._OF_PIECES), tables, strict=False):
        board[at] = table.ctypes.data
    shared_work._begin(board, 0, 8, 1)
    while board[shared_work._DONE] < 8:
        time.sleep(0.001)


@pytest.mark.timeout(60)
def test_a_helper_takes_pieces(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "_helpers", shared_work._Helpers())
    product, wanted = large
    product.out.zero_()
    let_a_helper_do_all(product)
    assert torch.equal(product.out, wanted)


def test_helpers_leave_the_core_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, unless it is the only one."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("there is one core")
    monkeypatch.setattr(shared_work, "_helpers", shared_work._Helpers())
    product = SharedProduct(torch.zeros(40, 6), torch.ones(40, 5), torch.ones(5, 6))
    try:
        for core in (*before, min(before)):
            monkeypatch.setattr(shared_work._helpers, "_core_of_caller", lambda core=core: core)
            share([product], threads=2, ranges=4)
            while not shared_work._helpers._threads:
                time.sleep(0.001)
            share([product], threads=2, ranges=4)
            assert os.sched_getaffinity(shared_work._helpers._threads[0]) == before - {core}
        os.sched_setaffinity(0, {max(before)})
        monkeypatch.setattr(shared_work._helpers, "_core_of_caller", lambda: max(before))
        share([product], threads=2, ranges=4)
        assert os.sched_getaffinity(shared_work._helpers._threads[0]) == before - {min(before)}, "as before"
        assert torch.equal(product.out, torch.full((40, 6), 5.0))
    finally:
        os.sched_setaffinity(0, before)


def test_a_forked_process_has_helpers_of_its_own(large: Large) -> None:
    """Also where it was forked while another thread had those of its parent."""
    product, _ = large
    stop = threading.Event()

    def keep_sharing() -> None:
        while not stop.is_set():
            share([product], threads=3, ranges=8)

    busy = threading.Thread(target=keep_sharing)
    busy.start()
    try:
        codes = [forked_share() for _ in range(5)]
    finally:
        stop.set()
        busy.join(60)
    assert codes == [0] * 5


def forked_share() -> int:
    """The exit code of a child that shares with a helper of its own; 14 where it hangs."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            product = SharedProduct(torch.zeros(400, 60), torch.ones(400, 50), torch.ones(50, 60))
            let_a_helper_do_all(product)
            os._exit(0 if bool((product.out == 50).all()) else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


INTERRUPTED = """
import os, signal, sys, threading
import torch
from ooc.runtime.shared_products import SharedProduct, share
left, right, out = torch.ones(4096, 256), torch.ones(256, 256), torch.zeros(4096, 256)
wrong = 0
try:
    late = lambda: os.kill(os.getpid(), signal.SIGINT)
    threading.Timer(float(sys.argv[1]), late).start()
    share([SharedProduct(out, left, right)], 2, 8)
    threading.Event().wait(1)
except KeyboardInterrupt:
    pass
for _ in range(100):
    out.zero_()
    share([SharedProduct(out, left, right)], 2, 8)
    wrong += not bool((out == 256).all())
print("wrong", wrong)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.002, 0.004, 0.01, 0.03, 0.09])
def test_an_interrupt_of_the_first_share_leaves_later_ones_whole(seconds: float) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(seconds)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "wrong 0\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("change", ["-O", "NUMBA_DISABLE_JIT"])
def test_products_are_right_without_assertions_and_without_kernels(change: str) -> None:
    code = "import torch; from ooc.models.memory_efficient import sum_of_products as s; x = torch.ones(40000, 64)\n"
    code += "print(float(s(torch.zeros(9), x, torch.ones(9, 64)).sum()))"
    flags, more = (["-O"], {}) if change == "-O" else ([], {change: "1"})
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **more})
    assert (done.returncode, done.stdout) == (0, "23040000.0\n"), done.stderr

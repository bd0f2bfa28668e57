"""Phases of works that threads share: each begins when the one before is done, whoever does its pieces."""

import numpy as np
import pytest
import torch

from ooc.runtime import row_kernels as row
from ooc.runtime import shared_work
from ooc.runtime.product_kernels import BY_MKL, here
from ooc.runtime.shared_products import SharedProduct, _calls
from ooc.runtime.shared_work import Work, share_work
from tests.waiting import in_threads

pytestmark = pytest.mark.skipif(not here(), reason="torch is built without MKL")
ROWS, WIDTH = 600, 24


class Chain:
    """Matrices, each of which is that before, turned upside down by sums, times a matrix; and the phases that make them."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.matrices = [torch.randn(ROWS, WIDTH, generator=generator), *(torch.zeros(ROWS, WIDTH) for _ in range(length))]
        self.turned = [torch.empty(ROWS, WIDTH) for _ in range(length)]
        self.edges = torch.arange(ROWS).flip(0), torch.arange(ROWS + 1), torch.ones(ROWS)
        self.phases = [[self.work(number)] for number in range(length)]

    def work(self, number: int) -> Work:
        given, turned, out = self.matrices[number], self.turned[number], self.matrices[number + 1]
        calls = _calls([SharedProduct(out, turned, self.weight)], True, BY_MKL)
        assert calls is not None
        ranges = 1 + number % 7
        numbers = {row.RANGES: ranges, row.ROWS: ROWS, row.WAY: BY_MKL, row.WIDTH: WIDTH}
        places = zip((row.INDEX, row.POINTERS, row.VALUES, row.GIVEN, row.SUMS), (*self.edges, given, turned), strict=True)
        return Work(ranges, numbers | {at: tensor.data_ptr() for at, tensor in places}, calls)

    def is_made(self, threads: int) -> bool:
        """Whether each matrix is what it should be."""
        for each in self.matrices[1:]:
            each.zero_()
        wanted = [self.matrices[0]]
        for _ in self.turned:
            wanted.append(wanted[-1].flip(0) @ self.weight)
        share_work(self.phases, threads)
        return all(torch.allclose(own, each, atol=1e-5) for own, each in zip(self.matrices, wanted, strict=True))


@pytest.fixture(params=[0, 300, 20_000])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How long threads look before they sleep; helpers of its own."""
    monkeypatch.setattr(shared_work, "LOOKS", request.param)
    monkeypatch.setattr(shared_work, "_helpers", shared_work._Helpers())
    return int(request.param)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_phase_begins_when_the_one_before_is_done(threads: int, looks: int) -> None:
    chain = Chain(40)
    for _ in range(60):
        assert chain.is_made(threads)


def test_callers_at_once_have_their_own_phases(looks: int) -> None:
    """One has the helpers, the others work alone."""
    wrong = list[int]()

    def run(number: int) -> None:
        chain = Chain(20)
        wrong.extend(number for _ in range(50) if not chain.is_made(3))

    in_threads(3, run)
    assert not wrong


def after(what: int, **places: int) -> None:
    numbers = {row.RANGES: 3, row.ROWS: ROWS, row.AFTER: what, row.OUT_WIDTH: WIDTH}
    share_work([[Work(3, numbers | {getattr(row, name): value for name, value in places.items()})]], 2)


def test_what_is_done_behind_products() -> None:
    given = torch.randn(ROWS, WIDTH)
    given[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    out, cut = given.clone(), torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    after(row.RELU, OUT=out.data_ptr(), CUT=cut.data_ptr())
    assert torch.equal(cut, given <= 0)
    assert torch.equal(out.nan_to_num(7), torch.where(given <= 0, 0.0, given).nan_to_num(7))
    out = given.clone()
    after(row.MASK, OUT=out.data_ptr(), CUT=cut.data_ptr())
    assert torch.equal(out.nan_to_num(7), given.masked_fill(cut, 0).nan_to_num(7))
    out = given.clone()
    after(row.MASK_SCALE, OUT=out.data_ptr(), CUT=cut.data_ptr(), DROPPED=1 << 31)
    assert torch.equal(out.nan_to_num(7), (2 * given).masked_fill(cut, 0).nan_to_num(7))


def test_sums_are_added_up_in_order() -> None:
    sums, out = torch.randn(5, 70), torch.empty(70)
    numbers = {row.RANGES: 1, row.ROWS: 5, row.AFTER: row.ADD_UP, row.OUT_WIDTH: 70}
    share_work([[Work(1, numbers | {row.GIVEN: sums.data_ptr(), row.OUT: out.data_ptr()})]], 2)
    wanted = sums[0].clone()
    for each in sums[1:]:
        wanted += each
    assert torch.equal(out, wanted)


def test_tables_say_which_calls_and_pieces_are_a_works() -> None:
    works = [[Work(2, {row.ROWS: 4}, [[1] * 13, [2] * 13]), Work(1, {row.WAY: 3})], [Work(3, {}, [[4] * 13])]]
    calls, found, pieces, phases = shared_work._tables(works)
    assert calls[:, 0].tolist() == [1, 2, 4]
    assert found[:, [row.FIRST_CALL, row.CALLS, row.ROWS, row.WAY]].tolist() == [[0, 2, 4, 0], [2, 0, 0, 3], [2, 1, 0, 0]]
    assert pieces.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [2, 2]]
    assert phases.tolist() == [[0, 3], [3, 3]]
    assert all(table.dtype == np.int64 and table.flags.c_contiguous for table in (calls, found, pieces, phases))

"""Pieces in several threads: all of them once, failures raised, modes and thread counts as they were."""

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from ooc.runtime.crew import FEW, _Crew, few, in_pieces, knows_threads, single_threaded, threads_kept, with_few
from ooc.runtime.restoring import settings_restored
from tests.forked import in_child


def test_every_piece_is_done_once_by_several_threads() -> None:
    meet, done = threading.Barrier(3, timeout=60), list[int]()

    def piece(number: int) -> None:
        if number < 3:
            meet.wait()  # three threads are at work at once
        done.append(number)

    in_pieces([partial(piece, number) for number in range(20)], threads=3)
    assert sorted(done) == list(range(20))


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_piece_fails_on_is_raised_and_the_crew_works_on(threads: int) -> None:
    with pytest.raises(ValueError, match="piece"):
        in_pieces([partial(int, "no piece")] * 4, threads)
    done: list[int] = []
    in_pieces([partial(done.append, 1)] * 4, threads)
    assert len(done) == 4


def test_pieces_are_done_without_a_helper_that_has_no_time() -> None:
    meet, release, in_time = threading.Barrier(3, timeout=60), threading.Event(), list[bool]()

    def piece() -> None:
        meet.wait()
        in_time.append(release.wait(20))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ooc.runtime.crew._crew", _Crew())
        busy = threading.Thread(target=in_pieces, args=([piece] * 2, 2))
        busy.start()
        meet.wait()  # it and the only helper are at work
        done: list[int] = []
        in_pieces([partial(done.append, number) for number in range(4)], threads=2)
        assert done == [0, 1, 2, 3]
        release.set()
        busy.join(60)
        assert in_time == [True, True]
        in_pieces([], threads=2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_pieces_change_tensors_in_the_modes_of_the_caller(mode: type) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    with mode():
        out = torch.zeros(8, 4)
        in_pieces([partial(out[i : i + 1].addmm_, out[i : i + 1] + i, weight) for i in range(8)], threads=2)
        assert torch.equal(out[:, 0], 4.0 * torch.arange(8))
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)


def test_pieces_run_in_one_thread_each_and_the_caller_keeps_its_own() -> None:
    found: list[int] = []
    with settings_restored():
        torch.set_num_threads(3)
        in_pieces([lambda: found.append(torch.get_num_threads())] * 6)
        assert torch.get_num_threads() == 3
        with single_threaded():
            assert torch.get_num_threads() == (1 if knows_threads() else 3)
        assert torch.get_num_threads() == 3
    assert found == [1 if knows_threads() else 3] * 6


def test_a_forked_process_has_a_crew_of_its_own() -> None:
    in_pieces([int] * 4, threads=2)

    def work() -> None:
        done: list[int] = []
        in_pieces([partial(done.append, 1)] * 4, threads=2)
        assert len(done) == 4

    assert in_child(work) == 0


@pytest.mark.parametrize(("numbers", "threads"), [(FEW, 1), (FEW + 1, 3)])
def test_few_numbers_are_worked_on_in_one_thread(numbers: int, threads: int) -> None:
    with settings_restored():
        torch.set_num_threads(3)
        with few(numbers):
            assert torch.get_num_threads() == (threads if knows_threads() else 3)
        assert torch.get_num_threads() == 3


class Noting(torch.autograd.Function):
    """x, noting the threads of its forward and backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, noted: list[int]) -> torch.Tensor:
        ctx.noted = noted
        noted.append(torch.get_num_threads())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.noted.append(torch.get_num_threads())
        return grad, None


@pytest.mark.parametrize(("numbers", "threads"), [(FEW, 1), (FEW + 1, 3)])
def test_a_loss_of_few_numbers_has_its_gradient_in_one_thread(numbers: int, threads: int) -> None:
    """What is before the loss has all threads again; the gradient is torch's."""
    torch.manual_seed(0)
    before, within = list[int](), list[int]()
    start = torch.randn(numbers, requires_grad=True)
    with settings_restored():
        torch.set_num_threads(3)
        x = Noting.apply(2 * start, before)
        loss = with_few(x, lambda rows: Noting.apply(rows, within).sigmoid().mean())
        (loss / 3).backward()
        assert torch.get_num_threads() == 3
    assert before == [3, 3]
    assert within == [threads if knows_threads() else 3] * 2
    found, start.grad = start.grad, None
    ((2 * start).sigmoid().mean() / 3).backward()
    assert torch.allclose(found, start.grad, rtol=1e-6, atol=0)


def test_few_numbers_without_a_gradient() -> None:
    noted = list[int]()
    with settings_restored():
        torch.set_num_threads(3)
        for x in (torch.ones(5), torch.ones(5, requires_grad=True)):
            with torch.no_grad():
                assert with_few(x, lambda rows: Noting.apply(rows, noted).sum()).item() == 5
        weight = torch.ones(5, requires_grad=True)
        with_few(torch.ones(5), lambda rows: (rows * weight).sum()).backward()
        with pytest.raises(ValueError, match="loss"):
            with_few(torch.ones(5, requires_grad=True), lambda rows: int("loss"))
        assert torch.get_num_threads() == 3
    assert noted == [1 if knows_threads() else 3] * 2
    assert torch.equal(weight.grad, torch.ones(5))


def fails(grad: torch.Tensor) -> torch.Tensor:
    raise ValueError("gradient")


@pytest.mark.parametrize("how", ["fails", "never gets to x"])
def test_threads_are_kept_where_a_backward_pass_ends_within_a_loss(how: str) -> None:
    x, weight = torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        rows = (rows if how == "fails" else rows.detach()) * weight
        if how == "fails":
            rows.register_hook(fails)
        return rows.sum()

    with settings_restored():
        torch.set_num_threads(3)
        loss = with_few(x, loss_of)
        with pytest.raises(ValueError, match="gradient") if how == "fails" else nullcontext(), threads_kept():
            loss.backward()
        assert torch.get_num_threads() == 3

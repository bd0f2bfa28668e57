"""Products of float32 matrices that several threads take in turn, without the interpreter in between.

A piece of `ooc.runtime.crew` is begun by Python: a thread that takes one waits for the interpreter's lock, which loader threads
hold between their kernels, and so does a helper that wakes. Here the caller and its helpers stay in a kernel. They claim pieces
by compare-and-swap, call the `sgemm` that torch multiplies by, and sleep at semaphores. The bits are those of torch's own
product in one thread.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime.crew import knows_threads, single_threaded
from ooc.stores.atomics import compare_and_swap, fetch_add, load_acquire, store_release
from ooc.stores.jit import kernel

Calls = NDArray[np.int64]
"""int64[calls, NUMBERS]"""
NUMBERS = 13
_TURN_A, _TURN_B, _M, _N, _K, _A, _LDA, _B, _LDB, _C, _LDC, _ADD, _BIAS = range(NUMBERS)
"""of a call: the arguments of `sgemm`, which are of matrices by columns, so that a row of theirs is a column of torch's; _ADD:
whether to add to what is there; _BIAS: the address of what each of torch's rows is set to before, 0 for none"""
_WORD, _DONE, _BEGUN, _CALLS, _TABLE, _RANGES, _WORK, _ENDED, _SIZE = 0, 8, 16, 17, 18, 19, 24, 32, 40
"""Numbers on a board. _WORD: how often there was work, times 2**32, and pieces left; _DONE: pieces done; _BEGUN: whether the
caller has yet to wait for them; what the work is; two semaphores, of 32 bytes each: there is work, and its last piece was done
by a helper"""
_LEFT = 2**32 - 1
LOOKS = 20_000
"""looks at the pieces that are done, before the caller sleeps: some 20 microseconds"""
_sgemm = types.ExternalFunction("ooc_sgemm", types.void(*[types.intp] * 13))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.intp))


@intrinsic
def _numbers_at(typing: Any, address: Any) -> Any:
    """A pointer to int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.intp), generate


@intrinsic
def _floats_at(typing: Any, address: Any) -> Any:
    """A pointer to float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.intp), generate


@kernel
def _set_rows(bias: NDArray[np.float32], rows: NDArray[np.float32]) -> None:
    for i in range(len(rows)):
        for j in range(len(bias)):
            rows[i, j] = bias[j]


@kernel
def _multiply(call: NDArray[np.int64], first: int, rows: int, numbers: NDArray[np.int32], factors: NDArray[np.float32]) -> None:
    """Make one call for rows first:first + rows of `out` and `left`.

    numbers, factors: memory for the arguments of `sgemm`, which takes their addresses.
    """
    left, out = call[_B] + 4 * first * call[_LDB], call[_C] + 4 * first * call[_LDC]
    if call[_BIAS] != 0:
        given = carray(_floats_at(out), (rows, call[_LDC]))
        _set_rows(carray(_floats_at(call[_BIAS]), (call[_M],)), given[:, : call[_M]])
    numbers[0], numbers[1], numbers[2], numbers[3] = call[_TURN_A], call[_TURN_B], call[_M], rows
    numbers[4], numbers[5], numbers[6], numbers[7] = call[_K], call[_LDA], call[_LDB], call[_LDC]
    factors[0], factors[1] = np.float32(1), np.float32(call[_ADD] != 0 or call[_BIAS] != 0)
    at, one = numbers.ctypes.data, factors.ctypes.data
    _sgemm(at, at + 4, at + 8, at + 12, at + 16, one, call[_A], at + 20, left, at + 24, one + 4, out, at + 28)


@kernel
def _do(calls: Calls, ranges: int, piece: int, numbers: NDArray[np.int32], factors: NDArray[np.float32]) -> None:
    """Do a piece: one of the ranges of rows of all calls, or, where there are none, one call."""
    if ranges == 0:
        _multiply(calls[piece], 0, calls[piece, _N], numbers, factors)
        return
    for i in range(len(calls)):
        first, stop = calls[i, _N] * piece // ranges, calls[i, _N] * (piece + 1) // ranges
        _multiply(calls[i], first, stop - first, numbers, factors)


@kernel
def _work(board: NDArray[np.int64]) -> bool:
    """Do pieces until none is left; returns whether the last one to be done was among them."""
    numbers, factors = np.empty(8, np.int32), np.empty(2, np.float32)
    while True:
        word = load_acquire(board, _WORD)
        left = word & _LEFT
        if left == 0:
            return False
        if not compare_and_swap(board, _WORD, word, word - 1):
            continue
        ranges = board[_RANGES]  # what the work is does not change before the piece is done
        pieces = board[_CALLS] if ranges == 0 else ranges
        calls = carray(_numbers_at(board[_TABLE]), (board[_CALLS], NUMBERS))
        _do(calls, ranges, pieces - left, numbers, factors)
        if fetch_add(board, _DONE, 1) + 1 == pieces:
            return True


@kernel
def _sleep_until(semaphore: int) -> None:
    while _sem_wait(semaphore) != 0:  # interrupted by a signal
        pass


@kernel
def _serve(board: NDArray[np.int64]) -> None:
    """Help whenever there is work, forever."""
    address = board.ctypes.data
    while True:
        _sleep_until(address + 8 * _WORK)
        if _work(board):
            _sem_post(address + 8 * _ENDED)


@kernel
def _begin(board: NDArray[np.int64], calls: Calls, ranges: int, helpers: int) -> None:
    """Let so many helpers begin. One that wakes late finds no work, or helps with the next."""
    board[_CALLS], board[_TABLE], board[_RANGES], board[_DONE], board[_BEGUN] = len(calls), calls.ctypes.data, ranges, 0, 1
    pieces = len(calls) if ranges == 0 else ranges
    store_release(board, _WORD, (((board[_WORD] >> 32) + 1) << 32) | pieces)
    for _ in range(helpers):
        _sem_post(board.ctypes.data + 8 * _WORK)


@kernel
def _finish(board: NDArray[np.int64], looks: int) -> None:
    """Do pieces too, and wait for all of them; nothing where none were begun."""
    if board[_BEGUN] == 0:
        return
    if not _work(board):
        pieces = board[_CALLS] if board[_RANGES] == 0 else board[_RANGES]
        for _ in range(looks):
            if load_acquire(board, _DONE) == pieces:
                break
        _sleep_until(board.ctypes.data + 8 * _ENDED)
    board[_BEGUN] = 0


@kernel
def _begin_and_finish(board: NDArray[np.int64], calls: Calls, ranges: int, helpers: int, looks: int) -> None:
    _begin(board, calls, ranges, helpers)
    _finish(board, looks)


@kernel
def _do_alone(calls: Calls, ranges: int) -> None:
    numbers, factors = np.empty(8, np.int32), np.empty(2, np.float32)
    for piece in range(len(calls) if ranges == 0 else ranges):
        _do(calls, ranges, piece, numbers, factors)


class _Helpers:
    """Threads that sleep in a kernel until there is work; as many as were ever asked for. One caller at a time has them."""

    def __init__(self) -> None:
        self._board, self._size, self._lock = np.zeros(_SIZE, np.int64), 0, threading.Lock()

    def share(self, calls: Calls, ranges: int, helpers: int, beside: Callable[[], object] | None) -> bool:
        """Do all pieces, unless another thread has the helpers: then return False."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._size < helpers:
                self._add()
            if beside is None:
                _begin_and_finish(self._board, calls, ranges, helpers, LOOKS)
                return True
            try:
                _begin(self._board, calls, ranges, helpers)
                beside()
            finally:  # helpers write to the caller's matrices
                _finish(self._board, LOOKS)
        finally:
            self._lock.release()
        return True

    def _add(self) -> None:
        if self._size == 0:
            for at in (_WORK, _ENDED):
                ctypes.CDLL(None).sem_init(ctypes.c_void_p(self._board.ctypes.data + 8 * at), 0, 0)
        threading.Thread(target=self._help, name="products", daemon=True).start()
        self._size += 1

    def _help(self) -> None:
        with single_threaded():
            _serve(self._board)


_helpers = _Helpers()
os.register_at_fork(after_in_child=lambda: _helpers.__init__())  # type: ignore[misc]  # a child has none of the threads


@cache
def here() -> bool:
    """Whether torch multiplies by a `sgemm` that kernels can call: on Linux, where it is built with MKL."""
    if sys.platform != "linux" or not knows_threads():
        return False
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        return False
    llvmlite.binding.add_symbol("ooc_sgemm", ctypes.cast(function, ctypes.c_void_p).value)
    return True


def fits(*matrices: Tensor) -> bool:
    """Whether a call takes these matrices [n, m]: float32 on the CPU, by rows or by columns."""
    return all(each.is_cpu and each.dtype is torch.float32 and each.dim() == 2 and 1 in each.stride() for each in matrices)


def product(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None, add: bool = False) -> list[int]:
    """The numbers of the call out [n, m] = left [n, k] @ right [k, m], plus bias [m] or, with `add`, what is there.

    out lies by rows; the others as `fits` says.
    """
    turn_a, lda = _by_columns(right)
    turn_b, ldb = _by_columns(left)
    shape = out.size(1), out.size(0), left.size(1)
    places = right.data_ptr(), lda, left.data_ptr(), ldb, out.data_ptr(), max(1, out.stride(0))
    return [turn_a, turn_b, *shape, *places, add, 0 if bias is None else bias.data_ptr()]


def _by_columns(matrix: Tensor) -> tuple[int, int]:
    """(ord of "N" or "T", distance of columns) of a matrix of torch, which is turned for `sgemm` where it lies by columns."""
    turned = matrix.stride(1) != 1
    return ord("T" if turned else "N"), max(1, matrix.stride(0), matrix.stride(1))


def share(calls: Sequence[Sequence[int]], threads: int, ranges: int = 0, beside: Callable[[], object] | None = None) -> None:
    """Make all calls, in pieces that so many threads at most take in turn, this one among them. Where `here`.

    The matrices stay as they are until it returns; gradients are not recorded.

    Args:
        calls: See `product`.
        threads: This one and helpers.
        ranges: Even ranges of the rows of `out` and `left` (which lies by rows), each of which is a piece: all calls, in order.
            0: each call is a piece.
        beside: Is done by this thread before it takes pieces.

    >>> share([product(out, rows, weight.t())], threads=2, ranges=4)
    """
    assert here(), "kernels cannot call torch's product"
    table, helpers = np.array(calls, np.int64), min(threads, ranges or len(calls)) - 1
    with single_threaded():
        if helpers > 0 and _helpers.share(table, ranges, helpers, beside):
            return
        if beside is not None:
            beside()
        _do_alone(table, ranges)

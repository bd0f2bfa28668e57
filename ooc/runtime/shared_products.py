"""Products of float32 matrices that several threads share, without the interpreter in between.

A piece of `ooc.runtime.crew` is started by Python: a thread that takes one waits for the interpreter's lock, which loader
threads hold between their kernels, and so does a helper that wakes. Here the caller and its helpers stay in a kernel. They
claim pieces by compare-and-swap, call what torch multiplies with, MKL's `sgemm` or oneDNN (`ooc.runtime.onednn`), and sleep on
semaphores. The bits of MKL's products are those of torch's own in one thread.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.runtime import onednn
from ooc.runtime.crew import knows_threads, single_threaded
from ooc.runtime.onednn import ARGUMENTS, ROWS, floats_at, free, multiply_block, tensor_at, turned_block
from ooc.stores.atomics import compare_and_swap, fetch_add, load_acquire, store_release
from ooc.stores.jit import kernel

Calls = NDArray[np.int64]
"""int64[calls, NUMBERS]"""
NUMBERS = 13
_LAYOUT_A, _LAYOUT_B, _M, _N, _K, _A, _LDA, _B, _LDB, _C, _LDC, _ADD, _BIAS = range(NUMBERS)
"""Numbers of a call: the arguments of `sgemm`, whose matrices are column-major, so that its columns are torch's rows. _ADD:
whether to add to what is there; _BIAS: the address of the bias that every row starts from, 0 for none."""
_LEFT, _DONE, _PIECES, _CALLS, _TABLE, _RANGES, _WAY, _FAILED = 0, 8, 16, 17, 18, 19, 20, 21
_WORK, _ENDED, _TAKEN, _SIZE = 24, 32, 40, 48
"""Numbers of a board, on cache lines of their own where several threads change them.

_LEFT: pieces that nobody has claimed. _DONE: pieces that are done. _PIECES, _CALLS, _TABLE, _RANGES, _WAY: the work (see
`_do`). _FAILED: whether a piece could not be done. _WORK, _ENDED: semaphores of 32 bytes; the first is posted for each helper
that is woken, the second for the caller where a helper does the last piece. _TAKEN: 1 while a caller has the board.
"""
_BUSY, _WRONG, _RIGHT = range(3)
"""results of `_share`"""
BY_MKL, SUMS_BY_MKL, BLOCKS_BY_ONEDNN, SUMS_BY_ONEDNN = range(4)
"""ways to multiply, see `share`"""
SUMS = (SUMS_BY_MKL, SUMS_BY_ONEDNN)
LOOKS = 20_000
"""times that the caller looks whether all pieces are done before it sleeps: some 20 microseconds"""
_ROW_MAJOR, _COLUMN_MAJOR = ord("N"), ord("T")
_MOST = 2**31 - 1
_sgemm = types.ExternalFunction("ooc_sgemm", types.void(*[types.intp] * 13))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.intp))


@intrinsic
def _numbers_at(typing: Any, address: Any) -> Any:
    """A pointer to int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.intp), generate


@kernel
def _set_rows(bias: NDArray[np.float32], rows: NDArray[np.float32]) -> None:
    for i in range(len(rows)):
        for j in range(len(bias)):
            rows[i, j] = bias[j]


@kernel
def _multiply(call: NDArray[np.int64], first: int, rows: int, numbers: NDArray[np.int32], factors: NDArray[np.float32]) -> None:
    """Make one call for rows first:first + rows of `out` and `left`, which is row-major unless these are all rows.

    numbers, factors: memory for the arguments of `sgemm`, which takes their addresses.
    """
    left, out = call[_B] + 4 * first * call[_LDB], call[_C] + 4 * first * call[_LDC]
    if call[_BIAS] != 0:
        given = carray(floats_at(out), (rows, call[_LDC]))
        _set_rows(carray(floats_at(call[_BIAS]), (call[_M],)), given[:, : call[_M]])
    add = call[_ADD] != 0 or call[_BIAS] != 0
    _call_sgemm(call, (rows, call[_K]), (left, call[_A], out), add, numbers, factors)


@kernel
def _call_sgemm(
    call: NDArray[np.int64],
    size: tuple[int, int],
    places: tuple[int, int, int],
    add: bool,
    numbers: NDArray[np.int32],
    factors: NDArray[np.float32],
) -> None:
    """Make one call for so many rows and so many numbers in each, with the left and right matrix and `out` at these places."""
    left, right, out = places
    numbers[0], numbers[1], numbers[2], numbers[3] = call[_LAYOUT_A], call[_LAYOUT_B], call[_M], size[0]
    numbers[4], numbers[5], numbers[6], numbers[7] = size[1], call[_LDA], call[_LDB], call[_LDC]
    factors[0], factors[1] = np.float32(1), np.float32(add)
    at, one = numbers.ctypes.data, factors.ctypes.data
    _sgemm(at, at + 4, at + 8, at + 12, at + 16, one, right, at + 20, left, at + 24, one + 4, out, at + 28)


@kernel
def _multiply_rows(call: NDArray[np.int64], piece: int, own: NDArray[np.int64]) -> bool:
    """Make one call for a block of rows by oneDNN. The last block begins with rows that another piece sets."""
    begin = piece * ROWS
    first, stop = min(begin, call[_N] - ROWS), min(begin + ROWS, call[_N])
    by_row, by_column = (1, call[_LDA]) if call[_LAYOUT_A] == _ROW_MAJOR else (call[_LDA], 1)
    left = tensor_at(call[_B] + 4 * first * call[_LDB], ROWS, call[_K], call[_LDB], 1, own)
    right = tensor_at(call[_A], call[_M], call[_K], by_row, by_column, own)
    bias = tensor_at(call[_BIAS], call[_M], 0, 1, 0, own) if call[_BIAS] != 0 else 0
    out = carray(floats_at(call[_C] + 4 * begin * call[_LDC]), (stop - begin, call[_LDC]))
    done = multiply_block(left, right, bias, out[:, : call[_M]], begin - first, call[_ADD] != 0, own)
    free(left)
    free(right)
    free(bias)
    return done and (bias != 0) == (call[_BIAS] != 0)


@kernel
def _add_rows(rows: NDArray[np.float32], out: NDArray[np.float32], sums: NDArray[np.float32]) -> None:
    """Add the sum of the rows of a block to `out`: one sum of all blocks' rows in order would lose digits. sums: to work in."""
    sums[:] = 0
    for i in range(len(rows)):
        for j in range(len(out)):
            sums[j] += rows[i, j]
    for j in range(len(out)):
        out[j] += sums[j]


@kernel
def _add_range(calls: Calls, ranges: int, piece: int, own: NDArray[np.int64]) -> bool:
    """Set the sums of a range of the left matrix's columns, which all calls share: its rows are turned in blocks. The first
    call's bias is set to the sums of these columns."""
    width, size, by_row = calls[0, _N], calls[0, _K], calls[0, _LDB]
    steps, done = (size + ROWS - 1) // ROWS, True
    begin, end = steps * piece // ranges, steps * (piece + 1) // ranges
    of_columns = carray(floats_at(calls[0, _BIAS] + 4 * piece * width), (width,))
    of_block = carray(floats_at(calls[0, _BIAS] + 4 * (ranges + piece) * width), (width,))
    of_columns[:] = 0
    for i in range(len(calls) if begin == end else 0):
        carray(floats_at(calls[i, _C] + 4 * piece * width * calls[i, _M]), (width, calls[i, _M]))[:] = 0
    for step in range(begin, end):
        first = min(step * ROWS, size - ROWS)
        skip = step * ROWS - first
        given = carray(floats_at(calls[0, _B] + 4 * first * by_row), (ROWS, by_row))
        _add_rows(given[skip:, :width], of_columns, of_block)
        left = turned_block(given.ctypes.data, width, by_row, skip, own)
        for i in range(len(calls)):
            right = tensor_at(calls[i, _A] + 4 * first * calls[i, _LDA], calls[i, _M], ROWS, 1, calls[i, _LDA], own)
            out = carray(floats_at(calls[i, _C] + 4 * piece * width * calls[i, _M]), (width, calls[i, _M]))
            done = multiply_block(left, right, 0, out, 0, step > begin, own) and done
            free(right)
        free(left)
    return done


@kernel
def _sum_range(calls: Calls, ranges: int, piece: int, numbers: NDArray[np.int32], factors: NDArray[np.float32]) -> None:
    """`_add_range` by MKL, which multiplies all of a range at once."""
    width, size, by_row = calls[0, _N], calls[0, _K], calls[0, _LDB]
    first, stop = size * piece // ranges, size * (piece + 1) // ranges
    of_columns = carray(floats_at(calls[0, _BIAS] + 4 * piece * width), (width,))
    of_block = carray(floats_at(calls[0, _BIAS] + 4 * (ranges + piece) * width), (width,))
    of_columns[:] = 0
    for begin in range(first, stop, ROWS):
        given = carray(floats_at(calls[0, _B] + 4 * begin * by_row), (min(ROWS, stop - begin), by_row))
        _add_rows(given[:, :width], of_columns, of_block)
    for i in range(len(calls)):
        left, right = calls[i, _B] + 4 * first * by_row, calls[i, _A] + 4 * first * calls[i, _LDA]
        out = calls[i, _C] + 4 * piece * width * calls[i, _M]
        _call_sgemm(calls[i], (width, stop - first), (left, right, out), False, numbers, factors)


@kernel
def _do(
    calls: Calls,
    ranges: int,
    way: int,
    piece: int,
    numbers: NDArray[np.int32],
    factors: NDArray[np.float32],
    own: NDArray[np.int64],
) -> bool:
    """Do a piece: one of the ranges of all calls or, where `ranges` is 0, one call. Returns whether it could be done."""
    if way == SUMS_BY_ONEDNN:
        return _add_range(calls, ranges, piece, own)
    if way == SUMS_BY_MKL:
        _sum_range(calls, ranges, piece, numbers, factors)
        return True
    if ranges == 0:
        _multiply(calls[piece], 0, calls[piece, _N], numbers, factors)
        return True
    done = True
    for i in range(len(calls)):
        if way == BLOCKS_BY_ONEDNN:
            done = _multiply_rows(calls[i], piece, own) and done
        else:
            first, stop = calls[i, _N] * piece // ranges, calls[i, _N] * (piece + 1) // ranges
            _multiply(calls[i], first, stop - first, numbers, factors)
    return done


@kernel
def _work(board: NDArray[np.int64]) -> bool:
    """Work on pieces until none is left; returns whether the last one to be done was among them.

    No piece takes memory from numba, which would raise: nobody would wake who waits for a piece that was claimed.
    """
    numbers, factors, own = np.empty(8, np.int32), np.empty(2, np.float32), np.empty(ARGUMENTS, np.int64)
    while True:
        left = load_acquire(board, _LEFT)
        if left == 0:
            return False
        if not compare_and_swap(board, _LEFT, left, left - 1):
            continue
        # The piece is of the work that is on the board now, which stays there until it is done.
        pieces, calls = board[_PIECES], carray(_numbers_at(board[_TABLE]), (board[_CALLS], NUMBERS))
        if not _do(calls, board[_RANGES], board[_WAY], pieces - left, numbers, factors, own):
            board[_FAILED] = 1
        if fetch_add(board, _DONE, 1) + 1 == pieces:
            return True


@kernel
def _sleep_on(semaphore: int) -> None:
    while _sem_wait(semaphore) != 0:  # interrupted by a signal
        pass


@kernel
def _serve(board: NDArray[np.int64]) -> None:
    """Help whenever there is work, forever."""
    address = board.ctypes.data
    while True:
        _sleep_on(address + 8 * _WORK)
        if _work(board):
            _sem_post(address + 8 * _ENDED)


@kernel
def _begin(board: NDArray[np.int64], calls: Calls, ranges: int, way: int, helpers: int) -> None:
    """Put the work on the board and wake helpers. One that wakes late finds none, or helps with the next."""
    pieces = len(calls) if ranges == 0 else ranges
    board[_PIECES], board[_CALLS], board[_TABLE], board[_RANGES] = pieces, len(calls), calls.ctypes.data, ranges
    board[_WAY], board[_FAILED], board[_DONE] = way, 0, 0
    store_release(board, _LEFT, pieces)
    for _ in range(helpers):
        _sem_post(board.ctypes.data + 8 * _WORK)


@kernel
def _share(board: NDArray[np.int64], calls: Calls, ranges: int, way: int, helpers: int, looks: int) -> int:
    """Do all pieces with helpers, or nothing where the board is taken.

    As one kernel: an interrupt between its parts would leave work that nobody waits for, or a board that nobody gives back.
    """
    if not compare_and_swap(board, _TAKEN, 0, 1):
        return _BUSY
    _begin(board, calls, ranges, way, helpers)
    if not _work(board):
        for _ in range(looks):
            if load_acquire(board, _DONE) == board[_PIECES]:
                break
        _sleep_on(board.ctypes.data + 8 * _ENDED)
    result = _WRONG if board[_FAILED] != 0 else _RIGHT
    store_release(board, _TAKEN, 0)
    return result


@kernel
def _do_alone(calls: Calls, ranges: int, way: int) -> bool:
    """Do all pieces. Returns whether each could be done."""
    numbers, factors, own = np.empty(8, np.int32), np.empty(2, np.float32), np.empty(ARGUMENTS, np.int64)
    done = True
    for piece in range(len(calls) if ranges == 0 else ranges):
        done = _do(calls, ranges, way, piece, numbers, factors, own) and done
    return done


class _Helpers:
    """Threads that sleep in a kernel until there is work; as many as were ever asked for. One caller at a time has them."""

    def __init__(self) -> None:
        self.board, self._size, self._lock = np.zeros(_SIZE, np.int64), 0, threading.Lock()
        self._threads: list[int] = []
        self._core: int | None = None
        self._core_of_caller: Callable[[], int] = int
        """it keeps the interpreter's lock, as it takes less time than giving it back"""
        if sys.platform == "linux":
            self._core_of_caller = getattr(ctypes.PyDLL(None), "sched_getcpu", int)
            for at in (_WORK, _ENDED):
                ctypes.CDLL(None).sem_init(ctypes.c_void_p(self.board.ctypes.data + 8 * at), 0, 0)

    def share(self, calls: Calls, ranges: int, way: int, helpers: int) -> bool | None:
        """Do all pieces, unless another thread has the helpers: then return None.

        Returns whether each piece could be done.
        """
        if self.board[_TAKEN]:
            return None
        if self._size < helpers:
            with self._lock:
                while self._size < helpers:
                    self._add()
        self._leave_core_of_caller()
        result = _share(self.board, calls, ranges, way, helpers, LOOKS)
        return None if result == _BUSY else result == _RIGHT

    def _add(self) -> None:
        self._size += 1
        with suppress(RuntimeError):  # the system has no thread left: the caller does all pieces
            threading.Thread(target=self._help, name="products", daemon=True).start()

    def _help(self) -> None:
        self._threads.append(threading.get_native_id())
        self._core = None
        with single_threaded():
            _serve(self.board)

    def _leave_core_of_caller(self) -> None:
        """Let helpers run on any core but the caller's, where it may run on others.

        Linux likes to wake a thread on the core of who wakes it, where it runs first: the caller would wait for its helper.
        """
        core = self._core_of_caller()
        if core != self._core:
            self._core = core
            with suppress(OSError):  # a sandbox may refuse it
                others = os.sched_getaffinity(0) - {core}
                for thread in self._threads if others else ():
                    os.sched_setaffinity(thread, others)


_helpers = _Helpers()


def _forget_helpers() -> None:
    """In a child process, which has none of the threads."""
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_forget_helpers)


@cache
def here() -> bool:
    """Whether torch multiplies with an `sgemm` that kernels can call: on Linux, where it is built with MKL."""
    if sys.platform != "linux" or not knows_threads() or numba.config.DISABLE_JIT:
        return False
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        return False
    llvmlite.binding.add_symbol("ooc_sgemm", ctypes.cast(function, ctypes.c_void_p).value)
    onednn.here()  # its names, which the kernels have too
    return True


class SharedProduct(NamedTuple):
    """out [n, m] = left [n, k] @ right [k, m], plus bias [m] or, with `add`, what is there."""

    out: Tensor
    left: Tensor
    right: Tensor
    bias: Tensor | None = None
    add: bool = False

    def call(self, in_ranges: bool, way: int) -> list[int] | None:
        """The numbers of its call; None where torch has to multiply. in_ranges: whether rows are divided."""
        matrices = self.out, self.left, self.right
        if not all(map(_plain, matrices)) or not all(each.dim() == 2 for each in matrices):
            return None
        (rows, columns), inner = self.out.shape, self.left.size(1)
        if self.left.size(0) != rows or self.right.shape != (inner, columns) or 1 in (rows, columns):
            return None  # torch's product of one row or column has other bits
        if not self._bias_fits(rows if way in SUMS else columns):
            return None
        layouts = [_layout(each) for each in matrices]
        if None in layouts:
            return None
        (of_out, ldc), (of_left, ldb), (of_right, lda) = (each for each in layouts if each is not None)
        if of_out != _ROW_MAJOR or (in_ranges and of_left != _ROW_MAJOR) or max(rows, columns, inner, lda, ldb, ldc) > _MOST:
            return None
        places = self.right.data_ptr(), lda, self.left.data_ptr(), ldb, self.out.data_ptr(), ldc
        return [of_right, of_left, columns, rows, inner, *places, self.add, 0 if self.bias is None else self.bias.data_ptr()]

    def _bias_fits(self, size: int) -> bool:
        bias = self.bias
        return bias is None or (_plain(bias) and bias.is_contiguous() and bias.shape == (size,))


def _plain(x: Tensor) -> bool:
    """Whether the numbers of a tensor are float32 in memory that it has the address of."""
    return type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.dtype is torch.float32 and not x.is_neg()


def _layout(matrix: Tensor) -> tuple[int, int] | None:
    """(layout, leading dimension) of a matrix without gaps between the numbers of a row, or of a column; None for others.

    Strides of dimensions of one or no number mean nothing.
    """
    (rows, columns), (by_row, by_column) = matrix.shape, matrix.stride()
    if (by_column == 1 or columns <= 1) and (rows <= 1 or by_row >= max(1, columns)):
        return _ROW_MAJOR, max(1, columns, by_row if rows > 1 else 0)
    if (by_row == 1 or rows <= 1) and (columns <= 1 or by_column >= max(1, rows)):
        return _COLUMN_MAJOR, max(1, rows, by_column if columns > 1 else 0)
    return None


def _calls(products: Sequence[SharedProduct], in_ranges: bool, way: int) -> Calls | None:
    """The calls of all products; None where torch has to make one of them."""
    try:
        found = [each.call(in_ranges, way) for each in products]
    except RuntimeError:  # tensors of torch.func have no address
        return None
    if None in found or (in_ranges and len({each.out.size(0) for each in products}) > 1):
        return None
    calls = [each for each in found if each is not None]
    return np.array(calls, np.int64) if way == BY_MKL or _fits(calls, way) else None


def _fits(calls: Sequence[Sequence[int]], way: int) -> bool:
    """Whether oneDNN's blocks are whole, and sums have one left matrix by columns, right ones by rows, no gaps in `out`, and
    nothing to add to but the first one's sums of columns."""
    if way != SUMS_BY_MKL and not onednn.here():
        return False
    if way == BLOCKS_BY_ONEDNN:
        return all(call[_N] >= ROWS for call in calls)
    first = calls[0]
    return (
        first[_K] >= (ROWS if way == SUMS_BY_ONEDNN else 1)
        and first[_BIAS] != 0
        and not any(call[_BIAS] for call in calls[1:])
        and all(
            (call[_LAYOUT_B], call[_LAYOUT_A]) == (_COLUMN_MAJOR, _ROW_MAJOR)
            and (call[_B], call[_LDB], call[_N], call[_K]) == (first[_B], first[_LDB], first[_N], first[_K])
            and call[_LDC] == call[_M]
            and not call[_ADD]
            for call in calls
        )
    )


def share(products: Sequence[SharedProduct], threads: int, ranges: int = 0, way: int = BY_MKL) -> bool:
    """Make products in pieces that several threads take in turn, this one among them.

    Gradients are not recorded.

    Args:
        products: None reads what another one writes, unless both have the same rows and `ranges` is given.
        threads: This one and helpers.
        ranges: Even ranges of the rows of `out` and `left`, each of which is a piece: all products, in order. 0: each product
            is a piece.
        way: `BY_MKL`; `BLOCKS_BY_ONEDNN`, whose ranges are blocks of `onednn.ROWS` rows, however many `ranges` says; or
            `SUMS_BY_MKL` and `SUMS_BY_ONEDNN`: `out` is the first of so many sums, one behind another in memory, which together
            are the product.
            Each is of a range of left's columns, which all products have. The first product's `bias` is the first of so many
            sums of these columns, which are set too; behind them is as much memory again, to work in.

    Returns:
        Whether they were made. False, and nothing is done, where kernels cannot make one of them: not `here`, or matrices that
        are not float32 on the CPU, not row-major or column-major, of one row or column, or whose shapes do not fit.

    Raises:
        MemoryError: If oneDNN cannot multiply for want of memory.

    >>> share([SharedProduct(out, rows, weight.t())], threads=2, ranges=4)
    True
    """
    calls = _calls(products, ranges > 0 and way not in SUMS, way) if here() else None
    if calls is None:
        return False
    if way == BLOCKS_BY_ONEDNN:
        ranges = -(-products[0].out.size(0) // ROWS)
    helpers, done = min(threads, ranges or len(calls)) - 1, None
    with single_threaded():
        if helpers > 0:
            done = _helpers.share(calls, ranges, way, helpers)
        if done is None:
            done = _do_alone(calls, ranges, way)
    if not done:
        raise MemoryError("oneDNN has no memory left to multiply")
    torch.autograd.graph.increment_version([each.out for each in products if not each.out.is_inference()])
    return True

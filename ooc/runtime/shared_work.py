"""Work that several threads share in kernels, without the interpreter in between.

A piece of `ooc.runtime.crew` is started by Python: a thread that takes one waits for the interpreter's lock, which loader
threads hold between their kernels, and so does a helper that wakes. Here the caller and its helpers stay in a kernel. They
claim pieces by compare-and-swap, and sleep on semaphores.

Work is in phases, each of which begins when the one before is done. A phase has works, and these have pieces: ranges of rows of
matrices, which are summed up over neighbors, multiplied, and cut (`ooc.runtime.row_kernels`, `ooc.runtime.product_kernels`).
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numba import carray, types
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime.crew import single_threaded
from ooc.runtime.onednn import ARGUMENTS
from ooc.runtime.onednn import ROWS as ROWS_OF_BLOCK
from ooc.runtime.pointers import integers_at
from ooc.runtime.product_kernels import BLOCKS_BY_ONEDNN, NUMBERS, multiply_piece
from ooc.runtime.row_kernels import (
    AFTER,
    CALLS,
    FIRST_CALL,
    NOTHING,
    RANGES,
    ROWS,
    SUMS,
    WAY,
    WORK_NUMBERS,
    after_products,
    before_products,
)
from ooc.stores.atomics import compare_and_swap, fetch_add, load_acquire, store_release
from ooc.stores.jit import kernel

Table = NDArray[np.int64]
_LEFT, _DONE, _PIECES, _FIRST, _OF_PIECES, _OF_WORKS, _OF_CALLS, _FAILED = 0, 8, 16, 17, 18, 19, 20, 21
_WORK, _ENDED, _TAKEN, _SIZE = 24, 32, 40, 48
"""Numbers of a board, on cache lines of their own where several threads change them.

_LEFT: pieces of the phase that nobody has claimed. _DONE: those that are done. _PIECES, _FIRST: how many there are, and the
first one's place in the table of pieces. _OF_PIECES, _OF_WORKS, _OF_CALLS: addresses of tables. _FAILED: whether a piece could
not be done. _WORK, _ENDED: semaphores of 32 bytes; the first is posted for each helper that is woken, the second for the caller
where a helper does the last piece. _TAKEN: 1 while a caller has the board.
"""
_BUSY, _WRONG, _RIGHT = range(3)
"""results of `_share`"""
_SERVE = -1
"""given to `_take_part` by a helper, in place of the number of helpers that a caller wakes"""
_NO_ROWS = np.empty((0, 0), np.int64)
"""given to `_take_part` by a helper, in place of each of a caller's tables"""
LOOKS = 20_000
"""times that a thread looks whether there is something to do before it sleeps: some 20 microseconds"""
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))
_sem_trywait = types.ExternalFunction("sem_trywait", types.int32(types.intp))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.intp))


@kernel
def _do(
    calls: Table, work: NDArray[np.int64], piece: int, numbers: NDArray[np.int32], factors: NDArray[np.float32], own: Table
) -> bool:
    """Do a piece of a work. Returns whether it could be done."""
    ranges, rows = work[RANGES], work[ROWS]
    first, stop = rows * piece // max(ranges, 1), rows * (piece + 1) // max(ranges, 1)
    if work[WAY] == BLOCKS_BY_ONEDNN:
        first, stop = min(piece * ROWS_OF_BLOCK, rows), min((piece + 1) * ROWS_OF_BLOCK, rows)
    if work[SUMS] != 0:
        before_products(work, first, stop)
    done = multiply_piece(
        calls[work[FIRST_CALL] : work[FIRST_CALL] + work[CALLS]], ranges, work[WAY], piece, numbers, factors, own
    )
    if work[AFTER] != NOTHING:
        after_products(work, first, stop)
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
        # The piece is of the phase that is on the board now, which stays there until it is done.
        count = board[_PIECES]
        piece = carray(integers_at(board[_OF_PIECES] + 16 * (board[_FIRST] + count - left)), (2,))
        work = carray(integers_at(board[_OF_WORKS] + 8 * WORK_NUMBERS * piece[0]), (WORK_NUMBERS,))
        calls = carray(integers_at(board[_OF_CALLS]), (work[FIRST_CALL] + work[CALLS], NUMBERS))
        if not _do(calls, work, piece[1], numbers, factors, own):
            board[_FAILED] = 1
        if fetch_add(board, _DONE, 1) + 1 == count:
            return True


@kernel
def _sleep_on(semaphore: int) -> None:
    while _sem_wait(semaphore) != 0:  # interrupted by a signal
        pass


@kernel
def _there_soon(board: NDArray[np.int64], looks: int) -> bool:
    """Whether the caller puts another phase on the board soon."""
    for _ in range(looks):
        if load_acquire(board, _LEFT) != 0:
            return True
        if load_acquire(board, _TAKEN) == 0:
            return False
    return False


@kernel
def _serve(board: NDArray[np.int64], looks: int) -> None:
    """Help whenever there is work, forever."""
    semaphore = board.ctypes.data + 8 * _WORK
    while True:
        _sleep_on(semaphore)
        if _work(board):
            _sem_post(board.ctypes.data + 8 * _ENDED)
        while _there_soon(board, looks):
            _sem_trywait(semaphore)  # what was posted to wake this thread, which is awake
            if _work(board):
                _sem_post(board.ctypes.data + 8 * _ENDED)


@kernel
def _begin(board: NDArray[np.int64], first: int, count: int, helpers: int) -> None:
    """Put a phase on the board and wake helpers. One that wakes late finds none, or helps with the next."""
    board[_PIECES], board[_FIRST], board[_DONE] = count, first, 0
    store_release(board, _LEFT, count)
    for _ in range(helpers):
        _sem_post(board.ctypes.data + 8 * _WORK)


@kernel
def _share(board: NDArray[np.int64], calls: Table, works: Table, pieces: Table, phases: Table, helpers: int, looks: int) -> int:
    """Do all phases with helpers, or nothing where the board is taken.

    As one kernel: an interrupt between its parts would leave work that nobody waits for, or a board that nobody gives back.
    """
    if not compare_and_swap(board, _TAKEN, 0, 1):
        return _BUSY
    board[_OF_PIECES], board[_OF_WORKS], board[_OF_CALLS] = pieces.ctypes.data, works.ctypes.data, calls.ctypes.data
    board[_FAILED] = 0
    for phase in range(len(phases)):
        first, count = phases[phase, 0], phases[phase, 1]
        _begin(board, first, count, min(helpers, count - 1))
        if not _work(board):
            for _ in range(looks):
                if load_acquire(board, _DONE) == count:
                    break
            _sleep_on(board.ctypes.data + 8 * _ENDED)
    result = _WRONG if board[_FAILED] != 0 else _RIGHT
    store_release(board, _TAKEN, 0)
    return result


@kernel
def _take_part(
    board: NDArray[np.int64], calls: Table, works: Table, pieces: Table, phases: Table, helpers: int, looks: int
) -> int:
    """`_share`, or `_serve`, which does not return, where `helpers` is `_SERVE`. One kernel for both, so that numba loads their
    code once: a second one takes a tenth of a second."""
    if helpers == _SERVE:
        _serve(board, looks)
    return _share(board, calls, works, pieces, phases, helpers, looks)


@kernel
def _do_alone(calls: Table, works: Table, pieces: Table) -> bool:
    """Do all pieces. Returns whether each could be done."""
    numbers, factors, own = np.empty(8, np.int32), np.empty(2, np.float32), np.empty(ARGUMENTS, np.int64)
    done = True
    for i in range(len(pieces)):
        done = _do(calls, works[pieces[i, 0]], pieces[i, 1], numbers, factors, own) and done
    return done


Number = int | Tensor


def number_of(value: Number) -> int:
    """The number, or the address of the tensor."""
    return value if isinstance(value, int) else value.data_ptr()


class Work(NamedTuple):
    """Pieces of a phase.

    numbers: those of `ooc.runtime.row_kernels` that are not 0. calls: the products' (`ooc.runtime.product_kernels`). A tensor
    stands for its address, and is kept as long as the work.
    """

    pieces: int
    numbers: Mapping[int, Number]
    calls: Sequence[Sequence[Number]] = ()


Tables = tuple[Table, Table, Table, Table]
"""calls, works, pieces and phases"""


def _tables(phases: Sequence[Sequence[Work]]) -> Tables:
    """What `_share` takes: calls, works, pieces and phases."""
    calls, works, pieces, bounds = list[list[int]](), list[list[int]](), list[tuple[int, int]](), list[tuple[int, int]]()
    for phase in phases:
        first = len(pieces)
        for count, numbers, own in phase:
            work = [0] * WORK_NUMBERS
            for at, value in numbers.items():
                work[at] = number_of(value)
            work[FIRST_CALL], work[CALLS] = len(calls), len(own)
            pieces += [(len(works), i) for i in range(count)]
            works.append(work)
            calls += [[*map(number_of, call)] for call in own]
        bounds.append((first, len(pieces) - first))
    rows = np.array(calls, np.int64).reshape(len(calls), NUMBERS)
    return rows, np.array(works, np.int64), np.array(pieces, np.int64), np.array(bounds, np.int64)


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

    def share(self, tables: Tables, helpers: int) -> bool | None:
        """Do all phases, unless another thread has the helpers: then return None. tables: of `_share`.

        Returns whether each piece could be done.
        """
        if self.board[_TAKEN]:
            return None
        if self._size < helpers:
            with self._lock:
                while self._size < helpers:
                    self._add()
        self._leave_core_of_caller()
        result = _take_part(self.board, *tables, helpers, LOOKS)
        return None if result == _BUSY else result == _RIGHT

    def _add(self) -> None:
        self._size += 1
        with suppress(RuntimeError):  # the system has no thread left: the caller does all pieces
            threading.Thread(target=self._help, name="products", daemon=True).start()

    def _help(self) -> None:
        self._threads.append(threading.get_native_id())
        self._core = None
        with single_threaded():
            _take_part(self.board, _NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS, _SERVE, LOOKS)

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


def share_work(phases: Sequence[Sequence[Work]], threads: int) -> None:
    """Do works in several threads, this one among them; in this one alone where another thread has the helpers.

    Args:
        phases: Works of each, which have a piece at least. Those of a phase do not read what another one writes, nor write
            where another one does.
        threads: This one and helpers.

    Raises:
        MemoryError: If oneDNN cannot multiply for want of memory.

    >>> share_work([[Work(4, {RANGES: 4, ROWS: 2000, WAY: BY_MKL}, calls)]], threads=2)
    """
    tables = _tables(phases)
    helpers, done = min(threads, max(count for _, count in tables[3].tolist())) - 1, None
    with single_threaded():
        if helpers > 0:
            done = _helpers.share(tables, helpers)
        if done is None:
            done = _do_alone(*tables[:3])
    if not done:
        raise MemoryError("oneDNN has no memory left to multiply")

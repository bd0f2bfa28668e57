"""Pieces of a step in several threads, each piece in one.

OpenMP divides an operation evenly and ends it when its last thread is done: where loader threads take a core meanwhile, all
wait for the thread that shares it, and every operation wakes the threads anew. Here a thread takes the next piece when it is
done with one. The threads stay, and sleep in between.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

Piece = Callable[[], object]
FEW = 2**18
"""numbers up to which an operation on each of them takes less time than waking another thread for it, at a core that is busy"""


class _Share:
    """Pieces that several threads take in turn."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._left, self._lock = iter(pieces), threading.Lock()
        self._undone, self._done = len(pieces), threading.Event()
        if not pieces:
            self._done.set()
        self._failure: BaseException | None = None
        self._inference = torch.is_inference_mode_enabled()

    def work(self) -> None:
        """Do pieces until none is left. What one fails on is kept, and ends the work."""
        while (piece := self._next()) is not None:
            try:
                piece()
            except BaseException as error:  # raised by `wait`
                self._failure = error
            self._count()

    def help(self) -> None:
        """`work` in another thread, whose modes are not the caller's."""
        with torch.inference_mode(self._inference), torch.no_grad(), single_threaded():
            self.work()

    def wait(self) -> None:
        """Until all pieces are done, also where a helper has not woken yet. Raises what a piece failed on."""
        self._done.wait()
        if self._failure is not None:
            raise self._failure

    def _next(self) -> Piece | None:
        with self._lock:
            return next(self._left, None)

    def _count(self) -> None:
        with self._lock:
            self._undone -= 1
            if self._failure is not None:  # those that no thread has taken are left out
                self._undone -= sum(1 for _ in self._left)
            if self._undone == 0:
                self._done.set()


class _Crew:
    """Threads that help whoever has pieces; as many as were ever asked for."""

    def __init__(self) -> None:
        self._shares: SimpleQueue[_Share] = SimpleQueue()
        self._size, self._lock = 0, threading.Lock()

    def help(self, share: _Share, helpers: int) -> None:
        with self._lock:
            while self._size < helpers:
                threading.Thread(target=self._serve, name="crew", daemon=True).start()
                self._size += 1
        for _ in range(helpers):
            self._shares.put(share)

    def _serve(self) -> None:
        while True:
            share = self._shares.get()
            share.help()
            del share  # a waiting thread keeps no tensor alive


_crew = _Crew()
os.register_at_fork(after_in_child=lambda: _crew.__init__())  # type: ignore[misc]  # a child has none of the threads


def in_pieces(pieces: Sequence[Piece], threads: int | None = None) -> None:
    """Do all pieces, in any order and several at once, in as many threads as torch has (or `threads`), this one among them.

    For torch's operations where `knows_threads`, and kernels that release the GIL. Gradients are not recorded.

    >>> in_pieces([partial(torch.mm, rows[:512], weight, out=out[:512]), partial(torch.mm, rows[512:], weight, out=out[512:])])
    """
    helpers = min(threads or torch.get_num_threads(), len(pieces)) - 1
    share = _Share(pieces)
    if helpers > 0:
        _crew.help(share, helpers)
    with torch.no_grad(), single_threaded():
        share.work()
    share.wait()


@cache
def _thread_counts() -> tuple[Any, Any, Any] | None:
    """(OpenMP's threads of the calling thread, a function that sets them, one that sets MKL's and returns those before), None
    where torch is built with others. They keep the GIL, as they take less time than giving it back."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        library = ctypes.PyDLL(str(folder / "libtorch_cpu.so"))
        found = library.omp_get_max_threads, library.omp_set_num_threads, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None
    for function in found[1:]:
        function.argtypes = [ctypes.c_int]
    found[1].restype = None
    return found


def knows_threads() -> bool:
    """Whether `single_threaded` has an effect."""
    return _thread_counts() is not None


class threads_kept:
    """The calling thread has as many threads for torch's operations at the end as at the beginning, whatever happens within."""

    def __enter__(self) -> None:
        counts = _thread_counts()
        if counts is not None:
            threads, _, set_mkl = counts
            of_mkl = set_mkl(0)
            set_mkl(of_mkl)
            self._before = threads(), of_mkl

    def __exit__(self, *_: object) -> None:
        counts = _thread_counts()
        if counts is not None:
            _, set_threads, set_mkl = counts
            threads, of_mkl = self._before
            set_threads(threads)
            set_mkl(of_mkl)


class single_threaded(threads_kept):
    """Do torch's operations in the calling thread alone; others keep the threads they have."""

    def __enter__(self) -> None:
        counts = _thread_counts()
        if counts is not None:
            threads, set_threads, set_mkl = counts
            self._before = threads(), set_mkl(1)
            set_threads(1)


def few(numbers: int) -> AbstractContextManager[None]:
    """Do torch's operations on each of so many numbers in one thread where they are few; torch divides them from 32,768 on.

    Args:
        numbers: Of the largest tensor, or of all that one call changes.

    Returns:
        A context in which the calling thread works alone, or one that changes nothing.

    >>> with few(logits.numel()):
    ...     loss = torch.nn.functional.cross_entropy(logits, labels)
    """
    return single_threaded() if numbers <= FEW else nullcontext()


def with_few(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`function` of x, computed as with `few`, and its gradient too, for which torch would wake a thread otherwise.

    Args:
        x: [*], on any device.
        function: Gives one tensor that depends on x, which it may not change in place.

    Returns:
        What it gives, not to be changed in place. Its backward pass is made within `threads_kept`, as it ends with one thread
        where it fails or does not get to x.

    >>> loss = with_few(logits, lambda rows: torch.nn.functional.cross_entropy(rows, labels))
    >>> with threads_kept():
    ...     loss.backward()
    """
    if x.numel() > FEW or not x.is_cpu or not knows_threads():
        return function(x)
    if not (x.requires_grad and torch.is_grad_enabled()):
        with single_threaded():
            return function(x)
    alone = single_threaded()
    with single_threaded():
        inner = function(_Calling.apply(x, alone.__exit__))  # type: ignore[no-untyped-call]
        out: torch.Tensor = _Calling.apply(inner, alone.__enter__)  # type: ignore[no-untyped-call]
    return out


class _Calling(torch.autograd.Function):
    """x; where the backward pass comes to it, `call` is called first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad, None


def in_one_call(parameters: Collection[torch.Tensor]) -> bool | None:
    """What Adam's `fused` should be: whether parameters on the CPU are so few that a step of them stays in one thread.

    Otherwise torch makes ten calls for each parameter, which take longer than the step. None: as torch would have it, also for
    parameters that are not contiguous, whose strides torch's fused step ignores.
    """
    plain = all(each.device.type == "cpu" and each.is_floating_point() and each.is_contiguous() for each in parameters)
    return True if plain and sum(each.numel() for each in parameters) <= FEW else None

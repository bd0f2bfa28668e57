"""Shared by the engines: a plan cut into slices of about equal cost, each the work of one reading thread; and closing."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stores.errors import StoreError
from stores.io.engines.deliver import Ranges
from stores.io.read_plan import ReadPlan

READ_COST_BYTES = 16 * 1024
"""A read costs about as much as transferring this many bytes more: measured, the disk does 104,000 reads of 4 KiB or
66,000 of 16 KiB a second."""
TASK_COST_BYTES = 4 * (4096 + READ_COST_BYTES)
"""Four small reads at least: waking a thread costs about as much as one of them."""


def slices(length: NDArray[np.int64], tasks: int) -> NDArray[np.int64]:
    """Bounds int64[t + 1], t <= tasks: extents bounds[j]:bounds[j + 1] cost about the same for every j, and not too little."""
    cost = np.cumsum(length + READ_COST_BYTES)
    if len(length) == 0:
        return np.zeros(1, np.int64)
    tasks = min(tasks, -(-int(cost[-1]) // TASK_COST_BYTES))
    bounds = np.searchsorted(cost, np.linspace(0, cost[-1], tasks + 1)[1:-1])
    return np.unique(np.concatenate([[0], bounds, [len(length)]]))


def whole_extents(plan: ReadPlan, buffer: NDArray[np.uint8]) -> Ranges:
    """Every extent as one range of bytes, wanted in `buffer` where it stands among them (see `Engine.read`)."""
    if buffer.dtype != np.uint8 or buffer.shape != (plan.nbytes,):
        raise ValueError(f"buffer must be uint8[{plan.nbytes}], not {buffer.dtype}{list(buffer.shape)}")
    _check_address(buffer)
    at, own = np.cumsum(plan.length) - plan.length, np.arange(len(plan.length) + 1)
    return Ranges(at, at, own, own, at, plan.length, buffer.ctypes.data)


def rows_of(plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None) -> Ranges:
    """The plan's rows, wanted in their places in `out` (see `Engine.gather`)."""
    check_out(plan, out, at)
    destination = (np.arange(len(plan.order)) if at is None else at) * plan.row_bytes
    begins, size = np.cumsum(plan.length) - plan.length, np.array([plan.row_bytes])
    return Ranges(begins, plan.row_at, plan.order, plan.first, destination, size, out.ctypes.data)


def _check_address(out: NDArray[np.uint8]) -> None:
    """Its address is all that a kernel gets."""
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out must be contiguous and writable")


def check_out(plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None) -> None:
    """Raise ValueError where the rows of a plan do not fit `out` (see `Engine.gather`)."""
    wanted = len(plan.order) * plan.row_bytes
    if out.dtype != np.uint8 or out.ndim != 1 or (len(out) != wanted if at is None else len(out) % plan.row_bytes):
        raise ValueError(f"out must be uint8[{wanted}], not {out.dtype}{list(out.shape)}")
    _check_address(out)
    places = len(out) // plan.row_bytes
    if at is not None and (at.shape != plan.order.shape or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < places)):
        raise ValueError(f"at must be {len(plan.order)} places within {places} rows")


def run_slices(pool: ThreadPoolExecutor, threads: int, plan: ReadPlan, work: Callable[[int, int], int]) -> int:
    """Sum of work(first, last) over slices of the plan's extents, `threads` at once; the first failure is raised.

    Returns, or raises (an interrupt too), only when no thread touches the caller's memory any more.
    """
    bounds = slices(plan.length, threads).tolist()
    if len(bounds) <= 2:
        return sum(work(first, last) for first, last in pairwise(bounds))
    begun = Begun()
    try:
        futures = [pool.submit(begun.run, work, first, last) for first, last in pairwise(bounds)]
        wait(futures)
    except BaseException:
        begun.stop()
        raise
    return sum(future.result() for future in futures)


class Begun:
    """What threads do with memory that they have by its address alone; it counts itself, for an interrupt may come between a
    task's begin and the moment its future has a name.

    >>> begun = Begun()
    >>> pool.submit(begun.run, work, first, last)
    >>> begun.stop()  # before the memory is given back
    """

    def __init__(self) -> None:
        self._running, self._stopped = 0, False
        self._changed = threading.Condition()

    def run(self, work: Callable[..., int], *arguments: Any) -> int:
        """work(*arguments); 0 where all was stopped before."""
        with self._changed:
            if self._stopped:
                return 0
            self._running += 1
        try:
            return work(*arguments)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Nothing begins any more, and what has begun is waited for, whatever comes."""
        while True:
            try:
                with self._changed:
                    self._stopped = True
                    self._changed.wait_for(lambda: not self._running)
                return
            except KeyboardInterrupt:
                continue


def settle(futures: list[Future[int]]) -> None:
    """Wait whatever comes: an impatient second interrupt must not let threads write to memory that is given back."""
    while True:
        try:
            wait(futures)
            return
        except KeyboardInterrupt:
            continue


class Gate:
    """Lets reads through until it is closed, and closes only when none is under way.

    A descriptor closed under a running read may be another file's by the time the thread gets to it.

    >>> with gate.reading():
    ...     os.pread(fd, 4096, 0)
    >>> if gate.close():
    ...     os.close(fd)
    """

    def __init__(self, what: object) -> None:
        self._what = what
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()
        self._process = os.getpid()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a read. Raises StoreError once the gate is closed, and in a forked process, which has no reading threads."""
        if os.getpid() != self._process:
            raise StoreError(f"{self._what} was opened before a fork: open it again in the new process to read from it")
        with self._changed:
            if self._closed:
                raise StoreError(f"{self._what} is closed: open it again to read from it")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Refuse further reads and wait for those under way; True for the one caller that closed the gate."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: self._running == 0 or os.getpid() != self._process)
        return first

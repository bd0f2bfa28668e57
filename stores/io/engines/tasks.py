"""Shared by the engines: dividing a plan into slices of about equal cost for reading threads, and closing."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import StoreError
from ooc.stores.io.engines.deliver import Ranges
from ooc.stores.io.read_plan import ReadPlan

READ_COST_BYTES = 16 * 1024
"""a read costs about as much as transferring this many bytes (measured: 104,000 reads of 4 KiB, 66,000 of 16 KiB per second)"""
TASK_COST_BYTES = 4 * (4096 + READ_COST_BYTES)
"""at least four small reads, because waking a thread costs about as much as one"""


def slices(length: NDArray[np.int64], tasks: int) -> NDArray[np.int64]:
    """Return bounds int64[t + 1], t <= tasks, such that extents bounds[j]:bounds[j + 1] cost about the same for every j."""
    cost = np.cumsum(length + READ_COST_BYTES)
    if len(length) == 0:
        return np.zeros(1, np.int64)
    tasks = min(tasks, -(-int(cost[-1]) // TASK_COST_BYTES))
    bounds = np.searchsorted(cost, np.linspace(0, cost[-1], tasks + 1)[1:-1])
    return np.unique(np.concatenate([[0], bounds, [len(length)]]))


def whole_extents(plan: ReadPlan, buffer: NDArray[np.uint8]) -> Ranges:
    """Every extent as one range, with its position in `buffer` (see `Engine.read`)."""
    if buffer.dtype != np.uint8 or buffer.shape != (plan.nbytes,):
        raise ValueError(f"buffer must be uint8[{plan.nbytes}], not {buffer.dtype}{list(buffer.shape)}")
    _check_address(buffer)
    at, own = np.cumsum(plan.length) - plan.length, np.arange(len(plan.length) + 1)
    return Ranges(at, at, own, own, at, plan.length, buffer.ctypes.data)


def rows_of(plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None) -> Ranges:
    """The plan's rows with their positions in `out` (see `Engine.gather`)."""
    check_out(plan, out, at)
    destination = (np.arange(len(plan.order)) if at is None else at) * plan.row_bytes
    begins, size = np.cumsum(plan.length) - plan.length, np.array([plan.row_bytes])
    return Ranges(begins, plan.row_at, plan.order, plan.first, destination, size, out.ctypes.data)


def _check_address(out: NDArray[np.uint8]) -> None:
    """Check memory that a kernel accesses by address."""
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out must be contiguous and writable")


def check_out(plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None) -> None:
    """Raise ValueError if the rows of a plan do not fit `out` (see `Engine.gather`)."""
    needed = len(plan.order) * plan.row_bytes
    if out.dtype != np.uint8 or out.ndim != 1 or (len(out) != needed if at is None else len(out) % plan.row_bytes):
        raise ValueError(f"out must be uint8[{needed}], not {out.dtype}{list(out.shape)}")
    _check_address(out)
    places = len(out) // plan.row_bytes
    if at is not None and (at.shape != plan.order.shape or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < places)):
        raise ValueError(f"at must be {len(plan.order)} places within {places} rows")


def run_slices(pool: ThreadPoolExecutor, threads: int, plan: ReadPlan, work: Callable[[int, int], int]) -> int:
    """Sum work(first, last) over slices of the plan's extents, `threads` at once; the first failure is raised.

    Returns or raises (also on an interrupt) only when no thread accesses the caller's memory any more.
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
    """Counts the running tasks that access memory by address; an interrupt may come before a task's future has a name.

    >>> begun = Begun()
    >>> pool.submit(begun.run, work, first, last)
    >>> begun.stop()  # before the memory is given back
    """

    def __init__(self) -> None:
        self._running, self._stopped = 0, False
        self._changed = threading.Condition()

    def run(self, work: Callable[..., int], *arguments: Any) -> int:
        """Run work(*arguments); returns 0 if stopped before."""
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
        """Prevent further tasks from starting and wait for those in progress, in any case."""
        while True:
            try:
                with self._changed:
                    self._stopped = True
                    self._changed.wait_for(lambda: not self._running)
                return
            except KeyboardInterrupt:
                continue


def settle(futures: Sequence[Future[Any]]) -> None:
    """Wait for all futures in any case; a second interrupt must not let threads write to released memory."""
    while True:
        try:
            wait(futures)
            return
        except KeyboardInterrupt:
            continue


class Gate:
    """Admits reads until it is closed, and closes only when none is in progress.

    A descriptor closed during a read could refer to another file by the time the thread uses it.

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
        """Wrap a read. Raises StoreError once the gate is closed, and in a forked process, which has no reading threads."""
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
        """Refuse further reads and wait for those in progress; returns True to the one caller that closed the gate."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: self._running == 0 or os.getpid() != self._process)
        return first

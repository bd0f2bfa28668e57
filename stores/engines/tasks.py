"""Shared by the engines: a plan cut into slices of about equal cost, each the work of one reading thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stores.plan import ReadPlan

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


def run_slices(pool: ThreadPoolExecutor, threads: int, plan: ReadPlan, work: Callable[[int, int], int]) -> int:
    """Sum of work(first, last) over slices of the plan's extents, `threads` at once; the first failure is raised.

    Returns only when no thread touches the caller's memory any more.
    """
    bounds = slices(plan.length, threads).tolist()
    if len(bounds) <= 2:
        return sum(work(first, last) for first, last in pairwise(bounds))
    futures = [pool.submit(work, first, last) for first, last in pairwise(bounds)]
    wait(futures)
    return sum(future.result() for future in futures)

"""Waiting for what other threads do: as long as it takes, since only what never happens is a failure."""

import sys
import threading
import time
import traceback
from collections.abc import Callable

from ooc.runtime.pipeline import _State

DEADLINE_S = 60.0
_STAGES = {f"ooc-{name}" for name in ("source", "sample", "read", "sum", "pack", "collate")}


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true within `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def stage_threads() -> list[str]:
    """Names of the living threads of loaders' pipelines; the pools that carry out reads (`ooc-read_3`) are shared."""
    return [thread.name for thread in threading.enumerate() if thread.name in _STAGES]


def no_threads() -> bool:
    """Whether all threads of loaders' pipelines end."""
    return eventually(lambda: not stage_threads())


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """`work(i)` in a thread of its own for each i below `count`, all at once."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class NoMoreThreads:
    """In place of `threading.Thread.start`: of the pipelines' threads, number `at` cannot be begun, or is interrupted."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.start = at, error, threading.Thread.start

    def __call__(self, thread: threading.Thread) -> None:
        if thread.name in _STAGES:
            self.at -= 1
            if isinstance(self.error, RuntimeError) and self.at < 0:
                raise self.error
        self.start(thread)
        if self.at < 0 and thread.name in _STAGES:  # Ctrl-C while it waits for the thread
            raise self.error


def consumer_waits() -> bool:
    """Whether the main thread waits for a pipeline's next item."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    codes = [each.f_code for each, _ in traceback.walk_stack(frame)]
    return codes[0] is threading.Condition.wait.__code__ and _State.take.__code__ in codes

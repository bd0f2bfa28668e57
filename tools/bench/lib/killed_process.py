"""Processes that are killed at random moments, and shared memory that says where they were.

A process is forked from one that has imported and compiled everything, so each run takes a fraction of a second.
"""

import argparse
import functools
import json
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

_POLL_SECONDS = 0.0002


class Places:
    """Where a process is: counts of entering and leaving each place, in memory shared with its parent.

    >>> places = Places("push", "refresh")
    >>> places.watch(History, "_write", "push")  # in the child
    >>> places.inside()  # in the parent, once the child is dead
    ['push']
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        memory = mmap.mmap(-1, 24 * len(names))
        counts = np.frombuffer(memory, np.int64, 2 * len(names))
        self._entered, self._left = counts[: len(names)], counts[len(names) :]
        self._seconds = np.frombuffer(memory, np.float64, offset=counts.nbytes)
        self._lock = threading.Lock()

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Be at a place during the block."""
        place, began = self._names.index(name), time.perf_counter()
        with self._lock:
            self._entered[place] += 1
        try:
            yield
        finally:
            with self._lock:
                self._left[place] += 1
                self._seconds[place] += time.perf_counter() - began

    def watch(self, owner: Any, function: str, name: str) -> None:
        """Make every call of `owner.function` count as being at a place."""
        run = getattr(owner, function)

        @functools.wraps(run)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            with self.at(name):
                return run(*arguments, **keywords)

        setattr(owner, function, watched)

    def reset(self) -> None:
        """Reset before another process starts."""
        self._entered[:], self._left[:], self._seconds[:] = 0, 0, 0

    def entered(self, name: str) -> int:
        """How often a place was entered."""
        return int(self._entered[self._names.index(name)])

    def seconds(self, name: str) -> float:
        """Average duration of completed stays."""
        place = self._names.index(name)
        return float(self._seconds[place]) / max(1, int(self._left[place]))

    def inside(self) -> list[str]:
        """Places entered and not left."""
        return [name for name, more in zip(self._names, self._entered > self._left, strict=True) if more]


def fork(run: Callable[[], int], log: Path) -> int:
    """Fork a process that executes `run` and exits with its result, with output appended to `log`; returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Difference(Exception):
    """Something on disk differs from what is expected."""


def command(
    text: str | None, places: Sequence[str], nodes: int, kill: Callable[[Path, int, list[str], int, int], dict[str, Any]]
) -> None:
    """Command line of a module that kills processes; prints the result of `kill(work, kills, places, seed, nodes)` as JSON.

    `text` is the module's docstring, `nodes` the default graph size. Exits with 1, naming the seed, if something differs.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a directory to make; removed again where all is well")
    parser.add_argument("--kills", type=int, default=100, help="inside each place")
    parser.add_argument("--places", nargs="+", choices=places, default=places)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--nodes", type=int, default=nodes)
    a = parser.parse_args()
    try:
        print(json.dumps(kill(a.work.absolute(), a.kills, list(a.places), a.seed, a.nodes)))
    except Difference as error:
        sys.exit(f"--seed {a.seed}: {error}")


def end_of(child: int) -> int:
    """Wait for a process; returns its exit code, or the negative signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ended(child: int, seconds: float) -> tuple[int | None, int]:
    """Wait for a process, and kill it if it hangs: (`end_of` it, or None; its peak memory in bytes).

    It hangs if it takes more than `seconds` of a core, or neither runs nor waits for a core for so long; what else the machine
    does meanwhile does not count.
    """
    began = time.monotonic()
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
        elapsed = time.monotonic() - began
        if elapsed > seconds:
            runs, waits = _core_seconds(child)
            if runs > seconds or elapsed - runs - waits > seconds:
                os.kill(child, signal.SIGKILL)
                return None, os.wait4(child, 0)[2].ru_maxrss * 1024
        time.sleep(min(0.5, max(0.005, elapsed / 50)))


def _core_seconds(process: int) -> tuple[float, float]:
    """Seconds that a process's threads ran, and that they waited for a core."""
    sums = [0, 0]
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            for place, nanoseconds in enumerate((task / "schedstat").read_text().split()[:2]):
                sums[place] += int(nanoseconds)
    return sums[0] / 1e9, sums[1] / 1e9


def killed_inside(child: int, places: Places, place: str, nth: int, delay_s: float) -> int:
    """SIGKILL a process `delay_s` seconds after its nth entry of a place; returns `end_of` it, killed or complete."""
    while places.entered(place) < nth:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_SECONDS)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    return end_of(child)

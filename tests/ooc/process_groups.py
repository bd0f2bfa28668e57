"""torch's process group: without other processes, and of real ones that gloo connects."""

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import forked


@contextmanager
def process_group(rank: int, size: int = 2) -> Iterator[None]:
    """torch's process group as rank `rank` has it; nothing is ever sent."""
    distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


class GlooProcesses:
    """`size` processes of one thread that gloo connects, each running `work(*given)`, which must be of a module.

    `results` waits for all of them; leaving the block kills those that still run.

    >>> with GlooProcesses(2, losses_of, config) as group:
    ...     first, second = group.results()
    """

    def __init__(self, size: int, work: Callable[..., Any], *given: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ooc-gloo-")
        self._answers: Any = forked._context.Queue()
        store = Path(self._folder.name) / "store"
        self.processes = [
            forked._context.Process(target=_member, args=(rank, size, store, self._answers, work, given))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def results(self, timeout: float = 240) -> list[Any]:
        """What `work` returned, by rank. Raises AssertionError with the traceback where it raised, or a process ended."""
        found: dict[int, Any] = {}
        until = time.monotonic() + timeout
        while len(found) < len(self.processes):
            try:
                rank, value, error = self._answers.get(timeout=0.5)
            except queue.Empty:
                ended = [rank for rank, each in enumerate(self.processes) if each.exitcode is not None and rank not in found]
                assert not (ended and self._answers.empty()), f"ranks {ended} ended without an answer"
                assert time.monotonic() < until, f"ranks {sorted(set(range(len(self.processes))) - set(found))} still work"
                continue
            assert error is None, f"rank {rank}: {error}"
            found[rank] = value
        return [found[rank] for rank in range(len(self.processes))]

    def kill(self, rank: int) -> None:
        """End one at once."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def wait(self, timeout: float = 60) -> list[int | None]:
        """The exit codes, once all have ended, or are still running after so many seconds (None)."""
        until = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _member(rank: int, size: int, store: Path, answers: Any, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    kept = distributed.FileStore(str(store), size)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", rank=rank, world_size=size, store=kept, timeout=timedelta(seconds=60))
    try:
        answers.put((rank, work(*given), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
        answers.close()
        answers.join_thread()
        os._exit(1)
    distributed.destroy_process_group()


def in_processes(size: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """What `work(*given)` returns in each of `size` processes that gloo connects; see `GlooProcesses`."""
    with GlooProcesses(size, work, *given) as group:
        return group.results()

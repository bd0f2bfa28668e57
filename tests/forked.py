"""Python processes for tests, forked from one that has imported everything: a process takes milliseconds, not seconds."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

PRELOADED = [
    "ooc.cli.main",
    "ooc.training.loop",
    "ooc.training.open_run",
    "ooc.training.infer",
    "ooc.stores.ingest",
    "zarr",
    "tests.warm",
]
FORKED = "forkserver"
"""method that starts such a process, of `multiprocessing`"""
_context: ForkServerContext = multiprocessing.get_context(FORKED)
_context.set_forkserver_preload(PRELOADED)


class _Files:
    """File descriptors on their way to a process."""

    def __init__(self, descriptors: list[int]) -> None:
        self.descriptors = descriptors

    def __getstate__(self) -> list[Any]:
        return [DupFd(each) for each in self.descriptors]

    def __setstate__(self, sent: list[Any]) -> None:
        self.descriptors = [each.detach() for each in sent]


def _python(words: list[str], env: dict[str, str], outputs: "_Files") -> None:
    """What `python WORDS` does, here."""
    os.environ.clear()
    os.environ.update(env)
    for descriptor, opened in enumerate(outputs.descriptors, 1):
        os.dup2(opened, descriptor)
        os.close(opened)
    flag, what, *arguments = words
    sys.argv = [what, *arguments]
    if flag == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = "-c"
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


class Python:
    """A running `python -m MODULE ...` or `python -c CODE ...`; `wait` ends it.

    into: a file descriptor that takes all output; by default `wait` returns it. env: variables beside those of this process.

    >>> Python("-m", "ooc.cli", "info", "s.ooc").wait().returncode
    0
    """

    def __init__(self, *words: str | Path, into: int | None = None, env: dict[str, str] | None = None) -> None:
        self._words = [str(word) for word in words]
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 - `wait` closes them
        files = _Files([each.fileno() if into is None else into for each in self._outputs])
        self.process: BaseProcess = _context.Process(target=_python, args=(self._words, {**os.environ, **(env or {})}, files))
        self.process.start()

    def poll(self) -> int | None:
        """The exit code, less than 0 for the signal that killed it; None while it runs."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid or 0, number)

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Exit code and what was printed, when it has ended; killed where that takes longer than `timeout` seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        texts = []
        for output in self._outputs:
            with output:
                output.seek(0)
                texts.append(output.read())
        return subprocess.CompletedProcess(self._words, self.process.exitcode or 0, *texts)


def in_child(work: Callable[[], None]) -> int:
    """Do the work in a fork of this process: its exit code."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def python(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *words], capture_output=True, text=True)`, without the imports."""
    return Python(*words).wait()

"""What Ctrl-C says of a verb: how to continue."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ooc.stores.errors import OocError

WHOLE_OR_NOT = "the change is in the store whole or not at all: `ooc info` shows which"
RUN_AGAIN = "run the same command again to continue"


def unless_whole(out: Path) -> Callable[[], str]:
    """`RUN_AGAIN`, or where the store `out`, which is not there yet, is by then, that it is."""
    there = out.exists()
    return lambda: f"{out} was built by then" if out.exists() and not there else RUN_AGAIN


def writes_here() -> bool:
    """Whether this is the process, of those that torchrun has started, that prints what all of them did."""
    return os.environ.get("RANK", "0") == "0"


def say_results(*lines: str) -> None:
    """Print what a verb has done, of several processes by the first one. It stands, so Ctrl-C changes nothing any more."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `ooc.cli.main` sets it back
    if writes_here():
        print(*lines, sep="\n")


class Interrupted(OocError):
    """A verb ended by Ctrl-C; its text is the line to print."""


@contextmanager
def after_ctrl_c(hint: str | Callable[[], str]) -> Iterator[None]:
    """Raise KeyboardInterrupt as `Interrupted` with a hint of how to continue, which may depend on what is there by then."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {hint if isinstance(hint, str) else hint()}") from None

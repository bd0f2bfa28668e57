"""What a run says to its user: progress lines of a long pass, and warnings that name the user's line."""

import contextlib
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ooc.stores.errors import OocWarning

_PACKAGE = str(Path(__file__).resolve().parents[1]), contextlib.__file__
"""where a warning is not of the user's making"""
LINE_SECONDS = 10.0
"""seconds between two progress lines"""


def speed(count: float, seconds: float, unit: str) -> str:
    """Format a rate, like 16,660 events/s."""
    rate = count / max(seconds, 1e-9)
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


def say(text: str) -> None:
    """Print a line to stderr; a closed pipe (`ooc train ... 2>&1 | head`) does not end the run."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


class Pace:
    """Reports the progress of a long pass through `note` every ten seconds."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._what, self._done = note, "", 0
        self._since = self._reported = time.monotonic()

    def __call__(self, what: str, done: int, total: int, unit: str) -> None:
        """Report that `done` of `total` units are complete; a new name or a smaller `done` starts a new pass."""
        now = time.monotonic()
        if what != self._what or done < self._done:
            self._what, self._since, self._reported = what, now, now
        self._done = done
        if now - self._reported >= LINE_SECONDS and done < total:
            self._reported, passed = now, now - self._since
            left = f", {(total - done) * passed / done:.0f} s left" if done else ""
            self._note(f"{what}: {done:,} of {total:,} {unit}, {speed(done, passed, unit)}{left}")


def warn_user(text: str, category: type[Warning] = OocWarning) -> None:
    """Warn at the nearest line of the stack that is outside of `ooc`."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)

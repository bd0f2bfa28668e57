"""Progress of a long pass, in plain lines."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress

LINE_SECONDS = 10.0
"""Seconds between two plain lines within an epoch."""


def speed(count: float, seconds: float, unit: str) -> str:
    """So many in so many seconds, for a person.

    >>> speed(33_320, 2, "events")
    '16,660 events/s'
    """
    rate = count / max(seconds, 1e-9)
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


def _say(text: str) -> None:
    """A line on stderr; nothing where nobody reads it any more (`ooc train ... 2>&1 | head`): the run goes on."""
    with suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


class Pace:
    """How far a long pass is, told by `note` every ten seconds.

    >>> pace = Pace(watchers.note)
    >>> pace("scores of val", 20_000, 450_000, "events")
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._what, self._done = note, "", 0
        self._since = self._spoke = time.monotonic()

    def __call__(self, what: str, done: int, total: int, unit: str) -> None:
        """`done` of `total` units of a pass; another pass, or fewer of them, begins anew."""
        now = time.monotonic()
        if what != self._what or done < self._done:
            self._what, self._since, self._spoke = what, now, now
        self._done = done
        if now - self._spoke >= LINE_SECONDS and done < total:
            self._spoke, passed = now, now - self._since
            left = f", {(total - done) * passed / done:.0f} s left" if done else ""
            self._note(f"{what}: {done:,} of {total:,} {unit}, {speed(done, passed, unit)}{left}")

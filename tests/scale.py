"""How much of each law is tried: everything, or with OOC_TESTS=quick (`make test`) enough to see it broken.

Quick, a law has fewer examples, kills and cases, and a test that is parametrized more than once runs as many of its
combinations as it takes for every value to come up. A dear test marked `cases(n)` runs n of its cases. What only the full run
does is marked `slow`.
"""

import os
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from hypothesis import settings

T = TypeVar("T")
QUICK = os.environ.get("OOC_TESTS") == "quick"
KILLS = int(os.environ.get("OOC_TEST_KILLS", "8"))
"""of each command, at its calls; a thousand kill it at all of them"""
EXAMPLES = 4
"""of a law that hypothesis tries, where it is quick"""


def few(quick: T, full: T) -> T:
    """The one value where tests are quick, else the other."""
    return quick if QUICK else full


def some(values: Iterable[T], most: int) -> list[T]:
    """All values; where tests are quick at most `most` of them: the first, the last, and others evenly between.

    >>> some(range(16), 3)
    [0, 8, 15]
    """
    values = list(values)
    if not QUICK or len(values) <= most:
        return values
    return [values[round(k * (len(values) - 1) / max(1, most - 1))] for k in range(most)]


def some_calls(count: int) -> range:
    """At which of so many calls a command is killed: `KILLS` of them, evenly between, from a random one on."""
    every = max(1, -(-count // KILLS))
    return range(random.SystemRandom().randrange(every), count, every)


def take_fewer_examples(test: Any) -> None:
    """A hypothesis test takes `EXAMPLES` at most."""
    if not getattr(test, "is_hypothesis_test", False):
        return
    test = getattr(test, "__func__", test)
    before: settings = getattr(test, "_hypothesis_internal_use_settings", None) or settings.default
    test._hypothesis_internal_use_settings = settings(before, max_examples=min(EXAMPLES, before.max_examples))


def combinations(cases: Sequence[Sequence[str]]) -> list[int]:
    """As few cases as cover every value of every parameter, in order: their indices.

    Args:
        cases: for each case the name of the value that each `parametrize` gave it.

    >>> combinations([("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")])
    [0, 3]
    """
    values = [set(enumerate(case)) for case in cases]
    missing = set().union(*values)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(values[i] & missing))
        chosen.append(best)
        missing -= values[best]
    return sorted(chosen)

"""PURE: parses durations and divides events in time order into windows."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from stores.errors import ConfigError
from stores.manifest import TimeUnit

NANOSECONDS: dict[str, int] = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86_400 * 10**9,
    "w": 604_800 * 10**9,
}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")


class EventTimes(Protocol):
    """The part of `stores.events.Events` that windows use."""

    unit: TimeUnit

    def __len__(self) -> int: ...

    @property
    def whole(self) -> bool:
        """Whether times are integers."""

    @property
    def span(self) -> tuple[Any, Any]: ...

    def at(self, time: Any, side: str = "left") -> int: ...

    def time(self, event: int) -> Any: ...


class TimeWindow(NamedTuple):
    """Events first..last-1: those with begin <= time < end, or by count."""

    number: int
    """0, 1, 2, ...; windows without events are numbered too"""
    first: int
    last: int
    begin: Any
    """in the events' time; None for windows by count"""
    end: Any


def duration(value: str | float, unit: TimeUnit, whole: bool) -> int | float:
    """Convert a duration such as "7d", "12h", "30m", "1.5s" or "250ms" (also us, ns, min, w), or a number, to the events' unit.

    Raises ConfigError if it is invalid, not positive, or, for integer times (`whole`), not an integer.

    >>> duration("1d", "ms", whole=True)
    86400000
    """
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None or match[2] not in NANOSECONDS:
            raise ConfigError(f"a duration is a number and one of {', '.join(NANOSECONDS)}, as in 7d or 250ms, not {value!r}")
        exact = Fraction(match[1]) * NANOSECONDS[match[2]] / NANOSECONDS[unit]
    else:
        exact = Fraction(value)
    if exact <= 0:
        raise ConfigError(f"a duration must be positive, not {value!r}")
    if not whole:
        return float(exact)
    if exact.denominator != 1:
        raise ConfigError(f"{value!r} is {float(exact):g} {unit}, but times are integers in {unit}: use a multiple of 1{unit}")
    return int(exact)


@dataclass(frozen=True)
class TimeWindows:
    """Windows of `length` every `stride`, from `start` until one contains the last event; all in the events' unit.

    A tumbling window's end is computed as the next one's beginning, so there are no gaps even with fractional times.
    """

    start: Any
    length: Any
    stride: Any

    def begin(self, number: int) -> Any:
        """Start of window `number`."""
        return self.start + number * self.stride

    def end(self, number: int) -> Any:
        """End of window `number`."""
        return self.begin(number + 1) if self.length == self.stride else self.begin(number) + self.length

    def count(self, last: Any) -> int:
        """Number of windows up to the first that contains time `last`."""
        number = max(0, int((last - self.start - self.length) // self.stride))
        while self.end(number) <= last:
            number += 1
        return number + 1

    def of(self, events: EventTimes, empty: bool = False) -> Iterator[TimeWindow]:
        """Yield the windows in order; `empty` includes those without events."""
        if not len(events):
            return
        total = self.count(events.span[1])
        number = 0
        while number < total:
            begin, end = self.begin(number), self.end(number)
            first, last = events.at(begin), events.at(end)
            if last > first or empty:
                yield TimeWindow(number, first, last, begin, end)
                number += 1
            else:
                number = max(number + 1, self._holding(events, last))

    def _holding(self, events: EventTimes, event: int) -> int:
        """A window before which none contains `event` or a later one; skips long gaps."""
        time = events.time(event) if event < len(events) else events.span[1]
        return int((time - self.start - self.length) // self.stride) - 1


@dataclass(frozen=True)
class CountWindows:
    """Windows of `length` events every `stride` events; the last may have fewer."""

    length: int
    stride: int

    def of(self, events: EventTimes, empty: bool = False) -> Iterator[TimeWindow]:
        """Yield the windows in order; none is empty."""
        count, number = len(events), 0
        while number * self.stride < count:
            first = number * self.stride
            yield TimeWindow(number, first, min(first + self.length, count), None, None)
            if first + self.length >= count:
                return
            number += 1


def windows(
    events: EventTimes, window: str | float, stride: str | float | None = None, by: str = "time", start: Any = None
) -> TimeWindows | CountWindows:
    """Return the requested windows, by "time" (durations, from `start` or the first event's time) or by "count".

    Raises ConfigError if the lengths are invalid.

    >>> windows(ds.events, "7d", "1d")
    TimeWindows(start=0, length=604800, stride=86400)
    """
    stride = window if stride is None else stride
    if by == "count":
        if start is not None:
            raise ConfigError("windows by count start with the first event: leave start out")
        if not all(isinstance(each, int) and each > 0 for each in (window, stride)):
            raise ConfigError(f"windows by count need positive integers, not {window!r} and {stride!r}")
        return CountWindows(int(window), int(stride))
    if by != "time":
        raise ConfigError(f"windows are by time or by count, not by {by!r}")
    length, step = (duration(each, events.unit, events.whole) for each in (window, stride))
    return TimeWindows(events.span[0] if start is None else start, length, step)

"""PURE: windows over events in time order: durations as people write them, and where each window begins and ends."""

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
    """What windows ask of events: `stores.events.Events`."""

    unit: TimeUnit

    def __len__(self) -> int: ...

    @property
    def whole(self) -> bool:
        """Whether times are whole numbers."""

    @property
    def span(self) -> tuple[Any, Any]: ...

    def at(self, time: Any, side: str = "left") -> int: ...

    def time(self, event: int) -> Any: ...


class TimeWindow(NamedTuple):
    """Events first..last-1: those with begin <= time < end, or where windows count events just those."""

    number: int
    """0, 1, 2, ...: windows without events have a number too"""
    first: int
    last: int
    begin: Any
    """in the events' time; None where windows count events"""
    end: Any


def duration(value: str | float, unit: TimeUnit, whole: bool) -> int | float:
    """A duration in the events' unit: "7d", "12h", "30m", "1.5s", "250ms" (also us, ns, min, w), or a number of units.

    whole: times are whole numbers; then the duration must be one too. Raises ConfigError for anything else, and for none.

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
        raise ConfigError(f"a duration is more than nothing, not {value!r}")
    if not whole:
        return float(exact)
    if exact.denominator != 1:
        raise ConfigError(
            f"{value!r} is {float(exact):g} {unit}, and times are whole numbers of {unit}: take a multiple of 1{unit}"
        )
    return int(exact)


@dataclass(frozen=True)
class TimeWindows:
    """Windows of `length`, one every `stride`, from `start` until one holds the last event; both in the events' unit.

    A window's end is reckoned as the beginning of a later one, so tumbling windows (stride = length) leave no gap between
    them even where times are fractions.
    """

    start: Any
    length: Any
    stride: Any

    def begin(self, number: int) -> Any:
        """Where window `number` begins."""
        return self.start + number * self.stride

    def end(self, number: int) -> Any:
        """Where it ends."""
        return self.begin(number + 1) if self.length == self.stride else self.begin(number) + self.length

    def count(self, last: Any) -> int:
        """Windows until the first that holds time `last`."""
        number = max(0, int((last - self.start - self.length) // self.stride))
        while self.end(number) <= last:
            number += 1
        return number + 1

    def of(self, events: EventTimes, empty: bool = False) -> Iterator[TimeWindow]:
        """The windows in order; empty: those without events too."""
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
        """A window before which none holds `event` or a later one: a gap of years is no step for every second of it."""
        time = events.time(event) if event < len(events) else events.span[1]
        return int((time - self.start - self.length) // self.stride) - 1


@dataclass(frozen=True)
class CountWindows:
    """Windows of `length` events, one every `stride` of them; the last may have fewer."""

    length: int
    stride: int

    def of(self, events: EventTimes, empty: bool = False) -> Iterator[TimeWindow]:
        """The windows in order; none is empty."""
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
    """The windows that a user asks for. by: "time" (durations, from `start`, by default the first event's time) or "count".

    Raises ConfigError for lengths that make no windows.

    >>> windows(ds.events, "7d", "1d")
    TimeWindows(start=0, length=604800, stride=86400)
    """
    stride = window if stride is None else stride
    if by == "count":
        if start is not None:
            raise ConfigError("windows that count events begin with the first one: leave start out")
        if not all(isinstance(each, int) and each > 0 for each in (window, stride)):
            raise ConfigError(f"windows that count events take whole numbers of them, not {window!r} and {stride!r}")
        return CountWindows(int(window), int(stride))
    if by != "time":
        raise ConfigError(f"windows go by time or by count, not by {by!r}")
    length, step = (duration(each, events.unit, events.whole) for each in (window, stride))
    return TimeWindows(events.span[0] if start is None else start, length, step)

"""PURE: durations, windows and chronological splits of events, and the labels of nodes at the end of a window."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.events import Events
from ooc.stores.manifest import TimeUnit

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
NANOSECONDS: dict[str, int] = {"ns": 1, "us": 10**3, "ms": 10**6, **{unit: n * 10**9 for unit, n in _SECONDS.items()}}
SPLITS = ("train", "val", "test")
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")


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
        return self.start + number * self.stride

    def end(self, number: int) -> Any:
        return self.begin(number + 1) if self.length == self.stride else self.begin(number) + self.length

    def count(self, last: Any) -> int:
        """Number of windows up to the first that contains time `last`."""
        number = max(0, int((last - self.start - self.length) // self.stride))
        while self.end(number) <= last:
            number += 1
        return number + 1

    def of(self, events: Events, empty: bool = False) -> Iterator[TimeWindow]:
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
                time = events.time(last) if last < len(events) else events.span[1]
                reached = int((time - self.start - self.length) // self.stride) - 1  # no window before it contains the event
                number = max(number + 1, reached)


@dataclass(frozen=True)
class CountWindows:
    """Windows of `length` events every `stride` events; the last may have fewer."""

    length: int
    stride: int

    def of(self, events: Events, empty: bool = False) -> Iterator[TimeWindow]:
        """Yield the windows in order; none is empty."""
        count = len(events)
        for number, first in enumerate(range(0, count, self.stride)):
            yield TimeWindow(number, first, min(first + self.length, count), None, None)
            if first + self.length >= count:
                return


def windows(
    events: Events, window: str | float, stride: str | float | None = None, by: str = "time", start: Any = None
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


def chronological(events: Events, val: float = 0.15, test: float = 0.15) -> dict[str, tuple[int, int]]:
    """Return (first, last) event of "train", "val" and "test": the last `test` share, the `val` share before it, and the rest.

    Events of equal time are in one split, that of the time at the quantile (PyG's `TemporalData.train_val_test_split`). Raises
    ConfigError for invalid shares.

    >>> chronological(ds.events)["train"]
    (0, 41884)
    """
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise ConfigError(f"val and test must be shares of the events that sum to less than 1, not {val} and {test}")
    ends = [events.at(_quantile(events, share), "right") for share in (1 - val - test, 1 - test)]
    return dict(zip(SPLITS, zip([0, *ends], [*ends, len(events)], strict=True), strict=True))


def prefix(events: Events, last: int) -> dict[str, Any]:
    """Return a fingerprint of events 0..last-1 that changes if an event is inserted among them."""
    time = events.time(last - 1)
    return {"last": last, "time": np.asarray(time).item(), "before": events.at(time, "left")}


def _quantile(events: Events, share: float) -> Any:
    """numpy's linear interpolation between the two events at that share."""
    place = share * (len(events) - 1)
    low = int(np.floor(place))
    before, after = (np.float64(events.time(min(k, len(events) - 1))) for k in (low, low + 1))
    value = before + (after - before) * (place - low)
    return np.floor(value) if events.whole else value


def span_of(events: Events, requested: str | tuple[int, int] | None) -> tuple[int, int]:
    """Return the (first, last) event of a named split, a given range, or all events (None). Raises ConfigError if invalid."""
    if requested is None:
        return 0, len(events)
    if isinstance(requested, str):
        if requested not in SPLITS:
            raise ConfigError(f"split {requested!r} is unknown: use {', '.join(SPLITS)}, or (first, last)")
        return chronological(events)[requested]
    first, last = requested
    if not 0 <= first <= last <= len(events):
        raise ConfigError(f"events {first}..{last - 1} do not exist: the store has {len(events)}")
    return int(first), int(last)


def last_labels(count: int, node: Ids, label: AnyArray) -> Ids:
    """Return the label of each node's last event, int64[count, ...]; -1 for nodes without one or with a NaN label.

    `node` is int64[k] below `count`, `label` [k], [k, 1] or [k, C], in time order. Raises InputError if one is no integer.
    """
    label = label[:, 0] if label.shape[1:] == (1,) else label
    if label.dtype.kind == "f":
        label = np.where(np.isnan(label), -1, label)
        if (wrong := label != np.floor(label)).any():
            raise InputError(f"an event has label {label[wrong][0]}: labels must be whole numbers; choose another column")
    labels = np.full((count, *label.shape[1:]), -1, np.int64)
    labels[node] = label  # the last assignment to a node wins
    return labels

"""Windows over events against their definition; durations."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.sampling.time_windows import CountWindows, TimeWindow, TimeWindows, duration, windows
from ooc.stores.errors import ConfigError

LAWS = settings(max_examples=300, deadline=None, derandomize=True)


class EventTimes:
    """Times in memory, with the part of `Events` that windows use."""

    unit: Any = "s"

    def __init__(self, times: Any) -> None:
        self.times = np.sort(np.asarray(times))

    def __len__(self) -> int:
        return len(self.times)

    @property
    def whole(self) -> bool:
        return self.times.dtype.kind == "i"

    @property
    def span(self) -> tuple[Any, Any]:
        return self.times[0].item(), self.times[-1].item()

    def at(self, time: Any, side: Any = "left") -> int:
        return int(np.searchsorted(self.times, time, side=side))

    def time(self, event: int) -> Any:
        return self.times[event].item()


WHOLE = st.lists(st.integers(-50, 10**6), min_size=1, max_size=40)
FRACTIONS = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40)


@LAWS
@given(times=st.one_of(WHOLE, FRACTIONS), length=st.integers(1, 5000), data=st.data())
def test_tumbling_windows_hold_every_event_once(times: list[Any], length: int, data: Any) -> None:
    events = EventTimes(times)
    stride = length if events.whole else length * data.draw(st.floats(0.01, 1))
    if (events.span[1] - events.span[0]) / stride > 1e5:
        return  # every window is looked at below
    found = list(windows(events, stride).of(events))
    assert [w.first for w in found] == [0, *(w.last for w in found[:-1])]
    assert found[-1].last == len(events)
    assert all(w.last > w.first for w in found)
    for window in found:
        inside = events.times[window.first : window.last]
        assert (inside >= window.begin).all()
        assert (inside < window.end).all()


@LAWS
@given(times=st.lists(st.integers(0, 300), min_size=1, max_size=40), length=st.integers(1, 60), stride=st.integers(1, 60))
def test_sliding_windows_are_their_definition(times: list[int], length: int, stride: int) -> None:
    """Every window up to the first that holds the last event; those without events have a number too."""
    events = EventTimes(times)
    start, last = events.span
    wanted, number = [], 0
    while True:
        begin, end = start + number * stride, start + number * stride + length
        inside = [k for k, time in enumerate(events.times) if begin <= time < end]
        first = inside[0] if inside else events.at(begin)
        wanted.append(TimeWindow(number, first, first + len(inside), begin, end))
        if end > last:
            break
        number += 1
    made = TimeWindows(start, length, stride)
    assert list(made.of(events, empty=True)) == wanted
    assert list(made.of(events)) == [window for window in wanted if window.last > window.first]


def test_a_gap_of_years_is_not_walked_through() -> None:
    events = EventTimes([0, 1, 10**15, 10**15 + 1])
    assert [window[:3] for window in windows(events, 1).of(events)] == [
        (0, 0, 1), (1, 1, 2), (10**15, 2, 3), (10**15 + 1, 3, 4),
    ]  # fmt: skip


@LAWS
@given(count=st.integers(1, 50), length=st.integers(1, 20), stride=st.integers(1, 20))
def test_windows_of_so_many_events(count: int, length: int, stride: int) -> None:
    events = EventTimes(np.arange(count))
    found = [(window.first, window.last) for window in windows(events, length, stride, "count").of(events)]
    wanted = [(first, min(first + length, count)) for first in range(0, count, stride)]
    while len(wanted) > 1 and wanted[-2][1] == count:
        wanted.pop()
    assert found == wanted


@pytest.mark.parametrize(
    ("value", "unit", "want"),
    [("7d", "s", 604_800), ("1.5h", "s", 5400), ("250ms", "us", 250_000), ("2w", "ms", 1_209_600_000), ("30min", "s", 1800),
     (" 90 m ", "s", 5400), (12, "ns", 12), ("0.5us", "ns", 500)],
)  # fmt: skip
def test_durations(value: Any, unit: Any, want: int) -> None:
    found = duration(value, unit, whole=True)
    assert found == want
    assert isinstance(found, int)


def test_durations_of_fractions() -> None:
    assert duration("250ms", "s", whole=False) == 0.25


@pytest.mark.parametrize(
    ("value", "message"),
    [("7", "a number and one of ns, us"), ("7y", "as in 7d"), ("0d", "must be positive"), (-1, "must be positive"),
     ("1ms", "use a multiple of 1s"), ("d", "as in 7d")],
)  # fmt: skip
def test_what_is_no_duration(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        duration(value, "s", whole=True)


def test_settings_that_make_no_windows() -> None:
    events = EventTimes([1, 2, 3])
    for settings_, message in (
        (("7d", None, "count"), "positive integers"),
        ((5, None, "day"), "by time or by count"),
        ((5, None, "count", 3), "leave start out"),
    ):
        with pytest.raises(ConfigError, match=message):
            windows(events, *settings_)  # type: ignore[arg-type]
    assert windows(events, 5, 2, "count") == CountWindows(5, 2)
    assert windows(events, "1m", start=-60) == TimeWindows(-60, 60, 60)

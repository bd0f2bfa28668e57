"""Chronological splits of events into training, validation and test."""

from typing import Any

import numpy as np

from stores.errors import ConfigError
from stores.events import Events

SPLITS = ("train", "val", "test")


def chronological(events: Events, val: float = 0.15, test: float = 0.15) -> dict[str, tuple[int, int]]:
    """Return (first, last) event of "train", "val" and "test": the last `test` share, the `val` share before it, and the rest.

    Events of equal time are in one split, that of the time at the quantile (PyG's `TemporalData.train_val_test_split`). Raises
    ConfigError if nothing is left to train on.

    >>> chronological(ds.events)["train"]
    (0, 41884)
    """
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise ConfigError(f"val and test must be shares of the events that sum to less than 1, not {val} and {test}")
    ends = [events.at(_quantile(events, share), "right") for share in (1 - val - test, 1 - test)]
    return dict(zip(SPLITS, zip([0, *ends], [*ends, len(events)], strict=True), strict=True))


def prefix(events: Events, last: int) -> dict[str, Any]:
    """Return a fingerprint of events 0..last-1 that changes if an event is inserted among them.

    >>> prefix(ds.events, 1000)
    {'last': 1000, 'time': 17, 'before': 990}
    """
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

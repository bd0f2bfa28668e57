"""Which events are for training, validation and test: chronological splits."""

from typing import Any

import numpy as np

from stores.errors import ConfigError
from stores.events import Events

SPLITS = ("train", "val", "test")


def chronological(events: Events, val: float = 0.15, test: float = 0.15) -> dict[str, tuple[int, int]]:
    """Name -> (first, last) event of each split: the last `test` of the events, before them `val`, before these the rest.

    Events of one time are in one split: that of the time at the quantile (PyG's `TemporalData.train_val_test_split`).
    Raises ConfigError for shares that leave nothing to train on.

    >>> chronological(ds.events)["train"]
    (0, 41884)
    """
    if not (val >= 0 and test >= 0 and val + test < 1):
        raise ConfigError(f"val and test are shares of the events, and leave some to train on, not {val} and {test}")
    ends = [events.at(_quantile(events, share), "right") for share in (1 - val - test, 1 - test)]
    return dict(zip(SPLITS, zip([0, *ends], [*ends, len(events)], strict=True), strict=True))


def prefix(events: Events, last: int) -> dict[str, Any]:
    """What tells whether the events 0..last-1 (some) are as they were: another one where any came in between.

    >>> prefix(ds.events, 1000)
    {'last': 1000, 'time': 17, 'before': 990}
    """
    time = events.time(last - 1)
    return {"last": last, "time": np.asarray(time).item(), "before": events.at(time, "left")}


def _quantile(events: Events, share: float) -> Any:
    """numpy's linear interpolation between the two events at that share of the way."""
    place = share * (len(events) - 1)
    low = int(np.floor(place))
    before, after = (np.float64(events.time(min(k, len(events) - 1))) for k in (low, low + 1))
    value = before + (after - before) * (place - low)
    return np.floor(value) if events.whole else value


def span_of(events: Events, wanted: str | tuple[int, int] | None) -> tuple[int, int]:
    """(first, last) event of a split by name, of a range given, or (None) of all. Raises ConfigError for what is not there."""
    if wanted is None:
        return 0, len(events)
    if isinstance(wanted, str):
        if wanted not in SPLITS:
            raise ConfigError(f"no split of the events is called {wanted!r}: {', '.join(SPLITS)}, or (first, last)")
        return chronological(events)[wanted]
    first, last = wanted
    if not 0 <= first <= last <= len(events):
        raise ConfigError(f"events {first}..{last - 1} are not there: the store has {len(events)}")
    return int(first), int(last)

"""The events of a store as PyG's `TemporalData`, for PyG's own TemporalDataLoader and models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import TemporalData

from ooc.loading.arguments import dataset_of
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.dataset import Dataset
from ooc.stores.events import Events


def temporal_data(data: Dataset | Path | str, columns: Sequence[str] | None = None) -> TemporalData:
    """Return the events of a data set as PyG's `TemporalData`, whose tensors are memory maps of the store.

    The operating system reads pages when they are used and drops them when memory is short; nothing is read ahead, and the page
    cache is not part of the data set's memory limit. `ooc.EventLoader` reads ahead and within the limit. What is written to the
    tensors stays in memory. Two things are not mapped: src and dst, which PyG wants as int64, where the store has int32 (16
    bytes an event), and columns stored in fewer bits than float32.

    Args:
        data: A data set with times, or the path of its store.
        columns: Event columns to give; None: all.

    Returns:
        src, dst int64[events], t [events] and the columns, such as msg [events, d], in time order.

    Raises:
        InputError: If the store has no times or no such column.
        ConfigError: If `data` is neither.

    >>> data = temporal_data("wikipedia.ooc")
    >>> train, val, test = data.train_val_test_split(val_ratio=0.15, test_ratio=0.15)
    >>> loader = TemporalDataLoader(train, batch_size=200, neg_sampling_ratio=1.0)
    """
    events = dataset_of(data).events
    src, dst, time = (torch.from_numpy(events.map(name, private=True)) for name in ("src", "dst", "time"))
    chosen = events.columns if columns is None else columns
    values: dict[str, Any] = {name: torch.from_numpy(_column(events, name)) for name in chosen}
    return TemporalData(src=src.long(), dst=dst.long(), t=time, **values)


def _column(events: Events, name: str) -> AnyArray:
    stored, encoding = events.map(name, private=True), events.encoding(name)
    if not encoding.is_short:
        return stored
    out = np.empty(stored.shape, encoding.dtype)
    encoding.gather(stored, np.arange(len(stored)), out)
    return out

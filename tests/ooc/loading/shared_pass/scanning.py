"""Loaders over the store of this folder's tests, by shared scans and by packed batches, and what they give."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ooc.graph.aggregation import PreAggregation
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.packed import PackedBatches
from ooc.runtime.memory_plan import divide
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from tests.ooc.loading.strategies import over

N, E, F = 300, 3000, 21
MEAN = PreAggregation("mean", 8)
ROOM = 2 * 10**6


def piece_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ooc-piece")]


def budget(batches: int, max_batch: int | None = None) -> Any:
    """A division with so many bytes for all batches alive; max_batch: a fifth of them, as `divide` has it."""
    max_batch = batches // 5 if max_batch is None else max_batch
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=batches - 3 * max_batch)


def few(batches: int = 3) -> Any:
    """A budget of which about so many batches of `loader_of` make a sweep."""
    return budget(80_000 + 80_000 * batches)


def loader_of(ds: Dataset, **options: Any) -> NeighborLoader:
    chosen = {
        "batch_size": 20,
        "shuffle": not options.get("split_seeds"),
        "seed": 3,
        "pre_aggregation": MEAN,
        "budget": few(),
    } | options
    return NeighborLoader(ds, chosen.pop("fanout", [4, 3]), **chosen)


def packing(ds: Dataset, **options: Any) -> NeighborLoader:
    """About three batches of 15 go into a group."""
    loader = loader_of(ds, **{"budget": budget(ROOM), "pack": "400kB"} | options)
    assert isinstance(loader.strategy, PackedBatches)
    return loader


WAYS: dict[str, Callable[..., NeighborLoader]] = {"sum": loader_of, "pack": packing}
"""by the name of their stage"""


def outcome(loader: NeighborLoader, epochs: int = 2) -> Any:
    got: list[Any] = []
    try:
        for _ in range(epochs):
            got.extend(loader)
    except BudgetError as error:
        return got, str(error), error.__notes__
    return got, "", []


def in_memory(path: Any, **options: Any) -> Any:
    with Dataset.open(path, in_memory=True) as held:
        loader = loader_of(held, **{"budget": budget(10**8)} | options)
        found = outcome(loader)
        assert "sum" not in loader.times()
        return found


def from_memory(loader: NeighborLoader) -> NeighborLoader:
    """The same loader, its budget and what it says of batches too, over the same rows in memory."""
    x = loader.strategy.disk_rows
    array = np.empty(x.shape, x.dtype)
    x.read(np.arange(N), array)
    return over(loader, ArrayRows(array))

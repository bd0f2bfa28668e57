"""Loaders that pack batches, over the store of this folder's tests."""

from typing import Any

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.packed import PackedBatches
from ooc.stores.dataset import Dataset
from tests.ooc.loading.shared_scan.scanning import budget, loader_of

ROOM = 2 * 10**6


def packing(ds: Dataset, **options: Any) -> NeighborLoader:
    """About three batches of 15 go into a group."""
    loader = loader_of(ds, **{"budget": budget(ROOM), "pack": "400kB"} | options)
    assert isinstance(loader.strategy, PackedBatches)
    return loader

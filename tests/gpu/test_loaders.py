"""On a pretended CUDA device (`tests.pretended_cuda`): every loader gives the CPU's batches, and the loop does not wait."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ooc
from ooc.runtime.transfer import map_leaves
from tests.gpu.test_pretended import stores  # noqa: F401 - a fixture
from tests.ooc.batches import same
from tests.pretended_cuda import PAGEABLE, REGISTERED, SYNC, PretendedDevice, pretended_cuda

FAN_OUT, BATCH = [3, 3], {"batch_size": 32, "seed": 1}
LOADERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "NeighborLoader": ("multiclass", lambda ds, **on: ooc.NeighborLoader(ds, FAN_OUT, "train", **BATCH, **on)),
    "NeighborLoader, disjoint": (
        "multiclass",
        lambda ds, **on: ooc.NeighborLoader(ds, FAN_OUT, "train", disjoint=True, **BATCH, **on),
    ),
    "NeighborLoader, LABOR": (
        "multiclass",
        lambda ds, **on: ooc.NeighborLoader(ds, FAN_OUT, "train", sampler=ooc.Labor(), **BATCH, **on),
    ),
    "NeighborLoader, types": ("types", lambda ds, **on: ooc.NeighborLoader(ds, FAN_OUT, ("paper", "train"), 8, seed=1, **on)),
    "HGTLoader": ("types", lambda ds, **on: ooc.HGTLoader(ds, [4, 4], ("paper", "train"), 8, seed=1, **on)),
    "LinkNeighborLoader": (
        "multiclass",
        lambda ds, **on: ooc.LinkNeighborLoader(ds, FAN_OUT, neg_sampling="binary", batch_size=512, seed=1, **on),
    ),
    "ClusterLoader": ("multiclass", lambda ds, **on: ooc.ClusterLoader(ds, 2, num_parts=6, shuffle=True, seed=1, **on)),
    "SaintLoader": ("multiclass", lambda ds, **on: ooc.SaintLoader(ds, "node", batch_size=60, seed=1, **on)),
    "GraphLoader": ("graphs", lambda ds, **on: ooc.GraphLoader(ds, shuffle=True, **{**BATCH, "batch_size": 16}, **on)),
    "EventLoader": ("events", lambda ds, **on: ooc.EventLoader(ds, 32, num_neighbors=[2], **on)),
    "SnapshotLoader": ("events", lambda ds, **on: ooc.SnapshotLoader(ds, 40, by="count", **on)),
}
IN_SHORT = {"NeighborLoader", "GraphLoader"}


def test_no_loader_is_left_out() -> None:
    assert {name.split(",")[0] for name in LOADERS} == {name for name in ooc.__all__ if name.endswith("Loader")}


def all_there(batch: Any, device: PretendedDevice) -> bool:
    """Whether all tensors of a batch are on the device."""
    found: list[bool] = []

    def seen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            found.append(device.has(leaf))
        return leaf

    map_leaves(batch, seen)
    return all(found)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.slow) for name in LOADERS])
def test_batches_are_the_cpu_s_and_the_loop_does_not_wait(stores: dict[str, Path], name: str) -> None:  # noqa: F811
    store, make = LOADERS[name]
    with ooc.open(stores[store]) as ds, pretended_cuda() as device:
        wanted, loader = list(make(ds, device="cpu")), make(ds, device="cuda")
        found, waits, locked = [], 0, 0
        for _ in range(2):
            locked, before = device.counts[REGISTERED], device.counts[SYNC]
            found = list(loader)
            waits = device.counts[SYNC] - before
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(0)
        assert len(found) == len(wanted) > 1
        assert waits == 0, device.counts.told(SYNC)
        assert device.counts[PAGEABLE] == 0, device.counts.told(PAGEABLE)
        assert device.counts[REGISTERED] == locked, device.counts.told(REGISTERED)
        assert all(all_there(batch, device) for batch in found)
        back = [map_leaves(batch, lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf) for batch in found]
        assert all(same(here, there) for here, there in zip(back, wanted, strict=True))

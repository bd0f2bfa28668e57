"""The stores for reproducing published scores."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np


def ingest(npz: Path, store: Path, **options: Any) -> None:
    """Build a store from an npz file, anew."""
    from ooc.stores.ingest import IngestSpec
    from ooc.stores.ingest import ingest as build

    shutil.rmtree(store, ignore_errors=True)
    build(IngestSpec(out=store, npz=npz, **options))


def graph_of_classes(npz: Path, num_nodes: int, classes: int, told: float, before: int = 0) -> Path:
    """A made graph, 25 in-edges a node on average: a share `told` of them are from the class `before` places before the
    node's own, the others from anywhere.

    Features are faint. Sources are skewed, so that some nodes have a hundred times the out-edges of others. 50, 25 and 25 % of
    the nodes are for training, validation and test.
    """
    rng, count = np.random.default_rng(0), 25 * num_nodes
    y = rng.integers(0, classes, num_nodes)
    dst = rng.integers(0, num_nodes, count)
    by_class, sizes = np.argsort(y, kind="stable"), np.bincount(y, minlength=classes)
    drawn, tells = rng.random(count) ** 2, rng.random(count) < told
    its = (y[dst] - before) % classes
    within = np.concatenate([[0], np.cumsum(sizes)[:-1]])[its] + (drawn * sizes[its]).astype(np.int64)
    src = np.where(tells, by_class[within], (drawn * num_nodes).astype(np.int64))
    x = rng.normal(size=(classes, 32))[y] + 3 * rng.normal(size=(num_nodes, 32))
    part = rng.permutation(num_nodes) * 4 // num_nodes
    arrays: dict[str, Any] = {"x": x.astype(np.float32), "y": y, "edge_index": np.stack([src, dst])}
    np.savez(npz, **arrays, train_mask=part < 2, val_mask=part == 2, test_mask=part == 3)
    return npz

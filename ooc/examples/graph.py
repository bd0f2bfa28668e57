"""A small graph with planted classes, as Parquet files: neighbors say more about a node's class than its own features."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ooc.stores.errors import InputError
from ooc.stores.io.atomic import disk_errors, partial_path

NODES, EDGES, CLASSES, FEATURES = 20_000, 200_000, 8, 32
_SAME = 0.6
"""share of the edges that are drawn within a class"""
_SIGNAL = 1.5
"""norm of a class's mean features, beside noise of variance 1 in each"""
_SPLITS = {"train": 0.5, "val": 0.2, "test": 0.3}
_SEED = 7


def write_graph(folder: Path | str) -> Path:
    """Write `edges.parquet` (src, dst) and `nodes.parquet` (id, label, split, f0, f1, ...) into `folder`, the same every time.

    Args:
        folder: Where the files go; it is made if it does not exist.

    Returns:
        The folder.

    Raises:
        InputError: One of the files exists already.
        StoreError: If the disk fails or is full.

    >>> write_graph("demo")
    PosixPath('demo')
    """
    edges, nodes = (Path(folder, name) for name in ("edges.parquet", "nodes.parquet"))
    _check_absent(nodes)
    tables = _tables()
    with disk_errors(folder):
        edges.parent.mkdir(parents=True, exist_ok=True)
        for path, table in zip((edges, nodes), tables, strict=True):
            pq.write_table(table, partial_path(path.absolute()))
        if edges.exists() and edges.read_bytes() != partial_path(edges).read_bytes():  # not of a call that was killed
            for path in (edges, nodes):
                partial_path(path).unlink()
            _check_absent(edges)
        for path in (edges, nodes):
            os.replace(partial_path(path), path)
    return edges.parent


def _check_absent(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists already: remove it, or choose another directory")


def _tables() -> tuple[pa.Table, pa.Table]:
    """Edges and nodes."""
    rng = np.random.default_rng(_SEED)
    labels = rng.integers(0, CLASSES, NODES)
    src, dst = _edges(rng, labels)
    means = rng.standard_normal((CLASSES, FEATURES)) * _SIGNAL / np.sqrt(FEATURES)
    x = (means[labels] + rng.standard_normal((NODES, FEATURES))).astype(np.float32)
    split = rng.choice(list(_SPLITS), NODES, p=list(_SPLITS.values()))
    features = {f"f{number}": pa.array(np.ascontiguousarray(x[:, number])) for number in range(FEATURES)}
    nodes = {"id": pa.array(np.arange(NODES)), "label": pa.array(labels), "split": pa.array(split.tolist()), **features}
    return pa.table({"src": pa.array(src), "dst": pa.array(dst)}), pa.table(nodes)


def _edges(rng: np.random.Generator, labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources and destinations: a share is drawn within the source's class, the others anywhere."""
    src, dst = rng.integers(0, NODES, (2, EDGES))
    order, sizes = np.argsort(labels, kind="stable"), np.bincount(labels, minlength=CLASSES)
    first = np.cumsum(sizes) - sizes
    own = labels[src]
    within = order[first[own] + (rng.random(EDGES) * sizes[own]).astype(np.int64)]
    return src, np.where(rng.random(EDGES) < _SAME, within, dst)

"""A small weighted graph whose features are read in passes over the file."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ooc.loading import choose_read_strategy as choose_strategy
from ooc.loading import scan_memory
from ooc.stores.arrays.lmdb_rows import write_lmdb_rows
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.loading.shared_pass.scanning import E, F, N, piece_threads
from tests.ooc.loading.test_feature_gather import TYPES, write_features
from tests.ooc.loading.test_superbatch import foreign_features
from tests.waiting import eventually, no_threads


@pytest.fixture(scope="module")
def x() -> Any:
    return np.random.default_rng(0).standard_normal((N, F), dtype=np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any, x: Any) -> Any:
    weight = np.random.default_rng(1).random(E, np.float32)
    graph = Graph.from_edges(*random_edges(N, E), N, weight=weight)
    return write_store(
        tmp_path_factory.mktemp("passes") / "t.ooc", graph, x=x, y=np.arange(N) % 3, task="multiclass", num_classes=3
    )


@pytest.fixture(scope="module")
def features(tmp_path_factory: Any, x: Any) -> dict[str, Any]:
    """The features written by others, and in other types, by name."""
    folder = tmp_path_factory.mktemp("features")
    write_lmdb_rows(folder / "lmdb", x)
    foreign_features(folder / "foreign", x)
    return {kind: write_features(folder / kind, kind, x)[0] for kind in TYPES} | {
        name: folder / name for name in ("lmdb", "foreign")
    }


@pytest.fixture(autouse=True)
def _rows_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rows stay in memory; and no thread is left."""
    monkeypatch.setattr(choose_strategy, "scan_pays", lambda rows, pool: True)
    monkeypatch.setattr(scan_memory, "GRACE_SECONDS", 0.02)  # most consumers here keep their batches
    yield
    gc.collect()
    assert eventually(lambda: no_threads() and not piece_threads())


@pytest.fixture
def ds(path: Any) -> Iterator[Dataset]:
    with Dataset.open(path) as opened:
        yield opened

"""The first batch of a loader is read by itself, so that it comes soon, and all batches are as they were."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.graph.aggregation import PreAggregation
from ooc.loading import choose_read_strategy, read_strategy
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.ooc.loading.strategies import with_stage

N = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = np.random.default_rng(0).standard_normal((N, 16), dtype=np.float32)
    return write_store(tmp_path_factory.mktemp("first") / "test.ooc", Graph.from_edges(*random_edges(N, 1500), N), x=x)


@pytest.fixture(autouse=True)
def _scans_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_read_strategy, "scan_pays", lambda rows, pool: True)


def loader_of(path: Path, sums: bool) -> NeighborLoader:
    sums_of = PreAggregation("mean", 8) if sums else None
    return NeighborLoader(Dataset.open(path), [3, 2], batch_size=20, shuffle=True, seed=0, pre_aggregation=sums_of)


def groups(loader: NeighborLoader, sums: bool) -> int:
    return int(loader.times()["sum" if sums else "read"]["items"])


@pytest.mark.parametrize("sums", [False, True])
def test_the_first_batch_of_a_loader_is_read_alone_where_rows_are_many(
    path: Path, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loader_of(path, sums)
    wanted = [*whole, *whole]
    assert groups(whole, sums) == 2, "an epoch fits in memory"
    monkeypatch.setattr(read_strategy, "FIRST_ALONE_BYTES", N * 64)
    loader = loader_of(path, sums)
    found = list(loader)
    assert groups(loader, sums) == 2
    found += loader
    assert groups(loader, sums) == 3, "later epochs wait for nothing"
    assert same(found, wanted)
    monkeypatch.setattr(read_strategy, "FIRST_ALONE_BYTES", N * 64 + 1)
    few = loader_of(path, sums)
    assert same(list(few), wanted[:15])
    assert groups(few, sums) == 1


@pytest.mark.parametrize("sums", [False, True])
def test_the_first_batch_waits_for_no_other(path: Path, sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_strategy, "FIRST_ALONE_BYTES", 1)
    loader, delivered, before_it = loader_of(path, sums), threading.Event(), []
    sample = loader.strategy.stages.sample.sample

    def wait(cursor: Any) -> Any:
        if cursor.step:
            before_it.append(not delivered.wait(20))
        return sample(cursor)

    with_stage(loader, "sample", wait)
    epoch = iter(loader)
    next(epoch)
    delivered.set()
    assert len(list(epoch)) == len(loader) - 1
    assert not any(before_it)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_comes_at_its_batch(path: Path, sums: bool, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_strategy, "FIRST_ALONE_BYTES", 1)
    loader, got = loader_of(path, sums), []
    sample = loader.strategy.stages.sample.sample

    def fail(cursor: Any) -> Any:
        if cursor.step == failing:
            raise BudgetError("mine")
        return sample(cursor)

    with_stage(loader, "sample", fail)
    with pytest.raises(BudgetError, match="mine"):
        got.extend(loader)
    assert len(got) == failing

"""Passes over the file: failures come in order, and an epoch left halfway leaves nothing behind, on the disk neither."""

import gc
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ooc.loading.feature_cache import registry_of
from ooc.runtime.keyed_random import Cursor
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, StoreError
from tests.ooc.batches import same
from tests.ooc.loading.shared_pass.scanning import WAYS, few, in_memory, outcome, piece_threads
from tests.ooc.loading.strategies import over, with_stage
from tests.ooc.loading.test_superbatch import Behind, Broken
from tests.waiting import NoMoreThreads, eventually, no_threads


def open_scratch() -> list[str]:
    """Files without a name that this process has open."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [name for name in found if "(deleted)" in name and "/memfd:" not in name]


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("bad", "fanout"), [(3, [4, 3]), (47, [2, -1]), (155, [4, 3]), (299, [1, -1])])
def test_a_row_that_cannot_be_read_fails_at_its_batch(
    path: Any, ds: Dataset, x: Any, bad: int, fanout: list[int], way: str
) -> None:
    """Of batches that share aggregates too."""
    options = {"fanout": fanout} | ({"budget": few(10)} if way == "sum" else {})
    want = in_memory(path, fanout=fanout)[0][:15]
    rows = in_memory(path, fanout=fanout, pre_aggregation=None)[0]
    first = next(step for step, batch in enumerate(rows) if bad in batch.n_id)
    loader = WAYS[way](ds, **options)
    over(loader, Behind(Broken(x, bad)))
    got = []
    with pytest.raises(StoreError, match=f"row {bad} cannot") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == [f"in stage {way!r} at step {first} of the pipeline"]
    assert same(got, want[:first])
    assert not registry_of(loader.strategy.disk_rows)._readers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("failing", [0, 1, 11])
def test_a_failing_sample_comes_after_the_batches_before_it(path: Any, ds: Dataset, failing: int, way: str) -> None:
    loader = WAYS[way](ds)
    sample = loader.strategy.stages.sample.sample

    def fail(cursor: Cursor) -> Any:
        if cursor.step == failing:
            raise BudgetError("mine")
        return sample(cursor)

    with_stage(loader, "sample", fail)
    got, message, notes = outcome(loader)
    assert (message, notes) == ("mine", [f"in stage 'sample' at step {failing} of the pipeline"])
    assert same(got, in_memory(path)[0][:failing])


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("taken", [0, 1, 5, 14])
@pytest.mark.parametrize("how", ["closed", "dropped", "raised"])
def test_an_epoch_left_halfway_leaves_nothing(path: Any, ds: Dataset, taken: int, how: str, way: str) -> None:
    loader, before = WAYS[way](ds), open_scratch()

    def leave() -> None:
        epoch = iter(loader)
        for _ in range(taken):
            next(epoch)
        if how == "closed":
            epoch.close()
            epoch.close()
            assert list(epoch) == []
        if how == "raised":
            raise ZeroDivisionError

    for _ in range(2):
        with suppress(ZeroDivisionError):
            leave()
        gc.collect()
        assert eventually(lambda: no_threads() and not piece_threads())
        assert not registry_of(loader.strategy.disk_rows)._readers
        assert eventually(lambda: open_scratch() == before)
    loader.set_epoch(0)
    assert same(list(loader), in_memory(path)[0][:15])
    assert os.listdir(Path(path).parent) == ["t.ooc"]


@pytest.mark.cases(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", range(6))
def test_an_epoch_that_cannot_begin_leaves_nothing(
    path: Any, ds: Dataset, monkeypatch: Any, at: int, error: Any, way: str
) -> None:
    loader, before = WAYS[way](ds), open_scratch()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread, start=NoMoreThreads(at, error): start(thread))
        with pytest.raises(type(error)):
            iter(loader)
    assert eventually(lambda: no_threads() and not piece_threads())
    assert not registry_of(loader.strategy.disk_rows)._readers
    assert eventually(lambda: open_scratch() == before)
    loader.set_epoch(0)
    assert same(list(loader), in_memory(path)[0][:15])

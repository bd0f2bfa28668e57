"""The memory that a step's values take: used again, and never more than the step's room."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.fullgraph.executor import Executor
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.fullgraph.value_store import ValueStore
from ooc.models.builders import build_model
from ooc.runtime import memory
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import LossOf, cut_into, make, store_of


@pytest.fixture
def full(
    request: pytest.FixtureRequest, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FullGraph]:
    cut_into(5, monkeypatch)
    model = make(getattr(request, "param", "sage"))
    with Dataset.open(store_of(make_store)) as ds, closing(FullGraph(model, ds, tmp_path, room=10**7)) as full:
        yield full


def test_arrays_that_were_given_back_are_used_again_and_the_oldest_go_where_there_is_too_little(full: FullGraph) -> None:
    store = full.store
    store.left = lambda: 10_000
    first, second, third = (store.take((count, 4)) for count in (100, 200, 300))
    for array in (first, second, third):
        store.give(array)
    assert store.spare_bytes == 600 * 4 * store.dtype.itemsize
    again = store.take((100, 8))
    assert np.shares_memory(again, second), "as many bytes, whatever the shape"
    fresh = store.take((1, 4))
    assert not any(np.shares_memory(fresh, array) for array in (first, third))
    assert store.spare_bytes == 400 * 4 * store.dtype.itemsize, "no reason to let them go"
    store.left = lambda: 5_000 + 400
    store.take((25, 4))
    assert store.spare_bytes == 300 * 4 * store.dtype.itemsize, "the longest that waits goes first"
    store.trim()
    assert store.spare_bytes == 0


def test_arrays_that_wait_go_where_the_process_has_too_much(full: FullGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    store, resident = full.store, [900]
    store.left = lambda: 10**6
    monkeypatch.setattr(memory, "resident_bytes", lambda: (resident[0], resident[0]))
    monkeypatch.setattr(store, "_tidy", memory.Tidy(10_000))
    store.give(store.take((100, 4)))
    store.tidy()
    assert store.spare_bytes
    resident[0] = 10_001
    store.tidy()
    assert not store.spare_bytes


def test_a_second_step_takes_no_fresh_memory_for_its_values_where_there_is_room(
    full: FullGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.placement = Placement({v.name: TensorPlacement.RETAINED for v in full.program.values})
    loss = LossOf(full.dataset)
    full.step(loss)
    again, fresh, take = list[Any](), list[Any](), ValueStore.take

    def taken(store: ValueStore, shape: tuple[int, ...]) -> Any:
        before = store.spare_bytes
        array = take(store, shape)
        (again if store.spare_bytes == before - array.nbytes else fresh).append(shape)
        return array

    monkeypatch.setattr(ValueStore, "take", taken)
    full.step(loss)
    assert again
    assert not fresh


@pytest.mark.parametrize("count", [1, 40, 9_000, 30_000])
def test_gradients_are_added_to_rows_on_disk_wherever_they_lie(make_store: MakeStore, tmp_path: Path, count: int) -> None:
    nodes, rng = 30_000, np.random.default_rng(count)
    with (
        Dataset.open(make_store(num_nodes=nodes, num_edges=nodes, x=np.ones((nodes, 33), np.float32))) as ds,
        closing(FullGraph(build_model("gat", 33, 33, 4, 3, heads=1), ds, tmp_path / "full", room=10**8)) as full,
    ):
        store, expected = full.store, np.zeros((nodes, 33), np.float32)
        store.placement = Placement({"grows1": TensorPlacement.DISK})
        store.clear("grows1")
        for _ in range(3):
            node, values = rng.permutation(nodes)[:count], rng.standard_normal((count, 33), np.float32)
            expected[node] += values
            store.add("grows1", node, values)
        np.testing.assert_array_equal(store.read("grows1", 0, nodes), expected)


_RANGE_BYTES = 200_000


@pytest.mark.parametrize("saved", [TensorPlacement.RETAINED, TensorPlacement.RECOMPUTED])
@pytest.mark.parametrize("rows", [TensorPlacement.RETAINED, TensorPlacement.DISK])
@pytest.mark.parametrize("full", ["sage", "gat"], indirect=True)
def test_values_and_arrays_that_wait_take_no_more_than_the_room(
    full: FullGraph, monkeypatch: pytest.MonkeyPatch, saved: TensorPlacement, rows: TensorPlacement
) -> None:
    ranges = {op.name: _RANGE_BYTES for op in full.program.forward if op.kind == "gather"}
    placements = {v.name: saved if v.kind == "saved" else rows for v in full.program.values}
    full.placement = Placement(placements, ranges=ranges)
    in_use, with_spare, given, forward = [], list[int](), Executor.given, Executor._forward

    def noted(made: Any) -> Any:
        def run(stepper: Executor, *arguments: Any) -> Any:
            result = made(stepper, *arguments)
            in_use.append(stepper.room - stepper._left())
            with_spare.append(in_use[-1] + stepper.store.spare_bytes)
            return result

        return run

    monkeypatch.setattr(Executor, "given", noted(given))
    monkeypatch.setattr(Executor, "_forward", noted(forward))
    full.step(LossOf(full.dataset))
    full.room = max(in_use)
    for _ in range(2):
        with_spare.clear()
        full.step(LossOf(full.dataset))
        assert max(with_spare) <= full.room
        assert max(with_spare) or (ranges and rows is TensorPlacement.DISK)

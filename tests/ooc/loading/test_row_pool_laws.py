"""Laws of a pool of rows, its ring and its plan, against a double in memory: any widths, types, pieces and budgets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ooc.graph.aggregation import PreAggregation
from ooc.loading import row_pool
from ooc.loading.choose_pool import _Chooser
from ooc.loading.feature_cache import Stopped
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.row_pool import COPIED, READ_AHEAD, RowPool, SlotMap
from ooc.runtime import device_reads
from ooc.runtime.buffers import Buffers
from ooc.runtime.memory_plan import DevicePlan, plan_memory
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.arrays.segment_rows import SegmentRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.io.engines.pread import PreadEngine
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.io.segments import Segments
from tests.conftest import MakeStore
from tests.ooc.batches import same

CPU = torch.device("cpu")
PAGE = 4096
DTYPES = st.sampled_from(["float32", "float64", "float16", "int8", "uint8", "int16", "int64"])
FEW = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


class RowsInMemory:
    """A double of rows: an array, and the ids that were asked for, in their order."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.asked = array, list[int]()
        self.shape, self.dtype = array.shape, array.dtype
        self.row_bytes = array[:1].nbytes

    def read(self, ids: NDArray[np.int64], out: NDArray[Any]) -> int:
        self.asked += ids.tolist()
        out[:] = self.array[ids]
        return len(ids) * self.row_bytes


class WatchedBuffers(Buffers):
    """The pieces in use at once."""

    most = 0

    def empty(self, *arguments: Any) -> NDArray[Any]:
        piece = super().empty(*arguments)
        WatchedBuffers.most = max(WatchedBuffers.most, len(self._out))
        return piece


class WatchedEngine(PreadEngine):
    """The reads of a ring."""

    def __init__(self, segments: Segments) -> None:
        super().__init__(segments)
        self.plans: list[ReadPlan] = []

    def read(self, plan: ReadPlan, buffer: Any) -> int:
        assert buffer.nbytes == plan.nbytes
        self.plans.append(plan)
        return super().read(plan, buffer)


@st.composite
def arrays(draw: Any) -> NDArray[Any]:
    """Rows of any bytes, of any width and type."""
    count, width, dtype = draw(st.integers(1, 60)), draw(st.integers(1, 40)), np.dtype(draw(DTYPES))
    values = np.random.default_rng(draw(st.integers(0, 9))).integers(-100, 100, (count, width))
    return values.astype(dtype)


@st.composite
def slot_maps(draw: Any, count: int, capacity: int) -> SlotMap:
    if draw(st.booleans()):
        return SlotMap.first(count, capacity)
    wanted = draw(st.lists(st.sets(st.integers(0, count - 1)), max_size=4))
    return SlotMap.most_wanted((np.array(sorted(each), np.int64) for each in wanted), count, min(count, capacity))


def filled(pool: RowPool, stops: Iterator[bool]) -> int:
    """Fill it, going on after every stop; how often it was stopped."""
    stopped = 0
    while True:
        try:
            pool.fill(lambda: next(stops, False))
        except Stopped:
            stopped += 1
        else:
            return stopped


def check_taken(pool: RowPool, array: NDArray[Any], ids: list[int]) -> None:
    """Any rows in any order, once through the pool and once without."""
    node = np.array(ids, np.int64)
    place, missed = pool.slots.find(node)
    found = pool.take(torch.from_numpy(place), torch.from_numpy(missed), torch.from_numpy(array[node[missed]]))
    assert torch.equal(found, torch.from_numpy(array[node]))


@FEW
@given(data=st.data(), array=arrays(), memory=st.integers(0, 10_000), piece=st.integers(1, 9))
def test_a_pool_reads_each_row_once_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, data: Any, array: NDArray[Any], memory: int, piece: int
) -> None:
    rows: Any = RowsInMemory(array)
    try:
        plan = DevicePlan.of(memory).beside(
            data.draw(st.integers(0, 500)), data.draw(st.integers(0, 500)), array.nbytes, array.nbytes
        )
    except BudgetError:
        return
    assume(plan.pool >= rows.row_bytes)  # without a row there is no pool
    slots = data.draw(slot_maps(len(array), plan.pool // rows.row_bytes))
    monkeypatch.setattr(row_pool, "PIECE_BYTES", 2 * PAGE + piece * rows.row_bytes)
    monkeypatch.setattr(row_pool, "Buffers", WatchedBuffers)
    WatchedBuffers.most = 0
    pool = RowPool(rows, Encoding.plain(array.dtype), slots, CPU, lambda *_: None)
    assert pool.nbytes <= plan.pool
    assert plan.libraries + plan.batches + plan.activations + pool.nbytes <= memory
    stopped = filled(pool, iter(data.draw(st.lists(st.booleans(), max_size=8))))
    there = [row for _, ids in slots.pieces(len(array)) for row in ids]
    assert WatchedBuffers.most <= READ_AHEAD + COPIED
    if not stopped:
        assert rows.asked == there
    assert set(rows.asked) == set(there)
    assert len(rows.asked) <= len(there) + stopped * (READ_AHEAD + COPIED) * piece  # what was read ahead of a stop
    assert torch.equal(pool.values, torch.from_numpy(array[np.array(there, np.int64)]))
    check_taken(pool, array, data.draw(st.lists(st.integers(0, len(array) - 1), max_size=30)))


@FEW
@given(data=st.data(), array=arrays(), capacity=st.integers(1, 60), piece=st.integers(1, 40), pieces=st.integers(2, 5))
def test_a_pool_is_filled_through_a_ring_of_any_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: Any,
    array: NDArray[Any],
    capacity: int,
    piece: int,
    pieces: int,
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(array.tobytes())
    segments = Segments((path,), np.array([array.nbytes]))
    rows, engines, read = SegmentRows(array.shape, array.dtype, segments, "pread"), list[WatchedEngine](), list[int]()

    def engine_into(*_: Any) -> WatchedEngine:
        engines.append(WatchedEngine(segments))
        return engines[-1]

    monkeypatch.setattr(row_pool, "engine_into", engine_into)
    monkeypatch.setattr(row_pool, "PIECE_BYTES", 2 * PAGE + piece * rows.row_bytes)
    monkeypatch.setattr(device_reads, "PIECES", pieces)
    slots = SlotMap.first(len(array), capacity)
    pool = RowPool(rows, Encoding.plain(array.dtype), slots, CPU, lambda count, _: read.append(count))
    stopped = filled(pool, iter(data.draw(st.lists(st.booleans(), max_size=8))))
    rows.engine.close()
    assert sum(read) == slots.capacity  # rows count as read when they are in their place
    plans = [plan for engine in engines for plan in engine.plans]
    used = -(-slots.capacity // piece)
    assert used <= len(plans) <= used + stopped * pieces
    assert all(plan.nbytes <= pool.piece_rows * rows.row_bytes + 2 * PAGE for plan in plans)
    assert torch.equal(pool.values, torch.from_numpy(array[: slots.capacity]))
    check_taken(pool, array, data.draw(st.lists(st.integers(0, len(array) - 1), max_size=30)))


@pytest.fixture
def opened(make_store: MakeStore) -> Iterator[Dataset]:
    with Dataset.open(make_store(num_nodes=200, num_edges=1500), memory="2GB") as ds:
        yield ds


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(memory=st.integers(10_000, 400_000), kind=st.sampled_from([None, "mean", "sum", "gcn"]), size=st.integers(5, 60))
def test_batches_do_not_depend_on_the_device_s_memory(
    opened: Dataset, monkeypatch: pytest.MonkeyPatch, memory: int, kind: Any, size: int
) -> None:
    monkeypatch.setattr(_Chooser, "_pays", lambda self, slots: True)
    given: dict[str, Any] = {"batch_size": size, "shuffle": True, "seed": 1}
    given["pre_aggregation"] = None if kind is None else PreAggregation(kind, 8)
    budget = plan_memory(opened)
    device = DevicePlan.of(memory)
    budget = type(budget)(**{**vars(budget), "device": device})
    loader = NeighborLoader(opened, [3, 2], **given, budget=budget, device="cpu")
    assume(loader.pool is not None)
    assert loader.pool is not None
    assert loader.pool.nbytes <= memory - device.libraries
    assert same(list(loader), list(NeighborLoader(opened, [3, 2], **given)))

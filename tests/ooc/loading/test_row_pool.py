"""Rows that stay on a device, against the array in memory: any order, capacity and type; batches are those without a pool."""

import dataclasses
import gc
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

import ooc
from ooc.config.nodes import TrainConfig
from ooc.graph.aggregation import PreAggregation
from ooc.loading import row_pool
from ooc.loading.choose_pool import _Chooser, device_plan
from ooc.loading.feature_cache import Stopped
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.pooled_load import PooledLoadStage
from ooc.loading.row_pool import RowPool, SlotMap, shared_pool, stored_tensor
from ooc.runtime.memory_plan import DevicePlan, plan_memory
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.batches import same
from tests.ooc.loading.test_feature_gather import TYPES, write_features
from tests.ooc.runs import KillAt, Killed, configure, curve
from tests.pretended_cuda import REGISTERED, pretended_cuda

N, F = 300, 21
CPU = torch.device("cpu")
CAPACITIES = [0.0, 0.3, 1.0]
wanted_rows = st.lists(st.sets(st.integers(0, 39)), max_size=8)


class Counted:
    """What was read."""

    def __init__(self) -> None:
        self.rows = self.nbytes = 0

    def __call__(self, rows: int, nbytes: int) -> None:
        self.rows, self.nbytes = self.rows + rows, self.nbytes + nbytes


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_pool, "PIECE_BYTES", 2 * 4096 + 8 * 4 * F)


@settings(deadline=None)
@given(batches=wanted_rows, capacity=st.integers(0, 45))
def test_the_rows_most_wanted_stay_in_their_order(batches: list[set[int]], capacity: int) -> None:
    counts = [sum(row in batch for batch in batches) for row in range(40)]
    best = sorted(range(40), key=lambda row: (-counts[row], row))[:capacity]
    slots = SlotMap.most_wanted((np.array(sorted(each), np.int64) for each in batches), 40, capacity)
    check_slots(slots, sorted(best))


@settings(deadline=None)
@given(count=st.integers(0, 40), capacity=st.integers(0, 45))
def test_the_first_rows_take_no_memory_of_the_host(count: int, capacity: int) -> None:
    slots = SlotMap.first(count, capacity)
    check_slots(slots, list(range(min(count, capacity))))
    assert slots.nbytes == 0


def check_slots(slots: SlotMap, there: list[int]) -> None:
    assert slots.capacity == len(there)
    assert slots.whole == (slots.capacity == slots.count)
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(slots.count), 2))
    place, missed = slots.find(ids)
    assert [i for i in range(len(ids)) if int(ids[i]) not in there] == missed.tolist()
    hits = np.delete(np.arange(len(ids)), missed)
    assert [there[at] for at in place[hits]] == ids[hits].tolist()
    assert not place[missed].any()
    for rows in (1, 3, 100):
        for begin in (0, len(there) // 2):
            pieces = list(slots.pieces(rows, begin))
            assert [row for _, ids in pieces for row in ids] == there[begin:]
            assert [at for at, ids in pieces for at in range(at, at + len(ids))] == list(range(begin, len(there)))


def stored(make_store: MakeStore, folder: Path, kind: str) -> tuple[Path, Path]:
    """A store, and an array of its features in that type."""
    x = np.random.default_rng(2).standard_normal((N, F), dtype=np.float32)
    return make_store(num_nodes=N, num_edges=1500, x=x, weight=True), write_features(folder, kind, x)[0]


def slots_of(part: float, scattered: bool = True) -> SlotMap:
    wanted = [np.random.default_rng(3).permutation(N)[: N // 2].astype(np.int64)]
    return SlotMap.most_wanted(wanted, N, int(N * part)) if scattered else SlotMap.first(N, int(N * part))


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("part", [0.3, 1.0])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_pool_is_filled_once_and_goes_on_where_it_was_stopped(
    make_store: MakeStore, tmp_path: Path, small_pieces: None, kind: str, part: float, scattered: bool, in_memory: bool
) -> None:
    store, source = stored(make_store, tmp_path, kind)
    with Dataset.open(store, features={"x": source}, in_memory=in_memory) as ds:
        rows, encoding, slots = ds.stored("x"), ds.encoding("x"), slots_of(part, scattered)
        every = np.empty(rows.shape, rows.dtype)
        rows.read(np.arange(N), every)
        there = [row for _, ids in slots.pieces(N) for row in ids]
        for device in ("cpu", "cuda"):
            with pretended_cuda():
                read, asked = Counted(), iter([False, True])
                pool = RowPool(rows, encoding, slots, torch.device(device), read)
                with pytest.raises(Stopped):
                    pool.fill(lambda asked=asked: next(asked))
                pool.fill(lambda: False)
                after = read.rows, read.nbytes
                pool.fill(lambda: False)
                assert (read.rows, read.nbytes) == after
                ahead = row_pool.READ_AHEAD * pool.piece_rows
                assert 0 <= after[0] - len(there) <= ahead  # what was read ahead when it was stopped is read again
                assert torch.equal(pool.values.cpu(), stored_tensor(every[there], encoding))


class NotingLock:
    """A lock that says when a thread waits for it."""

    def __init__(self) -> None:
        self._lock, self.waiting = threading.Lock(), threading.Event()

    def acquire(self, timeout: float) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self.waiting.set()
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_thread_that_waits_while_another_fills_a_pool_makes_no_buffers_and_can_be_stopped(
    make_store: MakeStore, tmp_path: Path, small_pieces: None, is_stopped: bool
) -> None:
    store, source = stored(make_store, tmp_path, "float32")
    with Dataset.open(store, features={"x": source}) as ds, pretended_cuda() as device, ThreadPoolExecutor(1) as threads:
        pool = RowPool(ds.stored("x"), ds.encoding("x"), slots_of(1.0), torch.device("cuda"), Counted())
        lock: Any = NotingLock()
        pool._lock = lock
        others, locked = [], []

        def fill_in_another_thread() -> bool:
            if not others:
                others.append(threads.submit(pool.fill, lambda: is_stopped))
                assert lock.waiting.wait(60)
                locked.append(device.counts[REGISTERED])
                assert not is_stopped or isinstance(others[0].exception(60), Stopped)  # while this thread fills the pool
            return False

        pool.fill(fill_in_another_thread)
        assert is_stopped or others[0].result(60) is None
        assert device.counts[REGISTERED] == locked[0] > 0, device.counts.told(REGISTERED)


@settings(deadline=None, max_examples=30)
@given(ids=st.lists(st.integers(0, 39), max_size=60), capacity=st.integers(1, 40), scattered=st.booleans())
def test_rows_are_those_of_the_array_in_any_order(ids: list[int], capacity: int, scattered: bool) -> None:
    every = np.random.default_rng(0).standard_normal((40, 3), dtype=np.float32)
    rows: Any = ArrayRows(every)
    wanted = [np.arange(39, 0, -2, dtype=np.int64)]
    slots = SlotMap.most_wanted(wanted, 40, capacity) if scattered else SlotMap.first(40, capacity)
    pool = RowPool(rows, Encoding.plain(every.dtype), slots, CPU, Counted())
    pool.fill(lambda: False)
    node = np.array(ids, np.int64)
    place, missed = slots.find(node)
    found = pool.take(*map(torch.from_numpy, (place, missed, every[node[missed]])))
    assert torch.equal(found, torch.from_numpy(every[node]))


def plan_of(ds: Dataset, max_batch: int = 2**22) -> Any:
    budget = plan_memory(ds)
    small = {"max_batch": max_batch, "in_flight": 2 * max_batch}
    return dataclasses.replace(budget, device=DevicePlan.of(10**9), **small)


def use_part(part: float, monkeypatch: pytest.MonkeyPatch, beside: Any = DevicePlan.beside) -> None:
    """Devices have room for that part of the rows from now on, and it is used however slow it is."""

    def less(self: DevicePlan, batches: int, activations: int, wanted: int, rows: int) -> DevicePlan:
        found: DevicePlan = beside(self, batches, activations, int(wanted * part), rows)
        return found

    monkeypatch.setattr(DevicePlan, "beside", less)
    monkeypatch.setattr(_Chooser, "_pays", lambda self, slots: True)


@pytest.fixture
def part_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(part) -> None: see `use_part`."""
    return lambda part: use_part(part, monkeypatch)


SETTINGS: dict[str, dict[str, Any]] = {
    "rows": {},
    "mean": {"pre_aggregation": PreAggregation("mean", 8)},
    "sum": {"pre_aggregation": PreAggregation("sum", 8)},
    "expanded": {"pre_aggregation": PreAggregation("expanded", 8), "weight_attr": "weight"},
    "gcn": {"pre_aggregation": PreAggregation("gcn", 8)},
    "labor": {"pre_aggregation": PreAggregation("mean", 8), "sampler": "labor"},
    "bfloat16": {"dtype": torch.bfloat16},
    "trees": {"disjoint": True},
}


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("part", CAPACITIES)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_batches_are_those_without_a_pool_to_the_bit(
    make_store: MakeStore, tmp_path: Path, part_of: Any, name: str, kind: str, part: float, in_memory: bool
) -> None:
    store, source = stored(make_store, tmp_path, kind)
    given = {"batch_size": 40, "shuffle": True, "seed": 2, **SETTINGS[name]}
    with Dataset.open(store, features={"x": source}, in_memory=in_memory) as ds:
        wanted = list(NeighborLoader(ds, [4, 3], **given))
        part_of(part)
        loader = NeighborLoader(ds, [4, 3], **given, budget=plan_of(ds), device="cpu")
        pooled = isinstance(loader.strategy.stages.load, PooledLoadStage)
        assert pooled == (part > 0)
        assert same(list(loader), wanted)
        before = loader.bytes_read
        list(loader)
        if part == 1:
            assert loader.bytes_read == before
            assert before > 0 or in_memory


def test_edge_features_are_read_beside_a_pool(tmp_path: Path, part_of: Any) -> None:
    made = Data(x=torch.rand(N, F), edge_index=torch.randint(N, (2, 1500)), edge_attr=torch.rand(1500, 3))
    ooc.from_data(made, tmp_path / "edges.ooc").close()
    for part in (0.4, 1.0):
        with Dataset.open(tmp_path / "edges.ooc") as ds:
            wanted = list(NeighborLoader(ds, [4, 3], batch_size=40, seed=1))
            part_of(part)
            loader = NeighborLoader(ds, [4, 3], batch_size=40, seed=1, budget=plan_of(ds), device="cpu")
            assert isinstance(loader.strategy.stages.load, PooledLoadStage)
            assert same(list(loader), wanted)


def test_loaders_of_the_same_rows_share_a_pool(make_store: MakeStore) -> None:
    with Dataset.open(make_store(num_nodes=N, num_edges=1500)) as ds:
        loaders = [NeighborLoader(ds, [3], input_nodes=s, budget=plan_of(ds), device="cpu") for s in ("train", "val")]
        assert loaders[0].strategy.stages.load.pool is loaders[1].strategy.stages.load.pool
        batch = loaders[1](torch.arange(5))  # fills it
        x = np.empty(batch.x.shape, np.float32)
        ds.stored("x").read(batch.n_id.numpy(), x)
        assert torch.equal(batch.x, torch.from_numpy(x))
        for loader in loaders:
            list(loader)
        assert loaders[0].bytes_read > 0
        assert loaders[1].bytes_read == 0
        del loaders, loader, batch
        gc.collect()
        assert shared_pool(ds.stored("x"), CPU) is None


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_a_loader_that_is_left_early_ends_and_begins_again(
    make_store: MakeStore, small_pieces: None, part_of: Any, part: float
) -> None:
    with Dataset.open(make_store(num_nodes=N, num_edges=1500)) as ds:
        wanted = list(NeighborLoader(ds, [3, 3], batch_size=8, seed=1))
        part_of(part)
        loader = NeighborLoader(ds, [3, 3], batch_size=8, seed=1, budget=plan_of(ds), device="cpu")
        for taken in range(3):
            epoch = iter(loader)
            deque(islice(epoch, taken), maxlen=0)
            epoch.close()
        loader.load_state_dict({"epoch": 0, "step": 0})
        assert same(list(loader), wanted)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["rows", "mean", "gcn"])
def test_a_second_epoch_on_a_gpu_reads_nothing(make_store: MakeStore, name: str) -> None:
    given: dict[str, Any] = {"batch_size": 40, "seed": 2, **SETTINGS[name]}
    with Dataset.open(make_store(num_nodes=N, num_edges=1500)) as ds, pretended_cuda() as device:
        wanted = list(NeighborLoader(ds, [4, 3], **given, device="cpu"))
        loader = NeighborLoader(ds, [4, 3], **given, device="cuda", gpu_memory="1GB")
        first = list(loader)
        read, locked = loader.bytes_read, device.counts[REGISTERED]
        assert read > 0
        assert same([batch.cpu() for batch in first], wanted)
        list(loader)
        assert (loader.bytes_read, device.counts[REGISTERED]) == (read, locked)


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    return make_store(num_nodes=N, num_edges=1500)


def runs(config: TrainConfig, part: float, part_of: Any, **options: Any) -> bytes:
    part_of(part)
    with pretended_cuda():
        train(config, **options)
    return curve(config.out)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["sage", "gcn"])
def test_a_killed_run_goes_on_with_another_gpu_memory(store: Path, tmp_path: Path, part_of: Any, model: str) -> None:
    given: dict[str, Any] = {"device": "cuda", "model": model, "checkpoint_every": 2, "epochs": 2}
    wanted = runs(configure(store, tmp_path / "whole", **given), 1.0, part_of)
    out = tmp_path / "killed"
    with pytest.raises(Killed):
        runs(configure(store, out, **given), 0.3, part_of, watcher=KillAt(5))
    assert runs(configure(store, out, **given, gpu_memory="6GB"), 0.6, part_of, resume=True) == wanted


def test_gpu_memory_is_refused_where_there_is_no_gpu(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`gpu_memory` needs a CUDA device"):
        train(configure(store, tmp_path / "run", gpu_memory="8GB", device="cpu"))
    assert not (tmp_path / "run").exists()
    with Dataset.open(store) as ds, pytest.raises(ConfigError, match="`gpu_memory` needs a CUDA device"):
        NeighborLoader(ds, [3], gpu_memory="8GB")
    with pretended_cuda():
        with pytest.raises(ConfigError, match=r"`gpu_memory` is 80 GB, and 8 GB of it are free"):
            device_plan(torch.device("cuda"), "80GB")
        with pytest.raises(BudgetError, match=r"GPU memory .* is not enough for .* give `gpu_memory` at least"):
            train(configure(store, tmp_path / "run", gpu_memory="1kB", device="cuda"))
    with pytest.raises(ValueError, match="gpu_memory does not apply to mode cluster"):
        TrainConfig(store=store, out=tmp_path / "other", mode="cluster", gpu_memory="8GB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_loader_for_a_gpu_that_is_not_there_is_refused(store: Path) -> None:
    with Dataset.open(store) as ds:
        for given in ({}, {"gpu_memory": "1GB"}):
            with pytest.raises(ConfigError, match="torch sees no CUDA device here"):
                NeighborLoader(ds, [3], device="cuda", **given)


def test_a_loader_says_why_no_rows_stay(store: Path) -> None:
    given: dict[str, Any] = {"device": "cuda", "gpu_memory": "1GB"}
    with Dataset.open(store) as ds, pretended_cuda():
        with pytest.warns(UserWarning, match="gpu_memory has no feature rows: transform takes batches"):
            NeighborLoader(ds, [3], transform=lambda batch: batch, **given)
        with pytest.warns(UserWarning, match="gpu_memory has no feature rows: batches have none"):
            NeighborLoader(ds, [3], features=False, **given)
        links = LinkNeighborLoader(ds, [3], batch_size=40, neg_sampling="binary", seed=1, **given)
        assert links.pool is not None
        wanted = LinkNeighborLoader(ds, [3], batch_size=40, neg_sampling="binary", seed=1)
        assert same([batch.cpu() for batch in links], list(wanted))


@settings(deadline=None)
@given(*[st.integers(0, 2**40)] * 6)
def test_a_device_is_divided_once(memory: int, model: int, batches: int, activations: int, wanted: int, rows: int) -> None:
    plan = DevicePlan.of(memory, model)
    try:
        found = plan.beside(batches, activations, wanted, rows)
    except BudgetError:
        assert plan.libraries + model + batches + activations > memory
        return
    assert found.libraries + found.model + found.batches + found.activations + found.pool <= memory
    assert found.pool <= wanted
    assert next(iter(found.parts().values())) == memory

"""Sweeps against rows in memory: the same batches to the bit, failures in order, bounded bytes, nothing left behind."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc import loaders, sweeps
from ooc.budget import divide
from ooc.loaders import NeighborLoader
from ooc.order import Cursor
from ooc.rowcache import SECOND_SHARE, shelf_of
from ooc.sums import Summing, Sums
from ooc.sweepplan import sweeps_pay
from ooc.sweeps import Stopped, SumsMemory
from ooc.train import train
from stores.build import write_store
from stores.dataset import Dataset
from stores.errors import BudgetError, StoreError
from stores.graph import Graph
from stores.lmdb_rows import write_lmdb_rows
from stores.rows import ArrayRows
from stores.zarr_rows import ShardedRows
from tests.conftest import MakeStore, random_edges
from tests.ooc.batches import same
from tests.ooc.runs import configure, curve
from tests.ooc.test_gather import TYPES, write_features
from tests.ooc.test_windows import Behind, Broken, foreign_features
from tests.waiting import eventually, no_threads

N, E, F = 300, 3000, 21
MEAN = Summing("mean", 8)


@pytest.fixture(scope="module")
def x() -> Any:
    return np.random.default_rng(0).standard_normal((N, F), dtype=np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any, x: Any) -> Any:
    weight = np.random.default_rng(1).random(E, np.float32)
    graph = Graph.from_edges(*random_edges(N, E), N, weight=weight)
    return write_store(
        tmp_path_factory.mktemp("sweeps") / "t.ooc", graph, x=x, y=np.arange(N) % 3, task="multiclass", num_classes=3
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
def _swept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every loader of rows on disk sweeps; and no thread is left."""
    monkeypatch.setattr(loaders, "sweeps_pay", lambda rows, pool: True)
    yield
    gc.collect()
    assert eventually(lambda: no_threads() and not piece_threads())


@pytest.fixture
def ds(path: Any) -> Iterator[Dataset]:
    with Dataset.open(path) as opened:
        yield opened


def piece_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ooc-piece")]


def budget(batches: int, max_batch: int | None = None) -> Any:
    """A division with so many bytes for all batches alive; max_batch: a fifth of them, as `divide` has it."""
    max_batch = batches // 5 if max_batch is None else max_batch
    return dataclasses.replace(divide(10**9, baseline=0), max_batch=max_batch, in_flight=batches - 3 * max_batch)


def few(batches: int = 3) -> Any:
    """A budget of which about so many batches of `loader_of` make a sweep."""
    return budget(80_000 + 80_000 * batches)


def loader_of(ds: Dataset, **options: Any) -> NeighborLoader:
    chosen = {
        "batch_size": 20,
        "shuffle": not options.get("split_seeds"),
        "seed": 3,
        "summing": MEAN,
        "budget": few(),
    } | options
    return NeighborLoader(ds, chosen.pop("fanout", [4, 3]), **chosen)


def outcome(loader: NeighborLoader, epochs: int = 2) -> Any:
    got: list[Any] = []
    try:
        for _ in range(epochs):
            got.extend(loader)
    except BudgetError as error:
        return got, str(error), error.__notes__
    return got, "", []


def in_memory(path: Any, **options: Any) -> Any:
    with Dataset.open(path, in_memory=True) as held:
        loader = loader_of(held, **{"budget": budget(10**8)} | options)
        found = outcome(loader)
        assert "sum" not in loader.times()
        return found


def from_memory(loader: NeighborLoader) -> NeighborLoader:
    """The same loader, its budget and what it says of batches too, over the same rows in memory."""
    work = loader._work
    array = np.empty(work.x.shape, work.x.dtype)
    work.x.read(np.arange(N), array)
    loader._work = dataclasses.replace(work, x=ArrayRows(array))
    return loader


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from(["mean", "sum", "expanded", "gcn"]),
    fanout=st.sampled_from([[3], [4, 3], [-1], [2, 2, 2]]),
    how=st.sampled_from(["uniform", "replace", "weight_attr", "split_seeds"]),
    batch_size=st.integers(1, 40),
    room=st.integers(20_000, 10**6),
    threads=st.integers(1, 3),
    engine=st.sampled_from(["pread", "mmap", "auto"]),
    encoding=st.sampled_from(TYPES),
    edges_on_disk=st.booleans(),
)
def test_batches_are_those_of_rows_in_memory(
    path: Any, features: Any, kind: Any, fanout: Any, how: str, batch_size: int, room: int, threads: int, engine: Any,
    encoding: str, edges_on_disk: bool,
) -> None:  # fmt: skip
    """Whatever the budget, the threads, the engine, the type of the features and where the edges are."""
    options: dict[str, Any] = {"fanout": fanout, "batch_size": batch_size, "summing": Summing(kind, 8)}
    options["input_nodes"] = torch.arange(0, N, 6)
    options["budget"] = budget(room)
    if how == "weight_attr":
        options["weight_attr"] = "weight"
    elif how != "uniform":
        options[how] = True
    if how == "replace" and fanout == [-1]:
        options["fanout"] = [5]
    with pytest.MonkeyPatch.context() as patch, Dataset.open(path, engine=engine, features={"x": features[encoding]}) as ds:
        if edges_on_disk:
            patch.setattr(loaders, "WARM_SHARE", 10**9)
        loader = loader_of(ds, sample_threads=threads, **options)
        assert (loader._work.lockstep is not None) == edges_on_disk
        got, message, notes = outcome(loader)
        assert "sum" in loader.times()
        other = from_memory(loader_of(ds, sample_threads=threads, **options))
        want = outcome(other)
        assert "sum" not in other.times()
    assert same((got, message), want[:2])
    assert edges_on_disk or notes == want[2]  # edges on disk are drawn by another stage


@pytest.mark.parametrize("source", ["lmdb", "foreign"])
def test_features_that_someone_else_wrote_are_swept_to_the_bit(path: Any, features: Any, source: str) -> None:
    with Dataset.open(path, features={"x": features[source]}) as ds:
        loader = loader_of(ds)
        assert not isinstance(loader._work.x, ShardedRows)
        got = outcome(loader)
        assert 2 < loader.times()["sum"]["items"] < 30
        assert loader.bytes_read > 0
    assert len(got[0]) == 30
    assert same(got, in_memory(path))


def test_windows_make_the_same_sums(path: Any, ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "sweeps_pay", sweeps_pay)
    loader = loader_of(ds, budget=budget(10**8))
    got = outcome(loader)
    assert "sum" not in loader.times()
    assert loader.rows_read <= N
    assert same(got, in_memory(path))


def test_rows_that_fit_in_half_the_memory_are_not_swept(ds: Dataset) -> None:
    rows = loader_of(ds)._work.x
    assert [sweeps_pay(rows, pool) for pool in (N * F * 4, 2 * N * F * 4 - 1, 2 * N * F * 4)] == [True, True, False]


@pytest.mark.parametrize("taken", [0, 1, 7, 14, 15])
def test_an_epoch_goes_on_where_it_stopped(path: Any, ds: Dataset, taken: int) -> None:
    want = in_memory(path)[0]
    epoch = iter(loader := loader_of(ds))
    got = [next(epoch) for _ in range(taken)]
    state = loader.state_dict()
    epoch.close()
    other = loader_of(ds)
    other.load_state_dict(state)
    rest = [batch for _ in range(2) for batch in other]
    assert same([*got, *rest][: len(want)], want)


def test_batches_that_are_kept_neither_hang_nor_change(path: Any, ds: Dataset) -> None:
    loader = loader_of(ds, budget=few(1))
    kept = list(loader)
    assert loader.times()["sum"]["items"] > 4
    copies = [Sums(batch.x.near.clone(), batch.x.root.clone()) for batch in kept]
    outcome(loader)
    assert same([batch.x for batch in kept], copies)
    assert same(kept, in_memory(path)[0][:15])


def test_sums_alive_stay_within_the_budget(ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: dict[int, int] = {}
    peak = 0
    take = SumsMemory.take

    def counted(self: Any, rows: int, roots: int, width: int, turn: int) -> Any:
        nonlocal peak
        sums, kept = take(self, rows, roots, width, turn)
        number = len(numbers)
        numbers.append(number)
        alive[number] = sums.nbytes + kept.nbytes
        weakref.finalize(sums.base, alive.pop, number)
        peak = max(peak, sum(alive.copy().values()))
        return sums, kept

    numbers: list[int] = []
    monkeypatch.setattr(SumsMemory, "take", counted)
    for room in 2, 4, 8:
        loader = loader_of(ds, batch_size=10, budget=few(room))
        for _ in range(3):
            for _ in loader:
                pass
        assert 0 < peak <= loader.budget.batches
        assert loader.times()["sum"]["items"] < 90
        del _
        gc.collect()
        assert not alive


def stopped(memory: SumsMemory) -> None:
    with pytest.raises(Stopped):
        memory.take(1, 0, 1, 4)


def test_two_buffers_serve_an_epoch_and_a_consumer_that_keeps_them_gets_more() -> None:
    memory = SumsMemory()
    (first, roots), second = memory.take(3, 2, 4, 0), memory.take(3, 2, 4, 1)
    first[:], roots[:], second[0][:], second[1][:] = 1, 1, 2, 2
    part, got = roots[1:], []
    del first, roots
    third = threading.Thread(target=lambda: got.append(memory.take(2, 1, 4, 2)))
    third.start()
    third.join(0.1)
    assert third.is_alive()  # a part of it is in use still
    address = part.ctypes.data - (3 + 1) * 16
    del part
    third.join(10)
    assert got[0][0].ctypes.data == address
    memory.ask(3)
    for fourth in memory.take(3, 2, 4, 3):
        fourth[:] = 3
    assert all((each == 2).all() for each in second)
    last = threading.Thread(target=lambda: stopped(memory))
    last.start()
    memory.close()
    last.join(10)
    assert not last.is_alive()
    with pytest.raises(Stopped):
        memory.take(1, 1, 1, 0)


@pytest.mark.parametrize("bad", [3, 47, 155, 299])
def test_a_row_that_cannot_be_read_fails_at_its_batch(path: Any, ds: Dataset, x: Any, bad: int) -> None:
    want = in_memory(path)[0][:15]
    first = next(step for step, batch in enumerate(in_memory(path, summing=None)[0]) if bad in batch.n_id)
    loader = loader_of(ds)
    loader._work = dataclasses.replace(loader._work, x=Behind(Broken(x, bad)))
    got = []
    with pytest.raises(StoreError, match=f"row {bad} cannot") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == [f"in stage 'sum' at step {first} of the pipeline"]
    assert same(got, want[:first])
    assert shelf_of(loader._work.x)._sweeps == 0


@pytest.mark.parametrize("failing", [0, 1, 11])
def test_a_failing_sample_comes_after_the_batches_before_it(path: Any, ds: Dataset, failing: int) -> None:
    loader = loader_of(ds)
    work = loader._work
    sample = work.sample

    class Failing(type(work)):  # type: ignore[misc]
        def sample(self, cursor: Cursor) -> Any:
            if cursor.step == failing:
                raise BudgetError("mine")
            return sample(cursor)

    loader._work = Failing(**{field.name: getattr(work, field.name) for field in dataclasses.fields(work)})
    got, message, notes = outcome(loader)
    assert (message, notes) == ("mine", [f"in stage 'sample' at step {failing} of the pipeline"])
    assert same(got, in_memory(path)[0][:failing])


@pytest.mark.parametrize("taken", [0, 1, 5, 14])
@pytest.mark.parametrize("how", ["closed", "dropped", "raised"])
def test_an_epoch_left_halfway_leaves_nothing(path: Any, ds: Dataset, taken: int, how: str) -> None:
    loader = loader_of(ds)
    rows = loader._work.x

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
        assert shelf_of(rows)._sweeps == 0
    loader.set_epoch(0)
    assert same(list(loader), in_memory(path)[0][:15])


def test_closing_waits_for_the_reads_under_way(ds: Dataset, x: Any) -> None:
    """The rows may be closed next."""
    reading, slow, under_way = threading.Event(), threading.Event(), []

    class Slow(ArrayRows):
        def read(self, ids: Any, out: Any, at: Any = None) -> int:
            under_way.append(1)
            reading.set()
            slow.wait(60)
            under_way.pop()
            return super().read(ids, out, at)

    loader = loader_of(ds)
    loader._work = dataclasses.replace(loader._work, x=Behind(Slow(x)))
    epoch = iter(loader)
    assert reading.wait(60)
    closing = threading.Thread(target=epoch.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    slow.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not under_way


def test_two_loaders_at_once_share_the_memory(path: Any, ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    chain = sweeps._chain
    monkeypatch.setattr(sweeps, "_chain", lambda *a: (pools.append(a[4]), chain(*a))[1])
    room = few(12)
    one, other = loader_of(ds, budget=room), loader_of(ds, seed=4, fanout=[2, 2], budget=room)
    got = list(zip(one, other, strict=True))
    assert pools == [room.batches, room.batches // SECOND_SHARE]
    assert same([a for a, _ in got], in_memory(path)[0][:15])
    assert same([b for _, b in got], in_memory(path, seed=4, fanout=[2, 2])[0][:15])
    assert same(list(loader_of(ds, split_seeds=True)), in_memory(path, split_seeds=True)[0][:15])  # evaluation after training
    assert pools[2] == few().batches


@pytest.mark.parametrize("edges_on_disk", [False, True])
def test_a_batch_that_only_fits_all_the_memory_is_refused_or_halved_beside_another_loader(
    ds: Dataset, monkeypatch: pytest.MonkeyPatch, edges_on_disk: bool
) -> None:
    if edges_on_disk:
        monkeypatch.setattr(loaders, "WARM_SHARE", 10**9)
    room = few(3)
    assert len(list(loader_of(ds, budget=room))) == 15
    first = iter(loader_of(ds, budget=room))
    next(first)
    with pytest.raises(BudgetError, match=r"20 seeds needs .* of 80 kB \(beside another loader .* a quarter of what 1 GB"):
        list(loader_of(ds, budget=room))
    assert 15 < len(list(loader_of(ds, budget=room, split_seeds=True))) <= 30
    first.close()


def test_a_loader_of_rows_beside_one_of_sums_shares_the_memory_too(ds: Dataset) -> None:
    shelf = shelf_of(ds.stored("x"))
    sums, rows = iter(loader_of(ds)), iter(NeighborLoader(ds, [2, 2], batch_size=20, budget=few()))
    next(sums), next(rows)
    assert (shelf._sweeps, shelf._lease) == (1, None)  # the rows' pipeline has a smaller cache of its own
    sums.close(), rows.close()
    rows = iter(NeighborLoader(ds, [2, 2], batch_size=20, budget=few()))
    next(rows)
    assert not shelf.begin_sweeps()  # and a sweep would have to do with less
    shelf.end_sweeps()
    rows.close()
    assert shelf.begin_sweeps()
    shelf.end_sweeps()


@pytest.mark.parametrize(("model", "settings"), [("sage", {}), ("gin", {"residual": True}), ("gcn", {"input_dropout": 0.0})])
def test_runs_are_the_same_whichever_way_sums_are_made(
    make_store: MakeStore, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, model: str, settings: Any
) -> None:
    store = make_store(weight=True)
    ways = {"memory": {"in_memory": True}, "swept": {}, "pread": {"engine": "pread"}, "mmap": {"engine": "mmap"}}
    summaries = {
        name: train(configure(store, tmp_path / name, model=model, epochs=2, dropout=0.3, **way, **settings))
        for name, way in ways.items()
    }
    monkeypatch.setattr(loaders, "sweeps_pay", sweeps_pay)
    ways["windows"] = {}
    summaries["windows"] = train(configure(store, tmp_path / "windows", model=model, epochs=2, dropout=0.3, **settings))
    assert {name: "sum" in summary["stages"] for name, summary in summaries.items()} == {
        name: name in ("swept", "pread", "mmap") for name in ways
    }
    assert len({curve(tmp_path / name) for name in ways}) == 1
    assert len({str(summary["metrics"]) for summary in summaries.values()}) == 1

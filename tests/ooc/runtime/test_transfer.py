"""Copies to a device: each array once, the same batch on the other side, leases back, failures and ends passed on.

The CPU stands in for the device: everything but streams and page-locking is the same code (tests/gpu has those).
"""

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data

import ooc
from ooc.graph.blocks import Block, blocks_of
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.runtime.buffers import LEAST_BYTES, Buffers
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.runtime.transfer import Copier, OnDevice, StorageRegions, map_leaves, moved, on_device
from tests.ooc.batches import same
from tests.waiting import eventually

CPU = torch.device("cpu")


class Rows(NamedTuple):
    """Features that come in pieces."""

    kept: Tensor
    scale: Tensor | None
    count: int


def batch_of(rows: np.ndarray | None = None, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, 30, (2, 40), generator=generator)
    indptr = torch.arange(11) * 4
    first = Block(edge_index, indptr, 30, 10, torch.arange(30), None, torch.rand(40, generator=generator), None)
    x = torch.rand(30, 4, generator=generator) if rows is None else torch.from_numpy(rows)
    data = Data(x=x, edge_index=edge_index, y=torch.arange(30), num_nodes=30)
    data.edge_weight = first.weight
    data.blocks = blocks_of(first, (4, 6, 20), (16, 24))
    data.rows = Rows(x[3:9, 1:], torch.rand(3, generator=generator).to(torch.bfloat16), 7)
    data.named, data.nothing, data.empty = "a batch", None, torch.zeros(0, 3)
    return data


def addresses(batch: Any) -> set[int]:
    found = set()

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.numel():
            found.add(leaf.untyped_storage().data_ptr())
        return leaf

    map_leaves(batch, add)
    return found


class TestCopier:
    def test_the_batch_is_the_same_and_shares_nothing_with_the_old_one(self) -> None:
        before, batch = batch_of(), batch_of()
        old = addresses(batch)
        copier = Copier(CPU)
        after = copier.deliver(copier(batch))
        assert same(after, before)
        assert not addresses(after) & old

    def test_each_array_is_copied_once_and_views_stay_views(self) -> None:
        leases = Buffers(1, least_bytes=1)
        batch = batch_of(leases.empty((30, 4), np.dtype(np.float32)))
        nbytes = sum(region.nbytes for region in StorageRegions(batch).at.values())
        resident = Copier(CPU, leases)(batch)
        assert len(resident.memory) == 2  # the lease's, and one for all others
        total = sum(memory.nbytes for memory in resident.memory)
        assert nbytes <= total < nbytes + 512 * 8
        after = resident.batch
        assert after.blocks[1].edge_index.untyped_storage().data_ptr() == after.edge_index.untyped_storage().data_ptr()
        after.x[3, 1] = 5.0
        assert after.rows.kept[0, 0] == 5.0
        after.edge_index[0, 0] = 29
        assert after.blocks[0].edge_index[0, 0] == after.blocks[1].edge_index[0, 0] == 29
        assert after.edge_weight is after.blocks[0].weight or torch.equal(after.edge_weight, after.blocks[0].weight)

    def test_a_small_view_of_a_large_array_does_not_bring_the_array(self) -> None:
        large = torch.arange(1_000_000)
        resident = Copier(CPU)(Data(part=large[500_000:500_010]))
        assert sum(memory.nbytes for memory in resident.memory) <= 1024
        assert resident.batch.part.tolist() == list(range(500_000, 500_010))

    @given(st.data())
    @settings(deadline=None, max_examples=60)
    def test_any_views_of_any_dtype(self, data: st.DataObject) -> None:
        bases = [torch.arange(4096, dtype=torch.uint8).clone(), torch.rand(64, 16), torch.arange(3000) * 7 - 5]
        views = []
        for _ in range(data.draw(st.integers(1, 8))):
            view = data.draw(st.sampled_from(bases))
            if view.dtype == torch.uint8 and data.draw(st.booleans()):
                view = view.view(data.draw(st.sampled_from([torch.int16, torch.float32, torch.int64, torch.bool])))
            begin = data.draw(st.integers(0, view.size(0)))
            view = view[begin : data.draw(st.integers(begin, view.size(0))) : data.draw(st.integers(1, 3))]
            views.append(view.t() if view.dim() == 2 and data.draw(st.booleans()) else view)
        wanted = [view.clone() for view in views]
        resident = Copier(CPU)({"views": views})
        for after, before, view in zip(resident.batch["views"], wanted, views, strict=True):
            assert after.dtype == before.dtype
            assert after.stride() == view.stride()
            assert (
                torch.equal(after.nan_to_num(), before.nan_to_num())
                if after.is_floating_point()
                else torch.equal(after, before)
            )

    def test_two_tensors_over_one_array(self) -> None:
        array = np.arange(1000.0)
        batch = (torch.from_numpy(array[:10]), torch.from_numpy(array))
        after = Copier(CPU)(batch).batch
        assert torch.equal(after[0], torch.arange(10.0).double())
        assert torch.equal(after[1], torch.arange(1000.0).double())

    def test_what_is_no_plain_tensor_is_left_for_delivery(self) -> None:
        weight = torch.rand(3, requires_grad=True)
        sparse = torch.eye(3).to_sparse()
        copier = Copier(CPU)
        resident = copier({"weight": weight, "sparse": sparse, "x": torch.ones(3), "n": 3})
        assert not resident.complete
        after = copier.deliver(resident)
        assert after["weight"] is weight
        assert torch.equal(after["sparse"].to_dense(), torch.eye(3))
        assert after["n"] == 3
        assert copier(batch_of()).complete

    def test_objects_with_a_to_are_moved(self) -> None:
        class Thing:
            def to(self, device: torch.device) -> str:
                return f"on {device}"

        assert moved({"thing": Thing(), "n": 1}, CPU) == {"thing": "on cpu", "n": 1}

    def test_leases_are_back_after_a_thousand_batches_and_after_failures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        leases = Buffers(2, max_bytes=8 * LEAST_BYTES)
        copier = Copier(CPU, leases, max_bytes=LEAST_BYTES)
        rows = LEAST_BYTES // 16
        for step in range(1000):
            x = leases.empty((rows + step % 7, 4), np.dtype(np.float32))
            x[0] = step
            batch = copier.deliver(copier(Data(x=torch.from_numpy(x), y=torch.full((5,), step))))
            assert batch.x[0, 0] == batch.y[0] == step
            del x, batch
        assert leases.out_bytes == copier.staging.out_bytes == 0
        assert leases.refused == copier.staging.refused == 0

        def fail(*_: Any) -> Tensor:
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(Copier, "_copy", fail)
        batch = Data(x=torch.from_numpy(leases.empty((rows, 4), np.dtype(np.float32))))
        with pytest.raises(RuntimeError, match="out of memory"):
            copier(batch)
        del batch
        assert leases.out_bytes == copier.staging.out_bytes == 0


class TestCopiedAhead:
    def test_order_and_values(self) -> None:
        taken = list(on_device((batch_of(seed=seed) for seed in range(20)), CPU, Copier(CPU)))
        assert all(same(batch, batch_of(seed=seed)) for seed, batch in enumerate(taken))
        assert len(taken) == 20

    def test_one_batch_is_there_before_it_is_asked_for_and_no_more(self) -> None:
        asked: list[int] = []

        def batches() -> Iterator[Data]:
            for seed in range(10):
                asked.append(seed)
                yield batch_of(seed=seed)

        clocks: dict[str, Any] = {}
        ahead = on_device(batches(), CPU, Copier(CPU), clocks)
        for step in range(10):
            next(ahead)
            ready = min(step + 2, 10)
            assert eventually(lambda ready=ready: clocks["copy"].items == ready)
            assert len(asked) == ready
        with pytest.raises(StopIteration):
            next(ahead)
        ahead.close()

    def test_a_failure_comes_in_its_place(self) -> None:
        def batches() -> Iterator[Data]:
            yield batch_of()
            yield batch_of()
            raise KeyError("no more")

        ahead = on_device(batches(), CPU, Copier(CPU))
        next(ahead)
        next(ahead)
        with pytest.raises(KeyError, match="no more"):
            next(ahead)

    def test_close_ends_the_threads_and_what_the_batches_come_from(self) -> None:
        closed = threading.Event()

        def batches() -> Iterator[Data]:
            try:
                while True:
                    yield batch_of()
            finally:
                closed.set()

        ahead = on_device(batches(), CPU, Copier(CPU))
        next(ahead)
        ahead.close()
        ahead.close()
        assert closed.is_set()
        before = Pipeline(range(100), [Stage("make", lambda seed: batch_of(seed=seed))], max_bytes=1)
        ahead = on_device(before, CPU, Copier(CPU))
        next(ahead)
        ahead.close()
        assert before._state.stopped
        assert not [thread for thread in threading.enumerate() if thread.name in ("ooc-make", "ooc-copy")]

    def test_collecting_it_half_consumed_ends_the_threads(self) -> None:
        before = Pipeline(range(100), [Stage("make", lambda seed: batch_of(seed=seed))], max_bytes=1)
        ahead = on_device(before, CPU, Copier(CPU))
        next(ahead)
        del ahead, before
        assert eventually(lambda: not any(t.name in ("ooc-make", "ooc-copy") for t in threading.enumerate()))


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_loader_s_batches_through_the_copier(make_store: Any, monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    """As for CUDA, with the CPU in its place: the same batches, clocks of all stages, states, and epochs that end early."""

    def loader(ds: Any, **settings: Any) -> NeighborLoader:
        return NeighborLoader(ds, [3, 3], "train", batch_size=4, shuffle=True, seed=3, **settings)

    with ooc.open(make_store(weight=True), in_memory=in_memory) as ds:
        wanted = list(loader(ds))
        under_test = loader(ds)
        copier = Copier(CPU, under_test.strategy.stages.load.buffers)
        plain = under_test._pipeline

        def copied(cursors: Any) -> OnDevice:
            clocks = {name: clock for name, clock in under_test._clocks.items() if name != "consumer"}
            return on_device(plain(cursors, clocks), CPU, copier, under_test._clocks)

        monkeypatch.setattr(under_test, "_on_device", copied)
        epoch = iter(under_test)
        first = next(epoch)
        assert under_test.state_dict()["step"] == 1
        epoch.close()
        under_test.set_epoch(0)
        taken = list(under_test)
        assert len(taken) == len(wanted)
        assert all(same(a, b) for a, b in zip(taken, wanted, strict=True))
        assert same(first, wanted[0])
        assert under_test.times()["copy"]["items"] >= len(wanted)
        assert under_test.times()["consumer"]["items"] == len(wanted) + 1

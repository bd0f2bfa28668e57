"""Packed batches against rows in memory: the same to the bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.aggregation import PreAggregation
from ooc.sampling.labor import Labor
from ooc.stores.dataset import Dataset
from tests.ooc.batches import same
from tests.ooc.loading.shared_pass.scanning import ROOM, F, N, budget, from_memory, outcome, packing
from tests.ooc.loading.test_feature_gather import TYPES


@settings(deadline=None, max_examples=16)
@given(
    kind=st.sampled_from(["mean", "sum", "expanded", "gcn"]),
    fanout=st.sampled_from([[3], [4, 3], [-1], [2, 2, 2]]),
    how=st.sampled_from(["uniform", "replace", "weight_attr", "split_seeds", "labor", "disjoint"]),
    batch_size=st.integers(2, 40),
    room=st.integers(400_000, ROOM),
    pack=st.integers(200_000, 10**6),
    threads=st.integers(1, 3),
    engine=st.sampled_from(["pread", "mmap", "auto"]),
    encoding=st.sampled_from([*TYPES, "lmdb", "foreign"]),
    edges_on_disk=st.booleans(),
)
def test_batches_are_those_of_rows_in_memory(
    path: Any, features: Any, kind: Any, fanout: Any, how: str, batch_size: int, room: int, pack: int, threads: int,
    engine: Any, encoding: str, edges_on_disk: bool,
) -> None:  # fmt: skip
    """Whatever the memory, the disk, the threads, the engine, the type of the features and where the edges are."""
    options: dict[str, Any] = {"fanout": fanout, "batch_size": batch_size, "pre_aggregation": PreAggregation(kind, 8)}
    options |= {"input_nodes": torch.arange(0, N, 9), "budget": budget(room), "sample_threads": threads}
    options |= {
        "uniform": {},
        "weight_attr": {"weight_attr": "weight"},
        "labor": {"sampler": Labor(True, 16, 1 if kind == "mean" else 0)},
    }.get(how, {how: True})
    if how == "replace" and fanout == [-1]:
        options["fanout"] = [5]
    with pytest.MonkeyPatch.context() as patch, Dataset.open(path, engine=engine, features={"x": features[encoding]}) as ds:
        if edges_on_disk:
            patch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 10**9)
        loader = packing(ds, **options, pack=pack)
        got = outcome(loader, epochs=1)
        assert "pack" in loader.times()
        want = outcome(from_memory(packing(ds, **options, pack=pack)), epochs=1)
    assert same(got[:2], want[:2])


def test_epochs_go_on_with_a_file_each(path: Any, ds: Dataset) -> None:
    loader = packing(ds)
    got = outcome(loader)
    assert got[1] == ""
    assert len(got[0]) == 30
    assert same(got, outcome(from_memory(packing(ds))))
    assert 4 < loader.times()["pack"]["items"] < 30
    assert loader.bytes_written > 0


def test_rows_are_packed_once_for_each_batch(ds: Dataset) -> None:
    """What is read is the rows of each group and what was written, and no more."""
    loader = packing(ds)
    outcome(loader, epochs=1)
    groups = loader.times()["pack"]["items"]
    assert loader.rows_read <= groups * N
    assert loader.rows_asked * F * 4 < loader.bytes_written < loader.bytes_read

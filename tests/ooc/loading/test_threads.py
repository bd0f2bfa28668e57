"""Threads of a loader where nobody says: two cores keep one and two, a GPU gets more, large batches one."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ooc
from ooc.loading.threads import MOST, LoaderThreads, most_edges
from ooc.sampling import NeighborSampler
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.batches import same

AUTO = LoaderThreads(None, None)


@pytest.mark.parametrize(
    ("cores", "on_gpu", "threads"),
    [
        *((1, False, (1, 2)), (2, False, (1, 2)), (4, False, (1, 2)), (16, False, (4, 4)), (64, False, (MOST, MOST))),
        *((1, True, (1, 2)), (2, True, (1, 2)), (4, True, (2, 2)), (16, True, (MOST, MOST))),
    ],
)
def test_threads_follow_the_cores(cores: int, on_gpu: bool, threads: tuple[int, int]) -> None:
    assert AUTO.settled(cores, on_gpu, room=10**9, edges=1000) == threads
    assert AUTO.settled(cores, on_gpu, room=10**9, edges=None) == (1, threads[1])
    assert LoaderThreads(3, 5).settled(cores, on_gpu, room=1, edges=None) == (3, 5)


@given(st.integers(1, 128), st.booleans(), st.integers(1, 10**10), st.integers(0, 10**8))
def test_threads_that_sample_keep_to_their_memory(cores: int, on_gpu: bool, room: int, edges: int) -> None:
    sample, read = AUTO.settled(cores, on_gpu, room, edges)
    assert 1 <= sample <= MOST
    assert 2 <= read <= MOST
    assert sample == 1 or sample * 64 * edges <= room


@settings(deadline=None)
@given(st.lists(st.integers(-1, 9).filter(bool), min_size=1, max_size=3), st.integers(1, 40), st.integers(0, 9), st.booleans())
def test_no_batch_has_more_edges(fanout: list[int], seeds: int, seed: int, replace: bool) -> None:
    src, dst = random_edges(60, 400, seed)
    subgraph = NeighborSampler(Graph.from_edges(src, dst, 60), fanout, replace).sample(np.arange(seeds), seed)
    assert sum(subgraph.num_edges) <= most_edges(seeds, [fanout], 400, replace)


def test_batches_do_not_depend_on_the_cores(make_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with ooc.open(make_store(num_nodes=2000, num_edges=20_000), in_memory=True, memory="2GB") as ds:
        loaders = []
        for cores in (2, 32):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
            loaders.append(ooc.NeighborLoader(ds, [5, 5], "train", batch_size=64, shuffle=True, seed=1))
        stages = [loader.strategy.stages.sample.threads for loader in loaders]
        assert stages == [1, 8]
        assert [loader.strategy.read_threads for loader in loaders] == [2, 8]
        for one, other in zip(*loaders, strict=True):
            assert same(one, other)


def test_links_count_their_negatives(make_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    with ooc.open(make_store(num_nodes=2000, num_edges=20_000), in_memory=True, memory="2GB") as ds:
        loader = ooc.LinkNeighborLoader(ds, [5, 5], batch_size=64, neg_sampling={"mode": "triplet", "amount": 3}, seed=1)
        assert loader.strategy.stages.sample.threads == MOST
        assert loader.strategy.stages.sample.order.nodes.most_seeds == 8
        assert isinstance(next(iter(loader)).x, torch.Tensor)


@pytest.mark.parametrize("given", [{"sample_threads": 0}, {"read_threads": 1.5}])
def test_numbers_of_threads_are_checked(make_store: Any, given: dict[str, Any]) -> None:
    with ooc.open(make_store()) as ds, pytest.raises(ooc.ConfigError, match=next(iter(given))):
        ooc.NeighborLoader(ds, [2], "train", **given)

"""Loaders of two ranks on one host: the batches that each would have alone, and the disk read once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.loading.neighbor_loader import NeighborLoader
from ooc.loading.read_strategy import grouped
from ooc.loading.shared_scan import SharedScans
from ooc.loading.subgraph_loaders import ClusterLoader
from ooc.loading.superbatch import Superbatches
from ooc.models import build_model, pre_aggregation_of
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.ranks import ALONE, Ranks, joined_ranks
from ooc.runtime.shared_reads import shared_blocks
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.ranks import run_ranks

BATCH, SEEDS, FEATURES, EPOCHS = 64, 4000, 128, 2
ROOMS = {"scan": 2**23, "superbatch": 2**23}
"""memory for batches, less than a third of the features"""


def epochs_of(store: Path, strategy: str, rank: int, world_size: int, ranks: Ranks, seed: int = 3) -> dict[str, Any]:
    """What a rank's batches hold, and the bytes read for them. ranks: those that share reads, step by step."""
    with shared_blocks(ranks, None) as blocks, Dataset.open(store) as ds:
        assert (blocks is None) == ranks.alone
        ds.share_reads(blocks)
        share = ROOMS[strategy] // 5
        sums = pre_aggregation_of(build_model("sage", FEATURES, 16, 3, 2)) if strategy == "scan" else None
        loader = NeighborLoader(
            ds,
            [5, 5],
            np.arange(SEEDS),
            batch_size=BATCH,
            shuffle=True,
            seed=seed,
            rank=rank,
            world_size=world_size,
            budget=replace(plan_memory(ds), in_flight=2 * share, max_batch=share),
            pre_aggregation=sums,
        )
        assert isinstance(loader.strategy, SharedScans if strategy == "scan" else Superbatches)
        held = []
        for _ in range(EPOCHS):
            for batch in loader:
                x = batch.x if sums is None else batch.x.neighbor
                held.append([float(x.double().sum()), float(x.abs().max()), int(batch.n_id.sum())])
                ranks.barrier()
        return {"held": held, "bytes": loader.bytes_read}


RANK = """
import json
from pathlib import Path
from tests.ooc.loading.test_host_passes import epochs_of
from ooc.runtime.ranks import joined_ranks
with joined_ranks() as ranks:
    print(json.dumps(epochs_of(Path({store!r}), {strategy!r}, ranks.rank, 2, ranks)))
"""


@pytest.mark.parametrize("strategy", ["scan", pytest.param("superbatch", marks=pytest.mark.slow)])
def test_two_ranks_have_their_batches_and_read_the_disk_once(make_store: MakeStore, strategy: str) -> None:
    x = np.random.default_rng(0).standard_normal((60_000, FEATURES), np.float32)
    store = make_store(num_nodes=len(x), num_edges=500_000, x=x, y=np.zeros(len(x), np.int64))
    done = run_ranks(2, "-c", RANK.format(store=str(store), strategy=strategy))
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    found = [json.loads(each.stdout) for each in done]
    alone = [epochs_of(store, strategy, rank, 2, ALONE) for rank in range(2)]
    assert [each["held"] for each in found] == [each["held"] for each in alone]
    assert sum(each["bytes"] for each in found) <= 1.1 * max(each["bytes"] for each in alone)


def test_parts_are_read_by_one_rank_each(make_store: MakeStore) -> None:
    """With as much memory together as one process has: each part once an epoch, whoever has it."""
    x = np.random.default_rng(0).standard_normal((20_000, FEATURES), np.float32)
    store = make_store(num_nodes=len(x), num_edges=40_000, x=x, y=np.zeros(len(x), np.int64), parts=np.arange(0, 20_001, 500))

    def bytes_of(rank: int, world_size: int) -> int:
        with Dataset.open(store) as ds:
            share = 2**22 // world_size // 5
            budget = replace(plan_memory(ds), in_flight=2 * share, max_batch=share)
            loader = ClusterLoader(ds, 1, shuffle=True, seed=1, rank=rank, world_size=world_size, budget=budget)
            assert isinstance(loader.strategy, Superbatches)
            nodes = sum(batch.batch_size for batch in loader)
            assert nodes == len(x) // world_size
            return loader.bytes_read

    one = bytes_of(0, 1)
    assert bytes_of(0, 2) + bytes_of(1, 2) <= 1.1 * one


def test_one_process_shares_nothing(make_store: MakeStore) -> None:
    with joined_ranks() as ranks, shared_blocks(ranks, None) as blocks, Dataset.open(make_store()) as ds:
        assert blocks is None
        ds.share_reads(blocks)
        assert plan_memory(ds).shared == 0


class Draft:
    """A group of so many items at most."""

    def __init__(self, most: int) -> None:
        self.most, self.items = most, list[int]()

    @property
    def fill(self) -> float:
        return len(self.items) / self.most

    def add(self, item: int) -> bool:
        if self.items and len(self.items) == self.most:
            return False
        self.items.append(item)
        return True

    def finish(self) -> list[int]:
        return self.items


class Ends:
    """Groups end with so many items."""

    most_full = 1.0

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.group, self.was_full = sizes, -1, list[int]()

    def begin(self) -> None:
        self.group += 1

    def goes_on(self, taken: int) -> bool:
        return taken < self.sizes[self.group]

    def as_good_as_full(self, taken: int) -> bool:
        return taken >= self.sizes[self.group]

    def full(self, taken: int) -> None:
        self.was_full.append(self.group)


def test_groups_end_where_they_are_to() -> None:
    ends = Ends([3, 1, 5, 2, 9])
    made = list(grouped(iter(range(12)), (Draft(4) for _ in range(9)), ends))
    assert made == [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9], [10, 11]]
    assert ends.was_full == [2]
    assert list(grouped(iter(range(6)), (Draft(4) for _ in range(9)))) == [[0, 1, 2, 3], [4, 5]]

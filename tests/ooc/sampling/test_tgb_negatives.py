"""Negatives and ranks of the Temporal Graph Benchmark's evaluation, against its definition in sets."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.loading.event_loader import EventLoader
from ooc.sampling.negatives import TgbNegatives
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from tests.ooc.temporal_stores import Edges


def candidates(src: Any, dst: Any, time: Any, train: int, event: int) -> tuple[set[int], set[int]]:
    """(destinations of the source in training, all destinations it did not have there), without those of the event's time."""
    true = set(dst[(src == src[event]) & (time == time[event])])
    seen = set(dst[:train][src[:train] == src[event]])
    return seen - true, set(dst) - true - seen


def lists(ds: Dataset, ratio: int, train: int, cuts: int) -> np.ndarray[Any, Any]:
    """The negatives of all events behind training, drawn for `cuts` events at a time."""
    negatives = TgbNegatives(ds, ratio, (0, train))
    drawn = []
    for first in range(train, len(ds.events), cuts):
        block = ds.events.read(first, min(first + cuts, len(ds.events)), [])
        drawn.append(negatives.draw(block, np.zeros(len(block), np.int64), first))
    return np.concatenate(drawn)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Edges(nodes=40, count=900, span=300).store(tmp_path_factory.mktemp("tgb"), undirected=True)


@pytest.mark.parametrize("ratio", [1, 8, 30, 200])
def test_lists_are_as_tgb_defines_them(store: Path, ratio: int) -> None:
    train = 600
    with ooc.open(store) as ds:
        src, dst, time = (np.asarray(ds.events.map(name)) for name in ("src", "dst", "time"))
        found = lists(ds, ratio, train, 900)
        np.testing.assert_array_equal(found, lists(ds, ratio, train, 7), "events of one time may be drawn for apart")
    short = 0
    for row, event in zip(found, range(train, len(src)), strict=True):
        seen, others = candidates(src, dst, time, train, event)
        historical = min(ratio // 2, len(seen))
        random = min(ratio - historical, len(others))
        own = row[row != dst[event]]
        assert len(set(own)) == len(own) == historical + random
        assert set(own[:historical]) <= seen
        assert set(own[historical:]) <= others
        assert (row[len(own) :] == dst[event]).all()
        short += len(own) < ratio
    assert (short > 0) == (ratio > 30)


def test_every_candidate_is_as_likely(tmp_path: Path) -> None:
    edges = Edges(nodes=12, count=12_000, span=10**9)
    edges.src[600:] = 0
    late = np.arange(600, 12_000)
    edges.dst[late] = edges.dst[late[0]]  # so that all have the same candidates
    with ooc.open(edges.store(tmp_path, undirected=True)) as ds:
        src, dst, time = (np.asarray(ds.events.map(name)) for name in ("src", "dst", "time"))
        train = 80
        found = lists(ds, 6, train, 4000)[600 - train :]
    seen, others = candidates(src, dst, time, train, 5000)
    assert len(seen) > 3
    assert len(others) > 3
    for part, among in ((found[:, :3], seen), (found[:, 3:], others)):
        counts = Counter(part.ravel().tolist())
        assert counts.keys() == among
        expected = part.size / len(among)
        assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def test_pairs_that_do_not_fit_are_refused_with_what_is_enough(store: Path) -> None:
    with ooc.open(store) as ds:
        with pytest.raises(BudgetError, match=r"the pairs of 600 training events.* may need 10.1 kB of 1 kB"):
            TgbNegatives(ds, 10, (0, 600), 1000)
        assert TgbNegatives(ds, 10, (0, 600), 10_100).nbytes < 10_100


@pytest.mark.cases(1)
@pytest.mark.parametrize("shared", [False, True])
def test_parts_come_before_their_batch_and_know_nothing_of_it(store: Path, shared: bool) -> None:
    with ooc.open(store) as ds:
        src, time = (np.asarray(ds.events.map(name)) for name in ("src", "time"))
        negatives = TgbNegatives(ds, 400, (0, 600))
        whole = lists(ds, 400, 600, 900)
        for batch_size in (10, 150):
            loader = EventLoader(ds, batch_size, events=(600, 900), ranking=negatives, shared=shared)
            begin, ranked, batches = 600, [], 0
            for batch in loader:
                asked = batch.entry_t[batch.query]
                if "part_of" not in batch:
                    assert int(batch.e_id[0]) == begin
                    assert [int(each.e_id[0]) for each in ranked] == list(range(begin, int(batch.e_id[-1]) + 1, 2))
                    begin, batches = int(batch.e_id[-1]) + 1, batches + 1
                    ranked = []
                    continue
                ranked.append(batch)
                assert batch.part_of == begin
                np.testing.assert_array_equal(batch.neg_dst, whole[batch.e_id.numpy() - 600])
                np.testing.assert_array_equal(batch.src, src[batch.e_id.numpy()])
                assert loader.state_dict()["event"] == begin
                expected = np.full(len(asked), time[begin]) if shared else np.tile(time[batch.e_id.numpy()], 402)
                np.testing.assert_array_equal(asked, expected)
                assert (batch.edge_id < (begin if shared else 900)).all()
            assert begin == 900
            assert batches == len(loader)

"""Batches in the order of visits: every edge once an epoch, its buckets resident, from any step on the same."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from ooc.loading import bucket_edges
from ooc.loading.bucket_batches import BatchShape, EpochOrder, TableBatch, table_batches
from ooc.loading.bucket_edges import BucketEdges, EdgeShape

N, E, P, RESIDENT, BATCH = 300, 5000, 6, 3, 64
SHAPE = BatchShape(BATCH, 10, 20, heads=range(200), tails=range(100, 300))


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("edges") / "edges"
    triples = np.stack([rng.integers(0, N, E), rng.integers(0, N, E), np.arange(E)], 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bucket_edges, "PART_EDGES", 50)
        pieces = iter([(triples[:, 0].copy(), triples[:, 1].copy(), triples[:, 2].copy())])
        with closing(BucketEdges.sort(path, EdgeShape(N, E, P, True), pieces, 0, 10**6)) as found:
            yield found, triples


def epoch_of(edges: Any, epoch: int, step: int = 0, stop: int | None = None) -> list[TableBatch]:
    order = EpochOrder(edges, RESIDENT, BATCH, 5, epoch)
    return list(table_batches(edges, order, SHAPE, 5, epoch, step, order.steps if stop is None else stop))


def test_an_epoch_has_every_edge_once_while_its_buckets_are_resident(edges: Any) -> None:
    found, triples = edges
    for epoch in (0, 1):
        order, batches = EpochOrder(found, RESIDENT, BATCH, 5, epoch), epoch_of(found, epoch)
        assert len(batches) == order.steps
        met = np.concatenate([np.stack([b.head, b.tail, b.relation], 1) for b in batches])  # type: ignore[list-item]
        assert (met[np.argsort(met[:, 2])] == triples).all()
        for step, batch in enumerate(batches):
            assert batch.visit == order.visit_of(step)
            assert len(batch.head) <= BATCH
            resident = set(order.visits[batch.visit].resident)
            for nodes in (batch.head, batch.tail, batch.negative_heads, batch.negative_tails):
                assert set((nodes % P).ravel().tolist()) <= resident
            assert batch.negative_tails.shape == batch.negative_heads.shape == (-(-len(batch.head) // 20), 10)
            assert batch.negative_heads.max() < 200
            assert batch.negative_tails.min() >= 100
        assert [b.visit for b in batches] == sorted(b.visit for b in batches)


def test_an_epoch_goes_on_from_any_step(edges: Any) -> None:
    whole = epoch_of(edges[0], 3)
    for step in (0, 1, 7, len(whole) // 2, len(whole) - 1, len(whole)):
        for stop in (step, min(step + 5, len(whole)), len(whole)):
            part = epoch_of(edges[0], 3, step, stop)
            assert len(part) == stop - step
            for one, other in zip(part, whole[step:stop], strict=True):
                assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(one, other, strict=True))


def test_epochs_differ(edges: Any) -> None:
    heads = [np.concatenate([batch.head for batch in epoch_of(edges[0], epoch)]) for epoch in (0, 2)]
    assert (heads[0] != heads[1]).mean() > 0.9


def test_without_nodes_to_draw_from_there_are_no_negatives(edges: Any) -> None:
    found, order = edges[0], EpochOrder(edges[0], RESIDENT, BATCH, 5, 0)
    batch = next(table_batches(found, order, BatchShape(BATCH, 10, 64, None, range(N)), 5, 0, 0, 1))
    assert batch.negative_heads.size == 0
    assert batch.negative_tails.shape == (1, 10)

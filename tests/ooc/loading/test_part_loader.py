"""Batches of parts against a brute force over the edges."""

from typing import Any

import numpy as np
import pytest
import torch

from ooc.loading.subgraph_loaders import PartLoader
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from tests.conftest import MakeStore
from tests.ooc.batches import same

PARTS = 7


def edges_of(ds: Dataset) -> np.ndarray[Any, Any]:
    """int64[2, E] in slot order."""
    target = np.repeat(np.arange(ds.num_nodes), np.diff(ds.graph.indptr))
    return np.stack([np.asarray(ds.graph.indices, np.int64), target])


@pytest.mark.parametrize("halo", [True, False])
@pytest.mark.parametrize("where", ["disk", "memory", "edges on disk"])
def test_batches_against_brute_force(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, where: str, halo: bool) -> None:
    if where == "edges on disk":
        monkeypatch.setattr("ooc.runtime.memory_plan.TOPOLOGY_SHARE", 2**62)
    store = make_store(num_nodes=200, num_edges=900, weight=True)
    with Dataset.open(store, in_memory=where == "memory") as ds:
        train = ds.members("train")
        loader = PartLoader(ds, per_batch=2, halo=halo, layers=3, parts=PARTS, shuffle=True, train=train, seed=3)
        x = np.empty((200, 8), np.float32)
        ds.rows("x").read(np.arange(200), x)
        edges, seen = edges_of(ds), []
        assert len(loader) == 4
        for batch in loader:
            own = batch.n_id[: batch.batch_size].numpy()
            seen.append(own)
            inside = np.isin(edges, own)
            kept = inside[1] if halo else inside.all(axis=0)
            outside = np.setdiff1d(edges[0, kept], own)
            np.testing.assert_array_equal(batch.n_id[batch.batch_size :], outside)
            np.testing.assert_array_equal(batch.n_id[batch.edge_index], edges[:, kept])
            np.testing.assert_array_equal(batch.edge_weight, np.asarray(ds.graph.columns["weight"])[kept])
            np.testing.assert_array_equal(batch.x, x[batch.n_id])
            wanted = np.where(np.isin(own, ds.split("train")), np.asarray(ds.labels)[own], -1)
            np.testing.assert_array_equal(batch.y, wanted)
            assert len(batch.blocks) == 3
            assert all(block is batch.blocks[0] for block in batch.blocks)
            assert (batch.blocks[0].num_src, batch.blocks[0].num_dst) == (len(batch.n_id), len(own))
            np.testing.assert_array_equal(batch.blocks[0].degree, ds.graph.degree(batch.n_id.numpy()))
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(200))
        assert (loader.topology_bytes_read > 0) == (where == "edges on disk")


def test_the_order_is_keyed_and_a_state_leads_back_into_an_epoch(make_store: MakeStore) -> None:
    with Dataset.open(make_store(num_nodes=200, num_edges=900)) as ds:
        loader = PartLoader(ds, per_batch=1, halo=True, layers=2, parts=PARTS, shuffle=True, seed=3)
        first, second = list(loader), list(loader)
        assert [int(b.n_id[0]) for b in first] != [int(b.n_id[0]) for b in second]
        loader.load_state_dict({"epoch": 0, "step": 4})
        assert all(same(one, other) for one, other in zip(loader, first[4:], strict=True))


def test_labels_of_several_columns_that_are_not_trained_on_are_unknown(make_store: MakeStore) -> None:
    y = np.random.default_rng(0).integers(0, 2, (50, 4))
    with Dataset.open(make_store(y=y, task="multilabel", num_classes=4)) as ds:
        batch = next(iter(PartLoader(ds, per_batch=1, halo=True, layers=2, parts=1, train=ds.members("train"))))
        inside = ds.members("train").contains(np.arange(50))
        np.testing.assert_array_equal(inside, np.isin(np.arange(50), ds.split("train")))
        assert torch.equal((batch.y >= 0).all(dim=1), torch.from_numpy(inside))
        np.testing.assert_array_equal(batch.y[inside], y[inside])


def test_what_does_not_fit_is_refused(make_store: MakeStore) -> None:
    with Dataset.open(make_store(num_nodes=20_000, num_edges=100_000, x=np.zeros((20_000, 64), np.float32))) as ds:
        with pytest.raises(ConfigError, match="a batch of 8 parts: give 1 to 7"):
            PartLoader(ds, per_batch=8, halo=True, layers=2, parts=PARTS)
        with pytest.raises(ConfigError, match="the store has no parts"):
            PartLoader(ds, per_batch=1, halo=True, layers=2)
        loader = PartLoader(ds, per_batch=1, halo=True, layers=2, parts=1)
        small = PartLoader(ds, per_batch=1, halo=True, layers=2, parts=1, budget=_least(loader.budget))
        with pytest.raises(BudgetError, match="use fewer parts per batch"):
            next(iter(small))


def _least(budget: Any) -> Any:
    from dataclasses import replace

    return replace(budget, max_batch=2**20, in_flight=2**21)

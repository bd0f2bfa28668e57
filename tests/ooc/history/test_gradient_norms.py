"""Norms of gradients: importance by them against plain numbers, what a checkpoint keeps, and the norms of a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.history import gradient_norms
from ooc.history.gradient_norms import EVEN, KEPT, GradientNorms
from ooc.models.convs import BlockSAGEConv
from ooc.training.batch_modes import norms_of
from tests.conftest import MakeStore

N = 50


def ones() -> Any:
    return np.ones(N, np.float32)


@pytest.mark.parametrize("at_once", [7, 10**6])
def test_importance_is_that_of_the_norms_an_epoch_begins_with(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_norms, "_AT_ONCE", at_once)
    norms, plain, rng = GradientNorms.open(tmp_path / "n", ones(), None), np.zeros(N), np.random.default_rng(0)
    assert (norms.importance == 1).all()
    for epoch in range(3):
        before = norms.importance.copy()
        for _ in range(4):
            ids = rng.permutation(N - 10)[:20]
            found = rng.random(20, np.float32) + 0.1
            norms.put(ids, found)
            plain[ids] = np.where(plain[ids] > 0, KEPT * plain[ids] + (1 - KEPT) * found, found)
            assert np.array_equal(norms.importance, before), epoch
        norms.begin_epoch()
        own = np.where(plain > 0, plain / plain[plain > 0].mean(), 1)
        assert np.allclose(norms.importance, EVEN + (1 - EVEN) * own, rtol=1e-5)
        assert (norms.importance[-10:] == 1).all()
    norms.put(np.array([3, 4]), np.array([np.nan, np.inf], np.float32))
    norms.begin_epoch()
    assert np.isfinite(norms.importance).all()
    norms.close()
    norms.close()


def test_norms_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """What came after it is undone, also an epoch's beginning; without a checkpoint all begins anew."""
    norms = GradientNorms.open(tmp_path / "n", ones(), None)
    norms.put(np.arange(10), np.full(10, 2.0, np.float32))
    norms.begin_epoch()
    norms.put(np.arange(5), np.full(5, 9.0, np.float32))
    state, kept = norms.state(), norms.importance.copy()
    norms.commit()
    norms.put(np.arange(20), np.full(20, 5.0, np.float32))
    norms.begin_epoch()
    norms.close()
    again = GradientNorms.open(tmp_path / "n", ones(), state)
    assert np.array_equal(again.importance, kept)
    again.begin_epoch()
    expected = np.concatenate([np.full(5, 0.7 * 2 + 0.3 * 9), np.full(5, 2.0)])
    assert np.allclose(again.importance[:10], EVEN + (1 - EVEN) * expected / expected.mean(), rtol=1e-5)
    assert (again.importance[10:] == 1).all()
    again.close()
    more = np.ones(N + 20, np.float32)
    grown = GradientNorms.open(tmp_path / "n", more, state)
    assert np.array_equal(grown.importance[:N], kept)
    assert (grown.importance[N:] == 1).all()
    grown.close()
    new = GradientNorms.open(tmp_path / "n", ones(), None)
    assert (new.importance == 1).all()
    new.close()


def test_norms_of_a_batch_are_those_without_the_weights_of_edges(make_store: MakeStore) -> None:
    conv = BlockSAGEConv(8, 4)
    with ooc.open(make_store(num_nodes=60, num_edges=900)) as ds:
        how: dict[str, Any] = {"sampler": ooc.LayerWise(normalize=False), "batch_size": 10}
        batch: Data = next(iter(ooc.NeighborLoader(ds, [15], "train", **how)))
    block = batch.blocks[0]
    batch.x.requires_grad_()
    conv(batch.x, block).square().sum().backward()
    found = norms_of(batch)
    assert found.shape == (batch.num_nodes,)
    for u in range(batch.num_nodes):
        own = block.stands_for[block.edge_index[0] == u]
        factor = own.mean() if len(own) else 1.0
        assert torch.isclose(found[u], batch.x.grad[u].norm() / factor, rtol=1e-4)

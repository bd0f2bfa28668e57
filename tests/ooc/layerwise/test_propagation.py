"""LightGCN's propagation against PyG's model, in RAM and from a file."""

import numpy as np
import pytest
import torch
from torch_geometric.nn.models import LightGCN
from torch_geometric.utils import to_undirected

from ooc.layerwise import propagation
from ooc.layerwise.propagation import Propagate, SymmetricAdjacency, propagate

USERS, ITEMS, WIDTH = 40, 25, 8
NODES = USERS + ITEMS


def links(seed=0, count=300):
    draw = np.random.default_rng(seed)
    pair = np.unique(draw.integers(0, (USERS - 2, ITEMS - 1), (count, 2)), axis=0)  # some nodes have no links
    draw.shuffle(pair)
    return pair[:, 0].copy(), USERS + pair[:, 1]


def pieces():
    user, item = links()
    return lambda: iter([(user[:70], item[:70]), (user[70:], item[70:])])


def test_one_step_of_bpr_has_the_scores_and_gradients_of_pygs_lightgcn():
    user, item = links()
    edge_index = to_undirected(torch.from_numpy(np.stack([user, item])), num_nodes=NODES)
    theirs = LightGCN(NODES, WIDTH, num_layers=3)
    table = theirs.embedding.weight.detach().clone().requires_grad_()
    negative = USERS + np.random.default_rng(1).integers(0, ITEMS, len(user))
    pairs = torch.from_numpy(np.stack([np.tile(user, 2), np.concatenate([item, negative])]))
    positive, false = theirs(edge_index, pairs).chunk(2)
    wanted = theirs.recommendation_loss(positive, false, node_id=pairs.unique(), lambda_reg=0.01)
    wanted.backward()
    rows = Propagate.apply(table, SymmetricAdjacency.of(pieces(), NODES), 3)
    torch.testing.assert_close(rows, theirs.get_embedding(edge_index), atol=1e-6, rtol=1e-5)
    own, other = (rows[pairs[0]] * rows[pairs[1]]).sum(1).chunk(2)
    part = table[pairs.unique()]
    loss = -torch.nn.functional.logsigmoid(own - other).mean() + 0.01 * part.norm(p=2).square() / len(own)
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(table.grad, theirs.embedding.weight.grad, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("room", [100, 900, 2**20])
def test_columns_and_rooms_change_no_bit(tmp_path, monkeypatch, room):
    rows = torch.randn(NODES, 64)
    whole = propagate(SymmetricAdjacency.of(pieces(), NODES), rows, 3)
    monkeypatch.setattr(propagation, "_ENTRIES_AT_ONCE", 50)
    stored = SymmetricAdjacency.of(pieces(), NODES, room, tmp_path / "neighbors")
    assert isinstance(stored.neighbor, np.memmap) == (room < 2**20)
    for width in (64, 16, 8, 4):
        parts = [propagate(stored, rows[:, at : at + width].contiguous(), 3) for at in range(0, 64, width)]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_the_matrix_of_propagation_is_the_mean_of_powers_in_float64():
    user, item = links()
    dense = np.zeros((NODES, NODES))
    dense[user, item] = dense[item, user] = 1
    degree = dense.sum(1)
    scale = np.where(degree > 0, 1 / np.sqrt(np.maximum(degree, 1)), 0)
    dense *= scale[:, None] * scale
    wanted = sum(np.linalg.matrix_power(dense, power) for power in range(3)) / 3
    found = propagate(SymmetricAdjacency.of(pieces(), NODES), torch.eye(NODES), 2)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)
    none = SymmetricAdjacency.of(lambda: iter([]), 3)
    assert torch.equal(propagate(none, torch.ones(3, 2), 1), torch.full((3, 2), 0.5))

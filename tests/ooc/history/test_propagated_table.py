"""LightGCN's steps on blocks of columns against PyG's model with torch's Adam, all in RAM."""

from contextlib import closing

import numpy as np
import pytest
import torch
from torch_geometric.nn.models import LightGCN
from torch_geometric.utils import to_undirected

from ooc.history.propagated_rows import write_propagated
from ooc.history.propagated_table import PLANES, BlocksInMemory, PropagatedTable
from ooc.layerwise.propagation import SymmetricAdjacency

USERS, ITEMS, WIDTH, LAYERS = 50, 30, 16, 3
NODES = USERS + ITEMS


@pytest.fixture
def links():
    draw = np.random.default_rng(0)
    pair = np.unique(draw.integers(0, (USERS, ITEMS), (400, 2)), axis=0)
    return pair[:, 0].copy(), USERS + pair[:, 1]


def table_of(rows, links, columns):
    planes = torch.stack([rows, torch.zeros_like(rows), torch.zeros_like(rows)])
    assert len(planes) == PLANES
    blocks = BlocksInMemory([part.contiguous() for part in planes.split(columns, 2)])
    return PropagatedTable(blocks, SymmetricAdjacency.of(lambda: iter([links]), NODES), LAYERS)


def batches(links, steps):
    draw = np.random.default_rng(1)
    for _ in range(steps):
        some = draw.integers(0, len(links[0]), 60)
        yield links[0][some], links[1][some], USERS + draw.integers(0, ITEMS, 60)


def loss_of(rows, own, user, item, negative):
    score = (rows[user] * (rows[item] - rows[negative])).sum(1)
    return -torch.nn.functional.logsigmoid(score).mean() + 1e-3 * own.square().sum()


def trained(table, links, steps):
    every = [(batch, *np.unique(np.concatenate(batch), return_inverse=True)) for batch in batches(links, steps)]
    rows, losses = table.rows(every[0][1]), []
    for number, (_, nodes, place) in enumerate(every):
        loss = loss_of(rows.propagated, rows.own, *torch.from_numpy(place).chunk(3))
        loss.backward()
        losses.append(loss.item())
        following = every[number + 1][1] if number + 1 < len(every) else np.empty(0, np.int64)
        rows = table.step(nodes, rows, 0.01, following)
    return losses, torch.cat([table.blocks.load(block)[0] for block in range(len(table.blocks.columns))], 1)


def test_steps_are_those_of_pygs_model_and_torchs_adam(links):
    theirs = LightGCN(NODES, WIDTH, LAYERS)
    start = theirs.embedding.weight.detach().clone()
    losses, rows = trained(table_of(start, links, 4), links, 12)
    edge_index = to_undirected(torch.from_numpy(np.stack(links)), num_nodes=NODES)
    optimizer, wanted = torch.optim.Adam(theirs.parameters(), 0.01), []
    for user, item, negative in batches(links, 12):
        optimizer.zero_grad()
        nodes = np.unique(np.concatenate([user, item, negative]))
        loss = loss_of(theirs.get_embedding(edge_index), theirs.embedding.weight[nodes], user, item, negative)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    torch.testing.assert_close(rows, theirs.embedding.weight.detach(), atol=1e-4, rtol=1e-3)


def test_blocks_of_any_columns_are_trained_to_the_same_bits(links):
    start = torch.randn(NODES, WIDTH)
    losses, rows = trained(table_of(start, links, WIDTH), links, 5)
    for columns in (8, 4, 3):
        others, other = trained(table_of(start, links, columns), links, 5)
        assert others == losses
        assert torch.equal(other, rows)


@pytest.mark.parametrize("power", [1, 0.5, 0])
@pytest.mark.parametrize("columns", [WIDTH, 5])
def test_all_rows_behind_the_propagation_are_written_by_node(links, tmp_path, columns, power):
    start, out = torch.randn(NODES, WIDTH), np.empty((NODES, WIDTH), np.float32)
    table = table_of(start, links, columns)
    for _ in range(2):  # what is there goes
        blocks = table.blocks.columns, lambda block: table.blocks.load(block)[0]
        with closing(write_propagated(tmp_path / "rows", *blocks, table.adjacency, LAYERS, power)) as rows:
            rows.read(np.arange(NODES), out)
    edge_index = to_undirected(torch.from_numpy(np.stack(links)), num_nodes=NODES)
    theirs = LightGCN(NODES, WIDTH, LAYERS)
    theirs.embedding.weight.data.copy_(start)
    expected = theirs.get_embedding(edge_index).detach()
    expected = torch.nn.functional.normalize(expected, dim=1) * expected.norm(dim=1, keepdim=True) ** power
    np.testing.assert_allclose(out, expected.numpy(), atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]

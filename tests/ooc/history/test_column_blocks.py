"""Blocks of columns on disk against the same in memory."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from ooc.history.column_blocks import MOVING, StoredBlocks, column_bytes
from ooc.history.propagated_table import PLANES, BlocksInMemory, PropagatedTable
from ooc.layerwise.propagation import SymmetricAdjacency
from ooc.runtime.keyed_random import keyed_uniform
from ooc.stores.arrays.bucket_rows import BucketRows
from ooc.stores.errors import StoreError

NODES, WIDTH = 90, 12
STREAM, BOUND = 11, 0.3


def initial():
    rows = np.empty((NODES, WIDTH), np.float32)
    keyed_uniform(np.uint64(STREAM), np.arange(NODES), np.float32(BOUND), rows)
    return torch.from_numpy(rows)


def opened(path, columns, room, state=None, new=True):
    widths = [columns] * (WIDTH // columns)
    files = StoredBlocks.create(path, NODES, widths) if new else BucketRows.open(path, state)
    return StoredBlocks(files, NODES, widths, room, STREAM, BOUND)


def steps(blocks, first, count, begun=0):
    draw = np.random.default_rng(0)
    links = draw.integers(0, 50, 200), 50 + draw.integers(0, 40, 200)
    table = PropagatedTable(blocks, SymmetricAdjacency.of(lambda: iter([links]), NODES), 2, begun)
    nodes = [np.unique(np.random.default_rng(each).integers(0, NODES, 20)) for each in range(first, first + count + 1)]
    rows, losses = table.rows(nodes[0]), []
    for now, following in pairwise(nodes):
        loss = (rows.propagated.square() + rows.own).sum()
        loss.backward()
        losses.append(loss.item())
        rows = table.step(now, rows, 0.01, following)
    return losses


def whole(blocks):
    return torch.cat([blocks.load(block).clone() for block in range(len(blocks.columns))], 2)


@pytest.fixture(scope="module")
def wanted():
    blocks = BlocksInMemory([torch.cat([initial()[None], torch.zeros(PLANES - 1, NODES, WIDTH)])])
    losses = steps(blocks, 0, 4)
    return losses, whole(blocks)


@pytest.mark.parametrize(("columns", "room"), [(2, 6), (2, 2), (2, 3), (3, 3), (6, 2), (12, 1)])
def test_steps_on_disk_are_those_in_memory_to_the_bit(tmp_path, wanted, columns, room):
    with opened(tmp_path / "table", columns, room) as blocks:
        assert steps(blocks, 0, 4) == wanted[0]
        assert torch.equal(whole(blocks), wanted[1])
        moved = blocks.files.bytes_written
        assert (moved == 0) == (room == len(blocks.columns))
        assert len(blocks._there) <= room  # type: ignore[attr-defined]


def test_a_table_goes_on_from_its_checkpoint(tmp_path, wanted):
    blocks = opened(tmp_path / "table", 2, MOVING)
    losses = steps(blocks, 0, 2)
    state = blocks.state()
    steps(blocks, 7, 2, 2)  # lost
    blocks.close()
    with opened(tmp_path / "table", 2, 4, state, new=False) as blocks:
        assert [*losses, *steps(blocks, 2, 2, 2)] == wanted[0]
        assert torch.equal(whole(blocks), wanted[1])


def test_blocks_are_kept_as_they_were_while_training_goes_on(tmp_path):
    with opened(tmp_path / "table", 2, MOVING) as blocks:
        steps(blocks, 0, 2)
        then = whole(blocks)
        blocks.keep("best")
        steps(blocks, 2, 2, 2)
        kept = torch.cat([blocks.load_kept(block, "best") for block in range(len(blocks.columns))], 1)
        assert torch.equal(kept, then[0])
        assert not torch.equal(whole(blocks), then)


def test_a_new_table_has_keyed_rows_and_writes_nothing(tmp_path):
    with opened(tmp_path / "table", 3, MOVING) as blocks:
        found = whole(blocks)
        assert torch.equal(found[0], initial())
        assert not found[1:].any()
        assert blocks.files.bytes_written == 0
        assert blocks.files.bucket_bytes >= 3 * column_bytes(NODES)
    with pytest.raises(StoreError, match="exists"):
        opened(tmp_path / "table", 3, MOVING)

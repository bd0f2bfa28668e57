"""A table whose rows are trained behind LightGCN's propagation over the whole graph: every step changes every row.

Columns do not depend on each other until a batch's rows are scored, so the table is in blocks of columns, each with the moments
of Adam, and one block is worked on at a time: it is changed by its gradient, and propagated for the next batch. A step thus
reads and writes each block once wherever the blocks are, and results do not depend on how many columns a block has.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.history.row_optimizers import ADAM_EPS, BETAS
from ooc.layerwise.propagation import SymmetricAdjacency, propagate
from ooc.runtime.parts import in_parts
from ooc.stores.arrays.rows import Ids
from ooc.stores.jit import kernel

PLANES = 3
"""of a block: the rows, and Adam's two moments"""
Floats = NDArray[np.float32]


class ColumnBlocks(Protocol):
    """Blocks of columns of a table and its moments, float32[PLANES, N, columns] each, wherever they are."""

    @property
    def columns(self) -> Sequence[int]:
        """Columns of each block."""

    def load(self, block: int) -> Tensor:
        """A block, to be read, or changed and stored."""

    def store(self, block: int, values: Tensor) -> None:
        """Keep a block that was changed."""


class BlocksInMemory:
    """`ColumnBlocks` in memory.

    >>> BlocksInMemory([torch.zeros(3, 100, 64)]).columns
    [64]
    """

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self._blocks = list(blocks)
        self.columns = [block.shape[2] for block in self._blocks]

    def load(self, block: int) -> Tensor:
        return self._blocks[block]

    def store(self, block: int, values: Tensor) -> None:
        self._blocks[block] = values


class PropagatedRows(NamedTuple):
    """Rows of some nodes, to compute a loss of; both want gradients."""

    own: Tensor
    """in the table, float32[n, width]"""
    propagated: Tensor
    """behind the propagation, float32[n, width]"""

    @classmethod
    def of(cls, own: Tensor, propagated: Tensor) -> Self:
        return cls(own.requires_grad_(), propagated.requires_grad_())


class PropagatedTable:
    """A table behind LightGCN's propagation, trained by Adam with the exact gradient of each batch.

    Args:
        blocks: The rows and moments.
        adjacency: Of the links that carry messages.
        layers: Of the propagation.
        steps: That were made so far, for Adam's bias correction.

    >>> rows = table.rows(nodes)
    >>> loss_of(rows.propagated, rows.own).backward()
    >>> rows = table.step(nodes, rows, lr=0.01, following=next_nodes)
    """

    def __init__(self, blocks: ColumnBlocks, adjacency: SymmetricAdjacency, layers: int, steps: int = 0) -> None:
        self.blocks, self.adjacency, self.layers, self.steps = blocks, adjacency, layers, steps
        self.width = sum(blocks.columns)

    def rows(self, nodes: Ids) -> PropagatedRows:
        """The rows of nodes, int64[n], as the table is."""
        return self._each_block(nodes, lambda values, first, last: False)

    def step(self, nodes: Ids, rows: PropagatedRows, lr: float, following: Ids) -> PropagatedRows:
        """Make a step of Adam with the gradients of `rows`, and return the rows of the next batch's nodes.

        Args:
            nodes: Whose rows they are, distinct, int64[n].
            rows: As `rows` or `step` returned them, after a backward pass.
            lr: The learning rate.
            following: Nodes of the next batch, int64[m].
        """
        self.steps += 1
        at = torch.from_numpy(nodes)

        def changed(values: Tensor, first: int, last: int) -> bool:
            gradient = values.new_zeros(values.shape[1:])
            if rows.propagated.grad is not None:
                gradient[at] = rows.propagated.grad[:, first:last]
                gradient = propagate(self.adjacency, gradient, self.layers)
            if rows.own.grad is not None:
                gradient[at] += rows.own.grad[:, first:last]
            self._adam(values, gradient, lr)
            return True

        return self._each_block(following, changed)

    def _each_block(self, nodes: Ids, work: Callable[[Tensor, int, int], bool]) -> PropagatedRows:
        """Go through the blocks: work(values, first column, last column) says whether it changed one. Then the nodes' rows."""
        at = torch.from_numpy(nodes)
        own, propagated = torch.empty(len(nodes), self.width), torch.empty(len(nodes), self.width)
        first = 0
        with torch.no_grad():
            for block, columns in enumerate(self.blocks.columns):
                last = first + columns
                values = self.blocks.load(block)
                if work(values, first, last):
                    self.blocks.store(block, values)
                if len(nodes):
                    own[:, first:last] = values[0, at]
                    propagated[:, first:last] = propagate(self.adjacency, values[0], self.layers)[at]
                first = last
        return PropagatedRows.of(own, propagated)

    def _adam(self, values: Tensor, gradient: Tensor, lr: float) -> None:
        first, second = (1 - beta**self.steps for beta in BETAS)
        numbers = (1 - BETAS[0], 1 - BETAS[1], -lr / first, 1 / math.sqrt(second), ADAM_EPS)
        arrays = [each.reshape(-1).numpy() for each in (*values, gradient)]
        own = tuple(map(np.float32, numbers))
        in_parts(lambda begin, end: _adam(*(each[begin:end] for each in arrays), *own), len(arrays[0]))


@kernel
def _adam(
    rows: Floats,
    first: Floats,
    second: Floats,
    gradient: Floats,
    one: np.float32,
    two: np.float32,
    step: np.float32,
    scale: np.float32,
    eps: np.float32,
) -> None:
    """A step of `torch.optim.Adam`, whose own kernels round the ends of vectors otherwise than the rest."""
    for i in range(len(rows)):
        found = gradient[i]
        average = first[i] + (found - first[i]) * one
        square = second[i] + (found * found - second[i]) * two
        first[i], second[i] = average, square
        rows[i] += step * (average / (np.sqrt(square) * scale + eps))

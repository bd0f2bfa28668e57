"""Batches of links in the order of an epoch's visits of buckets, with the negatives that they share.

A batch is of one pair of buckets, so its links' rows are in memory during the visit. It is a function of (seed, epoch, step).
Edges of the next part of a pair are read and shuffled by a thread meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ooc.loading.bucket_edges import BucketEdges, Edges, shuffled
from ooc.runtime.keyed_random import KeyedPermutation, Purpose, key, numbered
from ooc.sampling.bucket_draws import drawn_nodes
from ooc.sampling.bucket_order import Visit, bucket_visits
from ooc.stores.arrays.rows import Ids
from ooc.stores.io.threads import ahead


class TableBatch(NamedTuple):
    """Links of a pair of buckets."""

    visit: int
    """number of the epoch's visit whose buckets they are of"""
    head: Ids
    """int64[b]"""
    tail: Ids
    """int64[b]"""
    relation: Ids | None
    """int64[b]"""
    negative_tails: Ids
    """int64[chunks, m]: of each chunk of links"""
    negative_heads: Ids
    """int64[chunks, m], with no chunk where heads are not asked for"""


@dataclass(frozen=True)
class BatchShape:
    """How batches are made.

    size: links of a batch, at most; negatives: that links share; chunk: how many links share them; heads, tails: nodes that
    negatives are drawn from, None where none are.
    """

    size: int
    negatives: int
    chunk: int
    heads: range | None
    tails: range | None


class EpochOrder:
    """The parts of pairs that an epoch trains, and the steps that each takes.

    >>> order = EpochOrder(edges, resident=3, batch_size=1000, seed=0, epoch=4)
    >>> order.visits[order.visit_of(step=17)].resident
    (1, 4, 5)
    """

    def __init__(self, edges: BucketEdges, resident: int, batch_size: int, seed: int, epoch: int) -> None:
        p, parts = edges.shape.buckets, edges.shape.parts
        self.visits: list[Visit] = bucket_visits(p, resident, seed, epoch)
        counts = edges.counts().reshape(-1)
        blocks, visit = [], []
        for number, each in enumerate(self.visits):
            own = ((each.pairs[:, 0] * p + each.pairs[:, 1])[:, None] * parts + np.arange(parts)).reshape(-1)
            own = own[counts[own] > 0]
            stream = numbered(key(seed, Purpose.SHUFFLE, epoch), 1 + number)
            blocks.append(own[KeyedPermutation(len(own), stream)[:]])
            visit.append(np.full(len(own), number))
        self.blocks, self._visit = np.concatenate(blocks), np.concatenate(visit)
        self.steps_of = -(-counts[self.blocks] // batch_size)
        """int64[k]: steps of each block"""
        self._first = np.concatenate([[0], np.cumsum(self.steps_of)])

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        return int(self._first[-1])

    def at(self, step: int) -> tuple[int, int]:
        """(number of the block, step within it)."""
        number = int(np.searchsorted(self._first, step, side="right")) - 1
        return number, step - int(self._first[number])

    def visit_of(self, step: int) -> int:
        """The visit that a step is in."""
        return int(self._visit[self.at(step)[0]])

    def visit_of_block(self, number: int) -> int:
        """The visit that block `number` of the epoch is in."""
        return int(self._visit[number])


def table_batches(
    edges: BucketEdges, order: EpochOrder, shape: BatchShape, seed: int, epoch: int, step: int, stop: int
) -> Iterator[TableBatch]:
    """Yield the batches of steps `step` to `stop` of an epoch.

    Args:
        edges: The training edges.
        order: Of the epoch.
        shape: How batches are made.
        seed, epoch: Which epoch.
        step, stop: Which steps.
    """
    first = order.at(step)[0] if step < order.steps else len(order.blocks)
    for number, part in ahead(_parts(edges, order, seed, epoch, first, stop)):
        at = order.at(step)
        assert at[0] == number
        visit, steps = order.visit_of_block(number), int(order.steps_of[number])
        for within in range(at[1], steps):
            if step == stop:
                return
            own = part[within * len(part) // steps : (within + 1) * len(part) // steps].astype(np.int64)
            yield _batch(own, visit, order.visits[visit], edges.shape.buckets, shape, key(seed, Purpose.NEGATIVE, epoch, step))
            step += 1


def _parts(edges: BucketEdges, order: EpochOrder, seed: int, epoch: int, first: int, stop: int) -> Iterator[tuple[int, Edges]]:
    """(number in the order, edges in the epoch's order) of blocks from `first` on, up to that of the step before `stop`."""
    p, parts = edges.shape.buckets, edges.shape.parts
    last = order.at(stop - 1)[0] if stop else -1
    for number in range(first, last + 1):
        block = int(order.blocks[number])
        pair, part = divmod(block, parts)
        yield number, shuffled(edges.read(*divmod(pair, p), part), seed, epoch, block)


def _batch(own: Ids, number: int, visit: Visit, buckets: int, shape: BatchShape, stream: int) -> TableBatch:
    chunks, resident = -(-len(own) // shape.chunk), np.array(visit.resident)

    def drawn(side: int, nodes: range | None) -> Ids:
        if nodes is None or not shape.negatives:
            return np.empty((0, 0), np.int64)
        return drawn_nodes(numbered(stream, side), chunks * shape.negatives, resident, buckets, nodes).reshape(chunks, -1)

    columns = np.ascontiguousarray(own.T)
    relation = columns[2] if len(columns) > 2 else None
    return TableBatch(number, columns[0], columns[1], relation, drawn(1, shape.tails), drawn(2, shape.heads))

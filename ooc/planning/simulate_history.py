"""PURE: what training from histories reads, writes and keeps in memory, counted over sampled batches: no row is read.

A batch's halo is a function of the seed, so is what is pulled, and which nodes are pulled most often, whose rows stay in RAM
after the first epoch. Where the sample is the whole epoch all of it is counted; else half of the batches choose those nodes and
the other half shows how many pulls they serve.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.history.rows import most_asked
from ooc.loading.collate import SampledBatch
from ooc.stores.arrays.rows import Ids
from ooc.stores.io.pages import PAGE_BYTES
from ooc.stores.io.read_plan import ReadCost
from ooc.stores.io.write_plan import PIECE_BYTES, plan_writes

STAMP_BYTES = 4
"""of the step that wrote a row"""
_WRITERS = 4
_ASKED_BYTES = 2


@dataclass(frozen=True)
class HistoryShape:
    """row_bytes: of a row of each inner layer as stored; hot_bytes: for rows kept in RAM; widest: columns of a row in float32
    while it is put into a batch, 0 where rows are stored so; ahead: batches whose rows are read before the model asks;
    lengths: (ascending ids, bytes of a row) -> bytes of the extents that serve them."""

    num_nodes: int
    row_bytes: tuple[int, ...]
    hot_bytes: int
    lag: int
    ahead: int
    widest: int
    lengths: Callable[[Ids, int], NDArray[np.int64]]
    cost: ReadCost

    @property
    def node_bytes(self) -> int:
        return sum(self.row_bytes)

    def read(self, ids: Ids) -> NDArray[np.int64]:
        """int64[2]: extents and bytes of pulling `ids`."""
        found = [self.lengths(ids, each) for each in self.row_bytes] if len(ids) else []
        return np.array([sum(map(len, found)), sum(int(length.sum()) for length in found)])

    def written(self, ids: Ids) -> int:
        """Bytes of pushing `ids`, the steps' included."""
        return sum(plan_writes(ids, each).nbytes for each in (*self.row_bytes, STAMP_BYTES))


class Pulls(NamedTuple):
    """Of a batch, on average: extents and bytes read from disk."""

    extents: float
    nbytes: float


@dataclass(frozen=True)
class HistoryTraffic:
    """What batches pull and push.

    first, later: in the first epoch, and in all others, when the hot rows are in RAM; hot: reading these once; written: bytes
    that a batch pushes; memory: bytes of memory in the first epoch; resident_hot: of the hot rows, besides, from then on.
    """

    first: Pulls
    later: Pulls
    hot: Pulls
    written: float
    memory: int
    resident_hot: int
    cost: ReadCost

    def pull_s(self, pulls: Pulls) -> float:
        return pulls.extents * self.cost.read_s + pulls.nbytes * self.cost.byte_s


def simulate_exchange(shape: HistoryShape, drawn: Sequence[SampledBatch], whole: bool) -> HistoryTraffic:
    """Count what the batches `drawn` pull and push; whole: they are those of an epoch."""
    own = [batch.subgraph.node[: batch.subgraph.num_nodes[0]] for batch in drawn]
    halo = [batch.subgraph.node[batch.subgraph.num_nodes[0] :] for batch in drawn]
    most_hot = shape.hot_bytes // (shape.node_bytes + 8)
    hot = _hot(shape, halo, most_hot)
    if whole or len(halo) < 2:
        later = _mean([shape.read(np.setdiff1d(ids, hot, assume_unique=True)) for ids in halo])
    else:
        later = _unseen(shape, halo, most_hot)
    return HistoryTraffic(
        first=_mean([shape.read(ids) for ids in halo]),
        later=later,
        hot=_mean([shape.read(hot)]),
        written=float(np.mean([shape.written(ids) for ids in own])) if own else 0.0,
        memory=_memory_of(shape, max(map(len, own), default=0), max(map(len, halo), default=0)),
        resident_hot=(len(hot) if whole else min(most_hot, shape.num_nodes)) * (shape.node_bytes + 8),
        cost=shape.cost,
    )


def _memory_of(shape: HistoryShape, own: int, halo: int) -> int:
    """Bytes of memory for batches of at most so many nodes, and so many in their halo."""
    pending = shape.lag + 1 + shape.ahead
    pulled = halo * (shape.ahead * (shape.node_bytes + 12) + 4 * shape.widest)
    state = shape.num_nodes * (_ASKED_BYTES + STAMP_BYTES + (shape.node_bytes + STAMP_BYTES) // PAGE_BYTES)
    return pulled + own * pending * (shape.node_bytes + 8) + state + _WRITERS * 2 * PIECE_BYTES


def _hot(shape: HistoryShape, halo: Sequence[Ids], most: int) -> Ids:
    """The nodes in most halos, at most so many."""
    asked = np.zeros(shape.num_nodes, np.uint16)
    for ids in halo:
        asked[ids] += np.uint16(1)
    return most_asked(asked, most)


def _unseen(shape: HistoryShape, halo: Sequence[Ids], most_hot: int) -> Pulls:
    """Pulls of the batches with odd numbers beside the nodes that those with even ones would keep; room they do not fill goes
    to others at random."""
    hot = _hot(shape, halo[::2], most_hot)
    cold = 1 - (min(most_hot, shape.num_nodes) - len(hot)) / max(1, shape.num_nodes - len(hot))
    found = _mean([shape.read(np.setdiff1d(ids, hot, assume_unique=True)) for ids in halo[1::2]])
    return Pulls(found.extents * cold, found.nbytes * cold)


def _mean(found: Sequence[NDArray[np.int64]]) -> Pulls:
    extents, nbytes = np.mean(found, axis=0) if found else (0.0, 0.0)
    return Pulls(float(extents), float(nbytes))

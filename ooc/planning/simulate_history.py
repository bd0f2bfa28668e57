"""PURE: what training from histories or embedding tables reads, writes and keeps in memory, counted over sampled batches; no
row is read.

A batch's halo is a function of the seed, so is what is pulled, and which nodes are pulled most often, whose rows stay in RAM
after the first epoch. Where the sample is the whole epoch all of it is counted; else half of the batches choose those nodes and
the other half shows how many pulls they serve.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ooc.history.rows import most_asked
from ooc.loading.collate import SampledBatch
from ooc.stores.arrays.rows import Ids
from ooc.stores.io.pages import PAGE_BYTES
from ooc.stores.io.read_plan import ReadCost, plan_by_cost
from ooc.stores.io.write_plan import PIECE_BYTES, plan_writes

STAMP_BYTES = 4
"""of the step that wrote a row"""
_WRITERS = 4
_ASKED_BYTES = 2


def own_and_halo(drawn: SampledBatch) -> tuple[Ids, Ids]:
    """(nodes whose rows a batch pushes, those whose rows it pulls)."""
    subgraph = drawn.subgraph
    return subgraph.node[: subgraph.num_nodes[0]], subgraph.node[subgraph.num_nodes[0] :]


@dataclass(frozen=True)
class HistoryShape:
    """row_bytes: of a row of each inner layer as stored; hot_bytes: for rows kept in RAM; widest: columns of a row in float32
    while it is put into a batch, 0 where rows are stored so; ahead: batches whose rows are read before the model asks;
    lengths: (ascending ids, bytes of a row) -> bytes of the extents that serve them; exchanged: a batch -> (ids pushed, ids
    pulled); resident: whether all rows are in RAM, and written at checkpoints; stage: what reading them is called; together:
    batches of an optimizer step, whose rows wait for its end, of all processes; mine: of this one."""

    num_nodes: int
    row_bytes: tuple[int, ...]
    hot_bytes: int
    lag: int
    ahead: int
    widest: int
    lengths: Callable[[Ids, int], NDArray[np.int64]]
    cost: ReadCost
    exchanged: Callable[[SampledBatch], tuple[Ids, Ids]] = own_and_halo
    resident: bool = False
    stage: str = "pull"
    together: int = 1
    mine: int = 1

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


def table_shape(name: str, count: int, row_bytes: int, room: int, ahead: int, cost: ReadCost) -> HistoryShape:
    """The embedding table of node type `name`, of which a step reads and writes the rows of its batch's nodes.

    count, row_bytes: its rows, with their moments; room: bytes for rows in RAM, which has all of them if they fit.
    """

    def nodes(drawn: SampledBatch) -> tuple[Ids, Ids]:
        ids = np.unique(drawn.subgraph.node[name])
        return ids, ids

    return HistoryShape(
        num_nodes=count,
        row_bytes=(row_bytes,),
        hot_bytes=room,
        lag=0,
        ahead=ahead,
        widest=0,
        lengths=lambda ids, size: plan_by_cost(ids, size, cost, count=count, alignment=PAGE_BYTES).length,
        cost=cost,
        exchanged=nodes,
        resident=count * (row_bytes + STAMP_BYTES + 1) <= room,
        stage="tables",
    )


class Pulls(NamedTuple):
    """Of a batch, on average: extents and bytes read from disk."""

    extents: float
    nbytes: float

    def plus(self, other: "Pulls") -> "Pulls":
        return Pulls(self.extents + other.extents, self.nbytes + other.nbytes)


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
    stage: str = "pull"

    def pull_s(self, pulls: Pulls) -> float:
        return pulls.extents * self.cost.read_s + pulls.nbytes * self.cost.byte_s

    def plus(self, other: "HistoryTraffic") -> "HistoryTraffic":
        """Of both together."""
        return replace(
            self,
            first=self.first.plus(other.first),
            later=self.later.plus(other.later),
            hot=self.hot.plus(other.hot),
            written=self.written + other.written,
            memory=self.memory + other.memory,
            resident_hot=self.resident_hot + other.resident_hot,
        )


def sum_of(traffic: Iterable[HistoryTraffic]) -> HistoryTraffic | None:
    """Of several histories on one disk; None of none."""
    return reduce(lambda found, each: each if found is None else found.plus(each), traffic, cast(HistoryTraffic | None, None))


def simulate_exchange(shape: HistoryShape, drawn: Sequence[SampledBatch], whole: bool) -> HistoryTraffic:
    """Count what the batches `drawn` pull and push; whole: they are those of an epoch."""
    exchanged = [shape.exchanged(batch) for batch in drawn]
    own, halo = [pushed for pushed, _ in exchanged], [pulled for _, pulled in exchanged]
    if shape.resident:
        return _resident(shape, own)
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
        stage=shape.stage,
    )


def _resident(shape: HistoryShape, own: Sequence[Ids]) -> HistoryTraffic:
    """Of rows in RAM: written once an epoch, each that the batches have changed."""
    changed = np.unique(np.concatenate(own)) if own else np.empty(0, np.int64)
    nothing, memory = Pulls(0.0, 0.0), shape.num_nodes * (shape.node_bytes + STAMP_BYTES + 1)
    written = shape.written(changed) / max(1, len(own))
    return HistoryTraffic(nothing, nothing, nothing, written, memory, 0, shape.cost, shape.stage)


def _memory_of(shape: HistoryShape, own: int, halo: int) -> int:
    """Bytes of memory for batches of at most so many nodes, and so many in their halo."""
    pending = (shape.lag + 1 + -(-shape.ahead // shape.together)) * shape.together
    computed = own * shape.mine * shape.node_bytes * (2 if shape.widest else 1) * (shape.together > 1)  # float32 till then
    pulled = halo * (shape.ahead * (shape.node_bytes + 12) + 4 * shape.widest)
    state = shape.num_nodes * (_ASKED_BYTES + STAMP_BYTES + (shape.node_bytes + STAMP_BYTES) // PAGE_BYTES)
    return pulled + computed + own * pending * (shape.node_bytes + 8) + state + _WRITERS * 2 * PIECE_BYTES


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

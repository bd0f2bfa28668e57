"""Cursor -> `SampledBatch`: the seeds of a step and what is sampled around them, checked against the memory.

The stages know nothing of the loader or the pipeline, so that threads never keep either alive.
"""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ooc.graph.blocks import Sampler, Subgraph
from ooc.graph.mapped_topology import Topology
from ooc.loading.arguments import InputNodes
from ooc.loading.collate import SampledBatch
from ooc.runtime.keyed_random import Cursor, Purpose, key, seeds_of
from ooc.runtime.memory_plan import words_for
from ooc.sampling import OnDiskFrontier
from stores.errors import BudgetError

FIRST_TOGETHER, MOST_TOGETHER = 4, 64
"""Batches drawn together where the edges stay on disk: at first, and at most; in between as many as fit"""


@dataclass(frozen=True)
class Order:
    """Which seeds a step has, and the keys of its draws: all that a batch depends on besides the cursor."""

    nodes: InputNodes
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int
    world_size: int

    def positions(self, cursor: Cursor) -> NDArray[np.int64]:
        """int64[b]: positions of the seeds among the input nodes."""
        return seeds_of(
            self.nodes, cursor, self.batch_size, self.shuffle, self.seed, self.drop_last, self.rank, self.world_size
        )

    def key(self, cursor: Cursor) -> int:
        """The key of the step's draws."""
        return key(self.seed, Purpose.SAMPLE, cursor.epoch, cursor.step, self.rank)


@dataclass
class ReadCounts:
    """What was read so far, for batches not yet delivered too."""

    requested: int = 0
    """feature rows that sampled batches want, each time they do"""
    rows: int = 0
    """feature rows read"""
    nbytes: int = 0
    """bytes they took from the disk"""
    topology_nbytes: int = 0
    """bytes that sampling took from the disk, where the edges stay there"""
    lock: Any = field(default_factory=threading.Lock)

    def request(self, rows: int) -> None:
        with self.lock:
            self.requested += rows

    def add(self, rows: int, nbytes: int) -> None:
        with self.lock:
            self.rows += rows
            self.nbytes += nbytes

    def add_topology(self, nbytes: int) -> None:
        with self.lock:
            self.topology_nbytes += nbytes


class BatchLimit(Protocol):
    """The most bytes of a batch, and how a batch's are counted (see `ooc.loading.batch_bytes`)."""

    @property
    def max_bytes(self) -> int: ...

    def need(self, drawn: SampledBatch, drawing: int) -> int: ...


@runtime_checkable
class CountingSampler(Protocol):
    """A sampler that reads edges from the disk, and counts them."""

    def counting(self, counts: ReadCounts) -> Sampler:
        """The same sampler, whose bytes are counted in `counts`."""


@dataclass(frozen=True)
class SampleStage:
    """Draws batches.

    Args:
        order: Which seeds a step has.
        sampler: Draws one batch.
        topology: What `sampler` reads edges from, kept within its memory.
        limit: Of a batch.
        counts: Where rows requested and bytes read are counted.
        frontier: Draws many batches together, where the edges stay on disk.
        threads: That draw, where batches are drawn one by one.
        split_seeds: Whether a batch beyond the limit is halved, and again, into more batches.
    """

    order: Order
    sampler: Sampler
    topology: Topology
    limit: BatchLimit
    counts: ReadCounts
    frontier: OnDiskFrontier | None = None
    threads: int = 1
    split_seeds: bool = False

    @property
    def one_by_one(self) -> bool:
        """Whether each cursor gives one batch, drawn by itself."""
        return self.frontier is None and not self.split_seeds

    def drawing_bytes(self, nbytes: int) -> int:
        """Bytes of the batches being drawn at once, with their hash tables. nbytes: of a subgraph."""
        return 4 * self.threads * nbytes if self.frontier is None else self.frontier.max_bytes or 0

    def apart(self, counts: ReadCounts) -> Self:
        """The same, counting in `counts`."""
        sampler = self.sampler.counting(counts) if isinstance(self.sampler, CountingSampler) else self.sampler
        return replace(self, sampler=sampler, counts=counts)

    def shared(self, limit: BatchLimit, parts: int) -> Self:
        """The same within another limit, for one of so many parts of the frontier's memory."""
        frontier = self.frontier
        if frontier is not None and frontier.max_bytes is not None:
            own = frontier.max_bytes // parts
            frontier = OnDiskFrontier(frontier.sampler, frontier.indices, frontier.columns, own, frontier.at_once)
        return replace(self, limit=limit, frontier=frontier)

    def sample(self, cursor: Cursor) -> SampledBatch:
        """The batch at `cursor`, whole.

        Raises:
            BudgetError: Where it does not fit the memory.
        """
        return self._draw(cursor, self.order.positions(cursor), last=True)

    def batches(self, cursors: Iterator[Cursor]) -> Iterator[SampledBatch]:
        """The batches of `cursors`, drawn one by one, in halves or together."""
        if self.frontier is not None:
            return self._together(self.frontier, cursors)
        return self.split(cursors) if self.split_seeds else map(self.sample, cursors)

    def split(self, cursors: Iterator[Cursor]) -> Iterator[SampledBatch]:
        """The batches of `cursors`; where one does not fit, its halves in order. All parts of a step share its draws.

        A node's draw is the same in every part as long as it is met at the same hop. Where fan-outs differ by hop, a node
        can be met at an earlier or a later hop in a half than in the whole, and then with another fan-out: so what is
        computed from a split batch depends on where it was split, that is, on the memory.
        """
        for cursor in cursors:
            parts = [self.order.positions(cursor)]
            while parts:
                position = parts.pop()
                try:
                    drawn = self._draw(cursor, position, last=not parts)
                except BudgetError:
                    if len(position) == 1:
                        raise
                    half = len(position) // 2
                    parts += [position[half:], position[:half]]
                    continue
                yield drawn

    def _together(self, frontier: OnDiskFrontier, cursors: Iterator[Cursor]) -> Iterator[SampledBatch]:
        """The batches of `cursors`, many at a time, hop by hop, as many as fit the frontier's memory.

        The batches before one that fails come first.
        """
        self.topology.warm()
        waiting: deque[tuple[Cursor, NDArray[np.int64], bool]] = deque()
        together = FIRST_TOGETHER
        while True:
            for cursor in islice(cursors, max(0, together - len(waiting))):
                waiting.append((cursor, self.order.positions(cursor), True))
            if not waiting:
                return
            parts = list(islice(waiting, together))
            seeds, keys = [self.order.nodes.ids(position) for _, position, _ in parts], [self.order.key(c) for c, _, _ in parts]
            found = frontier.sample(seeds, keys)
            self.counts.add_topology(found.nbytes)
            together = min(2 * together, MOST_TOGETHER) if len(found.batches) == together else len(found.batches)
            for (cursor, position, last), subgraph in zip(parts, found.batches, strict=False):
                waiting.popleft()
                try:
                    if isinstance(subgraph, Exception):
                        raise subgraph
                    drawn = self._checked(cursor, position, last, subgraph)
                except BudgetError:
                    if not self.split_seeds or len(position) == 1:
                        raise
                    half = len(position) // 2
                    waiting.extendleft([(cursor, position[half:], last), (cursor, position[:half], False)])
                    break  # what was drawn behind it is drawn again, in its place
                yield drawn
            del found  # before the next ones are drawn

    def _draw(self, cursor: Cursor, position: NDArray[np.int64], last: bool) -> SampledBatch:
        self.topology.warm()
        subgraph = self.sampler.sample(self.order.nodes.ids(position), self.order.key(cursor))
        return self._checked(cursor, position, last, subgraph)

    def _checked(self, cursor: Cursor, position: NDArray[np.int64], last: bool, subgraph: Subgraph) -> SampledBatch:
        self.topology.trim(subgraph)
        drawn, most = SampledBatch(cursor.step, last, position, subgraph), self.limit.max_bytes
        need = self.limit.need(drawn, self.drawing_bytes(subgraph.nbytes))  # the sampler has not counted what collation adds
        if need > most:
            raise BudgetError(
                f"a batch of {len(position)} seeds needs {words_for(need, most)}; "
                "take a smaller batch size, a smaller fan-out or more memory"
            )
        self.counts.request(len(subgraph.node))
        return drawn

"""What the pipeline's threads do for a loader: sample, read, collate.

`Work` knows nothing of the loader or the pipeline, so that threads never keep either alive.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import Data

from ooc.graph.aggregation import Factors, FirstLayerAggregates, PreAggregation, RowDecoder, gathered, without_last_hop
from ooc.graph.blocks import Sampler, Subgraph
from ooc.graph.mapped_topology import Topology
from ooc.loading.arguments import InputNodes
from ooc.loading.collate import Collator, LoadedBatch, SampledBatch
from ooc.loading.scan_size import ScanSize
from ooc.runtime.buffers import Buffers
from ooc.runtime.keyed_random import Cursor, Purpose, key, seeds_of
from ooc.runtime.memory_plan import PIECE_SHARE, BatchRoom, words_for
from ooc.runtime.pipeline import Stage
from ooc.runtime.transfer import pin
from ooc.sampling import OnDiskFrontier
from stores.arrays.rows import AnyArray, ArrayRows, Rows
from stores.errors import BudgetError


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

    asked: int = 0
    """feature rows that sampled batches want, each time they do"""
    rows: int = 0
    """feature rows read"""
    nbytes: int = 0
    """bytes they took from the disk"""
    topology_nbytes: int = 0
    """bytes that sampling took from the disk, where the edges stay there"""
    lock: Any = field(default_factory=threading.Lock)

    def ask(self, rows: int) -> None:
        with self.lock:
            self.asked += rows

    def add(self, rows: int, nbytes: int) -> None:
        with self.lock:
            self.rows += rows
            self.nbytes += nbytes

    def add_topology(self, nbytes: int) -> None:
        with self.lock:
            self.topology_nbytes += nbytes


BUFFERS_KEPT, PINNED_KEPT = 1, 4
"""Memory of batches that the model is done with, for the rows of the next ones; page-locking takes long enough to keep more"""
FIRST_TOGETHER, MOST_TOGETHER = 4, 64
"""Batches drawn together where the edges stay on disk: at first, and at most; in between as many as fit"""
PIECES, PIECE_BYTES = 3, 8 * 2**20
"""Pieces of the file that a scan has in memory at once: two being read, so that the disk never waits, and one being added up;
and a piece's bytes at most"""


@dataclass(frozen=True)
class Work:
    """The stages of a loader's pipeline. x, y: feature rows as stored and labels, [N, ...], None where the store has none."""

    order: Order
    sampler: Sampler
    collator: Collator
    x: Rows | None
    y: AnyArray | None
    row_bytes: int
    """bytes of a node's features and labels, or of its two rows of sums and labels, in a batch"""
    max_bytes: int
    """of one batch"""
    transform: Callable[[Data], Any] | None
    pin: bool
    """for copies of the user's own"""
    topology: Topology
    frontier: OnDiskFrontier | None = None
    """where the edges stay on disk"""
    pre_aggregation: PreAggregation | None = None
    """what of x batches hold in its place"""
    scanning: bool = False
    """whether sums are made in sweeps; `max_bytes` is then that of a sweep"""
    kept_bytes: int = 0
    """of a sweep's memory, for freed blocks that the C library keeps, and buffers of reads; see
    `ooc.loading.shared_scan_plan.ScanDraft`"""
    spare_bytes: int = 0
    """of these, the buffers of reads, which sweeps have beside the batches' memory, as theirs go past them"""
    drawing: int = 1
    """batches drawn at once"""
    read: ReadCounts = field(default_factory=ReadCounts)
    buffers: Buffers = field(default_factory=lambda: Buffers(BUFFERS_KEPT))

    def apart(self) -> Self:
        """The same work with counters and buffers of its own."""
        return replace(self, read=ReadCounts(), buffers=Buffers(BUFFERS_KEPT))

    def sharing(self, pool: int, parts: int) -> "Work":
        """The same work for a pipeline of sweeps that has `pool` bytes, one of so many parts of all."""
        room = BatchRoom(pool, parts, self.max_bytes.budget) if isinstance(self.max_bytes, BatchRoom) else pool
        frontier = self.frontier
        if frontier is not None and frontier.max_bytes is not None:
            own = frontier.max_bytes // parts
            frontier = OnDiskFrontier(frontier.sampler, frontier.indices, frontier.columns, own, frontier.at_once)
        kept, spare = self.kept_bytes // parts, self.spare_bytes // parts
        return replace(self, max_bytes=room, frontier=frontier, kept_bytes=kept, spare_bytes=spare)

    def stages(self, sample_threads: int, read_threads: int, split: bool) -> list[Stage]:
        """The stages behind cursors, or behind `split`, whose batches are sampled already."""
        sample = [] if split else [Stage("sample", self.sample, sample_threads)]
        return [*sample, Stage("read", self.load, read_threads, nbytes=self.nbytes), Stage("collate", self.collate)]

    def sample(self, cursor: Cursor) -> SampledBatch:
        """The batch at `cursor`, whole. Raises BudgetError where it does not fit the memory."""
        return self._draw(cursor, self.order.positions(cursor), last=True)

    def sampled(self, cursors: Iterator[Cursor], split: bool) -> Iterator[SampledBatch]:
        """The batches of `cursors`, drawn many together, hop by hop, while the edges stay on disk.

        As many as fit the lockstep's memory. The batches before one that fails come first; split: see `split`.
        """
        assert self.frontier is not None
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
            found = self.frontier.sample(seeds, keys)
            self.read.add_topology(found.nbytes)
            together = min(2 * together, MOST_TOGETHER) if len(found.batches) == together else len(found.batches)
            for (cursor, position, last), subgraph in zip(parts, found.batches, strict=False):
                waiting.popleft()
                try:
                    if isinstance(subgraph, Exception):
                        raise subgraph
                    drawn = self._checked(cursor, position, last, subgraph)
                except BudgetError:
                    if not split or len(position) == 1:
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
        drawn = SampledBatch(cursor.step, last, position, subgraph)
        # The sampler has not counted what collation adds.
        need = self.scan_size(drawn).nbytes if self.scanning else self.nbytes(drawn)
        if need > self.max_bytes:
            raise BudgetError(
                f"a batch of {len(position)} seeds needs {words_for(need, self.max_bytes)}; "
                "take a smaller batch size, a smaller fan-out or more memory"
            )
        self.read.ask(len(subgraph.node))
        return drawn

    def split(self, cursors: Iterator[Cursor]) -> Iterator[SampledBatch]:
        """Sampled batches; where one does not fit, its halves in order. All parts of a step share its draws.

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

    @property
    def needs_slots(self) -> bool:
        """Whether a sampled batch's slots are met again."""
        return self.collator.needs_slots(read=self.frontier is not None)

    def nbytes(self, drawn: SampledBatch) -> int:
        """Bytes of the batch from here to the model."""
        subgraph = drawn.subgraph
        if self.pre_aggregation is not None:
            return subgraph.nbytes + self._aggregated_bytes(subgraph)
        return subgraph.nbytes + self.collator.nbytes(len(subgraph.node), len(subgraph.source), self.row_bytes)

    def _aggregated_bytes(self, subgraph: Subgraph) -> int:
        """Bytes of the batch without its last hop, with sums."""
        return self.collator.nbytes(len(subgraph.indptr) - 1, sum(subgraph.num_edges[:-1]), self.row_bytes)

    @property
    def piece_bytes(self) -> int:
        """Of a piece of a sweep's pass, about."""
        return min(PIECE_BYTES, self.max_bytes // PIECE_SHARE)

    def scan_size(self, drawn: SampledBatch) -> ScanSize:
        """The part of the memory that the batch takes in a sweep."""
        subgraph = drawn.subgraph
        expanded = len(subgraph.indptr) - 1
        rest = 8 * (2 * expanded + 2 * sum(subgraph.num_edges[:-1]))
        row = 4 if subgraph.node.max(initial=0) < 2**31 else 8
        factor = 4 if self.pre_aggregation is not None and self.pre_aggregation.weighs_edges(subgraph) else 0
        entry = row + 4 + factor + 2  # the target, and a part of where each row's entries begin
        drawing = 4 * self.drawing * subgraph.nbytes if self.frontier is None else self.frontier.max_bytes or 0
        self_rows = self.self_row_bytes * expanded
        return ScanSize(
            sums=self._aggregated_bytes(subgraph)
            - self_rows
            + rest
            + 12 * expanded,  # where its own row is kept, and how that is found
            self_rows=self_rows,
            entries=entry * (len(subgraph.source) + expanded),
            activations=self.activation_bytes(drawn),
            besides=drawing + PIECES * self.piece_bytes,
            copied=self_rows,
        )

    @property
    def self_row_bytes(self) -> int:
        """Bytes of a destination's own row among sums."""
        assert self.x is not None
        return 4 * self.x.shape[1]

    def activation_bytes(self, drawn: SampledBatch) -> int:
        """Bytes that the model needs beside a batch: as much again (hidden rows are about as wide as features, for fewer nodes
        each layer; measured, it is less), or what the rows made of sums take."""
        if self.pre_aggregation is None or self.x is None:
            return self.nbytes(drawn)
        return self.pre_aggregation.step_bytes(drawn.subgraph.num_nodes, self.x.shape[1])

    def load(self, drawn: SampledBatch) -> LoadedBatch:
        """Features and labels of a sampled batch."""
        node, x = drawn.subgraph.node, None
        if self.pre_aggregation is not None and isinstance(self.x, ArrayRows):
            return self.aggregated(drawn, self.x.array, node)
        if self.x is not None:
            assert self.collator.gather is not None
            x, nbytes = self.collator.gather.read(self.x, node, self.buffers)
            self.read.add(len(node), nbytes)
        return LoadedBatch(drawn, x, self.labels(drawn))

    def aggregated(self, drawn: SampledBatch, rows: AnyArray, at: NDArray[Any]) -> LoadedBatch:
        """The batch with its first layer's sums, of rows in memory: node i's is rows[at[i]]."""
        factors, rest = self.factors(drawn)
        sums = self.buffers.empty((2, len(drawn.subgraph.indptr) - 1, rows.shape[1]), np.dtype(np.float32))
        gathered(rows, self.code, at, drawn.subgraph, factors, sums[0], sums[1])
        return LoadedBatch(rest, FirstLayerAggregates(sums[0], sums[1]), self.labels(rest))

    @property
    def code(self) -> RowDecoder:
        """How sums read stored rows."""
        assert self.collator.gather is not None
        return RowDecoder.of(self.collator.gather.encoding)

    def factors(self, drawn: SampledBatch) -> tuple[Factors, SampledBatch]:
        """What neighbors count for in the first layer's sums, and what remains of the batch beside them."""
        assert self.pre_aggregation is not None
        factors = self.pre_aggregation.factors(self.collator.graph, drawn.subgraph)
        return factors, replace(drawn, subgraph=without_last_hop(drawn.subgraph))

    def labels(self, drawn: SampledBatch) -> AnyArray | None:
        """Labels of a sampled batch's nodes, [n] or [n, C]."""
        if self.y is None:
            return None
        y = np.asarray(self.y[drawn.subgraph.node])
        return y.astype(np.int64) if y.dtype.kind in "iu" else y  # torch's losses take classes so

    def collate(self, loaded: LoadedBatch) -> tuple[int, Any]:
        """(steps done with this batch, the batch)."""
        drawn = loaded.drawn
        batch: Any = self.collator(loaded, self.order.nodes.input_id(drawn.position))
        if self.transform is not None:
            batch = self.transform(batch)
        if self.pin:
            batch = pin(batch)
        return drawn.step + drawn.last, batch

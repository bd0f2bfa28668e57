"""PURE: bytes that a sampled batch takes, by itself and as a part of a shared scan."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ooc.graph.aggregation import PreAggregation
from ooc.graph.blocks import Subgraph
from ooc.loading.collate import Collator, SampledBatch
from ooc.loading.shared_sums import SUM_BYTES
from ooc.runtime.memory_plan import PACKED_PIECE_SHARE, PACKED_SPAN_SHARE, PIECE_SHARE, BatchRoom
from ooc.stores.dataset import Dataset
from ooc.stores.io.pages import PAGE_BYTES

PIECES, PIECE_BYTES = 3, 8 * 2**20
"""Pieces of the file that a scan has in memory at once: two being read, so that the disk never waits, and one being added up;
and a piece's bytes at most"""
_WIDTHS_ALIVE = 3
"""Rows of a layer's width that a step holds at once for each node of the batch, for each layer, gradients included"""

COPIES = 2
"""Batches of a scan that have their own copy of their destinations' rows: at the model, and ahead of it"""
FEW = 2
"""Batches that a scan has before memory is reserved for other ends: two in place of one halve what is read for each"""
_HELD = COPIES + 1
"""Batches whose aggregates are not given back yet when a scan's last batch is asked for"""
_ENTRY_COPIES = 3
"""of a scan's entries: those under way; of the next scan the batches', or one copy, being put in order into another"""

PACKED_SPARE = 8
"""Pieces of packed batches that are written while others fill"""
_PACKED_PIECE = 2**18
"""Bytes of such a piece at most"""
_LEAST_SPAN, _MOST_SPAN = 2**10, 2**18
"""Numbers of rows whose reads are planned at once, at least and at most"""
_PLANNED_BYTES = 80
"""to plan the reads of a row"""
_ID_COPIES = 3
"""of the numbers of rows of packed batches: of those sampled, of those packed, and of these once more while they are joined"""
_PACKED_RESTS, _PACKED_ENTRIES = COPIES + 1, 5
"""Of packed batches in memory: at the model, ahead of it and being written; and their entries: as they come, two copies in
which they are sorted, one being written and one that is served"""


class BatchLimit(Protocol):
    """The most bytes that a batch may take, and what it takes of them."""

    @property
    def max_bytes(self) -> int:
        """The limit."""

    def need(self, drawn: SampledBatch, drawing: int) -> int:
        """Bytes to compare with `max_bytes`. drawing: bytes of the batches being drawn, which have room of their own."""

    def rows(self, drawn: SampledBatch) -> int:
        """Feature rows that the batch wants."""


class BatchSize(BatchLimit, Protocol):
    """What a batch takes by itself."""

    @property
    def edges_per_node(self) -> float:
        """Edges of a batch by its nodes, about."""

    def nbytes(self, drawn: SampledBatch) -> int:
        """Bytes from sampling to the model."""

    def activation_bytes(self, drawn: SampledBatch) -> int:
        """Bytes that the model needs beside a batch."""


@dataclass(frozen=True)
class BatchBytes:
    """What a batch takes from sampling to the model, and the most it may take."""

    max_bytes: int
    collator: Collator
    row_bytes: int
    """of a node's features and labels or, with `pre_aggregation`, of its two aggregates and labels"""
    pre_aggregation: PreAggregation | None = None
    """what batches hold in place of their feature rows"""
    channels: int = 0
    model_width: int = 0
    """columns of a node's rows in all layers together, where each layer computes every node of a batch"""
    edges_per_node: float = 1.0
    """edges of a batch by its nodes, about: how the memory is divided between rows of nodes and of edges"""
    activations: float = 1.0
    """see `MemoryPlan.activations`"""

    def need(self, drawn: SampledBatch, drawing: int) -> int:
        """Bytes to compare with `max_bytes`. drawing: bytes of the batches being drawn, which have room of their own."""
        return self.nbytes(drawn)

    def rows(self, drawn: SampledBatch) -> int:
        """Feature rows that the batch wants."""
        return int(drawn.subgraph.size[0])

    def nbytes(self, drawn: SampledBatch) -> int:
        subgraph = drawn.subgraph
        if self.pre_aggregation is not None:
            return subgraph.nbytes + self.aggregated_bytes(subgraph) + drawn.link_bytes
        nodes, edges = subgraph.size
        return subgraph.nbytes + drawn.link_bytes + self.collator.nbytes(nodes, edges, self.row_bytes)

    def aggregated_bytes(self, subgraph: Subgraph) -> int:
        """Bytes of the batch without its last hop, with aggregates."""
        return self.collator.nbytes(len(subgraph.indptr) - 1, sum(subgraph.num_edges[:-1]), self.row_bytes)

    def activation_bytes(self, drawn: SampledBatch) -> int:
        """Bytes that the model needs beside a batch: as much again (hidden rows are about as wide as features, for fewer nodes
        each layer; measured, it is less), or what its own widths say."""
        if self.pre_aggregation is not None:
            step = self.pre_aggregation.step_bytes(drawn.subgraph.num_nodes, self.channels)
        else:
            step = max(self.nbytes(drawn), _WIDTHS_ALIVE * 4 * self.model_width * self.rows(drawn))
        return int(self.activations * step)


@dataclass(frozen=True)
class ScanSize:
    """What two scans (`ooc.loading.shared_scan_plan`) take, one serving batches while the other is made. Bytes."""

    sums: int
    """aggregates of a scan's batches; those that batches share count once"""
    self_rows: int
    """the destinations' own rows, each once: batches share them"""
    rests: int
    """of what remains of its batches"""
    entries: int
    """of what its batches want of the rows"""
    activations: int
    """of the largest batch"""
    besides: int
    """what is drawn, read and collated meanwhile"""
    copied: int = 0
    """the destinations' own rows of the largest batch, and its aggregates where it shares some"""
    largest: int = 0
    """aggregates of the largest batch"""
    batches: int = 1

    @property
    def nbytes(self) -> int:
        return self.kept + self.fixed

    @property
    def fixed(self) -> int:
        """What more batches do not add to. The first one of a scan needs no copy of its destinations' rows."""
        return self.activations + self.besides + min(COPIES, self.batches - 1) * self.copied

    @property
    def rows(self) -> int:
        """Of aggregates and own rows, in both. A scan of more than a few batches fills its own rows into what the one before
        gives back of its aggregates, batch by batch."""
        given_back = min(self.sums, self.self_rows) - _HELD * self.largest if self.batches > FEW else 0
        return 2 * (self.sums + self.self_rows) - max(0, given_back)

    @property
    def beside_rows(self) -> int:
        """All but `rows`."""
        return self.nbytes - self.rows

    @property
    def kept(self) -> int:
        """Of the batches that wait, in both."""
        return self.rows + 2 * self.rests + _ENTRY_COPIES * self.entries

    def joined(self, other: "ScanSize", self_rows: int) -> "ScanSize":
        """With more batches; self_rows: of both together."""
        return ScanSize(
            sums=self.sums + other.sums,
            self_rows=self_rows,
            rests=self.rests + other.rests,
            entries=self.entries + other.entries,
            activations=max(self.activations, other.activations),
            besides=max(self.besides, other.besides),
            copied=max(self.copied, other.copied),
            largest=max(self.largest, other.largest),
            batches=self.batches + other.batches,
        )


@dataclass(frozen=True)
class ScanBytes:
    """What a batch takes of a shared scan's memory."""

    max_bytes: int
    """of one scan"""
    batch: BatchBytes
    """of its batches, which are pre-aggregated"""
    reserved_bytes: int = 0
    """of a scan's memory, for freed blocks that the C library keeps, and buffers of reads, but where a few batches need it"""
    spare_bytes: int = 0
    """of these, the buffers of reads, which scans have beside the batches' memory, as their reads need none"""
    shares_sums: bool = False
    """whether batches share aggregates that are alike"""

    def need(self, drawn: SampledBatch, drawing: int) -> int:
        """See `BatchBytes.need`: here of a scan of this batch alone."""
        return self.size(drawn, drawing).nbytes

    def rows(self, drawn: SampledBatch) -> int:
        """See `BatchBytes.rows`."""
        return self.batch.rows(drawn)

    @property
    def piece_bytes(self) -> int:
        return min(PIECE_BYTES, self.max_bytes // PIECE_SHARE)

    @property
    def self_row_bytes(self) -> int:
        return 4 * self.batch.channels

    def finding_bytes(self, num_sums: int) -> int:
        """For finding so many aggregates again."""
        return SUM_BYTES * num_sums if self.shares_sums else 0

    def size(self, drawn: SampledBatch, drawing: int) -> ScanSize:
        """The part of the memory that the batch takes. drawing: bytes of the batches being drawn meanwhile."""
        subgraph, pre_aggregation = drawn.subgraph, self.batch.pre_aggregation
        assert pre_aggregation is not None
        expanded = len(subgraph.indptr) - 1
        rest = 8 * (2 * expanded + 2 * sum(subgraph.num_edges[:-1]))
        row = 4 if subgraph.node.max(initial=0) < 2**31 else 8
        factor = 4 if pre_aggregation.weighs_edges(subgraph) else 0
        entry = row + 4 + factor + 2  # the target, and a part of where each row's entries begin
        sums = self_rows = self.self_row_bytes * expanded
        own = 12 * expanded  # where a destination's own row is kept, and how that is found
        rest += own + self.finding_bytes(expanded) + drawn.link_bytes
        collated = self.batch.aggregated_bytes(subgraph) - sums - self_rows
        return ScanSize(
            sums=sums,
            self_rows=self_rows,
            rests=rest,
            entries=entry * (len(subgraph.source) + expanded),
            activations=self.batch.activation_bytes(drawn),
            besides=drawing + PIECES * self.piece_bytes + COPIES * collated,
            copied=self_rows,
            largest=sums,
        )

    def shared(self, pool: int, parts: int) -> "ScanBytes":
        """The same for a loader that has `pool` bytes, one of so many parts of all."""
        room = BatchRoom(pool, parts, self.max_bytes.budget) if isinstance(self.max_bytes, BatchRoom) else pool
        reserved, spare = self.reserved_bytes // parts, self.spare_bytes // parts
        return replace(self, max_bytes=room, reserved_bytes=reserved, spare_bytes=spare)


@dataclass(frozen=True)
class PackSize:
    """What a packed batch takes. rows: that it wants, each once; memory: bytes to sample and to serve it."""

    rows: int
    id_bytes: int
    """of a row's number"""
    memory: int
    activations: int
    """of these, of the model"""


@dataclass(frozen=True)
class PackBytes:
    """What packed batches (`ooc.loading.packed`) take of the memory and of the disk."""

    max_bytes: int
    """of memory, for all of them"""
    scan: ScanBytes
    """of a batch as it is served: a scan of its own rows"""
    row_bytes: int
    """of a stored row"""
    disk_bytes: int
    """for two groups of batches, one that is served and one that is packed"""

    @property
    def batch(self) -> BatchBytes:
        """Of a batch by itself."""
        return self.scan.batch

    @property
    def group_disk(self) -> int:
        """Bytes of disk for a group."""
        return self.disk_bytes // 2 // PAGE_BYTES * PAGE_BYTES

    @property
    def piece_bytes(self) -> int:
        """Bytes of a batch's rows that are written at once: whole pages, whose last bytes may be unused."""
        least = -(-self.row_bytes // PAGE_BYTES) * PAGE_BYTES
        return max(least, min(_PACKED_PIECE, self.max_bytes // PACKED_PIECE_SHARE // PAGE_BYTES * PAGE_BYTES))

    @property
    def span(self) -> int:
        """Numbers of rows whose reads a pass plans at once."""
        return max(_LEAST_SPAN, min(_MOST_SPAN, self.max_bytes // PACKED_SPAN_SHARE))

    def packed_bytes(self, rows: int) -> int:
        """Bytes of disk for the rows of a batch."""
        whole, rest = divmod(rows, self.piece_bytes // self.row_bytes)
        return whole * self.piece_bytes + -(-rest * self.row_bytes // PAGE_BYTES) * PAGE_BYTES

    def group_bytes(self, batches: int, rows: int, id_bytes: int) -> int:
        """Bytes of memory to pack so many batches: the numbers of their rows, and a piece of each."""
        pieces = (batches + PACKED_SPARE) * self.piece_bytes + PIECES * self.scan.piece_bytes
        return _ID_COPIES * id_bytes * rows + pieces + _PLANNED_BYTES * self.span

    def need(self, drawn: SampledBatch, drawing: int) -> int:
        """See `BatchBytes.need`: here of a group of this batch alone."""
        size = self.size(drawn, drawing)
        return size.memory + self.group_bytes(1, size.rows, size.id_bytes)

    def rows(self, drawn: SampledBatch) -> int:
        """See `BatchBytes.rows`."""
        return self.scan.rows(drawn)

    def size(self, drawn: SampledBatch, drawing: int) -> PackSize:
        """What the batch takes. drawing: bytes of the batches being drawn meanwhile."""
        found, node = self.scan.size(drawn, drawing), drawn.subgraph.node
        aggregates = COPIES * (found.sums + found.self_rows) * 9 // 8
        beside = _PACKED_RESTS * found.rests + _PACKED_ENTRIES * found.entries + found.activations + found.besides
        id_bytes = 4 if node.max(initial=0) < 2**31 else 8
        return PackSize(len(node), id_bytes, aggregates + beside, found.activations)

    def shared(self, pool: int, parts: int) -> "PackBytes":
        """The same for a loader that has `pool` bytes, one of so many parts of all."""
        scan = self.scan.shared(pool, parts)
        return replace(self, max_bytes=scan.max_bytes, scan=scan, disk_bytes=self.disk_bytes // parts)


def row_bytes_of(ds: Dataset, collator: Collator, pre_aggregation: PreAggregation | None = None) -> int:
    """Bytes of a node's features and labels in a batch, or of its two aggregates and labels."""
    x, y = ds.stored("x") if ds.num_features else None, ds.labels
    x_bytes = 0 if x is None or collator.gather is None else collator.gather.row_bytes(x.shape[1:])
    if x is not None and pre_aggregation is not None:
        x_bytes = 2 * 4 * x.shape[1]
    return x_bytes + (0 if y is None else 8 * int(np.prod(y.shape[1:], dtype=np.int64)))

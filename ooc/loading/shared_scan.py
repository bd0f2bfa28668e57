"""Shared scans: the first layer's aggregates of many batches, made while the features go by once in file order.

Batches that are pre-aggregated (`ooc.graph.aggregation`) need no row twice: a row that was read is added to the aggregates it
belongs to, of all batches that wait, and forgotten. So memory holds two rows for each destination of the first layer, not one
for every node, and a tenth of the reads serves the same batches. (Cooperative scans of databases, Zukowski et al., VLDB 2007,
share one pass in this way.) Two scans are in memory (`scan_memory.py`): one serves batches while the other is made. A batch is
the same, to the bit, as gathered from memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats, scale_rows, scatter_aggregates, take_rows
from ooc.graph.blocks import narrow
from ooc.loading.batch_bytes import COPIES, PIECES, ScanBytes
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import RowLease
from ooc.loading.read_strategy import GroupEnds, ReadGroup, ServedBatch, grouped, read_all_or_each
from ooc.loading.scan_memory import RowCopies, ScanMemory, ScanRows
from ooc.loading.shared_pass import PassSession, SharedPass
from ooc.loading.shared_scan_plan import BatchRemainder, ScanDraft, ScanPiece, SharedScan, WaitingBatch, pieces
from ooc.loading.shared_sums import digests_of
from ooc.runtime.clock import Clock
from ooc.runtime.memory import keep_large_blocks, return_freed
from ooc.runtime.memory_plan import MemoryPlan


@dataclass(frozen=True)
class FinishedScan(ReadGroup):
    """A scan's batches whose aggregates are in memory."""

    scan: SharedScan
    """without entries"""
    rows: ScanRows

    @classmethod
    def of(cls, done: int, error: Exception | None, scan: SharedScan, rows: ScanRows) -> "FinishedScan":
        return cls(done, error, scan.without_entries(), rows)


@dataclass(frozen=True)
class SharedScans(SharedPass):
    """One pass over the file makes the aggregates of as many batches as memory holds; `memory` is that of a scan."""

    memory: ScanBytes
    stage = "sum"

    @property
    def reserves_blocks(self) -> bool:
        return self.memory.reserved_bytes > self.memory.spare_bytes

    def pool(self, budget: MemoryPlan) -> int:
        return budget.batches + self.memory.spare_bytes

    def waiting(self, drawn: SampledBatch) -> WaitingBatch:
        """What a sampled batch wants of the rows."""
        stages = self.stages
        wanted = stages.load.entries(drawn)
        size = self.memory.size(drawn, stages.sample.drawing_bytes(drawn.subgraph.nbytes))
        rest, row = BatchRemainder(wanted.rest, wanted.num_rows), narrow(wanted.row)
        digest = None
        if self.memory.shares_sums:
            digest = digests_of(row, wanted.target, wanted.edge, wanted.scale, wanted.num_rows)
        return WaitingBatch(rest, row, wanted.target, wanted.edge, wanted.scale, wanted.own, size, digest)

    def plan(
        self, batches: Iterator[WaitingBatch], pool: int, alone: bool = False, ends: GroupEnds | None = None
    ) -> Iterator[SharedScan]:
        """Scans of consecutive batches, each of as many as fit `pool` bytes, but of one at least; none left out.

        alone: whether the first batch has a scan of its own; ends: see `grouped`.
        """
        memory = self.memory
        drafts = (ScanDraft(pool, memory.self_row_bytes, memory.reserved_bytes) for _ in repeat(None))
        if alone:
            yield from grouped(islice(batches, 1), drafts)
        yield from grouped(batches, drafts, ends)

    def session(self, clock: Clock, pool: int, lease: RowLease) -> "ScanSession":
        return ScanSession(self, clock, pool, lease)


class ScanSession(PassSession):
    """Makes aggregates, scan by scan, while those before serve their batches.

    Pieces are added up by the caller's thread; see `PassSession`. Where a scan takes what is reserved for freed blocks, the C
    library keeps none any more.
    """

    stage = SharedScans.stage

    def __init__(self, strategy: SharedScans, clock: Clock, pool: int = 1 << 62, lease: RowLease | None = None) -> None:
        super().__init__(strategy, clock, pool, lease, PIECES)
        self.prepare, self._strategy = strategy.waiting, strategy
        self._memory, self._sums, self._self_rows = ScanMemory(), RowCopies(COPIES), RowCopies(COPIES)
        self._turn = 0
        self._returns = False
        self._decoders = self._load.decoders

    def plan(self, batches: Iterator[WaitingBatch]) -> Iterator[SharedScan]:
        return self._strategy.plan(batches, self.pool, self._first_alone, self._passes.ends)

    def begin(self, turn: int) -> None:
        self._memory.request(turn)

    def read(self, group: SharedScan) -> FinishedScan:
        memory = self._strategy.memory
        if group.size.nbytes > self.pool - memory.reserved_bytes and not self._returns:
            self._returns = keep_large_blocks(False)
            return_freed()
        rows, most = self.room_for(group, self._turn), self.pool - memory.reserved_bytes - group.size.beside_rows
        self._turn += 1

        def filling(count: int) -> None:
            if group.in_file_order:
                self._memory.fill(rows, count * memory.self_row_bytes, most)

        def read_one(k: int) -> None:
            filling(group.num_self_rows)
            made = group.made_for(k)
            rows.neighbor[made] = 0
            self._add_all(group.only(k), rows)
            if len(group.scale):
                rows.neighbor[made] *= group.scale[made, None]

        def read_all() -> None:
            self._add_all(group, rows, filling)
            scale_rows(rows.neighbor, group.scale)

        with self._passes.each():
            done, error = read_all_or_each(len(group.batches), read_all, read_one)
        return FinishedScan.of(done, error, group, rows)

    def room_for(self, scan: SharedScan, turn: int, gives_back: bool = True) -> ScanRows:
        """Memory for a scan's aggregates, zeros, and the rows it keeps; gives_back: whether batches that were served do."""
        shape = scan.num_rows, scan.num_self_rows, self._load.width
        return self._memory.take(shape, scan.start[1:] * gives_back, turn, scan.in_file_order)

    def _add_all(self, scan: SharedScan, rows: ScanRows, filling: Callable[[int], None] | None = None) -> None:
        self.add_up(scan, rows, self.pieces(scan), filling)

    def pieces(self, scan: SharedScan) -> Iterator[ScanPiece]:
        return pieces(scan.row, scan.first, self._rows, self._strategy.memory.piece_bytes)

    def add_up(
        self, scan: SharedScan, rows: ScanRows, todo: Iterator[ScanPiece], filling: Callable[[int], None] | None = None
    ) -> None:
        """Read pieces `todo` of a scan, a few ahead, and add them in their order to its aggregates so far (zeros at first).

        filling: called with the number of self rows that are in memory after each.
        """
        filled = 0
        for piece, values in self._ahead(map(self._announced, todo), self._read):
            entries = slice(int(piece.first[0]), int(piece.first[-1]))
            of_row = piece.first - piece.first[0]
            target, edge = scan.target[entries], scan.edge[entries]
            decoder = self._decoders[piece.part]
            if filling is not None:
                filled += int(np.count_nonzero(target < 0))
                filling(filled)
            scatter_aggregates(values, *decoder, piece.row_at, of_row, target, edge, rows.neighbor, rows.self_rows)
            del values  # before the next one is read

    def collate(self, served: ServedBatch) -> tuple[int, Any]:
        made: FinishedScan = served.group
        scan, rows, k = made.scan, made.rows, served.k
        sums, own = scan.sums[k], scan.own[int(scan.own_start[k]) : int(scan.own_start[k + 1])]
        if sums is None:
            neighbor = rows.part(k, slice(int(scan.start[k]), int(scan.start[k + 1])))
        else:
            neighbor = self._copy(rows.neighbor, sums, self._sums)
            rows.served(k)
        once = (
            k == 0 and not scan.in_file_order and len(own) > 0 and own[-1] == len(own) - 1
        )  # no node came twice: in its order
        if once and not self._load.buffers.pinned:
            self_row = rows.self_rows[: len(own)]
        else:
            self_row = self._copy(rows.self_rows, own, self._self_rows)
        return self._collate.collate(self._load.aggregated(scan.batches[k].drawn, neighbor, self_row))

    def _copy(self, rows: Floats, at: NDArray[np.int32], copies: RowCopies) -> Floats:
        """A batch's own copy of rows `at`, page-locked where a GPU follows."""
        copy = self._own((len(at), rows.shape[1]), copies)
        take_rows(rows, at, copy)
        return copy

    def stop(self) -> None:
        super().stop()
        self._memory.close()

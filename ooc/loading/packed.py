"""Packed batches: the rows of each batch lie together on disk before it is served (DiskGNN, Liu et al., 2024).

Batches are sampled ahead, as many as half of the given disk takes. One pass over the features in file order writes the rows of
each of them together, and a batch's own are read back in one run as it is served. So memory holds the first layer's aggregates
of the batches at the model alone, where a shared scan holds those of all its batches: packing is for deep fan-outs and little
memory, at the price of disk space, and of writing each row that a batch wants once and reading it once more. What a batch has
beside its rows waits on disk too. A batch is the same, to the bit, as gathered from memory.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats, scale_rows, scatter_aggregates
from ooc.loading.batch_bytes import COPIES, PIECES, PackBytes
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import RowLease, Stopped
from ooc.loading.packed_plan import DrawnBatch, Image, PackDraft, PackedBatch, PackedEntries, PackedGroup, Place, runs
from ooc.loading.packed_rows import GroupPass, PackWriter
from ooc.loading.read_strategy import ReadGroup, ServedBatch, grouped, read_all_or_each
from ooc.loading.scan_memory import RowCopies
from ooc.loading.shared_pass import PassSession, SharedPass
from ooc.loading.shared_scan import SharedScans
from ooc.loading.shared_scan_plan import ScanDraft, SharedScan
from ooc.runtime.clock import Clock
from ooc.runtime.clock import waiting as waits
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import is_full
from ooc.stores.io.pages import page_buffer
from ooc.stores.io.scratch import ScratchFile

WRITERS = 8
"""Threads that write pieces"""


@dataclass(frozen=True)
class FinishedGroup(ReadGroup):
    """Batches whose rows are packed."""

    batches: tuple[PackedBatch, ...]


class RowRun(NamedTuple):
    """Rows first:last of a batch, which are read back at once, from byte `at` of the file on."""

    first: int
    last: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class PackedBatches(SharedPass):
    """One pass over the file packs the rows of as many batches as half of the disk takes; `memory` has both limits.

    folder: where the file without a name is, of which an epoch has one.
    """

    memory: PackBytes
    folder: Path
    stage = "pack"

    @property
    def scans(self) -> SharedScans:
        """The strategy of scans of one batch."""
        return SharedScans(self.stages, self.memory.scan)

    def over(self, rows: Rows) -> "PackedBatches":
        return replace(super().over(rows), memory=replace(self.memory, row_bytes=rows.row_bytes))

    def waiting(self, drawn: SampledBatch) -> DrawnBatch:
        """What a sampled batch wants of the rows, in their order."""
        draft = ScanDraft(1, self.memory.scan.self_row_bytes)  # a scan by itself
        draft.add(self.scans.waiting(drawn))
        size = self.memory.size(drawn, self.stages.sample.drawing_bytes(drawn.subgraph.nbytes))
        return DrawnBatch.of(draft.finish(), size)

    def session(self, clock: Clock, pool: int, lease: RowLease) -> "PackSession":
        return PackSession(self, clock, pool, lease)


class PackSession(PassSession):
    """Packs group after group in two halves of a file, while the group before serves its batches; see `PassSession`."""

    stage = PackedBatches.stage

    def __init__(self, strategy: PackedBatches, clock: Clock, pool: int, lease: RowLease) -> None:
        super().__init__(strategy, clock, pool, lease, 2 * PIECES)  # of rows to pack, and of packed ones
        self.prepare, self.memory = strategy.waiting, strategy.memory
        self._neighbor, self._self_rows = RowCopies(COPIES), RowCopies(COPIES)
        self._changed, self._served = threading.Condition(), 0
        self._file = ScratchFile(strategy.folder)
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="ooc-piece")

    def plan(self, batches: Iterator[DrawnBatch]) -> Iterator[PackedGroup]:
        drafts = self._drafts()
        if self._first_alone:
            yield from grouped(islice(batches, 1), drafts)
        yield from grouped(batches, drafts, self._passes.ends)

    def _drafts(self) -> Iterator[PackDraft]:
        """Each once its half of the disk is free."""
        largest = 0
        for turn in count():
            self._wait_for(turn - 1)
            draft = PackDraft(self.pool, self.memory, turn % 2 * self.memory.group_disk, largest, self._write)
            yield draft
            largest = draft.largest

    def _wait_for(self, groups: int) -> None:
        """Wait until so many groups are served. Raises Stopped."""
        with self._changed, waits():
            self._changed.wait_for(lambda: self._stopped or self._served >= groups)
        if self._stopped:
            raise Stopped

    def _write(self, image: Image, place: Place) -> None:
        content = image.content()
        with _less_would_do():
            self._file.reserve(place.at, place.nbytes)
            self._file.store(place.at, content)
        self._load.counts.add(written=place.nbytes)

    def read(self, group: PackedGroup) -> FinishedGroup:
        """Pack the rows of a group."""

        def pack_one(k: int) -> None:
            self.pack(group.only(k))

        with self._passes.each():
            done, error = read_all_or_each(len(group.batches), lambda: self.pack(group), pack_one)
        return FinishedGroup(done, error, group.batches)

    def pack(self, group: PackedGroup) -> None:
        """Read the rows that the group wants, and write each batch's together."""
        with _less_would_do():
            for batch in group.batches:
                self._file.reserve(batch.rows_at, max(1, self.memory.packed_bytes(batch.num_rows)))
        writer = PackWriter(group, self._file, self.memory, self._writers)
        try:
            for piece, values in self._ahead(map(self._announced, GroupPass(group, self._rows, self.memory)), self._read):
                with _less_would_do():
                    writer.add(piece, values)
            with _less_would_do():
                writer.finish()
        finally:
            writer.close()
        self._load.counts.add(written=writer.nbytes)

    def _read_run(self, run: RowRun) -> AnyArray:
        """The values of packed rows."""
        start = time.perf_counter()
        values = self._buffers.empty((run.nbytes,), np.dtype(np.uint8))
        self._file.load(run.at, values)
        self._count(start, 0, run.nbytes)
        return values

    def collate(self, served: ServedBatch) -> tuple[int, Any]:
        group: FinishedGroup = served.group
        batch = group.batches[served.k]
        scan: SharedScan = self._image(batch.rest)
        shape = scan.num_rows, self._load.width
        neighbor, self_rows = self._own(shape, self._neighbor), self._own((scan.num_self_rows, shape[1]), self._self_rows)
        self._add_up(batch, self._image(batch.entries), neighbor, self_rows)
        scale_rows(neighbor, scan.scale)
        if served.k + 1 == group.done:
            with self._changed:
                self._served += 1
                self._changed.notify_all()
        own = scan.own
        if len(own) != len(self_rows) or (own != np.arange(len(own))).any():  # a node came twice
            self_rows = self_rows[own]
        return self._collate.collate(self._load.aggregated(scan.batches[0].drawn, neighbor, self_rows))

    def _image(self, place: Place) -> Any:
        content = page_buffer(place.nbytes)
        self._file.load(place.at, content)
        self._load.counts.add(0, place.nbytes)
        return Image.value(place, content)

    def _add_up(self, batch: PackedBatch, entries: PackedEntries, neighbor: Floats, self_rows: Floats) -> None:
        """Add the batch's rows, in file order, to its aggregates."""
        neighbor[:] = 0
        dtype = np.dtype(np.uint16) if self._rows.dtype == np.float16 else self._rows.dtype  # all that kernels know of it
        for run, content in self._ahead(iter(self._runs(batch)), self._read_run):
            first = entries.first[run.first : run.last + 1].astype(np.int64)
            mine = slice(int(first[0]), int(first[-1]))
            target, edge = entries.target[mine], entries.edge[mine]
            values, at = content.view(dtype), self._row_at(run.last - run.first, dtype.itemsize)
            scatter_aggregates(values, *self._load.decoders[0], at, first - first[0], target, edge, neighbor, self_rows)
            del content, values  # before the next one is read

    def _runs(self, batch: PackedBatch) -> list[RowRun]:
        """A batch's rows in runs of whole pieces."""
        memory = self.memory
        rows = memory.piece_bytes // memory.row_bytes
        most = rows * max(1, memory.scan.piece_bytes // memory.piece_bytes)
        return [
            RowRun(first, last, batch.rows_at + memory.packed_bytes(first), memory.packed_bytes(last - first))
            for first, last in runs(batch.num_rows, most)
        ]

    def _row_at(self, count: int, itemsize: int) -> NDArray[np.int64]:
        """Where each of the rows of a run begins among its values."""
        memory, row = self.memory, np.arange(count)
        piece, place = np.divmod(row, memory.piece_bytes // memory.row_bytes)
        return (piece * memory.piece_bytes + place * memory.row_bytes) // itemsize

    def stop(self) -> None:
        super().stop()
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """End the threads that read and write, and give the disk back. Not while batches are packed."""
        self.stop()
        self._readers.shutdown()
        self._writers.shutdown()
        self._file.close()
        super().end()


@contextmanager
def _less_would_do() -> Iterator[None]:
    """Say of a disk that is full that `pack` may be smaller."""
    try:
        yield
    except StoreError as error:
        if not is_full(error.__cause__):
            raise
        raise StoreError(f"{error}, or give less to `pack`") from error

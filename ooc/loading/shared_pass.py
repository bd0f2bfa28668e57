"""Passes over the features in file order that serve many batches: what shared scans and packed batches have in common.

A session has threads of its own that read pieces a few ahead, and a lease of the rows, by which a second loader over the same
rows knows that it must do with less memory.
"""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import Floats
from ooc.loading.batch_bytes import PIECES, PackBytes, ScanBytes
from ooc.loading.feature_cache import RowLease, Stopped, registry_of
from ooc.loading.host_passes import HostPasses
from ooc.loading.read_strategy import ReadSession, ReadStrategy, chained, clocks_of, first_alone
from ooc.loading.scan_memory import RowCopies
from ooc.loading.shared_scan_plan import ScanPiece
from ooc.runtime.buffers import Buffers
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import SECOND_SHARE, MemoryPlan
from ooc.runtime.pipeline import Pipeline
from ooc.runtime.range_io import ahead
from ooc.stores.arrays.segment_rows import SegmentRows

T = TypeVar("T")


@dataclass(frozen=True)
class SharedPass(ReadStrategy):
    """One pass over the file serves as many batches as `memory` allows."""

    memory: Any
    """of the batches of a pass: `ScanBytes` or `PackBytes`"""
    stage: ClassVar[str]
    """what a pass is called in times and failures"""

    @abstractmethod
    def session(self, clock: Clock, pool: int, lease: RowLease) -> "PassSession":
        """The strategy at work on an epoch, with `pool` bytes."""

    def shared(self, pool: int, parts: int) -> Self:
        """The same strategy for a pipeline that has `pool` bytes, one of so many parts of all."""
        memory: ScanBytes | PackBytes = self.memory.shared(pool, parts)
        return replace(self, stages=replace(self.stages, sample=self.stages.sample.shared(memory, parts)), memory=memory)

    def pipeline(self, cursors: Iterator[Cursor], budget: MemoryPlan, prefetch: int, clocks: dict[str, Clock]) -> Pipeline:
        own = clocks_of(clocks, ("sample", "group", "read", self.stage, "collate"))
        return chained(self._begun(self.pool(budget), own["read"]), cursors, own)

    def _begun(self, pool: int, clock: Clock) -> "PassSession":
        """A session; with less memory and disk where another loader reads the same rows at the same time."""
        assert self.disk_rows is not None
        lease = registry_of(self.disk_rows).begin_scans()
        try:
            if lease.alone:
                return self.session(clock, pool, lease)
            pool //= SECOND_SHARE
            return self.shared(pool, SECOND_SHARE).session(clock, pool, lease)
        except BaseException:
            lease.end()
            raise


class PassSession(ReadSession):
    """A session that reads pieces of the file by threads of its own.

    pool: bytes for all batches alive at once, and what serves them. clock: of the reads; see `first_alone`. lease: None where
    nobody else may read the rows. readers: threads.
    """

    def __init__(self, strategy: SharedPass, clock: Clock, pool: int, lease: RowLease | None, readers: int) -> None:
        rows, stages = strategy.disk_rows, strategy.stages
        assert rows is not None
        self._rows, self._load, self._collate = rows, stages.load, stages.collate
        self.sample, self.pool = stages.sample, pool
        self._buffers = Buffers(kept=PIECES, direct=True, least_bytes=1)
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="ooc-piece")
        self._clock, self._lock, self._lease = clock, threading.Lock(), lease
        self._first_alone = first_alone([rows], clock)
        self._passes = HostPasses([rows], self.sample.order)
        self._stopped = False

    def _ahead(self, todo: Iterator[T], read: Callable[[T], NDArray[Any]]) -> Iterator[tuple[T, NDArray[Any]]]:
        """What is read of each, a few ahead. Raises Stopped."""
        return ahead(self._readers, lambda each: (each, read(each)), self._while_wanted(todo), PIECES)

    def _while_wanted(self, todo: Iterator[T]) -> Iterator[T]:
        for each in todo:
            if self._stopped:
                raise Stopped
            yield each

    def _announced(self, piece: ScanPiece) -> ScanPiece:
        """The piece, which is about to be read by another thread."""
        if piece.plan is not None and isinstance(piece.rows, SegmentRows) and piece.rows.sharing is not None:
            piece.rows.sharing.expect(piece.plan)
        return piece

    def _read(self, piece: ScanPiece) -> NDArray[Any]:
        """The values of a piece's extents, or of its rows one behind the other."""
        start = time.perf_counter()
        values, nbytes = piece.read(self._buffers)
        self._count(start, len(piece.row_at), nbytes)
        return values

    def _count(self, start: float, rows: int, nbytes: int) -> None:
        """A read that began at `start` is done."""
        with self._lock:
            self._clock.worked(self._clock.items, start, time.perf_counter(), [])
            self._clock.items += 1
        self._load.counts.add(rows, nbytes)

    def _own(self, shape: tuple[int, int], copies: RowCopies) -> Floats:
        """Memory for a batch's rows, uninitialised; page-locked where a GPU follows."""
        buffers = self._load.buffers
        return buffers.empty(shape, np.dtype(np.float32)) if buffers.pinned else copies.take(shape)

    def stop(self) -> None:
        """End all waiting, and reads that have not begun. It may come from a collection in the middle of anything, in a thread
        that holds the lock of `_readers` too."""
        if self._lease is not None:
            self._lease.stop()
        self._stopped = True
        self._passes.end()

    def closing(self) -> None:
        if self._lease is not None:
            self._lease.stopping = True

    def end(self) -> None:
        """End the threads that read. Not while rows are read."""
        self.stop()
        self._readers.shutdown()
        if self._lease is not None:
            self._lease.end()

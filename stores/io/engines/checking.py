"""`CheckingEngine`: an engine that compares chunks with their checksums."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.io.chunk_sums import ChunkSums
from ooc.stores.io.engines import Engine
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.io.segments import Segments

_LEAST_BYTES = 2**16
"""of adjacent extents, if there are several such runs; checking shorter ones takes longer than a hundredth of reading them"""


class CheckingEngine:
    """Wraps an engine over segments with checksums; it returns what the engine does.

    By default the chunks that reads deliver whole, at once or in parts, are compared as they are read, each once. With
    `all_chunks` every chunk that a read touches is compared first, and read whole for it.

    >>> CheckingEngine(open_engine("auto", segments), segments, all_chunks=True).read(plan, buffer)
    """

    def __init__(self, engine: Engine, segments: Segments, all_chunks: bool = False) -> None:
        assert segments.sums is not None
        self.inner = engine
        self.name, self.alignment, self.reaches_device = engine.name, engine.alignment, engine.reaches_device
        self.reason, self.note = engine.reason, engine.note
        self._segments, self._sums, self.all_chunks = segments, segments.sums, all_chunks

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        self._check(plan)
        nbytes = self.inner.read(plan, buffer)
        if self._sums.pending and isinstance(buffer, np.ndarray):  # else it is in the memory of a GPU
            see_extents(self._sums, plan, buffer, self._segments.total)
        return nbytes

    def gather(self, plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None = None) -> int:
        self._check(plan)
        return self.inner.gather(plan, out, at)

    def registered(self, buffer: Any) -> Any:
        """As of an engine that reaches a device."""
        return self.inner.registered(buffer)  # type: ignore[attr-defined]

    def _check(self, plan: ReadPlan) -> None:
        if self.all_chunks:
            self._segments.check(plan.offset, plan.length)

    def close(self) -> None:
        self.inner.close()


def see_extents(sums: ChunkSums, plan: ReadPlan, buffer: NDArray[np.uint8], total: int) -> None:
    """Show the extents of a plan, concatenated in `buffer`, to the checksums of an array of `total` bytes."""
    if not len(plan.offset):
        return
    first = np.flatnonzero(np.append(True, plan.offset[1:] != plan.offset[:-1] + plan.length[:-1]))  # of adjacent extents
    begin, nbytes = plan.offset[first], np.add.reduceat(plan.length, first)
    at = np.cumsum(nbytes) - nbytes
    worth = np.flatnonzero(nbytes >= _LEAST_BYTES) if len(first) > 1 else np.arange(1)
    for low, size, where in zip(begin[worth].tolist(), nbytes[worth].tolist(), at[worth].tolist(), strict=True):
        sums.see(low, buffer[where : where + min(size, total - low)])

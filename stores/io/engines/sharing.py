"""`SharingEngine`: an engine whose reads processes of one host share: what one has read, the others copy from memory."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.io.block_table import (
    ACTIVE,
    BLOCK_BYTES,
    KEY,
    PROGRESS,
    Ints,
    arrived,
    claim,
    copy_runs,
    publish,
    runs_of,
    sound,
    split,
    wanted_pages,
)
from ooc.stores.io.engines import Engine
from ooc.stores.io.engines.deliver import Ranges, deliver
from ooc.stores.io.engines.tasks import rows_of, whole_extents
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.io.segments import Segments
from ooc.stores.io.shared_blocks import SharedBlocks
from ooc.stores.io.threads import ahead
from ooc.stores.jit import kernel

SPARSE = 8
"""Plans whose extents are less than 1/8 of what they span are not shared: few pages of two such plans are the same (where each
wants a share p of the pages, sharing saves p / 2 of the bytes)"""
AT_ONCE_BYTES = 4 * 2**20
"""divided between what is there, what others read and what is to be read; three such parts in flight keep a disk busy"""
PENDING_SECONDS = 0.25
"""that pages which another member reads are waited for in any case, if it lives; longer while the pass has patience left"""
_GONE_SECONDS = 0.05
"""between two looks at who is still there"""
_PAUSE, _NEVER = 0.0002, 2**62
_THERE, _OTHERS, _MINE = 2, 3, 4
"""columns of what `claim` finds"""


class SharingEngine:
    """Wraps an engine over segments; between `begin_pass` and `end_pass` its reads are shared with other processes.

    Passes go through the array from front to back, in plans of ascending extents. A member that is ahead waits for the others,
    since what they have not taken it cannot keep for them in bounded memory: altogether no longer in a pass than its patience,
    not for one that has ended, and not again for one that did not move meanwhile. Bytes are the same whoever reads them, and
    nobody depends on another one: what does not come is read here.

    patience: seconds.

    >>> engine = SharingEngine(open_engine("auto", segments), segments, blocks, patience=2.0)
    >>> engine.begin(blocks.session_key("train"))
    >>> engine.begin_pass()
    >>> engine.read(plan, buffer)  # the bytes that this process read from the disk
    """

    def __init__(self, engine: Engine, segments: Segments, blocks: SharedBlocks, patience: float) -> None:
        self.inner = engine
        self.name, self.alignment, self.reaches_device = engine.name, engine.alignment, engine.reaches_device
        self.reason, self.note = engine.reason, engine.note
        self._segments, self.blocks, self.patience = segments, blocks, patience
        self._total, self._span = segments.total, segments.total // BLOCK_BYTES + 1
        name = f"{segments.paths[0].resolve()} {self._total}" if segments.paths else ""
        lane = blocks.lane(name) if segments.paths else None
        self._lane = -1 if lane is None else lane
        self._reading = blocks.reading[self._lane, blocks.member]
        self._lock, self._waiting = threading.Lock(), 0
        self._under_way: list[int] = []
        """first blocks of the reads in progress, and of those that were announced"""
        self._expected: list[int] = []
        """of the latter"""
        self._number, self._session, self._reached, self._sharing = -1, 0, 0, False
        self._left = 0.0
        self._in_vain: NDArray[np.int64] | None = None
        """how far members were when waiting for them had led to nothing"""

    # Passes

    def begin(self, session: int) -> None:
        """The passes of a session follow (see `SharedBlocks.session_key`): others may wait for this process from now on."""
        if self._lane < 0:
            return
        self._number, self._session = -1, session
        self._reading[PROGRESS] = 0
        self._reading[KEY] = session
        self._reading[ACTIVE] = 1

    def begin_pass(self) -> None:
        """The next pass over the array begins."""
        if self._lane < 0:
            return
        self._number += 1
        self._reached = 0
        with self._lock:
            for block in self._expected:  # of a pass that was broken off
                self._under_way.remove(block)
            self._expected.clear()
        self._reading[PROGRESS] = self._number * self._span
        vain, self._in_vain = self._in_vain is not None and np.array_equal(self._in_vain, self._others()), None
        self._left = 0.0 if vain else self.patience
        self._sharing = True

    def end_pass(self) -> None:
        """The pass is through, or broken off."""
        if self._sharing:
            self._sharing = False
            self._reading[PROGRESS] = (self._number + 1) * self._span

    def end(self) -> None:
        """No pass follows; nobody waits for this process any more. Idempotent; from any thread, in a collection too."""
        self._sharing = False
        if self._lane >= 0:
            self._reading[ACTIVE] = 0

    def _others(self) -> NDArray[np.int64]:
        """How far the other members are."""
        return np.delete(self.blocks.reading[self._lane, :, PROGRESS], self.blocks.member)

    # Reads

    def expect(self, plan: ReadPlan) -> None:
        """A plan is about to be read by another thread; without it, a thread that overtakes that one would hide it."""
        if self._shares(plan):
            self._expected.append(place := int(plan.offset[0]) // BLOCK_BYTES)
            self._moved(None, place)

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        if not self._shares(plan) or not isinstance(buffer, np.ndarray):  # else it is in the memory of a GPU
            return self.inner.read(plan, buffer)
        whole_extents(plan, buffer)  # checks the buffer
        return self._read(plan, buffer)

    def gather(self, plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None = None) -> int:
        if not self._shares(plan):
            return self.inner.gather(plan, out, at)
        ranges, nbytes = rows_of(plan, out, at), 0
        for first, last, content, read in ahead(self._pieces(plan)):
            _deliver_extents(ranges, first, last, plan.length, content.ctypes.data)
            nbytes += read
        return nbytes

    def registered(self, buffer: Any) -> Any:
        """As of an engine that reaches a device."""
        return self.inner.registered(buffer)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.end()
        self.inner.close()

    def _shares(self, plan: ReadPlan) -> bool:
        if not self._sharing or not len(plan.offset) or not self.blocks.works:
            return False
        return SPARSE * plan.nbytes >= int(plan.offset[-1] + plan.length[-1] - plan.offset[0])

    def _pieces(self, plan: ReadPlan) -> Iterator[tuple[int, int, NDArray[np.uint8], int]]:
        """(first, last, content, bytes from the disk) of runs of extents, in their order."""
        ends, first, done = np.cumsum(plan.length), 0, 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, done + AT_ONCE_BYTES, side="right")))
            part = _extents(plan.row_bytes, plan.offset[first:last], plan.length[first:last])
            content = np.empty(part.nbytes, np.uint8)
            yield first, last, content, self._read(part, content)
            first, done = last, int(ends[last - 1])

    def _read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        count = split(plan.offset, plan.length, self._total, np.empty((0, 4), np.int64))
        parts = np.empty((count, 4), np.int64)
        split(plan.offset, plan.length, self._total, parts)
        if not count:
            return 0
        place = int(parts[0, 0])
        try:
            self._expected.remove(place)
        except ValueError:  # nobody announced it
            self._moved(None, place)
        begin = nbytes = 0
        most = max(1, min(AT_ONCE_BYTES // BLOCK_BYTES, self.blocks.slot_count // 4))
        block, mask = np.empty((2, most), np.int64)
        try:
            while begin < count:
                blocks, end = wanted_pages(parts, begin, most, block, mask)
                own, read = self._some(parts[begin:end], block[:blocks], mask[:blocks], buffer)
                nbytes += read
                begin += own
                reached = int(parts[begin, 0]) if begin < count else int(parts[-1, 0]) + 1
                self._moved(place, reached)
                place = reached
            return nbytes
        finally:
            self._moved(place, None)

    def _moved(self, before: int | None, place: int | None) -> None:
        """A read that was at block `before` is at `place`; None: it begins, or ends. This process has what is before all."""
        with self._lock:
            if before is not None:
                self._under_way.remove(before)
            if place is not None:
                self._under_way.append(place)
            self._reached = max(self._reached, min(self._under_way, default=before or 0))
            self._reading[PROGRESS] = self._number * self._span + self._reached

    def _some(self, parts: Ints, block: Ints, mask: Ints, buffer: NDArray[np.uint8]) -> tuple[int, int]:
        """Read the first of these blocks, as many as there is room for: (parts that are done, bytes from the disk)."""
        found = self._claimed(block, mask)
        blocks = self.blocks
        if not len(found):  # no slot: all are being read into
            runs = np.array([[parts[0, 0] * BLOCK_BYTES + parts[0, 1], parts[0, 3], 0, parts[0, 2]]])
            return 1, self._alone(runs, buffer)
        done = len(parts) if len(found) == len(block) else int(np.searchsorted(parts[:, 0], block[len(found)]))
        parts, me, data = parts[:done], blocks.member, blocks.data.ctypes.data
        mine, there = _runs(parts, found, _MINE), _runs(parts, found, _THERE)
        try:
            nbytes = self._alone(mine, buffer)
            copy_runs(mine, buffer.ctypes.data, 1, data, 2)
        except BaseException:
            with blocks.locked():
                publish(blocks.slots, blocks.pages, me, found, False)
            raise
        copy_runs(there, data, 2, buffer.ctypes.data, 1)
        with blocks.locked():
            publish(blocks.slots, blocks.pages, me, found, True)
            fine = sound(blocks.slots, blocks.pages, me, found, _THERE) and blocks.works
        if not fine:
            nbytes += self._alone(there, buffer)
        return done, nbytes + self._of_others(parts, found, buffer)

    def _claimed(self, block: Ints, mask: Ints) -> Ints:
        """What there is of the first of these blocks, as of `claim`; waits for members that are behind, within reason."""
        blocks, found = self.blocks, np.empty((len(block), 5), np.int64)
        who, begin = (blocks.member, self._lane, self._session), self._number * self._span
        table = blocks.header, blocks.slots, blocks.pages, blocks.reading
        force, start = False, time.monotonic()
        with self._lock:
            self._waiting += 1
        try:
            while True:
                with blocks.locked():
                    count = claim(*table, who, begin, force, block, mask, found) if blocks.works else 0
                if count or force or not blocks.works:
                    return found[:count]
                force = self._pause(start)
        finally:
            with self._lock:
                self._waiting -= 1

    def _pause(self, start: float) -> bool:
        """Wait a little for what has to go; True if this has been in vain. start: when waiting began."""
        begun = time.monotonic()
        time.sleep(_PAUSE)
        if begun - start > _GONE_SECONDS:
            self.blocks.look_for_gone()
        others = self._others()
        if others.min(initial=_NEVER) >= self._reading[PROGRESS]:  # for reads of this process, which are under way
            return begun - start > self.patience
        self._left -= (time.monotonic() - begun) / self._waiting
        if self._left <= 0:
            self._in_vain = others
        return self._left <= 0

    def _of_others(self, parts: Ints, found: Ints, buffer: NDArray[np.uint8]) -> int:
        """Copy the pages that other members read, once they are there; those that do not come are read here."""
        runs, blocks = _runs(parts, found, _OTHERS), self.blocks
        if not len(runs):
            return 0
        start = looked = time.monotonic()
        while (lacking := arrived(blocks.header, blocks.slots, blocks.pages, found)) > 0:
            begun = time.monotonic()
            if begun - start > PENDING_SECONDS and self._left <= 0:
                break
            time.sleep(_PAUSE)
            if begun - looked > _GONE_SECONDS:
                blocks.look_for_gone()
                looked = begun
            if begun - start > PENDING_SECONDS:
                self._left -= time.monotonic() - begun
        if lacking == 0:
            copy_runs(runs, blocks.data.ctypes.data, 2, buffer.ctypes.data, 1)
            with blocks.locked():
                if sound(blocks.slots, blocks.pages, blocks.member, found, _OTHERS) and blocks.works:
                    return 0
        return self._alone(runs, buffer)

    def _alone(self, runs: Ints, buffer: NDArray[np.uint8]) -> int:
        """Read runs of pages from the disk to their places in the buffer; returns the bytes read."""
        if not len(runs):
            return 0
        plan = _extents(1, *_joined(runs, self.alignment))
        begin, end = int(runs[0, 1]), int(runs[-1, 1] + runs[-1, 3])
        room = buffer[begin : begin + plan.nbytes]
        if len(room) == plan.nbytes and end - begin <= plan.nbytes and int(runs[:, 3].sum()) == end - begin:
            return self.inner.read(plan, room)
        apart = np.empty(plan.nbytes, np.uint8)
        nbytes = self.inner.read(plan, apart)
        own = np.column_stack([np.cumsum(runs[:, 3]) - runs[:, 3], runs[:, 1], runs[:, 2], runs[:, 3]])
        copy_runs(own, apart.ctypes.data, 0, buffer.ctypes.data, 1)
        return nbytes


def _runs(parts: Ints, found: Ints, column: int) -> Ints:
    """See `runs_of`."""
    most = int(np.bitwise_count(found[:, column].view(np.uint64)).sum())
    out = np.empty((most, 4), np.int64)
    return out[: runs_of(parts, found, column, out)] if most else out


def _joined(runs: Ints, alignment: int) -> tuple[Ints, Ints]:
    """(offset, length) of extents over runs, of which adjacent ones share an extent. The last one may end within a page."""
    first = np.append(True, runs[1:, 0] != runs[:-1, 0] + runs[:-1, 3])
    offset = runs[first, 0]
    length = np.add.reduceat(runs[:, 3], np.flatnonzero(first))
    length[-1] = -(-length[-1] // alignment) * alignment
    return offset, length


def _extents(row_bytes: int, offset: Ints, length: Ints) -> ReadPlan:
    """A plan without places of rows."""
    nothing = np.empty(0, np.int64)
    return ReadPlan(row_bytes, offset, length, nothing, nothing, np.zeros(len(offset) + 1, np.int64))


@kernel
def _deliver_extents(ranges: Ranges, first: int, last: int, length: Ints, content: int) -> None:
    """Copy the rows of extents first:last, which lie one behind the other at the address `content`."""
    at = 0
    for j in range(first, last):
        deliver(ranges, j, ranges.first[j], 0, length[j], content + at)
        at += length[j]

"""Reads through io_uring with O_DIRECT: one thread keeps the disk's queue full at a fifth of a core.

A numba kernel without the GIL divides the extents into pieces, keeps many of them in flight, and copies the requested bytes of
each piece when it completes, in any order. The queue depth costs no threads, as in DiskGNN and GIDS' storage path.
"""

import os
import threading
from concurrent.futures import wait
from errno import EAGAIN, EBUSY, EINTR
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ooc.stores.atomics import load_acquire, store_release
from ooc.stores.errors import StoreError
from ooc.stores.io.engines.deliver import Ranges, deliver, first_reaching
from ooc.stores.io.engines.pread import ALIGNMENT, PreadEngine
from ooc.stores.io.engines.ring import (
    DEPTH,
    LARGE_BYTES,
    SMALL_BYTES,
    Ring,
    RingParts,
    enter,
    prepare_read,
)
from ooc.stores.io.engines.tasks import Begun, whole_extents
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.io.threads import SharedPool
from ooc.stores.jit import kernel

RINGS = SharedPool("ooc-ring", 4)
"""threads that own a ring each, created with their first request: four requests at once and at most 64 MiB of scratch in the
process"""
TRIES = 5000
"""times a read is retried that the system cannot accept (EAGAIN), at least 100 microseconds apart: half a second"""
_PAUSE_US = 100
_BATCH = 16  # short completions awaited together: few system calls, and data still in the CPU cache

DONE, MORE, AGAIN, FAILED = 0, 1, 2, 3
"""result of a completion: piece complete, rest must be read, must be retried, or failed"""
_FINE, _SHORT = -1, 0  # instead of an errno

_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_local = threading.local()
Ints = NDArray[np.int64]


class UringEngine(PreadEngine):
    """Direct reads (O_DIRECT), up to `depth` short and 24 long ones in flight per request, by a thread that owns an io_uring.

    If the file system refuses O_DIRECT, reads go through the page cache, and `reason` says so. `read` fills a page-aligned
    buffer directly, which a fork must not copy meanwhile (open(2)): see `ooc.runtime.buffers`.

    >>> engine = UringEngine(segments)
    >>> engine.read(plan_reads(ids, 512, count=n), buffer)
    """

    name = "uring"
    threads = RINGS
    most_depth = DEPTH

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        return self._run(plan, whole_extents(plan, buffer), buffer)

    def _run(self, plan: ReadPlan, ranges: Ranges, whole: NDArray[np.uint8] | None = None) -> int:
        """`whole` is the memory of the ranges if complete extents are requested, one after another."""
        stop = np.zeros(1, np.uint32)
        direct = whole is not None and ranges.out % ALIGNMENT == 0
        job = Job(plan.offset, plan.length, self._fds, self._start, ranges, direct, self.depth, stop)
        with self._gate.reading():
            begun = Begun()
            try:
                future = self._pool.submit(begun.run, self._serve, job, whole if direct else None)
                wait([future])
            except BaseException:
                stop[0] = 1
                begun.stop()
                raise
        return future.result()

    def _serve(self, job: "Job", direct: NDArray[np.uint8] | None) -> int:
        if not hasattr(_local, "ring"):
            _local.ring = Ring()
        nbytes, file, offset, error, lost = serve(_local.ring.parts, job)
        if lost:
            _local.__dict__.pop("ring").abandon(*([] if direct is None else [direct]))
            raise StoreError(
                f"{self._segments.paths[0]} cannot be read: io_uring fails with {os.strerror(error)}; choose pread"
            )
        if error != _FINE:
            self._fail(file, offset, error)
        return nbytes


class Job(NamedTuple):
    """A request as kernels see it: extents of virtual bytes, and the ranges to copy from them.

    `depth` limits the short reads in flight. A nonzero `stop` ends the request when the reads in flight have completed.
    """

    extent_offset: Ints
    extent_length: Ints
    fds: NDArray[np.int32]
    start: Ints
    ranges: Ranges
    direct: bool
    """whether complete extents go to an aligned address, so that the disk writes to their destination"""
    depth: int
    stop: NDArray[np.uint32]


@kernel
def serve(ring: RingParts, job: Job) -> tuple[int, int, int, int, int]:
    """Execute a request; returns the bytes read, file, byte and errno of its first failure, and the reads in flight.

    The last is 0 unless the system accepts no more reads from the ring, which must then not be reused.
    """
    slots = len(ring.slots)
    free = np.arange(slots)  # a stack of short slots, followed from DEPTH on by one of long slots
    depth = min(job.depth, DEPTH)
    left = np.array([depth, slots - DEPTH])
    cursor = np.zeros(3, np.int64)
    total = file = at = in_flight = ready = failures = 0
    error = _FINE
    while True:
        if error == _FINE and load_acquire(job.stop, 0) == 0:
            new = _fill(ring, job, cursor, free, left)
            in_flight += new
            ready += new
        if in_flight == 0:
            return total, file, at, error, 0
        taken = enter(
            ring.fd, ready, _awaited(in_flight, depth - left[0], slots - DEPTH - left[1], cursor[0] < len(job.extent_offset))
        )
        if taken >= 0:
            ready -= taken
            failures = 0
        elif (taken == -EAGAIN or taken == -EBUSY) and failures < TRIES:
            failures += 1
            _usleep(np.uint32(_PAUSE_US))
        elif taken != -EINTR:
            return total, file, at, -taken, in_flight
        ended, repeated, nbytes, bad_slot, bad = reap(ring, job, free, left, error == _FINE)
        in_flight -= ended
        ready += repeated
        total += nbytes
        if bad != _FINE and error == _FINE:
            error, file = bad, ring.slots[bad_slot]["file"]
            at = ring.slots[bad_slot]["offset"] + ring.slots[bad_slot]["done"]


@kernel
def _awaited(in_flight: int, short: int, long: int, more: bool) -> int:
    """Number of completions to wait for, few enough that the remaining reads keep the disk busy during copying.

    `more` says whether further reads follow.
    """
    return max(1, min(short // 8, _BATCH) + long // 8) if more else min(in_flight, _BATCH)


@kernel
def _fill(ring: RingParts, job: Job, cursor: Ints, free: Ints, left: Ints) -> int:
    """Prepare reads while there are extents and free slots; the cursor is the next extent, virtual byte and range."""
    new = 0
    while cursor[0] < len(job.extent_offset):
        j = cursor[0]
        low = max(cursor[1], job.extent_offset[j])
        end = min(job.extent_offset[j] + job.extent_length[j], job.start[-1])
        if low >= end:
            cursor[0] += 1
            continue
        file = np.searchsorted(job.start, low, side="right") - 1
        wanted = min(LARGE_BYTES, min(end, job.start[file + 1]) - low)
        kind = 0 if wanted <= SMALL_BYTES else 1
        if left[kind] == 0:
            break
        left[kind] -= 1
        number = free[kind * DEPTH + left[kind]]
        p = first_reaching(job.ranges, j, cursor[2], low - job.extent_offset[j])
        cursor[1], cursor[2] = low + wanted, p
        slot = ring.slots[number]
        slot["extent"], slot["row"], slot["low"] = j, p, low
        slot["file"], slot["offset"] = file, low - job.start[file]
        slot["wanted"], slot["done"], slot["tries"] = wanted, 0, 0
        _request(ring, job, number)
        new += 1
    return new


@kernel
def _request(ring: RingParts, job: Job, number: int) -> None:
    """Prepare the read of what a slot still lacks, its end rounded up to the alignment, possibly beyond the file's end."""
    slot = ring.slots[number]
    done = slot["done"]
    length = -(-slot["wanted"] // ALIGNMENT) * ALIGNMENT - done
    prepare_read(ring, job.fds[slot["file"]], slot["offset"] + done, _address(ring, job, number) + done, length, number)


@kernel
def _address(ring: RingParts, job: Job, number: int) -> int:
    """Destination of a slot's piece: the scratch, unless it may be read in place (not a last page with a file footer)."""
    slot = ring.slots[number]
    if job.direct and slot["wanted"] % ALIGNMENT == 0:
        extent = slot["extent"]
        return job.ranges.out + job.ranges.extent_at[extent] + slot["low"] - job.extent_offset[extent]
    return ring.address + slot["scratch"]


@kernel
def reap(ring: RingParts, job: Job, free: Ints, left: Ints, going: bool) -> tuple[int, int, int, int, int]:
    """Process all completions; returns finished pieces, reads to repeat, bytes read, and slot and errno of the first failure.

    `going` says whether to copy data and repeat short reads, or only to let the request end.
    """
    ended = repeated = nbytes = bad_slot = 0
    error, pause = _FINE, False
    head, tail = ring.cq_head[0], load_acquire(ring.cq_tail, 0)
    while head != tail:
        cqe = ring.cqes[np.int64(head) & (len(ring.cqes) - 1)]
        number, result = cqe["user_data"], int(cqe["result"])
        head = np.uint32(head + np.uint32(1))
        slot = ring.slots[number]
        action, slot["done"] = judge(result, slot["done"], slot["wanted"], slot["tries"])
        if going and error == _FINE:
            if action == DONE:
                skipped = slot["low"] - job.extent_offset[slot["extent"]]
                piece = ring.address + slot["scratch"]
                if _address(ring, job, number) == piece:
                    deliver(job.ranges, slot["extent"], slot["row"], skipped, slot["wanted"], piece)
                nbytes += slot["wanted"]
            elif action == FAILED:
                error, bad_slot = -result if result < 0 else _SHORT, number
            else:
                if action == AGAIN:
                    slot["tries"] += 1
                    pause = True
                _request(ring, job, number)
                repeated += 1
                continue
        kind = 0 if number < DEPTH else 1
        free[kind * DEPTH + left[kind]] = number
        left[kind] += 1
        ended += 1
    store_release(ring.cq_head, 0, head)
    if pause:
        _usleep(np.uint32(_PAUSE_US))
    return ended, repeated, nbytes, bad_slot, error


@kernel
def judge(result: int, done: int, wanted: int, tries: int) -> tuple[int, int]:
    """Result of a completion (bytes read or -errno) of a piece with `done` of `wanted` bytes, and `done` after it.

    A short read continues from the last aligned byte; one without an aligned byte means the file ends there.
    """
    if result < 0:
        return AGAIN if (result == -EAGAIN or result == -EINTR) and tries < TRIES else FAILED, done
    if done + result >= wanted:
        return DONE, wanted
    aligned = result // ALIGNMENT * ALIGNMENT
    return MORE if aligned > 0 else FAILED, done + aligned

"""`pread` with O_DIRECT from many threads: a deep queue at the disk without using the page cache.

Each thread runs a numba loop without the GIL that reads an extent into its own scratch and copies the requested bytes on. The
number of threads is the queue depth, as in Ginex and GIDS' CPU path; io_uring needs less CPU time.
"""

import errno
import mmap
import os
import threading
from typing import ClassVar

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from ooc.stores.errors import StoreError
from ooc.stores.io.engines.deliver import Ranges, deliver, first_reaching
from ooc.stores.io.engines.tasks import Gate, rows_of, run_slices, whole_extents
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.io.segments import Segments, open_for_reading
from ooc.stores.io.threads import READERS, SharedPool
from ooc.stores.jit import kernel

ALIGNMENT = 4096
DEPTH = 128
"""short reads in flight on a disk that was not measured"""
SCRATCH_BYTES = 128 * 1024
"""per reading thread: 16 MiB in the whole process"""
_EINTR = errno.EINTR
_FINE, _SHORT = -1, 0  # in place of an errno

# ctypes pointers would silently turn numba's cache off; external functions do not.
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.intp, types.int64))
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())
_local = threading.local()
Ints = NDArray[np.int64]


def _scratch() -> tuple[NDArray[np.uint8], int]:
    """This thread's page-aligned scratch, and its address."""
    if not hasattr(_local, "scratch"):
        array = np.frombuffer(mmap.mmap(-1, SCRATCH_BYTES), np.uint8)
        _local.scratch = array, array.ctypes.data
    scratch: tuple[NDArray[np.uint8], int] = _local.scratch
    return scratch


class PreadEngine:
    """Direct reads (O_DIRECT), up to `depth` in flight per request and 128 in the process, each through 128 KiB of scratch.

    Set `depth` to that of the disk's profile (`DiskProfile.depth`). If the file system refuses O_DIRECT, reads go through the
    page cache without readahead, and `reason` says so.

    >>> engine = PreadEngine(segments)
    >>> engine.read(plan_reads(ids, 512, count=n), buffer)
    """

    name = "pread"
    alignment = ALIGNMENT
    reaches_device = False
    threads: ClassVar[SharedPool] = READERS
    most_depth = READERS.threads

    def __init__(self, segments: Segments) -> None:
        self.reason: str | None = None
        self.note: str | None = None
        self.depth = DEPTH
        self._segments = segments
        self._start = segments.start
        self._fds = self._open()
        self._pool = self.threads.acquire()
        self._gate = Gate(segments.paths[0] if segments.paths else "the array")

    def _open(self) -> NDArray[np.int32]:
        try:
            return self._open_all(os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise StoreError(f"{error.filename} cannot be opened: {error.strerror}") from error
            self.reason = f"the file system refuses O_DIRECT ({error.strerror}); reads go through the page cache"
        return self._open_all(0)

    def _open_all(self, flags: int) -> NDArray[np.int32]:
        fds: list[int] = []
        try:
            for path, payload in zip(self._segments.paths, self._segments.payload.tolist(), strict=True):
                fds.append(open_for_reading(path, payload, flags))
                if flags:
                    os.preadv(fds[-1], [memoryview(mmap.mmap(-1, ALIGNMENT))], 0)  # some file systems refuse only the read
                else:
                    os.posix_fadvise(fds[-1], 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = error.filename or path
            for fd in fds:
                os.close(fd)
            raise
        return np.array(fds, np.int32)

    def read(self, plan: ReadPlan, buffer: NDArray[np.uint8]) -> int:
        return self._run(plan, whole_extents(plan, buffer))

    def gather(self, plan: ReadPlan, out: NDArray[np.uint8], at: NDArray[np.int64] | None = None) -> int:
        return self._run(plan, rows_of(plan, out, at))

    def _run(self, plan: ReadPlan, ranges: Ranges) -> int:
        files = self._fds, self._start

        def work(begin: int, end: int) -> int:
            nbytes, file, offset, error = _serve(begin, end, plan.offset, plan.length, files, _scratch(), ranges)
            if error != _FINE:
                self._fail(file, offset, error)
            return nbytes

        with self._gate.reading():
            return run_slices(self._pool, min(self.depth, self.most_depth), plan, work)

    def _fail(self, file: int, offset: int, error: int) -> None:
        path = self._segments.paths[file]
        what = "the file ends there" if error == _SHORT else os.strerror(error)
        raise StoreError(f"{path} cannot be read at byte {offset}: {what}; verify the store or write it again")

    def close(self) -> None:
        if self._gate.close():
            for fd in self._fds.tolist():
                os.close(fd)
            self.threads.release()


@kernel
def _load(
    fds: NDArray[np.int32], start: NDArray[np.int64], position: int, nbytes: int, address: int
) -> tuple[int, int, int, int]:
    """Read virtual bytes [position, position + nbytes), or up to the end of their file, to `address`.

    Returns the useful bytes, the file, the byte in it, and an errno.
    """
    file = int(np.searchsorted(start, position, side="right")) - 1
    offset = position - int(start[file])
    needed = min(nbytes, int(start[file + 1]) - position)
    requested = -(-needed // ALIGNMENT) * ALIGNMENT
    done = 0
    while done < needed:
        got = _pread(np.int32(fds[file]), address + done, requested - done, offset + done)
        if got < 0:
            error = carray(_errno(), 1)[0]
            if error == _EINTR:
                continue
            return 0, file, offset + done, int(error)
        if done + got < needed:
            got = got // ALIGNMENT * ALIGNMENT  # the next read must be aligned too
            if got == 0:
                return 0, file, offset + done, _SHORT
        done += got
    return needed, file, offset, _FINE


@kernel
def _serve(
    begin: int,
    end: int,
    offset: Ints,
    length: Ints,
    files: tuple[NDArray[np.int32], Ints],
    own_scratch: tuple[NDArray[np.uint8], int],
    ranges: Ranges,
) -> tuple[int, int, int, int]:
    """Read extents begin:end through the scratch, piece by piece, and copy the ranges in them to the output.

    Returns the bytes read, and file, byte and errno of a failure.
    """
    fds, start = files
    scratch, address = own_scratch
    total = 0
    for j in range(begin, end):
        low, extent_end, p = offset[j], min(offset[j] + length[j], start[-1]), ranges.first[j]
        while low < extent_end:
            nbytes, file, at, error = _load(fds, start, low, min(len(scratch), extent_end - low), address)
            if error != _FINE:
                return total, file, at, error
            p = first_reaching(ranges, j, p, low - offset[j])
            deliver(ranges, j, p, low - offset[j], nbytes, address)
            low += nbytes
            total += nbytes
    return total, 0, 0, _FINE

"""io_uring through its system calls: sets up a ring, exposes its memory as arrays, and gives kernels what they need to drive
it.

A ring belongs to the thread that created it (SINGLE_ISSUER), so the system can deliver completions when that thread asks for
them (DEFER_TASKRUN) instead of interrupting it; kernels before 6.1 do without.
"""

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from ooc.stores.atomics import store_release
from ooc.stores.errors import StoreError
from ooc.stores.jit import kernel

DEPTH, SMALL_BYTES = 256, 16 * 1024
LARGE_DEPTH, LARGE_BYTES = 24, 512 * 1024
"""A ring keeps up to 256 short reads (as many as the disk's profile says) and 24 long ones in flight, each with its own slot in
the scratch. 2 MiB in flight saturate an otherwise idle machine; while rows are copied and a model computes, about 10 MiB are
needed (measured)."""
SCRATCH_BYTES = DEPTH * SMALL_BYTES + LARGE_DEPTH * LARGE_BYTES
"""16 MiB a ring, of which it takes what its reads have used"""

_SETUP, _ENTER = 425, 426  # system call numbers, the same on every architecture
_CLAMP, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 4, 1 << 12, 1 << 13
_SINGLE_MMAP, _NODROP, _RW_CUR_POS = 1 << 0, 1 << 1, 1 << 3
_FEATURES = _SINGLE_MMAP | _NODROP | _RW_CUR_POS  # the last came with the plain read, in 5.6
_SQES_AT = 0x10000000
_GETEVENTS = 1
_READ = 22
_ENTRIES = 512  # a power of two, at least the slots

SQE = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "u2"),
        ("fd", "i4"),
        ("offset", "i8"),
        ("address", "i8"),
        ("length", "u4"),
        ("rw_flags", "u4"),
        ("user_data", "i8"),
        ("rest", "i8", 3),
    ]
)
CQE = np.dtype([("user_data", "i8"), ("result", "i4"), ("flags", "u4")])
SLOT = np.dtype(
    [
        ("scratch", "i8"),  # start of the slot's bytes in the scratch
        ("extent", "i8"),  # of the plan
        ("row", "i8"),  # first of the extent's ranges in the piece, as an index of `order`
        ("low", "i8"),  # virtual byte
        ("file", "i8"),
        ("offset", "i8"),  # of `low` in the file
        ("wanted", "i8"),  # useful bytes
        ("done", "i8"),  # bytes read so far
        ("tries", "i8"),
    ]
)
"""a piece of an extent being read"""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_ABANDONED: list[NDArray[np.uint8]] = []
_MAP_FAILED = ctypes.c_void_p(-1).value

_long = types.int64
_syscall = types.ExternalFunction("syscall", _long(_long, _long, _long, _long, _long, _long, _long))
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("sq_entries", "cq_entries", "flags", "cpu", "idle", "features", "wq_fd")),
        ("reserved", ctypes.c_uint32 * 3),
        *((f"sq_{name}", ctypes.c_uint32) for name in ("head", "tail", "mask", "size", "flags", "dropped", "array", "rest")),
        ("sq_address", ctypes.c_uint64),
        *((f"cq_{name}", ctypes.c_uint32) for name in ("head", "tail", "mask", "size", "overflow", "cqes", "flags", "rest")),
        ("cq_address", ctypes.c_uint64),
    )


class RingParts(NamedTuple):
    """A ring as kernels see it; heads and tails of the queues are uint32[1] in memory shared with the system."""

    fd: int
    sq_tail: NDArray[np.uint32]
    sqes: NDArray[np.void]
    cq_head: NDArray[np.uint32]
    cq_tail: NDArray[np.uint32]
    cqes: NDArray[np.void]
    slots: NDArray[np.void]
    scratch: NDArray[np.uint8]
    address: int
    """of the page-aligned scratch"""


class Ring:
    """An io_uring with its slots and scratch, for use by the thread that created it; release it with `close`.

    Raises StoreError if the system has no more descriptors or memory for it.

    >>> ring = Ring()
    >>> serve(ring.parts, job)
    >>> ring.close()
    """

    def __init__(self) -> None:
        try:
            fd, params = _setup(_ENTRIES)
        except OSError as error:
            raise StoreError(f"no io_uring can be set up: {error.strerror}; choose the engine pread") from error
        maps: list[tuple[int, int]] = []
        self.close = weakref.finalize(self, _give_back, fd, maps)
        self.close.atexit = False  # the system releases it, and a read may be in progress
        nbytes = max(params.sq_array + 4 * params.sq_entries, params.cq_cqes + CQE.itemsize * params.cq_entries)
        queues = _map_ring(fd, nbytes, 0, maps)
        sqes = _map_ring(fd, SQE.itemsize * params.sq_entries, _SQES_AT, maps)
        _field(queues, params.sq_array, np.uint32, params.sq_entries)[:] = np.arange(params.sq_entries)
        # Shared, not private: after a fork a private page is copied, and a read in progress may land in the wrong copy.
        scratch = np.frombuffer(mmap.mmap(-1, SCRATCH_BYTES), np.uint8)
        slots = np.zeros(DEPTH + LARGE_DEPTH, SLOT)
        slots["scratch"][:DEPTH] = np.arange(DEPTH) * SMALL_BYTES
        slots["scratch"][DEPTH:] = DEPTH * SMALL_BYTES + np.arange(LARGE_DEPTH) * LARGE_BYTES
        self.parts = RingParts(
            fd,
            _field(queues, params.sq_tail, np.uint32, 1),
            _field(sqes, 0, SQE, params.sq_entries),
            _field(queues, params.cq_head, np.uint32, 1),
            _field(queues, params.cq_tail, np.uint32, 1),
            _field(queues, params.cq_cqes, CQE, params.cq_entries),
            slots,
            scratch,
            scratch.ctypes.data,
        )

    def abandon(self, *memory: NDArray[np.uint8]) -> None:
        """Release the ring with reads in flight; their scratch and destination memory stays allocated for good."""
        _ABANDONED.extend([self.parts.scratch, *memory])
        self.close()


def unavailable() -> str | None:
    """Return why io_uring cannot be used here, or None; tried out, because a sandbox may forbid what the kernel supports.

    >>> unavailable()
    """
    try:
        fd, _ = _setup(1)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return "the kernel has no io_uring, or a sandbox hides it"
        if error.errno in (errno.EPERM, errno.EACCES):
            return "the system forbids io_uring (a sandbox, or sysctl kernel.io_uring_disabled)"
        return f"no io_uring can be set up: {error.strerror}"
    os.close(fd)
    return None


def _setup(entries: int) -> tuple[int, _Params]:
    """Return the descriptor and layout of a new ring. Raises OSError."""
    for flags in (_CLAMP | _SINGLE_ISSUER | _DEFER_TASKRUN, _CLAMP):
        params = _Params(flags=flags)
        fd = int(_LIBC.syscall(_SETUP, entries, ctypes.byref(params)))
        if fd >= 0 or ctypes.get_errno() != errno.EINVAL:
            break
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if params.features & _FEATURES != _FEATURES:
        os.close(fd)
        raise OSError(errno.EINVAL, "it is older than Linux 5.6")
    return fd, params


def _map_ring(fd: int, nbytes: int, offset: int, maps: list[tuple[int, int]]) -> int:
    """Map a part of the ring's memory, recorded in `maps`; mmap.mmap would keep a second descriptor."""
    address = _LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address is None or address == _MAP_FAILED:
        raise StoreError(f"an io_uring of {nbytes} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    maps.append((address, nbytes))
    return int(address)


def _field(address: int, offset: int, dtype: Any, count: int) -> NDArray[Any]:
    """An array over memory that it does not own."""
    raw = (ctypes.c_uint8 * (np.dtype(dtype).itemsize * count)).from_address(address + offset)
    return np.frombuffer(raw, dtype)


def _give_back(fd: int, maps: list[tuple[int, int]]) -> None:
    for address, nbytes in maps:
        _LIBC.munmap(address, nbytes)
    os.close(fd)


@kernel
def enter(fd: int, submit: int, wait: int) -> int:
    """Submit `submit` prepared reads and wait for `wait` completions; returns the reads accepted, or -errno."""
    taken = _syscall(_ENTER, fd, submit, wait, _GETEVENTS, 0, 0)
    return taken if taken >= 0 else -int(carray(_errno(), 1)[0])


@kernel
def prepare_read(ring: RingParts, fd: int, offset: int, address: int, length: int, slot: int) -> None:
    """Append a read of a file's bytes offset:offset + length to the submission queue; its completion names the slot."""
    tail = ring.sq_tail[0]  # written by this thread only
    sqe = ring.sqes[np.int64(tail) & (len(ring.sqes) - 1)]
    sqe["opcode"] = _READ
    sqe["fd"] = fd
    sqe["offset"] = offset
    sqe["address"] = address
    sqe["length"] = length
    sqe["user_data"] = slot
    store_release(ring.sq_tail, 0, np.uint32(tail + np.uint32(1)))

"""Memory before, after and at its peak, of the process and of CUDA, as a decorator and context manager.

The kernel's high-water mark (VmHWM) is exact but never falls, so it gives a block's peak only if the block sets a new mark;
otherwise a sampling thread does. Resetting the mark (/proc/self/clear_refs) would hide the process's peak from outside
observers. CUDA's mark is treated alike.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from enum import IntEnum
from itertools import count
from typing import NamedTuple, Self

from ooc.stores.process import resident_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
_REST = 4
"""calls to skip after returning memory, because if it is all in use, checking again soon is useless"""
_SYSTEMS = 65_536
"""glibc's own number of blocks that may be the system's"""
_KEEP = {_M_MMAP_THRESHOLD: 2**25, _M_TRIM_THRESHOLD: 2**26, _M_MMAP_MAX: _SYSTEMS, _M_ARENA_MAX: 1}
"""freed blocks below the first limit (glibc's largest) are cached, up to the second at the end of an arena"""
_KEEP_ALL = {_M_MMAP_THRESHOLD: 2**25, _M_TRIM_THRESHOLD: 2**31 - 1, _M_MMAP_MAX: 0, _M_ARENA_MAX: 1}
"""larger ones too: none is the system's"""
_RETURN = {_M_MMAP_THRESHOLD: 2**20, _M_TRIM_THRESHOLD: 2**20, _M_MMAP_MAX: _SYSTEMS}


CUDA_SAMPLES = 25
"""samples of the process for one of CUDA, which takes the allocator's lock"""


class Blocks(IntEnum):
    """What the C library does with freed blocks of 1 MiB and more; true where it caches some."""

    RETURN = 0
    KEEP = 1
    """those below 32 MiB are cached"""
    KEEP_ALL = 2


_policy: list[Blocks] = []
"""what `keep_large_blocks` was called with last; the C library cannot be asked"""


def keep_large_blocks(keep: bool | Blocks) -> bool:
    """Make the C library cache freed blocks, or return those of 1 MiB and more to the system; True is `Blocks.KEEP`.

    Set by whoever opens a run or begins an epoch; it applies to the process until it is set again. Returns whether it could be
    set. Fresh activation blocks cost a page fault every 4 KiB and contend with loader threads for the memory lock: caching
    makes a step a third faster (measured), with one arena, because each fragments. Where the memory is full, blocks are
    returned: glibc alone raises its threshold to the largest block freed and caches such blocks in per-thread arenas, which
    fragment because batches are freed in other threads than they are allocated in. A fixed threshold lowers the peak by 100 MB
    (measured). Blocks of 32 MiB, the rows of 32,768 destinations, are cached only where the memory has no limit.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    _policy[:] = [Blocks(keep)]
    chosen = {Blocks.RETURN: _RETURN, Blocks.KEEP: _KEEP, Blocks.KEEP_ALL: _KEEP_ALL}[Blocks(keep)]
    return mallopt is not None and all(mallopt(*each) for each in chosen.items())


@contextmanager
def block_policy_restored() -> Iterator[None]:
    """Restore what was set by `keep_large_blocks` before.

    If nothing was, large blocks are cached afterwards, which is where the C library's own rule ends once blocks of 32 MiB have
    been freed.
    """
    before = list(_policy)
    try:
        yield
    finally:
        if _policy != before:
            keep_large_blocks(before[0] if before else True)


def return_freed() -> None:
    """Make the C library return its free memory now, including holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Tidy:
    """Returns the C library's free memory whenever the process has more than `most` resident bytes.

    Long-lived arrays between freed blocks leave holes; always returning them costs page faults (a tenth of an exact step).
    """

    def __init__(self, most: int) -> None:
        self.most, self._rest = most, 0

    def __call__(self, coming: int = 0) -> bool:
        """Return memory if needed, before `coming` bytes are allocated; returns whether there is still too much."""
        self._rest -= 1
        if (not coming and self._rest >= 0) or resident_bytes()[0] + coming <= self.most:
            return False
        return_freed()
        self._rest = _REST
        return resident_bytes()[0] + coming > self.most


def cuda_bytes() -> tuple[int, int]:
    """Return torch's (current, peak) bytes of tensors on CUDA; zeros if CUDA is not in use.

    The allocator's own counts, read once and without waiting for the device.
    """
    torch = sys.modules.get("torch")  # never imported for this
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0
    counts = torch.cuda.memory_stats_as_nested_dict().get("allocated_bytes", {}).get("all", {})
    return counts.get("current", 0), counts.get("peak", 0)


class MemoryReading(NamedTuple):
    """Memory of one stretch of the program, in bytes."""

    name: str
    before: int
    after: int
    peak: int
    cuda_before: int
    cuda_after: int
    cuda_peak: int


class _Gauge:
    """Peak of a quantity since creation; `read()` returns (current, highest so far)."""

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read
        self.before, self._mark = read()
        self.after = self.peak = self.before

    def sample(self) -> None:
        self.after, mark = self._read()
        self.peak = max(self.peak, mark if mark > self._mark else self.after)


class MemoryMeter(ContextDecorator):
    """Records the memory of a `with` block, or of every call of a decorated function, in `readings`. Meters may nest.

    A thread takes a sample every `period_s` seconds, of CUDA every `CUDA_SAMPLES`-th time: the allocator keeps the mark.

    >>> with MemoryMeter("load") as meter:
    ...     rows = np.ones(10**6)
    >>> meter.reading.peak >= meter.reading.before
    True
    """

    def __init__(self, name: str, period_s: float = 0.02) -> None:
        self.name = name
        self.readings: list[MemoryReading] = []
        self._period_s = period_s
        self._open: list[_Stretch] = []
        self._lock = threading.Lock()

    @property
    def reading(self) -> MemoryReading:
        """The latest finished reading."""
        return self.readings[-1]

    @property
    def peak(self) -> int:
        """Highest resident bytes of all readings and open blocks."""
        return max((reading.peak for reading in self._all()), default=0)

    @property
    def cuda_peak(self) -> int:
        """Highest CUDA bytes of all readings and open blocks."""
        return max((reading.cuda_peak for reading in self._all()), default=0)

    def _all(self) -> list[MemoryReading]:
        with self._lock:
            return [*self.readings, *(stretch.reading(self.name) for stretch in self._open)]

    def __enter__(self) -> Self:
        stretch = _Stretch(self._period_s)
        with self._lock:
            self._open.append(stretch)
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self.readings.append(self._open.pop().stop(self.name))


class _Stretch:
    """A measurement in progress: two gauges and their sampling thread."""

    def __init__(self, period_s: float) -> None:
        self._process, self._cuda = _Gauge(resident_bytes), _Gauge(cuda_bytes)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(period_s,), name="ooc-memory", daemon=True)
        self._thread.start()

    def _sample(self, period_s: float) -> None:
        for number in count():
            if self._done.wait(period_s):
                return
            self._process.sample()
            if number % CUDA_SAMPLES == 0:
                self._cuda.sample()

    def reading(self, name: str) -> MemoryReading:
        process, cuda = self._process, self._cuda
        process.sample()
        cuda.sample()
        return MemoryReading(name, process.before, process.after, process.peak, cuda.before, cuda.after, cuda.peak)

    def stop(self, name: str) -> MemoryReading:
        self._done.set()
        self._thread.join()
        return self.reading(name)

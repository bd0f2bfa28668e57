"""Memory before, after and at its peak, of the process and of CUDA, as a decorator and context manager.

The kernel's high-water mark (VmHWM) is exact but never falls, so it tells the peak of a stretch only where that stretch
set a new mark; below it, a light thread's samples do. Resetting the mark (/proc/self/clear_refs) would be exact always,
but would also hide the process's real peak from whoever watches it from outside. CUDA's mark is treated alike.
"""

import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

from stores.process import resident_bytes
from stores.sizes import format_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGE_BYTES = 2**20
_REST = 4
"""calls after one that returned memory: where what is in use takes it all, looking again at once is of no use"""
_KEPT_BLOCK_BYTES, _KEPT_BYTES, _ARENAS = 2**25, 2**26, 1
"""Blocks below the first (glibc's most) wait in the C library for their next use, up to the second at the end of an arena"""


def return_large_blocks() -> bool:
    """From now on the C library gives freed blocks of 1 MiB and more back to the system; False where it cannot be told so.

    glibc starts out so, but raises its threshold to the largest block freed (up to 32 MiB) and then keeps such blocks in its
    arenas, one per thread; a batch's arrays are freed in other threads than they are allocated in, so arenas fill up with
    holes. Setting the threshold ends its growth: measured, the peak is 100 MB lower. Not undone by `keep_large_blocks`.
    """
    return _return()


def keep_large_blocks() -> bool:
    """From now on the C library keeps freed blocks below 32 MiB for their next use; False where blocks are to be returned.

    A step's activations are blocks of some MiB; fresh from the system each costs a page fault every 4 KiB, with the lock on
    the process's memory that the loader's threads want too: measured, a step takes a third less. For loaders that use
    little memory of such blocks beside the step's; few arenas, as each has holes of its own.
    """
    return not _return.cache_info().currsize and _keep()


@cache
def _return() -> bool:
    return _mallopt({_M_MMAP_THRESHOLD: _LARGE_BYTES, _M_TRIM_THRESHOLD: _LARGE_BYTES})


@cache
def _keep() -> bool:
    return _mallopt({_M_MMAP_THRESHOLD: _KEPT_BLOCK_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES, _M_ARENA_MAX: _ARENAS})


def return_freed() -> None:
    """The C library gives back now what it kept, and holes too: after work that training does not do."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Tidy:
    """Gives back what the C library keeps, whenever the process has more than `most` resident bytes.

    Arrays that stay for long lie between blocks that were freed, and leave holes of them; to return them always costs a page
    fault every 4 KiB when they are used again (measured: a tenth of an exact step).

    >>> tidy = Tidy(3 * 10**9)
    >>> tidy()  # after some work
    >>> tidy(rows.nbytes)  # before much is allocated
    """

    def __init__(self, most: int) -> None:
        self.most, self._rest = most, 0

    def __call__(self, coming: int = 0) -> bool:
        """Look, and do so where it is due; coming: bytes that are going to be allocated at once. Whether it still has more."""
        self._rest -= 1
        if (not coming and self._rest >= 0) or resident_bytes()[0] + coming <= self.most:
            return False
        return_freed()
        self._rest = _REST
        return resident_bytes()[0] + coming > self.most


def _mallopt(settings: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*each) for each in settings.items())


def cuda_bytes() -> tuple[int, int]:
    """(bytes torch holds for tensors on CUDA now, at their highest so far); zeros where CUDA is not in use."""
    torch = sys.modules.get("torch")  # never imported for this
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


@dataclass(frozen=True)
class MemoryReading:
    """One stretch of the program, in bytes."""

    name: str
    before: int
    after: int
    peak: int
    cuda_before: int
    cuda_after: int
    cuda_peak: int

    def asdict(self) -> dict[str, Any]:
        """The fields as a dict, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        cuda = f", CUDA peak {format_bytes(self.cuda_peak)}" if self.cuda_peak else ""
        return (
            f"{self.name}: {format_bytes(self.before)} before, {format_bytes(self.after)} after, "
            f"peak {format_bytes(self.peak)}{cuda}"
        )


class _Gauge:
    """The peak of one quantity since it began, of `read() -> (now, highest so far)`."""

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read
        self.before, self._mark = read()
        self.after = self.peak = self.before

    def sample(self) -> None:
        self.after, mark = self._read()
        self.peak = max(self.peak, mark if mark > self._mark else self.after)


class MemoryMeter(ContextDecorator):
    """Records the memory of a `with` block, or of every call of a decorated function, in `readings`.

    name: what the reading is called; period_s: seconds between samples. Meters may nest.

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
        """Highest resident bytes of all readings and of the stretches still open."""
        with self._lock:
            for stretch in self._open:
                stretch.process.sample()
            return max([r.peak for r in self.readings] + [s.process.peak for s in self._open], default=0)

    @property
    def cuda_peak(self) -> int:
        """The same for CUDA."""
        with self._lock:
            for stretch in self._open:
                stretch.cuda.sample()
            return max([r.cuda_peak for r in self.readings] + [s.cuda.peak for s in self._open], default=0)

    def __enter__(self) -> Self:
        stretch = _Stretch(self._period_s)
        with self._lock:
            self._open.append(stretch)
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            process, cuda = self._open.pop().stop()
            self.readings.append(
                MemoryReading(self.name, process.before, process.after, process.peak, cuda.before, cuda.after, cuda.peak)
            )


class _Stretch:
    """A measurement under way: two gauges and the thread that samples them."""

    def __init__(self, period_s: float) -> None:
        self.process, self.cuda = _Gauge(resident_bytes), _Gauge(cuda_bytes)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(period_s,), name="ooc-memory", daemon=True)
        self._thread.start()

    def _sample(self, period_s: float) -> None:
        while not self._done.wait(period_s):
            self.process.sample()
            self.cuda.sample()

    def stop(self) -> tuple[_Gauge, _Gauge]:
        self._done.set()
        self._thread.join()
        self.process.sample()
        self.cuda.sample()
        return self.process, self.cuda

"""Memory before, after and at its peak, of the process, its control group, CUDA and MPS, as a decorator and context manager.

The kernel's high-water mark (VmHWM) is exact but never falls, so it gives a block's peak only if the block sets a new mark;
otherwise a sampling thread does. Resetting the mark (/proc/self/clear_refs) would hide the process's peak from outside
observers. Other marks are treated alike; MPS has none.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from enum import IntEnum
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ooc.stores.errors import ConfigError
from ooc.stores.process import group_reader, resident_bytes
from ooc.stores.sizes import format_bytes

if TYPE_CHECKING:
    from ooc.runtime.step_memory import StepMemory

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


SLOW_SAMPLES = 25
"""samples of the process for one of the others: CUDA's takes the allocator's lock"""
MOST_SAMPLES = 2000
"""of a stretch that are kept"""


class Blocks(IntEnum):
    """What the C library does with freed blocks of 1 MiB and more; true where it caches some."""

    RETURN = 0
    KEEP = 1
    """those below 32 MiB are cached"""
    KEEP_ALL = 2


_policy: list[Blocks] = []
"""what `keep_large_blocks` was called with last; the C library cannot be asked"""
_occupied: list[int] = []
"""addresses of the free blocks that `_occupy_free_blocks` took"""
_LARGEST, _SMALLEST = 2**26, _RETURN[_M_MMAP_THRESHOLD]
_OF_SYSTEM = 2
"""flag in the word before a block of glibc: the system's own mapping, not a part of the heap"""


def keep_large_blocks(keep: bool | Blocks) -> bool:
    """Make the C library cache freed blocks, or return those of 1 MiB and more to the system; True is `Blocks.KEEP`.

    Set by whoever opens a run or begins an epoch; it applies to the process until it is set again. Returns whether it could be
    set. Fresh activation blocks cost a page fault every 4 KiB and contend with loader threads for the memory lock: caching
    makes a step a third faster (measured), with one arena, because each fragments. Where the memory is full, blocks are
    returned: glibc alone raises its threshold to the largest block freed and caches such blocks in per-thread arenas, which
    fragment because batches are freed in other threads than they are allocated in. A fixed threshold lowers the peak by 100 MB
    (measured). Blocks of 32 MiB, the rows of 32,768 destinations, are cached only where the memory has no limit.
    """
    libc, before = ctypes.CDLL(None), list(_policy)
    mallopt = getattr(libc, "mallopt", None)
    _policy[:] = [Blocks(keep)]
    chosen = {Blocks.RETURN: _RETURN, Blocks.KEEP: _KEEP, Blocks.KEEP_ALL: _KEEP_ALL}[Blocks(keep)]
    done = mallopt is not None and all(mallopt(*each) for each in chosen.items())
    if keep:
        _free_occupied(libc)
    elif done and before != _policy:
        _occupy_free_blocks(libc)
    return done


_COUNTS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Counts(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS]


def _occupy_free_blocks(libc: ctypes.CDLL) -> None:
    """Take the heap's free blocks of 1 MiB and more, whose memory is returned to the system.

    glibc fills free blocks of its heap before it asks the system for memory, and keeps them when they are freed again: after a
    run with cached blocks, one that returns blocks would take as much (measured: 990 MB instead of 720 MB). Does nothing with
    other C libraries, and next to nothing with another allocator, as glibc's heap is small then.
    """
    if not hasattr(libc, "mallinfo2"):
        return
    return_freed()
    libc.mallinfo2.restype, libc.malloc.restype = _Counts, ctypes.c_void_p
    free, size = libc.mallinfo2().fordblks, _LARGEST
    while size >= _SMALLEST:
        address = libc.malloc(ctypes.c_size_t(size)) if size <= free else None
        if address is None or ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value & _OF_SYSTEM:
            libc.free(ctypes.c_void_p(address))
            size //= 2
        else:
            _occupied.append(address)
            free -= size


def _free_occupied(libc: ctypes.CDLL) -> None:
    """Let the C library have what `_occupy_free_blocks` took."""
    while _occupied:
        libc.free(ctypes.c_void_p(_occupied.pop()))


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


def mps_bytes() -> tuple[int, int]:
    """Return torch's (current, current) bytes of tensors on Apple's GPUs, which have no mark; zeros where there are none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.backends.mps.is_available():
        return 0, 0
    now = torch.mps.current_allocated_memory()
    return now, now


class MemoryReading(NamedTuple):
    """Memory of one stretch of the program, in bytes; zeros of what the machine does not have."""

    name: str
    before: int
    """resident bytes of the process"""
    after: int
    peak: int
    cuda_before: int
    """of tensors on CUDA"""
    cuda_after: int
    cuda_peak: int
    mps_before: int = 0
    """of tensors on MPS"""
    mps_after: int = 0
    mps_peak: int = 0
    group_before: int = 0
    """of the process's control group, which other processes and the page cache count for"""
    group_after: int = 0
    group_peak: int = 0


class MeterSample(NamedTuple):
    """Bytes at one moment of a stretch."""

    seconds: float
    """since the stretch began"""
    process: int
    cuda: int
    mps: int
    group: int


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

    A thread takes a sample every `period_s` seconds, of all but the process every `SLOW_SAMPLES`-th time. With a model the
    operations of the block are recorded too, line by line (`steps`, see `ooc.runtime.step_memory.StepMemory`): which layer and
    which operation allocated what, and what stands between the forward and the backward pass. That takes tens of microseconds
    an operation, so it is for some steps and not for a run. `ooc.write_memory_report` draws a meter as a page.

    Args:
        name: Of the readings.
        period_s: Seconds between samples.
        model: A torch module whose layers are told apart; None: operations are not recorded.

    Raises:
        ConfigError: If `model` is no torch module.

    >>> with MemoryMeter("load") as meter:
    ...     rows = np.ones(10**6)
    >>> meter.reading.peak >= meter.reading.before
    True
    >>> with MemoryMeter("step", model=model) as meter:
    ...     loss_of(model(batch.x, batch.blocks), batch.y).backward()
    >>> meter.steps[0].lines[0].layer
    'layers.0.conv'
    """

    def __init__(self, name: str, period_s: float = 0.02, model: Any = None) -> None:
        if model is not None and not _is_module(model):
            raise ConfigError(f"`model` of a memory meter is a torch module, not {model!r}: give one, or leave it out")
        self.name, self.model = name, model
        self.readings: list[MemoryReading] = []
        self.samples: list[list[MeterSample]] = []
        """of each reading, in order, at most `MOST_SAMPLES`"""
        self.steps: list[StepMemory] = []
        """of each reading, where a model was given"""
        self._period_s = period_s
        self._open: list[_Stretch] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        if not self.readings:
            return f"MemoryMeter({self.name!r}, no readings)"
        latest, times = self.reading, f"{len(self.readings)} reading{'' if len(self.readings) == 1 else 's'}"
        said = f"{times}, the latest: process at most {format_bytes(latest.peak)}"
        for device, peak in (("CUDA", latest.cuda_peak), ("MPS", latest.mps_peak)):
            said += f", {device} {format_bytes(peak)}" if peak else ""
        if self.steps:
            step = self.steps[-1]
            said += f", tensors {format_bytes(step.peak)}, between the passes {format_bytes(step.kept or 0)}"
        return f"MemoryMeter({self.name!r}, {said})"

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
        if self.model is not None:
            from ooc.runtime.step_memory import StepMemory

            stretch.step = StepMemory(self.model)
            stretch.step.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            stretch = self._open.pop()
            if stretch.step is not None:
                stretch.step.__exit__(*exc)
                self.steps.append(stretch.step)
            self.readings.append(stretch.stop(self.name))
            self.samples.append(stretch.samples)


def _is_module(model: Any) -> bool:
    """Whether it is a module of torch, which is imported where there is one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


class _Stretch:
    """A measurement in progress: gauges and their sampling thread."""

    def __init__(self, period_s: float) -> None:
        self._gauges = [_Gauge(read) for read in (resident_bytes, cuda_bytes, mps_bytes, group_reader())]
        self.step: StepMemory | None = None
        self.samples: list[MeterSample] = []
        self._began, self._every, self._lock = time.perf_counter(), 1, threading.Lock()
        self._keep_sample()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(period_s,), name="ooc-memory", daemon=True)
        self._thread.start()

    def _sample(self, period_s: float) -> None:
        for number in count():
            if self._done.wait(period_s):
                return
            for gauge in self._gauges if number % SLOW_SAMPLES == 0 else self._gauges[:1]:
                gauge.sample()
            if number % self._every == 0:
                self._keep_sample()

    def _keep_sample(self) -> None:
        """One more; of too many every second one is dropped, and so is every second one that comes."""
        with self._lock:
            self.samples.append(MeterSample(time.perf_counter() - self._began, *(gauge.after for gauge in self._gauges)))
            if len(self.samples) > MOST_SAMPLES:
                self.samples, self._every = self.samples[::2], 2 * self._every

    def reading(self, name: str) -> MemoryReading:
        for gauge in self._gauges:
            gauge.sample()
        return MemoryReading(name, *(n for gauge in self._gauges for n in (gauge.before, gauge.after, gauge.peak)))

    def stop(self, name: str) -> MemoryReading:
        self._done.set()
        self._thread.join()
        found = self.reading(name)
        self._keep_sample()
        return found

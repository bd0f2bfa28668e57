"""Reads into GPU memory through kvikio, with GPUDirect Storage if active, else through kvikio's page-locked buffers.

With the driver nvidia-fs (or PCIe peer-to-peer) and a supporting file system, data goes from the disk to GPU memory directly.
kvikio makes small reads one by one through POSIX, so this pays on extents of its `gds_threshold` and more. Reads into host
memory use the engine pread.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.engines.pread import PreadEngine
from ooc.stores.io.read_plan import ReadPlan
from ooc.stores.io.segments import Segments

DEPTH = 64
"""most reads of a request into GPU memory in flight"""
SETTINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "num_threads": (8, ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS")),
    "bounce_buffer_size": (4 * 2**20, ("KVIKIO_BOUNCE_BUFFER_SIZE",)),
    "auto_direct_io_read": (True, ("KVIKIO_AUTO_DIRECT_IO_READ",)),
}
"""kvikio's settings in the process, unless one of these variables is set, or kvikio is older than the setting. By default it
has one thread, page-locked buffers of 16 MiB (a task reads 4 MiB), and reads through the page cache without GPUDirect."""


@cache
def no_gpu() -> str | None:
    """Return why there is no GPU here, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1): it takes a machine with an NVIDIA GPU"
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the CUDA driver sees no GPU: see what `nvidia-smi` says"
    return None


@cache
def unavailable() -> str | None:
    """Return why reads into GPU memory are impossible here and what to do, or None."""
    if (why_not := no_gpu()) is not None:
        return why_not
    try:
        _kvikio()
    except Exception as error:  # a missing module, or a library that fails to load with its own exceptions
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"kvikio cannot be imported ({reason}): pip install 'ooc[gds]'"
    return None


def _kvikio() -> Any:
    import kvikio
    import kvikio.cufile_driver
    import kvikio.defaults

    return kvikio


def _set_up() -> Any:
    """kvikio with `SETTINGS`."""
    kvikio = _kvikio()
    for name, (value, variables) in SETTINGS.items():
        if not any(variable in os.environ for variable in variables):
            with suppress(KeyError):  # a setting of later versions
                if kvikio.defaults.get(name) != value:  # setting the threads ends those there are
                    kvikio.defaults.set({name: value})
    return kvikio


def host_bytes() -> int:
    """Host memory that kvikio may take: a page-locked buffer for each of its threads, and one for the caller's small reads."""
    defaults = _set_up().defaults
    return (int(defaults.get("num_threads")) + 1) * int(defaults.get("bounce_buffer_size"))


def why_not_direct() -> str | None:
    """Why data does not go from the disk to GPU memory directly, or None; of a machine where gds is not `unavailable`.

    Without it kvikio's compatibility mode reads into page-locked buffers and copies.
    """
    kvikio = _kvikio()
    if kvikio.defaults.is_compat_mode_preferred():
        return "kvikio is in compatibility mode: " + _why_compatible()
    try:
        available = bool(kvikio.cufile_driver.properties.is_gds_available)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if available else "the driver nvidia-fs is not loaded"


def _why_compatible() -> str:
    """The reason, in the order of kvikio's own checks."""
    if os.environ.get("KVIKIO_COMPAT_MODE", "").lower() in ("on", "true", "yes", "1"):
        return "KVIKIO_COMPAT_MODE is on"
    if "microsoft" in os.uname().release.lower():
        return "cuFile does not work in the Windows Subsystem for Linux"
    if not os.access("/run/udev", os.R_OK):
        return "/run/udev cannot be read (mount it, read-only, in a container)"
    return "libcufile.so cannot be used (it comes with the CUDA toolkit, or the wheel nvidia-cufile)"


class _Piece(NamedTuple):
    """A read of one extent in one file."""

    file: int
    offset: int
    to: int
    """byte of the buffer"""
    nbytes: int


class GdsEngine(PreadEngine):
    """The engine pread, whose `read` also accepts a buffer in GPU memory; a kvikio handle is kept open for each file.

    `note` says whether GPUDirect is active; reads of `least_bytes` and more into GPU memory are made several at a time, shorter
    ones one by one. Raises ConfigError without CUDA or kvikio.

    >>> buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device="cuda")
    >>> GdsEngine(segments).read(plan_reads(ids, 512, count=n, max_extent_bytes=2**24), buffer)
    """

    name = "gds"
    reaches_device = True

    def __init__(self, segments: Segments) -> None:
        why_not = unavailable()
        if why_not is not None:
            raise ConfigError(f"the engine gds cannot be used: {why_not}; or choose the engine auto")
        kvikio = _set_up()
        super().__init__(segments)
        self._files: list[Any] = []
        try:
            self._files += [kvikio.CuFile(path, "r") for path in segments.paths]
        except (RuntimeError, OSError) as error:
            self.close()
            path = segments.paths[len(self._files)]
            raise StoreError(f"{path} cannot be opened by kvikio: {_line(error)}; choose the engine auto") from error
        why_not = why_not_direct()
        how = "GPUDirect is active" if why_not is None else f"GPUDirect is not active: {why_not}; page-locked buffers instead"
        self.note = f"into GPU memory by kvikio, {how}; into host memory by pread"
        self.least_bytes = int(kvikio.defaults.get("gds_threshold"))

    @contextmanager
    def registered(self, buffer: Any) -> Iterator[None]:
        """Have a buffer in GPU memory registered with cuFile for the block: for one that is read into again and again.

        Its whole allocation is. Where there is no room for that, or no GPUDirect, reads go through buffers that are.
        """
        kvikio = _kvikio()
        try:
            kvikio.memory_register(buffer)
        except (RuntimeError, OSError):
            yield
            return
        try:
            yield
        finally:
            kvikio.memory_deregister(buffer)

    def read(self, plan: ReadPlan, buffer: Any) -> int:
        """`Engine.read` into uint8[plan.nbytes] in host memory, or on a GPU (anything with a `__cuda_array_interface__`).

        kvikio waits for the default stream; work of other streams on a GPU buffer must have ended.
        """
        interface = getattr(buffer, "__cuda_array_interface__", None)
        if interface is None:
            return super().read(plan, buffer)
        shape, kind, strides = interface["shape"], interface["typestr"], interface.get("strides")
        if kind != "|u1" or tuple(shape) != (plan.nbytes,) or strides not in (None, (1,)):
            raise ValueError(f"buffer must be uint8[{plan.nbytes}] without gaps, not {kind}{list(shape)}")
        with self._gate.reading():
            return self._read_to_device(plan, buffer)

    def _read_to_device(self, plan: ReadPlan, buffer: Any) -> int:
        under_way: deque[tuple[_Piece, Any]] = deque()
        total = 0
        try:
            for piece in self._pieces(plan):
                if len(under_way) == DEPTH:
                    total += self._finish(*under_way.popleft())
                under_way.append((piece, self._begin(piece, buffer)))
            while under_way:
                total += self._finish(*under_way.popleft())
        finally:
            _settle(under_way)
        return total

    def _pieces(self, plan: ReadPlan) -> Iterator[_Piece]:
        """The extents, split at file ends, without what lies beyond the array."""
        at, start = 0, self._start.tolist()
        for offset, length in zip(plan.offset.tolist(), plan.length.tolist(), strict=True):
            position, end = offset, min(offset + length, start[-1])
            while position < end:
                file = int(np.searchsorted(self._start, position, side="right")) - 1
                nbytes = min(end, start[file + 1]) - position
                yield _Piece(file, position - start[file], at + position - offset, nbytes)
                position += nbytes
            at += length

    def _begin(self, piece: _Piece, buffer: Any) -> Any:
        """Return a future; kvikio executes small reads at once."""
        part = buffer[piece.to : piece.to + piece.nbytes]
        try:
            return self._files[piece.file].pread(part, piece.nbytes, piece.offset)
        except (RuntimeError, OSError) as error:
            raise self._failure(piece, _line(error)) from error

    def _finish(self, piece: _Piece, future: Any) -> int:
        try:
            got = int(future.get())
        except (RuntimeError, OSError) as error:
            raise self._failure(piece, _line(error)) from error
        if got < piece.nbytes:
            raise self._failure(piece, "the file ends there")
        return got

    def _failure(self, piece: _Piece, what: str) -> StoreError:
        path = self._segments.paths[piece.file]
        return StoreError(f"{path} cannot be read at byte {piece.offset}: {what}; verify the store or write it again")

    def close(self) -> None:
        super().close()  # waits for reads in progress
        while self._files:
            self._files.pop().close()


def _settle(under_way: "deque[tuple[_Piece, Any]]") -> None:
    """Wait for all reads in any case; nothing may write to the buffer once it is returned."""
    while under_way:
        try:
            under_way[0][1].get()
            under_way.popleft()
        except KeyboardInterrupt:
            continue
        except Exception:  # the first failure is already being raised
            under_way.popleft()


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

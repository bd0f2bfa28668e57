"""Reads into GPU memory through kvikio: by GPUDirect Storage where that is active, else through kvikio's page-locked buffers.

The disk's data goes straight into the GPU's memory where the driver nvidia-fs (or PCIe peer-to-peer) and the file system allow
it. kvikio sends small reads through POSIX either way, so this pays on large extents: whole windows, whole arrays. Reads into
the host's memory gain nothing from kvikio (they would be plain POSIX reads), so they are those of the engine pread.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from stores.errors import ConfigError, StoreError
from stores.io.engines.pread import PreadEngine
from stores.io.read_plan import ReadPlan
from stores.io.segments import Segments

DEPTH = 64
"""Reads into GPU memory in flight at most, of one request"""
THREADS = 8
"""kvikio's, in the whole process, where KVIKIO_NTHREADS does not say otherwise (its own default is 1)"""


@cache
def unavailable() -> str | None:
    """Why reads into GPU memory are impossible here, and what to do about it; None where they are possible."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver (libcuda.so.1): it takes a machine with an NVIDIA GPU"
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the CUDA driver sees no GPU: see what `nvidia-smi` says"
    try:
        _kvikio()
    except Exception as error:  # a missing module, or a library that it cannot load: exceptions of its own
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"kvikio cannot be imported ({told}): pip install 'ooc[gds]'"
    return None


def _kvikio() -> Any:
    import kvikio
    import kvikio.cufile_driver
    import kvikio.defaults

    return kvikio


def _why_not_direct(kvikio: Any) -> str | None:
    """Why GPUDirect is not active, None where it is."""
    if kvikio.defaults.is_compat_mode_preferred():
        return "cuFile cannot be used, or KVIKIO_COMPAT_MODE is on"
    try:
        available = bool(kvikio.cufile_driver.properties.is_gds_available)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None if available else "the driver nvidia-fs is not loaded"


class _Piece(NamedTuple):
    """A read: of one extent, in one file."""

    file: int
    offset: int
    to: int
    """byte of the buffer"""
    nbytes: int


class GdsEngine(PreadEngine):
    """The engine pread, whose `read` also takes a buffer in GPU memory: a handle of kvikio's is kept open for each file.

    `note` says whether GPUDirect is active. Raises ConfigError where there is no CUDA or no kvikio.

    >>> buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device="cuda")
    >>> GdsEngine(segments).read(plan_reads(ids, 512, count=n, max_extent_bytes=2**24), buffer)
    """

    name = "gds"
    reaches_device = True

    def __init__(self, segments: Segments) -> None:
        why_not = unavailable()
        if why_not is not None:
            raise ConfigError(f"the engine gds cannot be used: {why_not}; or choose the engine auto")
        kvikio = _kvikio()
        if "KVIKIO_NTHREADS" not in os.environ:
            kvikio.defaults.set({"num_threads": THREADS})
        super().__init__(segments)
        self._files: list[Any] = []
        try:
            self._files += [kvikio.CuFile(path, "r") for path in segments.paths]
        except (RuntimeError, OSError) as error:
            self.close()
            path = segments.paths[len(self._files)]
            raise StoreError(f"{path} cannot be opened by kvikio: {_line(error)}; choose the engine auto") from error
        why_not = _why_not_direct(kvikio)
        how = "GPUDirect is active" if why_not is None else f"GPUDirect is not active: {why_not}; page-locked buffers instead"
        self.note = f"into GPU memory by kvikio, {how}; into host memory by pread"

    def read(self, plan: ReadPlan, buffer: Any) -> int:
        """`Engine.read`, into uint8[plan.nbytes] of the host, or of a GPU: anything with a `__cuda_array_interface__`.

        kvikio waits for the default stream; what other streams do with a GPU's buffer must have ended.
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
        """The extents, cut where files end, without what lies beyond the array."""
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
        """A future; kvikio carries out small reads at once."""
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
        super().close()  # waits for the reads under way
        while self._files:
            self._files.pop().close()


def _settle(under_way: "deque[tuple[_Piece, Any]]") -> None:
    """Wait whatever comes: nobody may write to the buffer when it is given back."""
    while under_way:
        try:
            under_way[0][1].get()
            under_way.popleft()
        except KeyboardInterrupt:
            continue
        except Exception:  # the first failure is being raised already
            under_way.popleft()


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

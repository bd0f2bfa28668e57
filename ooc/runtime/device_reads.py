"""Pieces of an array in a device's memory, read ahead of their use.

An engine that `reaches_device` fills the device's buffers itself (kvikio: GPUDirect where it is active). Any other fills
page-locked buffers, whose copies run on a stream of their own. Which is faster depends on the machine, so it is measured.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ooc.runtime.buffers import Buffers
from ooc.stores.io.disk import large_file
from ooc.stores.io.engines import Engine, gds, open_engine
from ooc.stores.io.read_plan import ReadPlan, plan_reads
from ooc.stores.io.segments import Segments
from ooc.stores.sizes import format_bytes

PIECE_BYTES = 8 * 2**20
PIECES = 3
"""one is used, one is ready or copied, one is read"""
_ROUNDS, _ROUND_PIECES = 5, 8
_CLEARLY = 1.05
"""kvikio is preferred where it is so much faster, because the other way takes no memory of its own"""
_PAGE_BYTES = 4096
_EXTENT_BYTES = 2**20
_COPY_BYTES = 2**28


class DeviceRing:
    """A ring of `PIECES` buffers of `piece_bytes` in a device's memory, filled by an engine; `close` it.

    Host memory: as much again, page-locked, unless the engine reaches the device. The CPU works the same, without streams.

    >>> with closing(DeviceRing(engine, device)) as ring:
    ...     for plan, piece in ring.pieces(plans):
    ...         pool[at] = piece.view(torch.float32).view(-1, width)
    """

    def __init__(self, engine: Engine, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._engine, self._device, on_cuda = engine, device, device.type == "cuda"
        self.engine_name = engine.name
        self.direct = engine.reaches_device and on_cuda
        """whether no bytes go through buffers of the host that are ours"""
        self._pieces = [torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(PIECES)]
        host = Buffers(PIECES, pinned=on_cuda, direct=not on_cuda, least_bytes=1)
        self._host = [] if self.direct else [host.empty((piece_bytes,), np.dtype(np.uint8)) for _ in range(PIECES)]
        self._stream: Any = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._copied: list[Any] = [torch.cuda.Event() if on_cuda else None for _ in range(PIECES)]  # type: ignore[no-untyped-call]
        self._used: list[Any] = [torch.cuda.Event() if on_cuda else None for _ in range(PIECES)]  # type: ignore[no-untyped-call]
        self._registered = ExitStack()
        for piece in self._pieces if self.direct else ():
            self._registered.enter_context(engine.registered(piece))  # type: ignore[attr-defined]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ooc-device")

    def pieces(self, plans: Iterable[ReadPlan]) -> Iterator[tuple[ReadPlan, Tensor]]:
        """Yield each plan and its extents, uint8[plan.nbytes] on the device, valid on the current stream until the next one.

        A plan's bytes must fit a piece; bytes beyond the array's end are undefined. One call at a time. The host does not wait
        for the device, only for the disk.
        """
        ahead: deque[tuple[ReadPlan, int, Future[None]]] = deque()
        try:
            for number, plan in enumerate(plans):
                slot = number % PIECES
                ahead.append((plan, slot, self._thread.submit(self._fill, plan, slot)))
                if len(ahead) == PIECES - 1:
                    yield from self._taken(*ahead.popleft())
            while ahead:
                yield from self._taken(*ahead.popleft())
        finally:
            for *_, future in ahead:
                if not future.cancel():
                    future.exception()

    def _taken(self, plan: ReadPlan, slot: int, future: "Future[None]") -> Iterator[tuple[ReadPlan, Tensor]]:
        future.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[slot])
        try:
            yield plan, self._pieces[slot][: plan.nbytes]
        finally:
            if self._stream is not None:
                self._used[slot].record(torch.cuda.current_stream(self._device))

    def _fill(self, plan: ReadPlan, slot: int) -> None:
        """Read a plan into a piece that is not used any more, in the ring's own thread."""
        piece = self._pieces[slot][: plan.nbytes]
        if self.direct:
            self._used[slot].synchronize()
            self._engine.read(plan, piece)  # type: ignore[arg-type]
            return
        host = self._host[slot][: plan.nbytes]
        if self._stream is None:
            self._engine.read(plan, host)
            piece.copy_(torch.from_numpy(host))
            return
        self._copied[slot].synchronize()  # the host's buffer is read into again
        self._engine.read(plan, host)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used[slot])
            piece.copy_(torch.from_numpy(host), non_blocking=True)
            self._copied[slot].record(self._stream)

    def close(self) -> None:
        """End the thread and give the memory back; idempotent. Not while pieces are used."""
        self._thread.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        self._registered.close()
        self._pieces, self._host = [], []


@dataclass(frozen=True)
class DeviceReadRates:
    """Bytes a second from a file into a device's memory, by each way."""

    engine: str
    """that fills page-locked buffers"""
    through_host: float
    kvikio: float | None = None
    """None where there is no kvikio"""
    why_not: str | None = None
    """why not, or why GPUDirect is not active"""

    @property
    def faster(self) -> str:
        """The engine to choose."""
        return "gds" if self.kvikio is not None and self.kvikio > _CLEARLY * self.through_host else self.engine

    def __str__(self) -> str:
        lines = [f"from the disk through page-locked memory ({self.engine}): {format_bytes(self.through_host)}/s"]
        if self.kvikio is None:
            lines.append(f"kvikio: not here, because {self.why_not}")
        else:
            how = "GPUDirect is active" if self.why_not is None else f"GPUDirect is not active: {self.why_not}"
            lines.append(f"from the disk by kvikio (gds): {format_bytes(self.kvikio)}/s; {how}")
        return "\n".join([*lines, f"so GPU memory is filled by the engine {self.faster}"])


def measure_device_reads(
    segments: Segments, device: torch.device, engine: str = "auto", rounds: int = _ROUNDS
) -> DeviceReadRates:
    """Time both ways from an array's files into a device's memory, in turn: medians, because a disk's speed varies.

    Each round reads 64 MiB in order, from a random place, or all of a smaller array.
    """
    why_not = gds.unavailable() if device.type == "cuda" else "the device is no GPU"
    names = ["auto" if engine == "gds" else engine, *(["gds"] if why_not is None else [])]
    with ExitStack() as opened:
        rings = [opened.enter_context(_ring_of(name, segments, device)) for name in names]
        rates: list[list[float]] = [[] for _ in rings]
        for number in range(rounds + 1):  # the first compiles kernels and starts threads
            for ring, found in zip(rings, rates, strict=True):
                rate = measured_rate(ring, segments.total, device)
                found += [rate] if number else []
    through_host, *kvikio = map(statistics.median, rates)
    why_not = gds.why_not_direct() if why_not is None else why_not
    return DeviceReadRates(rings[0].engine_name, through_host, kvikio[0] if kvikio else None, why_not)


@contextmanager
def _ring_of(name: str, segments: Segments, device: torch.device) -> Iterator[DeviceRing]:
    with closing(open_engine(name, segments)) as engine, closing(DeviceRing(engine, device)) as ring:
        yield ring


def measured_rate(ring: DeviceRing, nbytes: int, device: torch.device) -> float:
    """Bytes a second of one reading, of an array of `nbytes`."""
    pages, total = PIECE_BYTES // _PAGE_BYTES, -(-nbytes // _PAGE_BYTES)
    begin = int(np.random.default_rng().integers(max(1, total // pages - _ROUND_PIECES + 1))) * pages
    end = min(total, begin + _ROUND_PIECES * pages)
    plans = [
        plan_reads(np.arange(low, min(low + pages, end)), _PAGE_BYTES, count=total, max_extent_bytes=_EXTENT_BYTES)
        for low in range(begin, end, pages)
    ]
    start = time.perf_counter()
    deque(ring.pieces(plans), maxlen=0)
    _wait(device)
    return sum(plan.nbytes for plan in plans) / (time.perf_counter() - start)


def engine_into(device: torch.device, segments: Segments, engine: str = "auto") -> Engine:
    """The engine that fills buffers in a device's memory: the one asked for, or by "auto" the faster one, which is measured.

    >>> ring = DeviceRing(engine_into(device, segments), device)
    """
    if engine != "auto" or device.type != "cuda" or segments.far is not None or gds.unavailable() is not None:
        return open_engine(engine, segments)
    rates = measure_device_reads(segments, device)
    chosen = open_engine("gds" if rates.faster == "gds" else "auto", segments)
    kvikio = format_bytes(rates.kvikio or 0)
    through = format_bytes(rates.through_host)
    chosen.note = f"auto: into GPU memory kvikio reads {kvikio}/s, {rates.engine} through page-locked memory {through}/s"
    return chosen


def pinned_copy_rate(device: torch.device, nbytes: int | None = None, rounds: int = _ROUNDS) -> float:
    """Bytes a second of torch's copies from page-locked memory to a device: the most that batches can have."""
    nbytes = nbytes or _COPY_BYTES
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
    copy = torch.empty(nbytes, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(rounds + 1):
        _wait(device)
        start = time.perf_counter()
        copy.copy_(host, non_blocking=True)
        _wait(device)
        taken.append(time.perf_counter() - start)
    return nbytes / statistics.median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_gpu(path: Path, engine: str = "auto", rounds: int = _ROUNDS) -> str:
    """Lines on the GPU: its name and memory, the rate of copies to it, and those of reads into it from the disk of `path`."""
    if not torch.cuda.is_available():
        return f"GPU: torch {torch.__version__} sees none; install a build of torch for CUDA"
    device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    with large_file(path) as file:
        segments = Segments((file,), np.array([file.stat().st_size // _PAGE_BYTES * _PAGE_BYTES]))
        rates = measure_device_reads(segments, device, engine, rounds)
    name = torch.cuda.get_device_name(device)
    return "\n".join(
        [
            f"GPU: {name}, {format_bytes(total)} of memory, {format_bytes(free)} of it free; CUDA {torch.version.cuda}",
            f"copies from page-locked memory: {format_bytes(pinned_copy_rate(device))}/s",
            str(rates),
        ]
    )

"""Feature rows that stay in a GPU's memory, as stored; batches take them from there, and only the others cross the bus.

`SlotMap` says which rows stay and where: all, the first ones (those wanted most, in a store by degree), or those that a sample
of the batches wants most. It is set before the first batch and does not change, so the host knows which rows of a batch are
there, and no result depends on it. `RowPool` is filled from disk in file order at first use.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.loading.feature_cache import Stopped
from ooc.runtime.buffers import Buffers
from ooc.runtime.device_reads import PIECE_BYTES, DeviceRing, engine_into
from ooc.runtime.range_io import ahead
from ooc.runtime.transfer import to_device
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Ids, Rows
from ooc.stores.arrays.segment_rows import SegmentRows
from ooc.stores.io.engines import Engine
from ooc.stores.io.pages import PAGE_BYTES
from ooc.stores.jit import kernel

READ_AHEAD, COPIED = 2, 2
"""page-locked pieces of scattered rows that are being read or wait, and that are being copied"""
_NOTICED_SECONDS = 0.2
"""within which a thread that waits for another to fill a pool notices that it is stopped"""
_MOST_COUNT = 2**12
"""from which on rows are wanted alike"""
_IN_ORDER = np.empty(0, np.int32)
_KNOWN = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
"""types that torch gathers on every device"""


@dataclass(frozen=True)
class SlotMap:
    """PURE: which rows of an array are in a pool, and where.

    slot: int32[count], a row's place or -1; empty where the first `capacity` rows are there in their order.
    """

    count: int
    capacity: int
    slot: NDArray[np.int32]

    @classmethod
    def first(cls, count: int, capacity: int) -> Self:
        """The first rows."""
        return cls(count, min(count, capacity), _IN_ORDER)

    @classmethod
    def most_wanted(cls, wanted: Iterable[Ids], count: int, capacity: int) -> Self:
        """The rows that most of some batches want, of those alike the first. wanted: int64[n] of each batch, distinct.

        Needs 4 bytes a row of the array, which it keeps.
        """
        if capacity >= count:
            return cls.first(count, count)
        slot = np.zeros(count, np.int32)
        for ids in wanted:
            slot[ids] += 1
        _ranked(slot, capacity, np.zeros(_MOST_COUNT, np.int64))
        return cls(count, capacity, slot)

    @property
    def whole(self) -> bool:
        """Whether all rows are there."""
        return self.capacity == self.count

    @property
    def nbytes(self) -> int:
        """In the host's memory."""
        return self.slot.nbytes

    def find(self, ids: Ids) -> tuple[NDArray[np.int32], Ids]:
        """(int32[n]: the place of each row, 0 for those that are not there; int64[m]: which of `ids` these are, ascending)."""
        place, missed = np.empty(len(ids), np.int32), np.empty(0 if self.whole else len(ids), np.int64)
        return place, missed[: _found(ids, self.slot, self.capacity, place, missed)].copy()

    def pieces(self, rows: int, begin: int = 0) -> Iterator[tuple[int, range | Ids]]:
        """(place, the rows there) from place `begin` on, so many rows at a time, ascending."""
        first = 0  # of the rows that are looked at
        while begin < self.capacity:
            stop = min(begin + rows, self.capacity)
            if not len(self.slot):
                yield begin, range(begin, stop)
            else:
                ids = np.empty(stop - begin, np.int64)
                first = _ids_at(self.slot, first, begin, ids)
                yield begin, ids
            begin = stop


@kernel
def _ranked(counts: NDArray[np.int32], capacity: int, histogram: NDArray[np.int64]) -> None:
    """Replace counts by places: of the `capacity` largest, ascending by row; else -1. Of equal ones the first are taken."""
    most = len(histogram) - 1
    for i in range(len(counts)):
        histogram[min(counts[i], most)] += 1
    least, left, place = most + 1, capacity, 0
    while least > 0 and histogram[least - 1] <= left:
        least -= 1
        left -= histogram[least]
    for i in range(len(counts)):
        count = min(counts[i], most)
        some = count == least - 1 and left > 0
        left -= some
        if count >= least or some:
            counts[i] = place
            place += 1
        else:
            counts[i] = -1


@kernel
def _found(ids: Ids, slot: NDArray[np.int32], capacity: int, place: NDArray[np.int32], missed: Ids) -> int:
    """Kernel of `SlotMap.find`; returns how many are missed."""
    count = 0
    for i in range(len(ids)):
        at = slot[ids[i]] if len(slot) else (ids[i] if ids[i] < capacity else -1)
        if at < 0:
            missed[count] = i
            count += 1
        place[i] = max(at, 0)
    return count


@kernel
def _ids_at(slot: NDArray[np.int32], first: int, begin: int, ids: Ids) -> int:
    """Fill ids with the rows at places begin, begin + 1, ..., looking from row `first` on; returns where the next begin."""
    stop = begin + len(ids)
    while begin < stop:
        if slot[first] == begin:
            ids[begin - (stop - len(ids))] = first
            begin += 1
        first += 1
    return first


def fits_pool(rows: Rows, encoding: Encoding) -> bool:
    """Whether torch has the type of these rows."""
    return str(rows.dtype) in _KNOWN or encoding.name == "bfloat16"


def stored_tensor(values: AnyArray, encoding: Encoding) -> Tensor:
    """Stored rows as a tensor over the same memory: bfloat16 where that is what the bits mean."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if encoding.name == "bfloat16" else tensor


class RowPool:
    """Rows of an array on a device, filled at first use.

    Args:
        rows: Of the array, as stored.
        encoding: What they mean.
        slots: Which of them are there, at least one.
        device: CUDA; the CPU in tests.
        read: Called with the rows and bytes read, piece by piece.
        engine: That is asked for.
    """

    def __init__(
        self,
        rows: Rows,
        encoding: Encoding,
        slots: SlotMap,
        device: torch.device,
        read: Callable[[int, int], None],
        engine: str = "auto",
    ) -> None:
        self.slots, self.encoding, self.device = slots, encoding, device
        dtype = stored_tensor(np.empty(0, rows.dtype), encoding).dtype
        self.values = torch.empty((slots.capacity, *rows.shape[1:]), dtype=dtype, device=device)
        (self.scale,) = to_device([torch.from_numpy(encoding.scale)], device)
        self._rows, self._read, self._engine = rows, read, engine
        self._filled, self._full = 0, False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.values.nbytes

    @property
    def piece_rows(self) -> int:
        """Rows that are read at once, in the pages around them."""
        return max(1, (PIECE_BYTES - 2 * PAGE_BYTES) // self._rows.row_bytes)

    def fill(self, stopped: Callable[[], bool]) -> None:
        """Read what is not there yet, and return when all is; any thread. Raises Stopped; the next call goes on from there."""
        if self._full:
            return
        with self._turn(stopped):
            if self._full:  # by another thread, for which this one has waited
                return
            in_order = not len(self.slots.slot)
            by_ring = isinstance(self._rows, SegmentRows) and in_order
            with closing(self._by_ring() if by_ring else self._by_host()) as filling:
                for filled in filling:
                    self._filled = filled
                    if stopped() and filled < self.slots.capacity:
                        raise Stopped
            self._full = True  # all copies have ended

    @contextmanager
    def _turn(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Wait until no other thread fills the pool. Raises Stopped."""
        while not self._lock.acquire(timeout=_NOTICED_SECONDS):
            if stopped():
                raise Stopped
        try:
            yield
        finally:
            self._lock.release()

    def _by_ring(self) -> Generator[int, None, None]:
        """Places filled so far, with rows in the order of the file, by the engine that fills this device the fastest."""
        rows: Any = self._rows
        row_bytes = rows.row_bytes
        pieces = [(begin, begin + len(ids)) for begin, ids in self.slots.pieces(self.piece_rows, self._filled)]
        engine = rows.checked(engine_into(self.device, rows.segments, self._engine))
        with closing(engine), closing(self._ring_for(engine)) as ring:
            plans = (rows.range_plan(*each) for each in pieces)
            try:
                for (begin, end), (plan, piece) in zip(pieces, ring.pieces(plans), strict=True):
                    first = begin * row_bytes - int(plan.offset[0])
                    values = piece[first : first + (end - begin) * row_bytes].view(self.values.dtype)
                    self.values[begin:end] = values.view(self.values[begin:end].shape)
                    self._read(end - begin, plan.nbytes)
                    yield end
            finally:  # a fill that was stopped is continued by another thread, perhaps on another stream
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()

    def _ring_for(self, engine: Engine) -> DeviceRing:
        return DeviceRing(engine, self.device, self.piece_rows * self._rows.row_bytes + 2 * PAGE_BYTES)

    def _by_host(self) -> Generator[int, None, None]:
        """Places filled so far, with rows that are in the host's memory or lie scattered in the file."""
        ring = Buffers(READ_AHEAD + COPIED, pinned=self._stream is not None, least_bytes=1)
        pieces = self.slots.pieces(self.piece_rows, self._filled)
        copied: deque[tuple[Any, AnyArray, int]] = deque()  # event, its piece of the ring, places filled with it
        with ThreadPoolExecutor(1, thread_name_prefix="ooc-pool") as reader:
            for begin, values in ahead(reader, lambda each: (each[0], self._read_piece(each[1], ring)), pieces, READ_AHEAD):
                copied.append((self._copy(begin, values), values, begin + len(values)))
                del values
                yield from _settled(copied, COPIED - 1)
            yield from _settled(copied, 0)

    def _read_piece(self, ids: range | Ids, ring: Buffers) -> AnyArray:
        """Rows as stored, in a piece of the ring."""
        values = ring.empty((len(ids), *self._rows.shape[1:]), self._rows.dtype)
        if isinstance(self._rows, ArrayRows) and isinstance(ids, range):
            np.copyto(values, self._rows.array[ids.start : ids.stop])
            self._read(len(ids), 0)
        else:
            self._read(len(ids), self._rows.read(np.asarray(ids, np.int64), values))
        return values

    def _copy(self, begin: int, values: AnyArray) -> Any:
        """Begin to copy rows to their place; the event of its end."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            place = self.values[begin : begin + len(values)]
            place.copy_(stored_tensor(values, self.encoding), non_blocking=True)
            if self._stream is None:
                return None
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            return event

    def take(self, place: Tensor, missed: Tensor, values: Tensor) -> Tensor:
        """Stored rows [n, ...] on the device: those at `place`, but `values` [m, ...] at positions `missed` (int64[m])."""
        rows = self.values.index_select(0, place)
        return rows.index_copy_(0, missed, values) if len(missed) else rows


def _settled(copied: "deque[tuple[Any, AnyArray, int]]", left: int) -> Iterator[int]:
    """Wait until at most `left` copies are under way, as only then their pieces are used again; places filled by then."""
    while len(copied) > left:
        event, _, filled = copied.popleft()
        if event is not None:
            event.synchronize()
        yield filled


_pools: "weakref.WeakKeyDictionary[Rows, weakref.WeakValueDictionary[torch.device, RowPool]]" = weakref.WeakKeyDictionary()
_pools_lock = threading.Lock()


def shared_pool(rows: Rows, device: torch.device, make: Callable[[], RowPool | None] = lambda: None) -> RowPool | None:
    """The pool of these rows that all loaders over them have, made by the first; it goes with the last of them."""
    with _pools_lock:
        pools = _pools.setdefault(rows, weakref.WeakValueDictionary())
        pool = pools.get(device)
        if pool is None and (pool := make()) is not None:
            pools[device] = pool
        return pool

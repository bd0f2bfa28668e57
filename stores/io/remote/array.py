"""`RemoteArray`: the bytes of an array far away, chunk by chunk from the cache or by requests."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import write_error
from ooc.stores.io.chunk_sums import ChunkSums
from ooc.stores.io.engines.tasks import settle
from ooc.stores.io.read_plan import ReadCost
from ooc.stores.io.remote.cache import CacheDir, Presence
from ooc.stores.io.remote.client import REQUESTS
from ooc.stores.io.threads import SharedPool
from ooc.stores.sizes import format_bytes

T = TypeVar("T")
Bytes = NDArray[np.uint8]
BUFFER_BYTES = 64 * 2**20
"""most bytes of answers in memory, if a chunk is not larger"""
DAMAGED_ATTEMPTS = 3
POOL = SharedPool("ooc-remote", REQUESTS)
"""threads that wait for one request each"""


class NoRoom(StoreError):
    """What has to be in the cache whole does not fit."""


class Source(Protocol):
    """Where objects are read from: a `Client`, or in tests an array in memory."""

    @property
    def cost(self) -> ReadCost:
        """The cost of requests, as measured so far."""

    def range(self, key: str, begin: int, nbytes: int) -> Bytes:
        """Return bytes begin..begin + nbytes - 1 of an object, uint8[nbytes]. Raises StoreError if they cannot be had."""


class Extent(NamedTuple):
    """A chunk's bytes that are wanted: from `begin` on in the array."""

    number: int
    begin: int
    nbytes: int


class RemoteArray:
    """An array's files in the cache, sparse and of full length, and the objects that they are copies of.

    Args:
        url: Where the objects are, for messages.
        name: The array there.
        source: Reads the objects.
        keys: The objects.
        paths: Their copies, in the same order.
        payload: int64[k], useful bytes of each.
        chunk_bytes: Size of a chunk; every file begins with one.
        sums: Checksums of the chunks, None if there are none.
        presence: Which chunks the copies hold.
        cache: Counts what they take.
    """

    def __init__(
        self,
        url: Path,
        name: str,
        source: Source,
        keys: Sequence[str],
        paths: tuple[Path, ...],
        payload: NDArray[np.int64],
        chunk_bytes: int,
        sums: ChunkSums | None,
        presence: Presence,
        cache: CacheDir,
    ) -> None:
        self.name, self.paths, self.chunk_bytes, self.sums = str(url / name), paths, chunk_bytes, sums
        self.presence = presence
        self.flying = max(1, min(REQUESTS, BUFFER_BYTES // max(1, chunk_bytes)))
        """requests at once"""
        self._url, self._source, self._keys, self._cache = url, source, keys, cache
        self._start = np.zeros(len(paths) + 1, np.int64)
        np.cumsum(payload, out=self._start[1:])
        self.total = int(self._start[-1])
        self._coming: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    @property
    def cost(self) -> ReadCost:
        """The cost of requests, as measured so far."""
        return self._source.cost

    def touched(self, offset: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunks that extents touch, ascending."""
        first, last = offset // self.chunk_bytes, (np.minimum(offset + length, self.total) - 1) // self.chunk_bytes
        if len(first) == 0 or self.total == 0:
            return np.empty(0, np.int64)
        count = np.zeros(-(-self.total // self.chunk_bytes) + 1, np.int64)
        inside = last >= first
        np.add.at(count, first[inside], 1)
        np.add.at(count, last[inside] + 1, -1)
        return np.flatnonzero(np.cumsum(count)[:-1])

    def claim(self, numbers: NDArray[np.int64]) -> list[int]:
        """Those of the missing chunks that no other thread or process is fetching; `fetched` gives each of them back."""
        with self._lock:
            free = [number for number in self.presence.missing(numbers).tolist() if number not in self._coming]
            mine = [number for number in free if self.presence.take(number)]
            self._coming |= {number: threading.Event() for number in mine}
        return mine

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait until no other thread or process is fetching one of these chunks."""
        for number in numbers:
            with self._lock:
                coming = self._coming.get(number)
            if coming is not None:
                coming.wait()
            self.presence.wait(number)

    @contextmanager
    def fetched(self, number: int) -> Iterator[None]:
        """Give a claimed chunk back after the block."""
        try:
            yield
        finally:
            self.unclaim([number])

    def unclaim(self, numbers: Sequence[int]) -> None:
        """Give claimed chunks back; those that were given back are ignored."""
        with self._lock:
            for number in numbers:
                coming = self._coming.pop(number, None)
                if coming is not None:
                    self.presence.leave(number)
                    coming.set()

    def fetch(self, want: Extent, must_keep: bool = False) -> tuple[int, Bytes]:
        """Request a chunk, write it to the cache and return (first byte, bytes) of it; without room of what is wanted alone.

        Raises StoreError if it cannot be read, or does not match its checksum again and again; with `must_keep` also if the
        cache has no room.
        """
        begin, size = want.number * self.chunk_bytes, self.chunk_bytes
        if not self._cache.reserve(size, must_keep):
            if must_keep:
                raise self._no_room()
            self.presence.leave(want.number)  # it will not be there, so other processes need not wait
            if want.nbytes == size:
                return begin, self._whole(want.number)
            return want.begin, self._request(want.begin, want.nbytes)
        kept = False
        try:
            data = self._whole(want.number)
            kept = self._keep(begin, data, must_keep)
        finally:
            if kept:
                self.presence.mark(want.number)
            else:
                self._cache.release(size)
        return begin, data

    def _no_room(self) -> NoRoom:
        """What is said if the array has to be in the cache and does not fit."""
        used, limit = self._cache.counts
        return NoRoom(
            f"{self.name} takes {format_bytes(self.total)} of the cache in {self._cache.folder}, which has "
            f"{format_bytes(max(0, limit - used))} of {format_bytes(limit)} left: give a larger `cache`, or another `cache_dir`"
        )

    def _whole(self, number: int) -> Bytes:
        for _ in range(DAMAGED_ATTEMPTS):
            data = self._request(number * self.chunk_bytes, self.chunk_bytes)
            if self.sums is None or self.sums.matches(number, data):
                return data
        assert self.sums is not None
        raise self.sums.damage(number)

    def _request(self, begin: int, nbytes: int) -> Bytes:
        file = int(np.searchsorted(self._start, begin, side="right")) - 1
        return self._source.range(self._keys[file], begin - int(self._start[file]), nbytes)

    def _keep(self, begin: int, data: Bytes, must: bool) -> bool:
        """Write a chunk to its file; False if the disk is full."""
        file = int(np.searchsorted(self._start, begin, side="right")) - 1
        try:
            fd = os.open(self.paths[file], os.O_WRONLY | os.O_CLOEXEC)
            try:
                done, left = begin - int(self._start[file]), data.data
                while len(left):
                    wrote = os.pwrite(fd, left, done)
                    done, left = done + wrote, left[wrote:]
            finally:
                os.close(fd)
        except OSError as error:
            if must:
                raise write_error(error, self.paths[file]) from None
            return False
        return True

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Fetch all missing chunks in order, as what is memory-mapped needs them; progress(done, total) is in bytes.

        Raises StoreError as `fetch` does, and if the cache has no room for them.
        """
        numbers = np.arange(-(-self.total // self.chunk_bytes))
        done = self.total - len(self.presence.missing(numbers)) * self.chunk_bytes
        while len(missing := self.presence.missing(numbers)):
            mine = self.claim(missing)
            try:
                for _ in self._in_order(mine, self._fill_one):
                    done += self.chunk_bytes
                    if progress is not None:
                        progress(done, self.total)
            finally:
                self.unclaim(mine)
            self.wait(missing.tolist())

    def _fill_one(self, number: int) -> None:
        with self.fetched(number):
            self.fetch(Extent(number, number * self.chunk_bytes, self.chunk_bytes), must_keep=True)

    def check(self, numbers: Sequence[int], local: Callable[[int, Bytes], None]) -> None:
        """Compare chunks with their checksums: missing ones as they come, others as local(begin, out) reads them."""
        assert self.sums is not None
        scratch, left = np.empty(self.chunk_bytes, np.uint8), np.asarray(numbers, np.int64)
        while len(left):
            mine = self.claim(left)
            try:
                deque(self._in_order(mine, self._read_one), maxlen=0)
            finally:
                self.unclaim(mine)
            left = np.setdiff1d(left, mine)
            missing = self.presence.missing(left)  # others are fetching them
            for number in np.setdiff1d(left, missing).tolist():
                local(number * self.chunk_bytes, scratch)
                self.sums.see(number * self.chunk_bytes, scratch)
            left = missing
            self.wait(left.tolist())

    def read(self, begin: int, out: Bytes, local: Callable[[int, Bytes], None]) -> None:
        """Fill `out` with the array's bytes from `begin` on; what is in the cache is read by local(begin, out)."""
        size = self.chunk_bytes
        wanted = np.arange(begin // size, -(-(begin + len(out)) // size))
        while len(wanted):
            mine = self.claim(wanted)
            try:
                for number, (at, data) in zip(mine, self._in_order(mine, self._read_one), strict=True):
                    low, high = max(begin, at), min(begin + len(out), at + len(data))
                    out[low - begin : high - begin] = data[low - at : high - at]
                    wanted = wanted[wanted != number]
            finally:
                self.unclaim(mine)
            missing = self.presence.missing(wanted)
            for number in np.setdiff1d(wanted, missing).tolist():
                low, high = max(begin, number * size), min(begin + len(out), (number + 1) * size)
                local(low, out[low - begin : high - begin])
            wanted = missing
            self.wait(wanted.tolist())

    def _read_one(self, number: int) -> tuple[int, Bytes]:
        with self.fetched(number):
            return self.fetch(Extent(number, number * self.chunk_bytes, self.chunk_bytes))

    def sync(self) -> None:
        """Make what was written to the cache durable."""
        self.presence.sync(self.paths)

    def objects(self) -> Iterator[tuple[int, Bytes]]:
        """Yield (number, bytes) of every chunk as the objects have them, past the cache and without comparing checksums."""
        numbers = list(range(-(-self.total // self.chunk_bytes)))
        requests = self._in_order(numbers, lambda number: self._request(number * self.chunk_bytes, self.chunk_bytes))
        yield from zip(numbers, requests, strict=True)

    def object_of(self, number: int) -> str:
        """URL of the object that has a chunk."""
        file = int(np.searchsorted(self._start, number * self.chunk_bytes, side="right")) - 1
        return str(self._url / self._keys[file])

    def _in_order(self, numbers: Sequence[int], work: Callable[[int], T]) -> Iterator[T]:
        """work(number) of all numbers in order, several at once; the first failure is raised when none is in progress."""
        pool, flying, left = POOL.acquire(), deque[Future[T]](), iter(numbers)
        try:
            for number in left:
                flying.append(pool.submit(work, number))
                if len(flying) == self.flying:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        finally:
            for each in flying:
                each.cancel()
            settle([each for each in flying if not each.cancelled()])
            POOL.release()

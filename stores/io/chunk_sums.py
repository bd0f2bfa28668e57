"""`ChunkSums`: compares the chunks of an array with their checksums as their bytes are read."""

import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import StoreError

Bytes = NDArray[np.uint8]
_ONES = 0xFFFFFFFF
ADVICE = "run `ooc verify` on the store, then restore it or ingest it again"
Fragment = tuple[int, int, int]
"""(first byte, end, crc32c) of a part of the array that was read"""


class ChunkSums:
    """Checksums of an array's chunks, and which chunks were found to match. Thread-safe.

    A chunk is compared once for each opened array: from then on it counts as sound. Its bytes may come in any order and in any
    parts, because the crc32c of two adjacent parts follows from theirs.

    Args:
        array: Path of the array, for messages.
        chunk_bytes: Size of a chunk.
        chunk_rows: Rows of a chunk, for messages.
        rows: Rows of the array.
        load: Returns the crc32c of every chunk, uint32[chunks]; called once, when the first chunk is compared.
        advice: What to do about a damaged chunk.

    >>> sums = ChunkSums(path, 2**20, 2048, 10_000, lambda: checksums(group, name))
    >>> sums.see(0, data)  # raises StoreError if a chunk that is now complete does not match
    """

    def __init__(
        self,
        array: Path,
        chunk_bytes: int,
        chunk_rows: int,
        rows: int,
        load: Callable[[], NDArray[np.uint32]],
        advice: str = ADVICE,
    ) -> None:
        self.array, self.chunk_bytes, self._advice = array, chunk_bytes, advice
        self._chunk_rows, self._rows, self._load = chunk_rows, rows, load
        self._used = rows * (chunk_bytes // chunk_rows)  # zeros follow up to the end of the last chunk
        self._sound = np.zeros(-(-rows // chunk_rows), np.bool_)
        self._left = len(self._sound)
        self._fragments: dict[int, list[Fragment]] = {}
        self._lock = threading.Lock()

    @cached_property
    def _known(self) -> NDArray[np.uint32]:
        known = self._load()
        if len(known) != len(self._sound):
            raise StoreError(
                f"{self.array} has {len(self._sound)} chunks, but {len(known)} checksums: run `ooc verify` on the store"
            )
        return known

    @property
    def pending(self) -> bool:
        """Whether there are chunks that were not compared yet."""
        return self._left > 0

    def unchecked(self, offset: NDArray[np.int64], length: NDArray[np.int64]) -> list[int]:
        """Return the chunks that the extents touch (int64[k] each, bytes) and that were not compared yet, ascending."""
        first, last = offset // self.chunk_bytes, (offset + length - 1) // self.chunk_bytes
        touched = np.zeros(len(self._sound) + 1, np.int64)
        inside = (length > 0) & (first < len(self._sound))
        np.add.at(touched, first[inside], 1)
        np.add.at(touched, np.minimum(last[inside] + 1, len(self._sound)), -1)
        return np.flatnonzero((np.cumsum(touched)[:-1] > 0) & ~self._sound).tolist()

    def see(self, begin: int, data: Bytes) -> None:
        """Take note of the array's bytes from `begin` on, uint8[n]; bytes beyond its last chunk are ignored.

        Raises StoreError if a chunk whose bytes have all been seen does not match its checksum.
        """
        if not self.pending:
            return
        size, end = self.chunk_bytes, begin + len(data)
        with self._lock:
            for number in range(begin // size, min(-(-end // size), len(self._sound))):
                if not self._sound[number]:
                    low, high = max(begin, number * size), min(end, (number + 1) * size)
                    self._take(number, low, data[low - begin : high - begin])

    def _take(self, number: int, low: int, data: Bytes) -> None:
        """Add bytes of a chunk, without those seen before, and compare the chunk once it is complete."""
        start, stop = number * self.chunk_bytes, (number + 1) * self.chunk_bytes
        high = low + len(data)
        held = [
            each for each in self._fragments.get(number, []) if each[0] < low or each[1] > high
        ]  # the others are here again
        begin, end = low, high
        for first, last, _ in held:
            if first <= begin:
                begin = max(begin, last)
            else:
                end = min(end, first)
        if begin >= end:
            return
        fragments = sorted([*held, (begin, end, google_crc32c.value(data[begin - low : end - low]))])
        if end >= self._used and end < stop:  # the padding, if it was not read
            fragments.append((end, stop, google_crc32c.value(bytes(stop - end))))
        joined = fragments[:1]
        for each in fragments[1:]:
            joined[-1:] = _joined(joined[-1], each)
        if joined[0][:2] == (start, stop):
            self._fragments.pop(number, None)
            self._compare(number, joined[0][2])
        else:
            self._fragments[number] = joined

    def _compare(self, number: int, crc: int) -> None:
        if crc != int(self._known[number]):
            raise self.damage(number)
        self._sound[number] = True
        self._left -= 1

    def matches(self, number: int, data: Bytes) -> bool:
        """Whether the bytes of a whole chunk, uint8[chunk_bytes], match its checksum; such a chunk counts as sound."""
        if google_crc32c.value(data) != int(self._known[number]):
            return False
        with self._lock:
            if not self._sound[number]:
                self._fragments.pop(number, None)
                self._sound[number] = True
                self._left -= 1
        return True

    def damage(self, number: int) -> StoreError:
        """What is said of a chunk that does not match its checksum."""
        first, last = number * self._chunk_rows, min((number + 1) * self._chunk_rows, self._rows) - 1
        return StoreError(
            f"{self.array} is damaged: chunk {number} (rows {first} to {last}) does not match its checksum; {self._advice}"
        )


def _joined(one: Fragment, other: Fragment) -> list[Fragment]:
    """Join two fragments if they are adjacent.

    CRCs are affine: extending a CRC by some bytes differs from the CRC of those bytes as extending it by as many zeros differs
    from the CRC of the zeros. That difference is linear in the CRC, so extending its complement by zeros gives its complement.
    """
    if one[1] != other[0]:
        return [one, other]
    moved = google_crc32c.extend(one[2] ^ _ONES, bytes(other[1] - other[0])) ^ _ONES
    return [(one[0], other[1], moved ^ other[2])]

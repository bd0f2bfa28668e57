"""External sort of records by keys that are all different: distributed to ranges of keys on disk, each sorted in memory.

Every record is written and read once, sequentially and in pieces of some pages. A range with too many records (the in-edges of
hubs) is distributed again, by further bits of the key. Keys that come in ascending order of their low bits, as edges in input
order do, are placed by counting alone. (Measured on 81 M edges: 0.4 of the processor time of DuckDB's sort, which compares, 12
bytes of disk a record, not 18, and 0.6 of the memory.)
"""

import errno
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ooc.stores.io.atomic import disk_errors
from ooc.stores.io.threads import ahead
from ooc.stores.jit import kernel

WORK_BYTES = 64
"""memory for a record while its range is sorted, besides its columns"""
SORTED_AT_ONCE = 2
"""ranges, each in a thread"""
PIECE_ROWS = 2048
"""records of a range that are written at a time"""
MOST_RANGES = 1024
_DIGIT_BITS = 11
Ints = NDArray[np.int64]
Columns = Mapping[str, NDArray[Any]]
Batch = tuple[Ints, Columns]
"""keys, and the other columns of the records by name"""


def sorted_by_key(
    batches: Iterator[Batch], columns: Mapping[str, DTypeLike], count: int, bits: int, low_bits: int, room: int, spill: Path
) -> Iterator[Batch]:
    """Yield the records of `batches` by ascending key, a range of keys at a time.

    Args:
        batches: The records; all keys are different, at least 0 and less than 2**bits.
        columns: Dtypes of their columns.
        count: About how many they are.
        bits: Bits of the keys.
        low_bits: Bits of the keys in whose order records may already be.
        room: Memory for the records that are sorted at a time, in bytes.
        spill: A file for records that do not fit; removed at the end.

    >>> keys = iter([(np.array([5, 2]), {"src": np.array([7, 8])})])
    >>> list(sorted_by_key(keys, {"src": np.int64}, count=2, bits=3, low_bits=1, room=10**6, spill=Path("spill")))
    [(array([2, 5]), {'src': array([8, 7])})]
    """
    dtypes = {name: np.dtype(dtype) for name, dtype in columns.items()}
    each = WORK_BYTES + 2 * sum(dtype.itemsize for dtype in dtypes.values())
    most = max(1, room // (SORTED_AT_ONCE * each))
    ranges = min(MOST_RANGES, 1 << max(0, 2 * count // most).bit_length(), 1 << bits)
    if ranges == 1:
        yield from _sorted(list(batches), dtypes, low_bits)
        return
    shift = bits - (ranges - 1).bit_length()
    with closing(_Ranges(spill, ranges, shift, dtypes)) as held:
        for keys, values in ahead(batches):
            held.add(keys, values)
        held.flush()
        yield from _each_range(held, dtypes, most, shift, low_bits, room, spill)


def _each_range(
    held: "_Ranges", dtypes: Mapping[str, np.dtype[Any]], most: int, shift: int, low_bits: int, room: int, spill: Path
) -> Iterator[Batch]:
    """The sorted records of all ranges, of which one with more than `most` is distributed again."""

    def sort(number: int) -> list[Batch]:
        return _sorted(list(held.read(number)), dtypes, low_bits)

    coming: deque[Future[list[Batch]]] = deque()
    with ThreadPoolExecutor(SORTED_AT_ONCE, "ooc-sort") as pool:
        for number in range(held.ranges):
            size = held.size(number)
            if size <= most:
                coming.append(pool.submit(sort, number))
            while len(coming) > (SORTED_AT_ONCE if size <= most else 0):
                yield from coming.popleft().result()
            if size <= most:
                continue
            lower, finer = number << shift, spill.with_name(f"{spill.name}-{shift}")
            parts = ((keys - lower, values) for keys, values in held.read(number))
            for keys, values in sorted_by_key(parts, dtypes, size, shift, min(low_bits, shift), room, finer):
                yield keys + lower, values
        while coming:
            yield from coming.popleft().result()


def _joined(parts: list[Batch], dtypes: Mapping[str, np.dtype[Any]]) -> Batch:
    if not parts:
        return np.empty(0, np.int64), {name: np.empty(0, dtype) for name, dtype in dtypes.items()}
    joined = {name: np.concatenate([values[name] for _, values in parts]) for name in dtypes}
    return np.concatenate([keys for keys, _ in parts]), joined


def _sorted(parts: list[Batch], dtypes: Mapping[str, np.dtype[Any]], low_bits: int) -> list[Batch]:
    """The records of the parts, sorted, as one batch; none if there are no records."""
    keys, values = _joined(parts, dtypes)
    parts.clear()  # their memory is not counted during the sort
    if not len(keys):
        return []
    order = key_order(keys, low_bits)
    return [(keys[order], {name: column[order] for name, column in values.items()})]


class _Ranges:
    """Records by range of keys (key >> shift), in a buffer per range and, as these fill up, in pieces of one file."""

    def __init__(self, path: Path, ranges: int, shift: int, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self._path, self._shift, self.ranges = path, shift, ranges
        self._dtypes = {"": np.dtype(np.int64), **dtypes}
        self._buffers = {name: np.empty((ranges, PIECE_ROWS), dtype) for name, dtype in self._dtypes.items()}
        self._filled = np.zeros(ranges, np.int64)
        self._pieces: list[list[int]] = [[] for _ in range(ranges)]
        self._written = 0
        self._piece_bytes = PIECE_ROWS * sum(dtype.itemsize for dtype in self._dtypes.values())
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)

    def size(self, number: int) -> int:
        """Number of records of a range, after `flush`."""
        return PIECE_ROWS * len(self._pieces[number]) + int(self._filled[number])

    def add(self, keys: Ints, values: Columns) -> None:
        """Add records; full pieces are written."""
        columns = {"": keys, **values}
        places = np.empty(len(keys), np.int64)
        first = 0
        while first < len(keys):
            last, full = _places(keys, first, self._shift, self._filled, PIECE_ROWS, places)
            for name, buffer in self._buffers.items():
                _scatter(columns[name], places, first, last, buffer.reshape(-1))
            if full >= 0:
                self._write(full)
            first = last

    def flush(self) -> None:
        """Keep the records that fill no piece in the memory they take, and give the buffers back."""
        filled = self._filled.tolist()
        held = {name: [buffer[i, :count].copy() for i, count in enumerate(filled)] for name, buffer in self._buffers.items()}
        self._rest, self._buffers = held, {}

    def read(self, number: int) -> Iterator[Batch]:
        """The records of a range in the order in which they were added, a piece at a time."""
        for piece in self._pieces[number]:
            with disk_errors(self._path):
                data = np.frombuffer(os.pread(self._fd, self._piece_bytes, piece * self._piece_bytes), np.uint8)
                if len(data) < self._piece_bytes:  # another program has shortened the file
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            found, at = {}, 0
            for name, dtype in self._dtypes.items():
                found[name] = data[at : at + PIECE_ROWS * dtype.itemsize].view(dtype)
                at += PIECE_ROWS * dtype.itemsize
            yield found.pop(""), found
        if self._filled[number]:
            rest = {name: parts[number] for name, parts in self._rest.items()}
            yield rest.pop(""), rest

    def close(self) -> None:
        os.close(self._fd)
        with suppress(OSError):
            self._path.unlink()

    def _write(self, number: int) -> None:
        with disk_errors(self._path):
            data = [buffer[number].view(np.uint8).data for buffer in self._buffers.values()]
            done = os.writev(self._fd, data)
            if done < self._piece_bytes:  # as a disk fills up
                view = memoryview(b"".join(data))[done:]
                while view:
                    view = view[os.write(self._fd, view) :]
        self._pieces[number].append(self._written)
        self._written += 1
        self._filled[number] = 0


def key_order(keys: Ints, low_bits: int) -> Ints:
    """int64[n]: the order that sorts `keys`, by counting digits from the lowest to the highest (Knuth, TAOCP 3, 5.2.5).

    Digits below `low_bits` are passed over if the keys come in order of these bits.
    """
    order = np.arange(len(keys))
    if not len(keys):
        return order
    other, begin = np.empty_like(order), low_bits if _ascending(keys, (1 << low_bits) - 1) else 0
    base = int(keys.min()) >> begin << begin
    for shift in range(begin, (int(keys.max()) - base).bit_length(), _DIGIT_BITS):
        _place_digit(keys, base, shift, order, np.zeros((1 << _DIGIT_BITS) + 1, np.int64), other)
        order, other = other, order
    return order


@kernel
def _ascending(keys: Ints, mask: int) -> bool:
    i = 1
    while i < len(keys) and (keys[i - 1] & mask) < (keys[i] & mask):
        i += 1
    return i >= len(keys)


@kernel
def _place_digit(keys: Ints, base: int, shift: int, order: Ints, count: Ints, out: Ints) -> None:
    mask = len(count) - 2
    for i in range(len(keys)):
        count[((keys[i] - base) >> shift & mask) + 1] += 1
    for digit in range(1, len(count)):
        count[digit] += count[digit - 1]
    for i in order:
        digit = (keys[i] - base) >> shift & mask
        out[count[digit]] = i
        count[digit] += 1


@kernel
def _places(keys: Ints, first: int, shift: int, filled: Ints, size: int, places: Ints) -> tuple[int, int]:
    """Where keys[first:] go in the buffers, until one is full; returns the key behind the last one, and which is full (-1)."""
    for i in range(first, len(keys)):
        number = keys[i] >> shift
        places[i] = number * size + filled[number]
        filled[number] += 1
        if filled[number] == size:
            return i + 1, number
    return len(keys), -1


@kernel
def _scatter(values: NDArray[Any], places: Ints, first: int, last: int, out: NDArray[Any]) -> None:
    for i in range(first, last):
        out[places[i]] = values[i]

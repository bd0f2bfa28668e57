"""`Events`: the edges of a temporal graph in time order, read by range and searched by time.

An event's number is its edge id, so a time window is one range and one sequential read of every array.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.encoding import Encoding, arrays_in, encoding_of
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.arrays.segment_rows import Empty, SegmentRows, check_range, fresh, read_range
from ooc.stores.arrays.whole import whole
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.bounds import check_nodes
from ooc.stores.errors import InputError, StoreError
from ooc.stores.io.segments import forget
from ooc.stores.manifest import Manifest, TimeUnit

_PAGE_BYTES = 4096
_MOST_SEARCHES = 256
"""searches in the map of times before its pages are released; each touches about twenty"""
_NEAR = 4096
"""events on either side of an expected position, read at once in the time of a page"""


class Found(NamedTuple):
    """A search result: `position` events come before `time`, or with side "right" not after it."""

    time: Any
    side: str
    position: int


class EventBlock(NamedTuple):
    """Events first, first + 1, ... of a store."""

    first: int
    src: NDArray[Any]
    """int32|int64[k]"""
    dst: NDArray[Any]
    """int32|int64[k]"""
    time: NDArray[Any]
    """int64|float64[k], non-decreasing"""
    columns: dict[str, AnyArray]
    """name -> [k, ...]: edge features, and "weight" if edges have one"""
    nbytes: int
    """bytes read from disk"""

    def __len__(self) -> int:
        return len(self.src)

    @property
    def last(self) -> int:
        """End of the block's range of events."""
        return self.first + len(self)

    def part(self, first: int, last: int) -> "EventBlock":
        """Events first..last-1 of the block, sharing its memory."""
        part = slice(first - self.first, last - self.first)
        columns = {name: values[part] for name, values in self.columns.items()}
        return EventBlock(first, self.src[part], self.dst[part], self.time[part], columns, 0)


class Events:
    """The events of a store, opened and closed with it (`Dataset.events`). Any number of threads may read.

    Raises StoreError if an array is missing, truncated, damaged or not of the manifest's size.

    >>> begin, end = ds.events.at(t0), ds.events.at(t1)
    >>> ds.events.read(begin, end, ["msg"]).columns["msg"].shape
    (end - begin, 16)
    """

    def __init__(self, path: Path, manifest: Manifest, engine: str, verify: bool = False) -> None:
        assert manifest.time is not None
        self._num_nodes, self._verify = manifest.num_nodes, verify
        self.unit: TimeUnit = manifest.time.unit
        self.dtype: np.dtype[Any] = np.dtype(manifest.time.dtype)
        self.count = manifest.time.events
        folder = path / names.edge_array("")
        features = set(arrays_in(folder))
        features |= {name for each in manifest.edge_types for name in each.arrays}
        paths = {name: names.event_array(name) for name in ("src", "dst", "time", *(["weight"] if manifest.weighted else []))}
        paths |= {name: names.edge_array(name) for name in sorted(features)}
        self._path, self._arrays = path, paths
        self._rows: dict[str, Rows] = {}
        self._encodings: dict[str, Encoding] = {}
        try:
            for name, array in paths.items():
                self._rows[name] = open_zarr_rows(path, array, engine, verify)
                self._encodings[name] = encoding_of(self._rows[name], (path / array).parent)
                if self._rows[name].shape[0] != self.count:
                    found = self._rows[name].shape[0]
                    raise StoreError(f"{path / array} has {found} rows; the store has {self.count} events: build it again")
            self._time = self.map("time")
            self._searches = 0
            self._found: tuple[Found, ...] = ()  # the last two searches, of different times
        except BaseException:
            self.close()
            raise

    def map(self, name: str, private: bool = False) -> AnyArray:
        """Return a column as a memory map, [events, ...] as stored, for random access to few events; see `map_segments`.

        Raises as `width`.
        """
        self._column(name)
        rows = open_zarr_rows(self._path, self._arrays[name], "mmap")
        try:
            if self._verify:
                whole(rows)
            return rows.map(private)
        finally:
            rows.close()

    def __len__(self) -> int:
        return self.count

    @property
    def columns(self) -> list[str]:
        """Names of the columns that `read` returns besides ends and times: edge features, and "weight"."""
        return [name for name in self._rows if name not in ("src", "dst", "time")]

    def width(self, name: str) -> tuple[int, ...]:
        """Row shape of a column. Raises InputError if there is no such column."""
        return self._column(name).shape[1:]

    @property
    def span(self) -> tuple[Any, Any]:
        """Times of the first and last event."""
        return self._time[0].item(), self._time[-1].item()

    @property
    def whole(self) -> bool:
        """Whether times are integers."""
        return self.dtype.kind == "i"

    def time(self, event: int) -> Any:
        """Time of one event."""
        return self._time[event].item()

    def at(self, time: Any, side: str = "left") -> int:
        """Number of events before `time` (side "right": not after it), i.e. the first event at it or later."""
        value, last = self._bound(time, side), self._found
        if last and last[-1][:2] == (value, side):
            return last[-1].position
        position = self._beside(value, side)
        if position is None:
            self._will_search(1)
            position = _search(self._time, value, side)
        self._found = (*last[-1:], Found(value, side, position)) if not last or last[-1].time != value else last
        return position

    def _bound(self, time: Any, side: str) -> Any:
        """Convert a time to the events' type: integer times before 2.5 are those before 3, those up to it are up to 2."""
        if not self.whole:
            return self.dtype.type(time)
        smallest, largest = np.iinfo(self.dtype).min, np.iinfo(self.dtype).max
        return self.dtype.type(min(max(math.ceil(time) if side == "left" else math.floor(time), smallest), largest))

    def _beside(self, value: Any, side: str) -> int | None:
        """Try `at` near the position extrapolated from the last two searches: one read instead of a bisection."""
        if len(self._found) < 2:
            return None
        (time0, _, event0), (time1, _, event1) = self._found
        passed, span = float(value) - float(time1), float(time1) - float(time0)
        near = event1 + passed * (event1 - event0) / span if span else math.nan
        if not math.isfinite(near):
            return None
        low, high = (int(min(max(near + offset, 0), self.count)) for offset in (-_NEAR, _NEAR))
        if abs(near - event1) < _NEAR:  # pages already read
            self._will_search(1)
            part = self._time[low:high]
        else:
            part = read_range(self._rows["time"], low, high)[0]
        position = _search(part, value, side)
        if (position == 0 and low > 0) or (position == len(part) and high < self.count):
            return None
        return low + position

    def before(self, times: AnyArray) -> NDArray[np.int64]:
        """Return how many events come strictly before each of `times` ([k]), int64[k]."""
        self._will_search(len(times))
        bound = np.ceil(times) if self.whole and times.dtype.kind == "f" else times
        return np.asarray(np.searchsorted(self._time, bound.astype(self.dtype), side="left"), np.int64)

    def _will_search(self, times: int) -> None:
        """Release the map's pages from time to time, as searches over many windows would map all of them."""
        self._searches += times
        if self._searches > _MOST_SEARCHES:
            self._searches = times
            forget(self._time)

    def rows(self, name: str) -> Rows:
        """Return a column as stored, [events, ...], one row per edge id; see `encoding`. Raises as `width`."""
        return self._column(name)

    def encoding(self, name: str) -> Encoding:
        """Return the encoding of a column. Raises as `width`."""
        self._column(name)
        return self._encodings[name]

    def read(self, first: int, last: int, columns: list[str] | None = None, empty: Empty = fresh) -> EventBlock:
        """Read events first..last-1 with some columns (None: all), decoded to float32 if stored in fewer bits.

        `empty` allocates the memory for all that is read, called once. Raises IndexError for an invalid range, InputError for
        an unknown column, and StoreError as reading does.
        """
        requested = self.columns if columns is None else columns
        read = {name: self._column(name) for name in ("src", "dst", "time", *requested)}
        check_range(self.count, first, last)
        part = _parts_of(empty(sum(_aligned(_range_bytes(rows, first, last)) for rows in read.values())))
        values, nbytes = {}, 0
        for name, rows in read.items():
            raw, taken = read_range(rows, first, last, part)
            values[name], nbytes = self._values(name, raw), nbytes + taken
            if name in ("src", "dst"):
                check_nodes(self._path / self._arrays[name], first, values[name], self._num_nodes)
        return EventBlock(
            first, values["src"], values["dst"], values["time"], {name: values[name] for name in requested}, nbytes
        )

    def _values(self, name: str, held: AnyArray) -> AnyArray:
        encoding = self._encodings[name]
        if not encoding.is_short:
            return held
        out = np.empty(held.shape, encoding.dtype)
        encoding.gather(np.ascontiguousarray(held), np.arange(len(held)), out)
        return out

    def _column(self, name: str) -> Rows:
        if name not in self._rows:
            raise InputError(f"the events have no column {name!r}: there are {', '.join(self.columns) or 'none'}")
        return self._rows[name]

    def row_bytes(self, columns: list[str] | None = None) -> int:
        """Bytes on disk of an event's ends, time and columns."""
        requested = self.columns if columns is None else columns
        return sum(self._rows[name].row_bytes for name in ("src", "dst", "time", *requested))

    def close(self) -> None:
        """Release files and threads; idempotent."""
        for rows in self._rows.values():
            rows.close()


def _search(times: AnyArray, value: Any, side: str) -> int:
    found: Any = np.searchsorted(times, value, side=side)  # type: ignore[call-overload]
    return int(found)


def _range_bytes(rows: Rows, first: int, last: int) -> int:
    return rows.range_bytes(first, last) if isinstance(rows, SegmentRows) else (last - first) * rows.row_bytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _parts_of(whole: NDArray[np.uint8]) -> Empty:
    """Allocate page-aligned parts of `whole` one after another."""
    taken = 0

    def part(nbytes: int) -> NDArray[np.uint8]:
        nonlocal taken
        begin, taken = taken, taken + _aligned(nbytes)
        return whole[begin : begin + nbytes]

    return part


class Reader:
    """Reads forward-moving, possibly overlapping ranges of events, as sliding windows do, each event once. Not thread-safe.

    >>> reader = Reader(ds.events, ["msg"])
    >>> week = reader.read(0, 7000, keep=1000)
    >>> reader.read(1000, 8000, keep=2000).nbytes  # of a thousand events
    """

    def __init__(self, events: Events, columns: list[str] | None = None, empty: Empty = fresh) -> None:
        self._events, self._columns, self._empty = events, columns, empty
        self._blocks: list[EventBlock] = []

    def read(self, first: int, last: int, keep: int | None = None) -> EventBlock:
        """Read events first..last-1 as `Events.read`; `nbytes` are those read now. No later range precedes `keep` [first]."""
        pieces = [
            block.part(max(block.first, first), min(block.last, last)) for block in self._blocks if _meet(block, first, last)
        ]
        begin = max([first, *(block.last for block in self._blocks)])
        nbytes = 0
        if begin < last or not pieces:
            new = self._events.read(min(begin, last), last, self._columns, self._empty)
            nbytes = new.nbytes
            pieces.append(new)
            self._blocks.append(new)
        behind = first if keep is None else keep
        self._blocks = [block for block in self._blocks if block.last > behind]
        found = pieces[0] if len(pieces) == 1 else _joined(pieces)
        assert (found.first, found.last) == (first, last), "ranges move forward"
        return EventBlock(*found[:-1], nbytes)


def _meet(block: EventBlock, first: int, last: int) -> bool:
    return block.first < last and first < block.last


def _joined(blocks: list[EventBlock]) -> EventBlock:
    """Concatenate consecutive blocks."""
    src, dst, time = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("src", "dst", "time"))
    columns = {name: np.concatenate([block.columns[name] for block in blocks]) for name in blocks[0].columns}
    return EventBlock(blocks[0].first, src, dst, time, columns, 0)

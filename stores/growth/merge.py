"""Growing arrays: each array of a grown store is the old one with rows inserted and appended.

The planner `place_events` is pure: it gives the old event before which each new one is inserted. The rest streams: old rows are
read in blocks, new ones in order from files (`ooc.stores.growth.sorting`), and written by an ingest's writers, so a grown store
has the bytes of a single ingest.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.array_names import EdgeKey
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.graph import index_dtype
from ooc.stores.growth.sorting import Column, until
from ooc.stores.ingest.edges import CscWriter
from ooc.stores.io.segments import forget
from ooc.stores.jit import kernel

Ints = NDArray[np.int64]
BLOCK_ROWS = 2**19
"""old rows of a column in memory at a time"""
BLOCK_BYTES = 2**24
"""for wider rows"""


@dataclass(frozen=True)
class Insertion:
    """Positions of new rows among old ones."""

    at: Ints
    """int64[k], ascending (possibly memory-mapped): the old row before which each new one is inserted; the number of old rows
    to append"""
    old_rows: int

    @cached_property
    def _late(self) -> Ints:
        """New rows inserted before an old one; the others, possibly many, move none."""
        return self.at[: int(np.searchsorted(self.at, self.old_rows))]

    def moved(self, old: Ints) -> Ints:
        """Final numbers of old rows (int64[n])."""
        return old + np.searchsorted(self._late, old, side="right") if len(self._late) else old


def place_events(old_time: AnyArray, time: AnyArray) -> Ints:
    """Return the old event before which each new one is inserted, int64[k], ordered by (time, position in the input). Pure.

    `old_time` ([E]) and `time` ([k]) are non-decreasing; appended events follow existing ones of equal time.

    >>> place_events(np.array([1, 3, 3, 5]), np.array([0, 3]))
    array([0, 3])
    """
    return np.searchsorted(old_time, time.astype(old_time.dtype, copy=False), side="right").astype(np.int64)


def spliced(
    old: Callable[[int, int], AnyArray], count: int, row_bytes: int, at: Ints, new: Callable[[int, int], AnyArray], dtype: Any
) -> Iterator[AnyArray]:
    """Yield the old rows with new ones inserted, sequentially in blocks of `dtype`.

    old(first, last) and new(first, last) return rows; `count` and `row_bytes` are those of the old ones; `at` (int64[k],
    ascending) is the old row before which each new one is inserted.

    >>> np.concatenate([*spliced(np.arange, 2, 8, np.array([1, 2]), lambda a, b: np.array([8, 9])[a:b], np.int64)])
    array([0, 8, 1, 9])
    """
    done, kind, most = 0, np.dtype(dtype), _block_rows(row_bytes)
    for first, last in _blocks(count, row_bytes):
        held, begin = old(first, last), 0
        stop = len(at) if last == count else int(np.searchsorted(at, last))
        while begin < len(held) or done < stop:
            high = min(done + most, stop)
            part = at[done:high] - first  # bounded: all may follow the last old row
            end = len(held) if high == stop else int(part[-1])
            yield put_between(held[begin:end], part - begin, new(done, high), kind)
            begin, done = end, high


def _blocks(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of the blocks of `count` rows; one empty block for none."""
    step = _block_rows(row_bytes)
    for first in range(0, max(count, 1), step):
        yield first, min(first + step, count)


def _block_rows(row_bytes: int) -> int:
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))


def put_between(old: AnyArray, at: Ints, new: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Return `old` ([n, ...]) with new[j] inserted before old row at[j] (int64[k], ascending): [n + k, ...] of dtype."""
    out = np.empty((len(old) + len(new), *old.shape[1:]), dtype)
    where = at + np.arange(len(at))
    kept = np.ones(len(out), bool)
    kept[where] = False
    out[where], out[kept] = new, old
    return out


Slots = Mapping[str, AnyArray]
"""slots by column: dst, src, edge_id, and further columns; [k] each"""


def slots_of(edges: Slots, undirected: bool) -> Slots:
    """Slots of edges (src, dst, edge_id, ...: [k] each): both directions of undirected ones, self-loops once."""
    if not undirected:
        return edges
    back = np.flatnonzero(edges["src"] != edges["dst"])
    other = {"src": "dst", "dst": "src"}
    return {name: np.concatenate([column, edges[other.get(name, name)][back]]) for name, column in edges.items()}


class _Front:
    """New slots in order, a block at a time."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns
        self._count = columns["dst"].count
        self._read = 0
        self._held = self._next()

    def before(self, dst: int | None, edge_id: int = 0) -> Iterator[Slots]:
        """Yield unused new slots before an old slot (None: all), at most BLOCK_ROWS at once."""
        while len(self._held["dst"]):
            own = self._held["dst"], self._held["edge_id"]
            stop = len(own[0]) if dst is None else until(*own, end=(dst, edge_id))
            if stop:
                yield {name: column[:stop] for name, column in self._held.items()}
            if stop < len(own[0]):
                self._held = {name: column[stop:] for name, column in self._held.items()}
                return
            self._held = self._next()

    def _next(self) -> Slots:
        first, self._read = self._read, min(self._read + BLOCK_ROWS, self._count)
        return {name: column.read(first, self._read) for name, column in self._columns.items()}


class _Targets:
    """Destinations of consecutive slots, from indptr read sequentially."""

    def __init__(self, indptr: Rows) -> None:
        self._indptr = indptr
        self._first = self._read = 0  # node of the first buffered entry; entries read
        self._held = np.empty(0, np.int64)

    def of(self, first: int, last: int) -> Ints:
        """Return int64[last - first]; `first` is where the previous call ended."""
        while not len(self._held) or (self._held[-1] < last and self._read < self._indptr.shape[0]):
            stop = min(self._read + BLOCK_ROWS, self._indptr.shape[0])
            self._held = np.concatenate([self._held, read_range(self._indptr, self._read, stop)[0]])
            self._read = stop
        used = int(np.searchsorted(self._held, last))  # first entry that is not smaller
        ends: Ints = np.clip(self._held[: used + 1], first, last)
        counts = ends[1:] - ends[:-1]
        found = np.repeat(np.arange(self._first, self._first + len(counts)), counts)
        keep = max(used - 1, 0)
        self._held, self._first = self._held[keep:], self._first + keep
        return found


def grow_graph(
    old: Path,
    out: Path,
    key: EdgeKey,
    ends: tuple[int, int],
    new: Mapping[str, Column],
    events: Insertion,
    progress: Callable[[int, int], None],
) -> tuple[int, int]:
    """Write the graph of an edge type of the store `old` with new slots to the group `out`; returns (slots, loops).

    Args:
        old: The store.
        out: The group.
        key: The edge type.
        ends: Numbers of sources and of destinations of the grown graph.
        new: The new slots, sorted by dst, edge_id.
        events: The positions of new edges, which shift old edge ids.
        progress: Called with (slots done, total).
    """
    rest = {name: column.dtype for name, column in new.items() if name not in ("dst", "src", "edge_id")}
    sources, targets = ends
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(closing(open_zarr_rows(old, names.graph_array(name, key))))
            for name in ("indices", "edge_id", "indptr", *rest)
        }
        writer = stack.enter_context(CscWriter(out, targets, rest, key, None if key[0] == key[2] else sources))
        numbers, front, index = _Targets(opened["indptr"]), _Front(new), index_dtype(sources)
        count = opened["indices"].shape[0]
        for first, last in _blocks(count, 16):
            held = {name: read_range(opened[name], first, last)[0] for name in ("indices", "edge_id", *rest)}
            slots = {"dst": numbers.of(first, last), "src": held.pop("indices"), **held}
            slots["edge_id"] = events.moved(slots["edge_id"])
            forget(events.at)
            end = (None,) if last == count else (int(slots["dst"][-1]), int(slots["edge_id"][-1]))
            for part in _merged(slots, front.before(*end), {"dst": np.int64, "src": index, "edge_id": np.int64, **rest}):
                writer.add(part["dst"], part["src"], part["edge_id"], part)
                progress(writer.slots, count + new["dst"].count)
    return writer.slots, writer.loops


def _merged(old: Slots, pieces: Iterator[Slots], kinds: Mapping[str, Any]) -> Iterator[Slots]:
    """Yield a block of old slots with new ones inserted, in pieces; kinds: name -> dtype."""
    begin = 0
    for new in pieces:
        at = np.empty(len(new["dst"]), np.int64)
        _merge_places(old["dst"][begin:], old["edge_id"][begin:], new["dst"], new["edge_id"], at)
        end = begin + int(at[-1])
        yield {name: put_between(old[name][begin:end], at, new[name], np.dtype(kind)) for name, kind in kinds.items()}
        begin = end
    if begin < len(old["dst"]):
        yield {name: old[name][begin:].astype(kind, copy=False) for name, kind in kinds.items()}


@kernel
def _merge_places(dst: Ints, edge_id: Ints, new_dst: Ints, new_edge_id: Ints, at: Ints) -> None:
    """Set at[j] to the number of old slots (dst, edge_id: int64[n], ascending by both) before new slot j (int64[k] each)."""
    i = 0
    for j in range(len(new_dst)):
        while i < len(dst) and (dst[i] < new_dst[j] or (dst[i] == new_dst[j] and edge_id[i] < new_edge_id[j])):
            i += 1
        at[j] = i


def grow_array(
    old: Path,
    out: Path,
    name: str,
    at: Ints,
    new: Callable[[int, int], AnyArray],
    dtype: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the array `name` of the store `old` with new rows inserted to the group `out`; see `spliced`.

    progress is called with (rows done, total).
    """
    with closing(open_zarr_rows(old, name)) as rows:
        kind, attributes = rows.dtype if dtype is None else np.dtype(dtype), getattr(rows, "attributes", {})
        count, done = rows.shape[0] + len(at), 0
        with Appender(out, name, rows.shape[1:], kind, attributes, count=count) as sink:
            for block in spliced(
                lambda first, last: read_range(rows, first, last)[0], rows.shape[0], rows.row_bytes, at, new, kind
            ):
                sink.append(block)
                forget(at)
                done += len(block)
                progress(done, count)

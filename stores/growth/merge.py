"""Arrays that grow: every array of a grown store is the old one with rows put in between and behind.

The planner is pure: `place_events` says before which old events the new ones stand, so what becomes of every edge id. The rest
streams: old rows come block by block through an engine, new ones are in memory (a delta is small beside its store), and what
comes out goes through the writers that an ingest uses, so that a store that grew has the bytes of one ingested whole.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stores import manifest as names
from stores.graph import index_dtype
from stores.ingest.edges import CscWriter
from stores.jit import kernel
from stores.rows import AnyArray, Rows
from stores.segment_rows import read_range
from stores.zarr_rows import open_zarr_rows
from stores.zarr_write import Appender

Ints = NDArray[np.int64]
BLOCK_ROWS = 2**19
"""old rows of a column in memory at a time"""
BLOCK_BYTES = 2**24
"""of wider rows"""


@dataclass(frozen=True)
class Insertion:
    """Where new rows go among old ones."""

    at: Ints
    """int64[k], ascending: the old row that each new one, in final order, stands before; the number of old rows: behind all"""
    order: Ints
    """int64[k]: which new row (by its place in the input) is the first, the second, ... of them"""
    old_rows: int

    @property
    def number(self) -> Ints:
        """int64[k]: the new row's final number, by its place in the input."""
        found = np.empty(len(self.at), np.int64)
        found[self.order] = self.at + np.arange(len(self.at))
        return found

    def moved(self, old: Ints) -> Ints:
        """The final numbers of old rows (int64[n])."""
        if not len(self.at) or int(self.at[0]) == self.old_rows:
            return old
        return old + np.searchsorted(self.at, old, side="right")


def place_events(old_time: AnyArray, time: AnyArray) -> Insertion:
    """Where events of times `time` ([k], by place in the input) go among those of `old_time` ([E], never falling). Pure.

    In order of (time, place in the input), an appended event's place being behind those of all that were there.

    >>> place_events(np.array([1, 3, 3, 5]), np.array([3, 0])).number
    array([4, 0])
    """
    order = np.argsort(time, kind="stable")
    at = np.searchsorted(old_time, time[order].astype(old_time.dtype), side="right")
    return Insertion(at.astype(np.int64), order, len(old_time))


def behind(old_rows: int, count: int) -> Insertion:
    """`count` new rows behind all old ones, in the input's order."""
    return Insertion(np.full(count, old_rows, np.int64), np.arange(count), old_rows)


def spliced(
    old: Callable[[int, int], AnyArray], count: int, row_bytes: int, at: Ints, new: Callable[[int, int], AnyArray], dtype: Any
) -> Iterator[AnyArray]:
    """The old rows with new ones put in between, front to back, block by block, of `dtype`.

    old(first, last), new(first, last): rows of either; count, row_bytes: of the old ones; at: int64[k], ascending: the old row
    that each new one stands before.

    >>> np.concatenate([*spliced(np.arange, 2, 8, np.array([1, 2]), lambda a, b: np.array([8, 9])[a:b], np.int64)])
    array([0, 8, 1, 9])
    """
    done, kind, most = 0, np.dtype(dtype), max(1, BLOCK_BYTES // row_bytes)
    for first, last in _blocks(count, row_bytes):
        held = old(first, last)
        stop = len(at) if last == count else int(np.searchsorted(at, last))
        for begin, end, low, high in _pieces(at[done:stop] - first, len(held), most):
            yield put_between(held[begin:end], at[done + low : done + high] - first - begin, new(done + low, done + high), kind)
        done = stop


def _blocks(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, last) of the blocks of `count` rows; one, empty, of none."""
    step = max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))
    for first in range(0, max(count, 1), step):
        yield first, min(first + step, count)


def _pieces(at: Ints, held: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(begin, end, low, high): old rows begin..end-1 of a block with new ones low..high-1, at most `most` of those at once."""
    begin = 0
    for low in range(0, max(len(at), 1), most):
        high = min(low + most, len(at))
        end = held if high == len(at) else int(at[high])
        yield begin, end, low, high
        begin = end


def put_between(old: AnyArray, at: Ints, new: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """[n + k, ...] of dtype: `old` ([n, ...]) with new[j] before old row at[j] (int64[k], ascending)."""
    out = np.empty((len(old) + len(new), *old.shape[1:]), dtype)
    where = at + np.arange(len(at))
    kept = np.ones(len(out), bool)
    kept[where] = False
    out[where], out[kept] = new, old
    return out


@dataclass(frozen=True)
class Slots:
    """New edges by destination, in canonical order."""

    dst: Ints
    src: Ints
    edge_id: Ints
    rest: Mapping[str, AnyArray]

    def __len__(self) -> int:
        return len(self.dst)


def slots_of(src: Ints, dst: Ints, edge_id: Ints, rest: Mapping[str, AnyArray], undirected: bool) -> Slots:
    """The slots of edges (int64[k] each, and columns [k]): both directions of an undirected one, a self-loop once."""
    place = np.arange(len(src))
    if undirected:
        back = np.flatnonzero(src != dst)
        src, dst, place = np.concatenate([src, dst[back]]), np.concatenate([dst, src[back]]), np.concatenate([place, back])
    order = np.lexsort([edge_id[place], dst])
    place = place[order]
    return Slots(dst[order], src[order], edge_id[place], {name: column[place] for name, column in rest.items()})


class _Targets:
    """The destinations of consecutive slots, from indptr read front to back."""

    def __init__(self, indptr: Rows) -> None:
        self._indptr = indptr
        self._first = self._read = 0  # the node of the first entry held; entries read
        self._held = np.empty(0, np.int64)

    def of(self, first: int, last: int) -> Ints:
        """int64[last - first]; `first` is where the call before ended."""
        while not len(self._held) or (self._held[-1] < last and self._read < self._indptr.shape[0]):
            stop = min(self._read + BLOCK_ROWS, self._indptr.shape[0])
            self._held = np.concatenate([self._held, read_range(self._indptr, self._read, stop)[0]])
            self._read = stop
        used = int(np.searchsorted(self._held, last))  # the first entry that is no less
        ends: Ints = np.clip(self._held[: used + 1], first, last)
        counts = ends[1:] - ends[:-1]
        found = np.repeat(np.arange(self._first, self._first + len(counts)), counts)
        keep = max(used - 1, 0)
        self._held, self._first = self._held[keep:], self._first + keep
        return found


def grow_graph(old: Path, out: Path, num_nodes: int, new: Slots, events: Insertion) -> tuple[int, int]:
    """Write the graph of the store `old` with the slots `new` into the group `out`; (slots, self-loops).

    num_nodes: of the grown graph; events: where the edges of `new` stand among all, which moves the old edges' ids.
    """
    rest = {name: column.dtype for name, column in new.rest.items()}
    done = 0
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(closing(open_zarr_rows(old, names.column(name))))
            for name in ("indices", "edge_id", "indptr", *rest)
        }
        writer = stack.enter_context(CscWriter(out, num_nodes, rest))
        targets, index = _Targets(opened["indptr"]), index_dtype(num_nodes)
        count = opened["indices"].shape[0]
        for first, last in _blocks(count, 16):
            held = {name: read_range(opened[name], first, last)[0] for name in ("indices", "edge_id", *rest)}
            dst, edge_id = targets.of(first, last), events.moved(held["edge_id"])
            stop = len(new) if last == count else _before(new, done, int(dst[-1]), int(edge_id[-1]))
            for begin, end, low, high, at in _merged(dst, edge_id, new, done, stop):
                part = slice(done + low, done + high)

                def join(old: AnyArray, fresh: AnyArray, kind: Any, at: Ints = at, cut: slice = slice(begin, end)) -> AnyArray:
                    return put_between(old[cut], at, fresh, np.dtype(kind))

                columns = {name: join(held[name], new.rest[name][part], kind) for name, kind in rest.items()}
                writer.add(
                    join(dst, new.dst[part], np.int64),
                    join(held["indices"], new.src[part], index),
                    join(edge_id, new.edge_id[part], np.int64),
                    columns,
                )
            done = stop
    return writer.slots, writer.loops


def _merged(dst: Ints, edge_id: Ints, new: Slots, done: int, stop: int) -> Iterator[tuple[int, int, int, int, Ints]]:
    """`_pieces` of a block of old slots and the new slots done..stop-1, with the places of the latter in the piece."""
    at = np.empty(stop - done, np.int64)
    _merge_places(dst, edge_id, new.dst[done:stop], new.edge_id[done:stop], at)
    for begin, end, low, high in _pieces(at, len(dst), BLOCK_ROWS):
        yield begin, end, low, high, at[low:high] - begin


def _before(new: Slots, done: int, dst: int, edge_id: int) -> int:
    """How many new slots stand before the old one of that destination and edge id."""
    low, high = done + np.searchsorted(new.dst[done:], [dst, dst + 1])
    return int(low + np.searchsorted(new.edge_id[low:high], edge_id))


@kernel
def _merge_places(dst: Ints, edge_id: Ints, new_dst: Ints, new_edge_id: Ints, at: Ints) -> None:
    """at[j]: how many old slots (dst, edge_id: int64[n], ascending by both) stand before the new slot j (int64[k] each)."""
    i = 0
    for j in range(len(new_dst)):
        while i < len(dst) and (dst[i] < new_dst[j] or (dst[i] == new_dst[j] and edge_id[i] < new_edge_id[j])):
            i += 1
        at[j] = i


def grow_array(old: Path, out: Path, name: str, at: Ints, new: Callable[[int, int], AnyArray], dtype: Any = None) -> None:
    """Write the array `name` of the store `old` with new rows put in between into the group `out`; see `spliced`."""
    with closing(open_zarr_rows(old, name)) as rows:
        kind, attributes = rows.dtype if dtype is None else np.dtype(dtype), getattr(rows, "attributes", {})
        count = rows.shape[0] + len(at)
        with Appender(out, name, rows.shape[1:], kind, attributes, count=count) as sink:
            for block in spliced(
                lambda first, last: read_range(rows, first, last)[0], rows.shape[0], rows.row_bytes, at, new, kind
            ):
                sink.append(block)

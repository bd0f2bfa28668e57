"""Growth of a store's edges: new ones are sorted in bounded memory and merged into graph, events and edge features."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores import array_names as names
from ooc.stores.array_names import EdgeKey
from ooc.stores.arrays.encoding import arrays_in, names_of_scales
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.graph import index_dtype
from ooc.stores.growth import merge
from ooc.stores.growth.delta import EDGES, FEATURE, DeltaPart
from ooc.stores.growth.links import link_array
from ooc.stores.growth.merge import Insertion, grow_array, grow_graph, place_events, slots_of, spliced
from ooc.stores.growth.parts import EdgePart
from ooc.stores.growth.sorting import Column, ColumnWriter, Sorter
from ooc.stores.ingest.duck import Progress
from ooc.stores.io.segments import forget

Fields = dict[str, tuple[Any, tuple[int, ...]]]
Columns = Mapping[str, Column]


@dataclass(frozen=True)
class GrownEdges:
    """Results for the manifest: slots, self-loops, whether the events are in input order, and the new edges of each split."""

    slots: int
    loops: int
    sorted: bool
    splits: Mapping[str, int]


class EdgeGrowth:
    """Merges the edges of one type in `delta` into those of the store `root`, written to the group `out`.

    Args:
        root: The store's arrays.
        out: The group.
        delta: The appends of the type.
        old: The type as it was.
        ends: Numbers of sources and destinations of the grown graph.
        stage: A folder for files, about four times the new edges' bytes.
        room: Bytes of new edges in memory, besides blocks of fixed size.
        progress: Called with step, done and total.

    >>> EdgeGrowth(root, out, delta.of(part.prefix), part, (300, 500), stage, 2**26, progress).write()
    """

    def __init__(
        self,
        root: Path,
        out: Path,
        delta: DeltaPart,
        old: EdgePart,
        ends: tuple[int, int],
        stage: Path,
        room: int,
        progress: Progress,
    ) -> None:
        self.root, self.out, self.delta, self.old, self.ends = root, out, delta, old, ends
        self.stage, self.room, self.progress = stage, room, progress
        appends = delta.appends
        self.count = sum(each.edges for each in appends)
        self.all_taken = not any(each.missing or each.self_loops for each in appends)
        self._given = np.cumsum([given_before(root, old), *(each.given for each in appends)]).tolist()
        self._rest: Fields = {"weight": (np.float32, ())} if old.weighted else {}
        self._rest |= {} if old.time is None else {"time": (np.dtype(old.time.dtype), ())}
        self._features = {f"{FEATURE}{name}": name for name in arrays_in(root / old.array(""))}

    def write(self) -> GrownEdges:
        """Write graph, that of the types in the other direction too, events and edge features."""
        new = self._in_order()
        events, in_order, slots = self._place(new)
        count, loops = self._grow_graph(self.old.key, self.ends, slots, events)
        for back in self.old.reverses:
            slots = self._slots()
            for held in self._held(new):
                slots.add({**held, "src": held["dst"], "dst": held["src"]})
            self._grow_graph(back, (self.ends[1], self.ends[0]), slots, events)
        was = self.old.time is not None and self.old.time.sorted
        still = was and in_order and self.all_taken
        if self.old.time is not None and self.count:
            self._write_events(new, events, was, still)
        if self.old.time is None:
            self._write_by_place(new)
        return GrownEdges(count, loops, still, self._new_in_splits(new))

    def _grow_graph(self, key: EdgeKey, ends: tuple[int, int], slots: Sorter, events: Insertion) -> tuple[int, int]:
        with_ids = slots.finish()
        made = grow_graph(self.root, self.out, key, ends, with_ids, events, partial(self._tell, "merge the graph"))
        for column in with_ids.values():
            column.path.unlink()
        return made

    def _slots(self) -> Sorter:
        fields: Fields = dict.fromkeys(("dst", "src", "edge_id"), (np.int64, ()))
        return Sorter(self.stage, "slots", fields | self._rest, ("dst", "edge_id"), self.room)

    def _held(self, new: Columns) -> Iterator[dict[str, AnyArray]]:
        """New edges without times in events, a block at a time, with their positions as ids."""
        for first in range(0, self.count, merge.BLOCK_ROWS):
            stop = min(first + merge.BLOCK_ROWS, self.count)
            held = {name: new[name].read(first, stop) for name in ("src", "dst", "place", *self._rest)}
            yield {"edge_id": held.pop("place"), **held}

    def _write_by_place(self, new: Columns) -> None:
        """Write labels and splits of edges without times: a row for each edge of all inputs, those that were dropped too."""
        total = self._given[-1]
        for field, name in self._features.items():
            array, values, at = self.old.array(name), new[field], 0
            with closing(open_zarr_rows(self.root, array, "mmap")) as rows:
                old, kind = rows.shape[0], rows.dtype
                with Appender(self.out, array, rows.shape[1:], kind, getattr(rows, "attributes", {}), count=total) as sink:
                    for first in range(0, old, merge.BLOCK_ROWS):
                        sink.append(read_range(rows, first, min(first + merge.BLOCK_ROWS, old))[0])
                    for first in range(old, total, merge.BLOCK_ROWS):
                        block = np.full((min(merge.BLOCK_ROWS, total - first), *rows.shape[1:]), nothing_of(kind), kind)
                        stop = self._until(new["place"], at, first + len(block))
                        block[new["place"].read(at, stop) - first] = values.read(at, stop)
                        sink.append(block)
                        at = stop

    @staticmethod
    def _until(place: Column, first: int, end: int) -> int:
        """How many places, which ascend, are below `end`, of which `first` are known to be."""
        held = place.read(first, min(place.count, first + merge.BLOCK_ROWS))
        return first + int(np.searchsorted(held, end))

    def _new_in_splits(self, new: Columns) -> dict[str, int]:
        """New edges by split."""
        counts = dict.fromkeys(self.old.type.splits, 0)
        for first in range(0, self.count, merge.BLOCK_ROWS):
            stop = min(first + merge.BLOCK_ROWS, self.count)
            for name in counts:
                if f"{FEATURE}split_{name}" in new:
                    counts[name] += int(new[f"{FEATURE}split_{name}"].read(first, stop).sum())
                else:
                    counts[name] += int((new[f"{FEATURE}split"].read(first, stop) == names.SPLIT_CODES[name]).sum())
        return counts

    def _tell(self, step: str, done: int, total: int) -> None:
        self.progress(step, done, total)

    def _in_order(self) -> Columns:
        """The new edges by (time, position in all inputs), or by position."""
        fields: Fields = dict.fromkeys(("src", "dst", "place"), (np.int64, ()))
        fields |= self._rest
        for field, name in self._features.items():
            with closing(open_zarr_rows(self.root, self.old.array(name), "mmap")) as rows:
                fields[field] = rows.dtype, rows.shape[1:]
        keys = ("place",) if self.old.time is None else ("time", "place")
        sorter, done = Sorter(self.stage, "edges", fields, keys, self.room), 0
        for number, record in self.delta.records(EDGES):
            sorter.add({**record, "place": record["place"] + self._given[number]})
            self.progress("sort what was appended", done := done + len(record["src"]), self.count)
        return sorter.finish()

    def _place(self, new: Columns) -> tuple[Insertion, bool, Sorter]:
        """The positions of new events among the old, whether they all follow in input order, and their slots."""
        sorter = self._slots()
        times, last, in_order = self._old_times(), -1, True
        with ColumnWriter(self.stage / "at", np.int64) as sink:
            first = 0
            for held in self._held(new):
                edge_id = place = held.pop("edge_id")
                if self.old.time is not None:
                    at = place_events(times, held["time"])
                    forget(times)
                    edge_id = at + np.arange(first, first + len(at))
                    first += len(at)
                    in_order &= bool(place[0] > last and (np.diff(place) > 0).all() and at[0] == len(times))
                    last = int(place[-1])
                    sink.append(at)
                sorter.add(slots_of({**held, "edge_id": edge_id}, self.old.undirected))
        return Insertion(sink.column.map(), len(times)), in_order, sorter

    def _old_times(self) -> AnyArray:
        """[E], memory-mapped; empty for a store without times."""
        if self.old.time is None:
            return np.empty(0, np.int64)
        with closing(open_zarr_rows(self.root, names.event_array("time"), "mmap")) as rows:
            return rows.map()

    def _write_events(self, new: Columns, events: Insertion, was_sorted: bool, still: bool) -> None:
        """Write the events' arrays and features, and their input positions if those are not their numbers."""
        index = index_dtype(self.ends[0])
        kinds: dict[str, Any] = {"src": index, "dst": index, **dict.fromkeys(self._rest)}
        for name, kind in kinds.items():
            self._grow(names.event_array(name), events, new[name], kind)
        for field, name in self._features.items():
            self._grow(self.old.array(name), events, new[field])
        for scale in names_of_scales(self.root / self.old.array("")):
            link_array(self.root, self.out, self.old.array(scale))
        if not still:
            self._write_places(events, new["place"], was_sorted)

    def _grow(self, name: str, events: Insertion, new: Column, kind: Any = None) -> None:
        grow_array(self.root, self.out, name, events.at, new.read, kind, partial(self._tell, f"merge {name}"))

    def _write_places(self, events: Insertion, place: Column, was_sorted: bool) -> None:
        """Write input positions; if the old events were in order, their numbers are their positions."""
        name = names.event_array("input")
        if not was_sorted:
            self._grow(name, events, place)
            return
        with Appender(self.out, name, (), np.int64, count=events.old_rows + len(events.at)) as sink:
            for block in spliced(np.arange, events.old_rows, 8, events.at, place.read, np.int64):
                sink.append(block)


def nothing_of(dtype: np.dtype[Any]) -> Any:
    """What labels and splits of an edge that was dropped are: none."""
    return {"b": False, "f": np.nan}.get(dtype.kind, -1)


def given_before(root: Path, old: EdgePart) -> int:
    """Number of input edges that the arrays of an edge type of the store `root` were built from."""
    if old.input is not None:
        return old.input.edges
    if old.time is not None and old.time.sorted:
        return old.time.events
    most = -1
    with closing(open_zarr_rows(root, names.event_array("input") if old.time else old.column("edge_id"))) as rows:
        for first in range(0, rows.shape[0], merge.BLOCK_ROWS):
            held = read_range(rows, first, min(first + merge.BLOCK_ROWS, rows.shape[0]))[0]
            most = max(most, int(held.max()))
    return most + 1

"""A version of a store with what was appended to it: whole, for `compact`, or what changed of it, for readers of a delta.

Both are folders that are stores by themselves or parts of one. What did not change is linked into a whole version, and left
where it is by a part. Rows of node features, which may be most of a store, are not rewritten for readers: a part has the new
rows under `delta/<name>`, which `DeltaRows` lays over the old ones; labels, splits and births are small, so it has them whole.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from stores import manifest as names
from stores.build import finish_store
from stores.encoding import arrays_in, names_of_scales
from stores.graph import index_dtype
from stores.growth.delta import EDGES, IDS, ROWS, Appended, Delta
from stores.growth.lineage import small
from stores.growth.merge import Ints, behind, grow_array, grow_graph, place_events, slots_of, spliced
from stores.growth.rows import DELTA_ROWS, DELTA_VALUES, delta_array
from stores.ids import grow_ids, write_ids
from stores.integrity import array_names
from stores.manifest import Input, Manifest
from stores.rows import AnyArray
from stores.segment_rows import read_range
from stores.zarr_rows import open_zarr_rows
from stores.zarr_write import Appender, write_array

STAGE = "stage"
BLOCK_BYTES = 2**24
Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Edges:
    """New edges by their place in all that was appended; features stand in files."""

    src: Ints
    dst: Ints
    place: Ints
    rest: dict[str, AnyArray]
    features: dict[str, AnyArray]


@dataclass(frozen=True)
class _NodeRows:
    """Rows of a node array that are new or given anew. row: int64[d], ascending; values(first, last): of some of them."""

    row: Ints
    values: Callable[[int, int], AnyArray]


class Growing:
    """One store's growth by what is in `delta`, written into the folder `out`, which then is published by `finish`.

    root: the current version's arrays; whole: see above; view: the part of the same appends that a reader merged, which a whole
    version takes over. Memory: the new edges (some 100 bytes each) and blocks.
    Raises StoreError for a full disk or a damaged array.

    >>> Growing(root, delta, out, whole=True, progress=print).write(final)
    """

    def __init__(
        self, root: Path, delta: Delta, out: Path, *, whole: bool, progress: Progress, view: Path | None = None
    ) -> None:
        self.root, self.delta, self.out, self.whole, self.progress, self.view = root, delta, out, whole, progress, view
        self.old = names.read_manifest(root)
        appends = delta.appends
        self.total = sum(appends, Appended())
        self.num_nodes = self.old.num_nodes + self.total.nodes
        self._given = np.cumsum([0, *(each.given for each in appends)])  # edges of the input before each append
        self._kinds = delta.kinds()
        self._splits: dict[str, int] = dict(self.old.node_type().splits)
        self._sorted = self.old.time is not None and self.old.time.sorted
        self._slots, self._loops = self.old.num_edges, self.old.has_self_loops

    def write(self, final: Path) -> Path:
        """All of it, published as the folder `final`."""
        shutil.rmtree(self.out, ignore_errors=True)
        (self.out / STAGE).mkdir(parents=True)
        try:
            if self.view is not None:
                self._take_over(self.view)
            elif self.total.edges or self.total.nodes:
                self._write_edges(self._load_edges())
            for name in self._node_names():
                self._write_node_array(name)
            if self.total.nodes and self.old.node_type().id_kind is not None:
                self._write_ids()
            shutil.rmtree(self.out / STAGE)
            if self.whole:
                self._link_the_rest()
            return finish_store(self.out, final, self._manifest())
        except BaseException:
            shutil.rmtree(self.out, ignore_errors=True)
            raise

    def _take_over(self, view: Path) -> None:
        """Link what a part has whole."""
        node_arrays = [names.node_array(name) for name in arrays_in(view / names.node_array(""))]
        for name in ("graph", names.EVENTS, "edge", *node_arrays):
            link_array(view, self.out, name)
        merged = names.read_manifest(view)
        self._slots, self._loops, self._splits = merged.num_edges, merged.has_self_loops, merged.node_type().splits
        self._sorted = merged.time is not None and merged.time.sorted

    def _load_edges(self) -> _Edges:
        self.progress("appended edges")
        count, done = self.total.edges, 0
        old_time = self.old.time
        kinds: dict[str, np.dtype[Any]] = {"weight": np.dtype(np.float32)} if self.old.weighted else {}
        kinds |= {} if old_time is None else {"time": np.dtype(old_time.dtype)}
        found = {name: np.empty(count, np.int64) for name in ("src", "dst", "place")}
        rest = {name: np.empty(count, kind) for name, kind in kinds.items()}
        features: dict[str, AnyArray] = {}
        for name in self._edge_names():
            with closing(open_zarr_rows(self.root, names.edge_array(name), "mmap")) as rows:
                shape = (max(count, 1), *rows.shape[1:])
                features[name] = open_memmap(self.out / STAGE / f"edge-{name}.npy", "w+", rows.dtype, shape)[:count]
        for number, record in self.delta.records(EDGES):
            stop = done + len(record["src"])
            for name, array in (*found.items(), *rest.items(), *features.items()):
                array[done:stop] = record[name] + self._given[number] if name == "place" else record[name]
            done = stop
        return _Edges(**found, rest=rest, features=features)

    def _edge_names(self) -> list[str]:
        return arrays_in(self.root / names.edge_array(""))

    def _write_edges(self, new: _Edges) -> None:
        given = self._given_before()
        place = new.place + given
        if self.old.time is None:
            events, edge_id = behind(given, len(new.src)), place
        else:
            with closing(open_zarr_rows(self.root, names.event_array("time"), "mmap")) as rows:
                events = place_events(rows.map(), new.rest["time"])
            edge_id = events.number
        self.progress("graph")
        slots = slots_of(new.src, new.dst, edge_id, new.rest, self.old.undirected)
        self._slots, loops = grow_graph(self.root, self.out, self.num_nodes, slots, events)
        self._loops = loops > 0
        if self.old.time is None or not len(new.src):
            return
        self.progress("events")
        order, index = events.order, index_dtype(self.num_nodes)
        columns: dict[str, tuple[AnyArray, Any]] = {"src": (new.src, index), "dst": (new.dst, index)}
        columns |= {name: (column, None) for name, column in new.rest.items()}
        for name, (column, kind) in columns.items():
            grow_array(self.root, self.out, names.event_array(name), events.at, _ordered(column, order), kind)
        for name, rows_of in new.features.items():
            self.progress(f"edge features {name}")
            grow_array(self.root, self.out, names.edge_array(name), events.at, _ordered(rows_of, order))
        for scale in names_of_scales(self.root / names.edge_array("")):
            link_array(self.root, self.out, names.edge_array(scale))
        in_order = bool((np.diff(edge_id) == 1).all()) and int(events.at[0]) == events.old_rows
        was, self._sorted = self._sorted, self._sorted and in_order and not (self.total.missing or self.total.self_loops)
        if not self._sorted:
            self._write_places(events.at, place[order], was, events.old_rows)

    def _write_places(self, at: Ints, place: Ints, was_sorted: bool, old_rows: int) -> None:
        """The events' places in the input: where the old ones stood in order, theirs are their numbers."""
        name = names.event_array("input")
        if not was_sorted:
            grow_array(self.root, self.out, name, at, lambda first, last: place[first:last])
            return
        with Appender(self.out, name, (), np.int64, count=old_rows + len(at)) as sink:
            for block in spliced(np.arange, old_rows, 8, at, lambda first, last: place[first:last], np.int64):
                sink.append(block)

    def _given_before(self) -> int:
        """Edges of the input that the arrays were made from."""
        if self.old.input is not None:
            return self.old.input.edges
        if self.old.time is not None and self.old.time.sorted:
            return self.old.time.events
        most = -1
        with closing(open_zarr_rows(self.root, "events/input" if self.old.time else names.column("edge_id"))) as rows:
            for first in range(0, rows.shape[0], BLOCK_BYTES // 8):
                held = read_range(rows, first, min(first + BLOCK_BYTES // 8, rows.shape[0]))[0]
                most = max(most, int(held.max()))
        return most + 1

    def _node_names(self) -> list[str]:
        """Node arrays that change, all where there are new nodes, and were not taken over."""
        there = arrays_in(self.root / names.node_array(""))
        changed = [name for name in there if self.total.nodes or f"{ROWS}/{name}" in self._kinds]
        return [name for name in changed if not (self.out / names.node_array(name)).exists()]

    def _load_rows(self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> _NodeRows:
        """Of rows that were given more than once, the last ones."""
        count, done = self.total.rows.get(name, 0), 0
        row = np.empty(count, np.int64)
        held = open_memmap(self.out / STAGE / f"node-{name}.npy", "w+", dtype, (max(count, 1), *row_shape))
        for _, record in self.delta.records(f"{ROWS}/{name}"):
            stop = done + len(record["row"])
            row[done:stop], held[done:stop] = record["row"], record["value"]
            done = stop
        distinct, last = np.unique(row[::-1], return_index=True)
        at = count - 1 - last
        return _NodeRows(distinct, lambda low, high: np.asarray(held[at[low:high]]))

    def _write_node_array(self, name: str) -> None:
        self.progress(f"node array {name}")
        with closing(open_zarr_rows(self.root, names.node_array(name))) as rows:
            new = self._load_rows(name, rows.dtype, rows.shape[1:])
            if not self.whole and not small(name):
                write_array(self.out, delta_array(name, DELTA_ROWS), new.row)
                step = max(1, BLOCK_BYTES // rows.row_bytes)
                with Appender(
                    self.out, delta_array(name, DELTA_VALUES), rows.shape[1:], rows.dtype, count=len(new.row)
                ) as sink:
                    for first in range(0, len(new.row), step):
                        sink.append(new.values(first, min(first + step, len(new.row))))
                return
            attributes = getattr(rows, "attributes", {})
            held = np.zeros(len(names.SPLIT_CODES) + 1, np.int64)
            path = names.node_array(name)
            with Appender(self.out, path, rows.shape[1:], rows.dtype, attributes, count=self.num_nodes) as sink:
                for first in range(0, self.num_nodes, step := max(1, BLOCK_BYTES // rows.row_bytes)):
                    block = self._block(rows, new, first, min(first + step, self.num_nodes), name)
                    sink.append(block)
                    if name == "split" or name.startswith("split_"):
                        held += np.bincount(block.astype(np.int64) + (name == "split"), minlength=len(held))[: len(held)]
        self._count_splits(name, held.tolist())

    def _block(self, rows: Any, new: _NodeRows, first: int, last: int, name: str) -> AnyArray:
        """Rows first..last-1 of the grown array."""
        block = np.full((last - first, *rows.shape[1:]), _nothing(name, rows.dtype), rows.dtype)
        if first < rows.shape[0]:
            stop = min(last, rows.shape[0])
            block[: stop - first] = read_range(rows, first, stop)[0]
        low, high = np.searchsorted(new.row, [first, last]).tolist()
        block[new.row[low:high] - first] = new.values(low, high)
        return block

    def _count_splits(self, name: str, held: list[int]) -> None:
        if name == "split":
            sizes = {each: held[code + 1] for each, code in names.SPLIT_CODES.items()}
            self._splits = {each: size for each, size in sizes.items() if size}
        elif name.startswith("split_"):
            self._splits[name.removeprefix("split_")] = held[1]

    def _write_ids(self) -> None:
        kind = self.old.node_type().id_kind
        assert kind is not None
        self.progress("ids")
        external: list[Any] = []
        for _, record in self.delta.records(IDS):
            external += unpack_ids(record)
        if self.whole:
            grow_ids(self.root / names.IDS, self.out / names.IDS, kind, external, self.old.num_nodes)
            return
        rows = np.arange(self.old.num_nodes, self.num_nodes)
        by_id = sorted(range(len(external)), key=lambda at: external[at].encode() if kind == "str" else external[at])
        ids = [([external[at] for at in by_id], rows[by_id])]
        write_ids(self.out / names.IDS, kind, ids, [(external, rows)])

    def _link_the_rest(self) -> None:
        there = set(array_names(self.out))
        for name in array_names(self.root):
            if name not in there:
                link_array(self.root, self.out, name)
        link_tree(self.root / names.IDS, self.out / names.IDS)
        for top in ("graph", names.EVENTS, "node", "edge", names.CHECKSUMS):  # what says that they are groups
            for group in (self.root / top).rglob("zarr.json"):
                target = self.out / group.relative_to(self.root)
                if target.parent.is_dir() and not target.exists():
                    link_file(group, target)

    def _manifest(self) -> Manifest:
        old, total = self.old, self.total
        node = old.node_type().model_copy(
            update={"ranges": [(0, self.num_nodes)], "count": self.num_nodes, "splits": self._splits}
        )
        edge = old.edge_types[0].model_copy(update={"count": self._slots})
        events = None if old.time is None else old.time.events + total.edges
        time = None if old.time is None else old.time.model_copy(update={"events": events, "sorted": self._sorted})
        given = old.input
        if given is not None or total.missing or total.self_loops:
            before = given or Input(edges=self._given_before())
            given = before.model_copy(update={"edges": before.edges + total.given})
        changed = {
            "node_types": [node],
            "edge_types": [edge],
            "num_nodes": self.num_nodes,
            "num_edges": self._slots,
            "has_self_loops": self._loops,
            "time": time,
            "input": given,
        }
        return old.model_copy(update=changed)


def _ordered(column: AnyArray, order: Ints) -> Callable[[int, int], AnyArray]:
    return lambda first, last: column[order[first:last]]


def _nothing(name: str, dtype: np.dtype[Any]) -> Any:
    """What a small array holds of a node that nothing was said about: no label, no split, there from the beginning."""
    if name == "birth":
        return np.iinfo(dtype).min if dtype.kind == "i" else -np.inf
    return 0 if dtype.kind == "b" or not small(name) else -1


def pack_ids(external: list[Any]) -> dict[str, NDArray[Any]]:
    """A record of external ids, int or str."""
    if not external or isinstance(external[0], int):
        return {"number": np.array(external, np.int64)}
    encoded = [each.encode() for each in external]
    lengths = np.array([len(each) for each in encoded], np.int64)
    return {"text": np.frombuffer(b"".join(encoded), np.uint8), "length": lengths}


def unpack_ids(record: dict[str, NDArray[Any]]) -> list[Any]:
    """What `pack_ids` packed."""
    if "number" in record:
        return list(record["number"].tolist())
    text, ends = record["text"].tobytes(), np.cumsum(record["length"]).tolist()
    return [text[first:last].decode() for first, last in zip([0, *ends], ends, strict=False)]


def link_array(root: Path, out: Path, name: str) -> None:
    """`link_tree` of an array and its checksums."""
    for path in (name, names.checksum_array(name)):
        link_tree(root / path, out / path)


def link_tree(source: Path, target: Path) -> None:
    """The files below `source` once more below `target`, by hard links where the file system has them. Nothing where there is
    none, or where `target` is there."""
    if not source.is_dir() or target.exists():
        return
    for folder, _, files in os.walk(source):
        to = target / Path(folder).relative_to(source)
        to.mkdir(parents=True, exist_ok=True)
        for name in files:
            link_file(Path(folder, name), to / name)


def link_file(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

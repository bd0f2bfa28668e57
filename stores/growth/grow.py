"""A version of a store with its appends merged: complete, for `compact`, or only the changed parts, for readers.

A complete version links unchanged arrays; a view omits them. Node features may be most of a store, so a view has only their new
rows under `delta/<name>`, which `DeltaRows` overlays on the old ones; labels, splits and births are small and rewritten.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores import manifest as names
from ooc.stores.arrays.encoding import arrays_in
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.build import finish_store
from ooc.stores.growth.delta import IDS, ROWS, Appended, Delta, small
from ooc.stores.growth.edges import EdgeGrowth, given_before
from ooc.stores.growth.links import link_array, link_the_rest
from ooc.stores.growth.merge import Ints
from ooc.stores.growth.newids import IdIndex, unpack_ids
from ooc.stores.growth.rows import DELTA_ROWS, DELTA_VALUES, delta_array
from ooc.stores.growth.sorting import Column, Sorter
from ooc.stores.ids import grow_ids, write_ids
from ooc.stores.ingest.duck import Progress
from ooc.stores.io.segments import forget
from ooc.stores.manifest import Input, Manifest

STAGE = "stage"
BLOCK_BYTES = 2**24


class Growing:
    """Merges the appends in `delta` into the version `root`, in the folder `out`, which is then published.

    `whole` selects a complete version; `room` is the bytes of appended edges, rows and ids in memory (`sorting.room_of`),
    besides blocks of fixed size; `view` is a view of the same appends whose arrays a complete version reuses. Raises StoreError
    for a full disk or a damaged array.

    >>> Growing(root, delta, out, whole=True, room=2**26, progress=silent).write(final)
    """

    def __init__(
        self,
        root: Path,
        delta: Delta,
        out: Path,
        *,
        whole: bool,
        room: int,
        progress: Progress,
        view: Path | None = None,
    ) -> None:
        self.root, self.delta, self.out, self.whole, self.progress, self.view = root, delta, out, whole, progress, view
        self.room = room
        self.old = names.read_manifest(root)
        self.total = sum(delta.appends, Appended())
        self.num_nodes = self.old.num_nodes + self.total.nodes
        self._kinds = delta.kinds()
        self._splits: dict[str, int] = dict(self.old.node_type().splits)
        self._sorted = self.old.time is not None and self.old.time.sorted
        self._slots, self._loops = self.old.num_edges, self.old.has_self_loops
        self._edge_splits: dict[str, int] = dict(self.old.edge_types[0].splits)

    def write(self, final: Path) -> Path:
        """Write everything and publish it as the folder `final`."""
        shutil.rmtree(self.out, ignore_errors=True)
        (self.out / STAGE).mkdir(parents=True)
        try:
            if self.view is not None:
                self._take_over(self.view)
            elif self.total.edges or self.total.nodes:
                self._write_edges()
            for name in self._node_names():
                self._write_node_array(name)
            if self.total.nodes and self.old.node_type().id_kind is not None:
                self._write_ids()
            shutil.rmtree(self.out / STAGE)
            if self.whole:
                link_the_rest(self.root, self.out)
            return finish_store(self.out, final, self._manifest())
        except BaseException:
            shutil.rmtree(self.out, ignore_errors=True)
            raise

    def _take_over(self, view: Path) -> None:
        """Link the arrays of a view that are complete."""
        node_arrays = [names.node_array(name) for name in arrays_in(view / names.node_array(""))]
        for name in ("graph", names.EVENTS, "edge", *node_arrays):
            link_array(view, self.out, name)
        merged = names.read_manifest(view)
        self._slots, self._loops, self._splits = merged.num_edges, merged.has_self_loops, merged.node_type().splits
        self._sorted = merged.time is not None and merged.time.sorted
        self._edge_splits = dict(merged.edge_types[0].splits)

    def _write_edges(self) -> None:
        stage = self.out / STAGE
        growth = EdgeGrowth(self.root, self.out, self.delta, self.old, self.num_nodes, stage, self.room, self.progress)
        made = growth.write()
        self._slots, self._loops, self._sorted = made.slots, made.loops > 0, made.sorted
        self._edge_splits = {name: size + made.splits[name] for name, size in self._edge_splits.items()}

    def _node_names(self) -> list[str]:
        """Node arrays that change (all if there are new nodes) and were not reused."""
        there = arrays_in(self.root / names.node_array(""))
        changed = [name for name in there if self.total.nodes or f"{ROWS}/{name}" in self._kinds]
        return [name for name in changed if not (self.out / names.node_array(name)).exists()]

    def _sort_rows(self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> tuple[Column, Column]:
        """New and changed rows of a node array, ascending, and their latest values."""
        fields = {"row": (np.int64, ()), "turn": (np.int64, ()), "value": (dtype, row_shape)}
        sorter, done = Sorter(self.out / STAGE, f"node-{name}", fields, ("row", "turn"), self.room, last=True), 0
        for _, record in self.delta.records(f"{ROWS}/{name}"):
            stop = done + len(record["row"])
            sorter.add({**record, "turn": np.arange(done, stop)})
            done = stop
        found = sorter.finish()
        return found["row"], found["value"]

    def _write_node_array(self, name: str) -> None:
        with closing(open_zarr_rows(self.root, names.node_array(name))) as rows:
            row, value = self._sort_rows(name, rows.dtype, rows.shape[1:])
            step = max(1, BLOCK_BYTES // rows.row_bytes)
            if not self.whole and not small(name):
                for part, column in ((DELTA_ROWS, row), (DELTA_VALUES, value)):
                    with Appender(self.out, delta_array(name, part), column.shape, column.dtype, count=column.count) as sink:
                        for first in range(0, column.count, step):
                            sink.append(column.read(first, min(first + step, column.count)))
            else:
                self._write_whole(name, rows, row.map(), value, step)
        for column in (row, value):
            column.path.unlink()

    def _write_whole(self, name: str, rows: Any, row: Ints, value: Column, step: int) -> None:
        """Rewrite a node array with the rows `value` at `row`."""
        attributes, is_split = getattr(rows, "attributes", {}), name == "split" or name.startswith("split_")
        held = np.zeros(len(names.SPLIT_CODES) + 1, np.int64)
        with Appender(self.out, names.node_array(name), rows.shape[1:], rows.dtype, attributes, count=self.num_nodes) as sink:
            for first in range(0, self.num_nodes, step):
                block = self._block(rows, row, value, first, min(first + step, self.num_nodes), name)
                sink.append(block)
                if is_split:
                    held += np.bincount(block.astype(np.int64) + (name == "split"), minlength=len(held))[: len(held)]
                self.progress(f"node array {name}", first + len(block), self.num_nodes)
        self._count_splits(name, held.tolist())

    def _block(self, rows: Any, row: Ints, value: Column, first: int, last: int, name: str) -> AnyArray:
        """Rows first..last-1 of the grown array."""
        block = np.full((last - first, *rows.shape[1:]), _nothing(name, rows.dtype), rows.dtype)
        if first < rows.shape[0]:
            stop = min(last, rows.shape[0])
            block[: stop - first] = read_range(rows, first, stop)[0]
        low, high = np.searchsorted(row, [first, last]).tolist()
        block[row[low:high] - first] = value.read(low, high)
        forget(row)
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
        with closing(IdIndex(self.out / STAGE / "ids", kind)) as index:
            for external, rows in self._new_ids():
                index.add(external, rows)
                self.progress("ids", int(rows[-1]) + 1 - self.old.num_nodes, self.total.nodes)
            if self.whole:
                grow_ids(self.root / names.IDS, self.out / names.IDS, kind, index.by_id(), self._new_ids())
            else:
                write_ids(self.out / names.IDS, kind, index.by_id(), self._new_ids())

    def _new_ids(self) -> Iterator[tuple[list[Any], Ints]]:
        """Yield (external ids, rows) of new nodes in row order, one record at a time."""
        row = self.old.num_nodes
        for _, record in self.delta.records(IDS):
            external = unpack_ids(record)
            yield external, np.arange(row, row + len(external))
            row += len(external)

    def _manifest(self) -> Manifest:
        old, total = self.old, self.total
        node = old.node_type().model_copy(
            update={"ranges": [(0, self.num_nodes)], "count": self.num_nodes, "splits": self._splits}
        )
        edge = old.edge_types[0].model_copy(update={"count": self._slots, "splits": self._edge_splits})
        events = None if old.time is None else old.time.events + total.edges
        time = None if old.time is None else old.time.model_copy(update={"events": events, "sorted": self._sorted})
        given = old.input
        if given is not None or total.missing or total.self_loops:
            before = given or Input(edges=given_before(self.root, self.old))
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


def _nothing(name: str, dtype: np.dtype[Any]) -> Any:
    """Default of a small array for a new node: no label, no split, always existing."""
    if name == "birth":
        return np.iinfo(dtype).min if dtype.kind == "i" else -np.inf
    if name == "y" and dtype.kind == "f":
        return np.nan  # of a regression
    return 0 if dtype.kind == "b" or not small(name) else -1

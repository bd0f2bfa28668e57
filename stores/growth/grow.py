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

from ooc.stores import array_names as names
from ooc.stores.array_names import EdgeKey
from ooc.stores.arrays.encoding import arrays_in
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.build import finish_store
from ooc.stores.growth.delta import IDS, ROWS, Appended, Delta, small
from ooc.stores.growth.edges import EdgeGrowth, GrownEdges, given_before
from ooc.stores.growth.links import link_array, link_the_rest
from ooc.stores.growth.merge import Ints
from ooc.stores.growth.newids import IdIndex, unpack_ids
from ooc.stores.growth.parts import EdgePart, NodePart, edge_parts, node_parts, stage_of
from ooc.stores.growth.rows import DELTA_ROWS, DELTA_VALUES, delta_array
from ooc.stores.growth.sorting import Column, Sorter
from ooc.stores.ids import grow_ids, write_ids
from ooc.stores.ingest.duck import Progress
from ooc.stores.io.segments import forget
from ooc.stores.manifest import EdgeType, Input, Manifest, NodeType
from ooc.stores.metadata import read_manifest

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
        self.old = read_manifest(root)
        self.total = sum(delta.appends, Appended())
        self._nodes, self._edges = node_parts(self.old), edge_parts(self.old)
        self.counts = {name: part.type.count + self.total.of(part.prefix).nodes for name, part in self._nodes.items()}
        """nodes of each type"""
        self._splits = {name: dict(part.type.splits) for name, part in self._nodes.items()}
        self._sorted = self.old.time is not None and self.old.time.sorted
        self._made: dict[EdgeKey, GrownEdges] = {}
        """edge types that were written"""
        self._merged: Manifest | None = None

    def write(self, final: Path) -> Path:
        """Write everything and publish it as the folder `final`."""
        shutil.rmtree(self.out, ignore_errors=True)
        (self.out / STAGE).mkdir(parents=True)
        try:
            if self.view is not None:
                self._take_over(self.view)
            else:
                for part in self._edges.values():
                    self._write_edges(part)
            for own in self._nodes.values():
                for name in self._node_names(own):
                    self._write_node_array(own, name)
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
        of_nodes = [part.array(name) for part in self._nodes.values() for name in arrays_in(view / part.array(""))]
        for name in ("graph", names.EVENTS, "edge", *of_nodes):
            link_array(view, self.out, name)
        self._merged = read_manifest(view)

    def _write_edges(self, part: EdgePart) -> None:
        """Write the edges of a type where there are new ones, or its ends have new nodes."""
        before = self._nodes[part.type.source].type.count, self._nodes[part.type.target].type.count
        ends = self.counts[part.type.source], self.counts[part.type.target]
        delta = self.delta.of(part.prefix)
        if before == ends and not any(each.edges or each.given for each in delta.appends):
            return
        stage = stage_of(self.out / STAGE, part)
        growth = EdgeGrowth(self.root, self.out, delta, part, ends, stage, self.room, self.progress)
        self._made[part.key] = made = growth.write()
        self._sorted = made.sorted

    def _node_names(self, part: NodePart) -> list[str]:
        """Arrays of a node type that change (all if it has new nodes) and were not reused."""
        there, kinds = arrays_in(self.root / part.array("")), self.delta.of(part.prefix).kinds()
        new = self.total.of(part.prefix).nodes
        changed = [name for name in there if new or f"{ROWS}/{name}" in kinds]
        return [name for name in changed if not (self.out / part.array(name)).exists()]

    def _sort_rows(self, part: NodePart, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> tuple[Column, Column]:
        """New and changed rows of a node array, ascending, and their latest values."""
        fields = {"row": (np.int64, ()), "turn": (np.int64, ()), "value": (dtype, row_shape)}
        sorter = Sorter(stage_of(self.out / STAGE, part), f"node-{name}", fields, ("row", "turn"), self.room, last=True)
        done = 0
        for _, record in self.delta.of(part.prefix).records(f"{ROWS}/{name}"):
            stop = done + len(record["row"])
            sorter.add({**record, "turn": np.arange(done, stop)})
            done = stop
        found = sorter.finish()
        return found["row"], found["value"]

    def _write_node_array(self, part: NodePart, name: str) -> None:
        with closing(open_zarr_rows(self.root, part.array(name))) as rows:
            row, value = self._sort_rows(part, name, rows.dtype, rows.shape[1:])
            step = max(1, BLOCK_BYTES // rows.row_bytes)
            if not self.whole and not small(name):
                for what, column in ((DELTA_ROWS, row), (DELTA_VALUES, value)):
                    array = delta_array(name, what, part.type.name)
                    with Appender(self.out, array, column.shape, column.dtype, count=column.count) as sink:
                        for first in range(0, column.count, step):
                            sink.append(column.read(first, min(first + step, column.count)))
            else:
                self._write_whole(part, name, rows, row.map(), value, step)
        for column in (row, value):
            column.path.unlink()

    def _write_whole(self, part: NodePart, name: str, rows: Any, row: Ints, value: Column, step: int) -> None:
        """Rewrite a node array with the rows `value` at `row`."""
        attributes, is_split = getattr(rows, "attributes", {}), name == "split" or name.startswith("split_")
        held, total = np.zeros(len(names.SPLIT_CODES) + 1, np.int64), self.counts[part.type.name]
        with Appender(self.out, part.array(name), rows.shape[1:], rows.dtype, attributes, count=total) as sink:
            for first in range(0, total, step):
                block = self._block(rows, row, value, first, min(first + step, total), name)
                sink.append(block)
                if is_split:
                    held += np.bincount(block.astype(np.int64) + (name == "split"), minlength=len(held))[: len(held)]
                self.progress(f"node array {name}", first + len(block), total)
        self._count_splits(part.type.name, name, held.tolist())

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

    def _count_splits(self, node_type: str, name: str, held: list[int]) -> None:
        if name == "split":
            sizes = {each: held[code + 1] for each, code in names.SPLIT_CODES.items()}
            self._splits[node_type] = {each: size for each, size in sizes.items() if size}
        elif name.startswith("split_"):
            self._splits[node_type][name.removeprefix("split_")] = held[1]

    def _write_ids(self) -> None:
        """Write the ids of new nodes or, for a complete version, of all: types share a file."""
        mapped = [part for part in self._nodes.values() if part.type.id_kind is not None]
        grown = [part for part in mapped if self.total.of(part.prefix).nodes]
        for part in mapped if self.whole and grown else grown:
            kind = part.type.id_kind
            assert kind is not None
            with closing(IdIndex(stage_of(self.out / STAGE, part) / "ids", kind)) as index:
                for external, rows in self._new_ids(part):
                    index.add(external, rows)
                    self.progress("ids", int(rows[-1]) + 1 - part.type.count, self.total.of(part.prefix).nodes)
                target, name = self.out / names.IDS, part.type.name
                if self.whole:
                    grow_ids(self.root / names.IDS, target, kind, index.by_id(), self._new_ids(part), name)
                else:
                    write_ids(target, kind, index.by_id(), self._new_ids(part), name)

    def _new_ids(self, part: NodePart) -> Iterator[tuple[list[Any], Ints]]:
        """Yield (external ids, rows) of new nodes of a type in row order, one record at a time."""
        row = part.type.count
        for _, record in self.delta.of(part.prefix).records(IDS):
            external = unpack_ids(record)
            yield external, np.arange(row, row + len(external))
            row += len(external)

    def _manifest(self) -> Manifest:
        old, total, merged = self.old, self.total, self._merged
        nodes = [self._grown_nodes(part) for part in self._nodes.values()]
        edges = [self._grown_edges(each) for each in old.edge_types]
        changed: dict[str, Any] = {"node_types": nodes, "edge_types": edges}
        changed |= {"num_nodes": sum(each.count for each in nodes), "num_edges": sum(each.count for each in edges)}
        if not old.is_hetero:
            ((key, part),) = self._edges.items()
            changed["has_self_loops"] = self._made[key].loops > 0 if key in self._made else (merged or old).has_self_loops
            changed["input"] = self._input(part)
        if old.time is not None:
            is_sorted = self._sorted if merged is None or merged.time is None else merged.time.sorted
            changed["time"] = old.time.model_copy(update={"events": old.time.events + total.edges, "sorted": is_sorted})
        return old.model_copy(update=changed)

    def _grown_nodes(self, part: NodePart) -> NodeType:
        count, splits = self.counts[part.type.name], self._splits[part.type.name]
        if self._merged is not None:  # its small arrays were taken over
            splits = self._merged.node_type(part.type.name).splits
        ranges = [(0, count)] if part.type.ranges else []
        return part.type.model_copy(update={"ranges": ranges, "count": count, "splits": splits})

    def _grown_edges(self, own: EdgeType) -> EdgeType:
        """The entry of an edge type: as the view has it, or as it was written."""
        if self._merged is not None:
            return self._merged.edge_type(own.key)
        made = self._made.get(own.reverse_of or own.key)
        if made is None:
            return own
        changed: dict[str, Any] = {"count": made.slots}
        if own.reverse_of is None:
            changed["splits"] = {name: size + made.splits[name] for name, size in own.splits.items()}
            if self.old.is_hetero:
                changed |= {"has_self_loops": made.loops > 0, "input": self._input(self._edges[own.key])}
        elif self.old.is_hetero:
            changed |= {"has_self_loops": made.loops > 0, "input": self._input(self._edges[own.reverse_of])}
        return own.model_copy(update=changed)

    def _input(self, part: EdgePart) -> Input | None:
        """What a store says of its input edges, where some were dropped."""
        added = self.total.of(part.prefix)
        if part.input is None and not (added.missing or added.self_loops):
            return None
        before = part.input or Input(edges=given_before(self.root, part))
        return before.model_copy(update={"edges": before.edges + added.given})


def _nothing(name: str, dtype: np.dtype[Any]) -> Any:
    """Default of a small array for a new node: no label, no split, always existing."""
    if name == "birth":
        return np.iinfo(dtype).min if dtype.kind == "i" else -np.inf
    if name == "y" and dtype.kind == "f":
        return np.nan  # of a regression
    return 0 if dtype.kind == "b" or not small(name) else -1

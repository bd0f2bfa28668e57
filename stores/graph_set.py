"""`GraphSet`: the graphs of a store of many, with their labels, splits and external ids."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.encoding import DecodedRows, Encoding, encoding_of
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.arrays.whole import loaded, whole
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.bounds import ascending, within
from ooc.stores.errors import InputError, StoreError
from ooc.stores.ids import AnyIds, FetchedIds, IdMap, identity, rows_by_identity, whole_number
from ooc.stores.io.remote.group import RemoteGroup
from ooc.stores.labels import Task
from ooc.stores.manifest import Graphs, IdKind


class GraphSet:
    """The graphs of a store, opened and closed with it (`Dataset.graphs`).

    Graph g has the nodes ptr[g]:ptr[g + 1], and its edges are the slots edge_ptr[g]:edge_ptr[g + 1] of `Dataset.graph`.

    >>> graphs = ds.graphs
    >>> len(graphs), graphs.task, graphs.split("train")[:3]
    (5000, 'binary', array([0, 2, 3]))
    """

    def __init__(
        self,
        path: Path,
        manifest: Graphs,
        shape: tuple[int, int],
        engine: str,
        verify: bool = False,
        in_memory: bool = False,
    ) -> None:
        """Open the arrays below the group `path`; shape: nodes and edges of the store. Raises StoreError if they do not fit."""
        self.path, self._manifest, self._engine, self._verify, self._in_memory = path, manifest, engine, verify, in_memory
        self._opened: dict[str, Rows] = {}
        self._encodings: dict[str, Encoding] = {}
        self._members: dict[str, Members] = {}
        self._ids = None if manifest.id_kind is None else _open_ids(path, manifest.id_kind)
        try:
            self.ptr, self.edge_ptr = self._bounds(names.GRAPH_PTR, shape[0]), self._bounds(names.GRAPH_EDGE_PTR, shape[1])
            """int64[G + 1] each"""
        except BaseException:
            self.close()
            raise

    def _bounds(self, name: str, end: int) -> NDArray[np.int64]:
        rows = open_zarr_rows(self.path, name, "mmap")
        try:
            if rows.shape != (len(self) + 1,) or rows.dtype != np.int64:
                found = f"{rows.dtype}{list(rows.shape)}"
                raise StoreError(
                    f"{self.path / name} is {found}, the manifest says int64[{len(self) + 1}]: build the store again"
                )
            bounds = whole(rows, ascending(self.path / name, 0, end))
        finally:
            rows.close()
        if bounds[0] != 0 or bounds[-1] != end:
            raise StoreError(f"{self.path / name} must go from 0 to {end}: build the store again")
        return bounds

    def __len__(self) -> int:
        return self._manifest.count

    @property
    def names(self) -> list[str]:
        """Names of the arrays with a row per graph."""
        return sorted(self._manifest.arrays)

    def stored(self, name: str) -> Rows:
        """Return an array [G, ...] as it is on disk. Raises InputError if there is no such array."""
        if name not in self._manifest.arrays:
            raise InputError(f"the graphs of {self.path} have no array {name!r}: there are {', '.join(self.names) or 'none'}")
        if name not in self._opened:
            rows: Rows = open_zarr_rows(self.path, names.graphs_array(name), self._engine, self._verify)
            if (count := rows.shape[0]) != len(self):
                rows.close()
                raise StoreError(f"{self.path / names.graphs_array(name)} has {count} rows; the store has {len(self)} graphs")
            self._encodings[name] = encoding_of(rows, self.path / names.GRAPHS)
            self._opened[name] = loaded(rows) if self._in_memory else rows
        return self._opened[name]

    def encoding(self, name: str) -> Encoding:
        """Return the encoding of `stored(name)`. Raises as `stored` does."""
        self.stored(name)
        return self._encodings[name]

    def rows(self, name: str) -> Rows:
        """Return the values of an array [G, ...], decoded if stored in fewer bits. Raises as `stored` does.

        >>> ds.graphs.rows("y").read(ids, out)
        """
        stored, encoding = self.stored(name), self.encoding(name)
        return DecodedRows(stored, encoding) if encoding.is_short else stored

    @property
    def task(self) -> Task | None:
        """The task of the graphs' labels; None without labels."""
        return self._manifest.task

    @property
    def num_classes(self) -> int | None:
        return self._manifest.num_classes

    @property
    def class_names(self) -> list[str] | None:
        """As `Dataset.class_names`, of the graphs' labels."""
        return self._manifest.class_names

    @cached_property
    def labels(self) -> AnyArray | None:
        """Labels [G] or [G, C], a memory map in the dtype on disk, as `Dataset.labels`; None without labels."""
        if "y" not in self._manifest.arrays:
            return None
        rows, look = self.stored("y"), None
        if rows.dtype.kind == "i":
            top = (self.num_classes or 1) - 1 if self.task == "multiclass" else 1
            look = within(self.path / names.graphs_array("y"), -1, top)
        return whole(rows, look)

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self._manifest.splits)

    def split(self, name: str) -> NDArray[np.int64]:
        """Return the graphs in split `name`, int64[n], sorted. Raises InputError if there is no such split."""
        members = self.members(name)
        return members[np.arange(len(members))]

    def members(self, name: str) -> Members:
        """Return the graphs in split `name` in a fraction of their ids' memory. Raises as `split` does."""
        if name not in self.splits:
            raise InputError(f"the graphs of {self.path} have no split {name!r}: there are {', '.join(self.splits) or 'none'}")
        if name not in self._members:
            own = f"split_{name}"
            array = whole(self.stored(own if own in self._manifest.arrays else "split"))
            members = Members.of(array, 1 if own in self._manifest.arrays else names.SPLIT_CODES[name])
            if len(members) != (count := self._manifest.splits[name]):
                raise StoreError(
                    f"{self.path}: split {name!r} holds {len(members)} graphs, but the manifest says {count}; "
                    "run `ooc verify` on the store"
                )
            self._members[name] = members
        return self._members[name]

    def external(self, rows: Any) -> NDArray[np.int64] | list[str]:
        """Return the user's ids of the graphs `rows`, int64[n] or a list of str; the rows themselves without ids.

        Raises InputError if a row is out of range.
        """
        return identity(rows, len(self), "graph") if self._ids is None else self._ids.external(rows)

    def rows_of(self, external: Any) -> NDArray[np.int64]:
        """Return the rows of the graphs with the user's ids `external`, int64[n]. Raises InputError if ids are unknown."""
        return rows_by_identity(external, len(self), self.path, "graph") if self._ids is None else self._ids.rows(external)

    def row(self, external: Any) -> int:
        """Return the row of the graph with the user's id `external`. Raises InputError if there is none."""
        if self._ids is not None:
            return self._ids.row(external)
        return int(identity(whole_number(external, self.path, "graph"), len(self), "graph")[0])

    def close(self) -> None:
        """Release files and threads; idempotent."""
        for rows in self._opened.values():
            rows.close()
        if self._ids is not None:
            self._ids.close()

    def __repr__(self) -> str:
        return f"GraphSet({len(self):,} graphs, {', '.join(self.names) or 'no arrays'})"


def _open_ids(path: Path, kind: IdKind) -> AnyIds:
    remote = RemoteGroup.at(path)
    if remote is not None:
        return FetchedIds(remote, names.GRAPH_IDS, kind, what="graph")
    return IdMap(path / names.GRAPH_IDS, kind, what="graph")

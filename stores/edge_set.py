"""`EdgeSet`: the edges of one type of an open store: their topology, slot columns and features."""

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.array_names import EdgeKey, graph_array, show_edge_type
from ooc.stores.arrays.encoding import DecodedRows, Encoding, encoding_of
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.arrays.whole import Look, loaded, whole
from ooc.stores.arrays.zarr_rows import ShardedRows, open_zarr_rows
from ooc.stores.bounds import ascending, within
from ooc.stores.errors import InputError, StoreError
from ooc.stores.graph import Graph, check_parts, index_dtype
from ooc.stores.growth.place import Place
from ooc.stores.io.shared_blocks import SharedBlocks
from ooc.stores.labels import Task
from ooc.stores.manifest import EdgeType, Manifest


class EdgeSet:
    """The edges of one type; `Dataset.edges` returns it.

    >>> writes = ds.edges(("author", "writes", "paper"))
    >>> writes.graph.slots(17)  # the authors of paper 17 are writes.graph.indices of these slots
    """

    def __init__(
        self, place: Place, edge_type: EdgeType, graph: Graph, engine: str, verify_reads: bool, in_memory: bool = False
    ) -> None:
        self.path = place.address
        self.key: EdgeKey = edge_type.key
        """(source type, name, target type)"""
        self.graph = graph
        """the topology: `num_nodes` are those of the target type, `indices` rows of the source type"""
        self.reverse_of: EdgeKey | None = edge_type.reverse_of
        """the edge type whose edges these are in the other direction, with the same edge ids; None if they are its own"""
        described = edge_type if place.manifest.is_hetero else place.manifest
        self.undirected = described.undirected
        """whether every edge was added in both directions"""
        self._place, self._engine, self._verify_reads, self._in_memory = place, engine, verify_reads, in_memory
        owner = place.manifest.owner(edge_type)
        self._owner, self.names = owner.key, sorted(owner.arrays)
        """names of the edge features"""
        self.task: Task | None = owner.task
        """task of the edge labels, None without"""
        self.num_classes, self.class_names = owner.num_classes, owner.class_names
        """number and names of the classes, as of `NodeSet`"""
        self._splits: Mapping[str, int] = owner.splits
        self._rows: dict[str, Rows] = {}
        self._shared: SharedBlocks | None = None
        self._encodings: dict[str, Encoding] = {}
        self._of = f" of edge type {show_edge_type(self.key)}" if place.manifest.is_hetero else ""

    @classmethod
    def open(cls, place: Place, edge_type: EdgeType, engine: str, in_memory: bool, verify_reads: bool) -> Self:
        """Open the edges of a type. Arguments as of `Dataset.open`; raises as it does."""
        graph = _GraphReader(place, edge_type, in_memory, verify_reads).graph()
        return cls(place, edge_type, graph, engine, verify_reads, in_memory)

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.graph.num_edges

    def share_reads(self, blocks: SharedBlocks | None) -> None:
        """See `Dataset.share_reads`: of edge features, those that are opened later too."""
        self._shared = blocks
        for key in self._encodings:
            rows = self._rows[key]
            if isinstance(rows, ShardedRows):
                rows.share(blocks)

    def rows(self, name: str) -> Rows:
        """Return `indices` or one of `graph.columns` as Rows [E] by slot, or `indptr` as Rows [N + 1], for edges on disk.

        Opened once with the data set's engine and closed with it. Raises InputError if there is no such column.
        """
        if name not in ("indices", "indptr", *self.graph.columns):
            there = ", ".join(self.graph.columns) or "none"
            raise InputError(f"{self.path} has no edge column {name!r}{self._of}: there are {there}")
        path = graph_array(name, self.key)
        if path not in self._rows:
            self._rows[path] = open_zarr_rows(self._place.group(path), path, self._engine, self._verify_reads)
        return self._rows[path]

    def features(self, name: str) -> Rows:
        """Return the values of an edge feature, one row per edge id (`batch.e_id`), as `rows` does for nodes.

        Opened once with the data set's engine and closed with it. A reverse edge type has the features of its edges.

        Args:
            name: Name of the feature.

        Returns:
            The values, [input edges, ...].

        Raises:
            InputError: If there is no such feature.

        >>> ds.edges(("user", "rates", "movie")).features("edge_attr").read(e_id, out)
        """
        stored, encoding = self.stored(name)
        return DecodedRows(stored, encoding) if encoding.is_short else stored

    def stored(self, name: str) -> tuple[Rows, Encoding]:
        """Return an edge feature as it is on disk, and its encoding. Raises as `features` does."""
        if name not in self.names:
            raise InputError(f"{self.path} has no edge feature {name!r}{self._of}: there are {', '.join(self.names) or 'none'}")
        key = names.edge_array(name, self._owner)
        if key not in self._rows:
            rows: Rows = open_zarr_rows(self._place.group(key), key, self._engine, self._verify_reads)
            if self._shared is not None and isinstance(rows, ShardedRows):
                rows.share(self._shared)
            self._encodings[key] = encoding_of(rows, (self._place.group(key) / key).parent)
            self._rows[key] = loaded(rows) if self._in_memory else rows
        return self._rows[key], self._encodings[key]

    @cached_property
    def labels(self) -> AnyArray | None:
        """Labels by edge id, [edge ids] or [edge ids, C], of the dtypes of node labels: -1 or NaN if unlabeled.

        A memory map; None without labels.
        """
        if self.task is None:
            return None
        look = None
        if self.task != "regression":
            path = names.edge_array("y", self._owner)
            top = (self.num_classes or 1) - 1 if self.task == "multiclass" else 1
            look = within(self._place.group(path) / path, -1, top)
        return self._whole("y", look)

    def _whole(self, name: str, look: Look | None = None) -> AnyArray:
        """An array with an entry per edge id as a memory map."""
        path = names.edge_array(name, self._owner)
        with closing(open_zarr_rows(self._place.group(path), path, "mmap", self._verify_reads)) as rows:
            return whole(rows, look)

    @property
    def splits(self) -> list[str]:
        """Names of the splits of edges."""
        return list(self._splits)

    def members(self, name: str) -> Members:
        """Return the slots of the edges in split `name`, for `graph` and `LinkNeighborLoader`.

        Of a graph that was made undirected, an edge's slot from the smaller to the larger row alone, so that it counts once.

        Raises:
            InputError: If there is no such split.

        >>> members = ds.edges().members("train")
        >>> e_id = ds.graph.edge_ids(members[np.arange(len(members))])
        """
        if name not in self._splits:
            raise InputError(
                f"{self.path} has no split {name!r} of edges{self._of}: there are {', '.join(self.splits) or 'none'}"
            )
        own = f"split_{name}"
        path = names.edge_array(own, self._owner)
        if (self._place.group(path) / path).exists():
            by_slot: Any = _BySlot(self, self._whole(own), 1)
        else:
            by_slot = _BySlot(self, self._whole("split"), names.SPLIT_CODES[name])
        return Members.of(by_slot)

    def close(self) -> None:
        """Release files; idempotent. The graph stays valid."""
        for each in self._rows.values():
            each.close()

    def __repr__(self) -> str:
        return f"EdgeSet({self.key!r}: {self.num_edges:,} edges, {', '.join(self.names) or 'no features'})"


class _BySlot:
    """Which slots have an edge id with this entry, as an array that is made a part at a time; see `EdgeSet.members`."""

    def __init__(self, edges: EdgeSet, of_edges: AnyArray, wanted: int) -> None:
        self._graph, self._once, self._of_edges, self._wanted = edges.graph, edges.undirected, of_edges, wanted

    def __len__(self) -> int:
        return self._graph.num_edges

    def __getitem__(self, part: slice) -> NDArray[np.bool_]:
        slot = np.arange(*part.indices(len(self)))
        found = np.asarray(self._of_edges[self._graph.edge_ids(slot)] == self._wanted)
        if not self._once:
            return found
        target = np.searchsorted(self._graph.indptr, slot, side="right") - 1
        return np.asarray(found & (np.asarray(self._graph.indices[part]) <= target))


class _GraphReader:
    """Opens the arrays of an edge type's CSC and checks them against the manifest."""

    def __init__(self, place: Place, edge_type: EdgeType, in_memory: bool, verify_reads: bool) -> None:
        manifest = place.manifest
        self.key, self.in_memory, self.verify_reads = edge_type.key, in_memory, verify_reads
        self.path = place.group(graph_array("indptr", self.key))
        self.described: Manifest | EdgeType = edge_type if manifest.is_hetero else manifest
        self.partition = manifest.partition
        self.nodes, self.edges = manifest.node_type(edge_type.target).count, edge_type.count
        self.sources = None if edge_type.source == edge_type.target else manifest.node_type(edge_type.source).count

    def graph(self) -> Graph:
        """The graph. Raises StoreError if arrays do not fit the manifest, or hold numbers that are none of nodes and slots."""
        name = graph_array("indptr", self.key)
        indptr = self._take("indptr", self.nodes + 1, np.dtype(np.int64), self._ascending("indptr", self.edges))
        if indptr[0] != 0 or indptr[-1] != self.edges:
            raise StoreError(f"{self.path / name} must go from 0 to {self.edges}: build the store again")
        time = self.described.time
        dtypes = names.COLUMN_DTYPES | ({} if time is None else {"time": np.dtype(time.dtype)})
        columns = {name: self._take(name, self.edges, dtypes.get(name)) for name in self.described.columns}
        loops = np.empty(0, np.int64)
        if self.described.has_self_loops:
            loops = self._take("self_loops", None, np.dtype(np.int64), self._ascending("self_loops", self.nodes - 1))
        total, loop_weight = self._weights(loops)
        sources = self.nodes if self.sources is None else self.sources
        look = within(self.path / graph_array("indices", self.key), 0, sources - 1)
        parts = self._parts()
        indices = self._take("indices", self.edges, index_dtype(sources), look)
        return Graph(indptr, indices, columns, loops, total, loop_weight, parts, self.sources)

    def _weights(self, loops: NDArray[np.int64]) -> tuple[AnyArray | None, AnyArray | None]:
        if not self.described.weighted:
            return None, None
        path = self.path / graph_array("loop_weight", self.key)
        if len(loops) and not path.exists():
            raise StoreError(f"{path} is missing, as in stores of an earlier ooc: build the store again")
        single = np.dtype(np.float32)
        total = self._take("weight_sum", self.nodes, single)
        return total, self._take("loop_weight", len(loops), single) if len(loops) else np.empty(0, np.float32)

    def _parts(self) -> NDArray[np.int64] | None:
        if self.partition is None:
            return None
        parts = np.array(self._take("parts", self.partition.parts + 1, np.dtype(np.int64)))
        try:
            return check_parts(parts, self.nodes)
        except InputError as error:
            raise StoreError(f"{self.path / names.PARTS} is damaged: {error}; build the store again") from None

    def _ascending(self, name: str, high: int) -> Callable[[int, AnyArray], None]:
        return ascending(self.path / graph_array(name, self.key), 0, high)

    def _take(self, leaf: str, count: int | None, dtype: np.dtype[Any] | None = None, look: Look | None = None) -> AnyArray:
        name = graph_array(leaf, self.key)
        rows: Rows = open_zarr_rows(self.path, name, engine="mmap")
        try:
            wrong_count = len(rows.shape) != 1 or (count is not None and rows.shape[0] != count)
            if wrong_count or (dtype is not None and rows.dtype != dtype):
                expected = f"{dtype or ''}[{'k' if count is None else count}]"
                actual = f"{rows.dtype}{list(rows.shape)}"
                raise StoreError(f"{self.path / name} is {actual}, the manifest says {expected}: build the store again")
            if self.in_memory:
                rows = loaded(rows)
            large = leaf == "indices" or leaf in self.described.columns  # read when it is used, by what checks it
            return rows.map() if large and isinstance(rows, ShardedRows) and not self.verify_reads else whole(rows, look)
        finally:
            rows.close()

"""`Dataset`: a store opened for training: graph, rows, labels, splits and external ids, checked against its manifest."""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.array_names import EdgeKey, parse_edge_type, show_edge_type
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.arrays.joined_rows import JoinedRows
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.events import Events
from ooc.stores.feature_map import FeatureMap
from ooc.stores.graph import Graph
from ooc.stores.graph_set import GraphSet
from ooc.stores.growth.lineage import touched_since
from ooc.stores.growth.place import Place, open_place
from ooc.stores.io.remote.url import store_path
from ooc.stores.io.shared_blocks import SharedBlocks
from ooc.stores.labels import Task
from ooc.stores.node_set import NodeSet
from ooc.stores.process import ProcessMemory
from ooc.stores.remote.mirror import Mirror, mirror_of
from ooc.stores.sizes import parse_bytes

if TYPE_CHECKING:
    from ooc.stores.ingest.duck import Progress

_ENGINES = ("auto", "uring", "pread", "mmap", "gds")


class Dataset:
    """A store opened for reading with `Dataset.open`; close it, or use it as a context manager.

    `nodes` and `edges` give what there is of each type. The attributes of a homogeneous graph (`graph`, `rows`, `labels`,
    `split`, ...) are those of the only node type and the only edge type; with several types they raise InputError.

    >>> with Dataset.open("papers.ooc", memory="2GB") as ds:
    ...     ds.graph.degree(ds.split("train"))
    >>> with Dataset.open("mag.ooc", memory="2GB") as ds:
    ...     ds.edges(("author", "writes", "paper")).graph.degree(ds.nodes("paper").split("train"))
    """

    def __init__(
        self,
        place: Place,
        nodes: dict[str, NodeSet],
        edges: dict[EdgeKey, EdgeSet],
        memory: int | None,
        engine: str,
        verify_reads: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        self.path = place.address
        """the store: its directory, or a URL"""
        self.manifest = place.manifest
        self._place, self._mirror = place, mirror
        self.memory = memory
        """bytes the process may use; None without a limit"""
        self._nodes, self._edges = nodes, edges
        self._joined: dict[str, JoinedRows] = {}
        self._opened: dict[str, Any] = {}
        self.shared: SharedBlocks | None = None
        """memory in which passes over rows are shared with other processes of the host"""
        self._events: Events | None = None
        self._graphs: GraphSet | None = None
        self.engine = engine
        """how rows are read, as requested"""
        self.verify_reads = verify_reads
        """whether all chunks are compared with their checksums before rows are read from them"""

    @classmethod
    def open(
        cls,
        path: Path | str,
        memory: int | str | None = None,
        engine: str = "auto",
        in_memory: bool = False,
        features: Mapping[str, Path | str] | None = None,
        progress: "Progress | None" = None,
        float_features: bool = False,
        verify_reads: bool = False,
        cache_dir: Path | str | None = None,
        cache: int | str | None = None,
    ) -> Self:
        """Open and check the store at `path`.

        Args:
            path: Directory of the store, or its URL (s3://, gs://, https://), which needs the extra `ooc[remote]`.
            memory: Memory limit of the whole process, such as "2GB"; loaders and training divide it.
            engine: How rows are read: "uring" or "pread" (O_DIRECT, many reads in flight), "mmap", "gds" (CUDA), or "auto" (see
                `open_engine`).
            in_memory: Whether to load all node arrays and the topology into RAM now, and edge features once they are used.
            features: Name of a node array -> Zarr array or LMDB directory that replaces it, one row per node; "paper/x" is the
                array x of node type "paper".
            progress: Called with the progress of merging appended data, which the first reader after an append does, and of
                fetching the topology from a URL.
            float_features: Whether `x` is float32 where the store has integers; built-in models compute with floats.
            verify_reads: Whether to compare every chunk with its checksum before rows are read from it, once each, and to read
                it whole for that: at most one more pass over the store. Otherwise only chunks that are read whole anyway are
                compared: those of the topology, labels and splits, of scans of features, and of events in order.
            cache_dir: Directory that keeps what was read from a URL; by default `~/.cache/ooc/stores`.
            cache: Most bytes that it takes, such as "200GB"; by default half of what is free there.

        Raises:
            StoreError: If there is no store, it cannot be reached, it is truncated or damaged, or its arrays do not fit the
                manifest; if the cache has no room for the topology.
            InputError: If `features` do not fit.
            ConfigError: If a setting is invalid.

        >>> Dataset.open("papers.ooc", memory="2GB", features={"x": "embeddings.zarr"})
        """
        if engine not in _ENGINES:
            raise ConfigError(f"engine {engine!r} is unknown: use one of {', '.join(_ENGINES)}")
        budget = None if memory is None else parse_bytes(memory, "memory")
        path, mirror = store_path(path), mirror_of(path, cache_dir, cache)
        try:
            place = open_place(path if mirror is None else mirror.path, budget, progress, path)
        except BaseException:
            if mirror is not None:
                mirror.close()
            raise
        nodes: dict[str, NodeSet] = {}
        try:
            if mirror is not None:
                mirror.fill(None if progress is None else partial(progress, unit="bytes"))
            edges = {each.key: EdgeSet.open(place, each, engine, in_memory, verify_reads) for each in place.manifest.edge_types}
            replaced = _by_type(features or {}, place)
            for each in place.manifest.node_types:
                own = replaced[each.name]
                nodes[each.name] = NodeSet.open(place, each, engine, own, verify_reads, in_memory, float_features)
        except BaseException:
            for opened in nodes.values():
                opened.close()
            place.close()
            if mirror is not None:
                mirror.close()
            raise
        dataset = cls(place, nodes, edges, budget, engine, verify_reads, mirror)
        dataset._opened = {"memory": memory, "engine": engine, "in_memory": in_memory, "features": features}
        dataset._opened["float_features"] = float_features
        dataset._opened |= {"verify_reads": verify_reads, "cache_dir": cache_dir, "cache": cache}
        return dataset

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `open` that were given, by name: memory, engine, in_memory, features, verify_reads, cache_dir, cache."""
        features = {name: str(path) for name, path in (self._opened["features"] or {}).items()}
        engine = None if self.engine == "auto" else self.engine
        given = {**self._opened, "features": features, "engine": engine, "float_features": None}
        return {name: value for name, value in given.items() if value}

    @cached_property
    def process_memory(self) -> ProcessMemory:
        """What its loaders divide, measured once by the first; a later one does not count the batches of earlier ones."""
        return ProcessMemory.measure(self.memory)

    def share_reads(self, blocks: SharedBlocks | None) -> None:
        """Share passes over feature rows with the processes of this host that share `blocks`; None: no more.

        What one of them reads the others copy, and loaders group batches alike; batches stay the same. Not while rows are read.
        Whoever made `blocks` closes it.

        >>> ds.share_reads(SharedBlocks.attach(address, member=1))
        """
        self.shared = blocks
        for nodes in self._nodes.values():
            nodes.share_reads(blocks)
        for edges in self._edges.values():
            edges.share_reads(blocks)

    @property
    def is_hetero(self) -> bool:
        """Whether the types of nodes and edges have names; see `node_types` and `edge_types`."""
        return self.manifest.is_hetero

    @property
    def node_types(self) -> list[str]:
        """The node types, in the order of the store; `["node"]` for a homogeneous graph."""
        return list(self._nodes)

    @property
    def edge_types(self) -> list[EdgeKey]:
        """The edge types (source type, name, target type), in the order of the store."""
        return list(self._edges)

    def metadata(self) -> tuple[list[str], list[EdgeKey]]:
        """Return (node_types, edge_types), as `HeteroData.metadata` does."""
        return self.node_types, self.edge_types

    def nodes(self, node_type: str | None = None) -> NodeSet:
        """Return the nodes of a type.

        Args:
            node_type: The type; None for the only one.

        Returns:
            Their arrays, labels, splits and ids, open as long as the data set.

        Raises:
            InputError: If there is no such type, or None is given and there are several.

        >>> ds.nodes("paper").labels
        """
        if node_type is None and len(self._nodes) == 1:
            return next(iter(self._nodes.values()))
        there = ", ".join(self._nodes)
        if node_type is None:
            first = next(iter(self._nodes))
            raise InputError(f"{self.path} has several node types ({there}): choose one, as in `ds.nodes({first!r})`")
        if node_type not in self._nodes:
            raise InputError(f"{self.path} has no node type {node_type!r}: there are {there}")
        return self._nodes[node_type]

    def edges(self, edge_type: EdgeKey | str | None = None) -> EdgeSet:
        """Return the edges of a type.

        Args:
            edge_type: The type, as (source type, name, target type) or "source:name:target"; None for the only one.

        Returns:
            Their topology and features, open as long as the data set.

        Raises:
            InputError: If there is no such type, or None is given and there are several.

        >>> ds.edges(("author", "writes", "paper")).graph
        """
        if edge_type is None and len(self._edges) == 1:
            return next(iter(self._edges.values()))
        there = ", ".join(map(show_edge_type, self._edges)) or "none"
        if edge_type is None:
            example = f", as in `ds.edges({next(iter(self._edges))})`" if self._edges else ""
            raise InputError(f"{self.path} has several edge types ({there}): choose one{example}")
        key = parse_edge_type(edge_type) if isinstance(edge_type, str) else edge_type
        if key not in self._edges:
            raise InputError(f"{self.path} has no edge type {show_edge_type(key)}: there are {there}")
        return self._edges[key]

    def joined_rows(self, name: str) -> JoinedRows:
        """Return the node arrays `name` of all types that have one, as they are on disk, one type behind the other.

        Args:
            name: Name of the array, such as "x".

        Returns:
            The rows, the same object in every call; `begin` says where each type's begin.

        Raises:
            InputError: If no type has such an array.

        >>> ds.joined_rows("x").begin["paper"]
        """
        if name not in self._joined:
            parts = {node_type: nodes.stored(name) for node_type, nodes in self._nodes.items() if name in nodes.names}
            if not parts:
                raise InputError(f"{self.path} has no node array {name!r} of any type")
            self._joined[name] = JoinedRows(parts)
        return self._joined[name]

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all types."""
        return self.manifest.num_nodes

    @property
    def num_edges(self) -> int:
        """Number of edges of all types."""
        return self.manifest.num_edges

    @property
    def graph(self) -> Graph:
        """The topology. Raises InputError if there are several edge types."""
        return self.edges().graph

    @property
    def num_features(self) -> int:
        """Number of columns of `x`; 0 for a store without features."""
        return self.nodes().num_features

    @property
    def num_node_features(self) -> int:
        """PyG's name of `num_features`."""
        return self.num_features

    @property
    def num_classes(self) -> int | None:
        """Number of classes; of label columns in a multilabel task, of targets in a regression."""
        return self.nodes().num_classes

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes if the labels were words, or of the label columns if there were several, in order; else None."""
        return self.nodes().class_names

    @property
    def task(self) -> Task | None:
        """What the labels are: "multiclass", "binary", "multilabel" or "regression"; None without labels."""
        return self.nodes().task

    @property
    def names(self) -> list[str]:
        """Names of the node arrays."""
        return self.nodes().names

    def rows(self, name: str) -> Rows:
        """Return the values of the node array `name`. Raises InputError if the store has no such array.

        Values stored in fewer bits (float16, bfloat16, int8 with a scale) are decoded to float32 as they are read. `stored`
        returns the rows as they are on disk, `encoding` their encoding.

        >>> ds.rows("x").read(ids, out)  # float32[n, F]
        """
        return self.nodes().rows(name)

    def stored(self, name: str) -> Rows:
        """Return the node array `name` as it is on disk. Raises as `rows` does."""
        return self.nodes().stored(name)

    def encoding(self, name: str) -> Encoding:
        """Return the encoding of `stored(name)`. Raises as `rows` does."""
        return self.nodes().encoding(name)

    def feature_map(self, name: str = "x") -> FeatureMap | None:
        """Return the map that made a node feature narrower (`reduce`, `select`); None if none did, or other rows replace it.

        Raises InputError if there is no such array, StoreError if the map is damaged.

        >>> ds.feature_map("x").apply(raw)  # float32[n, 64] of [n, 500]
        """
        return self.nodes().feature_map(name)

    def edge_rows(self, name: str) -> Rows:
        """Return `indices` or one of `graph.columns` as Rows [E], or `indptr` as Rows [N + 1], for edges that stay on disk.

        Opened once with the data set's engine and closed with it. Raises InputError if there is no such column.
        """
        return self.edges().rows(name)

    def edge_features(self, name: str) -> Rows:
        """Return the values of an edge feature, one row per edge id (`batch.e_id`), as `rows` does for nodes.

        Opened once with the data set's engine and closed with it. Raises InputError if there is no such feature.

        >>> ds.edge_features("edge_attr").read(batch.e_id.numpy(), out)
        """
        return self.edges().features(name)

    def stored_edge_features(self, name: str) -> tuple[Rows, Encoding]:
        """Return an edge feature as it is on disk, and its encoding. Raises as `edge_features` does."""
        return self.edges().stored(name)

    @property
    def events(self) -> Events:
        """The edges in time order. Raises InputError for a store without edge times.

        >>> ds.events.read(0, 1000).time
        """
        if self.manifest.time is None:
            raise InputError(f"{self.path} has no times: ingest it with `time`")
        if self._events is None:
            group = self._place.group(names.event_array("time"))
            self._events = Events(group, self.manifest, self.engine, self.verify_reads)
        return self._events

    @property
    def num_graphs(self) -> int:
        """Number of graphs: 1, or those of a store of many."""
        return 1 if self.manifest.graphs is None else self.manifest.graphs.count

    @property
    def graphs(self) -> GraphSet:
        """The graphs of a store of many. Raises InputError for a store of one graph.

        >>> ds.graphs.split("train")
        """
        if self.manifest.graphs is None:
            raise InputError(f"{self.path} holds one graph: ingest it with `graph_id` to tell its graphs apart")
        if self._graphs is None:
            shape = self.num_nodes, self.num_edges
            group = self._place.group(names.GRAPH_PTR)
            in_memory = bool(self._opened.get("in_memory"))
            self._graphs = GraphSet(group, self.manifest.graphs, shape, self.engine, self.verify_reads, in_memory)
        return self._graphs

    def reading(self, name: str) -> str:
        """Describe how a node array is read: by which engine, and why if it is not the requested one."""
        return self.nodes().reading(name)

    @property
    def labels(self) -> AnyArray | None:
        """Labels [N] int8, int16 or int32 (multiclass), int8 [N] (binary) or int8 [N, C] (multilabel), -1 if unlabeled; float32
        [N] or [N, T], NaN if unlabeled (regression).

        A memory map in the dtype on disk (see `label_dtype`); None for a store without labels.
        """
        return self.nodes().labels

    @property
    def y(self) -> AnyArray | None:
        """PyG's name of `labels`; a NumPy array."""
        return self.labels

    @property
    def train_mask(self) -> NDArray[np.bool_]:
        """Which nodes are in the split "train", bool[N]; `val_mask` and `test_mask` alike. Raises as `split` does."""
        return self.nodes().train_mask

    @property
    def val_mask(self) -> NDArray[np.bool_]:
        return self.nodes().val_mask

    @property
    def test_mask(self) -> NDArray[np.bool_]:
        return self.nodes().test_mask

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return self.nodes().splits

    def split(self, name: str) -> NDArray[np.int64]:
        """Return the rows in split `name`, int64[n], sorted. Raises InputError if there is no such split."""
        return self.nodes().split(name)

    def members(self, name: str) -> Members:
        """Return the rows in split `name` in a fraction of their ids' memory. Raises as `split` does."""
        return self.nodes().members(name)

    def external(self, rows: Any) -> NDArray[np.int64] | list[str]:
        """Return the user's ids of `rows` (int64[n], or a CPU tensor): int64[n] or a list of str; the rows themselves without
        ids.

        Raises InputError if a row is out of range.
        """
        return self.nodes().external(rows)

    def rows_of(self, external: Any) -> NDArray[np.int64]:
        """Return the rows of the nodes with the user's ids `external`, in the same order.

        Args:
            external: Sequence, array or CPU tensor of ids, [n]: integers or str, as in the input.

        Returns:
            int64[n].

        Raises:
            InputError: If ids are unknown; names how many and the first of them.

        >>> ds.rows_of(["u_1", "u_2"])
        array([17, 4])
        """
        return self.nodes().rows_of(external)

    def row(self, external: Any) -> int:
        """Return the row of the node with the user's id `external`. Raises InputError if there is none."""
        return self.nodes().row(external)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the data; replaced features contribute their dtype, scale and shape."""
        return self._place.fingerprint + self._mark

    @property
    def _mark(self) -> str:
        marks = {
            f"{each.name}/{name}" if self.is_hetero else name: text
            for each in self._nodes.values()
            for name, text in each.replaced.items()
        }
        return "".join(f"+{name}={text}" for name, text in marks.items())

    def grown_since(self, fingerprint: str) -> NDArray[np.int64] | None:
        """Return the nodes with a changed in-edge or row, including new nodes, since the given fingerprint: int64[k],
        ascending.

        Empty if the data are the same; None if the store never had that fingerprint. Raises StoreError as reading does.
        """
        if not fingerprint.endswith(self._mark):
            return None
        was = fingerprint[: len(fingerprint) - len(self._mark)]
        return touched_since(self._place.path, was, self._place.fingerprint)

    def follow(self, progress: "Progress | None" = None) -> Self:
        """Return the current store: this data set if nothing was appended since it was opened, else a new one with the same
        settings.

        This data set remains valid until it is closed. Raises as `open` does.

        >>> newer = ds.follow()  # between two epochs
        """
        latest = self._place.is_latest() and (self._mirror is None or self._mirror.is_latest())
        return self if latest else type(self).open(self.path, progress=progress, **self._opened)

    def close(self) -> None:
        """Release files and threads; idempotent. Arrays already obtained (graph, labels) stay valid."""
        for nodes in self._nodes.values():
            nodes.close()
        for edges in self._edges.values():
            edges.close()
        if self._events is not None:
            self._events.close()
        if self._graphs is not None:
            self._graphs.close()
        self._place.close()
        if self._mirror is not None:
            self._mirror.close()

    def __reduce__(self) -> Any:
        """A pickled data set is opened again where it is unpickled, with the same settings (`torch.multiprocessing.spawn`)."""
        return _reopened, (type(self), self.path.absolute(), self._opened)

    def __fspath__(self) -> str:
        """The store's path: a data set may be given where a path is, as in `ooc.verify(ds)`."""
        return str(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = [*self.node_types, *map(show_edge_type, self.edge_types)] if self.is_hetero else self.names
        return f"Dataset({str(self.path)!r}: {self.num_nodes:,} nodes, {self.num_edges:,} edges, {', '.join(what)})"


def _reopened(cls: type[Dataset], path: Path, settings: dict[str, Any]) -> Dataset:
    return cls.open(path, **settings)


def _by_type(features: Mapping[str, Path | str], place: Place) -> dict[str, dict[str, Path | str]]:
    """The `features` of each node type, by the name of the array. Raises InputError for another type."""
    found: dict[str, dict[str, Path | str]] = {each.name: {} for each in place.manifest.node_types}
    for name, source in features.items():
        node_type, _, array = name.rpartition("/")
        if not place.manifest.is_hetero:
            node_type, array = names.NODE, name
        if node_type not in found:
            there = ", ".join(found)
            raise InputError(f"`features` {name!r}: name the node type too, as in {next(iter(found))}/x; there are {there}")
        found[node_type][array] = source
    return found

"""`Dataset`: a store opened for training: graph, rows, labels, splits and external ids, checked against its manifest."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ooc.stores import manifest as names
from ooc.stores.arrays.encoding import DecodedRows, Encoding, arrays_in, encoding_of
from ooc.stores.arrays.external import open_features
from ooc.stores.arrays.lmdb_rows import LmdbRows
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Rows
from ooc.stores.arrays.whole import Look, loaded, whole
from ooc.stores.arrays.zarr_rows import ShardedRows, open_zarr_rows
from ooc.stores.bounds import ascending, within
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.events import Events
from ooc.stores.graph import Graph, check_parts, index_dtype
from ooc.stores.growth.lineage import touched_since
from ooc.stores.growth.place import Place, open_place
from ooc.stores.growth.rows import DELTA_ROWS, DELTA_VALUES, DeltaRows, delta_array
from ooc.stores.ids import GrownIds, IdMap, identity, rows_by_identity, whole_number
from ooc.stores.io.engines import describe
from ooc.stores.manifest import Task
from ooc.stores.process import ProcessMemory
from ooc.stores.sizes import parse_bytes

if TYPE_CHECKING:
    from ooc.stores.ingest.duck import Progress

_ENGINES = ("auto", "uring", "pread", "mmap", "gds")


class Dataset:
    """A store opened for reading with `Dataset.open`; close it, or use it as a context manager.

    >>> with Dataset.open("papers.ooc", memory="2GB") as ds:
    ...     ds.graph.degree(ds.split("train"))
    """

    def __init__(
        self,
        place: Place,
        graph: Graph,
        rows: dict[str, Rows],
        encodings: dict[str, Encoding],
        ids: IdMap | GrownIds | None,
        memory: int | None,
        engine: str,
        verify_reads: bool = False,
    ) -> None:
        self.path = place.path
        self.manifest = place.manifest
        self._place = place
        self.graph = graph
        self.memory = memory
        """bytes the process may use; None without a limit"""
        self._rows = rows
        self._encodings = encodings
        self._values = {
            name: DecodedRows(rows[name], each) if each.is_short else rows[name] for name, each in encodings.items()
        }
        self._ids = ids
        self._replaced: dict[str, str] = {}
        self._opened: dict[str, Any] = {}
        self._members: dict[str, Members] = {}
        self._edge_rows: dict[str, Rows] = {}
        self._events: Events | None = None
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
    ) -> Self:
        """Open and check the store at `path`.

        Args:
            path: Directory of the store.
            memory: Memory limit of the whole process, such as "2GB"; loaders and training divide it.
            engine: How rows are read: "uring" or "pread" (O_DIRECT, many reads in flight), "mmap", "gds" (CUDA), or "auto" (see
                `open_engine`).
            in_memory: Whether to load all node arrays and the topology into RAM now.
            features: Name of a node array -> Zarr array or LMDB directory that replaces it, one row per node.
            progress: Called with the progress of merging appended data, which the first reader after an append does.
            float_features: Whether `x` is float32 where the store has integers; built-in models compute with floats.
            verify_reads: Whether to compare every chunk with its checksum before rows are read from it, once each, and to read
                it whole for that: at most one more pass over the store. Otherwise only chunks that are read whole anyway are
                compared: those of the topology, labels and splits, of scans of features, and of events in order.

        Raises:
            StoreError: If there is no store, it is truncated or damaged, or its arrays do not fit the manifest.
            InputError: If `features` do not fit.
            ConfigError: If a setting is invalid.

        >>> Dataset.open("papers.ooc", memory="2GB", features={"x": "embeddings.zarr"})
        """
        if engine not in _ENGINES:
            raise ConfigError(f"engine {engine!r} is unknown: use one of {', '.join(_ENGINES)}")
        path, budget = Path(path), None if memory is None else parse_bytes(memory)
        place = open_place(path, budget, progress)
        rows: dict[str, Rows] = {}
        try:
            graph = _open_graph(place, in_memory, verify_reads)
            rows, encodings = _open_rows(place, engine, features or {}, verify_reads)
            if float_features and "x" in encodings:
                encodings["x"] = encodings["x"].floats()
            if in_memory:
                rows = {name: loaded(each) for name, each in rows.items()}
            ids = _open_ids(place)
        except BaseException:
            _close(rows)
            place.close()
            raise
        dataset = cls(place, graph, rows, encodings, ids, budget, engine, verify_reads)
        dataset._opened = {"memory": memory, "engine": engine, "in_memory": in_memory, "features": features}
        dataset._opened["float_features"] = float_features
        dataset._opened["verify_reads"] = verify_reads
        dataset._replaced = {name: f"{encodings[name].digest}{rows[name].shape}" for name in sorted(features or {})}
        return dataset

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `open` that were given, by name: memory, engine, in_memory, features, verify_reads."""
        features = {name: str(path) for name, path in (self._opened["features"] or {}).items()}
        engine = None if self.engine == "auto" else self.engine
        given = {**self._opened, "features": features, "engine": engine, "float_features": None}
        return {name: value for name, value in given.items() if value}

    @cached_property
    def process_memory(self) -> ProcessMemory:
        """What its loaders divide, measured once by the first; a later one does not count the batches of earlier ones."""
        return ProcessMemory.measure(self.memory)

    @property
    def num_nodes(self) -> int:
        return self.manifest.num_nodes

    @property
    def num_edges(self) -> int:
        return self.manifest.num_edges

    @property
    def num_features(self) -> int:
        """Number of columns of `x`; 0 for a store without features."""
        return 0 if "x" not in self._rows else int(np.prod(self._rows["x"].shape[1:], dtype=np.int64))

    @property
    def num_node_features(self) -> int:
        """PyG's name of `num_features`."""
        return self.num_features

    @property
    def num_classes(self) -> int | None:
        """Number of classes; of label columns in a multilabel task, of targets in a regression."""
        return self.manifest.num_classes

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes if the labels were words, or of the label columns if there were several, in order; else None."""
        return self.manifest.class_names

    @property
    def task(self) -> Task | None:
        """What the labels are: "multiclass", "binary", "multilabel" or "regression"; None without labels."""
        return self.manifest.task

    @property
    def names(self) -> list[str]:
        """Names of the node arrays."""
        return sorted(self._rows)

    def rows(self, name: str) -> Rows:
        """Return the values of the node array `name`. Raises InputError if the store has no such array.

        Values stored in fewer bits (float16, bfloat16, int8 with a scale) are decoded to float32 as they are read. `stored`
        returns the rows as they are on disk, `encoding` their encoding.

        >>> ds.rows("x").read(ids, out)  # float32[n, F]
        """
        self.stored(name)
        return self._values[name]

    def stored(self, name: str) -> Rows:
        """Return the node array `name` as it is on disk. Raises as `rows` does."""
        if name not in self._rows:
            raise InputError(f"{self.path} has no node array {name!r}: there are {', '.join(self.names) or 'none'}")
        return self._rows[name]

    def encoding(self, name: str) -> Encoding:
        """Return the encoding of `stored(name)`. Raises as `rows` does."""
        self.stored(name)
        return self._encodings[name]

    def edge_rows(self, name: str) -> Rows:
        """Return a column of the graph, `indices` or one of `graph.columns`, as Rows [E], for edges that stay on disk.

        Opened once with the data set's engine and closed with it. Raises InputError if there is no such column.
        """
        if name != "indices" and name not in self.graph.columns:
            raise InputError(f"{self.path} has no edge column {name!r}: there are {', '.join(self.graph.columns) or 'none'}")
        if name not in self._edge_rows:
            path = names.INDICES if name == "indices" else names.column(name)
            self._edge_rows[name] = open_zarr_rows(self._place.group(path), path, self.engine, self.verify_reads)
        return self._edge_rows[name]

    def edge_features(self, name: str) -> Rows:
        """Return the values of an edge feature, one row per edge id (`batch.e_id`), as `rows` does for nodes.

        Opened once with the data set's engine and closed with it. Raises InputError if there is no such feature.

        >>> ds.edge_features("edge_attr").read(batch.e_id.numpy(), out)
        """
        key, there = names.edge_array(name), self.manifest.edge_types[0].arrays
        if name not in there:
            raise InputError(f"{self.path} has no edge feature {name!r}: there are {', '.join(there) or 'none'}")
        if key not in self._edge_rows:
            stored = open_zarr_rows(self._place.group(key), key, self.engine, self.verify_reads)
            encoding = encoding_of(stored, (self._place.group(key) / key).parent)
            self._edge_rows[key] = DecodedRows(stored, encoding) if encoding.is_short else stored
        return self._edge_rows[key]

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

    def reading(self, name: str) -> str:
        """Describe how a node array is read: by which engine, and why if it is not the requested one."""
        rows = self.stored(name)
        appended = ""
        if isinstance(rows, DeltaRows):
            rows, appended = rows.old, ", with appended rows merged"
        if isinstance(rows, ShardedRows):
            return f"engine {describe(rows.engine)}{appended}"
        return "from memory" if isinstance(rows, ArrayRows) else f"through {'lmdb' if isinstance(rows, LmdbRows) else 'zarr'}"

    @cached_property
    def labels(self) -> AnyArray | None:
        """Labels [N] int8, int16 or int32 (multiclass), int8 [N] (binary) or int8 [N, C] (multilabel), -1 if unlabeled; float32
        [N] or [N, T], NaN if unlabeled (regression).

        A memory map in the dtype on disk (see `label_dtype`); None for a store without labels.
        """
        if "y" not in self._rows:
            return None
        rows, look = self._rows["y"], None
        if rows.dtype.kind == "i" and "y" not in self._replaced:
            top = (self.num_classes or 1) - 1 if self.task == "multiclass" else 1
            look = within(self.path / names.node_array("y"), -1, top)
        return whole(rows, look)

    @property
    def y(self) -> AnyArray | None:
        """PyG's name of `labels`; a NumPy array."""
        return self.labels

    @property
    def train_mask(self) -> NDArray[np.bool_]:
        """Which nodes are in the split "train", bool[N]; `val_mask` and `test_mask` alike. Raises as `split` does."""
        return self._mask_of("train")

    @property
    def val_mask(self) -> NDArray[np.bool_]:
        return self._mask_of("val")

    @property
    def test_mask(self) -> NDArray[np.bool_]:
        return self._mask_of("test")

    def _mask_of(self, split: str) -> NDArray[np.bool_]:
        mask = np.zeros(self.num_nodes, bool)
        mask[self.split(split)] = True
        return mask

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self.manifest.node_type().splits)

    def split(self, name: str) -> NDArray[np.int64]:
        """Return the rows in split `name`, int64[n], sorted. Raises InputError if there is no such split."""
        members = self.members(name)
        return members[np.arange(len(members))]

    def members(self, name: str) -> Members:
        """Return the rows in split `name` in a fraction of their ids' memory. Raises as `split` does."""
        if name not in self.splits:
            raise InputError(f"{self.path} has no split {name!r}: there are {', '.join(self.splits) or 'none'}")
        if name not in self._members:
            own = f"split_{name}"
            array = whole(self.stored(own if own in self._rows else "split"))
            members = Members.of(array, 1 if own in self._rows else names.SPLIT_CODES[name])
            if len(members) != (count := self.manifest.node_type().splits[name]):
                raise StoreError(
                    f"{self.path}: split {name!r} holds {len(members)} nodes, but the manifest says {count}; "
                    "run `ooc verify` on the store"
                )
            self._members[name] = members
        return self._members[name]

    def external(self, rows: Any) -> NDArray[np.int64] | list[str]:
        """Return the user's ids of `rows` (int64[n], or a CPU tensor): int64[n] or a list of str; the rows themselves without
        ids.

        Raises InputError if a row is out of range.
        """
        return identity(rows, self.num_nodes) if self._ids is None else self._ids.external(rows)

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
        if self._ids is not None:
            return self._ids.rows(external)
        return rows_by_identity(external, self.num_nodes, self.path)

    def row(self, external: Any) -> int:
        """Return the row of the node with the user's id `external`. Raises InputError if there is none."""
        if self._ids is not None:
            return self._ids.row(external)
        return int(identity(whole_number(external, self.path), self.num_nodes)[0])

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the data; replaced features contribute their dtype, scale and shape."""
        return self._place.fingerprint + self._mark

    @property
    def _mark(self) -> str:
        return "".join(f"+{name}={text}" for name, text in self._replaced.items())

    def grown_since(self, fingerprint: str) -> NDArray[np.int64] | None:
        """Return the nodes with a changed in-edge or row, including new nodes, since the given fingerprint: int64[k],
        ascending.

        Empty if the data are the same; None if the store never had that fingerprint. Raises StoreError as reading does.
        """
        if not fingerprint.endswith(self._mark):
            return None
        was = fingerprint[: len(fingerprint) - len(self._mark)]
        return touched_since(self.path, was, self._place.fingerprint)

    def follow(self, progress: "Progress | None" = None) -> Self:
        """Return the current store: this data set if nothing was appended since it was opened, else a new one with the same
        settings.

        This data set remains valid until it is closed. Raises as `open` does.

        >>> newer = ds.follow()  # between two epochs
        """
        return self if self._place.is_latest() else type(self).open(self.path, progress=progress, **self._opened)

    def close(self) -> None:
        """Release files and threads; idempotent. Arrays already obtained (graph, labels) stay valid."""
        _close(self._values)
        _close(self._edge_rows)
        if self._events is not None:
            self._events.close()
        if self._ids is not None:
            self._ids.close()
        self._place.close()

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
        return f"Dataset({str(self.path)!r}: {self.num_nodes:,} nodes, {self.num_edges:,} edges, {', '.join(self.names)})"


def _reopened(cls: type[Dataset], path: Path, settings: dict[str, Any]) -> Dataset:
    return cls.open(path, **settings)


def _open_graph(place: Place, in_memory: bool, verify_reads: bool) -> Graph:
    path, manifest = place.group(names.INDPTR), place.manifest
    nodes, edges = manifest.num_nodes, manifest.num_edges

    def take(name: str, count: int | None, dtype: np.dtype[Any] | None = None, look: Look | None = None) -> AnyArray:
        rows: Rows = open_zarr_rows(path, name, engine="mmap")
        try:
            wrong_count = len(rows.shape) != 1 or (count is not None and rows.shape[0] != count)
            if wrong_count or (dtype is not None and rows.dtype != dtype):
                expected = f"{dtype or ''}[{'k' if count is None else count}]"
                actual = f"{rows.dtype}{list(rows.shape)}"
                raise StoreError(f"{path / name} is {actual}, the manifest says {expected}: build the store again")
            if in_memory:
                rows = loaded(rows)
            large = name == names.INDICES or name in columns  # read when it is used, by what checks it
            return rows.map() if large and isinstance(rows, ShardedRows) and not verify_reads else whole(rows, look)
        finally:
            rows.close()

    columns = {names.column(name) for name in manifest.columns}
    indptr = take(names.INDPTR, nodes + 1, np.dtype(np.int64), ascending(path / names.INDPTR, 0, edges))
    if indptr[0] != 0 or indptr[-1] != edges:
        raise StoreError(f"{path / names.INDPTR} must go from 0 to {edges}: build the store again")
    times = {} if manifest.time is None else {"time": np.dtype(manifest.time.dtype)}
    dtypes = names.COLUMN_DTYPES | times
    slots = {name: take(names.column(name), edges, dtypes.get(name)) for name in manifest.columns}
    loops = np.empty(0, np.int64)
    if manifest.has_self_loops:
        loops = take(names.SELF_LOOPS, None, np.dtype(np.int64), ascending(path / names.SELF_LOOPS, 0, nodes - 1))
    total = loop_weight = None
    if manifest.weighted:
        if len(loops) and not (path / names.LOOP_WEIGHT).exists():
            raise StoreError(f"{path / names.LOOP_WEIGHT} is missing, as in stores of an earlier ooc: build the store again")
        total = take(names.WEIGHT_SUM, nodes, np.dtype(np.float32))
        loop_weight = take(names.LOOP_WEIGHT, len(loops), np.dtype(np.float32)) if len(loops) else np.empty(0, np.float32)
    parts = None
    if manifest.partition is not None:
        parts = np.array(take(names.PARTS, manifest.partition.parts + 1, np.dtype(np.int64)))
        try:
            check_parts(parts, nodes)
        except InputError as error:
            raise StoreError(f"{path / names.PARTS} is damaged: {error}; build the store again") from None
    indices = take(names.INDICES, edges, index_dtype(nodes), within(path / names.INDICES, 0, nodes - 1))
    return Graph(indptr, indices, slots, loops, total, loop_weight, parts)


def _open_rows(
    place: Place, engine: str, features: Mapping[str, Path | str], verify_reads: bool
) -> tuple[dict[str, Rows], dict[str, Encoding]]:
    """Open the node arrays with their encodings; arrays of scales are not node arrays."""
    node_type, path = place.manifest.node_type(), place.root
    folder = path / names.node_array("", node_type.name)
    existing = arrays_in(folder)
    opened: dict[str, Rows] = {}
    encodings: dict[str, Encoding] = {}
    try:
        for name in sorted({*node_type.arrays, *existing} - set(features)):
            opened[name] = _node_rows(place, name, engine, verify_reads)
            if opened[name].shape[0] != node_type.count:
                count = opened[name].shape[0]
                raise StoreError(f"{folder}/{name} has {count} rows; the store has {node_type.count} nodes")
            encodings[name] = encoding_of(opened[name], folder)
        for name, source in features.items():
            own = _like(path, names.node_array(name, node_type.name)) if name in existing else (np.dtype(np.float32), None)
            opened[name] = open_features(source, name, node_type.count, engine, *own)
            encodings[name] = encoding_of(opened[name], Path(source).parent)
    except BaseException:
        _close(opened)
        raise
    return opened, encodings


def _node_rows(place: Place, name: str, engine: str, verify_reads: bool) -> Rows:
    """Open a node array, including appended rows."""
    array = names.node_array(name)
    rows = open_zarr_rows(place.group(array), array, engine, verify_reads)
    if place.view is None or not (place.view / delta_array(name, DELTA_VALUES) / "zarr.json").exists():
        return rows
    try:
        path, nodes = delta_array(name, DELTA_ROWS), place.manifest.num_nodes
        row = whole(open_zarr_rows(place.view, path, engine="mmap"), ascending(place.view / path, 0, nodes - 1))
        new = open_zarr_rows(place.view, delta_array(name, DELTA_VALUES), engine, verify_reads)
        _check_new(place.view / path, row, new, rows.shape[0], nodes)
        return DeltaRows(rows, new, row, nodes)
    except BaseException:
        rows.close()
        raise


def _check_new(path: Path, row: AnyArray, new: Rows, old: int, nodes: int) -> None:
    """Raise StoreError unless each of `row` has values, and every node beyond the `old` ones is among them."""
    if new.shape[0] != len(row) or len(row) - int(np.searchsorted(row, old)) != nodes - old:
        raise StoreError(f"{path} is damaged: it does not list the {nodes - old} new nodes; remove {path.parents[2]}")


def _like(path: Path, array: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and row shape expected of LMDB records that replace a node array: as stored, or float32 for encoded
    ones."""
    rows = open_zarr_rows(path, array, engine="mmap")
    try:
        encoding = encoding_of(rows, (path / array).parent)
        return rows.dtype if encoding.is_native else encoding.dtype, rows.shape[1:]
    finally:
        rows.close()


def _open_ids(place: Place) -> IdMap | GrownIds | None:
    kind = place.manifest.node_type().id_kind
    if kind is None:
        return None
    ids = IdMap(place.root / names.IDS, kind)
    if place.view is None or not (place.view / names.IDS).exists():
        return ids
    try:
        return GrownIds(ids, IdMap(place.view / names.IDS, kind), place.manifest.num_nodes - place.appended.nodes)
    except BaseException:
        ids.close()
        raise


def _close(rows: Mapping[str, Rows]) -> None:
    for each in rows.values():
        each.close()

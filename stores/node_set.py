"""`NodeSet`: the nodes of one type of an open store: their arrays, labels, splits and external ids."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.array_names import NODE
from ooc.stores.arrays.encoding import DecodedRows, Encoding, arrays_in, encoding_of
from ooc.stores.arrays.external import open_features
from ooc.stores.arrays.lmdb_rows import LmdbRows
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, ArrayRows, Rows
from ooc.stores.arrays.whole import loaded, whole
from ooc.stores.arrays.zarr_rows import ShardedRows, open_zarr_rows
from ooc.stores.bounds import ascending, within
from ooc.stores.errors import InputError, StoreError
from ooc.stores.feature_map import FeatureMap, read_map
from ooc.stores.growth.place import Place
from ooc.stores.growth.rows import DELTA_ROWS, DELTA_VALUES, DeltaRows, delta_array
from ooc.stores.ids import AnyIds, FetchedIds, GrownIds, IdMap, identity, rows_by_identity, whole_number
from ooc.stores.io.engines import describe
from ooc.stores.io.remote.group import RemoteGroup
from ooc.stores.io.shared_blocks import SharedBlocks
from ooc.stores.labels import Task
from ooc.stores.manifest import NodeType


class NodeSet:
    """The nodes of one type; `Dataset.nodes` returns it. Their rows are 0 to num_nodes - 1.

    >>> papers = ds.nodes("paper")
    >>> papers.rows("x").read(papers.split("train"), out)
    """

    def __init__(
        self,
        place: Place,
        node_type: NodeType,
        rows: dict[str, Rows],
        encodings: dict[str, Encoding],
        ids: AnyIds | None,
        replaced: Mapping[str, Path | str],
    ) -> None:
        self.path = place.address
        self.name = node_type.name
        """the node type"""
        self.splits: list[str] = list(node_type.splits)
        """names of the splits"""
        described = node_type if place.manifest.is_hetero else place.manifest
        self.task: Task | None = described.task
        """what the labels are: "multiclass", "binary", "multilabel" or "regression"; None without labels"""
        self.num_classes: int | None = described.num_classes
        """number of classes; of label columns in a multilabel task, of targets in a regression; None without labels"""
        self.class_names: list[str] | None = described.class_names
        """names of the classes if the labels were words, or of the label columns if there were several, in order; else None"""
        self._type, self._rows, self._encodings, self._ids = node_type, rows, encodings, ids
        self._values = {
            name: DecodedRows(rows[name], each) if each.is_short else rows[name] for name, each in encodings.items()
        }
        self._members: dict[str, Members] = {}
        self._root = place.root
        self._of = f" of node type {self.name!r}" if place.manifest.is_hetero else ""
        self.replaced = {name: f"{encodings[name].digest}{rows[name].shape}" for name in sorted(replaced)}
        """arrays that `features` of `Dataset.open` replaced: name -> what they hold, in short"""

    @classmethod
    def open(
        cls,
        place: Place,
        node_type: NodeType,
        engine: str,
        features: Mapping[str, Path | str],
        verify_reads: bool,
        in_memory: bool = False,
        float_features: bool = False,
    ) -> Self:
        """Open the node arrays and ids of a type. Arguments as of `Dataset.open`; raises as it does."""
        rows: dict[str, Rows] = {}
        try:
            rows, encodings = _open_rows(place, node_type, engine, features, verify_reads)
            if float_features and "x" in encodings:
                encodings["x"] = encodings["x"].floats()
            if in_memory:
                for name in rows:
                    rows[name] = loaded(rows[name])
            return cls(place, node_type, rows, encodings, _open_ids(place, node_type), features)
        except BaseException:
            _close(rows)
            raise

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self._type.count

    @property
    def num_features(self) -> int:
        """Number of columns of `x`; 0 without features."""
        return 0 if "x" not in self._rows else int(np.prod(self._rows["x"].shape[1:], dtype=np.int64))

    @property
    def names(self) -> list[str]:
        """Names of the node arrays."""
        return sorted(self._rows)

    def share_reads(self, blocks: SharedBlocks | None) -> None:
        """See `Dataset.share_reads`."""
        for rows in self._rows.values():
            if isinstance(rows, ShardedRows):
                rows.share(blocks)

    def rows(self, name: str) -> Rows:
        """Return the values of the node array `name`.

        Values stored in fewer bits (float16, bfloat16, int8 with a scale) are decoded to float32 as they are read. `stored`
        returns the rows as they are on disk, `encoding` their encoding.

        Args:
            name: Name of the array, such as "x".

        Returns:
            The values, [num_nodes, ...].

        Raises:
            InputError: If there is no such array.

        >>> ds.nodes("paper").rows("x").read(ids, out)  # float32[n, F]
        """
        self.stored(name)
        return self._values[name]

    def stored(self, name: str) -> Rows:
        """Return the node array `name` as it is on disk. Raises as `rows` does."""
        if name not in self._rows:
            there = ", ".join(self.names) or "none"
            raise InputError(f"{self.path} has no node array {name!r}{self._of}: there are {there}")
        return self._rows[name]

    def encoding(self, name: str) -> Encoding:
        """Return the encoding of `stored(name)`. Raises as `rows` does."""
        self.stored(name)
        return self._encodings[name]

    def feature_map(self, name: str = "x") -> FeatureMap | None:
        """Return the map that made a feature narrower (`reduce`, `select`); None if none did, or other rows replace it.

        Raises InputError if there is no such array, StoreError if the map is damaged.

        >>> ds.nodes("paper").feature_map("x").apply(raw)  # float32[n, 64] of [n, 500]
        """
        self.stored(name)
        return None if name in self.replaced else read_map(self._root, name, self._type)

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

        A memory map in the dtype on disk (see `label_dtype`); None without labels.
        """
        if "y" not in self._rows:
            return None
        rows, look = self._rows["y"], None
        if rows.dtype.kind == "i" and "y" not in self.replaced:
            top = (self.num_classes or 1) - 1 if self.task == "multiclass" else 1
            look = within(self.path / names.node_array("y", self.name), -1, top)
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

    def split(self, name: str) -> NDArray[np.int64]:
        """Return the rows in split `name`, int64[n], sorted. Raises InputError if there is no such split."""
        members = self.members(name)
        return members[np.arange(len(members))]

    def members(self, name: str) -> Members:
        """Return the rows in split `name` in a fraction of their ids' memory. Raises as `split` does."""
        if name not in self.splits:
            raise InputError(f"{self.path} has no split {name!r}{self._of}: there are {', '.join(self.splits) or 'none'}")
        if name not in self._members:
            own = f"split_{name}"
            array = whole(self.stored(own if own in self._rows else "split"))
            members = Members.of(array, 1 if own in self._rows else names.SPLIT_CODES[name])
            if len(members) != (count := self._type.splits[name]):
                raise StoreError(
                    f"{self.path}: split {name!r}{self._of} holds {len(members)} nodes, but the manifest says {count}; "
                    "run `ooc verify` on the store"
                )
            self._members[name] = members
        return self._members[name]

    def external(self, rows: Any) -> NDArray[np.int64] | list[str]:
        """Return the user's ids of `rows`; the rows themselves without ids.

        Args:
            rows: Rows, int64[n] or a CPU tensor.

        Returns:
            int64[n] or a list of str.

        Raises:
            InputError: If a row is out of range.

        >>> ds.nodes("author").external(batch["author"].n_id)
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

        >>> ds.nodes("user").rows_of(["u_1", "u_2"])
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

    def close(self) -> None:
        """Release files and threads; idempotent. Labels already obtained stay valid."""
        _close(self._values)
        if self._ids is not None:
            self._ids.close()

    def __repr__(self) -> str:
        return f"NodeSet({self.name!r}: {self.num_nodes:,} nodes, {', '.join(self.names) or 'no arrays'})"


def _open_rows(
    place: Place, node_type: NodeType, engine: str, features: Mapping[str, Path | str], verify_reads: bool
) -> tuple[dict[str, Rows], dict[str, Encoding]]:
    """Open the node arrays with their encodings; arrays of scales are not node arrays."""
    path = place.root
    folder = path / names.node_array("", node_type.name)
    existing = arrays_in(folder)
    opened: dict[str, Rows] = {}
    encodings: dict[str, Encoding] = {}
    try:
        for name in sorted({*node_type.arrays, *existing} - set(features)):
            opened[name] = _node_rows(place, name, node_type, engine, verify_reads)
            if opened[name].shape[0] != node_type.count:
                count = opened[name].shape[0]
                what = "the store" if node_type.name == NODE else f"node type {node_type.name!r}"
                raise StoreError(f"{folder}/{name} has {count} rows; {what} has {node_type.count} nodes")
            encodings[name] = encoding_of(opened[name], folder)
        for name, source in features.items():
            own = _like(path, names.node_array(name, node_type.name)) if name in existing else (np.dtype(np.float32), None)
            opened[name] = open_features(source, name, node_type.count, engine, *own)
            encodings[name] = encoding_of(opened[name], Path(source).parent)
    except BaseException:
        _close(opened)
        raise
    return opened, encodings


def _node_rows(place: Place, name: str, node_type: NodeType, engine: str, verify_reads: bool) -> Rows:
    """Open a node array, including appended rows."""
    array = names.node_array(name, node_type.name)
    rows = open_zarr_rows(place.group(array), array, engine, verify_reads)
    values = delta_array(name, DELTA_VALUES, node_type.name)
    if place.view is None or not (place.view / values / "zarr.json").exists():
        return rows
    try:
        path, nodes = delta_array(name, DELTA_ROWS, node_type.name), node_type.count
        row = whole(open_zarr_rows(place.view, path, engine="mmap"), ascending(place.view / path, 0, nodes - 1))
        new = open_zarr_rows(place.view, values, engine, verify_reads)
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


def _open_ids(place: Place, node_type: NodeType) -> AnyIds | None:
    kind = node_type.id_kind
    if kind is None:
        return None
    remote = RemoteGroup.at(place.root)
    if remote is not None:
        return FetchedIds(remote, names.IDS, kind, node_type.name, place.base.fingerprints.get(names.IDS))
    ids = IdMap(place.root / names.IDS, kind, node_type.name)
    appended = place.appended.of(node_type.name if place.manifest.is_hetero else "").nodes
    if place.view is None or not appended:
        return ids
    try:
        return GrownIds(ids, IdMap(place.view / names.IDS, kind, node_type.name), node_type.count - appended)
    except BaseException:
        ids.close()
        raise


def _close(rows: Mapping[str, Rows]) -> None:
    for each in rows.values():
        each.close()

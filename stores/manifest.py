"""The manifest: the typed attributes of a store's Zarr group, and the names of its arrays.

The rows of each node type count from 0, and each edge type has a CSC of its own. A homogeneous graph is the case of one node
type and one edge type without names (`Manifest.homogeneous`).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ooc.stores.errors import InputError, StoreError
from ooc.stores.io.atomic import write_file

FORMAT_VERSION = 2
"""the newest format that can be read; see `Manifest.least_version` for what needs it"""
ATTRIBUTE = "ooc"
"""the manifest's key among the group's attributes; other tools may add their own"""
NODE = "node"
EDGE = "edge"
EdgeKey = tuple[str, str, str]
"""an edge type as in PyG: (source type, name, target type)"""
HOMOGENEOUS: EdgeKey = (NODE, EDGE, NODE)
"""the edge type of a homogeneous store"""
SPLIT_CODES = {"train": 0, "val": 1, "test": 2}
"""values of the int8 array `split`; -1 for nodes in no split"""

INDPTR, INDICES = "graph/indptr", "graph/indices"
SELF_LOOPS, LOOP_WEIGHT, WEIGHT_SUM = "graph/self_loops", "graph/loop_weight", "graph/weight_sum"
PARTS = "graph/parts"
GRAPHS = "graphs"
"""group with the graphs of a store of many"""
GRAPH_PTR, GRAPH_EDGE_PTR = "graphs/ptr", "graphs/edge_ptr"
REDUCTIONS = "reductions"
"""group with the maps that made features narrower; see `ooc.stores.feature_map`"""
EVENTS = "events"
"""group with the edges of a temporal graph in time order"""
CHECKSUMS = "checksums"
VERSIONS, VERSION = "versions", "ooc_version"
"""folder of a store's later versions, and the attribute that names the current one; see `ooc.stores.growth`"""
ARRAYS = "ooc_arrays"
"""attribute for other Zarr readers: the folder of the current version's arrays, relative to the store"""
SHARD = "ooc_shard"
"""attribute of a shard of a store that is not yet put together; see `ooc.stores.ingest.shards`"""
APPENDED = "ooc_appended"
"""attribute for other Zarr readers: what `delta.lmdb` has and the arrays lack"""
SUMS = "ooc_checksums"
"""attribute with the crc32c (eight hex digits) of the manifest, under "", and of the metadata of each array with checksums"""
IDS = "ids.lmdb"
GRAPH_IDS = "graph_ids.lmdb"
DELTA = "delta.lmdb"
"""LMDB environments: external ids of nodes and of graphs, and what was appended; see `ooc.stores.growth.delta`"""

COLUMN_DTYPES: dict[str, np.dtype[Any]] = {"edge_id": np.dtype(np.int64), "weight": np.dtype(np.float32)}
"""dtypes of slot columns with a fixed one"""

Task = Literal["multiclass", "binary", "multilabel", "regression"]
"""what labels are: one of several classes, of two, several classes at once, or numbers"""
IdKind = Literal["int", "str"]
TimeUnit = Literal["s", "ms", "us", "ns"]
ReductionMethod = Literal["pca", "svd", "random", "variance", "mutual"]
_KEPT = {"pca": "variance", "variance": "variance", "svd": "sum of squares"}


_MEANING = ("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value")


def edge_folder(key: EdgeKey) -> str:
    """Name of an edge type's folder: `edge_folder(("author", "writes", "paper"))` is `"author__writes__paper"`."""
    return EDGE if key == HOMOGENEOUS else "__".join(key)


def graph_array(name: str, key: EdgeKey = HOMOGENEOUS) -> str:
    """Path of an array of an edge type's CSC in the group; slot columns have one entry per edge in slot order.

    >>> graph_array("indptr"), graph_array("time", ("author", "writes", "paper"))
    ('graph/indptr', 'graph/author__writes__paper/time')
    """
    return f"graph/{name}" if key == HOMOGENEOUS else f"graph/{edge_folder(key)}/{name}"


def column(name: str) -> str:
    """Path of a slot column's array of a homogeneous store: `graph_array` of its only edge type."""
    return graph_array(name)


def node_array(name: str, node_type: str = NODE) -> str:
    """Path of a node array in the group: `node_array("x")` is `"node/node/x"`."""
    return f"node/{node_type}/{name}"


def reduction_array(part: str, name: str, node_type: str = NODE) -> str:
    """Path of a part of the map of a node array: `reduction_array("mean", "x")` is `"reductions/node/x/mean"`."""
    return f"{REDUCTIONS}/{node_type}/{name}/{part}"


def graphs_array(name: str) -> str:
    """Path of an array with a row per graph: `graphs_array("y")` is `"graphs/y"`."""
    return f"{GRAPHS}/{name}"


def event_array(name: str) -> str:
    """Path of an array of the events: `event_array("time")` is `"events/time"`."""
    return f"{EVENTS}/{name}"


def edge_array(name: str, key: EdgeKey = HOMOGENEOUS) -> str:
    """Path of an edge array in the group, one row per edge id: `edge_array("msg")` is `"edge/edge/msg"`."""
    return f"edge/{edge_folder(key)}/{name}"


def checksum_array(name: str) -> str:
    """Path of the crc32c (uint32) of every inner chunk of array `name`."""
    return f"{CHECKSUMS}/{name}"


def label_dtype(task: Task, num_classes: int) -> np.dtype[Any]:
    """Return the most compact dtype of labels on disk; -1, or NaN in a regression, means unlabeled.

    multiclass [N]: the smallest of int8, int16, int32, int64 for the classes; binary [N] and multilabel [N, C]: int8;
    regression [N] or [N, T]: float32.
    """
    if task == "regression":
        return np.dtype(np.float32)
    return np.min_scalar_type(-max(num_classes, 1)) if task == "multiclass" else np.dtype(np.int8)


def label_attributes(task: Task) -> dict[str, str]:
    """Return the attributes of the array of labels, where its description is not that of classes."""
    return {"description": "targets of a regression; NaN for unknown ones"} if task == "regression" else {}


def as_targets(numbers: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the targets of a regression as on disk, and which of them are infinite or too large for it; NaN is unknown."""
    with np.errstate(over="ignore"):
        targets = np.asarray(numbers).astype(np.float32)
    return targets, np.isinf(targets)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Reduced(_Part):
    """How a feature was made narrower; `reductions/<type>/<name>` has the map."""

    method: ReductionMethod
    columns: int = Field(ge=1)
    """columns before"""
    width: int = Field(ge=1)
    """columns now"""
    seed: int = 0
    explained: float | None = None
    """share of the variance (svd: of the sum of squares) that is kept; None where it is not known"""

    def __str__(self) -> str:
        return f"{self.method}:{self.width} of {self.columns:,} columns"

    @property
    def text(self) -> str:
        """What was done, and how much of the variance is kept."""
        kept = "" if self.explained is None else f", {self.explained:.1%} of the {_KEPT[self.method]} kept"
        return f"{self}{kept}"


class NodeType(_Part):
    """A node type: its ids and arrays, and in a heterogeneous store the task of its labels."""

    name: str = NODE
    ranges: list[tuple[int, int]] = []
    """[[0, count]] in a homogeneous store, empty in a heterogeneous one"""
    count: int = Field(ge=0)
    id_kind: IdKind | None = None
    """kind of the external ids in ids.lmdb; None if rows are ids"""
    arrays: list[str] = []
    """names of the node arrays written with the store: x, y, split, ..."""
    reduced: dict[str, Reduced] = {}
    """features with fewer columns than the input has"""
    splits: dict[str, int] = {}
    """number of nodes per split"""
    task: Task | None = None
    num_classes: int | None = None
    class_names: list[str] | None = None
    """as of the manifest"""

    @model_validator(mode="after")
    def _ranges_fit(self) -> Self:
        if self.ranges not in ([], [(0, self.count)]):
            raise ValueError(f"ranges of node type {self.name!r} must be [[0, {self.count}]]")
        return self


class EdgeTime(_Part):
    """The times of an edge type of a heterogeneous store, a slot column."""

    dtype: Literal["int64", "float64"]
    unit: TimeUnit = "s"
    """unit of times; timestamps are microseconds since 1970, UTC"""


class Input(_Part):
    """The input edges of a store, if some of them were dropped."""

    edges: int = Field(ge=0)
    """including dropped ones: their positions are edge ids, or those of `events/input`"""
    drop_self_loops: bool = False
    drop_duplicates: bool = False


class EdgeType(_Part):
    """An edge type: its ends and arrays, and in a heterogeneous store what the manifest says of a homogeneous graph."""

    name: str = EDGE
    source: str = NODE
    target: str = NODE
    count: int = Field(ge=0)
    arrays: list[str] = []
    """names of the edge features, one row per edge id"""
    task: Task | None = None
    num_classes: int | None = None
    class_names: list[str] | None = None
    """of the edge labels, the edge array `y`"""
    splits: dict[str, int] = {}
    """number of edges per split, of the edge arrays `split` or `split_<name>`"""
    columns: list[str] = []
    has_self_loops: bool = False
    weighted: bool = False
    undirected: bool = False
    input: Input | None = None
    """as of the manifest"""
    time: EdgeTime | None = None
    """None if edges have no time"""
    reverse_of: EdgeKey | None = None
    """the edge type whose edges these are in the other direction, with the same edge ids: edge arrays are its"""

    @property
    def key(self) -> EdgeKey:
        """(source type, name, target type)."""
        return self.source, self.name, self.target

    @model_validator(mode="after")
    def _weights_agree(self) -> Self:
        if self.weighted != ("weight" in self.columns):
            raise ValueError(f"edge type {self.name!r} must be weighted if and only if it has the column 'weight'")
        return self


class Time(_Part):
    """The events of a temporal graph: edges in time order, numbered by edge id."""

    events: int = Field(ge=1)
    dtype: Literal["int64", "float64"]
    unit: TimeUnit
    """unit of times; timestamps are microseconds since 1970, UTC"""
    sorted: bool
    """whether the input was in this order; otherwise `events/input` has each event's input position"""


class Partition(_Part):
    """How nodes were numbered by parts (`graph/parts`), and the quality of the parts."""

    parts: int = Field(ge=1)
    method: str
    """metis, stream, or given"""
    cut: float = Field(ge=0, le=1)
    """share of the edges between parts"""
    balance: float = Field(ge=1)
    """size of the largest part relative to the mean"""


class Graphs(_Part):
    """The graphs of a store of many: graph g has the nodes ptr[g]:ptr[g + 1] and the slots edge_ptr[g]:edge_ptr[g + 1]."""

    count: int = Field(ge=1)
    id_kind: IdKind | None = None
    """kind of the graphs' external ids in graph_ids.lmdb; None if rows are ids"""
    arrays: list[str] = []
    """names of the arrays with a row per graph: y, split, ..."""
    splits: dict[str, int] = {}
    """number of graphs per split"""
    task: Task | None = None
    num_classes: int | None = None
    class_names: list[str] | None = None
    """task of the graphs' labels, as the manifest's own of the nodes' labels"""


class Manifest(_Part):
    """A store's description, in the attributes of its `zarr.json`.

    >>> manifest = Manifest.homogeneous(num_nodes=3, num_edges=2, columns=["edge_id"], arrays=["x"])
    >>> write_manifest("papers.ooc", manifest)
    >>> read_manifest("papers.ooc").num_nodes
    """

    format_version: int = Field(default=1, ge=1)
    node_types: list[NodeType]
    edge_types: list[EdgeType]
    num_nodes: int = Field(ge=0)
    num_edges: int = Field(ge=0)
    columns: list[str] = []
    """slot columns besides indptr and indices: edge_id, weight, ..."""
    has_self_loops: bool = False
    weighted: bool = False
    undirected: bool = False
    """whether every edge was added in both directions"""
    task: Task | None = None
    num_classes: int | None = None
    """classes; label columns of a multilabel task, targets of a regression"""
    class_names: list[str] | None = None
    """names of the classes, if the labels were words: class i is the i-th; of the label columns, if there were several"""
    partition: Partition | None = None
    """None if nodes are not numbered by parts"""
    time: Time | None = None
    """None if edges have no time"""
    graphs: Graphs | None = None
    """None for a store of one graph"""
    input: Input | None = None
    """None if no edges were or could be dropped; older stores do not say"""
    order: Literal["input", "degree"] = "input"
    """order of the nodes (within parts): the input's, or by number of out-edges, largest first"""
    fingerprints: dict[str, str] = {}
    """hashes of the inputs the store was built from"""
    created_by: str = ""

    @property
    def parts(self) -> int | None:
        """Parts that nodes are numbered by, None if they are not."""
        return None if self.partition is None else self.partition.parts

    @classmethod
    def homogeneous(
        cls,
        num_nodes: int,
        num_edges: int,
        *,
        arrays: list[str] | None = None,
        edge_arrays: list[str] | None = None,
        splits: dict[str, int] | None = None,
        id_kind: IdKind | None = None,
        reduced: dict[str, Reduced] | None = None,
        **fields: Any,
    ) -> Self:
        """A manifest of one node type and one edge type; `fields` are further fields of the manifest."""
        node = NodeType(
            ranges=[(0, num_nodes)],
            count=num_nodes,
            arrays=sorted(arrays or []),
            reduced=reduced or {},
            splits=splits or {},
            id_kind=id_kind,
        )
        edge = EdgeType(count=num_edges, arrays=sorted(edge_arrays or []))
        return cls(node_types=[node], edge_types=[edge], num_nodes=num_nodes, num_edges=num_edges, **fields)

    @classmethod
    def heterogeneous(cls, node_types: list[NodeType], edge_types: list[EdgeType], **fields: Any) -> Self:
        """A manifest of several types; `fields` are further fields of the manifest."""
        nodes, edges = (sum(each.count for each in types) for types in (node_types, edge_types))
        types: dict[str, Any] = {"node_types": node_types, "edge_types": edge_types}
        return cls(format_version=2, **types, num_nodes=nodes, num_edges=edges, **fields)

    @property
    def least_version(self) -> int:
        """The oldest format version that knows all that the manifest says: 2 for several types, for a store of many graphs, for
        targets of a regression, for labels or splits of edges and for reduced features; else 1."""
        of_types = any(each.task is not None or each.splits for each in self.edge_types) or any(
            each.reduced for each in self.node_types
        )
        return 2 if self.is_hetero or self.graphs is not None or self.task == "regression" or of_types else 1

    def as_new(self) -> Self:
        """The manifest of a new store: with its format version. Stores of an earlier ooc keep theirs, and their fingerprint."""
        return self.model_copy(update={"format_version": self.least_version})

    @property
    def is_hetero(self) -> bool:
        """Whether the types have names: there are several, or the only ones are not those of a homogeneous store."""
        return [each.name for each in self.node_types] != [NODE] or [each.key for each in self.edge_types] != [HOMOGENEOUS]

    @model_validator(mode="after")
    def _types_fit(self) -> Self:
        if self.is_hetero and self.format_version < 2:
            raise ValueError("heterogeneous stores have format version 2")
        nodes, edges = [each.name for each in self.node_types], [each.key for each in self.edge_types]
        if self.is_hetero and HOMOGENEOUS in edges:
            raise ValueError(f"edge type {show_edge_type(HOMOGENEOUS)} is that of homogeneous stores")
        if len(set(nodes)) < len(nodes) or len(set(edges)) < len(edges):
            raise ValueError("a type stands there twice")
        if unknown := {end for each in self.edge_types for end in (each.source, each.target)} - set(nodes):
            raise ValueError(f"edge types end in {', '.join(sorted(unknown))}, no node type")
        if others := {each.reverse_of for each in self.edge_types} - {None, *edges}:
            raise ValueError(f"there is no edge type {next(iter(others))} to be the reverse of")
        return self

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        if sum(node_type.count for node_type in self.node_types) != self.num_nodes:
            raise ValueError(f"the node types must have {self.num_nodes} nodes in total")
        if sum(edge_type.count for edge_type in self.edge_types) != self.num_edges:
            raise ValueError(f"the edge types must have {self.num_edges} edges in total")
        if self.weighted != ("weight" in self.columns):
            raise ValueError("a store must be weighted if and only if it has the column 'weight'")
        return self

    def node_type(self, name: str = NODE) -> NodeType:
        """Return the node type of that name. Raises StoreError if there is none."""
        for node_type in self.node_types:
            if node_type.name == name:
                return node_type
        raise StoreError(f"no node type {name!r}: there are {', '.join(each.name for each in self.node_types)}")

    def edge_type(self, key: EdgeKey = HOMOGENEOUS) -> EdgeType:
        """Return the edge type of that key. Raises StoreError if there is none."""
        for edge_type in self.edge_types:
            if edge_type.key == key:
                return edge_type
        there = ", ".join(show_edge_type(each.key) for each in self.edge_types)
        raise StoreError(f"no edge type {show_edge_type(key)}: there are {there}")

    def canonical(self) -> bytes:
        """The manifest as JSON with sorted keys, equal bytes for equal manifests."""
        return json.dumps(self.as_json(), sort_keys=True, separators=(",", ":")).encode()

    def as_json(self) -> dict[str, Any]:
        """The manifest as in `zarr.json`: fields added after format 1 only if the store uses them."""
        plain = {name for name, value in _LATER.items() if getattr(self, name) == value}
        data = self.model_dump(mode="json", exclude=plain | (_OF_TYPES if self.is_hetero else set()))
        for of_types, later in (("node_types", _LATER_OF_NODES), ("edge_types", _LATER_OF_EDGES)):
            data[of_types] = [
                {key: value for key, value in each.items() if (key, value) not in later} for each in data[of_types]
            ]
        return data

    def with_edges(self, arrays: list[str], **labels: Any) -> Self:
        """The manifest of a homogeneous store whose edges have these features; labels: further fields of the edge type."""
        edge_type = self.edge_types[0].model_copy(update={**labels, "arrays": sorted(arrays)})
        return self.model_copy(update={"edge_types": [edge_type]})


_LATER = {"class_names": None, "partition": None, "order": "input", "time": None, "input": None, "graphs": None}
_LATER_OF_NODES: list[tuple[str, Any]] = [
    ("ranges", []),
    ("reduced", {}),
    ("task", None),
    ("num_classes", None),
    ("class_names", None),
]
_LATER_OF_EDGES: list[tuple[str, Any]] = [
    *(("arrays", []), ("columns", []), ("has_self_loops", False), ("weighted", False), ("undirected", False)),
    *(("input", None), ("time", None), ("reverse_of", None)),
    *(("task", None), ("num_classes", None), ("class_names", None), ("splits", {})),
]
"""fields added after format 1, and their values in stores that do not use them"""
_OF_TYPES = {"columns", "has_self_loops", "weighted", "undirected", "task", "num_classes"}
"""fields of a homogeneous store that a heterogeneous one has by type"""


def check_type_name(name: str, what: str = "node type") -> str:
    """Return the name of a type if it can be one. Raises InputError otherwise.

    >>> check_type_name("field_of_study")
    'field_of_study'
    """
    wrong = name.startswith(("_", ".")) or name.endswith("_") or "__" in name or any(each in name for each in ":=/\\")
    if not name or wrong or not name.isprintable() or len(name.encode()) > _NAME_BYTES:
        raise InputError(
            f"{what} {name[:60]!r}: a name has 1 to {_NAME_BYTES} bytes, without ':', '=', '/' and '__', and does not begin "
            "with '_' or '.' or end with '_'; choose another"
        )
    return name


_NAME_BYTES = 80
"""so that the folder of an edge type has a name that file systems take"""


def parse_edge_type(text: str) -> EdgeKey:
    """Parse an edge type as on the command line. Raises InputError if it is none.

    >>> parse_edge_type("author:writes:paper")
    ('author', 'writes', 'paper')
    """
    parts = text.split(":")
    if len(parts) != 3:
        raise InputError(f"edge type {text[:60]!r}: write it SOURCE:NAME:TARGET, as in author:writes:paper")
    return check_type_name(parts[0]), check_type_name(parts[1], "edge type"), check_type_name(parts[2])


def show_edge_type(key: EdgeKey) -> str:
    """An edge type in messages and on the command line: `"author:writes:paper"`."""
    return ":".join(key)


def write_manifest(path: Path | str, manifest: Manifest) -> None:
    """Atomically make directory `path` a Zarr group with the manifest in its attributes."""
    attributes: dict[str, Any] = {ATTRIBUTE: manifest.as_json()}
    write_group(path, {**attributes, SUMS: {"": _manifest_sum(attributes), **_metadata_sums(Path(path), _summed(Path(path)))}})


def set_version(path: Path | str, manifest: Manifest, version: str) -> None:
    """Atomically make `version`, described by `manifest`, the current one; other tools' attributes are preserved."""
    there = {name: value for name, value in _attributes(Path(path)).items() if name != APPENDED}
    own = {ATTRIBUTE: manifest.as_json(), VERSION: version, ARRAYS: f"{VERSIONS}/{version}"}
    write_group(path, {**there, **own, SUMS: {"": _manifest_sum(own)}})


def set_appended(path: Path | str, counts: dict[str, Any] | None) -> None:
    """Say to other Zarr readers of a store what was appended and is not in its arrays (None: nothing)."""
    before = _attributes(Path(path))
    after = {name: value for name, value in before.items() if name != APPENDED}
    if counts is not None:
        text = "rows of delta.lmdb that the arrays do not have: `ooc.open` reads them, `ooc compact` merges them"
        after[APPENDED] = {**counts, "description": text}
    if after != before:
        write_group(path, after)


def says_appended(path: Path | str) -> bool:
    """Whether a store's attributes say that something was appended; those of earlier stores do not."""
    return APPENDED in _attributes(Path(path))


def version_of(path: Path | str) -> str:
    """Current version of the store's arrays, "" if it was never compacted. Raises StoreError if there is no store."""
    version = _attributes(Path(path)).get(VERSION, "")
    if not isinstance(version, str) or (version and not version.isdecimal()):
        raise StoreError(f"{Path(path) / 'zarr.json'} is damaged: {VERSION} is {version!r}; build the store again")
    return version


def arrays_of(path: Path | str, version: str | None = None) -> Path:
    """Return the folder with the arrays of a version of the store at `path` (None: the current one), a store by itself.

    >>> arrays_of("papers.ooc")  # after `ooc compact papers.ooc`
    PosixPath('papers.ooc/versions/1')
    """
    version = version_of(path) if version is None else version
    return Path(path) / VERSIONS / version if version else Path(path)


def write_group(path: Path | str, attributes: dict[str, Any]) -> None:
    """Write the `zarr.json` of a Zarr v3 group."""
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    write_file(Path(path) / "zarr.json", json.dumps(metadata, indent=2).encode())


def read_manifest(path: Path | str) -> Manifest:
    """Read the manifest of the store at `path`.

    Raises StoreError if there is no store, its manifest is damaged, or its format is newer than supported.
    """
    path = Path(path)
    attributes = _attributes(path)
    manifest = attributes.get(ATTRIBUTE)
    if SHARD in attributes:
        raise StoreError(f"{path} is a shard of a store: put all of them together with `ooc join OUT SHARD...`")
    if not isinstance(manifest, dict):
        raise StoreError(f"{path} is a Zarr group but not a finished ooc store: build one with `ooc ingest`")
    version = manifest.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise StoreError(f"{path} has format version {version}, this ooc reads up to {FORMAT_VERSION}: upgrade ooc")
    if _known_sums(attributes).get("", _manifest_sum(attributes)) != _manifest_sum(attributes):
        raise StoreError(
            f"{path / 'zarr.json'} is damaged: the manifest does not match its checksum; "
            "restore the file or build the store again"
        )
    try:
        return Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        message = f"the manifest in {path / 'zarr.json'} is damaged at {where}: {first['msg']}; build the store again"
        raise StoreError(message) from None


def arrays_listed(path: Path | str) -> list[str]:
    """Return the arrays of the store at `path` by its attributes alone, sorted: those that were written with checksums.

    Raises StoreError as `read_manifest` does, and for a store of an earlier ooc, which lists none.
    """
    manifest = read_manifest(path)
    known = {name for name in _known_sums(_attributes(Path(path))) if name}
    if not known:
        raise StoreError(f"{path} was built by an earlier ooc, which did not list its arrays: ingest it again, or compact it")
    own = {node_array(name, each.name) for each in manifest.node_types for name in each.arrays}
    return sorted(known | own)


def damaged_metadata(path: Path | str) -> list[str]:
    """Return the arrays of the store at `path` whose metadata differ from those written with it, sorted.

    Only what says where and how values are stored counts, so that other tools may add attributes, and only arrays that have
    checksums. [] for stores of an earlier ooc, which have no checksums of metadata.
    """
    known = {name: crc for name, crc in _known_sums(_attributes(Path(path))).items() if name}
    now = _metadata_sums(Path(path), known)
    return sorted(name for name, crc in known.items() if now.get(name, crc) != crc)


def check_metadata(path: Path | str) -> None:
    """Raise StoreError if the metadata of an array of the store at `path` are damaged; see `damaged_metadata`."""
    for name in damaged_metadata(path):
        raise StoreError(
            f"{Path(path) / name} is damaged: its zarr.json does not match its checksum; "
            "restore the file or build the store again"
        )


def _known_sums(attributes: dict[str, Any]) -> dict[str, str]:
    known = attributes.get(SUMS)
    return known if isinstance(known, dict) else {}


def _manifest_sum(attributes: dict[str, Any]) -> str:
    return _json_sum([attributes[ATTRIBUTE], attributes.get(VERSION, "")])


def _summed(path: Path) -> list[str]:
    """Names of the arrays with checksums, sorted."""
    folder = path / CHECKSUMS
    arrays = [file.parent for file in folder.rglob("zarr.json") if json.loads(file.read_bytes())["node_type"] == "array"]
    return sorted(array.relative_to(folder).as_posix() for array in arrays)


def _metadata_sums(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Checksums of the metadata of those arrays that there are with checksums: name -> crc32c, "" if it cannot be read."""
    pairs = {name: (path / name, path / CHECKSUMS / name) for name in names}
    present = {name: pair for name, pair in pairs.items() if all((each / "zarr.json").exists() for each in pair)}
    sums = {name: _array_sum(*pair) for name, pair in present.items()}
    return {name: crc for name, crc in sums.items() if crc is not None}


def _array_sum(*arrays: Path) -> str | None:
    """Checksum of what the metadata of an array, and those of its checksums, say about the place and type of values.

    "" if they cannot be read; None for an array that another writer has replaced, which has no shards.
    """
    meant = []
    try:
        for array in arrays:
            metadata = json.loads((array / "zarr.json").read_bytes())
            attributes = metadata.get("attributes") or {}
            if array == arrays[0] and metadata["codecs"][0]["name"] in ("bytes", "transpose"):
                return None
            own = {key: value for key, value in attributes.items() if key.startswith("ooc_")}
            meant.append([[metadata.get(key) for key in _MEANING], own])
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return ""
    return _json_sum(meant)


def _json_sum(value: Any) -> str:
    return f"{google_crc32c.value(json.dumps(value, sort_keys=True).encode()):08x}"


def _attributes(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise StoreError(f"there is no store at {path}: check the path, or build one with `ooc ingest`")
    try:
        metadata = json.loads((path / "zarr.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{path} is not a store: it has no zarr.json; build one with `ooc ingest`") from None
    except (ValueError, RecursionError):
        raise StoreError(f"{path / 'zarr.json'} is damaged: it is not JSON; build the store again") from None
    except OSError as error:
        raise StoreError(f"cannot read {path / 'zarr.json'}: {error.strerror}; check the permissions") from None
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return attributes if isinstance(attributes, dict) else {}

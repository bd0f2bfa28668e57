"""What a store says about itself: the attributes of its Zarr group, typed, and the names of its arrays.

Node ids are one space for all types: a node type is a short sorted list of ranges of it, an edge type a value of the
column `etype`. A homogeneous graph is the case of one type each (`Manifest.homogeneous`).
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stores.errors import StoreError
from stores.io.atomic import write_file

FORMAT_VERSION = 1
ATTRIBUTE = "ooc"
"""the manifest's key among the group's attributes; other tools may add keys of their own"""
NODE = "node"
EDGE = "edge"
SPLIT_CODES = {"train": 0, "val": 1, "test": 2}
"""values of the int8 array `split`; -1 is a node of no split"""

INDPTR, INDICES = "graph/indptr", "graph/indices"
SELF_LOOPS, LOOP_WEIGHT, WEIGHT_SUM = "graph/self_loops", "graph/loop_weight", "graph/weight_sum"
PARTS = "graph/parts"
EVENTS = "events"
"""group of the edges of a temporal graph once more, in time order"""
CHECKSUMS = "checksums"
VERSIONS, VERSION = "versions", "ooc_version"
"""folder of a store's later versions, and the attribute beside the manifest that names the current one; see `stores.growth`"""
IDS = "ids.lmdb"

COLUMN_DTYPES: dict[str, np.dtype[Any]] = {"edge_id": np.dtype(np.int64), "weight": np.dtype(np.float32)}
"""dtype of the slot columns that have a fixed one"""

Task = Literal["multiclass", "binary", "multilabel"]
IdKind = Literal["int", "str"]
TimeUnit = Literal["s", "ms", "us", "ns"]


def column(name: str) -> str:
    """Path of a slot column's array in the group: one entry an edge, in slot order."""
    return f"graph/{name}"


def node_array(name: str, node_type: str = NODE) -> str:
    """Path of a node array in the group: `node_array("x")` is `"node/node/x"`."""
    return f"node/{node_type}/{name}"


def event_array(name: str) -> str:
    """Path of an array of the events: `event_array("time")` is `"events/time"`."""
    return f"{EVENTS}/{name}"


def edge_array(name: str, edge_type: str = EDGE) -> str:
    """Path of an edge array in the group, a row an edge id: `edge_array("msg")` is `"edge/edge/msg"`."""
    return f"edge/{edge_type}/{name}"


def split_array(name: str, node_type: str = NODE) -> str:
    """Path of the boolean array of one split, used where splits overlap."""
    return node_array(f"split_{name}", node_type)


def checksum_array(name: str) -> str:
    """Path of the crc32c (uint32) of every inner chunk of array `name`."""
    return f"{CHECKSUMS}/{name}"


def label_dtype(task: Task, num_classes: int) -> np.dtype[Any]:
    """How labels stand on disk, as compact as they go; -1 is "unlabeled".

    multiclass [N]: the smallest of int8, int16, int32, int64 that holds every class; binary [N] and multilabel [N, C]: int8.
    """
    return np.min_scalar_type(-max(num_classes, 1)) if task == "multiclass" else np.dtype(np.int8)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NodeType(_Part):
    """A node type: its ids, and the arrays it has."""

    name: str = NODE
    ranges: list[tuple[int, int]]
    """ids [lo, hi) of the type's nodes, sorted and disjoint; row r of its arrays is the r-th of them"""
    count: int = Field(ge=0)
    id_kind: IdKind | None = None
    """kind of the external ids in ids.lmdb; None: a node's row is its id"""
    arrays: list[str] = []
    """names of the node arrays written with the store: x, y, split, ..."""
    splits: dict[str, int] = {}
    """nodes in each split"""

    @model_validator(mode="after")
    def _ranges_fit(self) -> Self:
        ends = [end for pair in self.ranges for end in pair]
        if ends != sorted(ends) or sum(hi - lo for lo, hi in self.ranges) != self.count:
            raise ValueError(f"ranges of node type {self.name!r} must be sorted, disjoint and hold {self.count} ids")
        return self


class EdgeType(_Part):
    """An edge type: a value of the column `etype` (its position in the list) where there are several."""

    name: str = EDGE
    source: str = NODE
    target: str = NODE
    count: int = Field(ge=0)
    arrays: list[str] = []
    """names of the edge arrays, a row an edge id"""


class Time(_Part):
    """The events of a temporal graph: edges in time order, whose number is the edge id."""

    events: int = Field(ge=1)
    dtype: Literal["int64", "float64"]
    unit: TimeUnit
    """of a time; timestamps are microseconds since 1970, UTC"""
    sorted: bool
    """whether the input was in this order: else `events/input` has each event's position in it"""


class Partition(_Part):
    """How the nodes were numbered by parts (`graph/parts`), and how well the parts keep edges together."""

    parts: int = Field(ge=1)
    method: str
    """metis, stream, or given"""
    cut: float = Field(ge=0, le=1)
    """share of the edges whose ends lie in different parts"""
    balance: float = Field(ge=1)
    """nodes of the largest part over the mean"""


class Input(_Part):
    """The edges that a store was made from, where not each of them is in it."""

    edges: int = Field(ge=0)
    """of the input, those left out included: their positions are edge ids, or those of `events/input`"""
    drop_self_loops: bool = False
    drop_duplicates: bool = False


class Manifest(_Part):
    """The store's description, kept in the attributes of its `zarr.json`.

    >>> manifest = Manifest.homogeneous(num_nodes=3, num_edges=2, columns=["edge_id"], arrays=["x"])
    >>> write_manifest("papers.ooc", manifest)
    >>> read_manifest("papers.ooc").num_nodes
    """

    format_version: int = Field(default=FORMAT_VERSION, ge=1)
    node_types: list[NodeType]
    edge_types: list[EdgeType]
    num_nodes: int = Field(ge=0)
    num_edges: int = Field(ge=0)
    columns: list[str] = []
    """slot columns beside indptr and indices: edge_id, weight, ..."""
    has_self_loops: bool = False
    weighted: bool = False
    undirected: bool = False
    """every edge was entered in both directions"""
    task: Task | None = None
    num_classes: int | None = None
    partition: Partition | None = None
    """None where nodes are not numbered by parts"""
    time: Time | None = None
    """None for a graph whose edges have no time"""
    input: Input | None = None
    """None where no edge of the input was left out, nor would have been; stores of an earlier ooc do not say"""
    order: Literal["input", "degree"] = "input"
    """of the nodes, or of a part's nodes among themselves: the input's, or the sources of most edges first"""
    fingerprints: dict[str, str] = {}
    """hashes of what the store was built from, by input"""
    created_by: str = ""

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
        **fields: Any,
    ) -> Self:
        """A manifest of one node type and one edge type; `fields` are the manifest's own."""
        node = NodeType(
            ranges=[(0, num_nodes)],
            count=num_nodes,
            arrays=sorted(arrays or []),
            splits=splits or {},
            id_kind=id_kind,
        )
        edge = EdgeType(count=num_edges, arrays=sorted(edge_arrays or []))
        return cls(node_types=[node], edge_types=[edge], num_nodes=num_nodes, num_edges=num_edges, **fields)

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        ranges = sorted(pair for node_type in self.node_types for pair in node_type.ranges)
        ends = [end for pair in ranges for end in pair]
        if ends != sorted(ends) or sum(node_type.count for node_type in self.node_types) != self.num_nodes:
            raise ValueError(f"the node types must hold {self.num_nodes} nodes between them, each once")
        if sum(edge_type.count for edge_type in self.edge_types) != self.num_edges:
            raise ValueError(f"the edge types must hold {self.num_edges} edges between them")
        if self.weighted != ("weight" in self.columns):
            raise ValueError("a store is weighted exactly where it has the column 'weight'")
        return self

    def node_type(self, name: str = NODE) -> NodeType:
        """The node type called `name`. Raises StoreError where there is none."""
        for node_type in self.node_types:
            if node_type.name == name:
                return node_type
        raise StoreError(f"no node type {name!r}: there are {', '.join(each.name for each in self.node_types)}")

    def canonical(self) -> bytes:
        """The manifest as JSON with sorted keys: the same manifest is the same bytes."""
        return json.dumps(self.as_json(), sort_keys=True, separators=(",", ":")).encode()

    def as_json(self) -> dict[str, Any]:
        """As it stands in `zarr.json`: of what came later than format 1, only what the store has."""
        later = {"partition": None, "order": "input", "time": None, "input": None}
        plain = {name for name, value in later.items() if getattr(self, name) == value}
        found = self.model_dump(mode="json", exclude=plain)
        for edge_type in found["edge_types"]:
            if not edge_type["arrays"]:
                del edge_type["arrays"]
        return found


def write_manifest(path: Path | str, manifest: Manifest) -> None:
    """Make directory `path` a Zarr group whose attributes hold `manifest`, atomically."""
    attributes = {ATTRIBUTE: manifest.as_json()}
    write_group(path, attributes)


def set_version(path: Path | str, manifest: Manifest, version: str) -> None:
    """Make `version` the current one of the store at `path`, atomically; manifest: its own. Other tools' attributes stay."""
    write_group(path, {**_attributes(Path(path)), ATTRIBUTE: manifest.as_json(), VERSION: version})


def version_of(path: Path | str) -> str:
    """The current version of the store's arrays; "" for one that was never compacted. Raises StoreError for no store."""
    found = _attributes(Path(path)).get(VERSION, "")
    if not isinstance(found, str) or (found and not found.isdecimal()):
        raise StoreError(f"{Path(path) / 'zarr.json'} is damaged: {VERSION} is {found!r}; build the store again")
    return found


def arrays_of(path: Path | str, version: str | None = None) -> Path:
    """The folder with the arrays of a version of the store at `path` (None: the current one), a store by itself.

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
    """The manifest of the store at `path`.

    Raises StoreError where there is no store, its manifest is damaged, or its format is newer than this ooc reads.
    """
    path = Path(path)
    found = _attributes(path).get(ATTRIBUTE)
    if not isinstance(found, dict):
        raise StoreError(f"{path} is a Zarr group but not a finished ooc store: build one with `ooc ingest`")
    version = found.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise StoreError(f"{path} has format version {version}, this ooc reads up to {FORMAT_VERSION}: upgrade ooc")
    try:
        return Manifest.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        message = f"the manifest in {path / 'zarr.json'} is damaged at {where}: {first['msg']}; build the store again"
        raise StoreError(message) from None


def _attributes(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise StoreError(f"there is no store at {path}: check the path, or build one with `ooc ingest`")
    try:
        metadata = json.loads((path / "zarr.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{path} is not a store: it has no zarr.json; build one with `ooc ingest`") from None
    except ValueError:
        raise StoreError(f"{path / 'zarr.json'} is damaged: it is not JSON; build the store again") from None
    except OSError as error:
        raise StoreError(f"cannot read {path / 'zarr.json'}: {error.strerror}; check the permissions") from None
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return attributes if isinstance(attributes, dict) else {}

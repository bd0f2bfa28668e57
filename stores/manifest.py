"""The manifest: what a store has, as typed attributes of its Zarr group.

The rows of each node type count from 0, and each edge type has a CSC of its own. A homogeneous graph is the case of one node
type and one edge type without names (`Manifest.homogeneous`).
"""

import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ooc.stores.array_names import EDGE, HOMOGENEOUS, NODE, EdgeKey, show_edge_type
from ooc.stores.errors import StoreError
from ooc.stores.labels import Task

FORMAT_VERSION = 2
"""the newest format that can be read; see `Manifest.least_version` for what needs it"""
IdKind = Literal["int", "str"]
TimeUnit = Literal["s", "ms", "us", "ns"]
ReductionMethod = Literal["pca", "svd", "random", "variance", "mutual"]
_KEPT = {"pca": "variance", "variance": "variance", "svd": "sum of squares"}


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

    def owner(self, edge_type: EdgeType) -> EdgeType:
        """The edge type whose features, labels and splits an edge type has: its own or, of a reverse type without any, those of
        the type whose edges it has in the other direction."""
        if edge_type.reverse_of is None or edge_type.arrays or edge_type.task or edge_type.splits:
            return edge_type
        return self.edge_type(edge_type.reverse_of)

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

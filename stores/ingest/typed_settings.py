"""The specification of a data set that brings its types of nodes and edges, from the settings of one ingest."""

from collections.abc import Collection, Mapping
from typing import Any

from ooc.stores.array_names import EdgeKey, show_edge_type
from ooc.stores.errors import ConfigError
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.typed_spec import EdgeTypeSpec, HeteroSpec, NodeTypeSpec

MASKS = ("train_mask", "val_mask", "test_mask")
EDGE_LABELS = ("edge_y", "y")
"""names of the labels among the parts of an edge type"""
TIME = "time"
"""the part of edges that is their time, as PyG's loaders read it"""
Parts = Collection[str]
"""names of what a data set has of a type: x, y, train_mask, ... of nodes, edge_weight, time, y, ... of edges"""


def typed_settings(
    spec: IngestSpec,
    nodes: Mapping[str, Parts],
    edges: Mapping[EdgeKey, Parts],
    reverse_of: Mapping[EdgeKey, EdgeKey] | None = None,
) -> HeteroSpec:
    """Return the specification by type, of which `spec` has the settings and the source.

    Random splits are of the types with labels, of all types where none has. `reverse_of` says which edge types are others' in
    the other direction. Raises ConfigError for a setting of one type of nodes and edges, or of no use for these.

    >>> typed_settings(IngestSpec(out="mag.ooc", pyg="data"), {"paper": ["x", "y"]}, {("paper", "cites", "paper"): []}).nodes
    """
    for name in ("parts", "order"):
        if getattr(spec, name) != IngestSpec.model_fields[name].default:
            raise ConfigError(f"`{name}` is for graphs of one type of nodes and edges: leave it out")
    _refuse_unused(spec, nodes, edges)
    labelled = any("y" in parts for parts in nodes.values())
    of_nodes = {name: _node_spec(spec, parts, labelled) for name, parts in nodes.items()}
    of_edges = {show_edge_type(key): _edge_spec(spec, key, parts) for key, parts in edges.items()}
    rest: dict[str, Any] = {"out": spec.out, "memory": spec.memory, "reverse": spec.reverse, "pyg": spec.pyg}
    rest["shard"] = spec.shard
    known = {show_edge_type(one): show_edge_type(other) for one, other in (reverse_of or {}).items()}
    return HeteroSpec(**rest, nodes=of_nodes, edges=of_edges, reverse_of=known)


def _refuse_unused(spec: IngestSpec, nodes: Mapping[str, Parts], edges: Mapping[EdgeKey, Parts]) -> None:
    """Raise ConfigError for a setting that no type has a use for."""
    if spec.undirected and not any(key[0] == key[2] for key in edges):
        raise ConfigError("`undirected` is for edges between nodes of one type, and there are none: use `reverse`")
    labelled = any("y" in parts for parts in nodes.values()) or any(_has_labels(parts) for parts in edges.values())
    if spec.task != "auto" and not labelled:
        raise ConfigError(f"`task={spec.task!r}` says what the labels are, and there are none: leave it out")
    if spec.time_unit != "s" and not any(TIME in parts for parts in edges.values()):
        raise ConfigError("`time_unit` says what the times' numbers mean, and no edges have `time`: leave it out")
    if spec.normalize != "none" and not any("x" in parts for parts in nodes.values()):
        raise ConfigError(f"`normalize={spec.normalize!r}` scales features, and there are none: leave it out")
    if spec.reduction is not None and not any("x" in parts for parts in nodes.values()):
        raise ConfigError("`reduce` and `select` make the feature x narrower, and there is none: leave them out")
    if spec.split_index is not None and not any(_has_masks(parts) for parts in nodes.values()):
        raise ConfigError("`split_index` chooses among the splits of masks, and there are none: leave it out")


def _has_labels(edges: Parts) -> bool:
    return any(name in edges for name in EDGE_LABELS)


def _has_masks(nodes: Parts) -> bool:
    return any(name in nodes for name in MASKS)


def _node_spec(spec: IngestSpec, parts: Parts, labelled: bool) -> NodeTypeSpec:
    fields = _shared(spec)
    if "x" in parts:
        fields |= {"normalize": spec.normalize, "reduce": spec.reduce, "select": spec.select}
        fields |= {"seed": spec.seed} if spec.reduction is not None else {}
    if "y" in parts:
        fields["task"] = spec.task
    if spec.random_split is not None and ("y" in parts or not labelled):
        fields |= {"random_split": spec.random_split, "seed": spec.seed}
    if spec.split_index is not None and _has_masks(parts):
        fields["split_index"] = spec.split_index
    return NodeTypeSpec(**fields)


def _edge_spec(spec: IngestSpec, key: EdgeKey, parts: Parts) -> EdgeTypeSpec:
    fields = _shared(spec)
    fields |= {"undirected": spec.undirected and key[0] == key[2]}
    fields |= {name: getattr(spec, name) for name in ("drop_duplicates", "drop_self_loops", "drop_missing", "edge_ids")}
    fields |= {"task": spec.task} if _has_labels(parts) else {}
    fields |= {"weight": "edge_weight"} if "edge_weight" in parts else {}
    fields |= {"time": TIME, "time_unit": spec.time_unit} if TIME in parts else {}
    return EdgeTypeSpec(**fields)


def _shared(spec: IngestSpec) -> dict[str, Any]:
    """Where everything comes from, and the settings of all types."""
    return {name: getattr(spec, name) for name in ("out", "pyg", "ogb", "dtype", "allow_nan")}

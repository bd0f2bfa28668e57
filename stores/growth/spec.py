"""`AppendSpec`: what to append, with the fields of an ingest that apply."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from ooc.stores.array_names import HOMOGENEOUS, NODE, EdgeKey, parse_edge_type, show_edge_type
from ooc.stores.errors import ConfigError
from ooc.stores.ingest.spec import BY_EDGE_TYPE, BY_NODE_TYPE, IngestSpec
from ooc.stores.ingest.typed_spec import (
    OF_EDGES,
    OF_NODES,
    Parse,
    fields_of_types,
    has_types,
    is_typed,
    keyed,
    made_of_type,
    only,
)
from ooc.stores.sizes import parse_bytes

FIELDS = (
    "edges",
    "src",
    "dst",
    "weight",
    "time",
    "time_unit",
    "edge_features",
    "edge_label",
    "edge_split",
    "header",
    "drop_missing",
    "allow_nan",
    "nodes",
    "id",
    "label",
    "split",
    "birth",
    "x_cols",
    "features",
    "labels",
    "memory",
)
"""fields that may be given; the store determines all others"""


class AppendSpec(IngestSpec):
    """One append to the store `out`: new edges, new nodes, and new rows of existing nodes, with the names of an ingest.

    `nodes` is a table of nodes by id: existing ones get the given rows, others are new. `features` and `labels` have one row
    per row of it or, without it, per new node. Columns of ends, weights and times must be named again; those of features are
    matched to the store's by name.
    Raises ConfigError if settings do not apply to an append, or contradict each other.

    >>> append(AppendSpec(out="papers.ooc", edges="new.parquet", time="t"))
    """

    def _refuse_settled(self) -> None:
        for name, field in type(self).model_fields.items():
            if name not in (*FIELDS, "out") and getattr(self, name) != field.get_default(call_default_factory=True):
                raise ConfigError(f"`{name}` is settled when a store is ingested: leave it out")

    @property
    def of_nodes(self) -> Mapping[str, "AppendSpec"]:
        """Node type -> what is new of it."""
        return {NODE: self}

    @property
    def of_edges(self) -> Mapping[EdgeKey, "AppendSpec"]:
        """Edge type -> what is new of it."""
        return {} if self.edges is None else {HOMOGENEOUS: self}

    @model_validator(mode="after")
    def _fits_together(self) -> "AppendSpec":
        self._refuse_settled()
        if self.edges is None and self.nodes is None:
            raise ConfigError("there is nothing to append: give `edges`, or `nodes` with what is new about them")
        of_edges = "weight", "time", "edge_features", "edge_label", "edge_split"
        if self.edges is None and (given := [name for name in of_edges if getattr(self, name)]):
            raise ConfigError(f"`{given[0]}` is of edges: give `edges` too")
        self._check_nodes()
        self.feature_globs()
        self.edge_feature_patterns()
        _ = self.memory_bytes
        return self


class NodeTypeAppend(AppendSpec):
    """The fields of an append that are of one node type; without a table, new nodes are those of new edges."""

    @model_validator(mode="after")
    def _fits_together(self) -> "NodeTypeAppend":
        self._refuse_settled()
        self._check_nodes()
        self.feature_globs()
        return self


class EdgeTypeAppend(AppendSpec):
    """The fields of an append that are of one edge type."""

    @model_validator(mode="after")
    def _fits_together(self) -> "EdgeTypeAppend":
        self._refuse_settled()
        self.edge_feature_patterns()
        return self


class TypedAppend(BaseModel):
    """One append to a heterogeneous store; `append_spec_of` makes it.

    >>> append(append_spec_of({"out": "shop.ooc", "edges": ["user:visits:item=new.parquet"]})).appended.edges
    1000
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    out: Path
    nodes: dict[str, NodeTypeAppend]
    """of the types that are named, and of the ends of the edges"""
    edges: dict[str, EdgeTypeAppend]
    """by "source:name:target" """
    memory: str | int = "2GB"

    @property
    def of_nodes(self) -> Mapping[str, AppendSpec]:
        """Node type -> what is new of it."""
        return self.nodes

    @property
    def of_edges(self) -> Mapping[EdgeKey, AppendSpec]:
        """Edge type -> what is new of it."""
        return {parse_edge_type(text): spec for text, spec in self.edges.items()}

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory, "memory")


def append_spec_of(given: Mapping[str, Any], parse: Parse = lambda model, values: model(**values)) -> AppendSpec | TypedAppend:
    """Return the specification of an append for its fields, of which some may be given by type, as of an ingest.

    Args:
        given: The fields by name; see `ooc.stores.ingest.typed_spec.spec_of`.
        parse: Constructs a model from values.

    Raises:
        ConfigError: If settings contradict each other.

    >>> append_spec_of({"out": "shop.ooc", "nodes": ["user=users.parquet"], "features": ["user=x=x.npy"]}).nodes.keys()
    dict_keys(['user'])
    """
    if not (is_typed(given.get("edges")) or has_types(given.get("nodes"))):
        return parse(AppendSpec, {name: only(name, value) for name, value in given.items()})
    defaults = {name: field.get_default(call_default_factory=True) for name, field in AppendSpec.model_fields.items()}
    given = {name: value for name, value in given.items() if name == "out" or value != defaults.get(name)}
    if "birth" in given:
        raise ConfigError("`birth` is for graphs of one type of nodes and edges: leave it out")
    edges = list(keyed("edges", given.get("edges"), True))
    named = [name for name in keyed("nodes", given.get("nodes"), False) if name is not None]
    types = list(dict.fromkeys([*named, *(end for key in edges for end in (key[0], key[2]))]))
    of_nodes = fields_of_types(given, types, BY_NODE_TYPE, OF_NODES, False)
    of_edges = fields_of_types(given, edges, BY_EDGE_TYPE, OF_EDGES, True)
    own = keyed("id", given.get("id"), False)
    for name, fields in of_nodes.items():
        if fields.get("nodes") is None and name not in own:
            fields.pop("id", None)  # that of all types: without a table there is no column of ids
    nodes = {name: made_of_type(parse, NodeTypeAppend, f"node type {name!r}", given, of_nodes[name]) for name in types}
    specs = {
        show_edge_type(key): made_of_type(parse, EdgeTypeAppend, f"edge type {show_edge_type(key)}", given, of_edges[key])
        for key in edges
    }
    rest: dict[str, Any] = {name: given[name] for name in ("out", "memory") if name in given}
    return parse(TypedAppend, {**rest, "nodes": nodes, "edges": specs})

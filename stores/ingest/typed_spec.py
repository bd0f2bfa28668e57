"""`HeteroSpec`: what to ingest of several types of nodes and edges, a specification for each; and options given by type."""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from ooc.stores.array_names import HOMOGENEOUS, EdgeKey, check_type_name, parse_edge_type, show_edge_type
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest.shards import Shard
from ooc.stores.ingest.spec import BY_EDGE_TYPE, BY_NODE_TYPE, IngestSpec
from ooc.stores.sizes import parse_bytes

REVERSE = "rev_"
"""before the name of a reverse edge type, as in PyG"""
_FOR_ALL = ("id", "src", "dst", "weight", "time")
"""options by type of which one value without a type is for all types"""
_OF_ONE = (
    *("npz", "pyg", "arg", "ogb", "graphbolt", "parts", "partitioner", "order", "birth"),
    *("graph_id", "graphs", "graph_label", "graph_split"),
)
"""fields of an ingest of one type only"""
_OF_TABLES = ("header", "id_type", "drop_missing", "allow_nan", "dtype")
OF_NODES = (*_OF_TABLES, "normalize")
OF_EDGES = (*_OF_TABLES, "drop_duplicates", "drop_self_loops", "time_unit", "edge_ids", "sorted")
"""fields that are the same for all types"""
_TASK = "task"
"""the one field that is of node types and of edge types"""
_SEEDED = ("random_split", "reduce", "select")
_LISTS = ("features", "edge_features")
_EXAMPLES = {True: "author:writes:paper", False: "paper"}
_TYPED_EDGES = re.compile(r"[^:=/]*:[^=/]*=")

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made", bound=BaseModel)
Parse = Callable[[Any, Mapping[str, Any]], Any]
"""constructs a model from values"""


class NodeTypeSpec(IngestSpec):
    """The fields of an ingest that are of one node type; without a table, its ids come from the edges."""

    @model_validator(mode="after")
    def _fits_together(self) -> "NodeTypeSpec":
        self._check_nodes()
        self._check_split()
        self.feature_globs()
        _ = self.reduction
        return self


class EdgeTypeSpec(IngestSpec):
    """The fields of an ingest that are of one edge type."""

    @model_validator(mode="after")
    def _fits_together(self) -> "EdgeTypeSpec":
        self._check_times()
        self._check_order(events=False)
        self.edge_feature_patterns()
        return self


class HeteroSpec(BaseModel):
    """One ingest of several types; `spec_of` makes it. Raises ConfigError or InputError if types do not fit together.

    >>> spec = spec_of({"out": "mag.ooc", "edges": {"paper:cites:paper": "cites.parquet"}})
    >>> ingest(spec).num_nodes
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    out: Path
    nodes: dict[str, NodeTypeSpec]
    edges: dict[str, EdgeTypeSpec]
    """by "source:name:target" """
    reverse: bool = False
    reverse_of: dict[str, str] = {}
    """edge types of the input whose edges are those of another one in the other direction, in the same order"""
    shard: str | None = None
    """as of `IngestSpec`"""
    memory: str | int = "2GB"
    pyg: str | None = None
    """what arrays in memory are called in messages"""

    @model_validator(mode="after")
    def _types_fit(self) -> "HeteroSpec":
        for name in self.nodes:
            check_type_name(name)
        if HOMOGENEOUS in self.edge_types:
            raise ConfigError(f"edge type {show_edge_type(HOMOGENEOUS)} is that of graphs without types: rename it")
        for key in self.edge_types:
            for end in (key[0], key[2]):
                if end not in self.nodes:
                    raise InputError(
                        f"edge type {show_edge_type(key)}: there is no node type {end!r}, only {', '.join(self.nodes)}; give "
                        f"its table as `nodes` or its `num_nodes`, or `nodes` {end} without a file for the ids of its edges"
                    )
        for key in self.added_reverses.values():
            if key in self.edge_types:
                raise ConfigError(f"`reverse` adds edge type {show_edge_type(key)}, which is there already: give one of them")
        if self.reverse and any(spec.sorted for spec in self.edges.values()):
            raise ConfigError("`reverse` sorts edges by their sources: leave out it, or `sorted`")
        if self.shard is not None:
            Shard.parse(self.shard)
            if self.reverse and any(spec.drop_duplicates for spec in self.edges.values()):
                raise ConfigError("`drop_duplicates` and `reverse` together do not go with `shard`: drop them from the input")
            for spec in self.nodes.values():
                spec._check_statistics()
        parse_bytes(self.memory, "memory")
        return self

    @property
    def node_types(self) -> Mapping[str, IngestSpec]:
        """The specification of each node type."""
        return self.nodes

    @property
    def edge_types(self) -> Mapping[EdgeKey, IngestSpec]:
        """The specification of each edge type."""
        return {parse_edge_type(text): spec for text, spec in self.edges.items()}

    @property
    def added_reverses(self) -> dict[EdgeKey, EdgeKey]:
        """Edge type -> the reverse type that `reverse` adds; none for edges that are in both directions already."""
        found = {}
        for key, spec in self.edge_types.items() if self.reverse else ():
            if not spec.undirected:
                found[key] = (key[2], check_type_name(f"{REVERSE}{key[1]}", "edge type"), key[0])
        return found

    @property
    def known_reverses(self) -> dict[EdgeKey, EdgeKey]:
        """`reverse_of` by keys."""
        return {parse_edge_type(one): parse_edge_type(other) for one, other in self.reverse_of.items()}

    @property
    def part(self) -> Shard:
        """The shard to build; one of one for a whole store."""
        return Shard() if self.shard is None else Shard.parse(self.shard)

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory)


Spec = IngestSpec | HeteroSpec


def spec_of(given: Mapping[str, Any], parse: Parse = lambda model, values: model(**values)) -> Spec:
    """Return the specification for the fields of an ingest, of which some may be given by type.

    A value by type is a mapping {type: value}, or texts TYPE=VALUE (`["paper=papers.parquet", "author=authors.csv"]`); edge
    types are (source, name, target) or "source:name:target". If `edges` are, the graph is heterogeneous.

    Args:
        given: The fields by name.
        parse: Constructs a model from values.

    Returns:
        `IngestSpec`, or `HeteroSpec` for a heterogeneous graph.

    Raises:
        ConfigError: If settings contradict each other, or name an unknown type.
        InputError: If the end of an edge type is no node type, or a file is listed twice.

    >>> spec_of({"out": "mag.ooc", "edges": ["author:writes:paper=writes.parquet"]}).nodes.keys()
    dict_keys(['author', 'paper'])
    """
    if not is_typed(given.get("edges")):
        return parse(IngestSpec, {name: only(name, value) for name, value in given.items()})
    defaults = {name: field.get_default(call_default_factory=True) for name, field in IngestSpec.model_fields.items()}
    given = {name: value for name, value in given.items() if name == "out" or value != defaults.get(name)}
    for name in _OF_ONE:
        if name in given:
            raise ConfigError(f"`{name}` is for graphs of one type of nodes and edges: leave it out")
    edges = list(keyed("edges", given["edges"], True))
    if not edges:
        raise ConfigError("`edges` names no edge type: give one at least")
    types = _node_types(given, edges)
    of_nodes = fields_of_types(given, types, BY_NODE_TYPE, OF_NODES, False)
    of_edges = fields_of_types(given, edges, BY_EDGE_TYPE, OF_EDGES, True)
    _settle(given, of_nodes, of_edges)
    nodes = {name: made_of_type(parse, NodeTypeSpec, f"node type {name!r}", given, of_nodes[name]) for name in types}
    specs = {key: made_of_type(parse, EdgeTypeSpec, f"edge type {show_edge_type(key)}", given, of_edges[key]) for key in edges}
    rest: dict[str, Any] = {name: given[name] for name in ("out", "reverse", "memory", "shard") if name in given}
    by_text = {show_edge_type(key): spec for key, spec in specs.items()}
    return parse(HeteroSpec, {**rest, "nodes": nodes, "edges": by_text})


def is_typed(edges: Any) -> bool:
    """Whether the value of `edges` in a specification is by type."""
    texts = [edges] if isinstance(edges, str) else edges
    listed = isinstance(texts, Sequence) and any(isinstance(each, str) and _TYPED_EDGES.match(each) for each in texts)
    return isinstance(edges, Mapping) or listed


def has_types(nodes: Any) -> bool:
    """Whether the value of `nodes` is of tables by type."""
    texts = [nodes] if isinstance(nodes, str) else nodes
    return isinstance(nodes, Mapping) or (isinstance(texts, list | tuple) and any("=" in str(each) for each in texts))


def only(name: str, value: Any) -> Any:
    """The value of a field that is not by type. Raises ConfigError if there are several."""
    if name in _LISTS or name not in (*BY_NODE_TYPE, *BY_EDGE_TYPE):
        return value
    if isinstance(value, Mapping):
        raise ConfigError(f"`{name}` is given by type: give `edges` by type too, as in {_EXAMPLES[True]}=FILES")
    if not isinstance(value, list):
        return value
    if len(value) > 1:
        typed = f"; of several types give `edges` by type, as in {_EXAMPLES[True]}=FILES" if name == "nodes" else ""
        raise ConfigError(f"`{name}` is given twice: name several files by one glob, and columns in one text{typed}")
    return value[0]


def fields_of_types(
    given: Mapping[str, Any], types: Sequence[Key], by_type: Iterable[str], shared: Iterable[str], of_edges: bool
) -> dict[Key, dict[str, Any]]:
    """The fields of each type. Raises ConfigError for a value without a type, or of an unknown one."""
    found: dict[Key, dict[str, Any]] = {each: {} for each in types}
    for name in by_type:
        values = _tasks(given.get(name), of_edges) if name == _TASK else given.get(name)
        for key, value in keyed(name, values, of_edges).items():
            if key is not None and key not in found:
                what, there = ("node", "edge")[of_edges], ", ".join(_shown(each) for each in types)
                raise ConfigError(f"`{name}`: there is no {what} type {_shown(key)}; there are {there}")
            for each in found if key is None else (key,):
                found[each][name] = value
    for name in shared:
        for fields in found.values():
            fields |= {name: given[name]} if given.get(name) is not None else {}
    return found


def _tasks(value: Any, of_edges: bool) -> Any:
    """The part of `task`, which is of node types and of edge types, that is of the latter, or of the former."""
    if isinstance(value, Mapping):
        return {key: each for key, each in value.items() if (isinstance(key, tuple) or ":" in key) == of_edges}
    texts = [value] if isinstance(value, str) else value or ()
    return [text for text in texts if (":" in text.partition("=")[0]) == of_edges]


def _settle(given: Mapping[str, Any], nodes: Mapping[str, dict[str, Any]], edges: Mapping[EdgeKey, dict[str, Any]]) -> None:
    """Put the fields of all types where they mean something. Raises ConfigError if that is nowhere."""
    own = keyed("id", given.get("id"), False)
    for key, fields in edges.items():
        if fields["edges"] is None:
            raise ConfigError(f"`edges` of {show_edge_type(key)} is None: give files, an array or a table")
    for name, fields in nodes.items():
        if fields.get("nodes") is None and name not in own:
            fields.pop("id", None)  # that of all types: without a table there is no column of ids
        if given.get("seed") and any(each in fields for each in _SEEDED):
            fields["seed"] = given["seed"]
    if given.get("seed") and not any(each in fields for fields in nodes.values() for each in _SEEDED):
        raise ConfigError("`seed` is that of a random split: give `random_split` too")
    if given.get("undirected"):
        same = [key for key in edges if key[0] == key[2]]
        if not same:
            raise ConfigError("`undirected` is for edges between nodes of one type, and there are none: use `reverse`")
        for key in same:
            edges[key]["undirected"] = True
    if "time_unit" in given:
        timed = [fields for fields in edges.values() if "time" in fields]
        for fields in edges.values():
            if timed and "time" not in fields:
                fields.pop("time_unit", None)


def made_of_type(parse: Parse, model: type[Made], what: str, given: Mapping[str, Any], fields: Mapping[str, Any]) -> Made:
    """The specification of one type, named `what` in messages."""
    try:
        return parse(model, {"out": given["out"], **fields})
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def _node_types(given: Mapping[str, Any], edges: Sequence[EdgeKey]) -> list[str]:
    """The node types that `nodes` and `num_nodes` name or, without any, the ends of the edges."""
    named = [key for name in ("nodes", "num_nodes") for key in keyed(name, given.get(name), False) if key is not None]
    return list(dict.fromkeys(named or [end for key in edges for end in (key[0], key[2])]))


def keyed(name: str, value: Any, of_edges: bool) -> dict[Any, Any]:
    """The values of an option by type, under None one for all types. Raises ConfigError where a type is missing or repeated."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        texts = value if isinstance(value, list | tuple) else [value]
        pairs = [_split(name, each, of_edges) for each in texts]
    found: dict[Any, Any] = {}
    for key, each in pairs:
        key = None if key is None else _key(name, key, of_edges)
        if name in _LISTS:
            found.setdefault(key, []).extend([each] if isinstance(each, str) else each)
        elif key in found:
            of = "" if key is None else f" {_shown(key)}"
            raise ConfigError(f"`{name}`{of} is given twice: name several files by one glob")
        else:
            found[key] = each
    return found


def _split(name: str, text: Any, of_edges: bool) -> tuple[str | None, Any]:
    """Type and value of TYPE=VALUE; None and the value if it may be for all types."""
    key, sign, value = str(text).partition("=")
    if sign and (not of_edges or key.count(":") == 2):
        if not value:
            raise ConfigError(f"`{name}={str(text)!r}`: nothing stands after the sign =")
        return key, value
    if name == "nodes":
        return str(text), None
    if name in _FOR_ALL:
        return None, text
    example = _EXAMPLES[of_edges]
    raise ConfigError(f"`{name}={str(text)!r}`: say of which {('node', 'edge')[of_edges]} type, as in {example}={text}")


def _key(name: str, key: Any, of_edges: bool) -> Any:
    """A type as it is known by. Raises InputError for what cannot be one."""
    parts = list(key) if of_edges and isinstance(key, tuple | list) else [key]
    if not all(isinstance(part, str) for part in parts):
        what = "edge type is (source, name, target)" if of_edges else "node type is its name"
        raise InputError(f"`{name}` of type {key!r}: {'an' if of_edges else 'a'} {what}, in text")
    return parse_edge_type(":".join(parts)) if of_edges else key


def _shown(key: Any) -> str:
    return show_edge_type(key) if isinstance(key, tuple) else repr(key)

"""The edge type that links are of, and the edge types that are its reverses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ooc.graph.hetero import EdgeKey
from ooc.sampling.hetero_neighbor import edge_name
from ooc.stores.dataset import Dataset
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.graph import Graph
from ooc.stores.node_set import NodeSet


@dataclass(frozen=True)
class LinkType:
    """The edge type that links are of. typed: whether the data set is one of several types; reverses: edge types whose edges
    are its edges in the other direction."""

    key: EdgeKey
    edges: EdgeSet
    source: NodeSet
    target: NodeSet
    typed: bool = False
    reverses: tuple[EdgeKey, ...] = ()

    @classmethod
    def of(cls, ds: Dataset, key: EdgeKey) -> "LinkType":
        """An edge type of the data set."""
        edges = ds.edges(key)
        return cls(key, edges, ds.nodes(key[0]), ds.nodes(key[2]), ds.is_hetero, _reverses(ds, edges) if ds.is_hetero else ())

    @classmethod
    def asked(cls, ds: Dataset, edge_label_index: Any) -> tuple["LinkType", Any]:
        """The type, and which links of it, of `edge_label_index` as PyG takes it: links, or a pair of the type and these; the
        type alone is all of its edges.

        Raises ConfigError where several types need one, InputError for a type that the data set has not.
        """
        there = ", ".join(map(edge_name, ds.edge_types))
        key: Any = None
        if _is_names(edge_label_index) and (len(edge_label_index) == 3 or edge_type_of(ds, edge_label_index)):
            key, edge_label_index = edge_label_index, None
        elif isinstance(edge_label_index, tuple) and len(edge_label_index) == 2 and _is_type(edge_label_index[0]):
            key, edge_label_index = edge_label_index
        if key is not None:
            key = edge_type_of(ds, key) or key
        if key is None and len(ds.edge_types) > 1:
            raise ConfigError(
                f"edge_label_index must name the edge type of its links, one of {there}, as in "
                f"edge_label_index=({ds.edge_types[0]!r}, links)"
            )
        key = ds.edge_types[0] if key is None or not ds.is_hetero else key
        if key not in ds.edge_types:
            name = ":".join(key) if isinstance(key, tuple) else key
            raise InputError(f"edge_label_index is of the edge type {name}, which {ds.path} has not: it has {there}")
        return cls.of(ds, key), edge_label_index

    @property
    def graph(self) -> Graph:
        return self.edges.graph

    @property
    def same_nodes(self) -> bool:
        """Whether sources and destinations are of one type."""
        return self.key[0] == self.key[2]


def edge_type_of(ds: Dataset, asked: str | tuple[str, ...]) -> EdgeKey | None:
    """The edge type that is asked for: a triple, source:name:target, PyG's source__name__target; or a name, or a pair (source,
    target), that one type alone has. None where there is not one."""
    return key_of(ds.edge_types, asked)


def key_of(edge_types: Sequence[EdgeKey], asked: str | tuple[str, ...]) -> EdgeKey | None:
    """`edge_type_of` among the edge types of any store."""
    found = [key for key in edge_types if asked in (key, edge_name(key), "__".join(key))]
    found = found or [key for key in edge_types if asked in (key[1], (key[0], key[2]))]
    return found[0] if len(found) == 1 else None


def _reverses(ds: Dataset, edges: EdgeSet) -> tuple[EdgeKey, ...]:
    """The edge types recorded as an edge type's reverse, and those that PyG's `ToUndirected` names so."""
    first, name, last = edges.key
    found = []
    for key in ds.edge_types:
        recorded = ds.edges(key).reverse_of == edges.key or edges.reverse_of == key
        named = (key[0], key[2]) == (last, first) and (key[1] == f"rev_{name}" or name == f"rev_{key[1]}")
        if key != edges.key and (recorded or named):
            found.append(key)
    return tuple(found)


def _is_names(given: Any) -> bool:
    """Whether it is (source type, name, target type), or PyG's (source type, target type)."""
    return isinstance(given, tuple) and len(given) in (2, 3) and all(isinstance(name, str) for name in given)


def _is_type(given: Any) -> bool:
    """Whether it is PyG's edge type, or None in its place."""
    return given is None or isinstance(given, str) or _is_names(given)

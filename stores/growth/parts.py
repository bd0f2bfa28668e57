"""The types of a store that grow: where each one's arrays are, and how its records are told from others'.

A homogeneous store is the case of one part of nodes and one of edges, whose records have no prefix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ooc.stores import array_names as names
from ooc.stores.array_names import EdgeKey, show_edge_type
from ooc.stores.labels import Task
from ooc.stores.manifest import EdgeType, Input, Manifest, NodeType, Time


@dataclass(frozen=True)
class NodePart:
    """A node type of a store."""

    prefix: str
    """of its records; see `Delta.of`"""
    type: NodeType
    task: Task | None
    num_classes: int | None
    class_names: list[str] | None
    time: Time | None
    """of the events that its births are times of"""

    @property
    def of(self) -> str:
        """For messages: " of node type 'user'", nothing in a homogeneous store."""
        return f" of node type {self.prefix!r}" if self.prefix else ""

    def array(self, name: str) -> str:
        """Path of a node array."""
        return names.node_array(name, self.type.name)


@dataclass(frozen=True)
class EdgePart:
    """An edge type of a store, with the types that have its edges in the other direction."""

    prefix: str
    type: EdgeType
    weighted: bool
    undirected: bool
    input: Input | None
    time: Time | None
    """of events, which only homogeneous stores have"""
    reverses: list[EdgeKey] = field(default_factory=list)

    @property
    def key(self) -> EdgeKey:
        """(source type, name, target type)."""
        return self.type.key

    @property
    def of(self) -> str:
        """For messages: " of edge type user:visits:item", nothing in a homogeneous store."""
        return f" of edge type {self.prefix}" if self.prefix else ""

    def array(self, name: str) -> str:
        """Path of an edge array."""
        return names.edge_array(name, self.key)

    def column(self, name: str) -> str:
        """Path of an array of its CSC."""
        return names.graph_array(name, self.key)


def node_parts(manifest: Manifest) -> Mapping[str, NodePart]:
    """Name -> node type, in order.

    >>> list(node_parts(read_manifest("mag.ooc")))
    ['author', 'paper']
    """
    if not manifest.is_hetero:
        own = manifest.node_type()
        return {own.name: NodePart("", own, manifest.task, manifest.num_classes, manifest.class_names, manifest.time)}
    return {
        each.name: NodePart(each.name, each, each.task, each.num_classes, each.class_names, None)
        for each in manifest.node_types
    }


def edge_parts(manifest: Manifest) -> Mapping[EdgeKey, EdgePart]:
    """Key -> edge type, in order; types that are others' in the other direction are `reverses` of these.

    >>> list(edge_parts(read_manifest("mag.ooc")))
    [('author', 'writes', 'paper')]
    """
    if not manifest.is_hetero:
        own = manifest.edge_types[0]
        return {own.key: EdgePart("", own, manifest.weighted, manifest.undirected, manifest.input, manifest.time)}
    found = {}
    for each in manifest.edge_types:
        if each.reverse_of is None:
            back = [other.key for other in manifest.edge_types if other.reverse_of == each.key]
            shown = show_edge_type(each.key)
            found[each.key] = EdgePart(shown, each, each.weighted, each.undirected, each.input, None, back)
    return found


def stage_of(stage: Path, part: NodePart | EdgePart) -> Path:
    """The folder for a part's files below `stage`, made where it is of one type of several."""
    if not part.prefix:
        return stage
    folder = stage / part.prefix.replace(":", "__")
    folder.mkdir(exist_ok=True)
    return folder

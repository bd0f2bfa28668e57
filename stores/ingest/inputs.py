"""`Inputs`: what an ingest reads, whatever form it was given in."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from ooc.stores.ingest.lazy import LazyArray
from ooc.stores.ingest.sources import Table, open_array
from ooc.stores.ingest.spec import IngestSpec

_TABLES = ("edges", "nodes", "label_table", "graph_table")


@dataclass
class Inputs:
    """The inputs after unpacking, as read by later steps; converts to and from JSON for the journal."""

    edges: Table
    nodes: Table | None = None
    weight: str | None = None
    features: dict[str, list[str]] = field(default_factory=dict)
    """name -> npy files, to be concatenated"""
    feature_tables: dict[str, Table] = field(default_factory=dict)
    labels: str | None = None
    label_table: Table | None = None
    splits: dict[str, str] = field(default_factory=dict)
    """train, val, test -> npy of ids or a mask"""
    num_nodes: int | None = None
    extra: list[str] = field(default_factory=list)
    """features that nobody asked for by name: stored as they are"""
    edge_features: dict[str, list[str]] = field(default_factory=dict)
    """the same as features, by edge"""
    edge_tables: dict[str, Table] = field(default_factory=dict)
    graphs: dict[str, str] = field(default_factory=dict)
    """of many graphs: ptr, y, train, val, test and others by graph -> npy file"""
    graph_table: Table | None = None
    """a row per graph"""
    edge_labels: str | None = None
    """npy of them, by edge"""
    edge_splits: dict[str, str] = field(default_factory=dict)
    """train, val, test -> npy of edge positions or a mask"""
    notes: list[str] = field(default_factory=list)
    """what is left out"""
    shown: dict[str, str] = field(default_factory=dict)
    """unpacked file -> its name in messages"""
    lazy: dict[str, LazyArray] = field(default_factory=dict)
    """where a file would be -> the array that is read instead; no part of the JSON, every attempt is given its own"""

    def of_graphs(self, spec: IngestSpec) -> bool:
        """Whether there are many graphs, whose arrays of one dimension stay so, as in the batches of PyG's DataLoader."""
        return spec.graph_id is not None or bool(self.graphs)

    def name(self, path: str) -> str:
        return self.shown.get(path, path)

    def open(self, path: str) -> NDArray[Any] | LazyArray:
        """The array of a file, or the one that is read instead of it."""
        return open_lazy(self.lazy, path, self.name(path))

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(replace(self, lazy={})).items() if name != "lazy"}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        tables: dict[str, Any] = {key: Table.from_json(value[key]) for key in _TABLES if value[key]}
        for part in ("feature_tables", "edge_tables"):
            tables[part] = {key: Table.from_json(table) for key, table in value[part].items()}
        return cls(**{**value, **tables})


def open_lazy(lazy: Mapping[str, LazyArray], path: str, shown: str) -> NDArray[Any] | LazyArray:
    """The array of a file, called `shown` in messages, or the one of `lazy` that is read instead of it."""
    return lazy[path] if path in lazy else open_array(Path(path), shown)

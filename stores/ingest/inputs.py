"""`Inputs`: what an ingest reads, whatever form it was given in."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ooc.stores.ingest.sources import Table
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

    def of_graphs(self, spec: IngestSpec) -> bool:
        """Whether there are many graphs, whose arrays of one dimension stay so, as in the batches of PyG's DataLoader."""
        return spec.graph_id is not None or bool(self.graphs)

    def name(self, path: str) -> str:
        return self.shown.get(path, path)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        tables: dict[str, Any] = {key: Table.from_json(value[key]) for key in _TABLES if value[key]}
        for part in ("feature_tables", "edge_tables"):
            tables[part] = {key: Table.from_json(table) for key, table in value[part].items()}
        return cls(**{**value, **tables})

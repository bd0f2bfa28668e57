"""What to append: the fields of an ingest that an append has."""

from pydantic import model_validator

from stores.errors import ConfigError
from stores.ingest.spec import IngestSpec

FIELDS = (
    "edges",
    "src",
    "dst",
    "weight",
    "time",
    "time_unit",
    "edge_features",
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
"""what may be given; anything else the store has settled"""


class AppendSpec(IngestSpec):
    """One append to the store `out`: new edges, new nodes, and rows of known nodes anew, with the names an ingest has for them.

    `nodes` is a table of nodes by id: known ones get the rows that it gives, the others are new. `features` and `labels` have a
    row each of its rows; without it, of each new node. Edge columns are to be named again: a store does not know their names.
    Raises ConfigError where settings do not go with an append, or contradict one another.

    >>> append(AppendSpec(out="papers.ooc", edges="new.parquet", time="t"))
    """

    @model_validator(mode="after")
    def _fits_together(self) -> "AppendSpec":
        for name, field in type(self).model_fields.items():
            if name not in (*FIELDS, "out") and getattr(self, name) != field.get_default(call_default_factory=True):
                raise ConfigError(f"--{name.replace('_', '-')} is settled when a store is ingested: leave it out")
        if self.edges is None and self.nodes is None:
            raise ConfigError("there is nothing to append: give --edges, or --nodes with what is new about them")
        if self.edges is None and (self.weight or self.time or self.edge_features):
            raise ConfigError("--weight, --time and --edge-features are of edges: give --edges too")
        self._check_nodes()
        self.feature_globs()
        self.edge_feature_patterns()
        _ = self.memory_bytes
        return self

"""`AppendSpec`: what to append, with the fields of an ingest that apply."""

from pydantic import model_validator

from ooc.stores.errors import ConfigError
from ooc.stores.ingest.spec import IngestSpec

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
    per row of it or, without it, per new node. Edge columns must be named again, because a store does not record their names.
    Raises ConfigError if settings do not apply to an append, or contradict each other.

    >>> append(AppendSpec(out="papers.ooc", edges="new.parquet", time="t"))
    """

    @model_validator(mode="after")
    def _fits_together(self) -> "AppendSpec":
        for name, field in type(self).model_fields.items():
            if name not in (*FIELDS, "out") and getattr(self, name) != field.get_default(call_default_factory=True):
                raise ConfigError(f"`{name}` is settled when a store is ingested: leave it out")
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

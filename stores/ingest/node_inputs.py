"""Which inputs contain the node arrays: features by name, and labels."""

from ooc.stores.ingest import nodes
from ooc.stores.ingest.datasets import Inputs
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.spec import IngestSpec


class NodeInputs:
    """The node arrays of an ingest, as rows that can be read sequentially.

    >>> NodeInputs(spec, inputs, duck).features("x").count
    """

    def __init__(self, spec: IngestSpec, inputs: Inputs, duck: Duck) -> None:
        self._spec, self._inputs, self._duck = spec, inputs, duck

    @property
    def names(self) -> list[str]:
        """Names of the features."""
        own = ["x"] if self._spec.x_cols else []
        return sorted({*self._inputs.features, *self._inputs.feature_tables, *own})

    def features(self, name: str) -> nodes.Rows:
        """Return the rows of a feature. Raises InputError if its files or columns do not fit."""
        if name in self._inputs.features:
            return nodes.npy_rows(self._inputs.features[name], self._inputs.name)
        table = self._inputs.feature_tables.get(name)
        if table is not None:
            return nodes.table_rows(self._duck, table, list(table.columns))
        assert self._inputs.nodes is not None
        assert self._spec.x_cols is not None
        taken = {self._spec.id, *(each for each in (self._spec.label, self._spec.split, self._spec.birth) if each)}
        columns = nodes.match_columns(self._inputs.nodes, self._spec.x_cols, taken)
        return nodes.table_rows(self._duck, self._inputs.nodes, columns)

    def labels(self) -> nodes.Rows | None:
        """Return the rows of the labels, or None. Raises as `features` does."""
        if self._inputs.labels is not None:
            return nodes.npy_rows([self._inputs.labels], self._inputs.name)
        if self._inputs.label_table is not None:
            return nodes.table_rows(self._duck, self._inputs.label_table, list(self._inputs.label_table.columns))
        if self._spec.label is None:
            return None
        assert self._inputs.nodes is not None
        column = self._inputs.nodes.column(self._spec.label, "labels")
        return nodes.table_rows(self._duck, self._inputs.nodes, [column])

"""Which inputs contain the node arrays: features by name, and labels."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from ooc.stores.ingest import columns, nodes
from ooc.stores.ingest import labels as label_columns
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.sources import Table
from ooc.stores.ingest.spec import IngestSpec

Words = Mapping[str, Mapping[str, Any]]
"""column -> its words; see `nodes.Rows.categories`"""


class NodeInputs:
    """The node arrays of an ingest, as rows that can be read sequentially.

    `attributes`, `class_names` and `label_kind` are those of a store that is appended to: of its node arrays by their names,
    which say what columns of words and numbers were (`nodes.Rows.categories`, `nodes.Rows.sources`), and of its labels. By
    default they are found in the input, or said by the specification.

    >>> NodeInputs(spec, inputs, duck).features("x").count
    """

    def __init__(
        self,
        spec: IngestSpec,
        inputs: Inputs,
        duck: Duck,
        attributes: Callable[[str], Mapping[str, Any]] = lambda _: {},
        class_names: list[str] | None = None,
        label_kind: label_columns.LabelKind | None = None,
    ) -> None:
        self._spec, self._inputs, self._duck = spec, inputs, duck
        self._attributes, self._class_names = attributes, class_names
        self.label_kind: label_columns.LabelKind = label_kind or spec.task
        self._made: dict[str, nodes.Rows] = {}

    @property
    def names(self) -> list[str]:
        """Names of the features."""
        own = ["x"] if self._spec.x_cols or self._spec.one_hot or self._spec.codes else []
        return sorted({*self._inputs.features, *self._inputs.feature_tables, *own})

    def features(self, name: str) -> nodes.Rows:
        """Return the rows of a feature. Raises InputError if its files or columns do not fit."""
        if name not in self._made:
            self._made[name] = self._features(name)
        return self._made[name]

    def _features(self, name: str) -> nodes.Rows:
        if name in self._inputs.features:
            return nodes.npy_rows(self._inputs.features[name], self._inputs.name, self._inputs.open)
        table = self._inputs.feature_tables.get(name)
        if table is not None:
            return columns.table_rows(self._duck, table, self._in_order(name, table, list(table.columns)))
        table, spec = self._inputs.nodes, self._spec
        assert table is not None
        splits = [] if spec.split is None else [spec.split, *spec.split.split(",")]
        taken = {spec.id, *splits, *self._label_columns, *([spec.birth] if spec.birth else [])}
        words: Words = self._attributes(name).get(nodes.CATEGORIES, {})
        found: list[str] = [] if spec.x_cols is None else columns.match_columns(table, spec.x_cols, taken)
        given: tuple[tuple[str | None, columns.Encoded], ...] = ((spec.one_hot, "one-hot"), (spec.codes, "codes"))
        for patterns, how in given:
            matched = columns.match_columns(table, patterns, taken, f"`{how.replace('-', '_')}`") if patterns else []
            for column in matched:
                words = {**words, column: columns.categories_of(self._duck, table, column, how)}
                found += [column] if column not in found else []
        found = self._in_order(name, table, found)
        columns.refuse_no_numbers(table, [column for column in found if column not in words])
        return columns.table_rows(self._duck, table, found, words)

    def _in_order(self, name: str, table: Table, found: list[str]) -> list[str]:
        return columns.in_order(table, f"columns for {name}", found, self._attributes(name).get(nodes.SOURCES, ()))

    def labels(self) -> nodes.Rows | None:
        """Return the rows of the labels, or None. Raises as `features` does."""
        if self._inputs.labels is not None:
            return nodes.npy_rows([self._inputs.labels], self._inputs.name)
        if self._inputs.label_table is not None:
            return columns.table_rows(self._duck, self._inputs.label_table, list(self._inputs.label_table.columns))
        if not self._label_columns:
            return None
        if "y" not in self._made:
            table = self._inputs.nodes
            assert table is not None
            self._made["y"] = label_columns.label_rows(
                self._duck, table, self._label_columns, self.label_kind, self._class_names
            )
        return self._made["y"]

    @property
    def label_names(self) -> list[str] | None:
        """Names of the labels if they are several columns of the node table, else None."""
        return self._label_columns if len(self._label_columns) > 1 else None

    @cached_property
    def _label_columns(self) -> list[str]:
        """Columns of the node table with the labels."""
        spec, table = self._spec, self._inputs.nodes
        if spec.label is None or table is None:
            return []
        return label_columns.label_columns(table, spec.label, {spec.id}, self._class_names)

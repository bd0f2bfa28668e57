"""Edge labels and splits of edges: columns of the edge table, or npy files, one row per edge id as edge features have."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.array_names import HOMOGENEOUS, EdgeKey
from ooc.stores.ingest import labels, nodes
from ooc.stores.ingest import splits as split_files
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.ids import EdgeColumns
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.steps import Steps

NONE: dict[str, Any] = {"task": None, "num_classes": None, "class_names": None, "splits": {}}
"""what a store says of edges without labels and splits"""


class EdgeLabels:
    """The edge labels of an ingest. Each method is a resumable step or two.

    >>> EdgeLabels(spec, steps, duck, columns, inputs).write(lambda: Appender)["task"]
    'multiclass'
    """

    def __init__(
        self,
        spec: IngestSpec,
        steps: Steps,
        duck: Duck,
        columns: EdgeColumns,
        inputs: Inputs,
        key: EdgeKey = HOMOGENEOUS,
    ) -> None:
        self.spec, self.steps, self.duck, self.columns, self.inputs = spec, steps, duck, columns, inputs
        self._path = partial(names.edge_array, key=key)

    @cached_property
    def _columns(self) -> list[str]:
        """The label columns of the edge table."""
        if self.spec.edge_label is None:
            return []
        return labels.label_columns(self.columns.table, self.spec.edge_label, self.columns.taken, argument="edge_label")

    @cached_property
    def rows(self) -> nodes.Rows | None:
        """The labels in the order of the input's edges; None without. Raises InputError if they do not fit."""
        table = self.columns.table
        if self.inputs.edge_labels is not None:
            found = nodes.npy_rows([self.inputs.edge_labels], self.inputs.name)
        elif self._columns:
            found = labels.label_rows(self.duck, table, self._columns, self.spec.task)
        else:
            return None
        return found.expect(table.rows, table.shown, "edge")

    def check(self) -> None:
        """Check that labels and splits fit, before the long work starts."""
        _ = self.rows
        if self.spec.edge_split is not None:
            split_files.split_columns(self.columns.table, self.spec.edge_split)

    def write(self, make_sink: Callable[[], MakeSink]) -> dict[str, Any]:
        """Steps edge labels and edge splits: {task, num_classes, class_names, splits}. For make_sink see
        `Events.sink`."""
        found = dict(NONE)
        if self.rows is not None:
            found |= self.steps.run("edge labels", lambda: self._write_labels(make_sink()), self._outputs("y"))
        if self.spec.edge_split is not None or self.inputs.edge_splits:
            stage = self.steps.stage / "edge_splits.bits"
            outputs = [*self._outputs("split", *(f"split_{name}" for name in names.SPLIT_CODES)), stage]
            found |= self.steps.run("edge splits", lambda: self._write_splits(stage, make_sink()), outputs)
        return found

    def _outputs(self, *arrays: str) -> list[Path]:
        paths = [self._path(array) for array in arrays]
        return [self.steps.store / part for path in paths for part in (path, names.checksum_array(path))]

    def _write_labels(self, make_sink: MakeSink) -> dict[str, Any]:
        assert self.rows is not None
        several = self._columns if len(self._columns) > 1 else None
        found = labels.look_at_labels(self.rows, self.rows.count, several, self.spec.task)
        labels.write_labels(self.steps.store, self.rows, found, make_sink, self._path)
        return {"task": found.task, "num_classes": found.num_classes, "class_names": found.names}

    def _write_splits(self, stage: Path, make_sink: MakeSink) -> dict[str, Any]:
        made = split_files.write_splits(self.steps.store, self._bits(), stage, self._given(), make_sink, self._path, "edge")
        return {"splits": made["sizes"], "notes": made["notes"]}

    def _given(self) -> list[str]:
        """Splits that the input has, even without edges."""
        if self.spec.edge_split is None:
            return list(self.inputs.edge_splits)
        return [name for name in split_files.split_columns(self.columns.table, self.spec.edge_split) if name]

    def _bits(self) -> Iterator[NDArray[np.uint8]]:
        table = self.columns.table
        if self.spec.edge_split is not None:
            return split_files.bits_of_table(self.duck, table, self.spec.edge_split)
        opened = {
            name: split_files.open_split(path, self.inputs.name(path), table.rows, None, "edge")
            for name, path in self.inputs.edge_splits.items()
        }
        return split_files.bits_of(opened, table.rows)

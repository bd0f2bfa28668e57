"""Edge features: columns of the edge table or npy files, one row per edge id.

They are never scaled, because a scale depends on all values and would leak future events to a model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores import array_names as names
from ooc.stores.array_names import HOMOGENEOUS, EdgeKey
from ooc.stores.arrays.encoding import scale_name
from ooc.stores.ingest import nodes
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.columns import in_order, match_columns, refuse_no_numbers, table_rows
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.ids import EdgeColumns
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.sources import find
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.steps import Steps

_STORED = {"auto": "float32", "int64": "float32", "int8": "bfloat16"}
"""event features are floats; int8's scale would depend on later events"""


class EdgeFeatures:
    """The edge features of an ingest, `names` of them."""

    def __init__(
        self,
        spec: IngestSpec,
        steps: Steps,
        duck: Duck,
        progress: Progress,
        columns: EdgeColumns,
        inputs: Inputs,
        key: EdgeKey = HOMOGENEOUS,
    ) -> None:
        self.spec, self.steps, self.duck, self.progress, self.columns = spec, steps, duck, progress, columns
        self.inputs, self._path = inputs, partial(names.edge_array, key=key)
        self._of_events = spec.time is not None and key == HOMOGENEOUS
        self._patterns = spec.edge_feature_patterns()
        self.names = [*self._patterns, *inputs.edge_features, *inputs.edge_tables]

    def rows(self, name: str) -> nodes.Rows:
        """Return a feature in the order of the input's edges. Raises InputError if files or columns do not fit."""
        table = self.inputs.edges
        if name in self.inputs.edge_features:
            found = nodes.npy_rows(self.inputs.edge_features[name], self.inputs.name, self.inputs.open)
            return found.expect(table.rows, table.shown, "edge")
        if name in self.inputs.edge_tables:
            own = self.inputs.edge_tables[name]
            return table_rows(self.duck, own, list(own.columns)).expect(table.rows, table.shown, "edge")
        return rows_of(self.duck, self.columns, name, self._patterns[name])

    def check(self) -> None:
        """Check that all features fit, before the long work starts."""
        for name in self.names:
            self.rows(name)

    def write(self, make_sink: Callable[[], MakeSink]) -> dict[str, dict[str, Any]]:
        """Steps edge features NAME: {name: {wild}}. For make_sink see `Events.sink`."""
        return {
            name: self.steps.run(f"edge features {name}", partial(self._write, name, make_sink), self._outputs(name))
            for name in self.names
        }

    def _outputs(self, name: str) -> list[Path]:
        arrays = [self._path(each) for each in (name, scale_name(name))]
        return [self.steps.store / part for array in arrays for part in (array, names.checksum_array(array))]

    def _write(self, name: str, make_sink: Callable[[], MakeSink]) -> dict[str, Any]:
        rows, unscaled = self.rows(name), nodes.Scale("none", np.zeros(1))
        dtype: str
        if not self._of_events:
            dtype = self.spec.dtype if name in self._patterns else "auto"
        else:
            if self.spec.dtype in ("auto", "int64"):
                nodes.refuse_rounded(rows)
            dtype = _STORED.get(self.spec.dtype, self.spec.dtype)
        storage = nodes.fit_storage(rows, dtype, unscaled, self.progress)
        settings = storage, unscaled, self.spec.allow_nan, self.progress
        flat = self.inputs.of_graphs(self.spec)
        wild = nodes.write_features(self.steps.store, name, rows, *settings, make_sink(), self._path, flat)
        return {"wild": wild}


def rows_of(duck: Duck, columns: EdgeColumns, name: str, pattern: str, held: Sequence[str] = ()) -> nodes.Rows:
    """Return an edge feature, one row per input edge. held: the columns of the store that is appended to, see `in_order`.

    Raises InputError if files or columns do not fit.
    """
    table = columns.table
    if pattern.endswith(".npy"):
        found = nodes.npy_rows([str(path) for path in find(pattern, natural=True)])
    else:
        matched = match_columns(table, pattern, columns.taken, f"`edge_features` {name}")
        matched = in_order(table, f"columns for {name}", matched, held)
        refuse_no_numbers(table, matched)
        found = table_rows(duck, table, matched)
    return found.expect(table.rows, table.shown, "edge")

"""The edges of an append: of one type, with rows for the ids of their ends, and all columns that the store's edges have."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa

from ooc.stores.arrays.encoding import encoding_of
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.growth.delta import EDGES, FEATURE, Appended, Appending, record_rows
from ooc.stores.growth.new_edge_labels import NewEdgeLabels
from ooc.stores.growth.newnodes import End, NewNodes
from ooc.stores.growth.parts import EdgePart
from ooc.stores.growth.sorting import Column
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.growth.staged_values import stage_features
from ooc.stores.ingest import ids
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.edge_features import rows_of
from ooc.stores.ingest.ids import EdgeColumns
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.nodes import SOURCES
from ooc.stores.ingest.times import TimeColumn, time_column


class NewEdges:
    """The edges of one type of an append. Call `ends`, have both node types settle these, then `write`.

    Files are kept below `stage`. Raises InputError and ConfigError as an ingest does.
    """

    def __init__(
        self,
        spec: AppendSpec,
        root: Path,
        part: EdgePart,
        duck: Duck,
        delta: Appending,
        stage: Path,
        inputs: Inputs,
        source: NewNodes,
        target: NewNodes,
        progress: Progress,
    ) -> None:
        self.spec, self.root, self.part, self.duck, self.delta, self.stage = spec, root, part, duck, delta, stage
        self.source, self.target, self.progress = source, target, progress
        self.columns = self._columns(inputs)

    @property
    def shown(self) -> str:
        """The store's edges, for messages."""
        return f"{self.spec.out}{self.part.of}"

    def ends(self) -> list[tuple[NewNodes, End]]:
        """Scan the edges once, and return both ends; see `ids.scan`."""
        columns, source, target = self.columns, self.source, self.target
        if source is target:
            source.check_kind(columns, ("src", "dst"))
        else:
            source.check_kind(columns, ("src",))
            target.check_kind(columns, ("dst",))
        kinds = source.kind, target.kind
        settings = {"allow_nan": self.spec.allow_nan, "drop_missing": self.spec.drop_missing}
        scan = ids.scan(self.duck, columns, kinds, count_ids=False, **settings)
        if not scan.edges:
            raise InputError(f"{columns.table.shown} has no edges: there is nothing to append")
        return [(source, End(columns, "src", kinds, scan)), (target, End(columns, "dst", kinds, scan))]

    def _columns(self, inputs: Inputs) -> EdgeColumns:
        """Columns of the edges: exactly those the store's edges have."""
        table, spec, part = inputs.edges, self.spec, self.part
        there = {"weight": (spec.weight, part.weighted), "time": (spec.time, part.time is not None)}
        for name, (given, has) in there.items():
            if has and given is None:
                raise ConfigError(f"the edges of {self.shown} have a {name}: name the column of the new edges' as `{name}`")
            if given is not None and not has:
                raise ConfigError(f"the edges of {self.shown} have no {name}: leave `{name}` out")
        src = table.column(spec.src, "sources", ("src", 0))
        dst = table.column(spec.dst, "destinations", ("dst", 1))
        weight = None if spec.weight is None else table.column(spec.weight, "weights")
        return EdgeColumns(table, src, dst, weight, self._time(inputs))

    def _time(self, inputs: Inputs) -> TimeColumn | None:
        held = self.part.time
        if self.spec.time is None or held is None:
            return None
        table = inputs.edges
        unit = self.spec.time_unit if "time_unit" in self.spec.model_fields_set else held.unit
        found = time_column(self.duck, table, self.spec.time, "times", unit)
        if found.unit != held.unit:
            raise InputError(
                f"{table.shown}: times are in {found.unit}, those of {self.spec.out} in {held.unit}; give them alike"
            )
        if found.dtype.kind == "f" and held.dtype == "int64":
            raise InputError(
                f"{table.shown}: {found.column} has fractions, the times of {self.spec.out} are whole numbers; round them"
            )
        return found

    def write(self) -> Appended:
        """Write the edges' records; returns how many were added and dropped."""
        columns = self.columns
        staged = NewEdgeLabels(self.spec, self.root, self.part, self.duck, self.stage, columns).columns()
        features = {**self._edge_features(columns), **staged}
        held = self.part.time
        kinds = {"weight": np.dtype(np.float32)} if columns.weight is not None else {}
        kinds |= {"time": np.dtype(held.dtype)} if held is not None else {}
        drop_loops = self.part.input is not None and self.part.input.drop_self_loops
        counts = {"given": columns.table.rows, "edges": 0, "missing": 0, "self_loops": 0}
        row_bytes = sum(rows.row_bytes for rows in features.values())
        for batch in self.duck.stream(self._mapped(), batch_rows=record_rows(32 + row_bytes)):
            src, dst, known = _ends(batch)
            kept = known & (src != dst) if drop_loops else known
            counts["missing"] += int((~known).sum())
            counts["self_loops"] += int((known & (src == dst)).sum()) if drop_loops else 0
            place = batch.column("edge_id").to_numpy()[kept]
            record: dict[str, AnyArray] = {"src": src[kept], "dst": dst[kept], "place": place}
            record |= {name: batch.column(name).to_numpy()[kept].astype(kind) for name, kind in kinds.items()}
            for name, rows in features.items():
                near = rows.read(int(place[0]), int(place[-1]) + 1) if len(place) else rows.read(0, 0)
                record[f"{FEATURE}{name}"] = near[place - place[:1]]
            self.delta.put(EDGES, record, self.part.prefix)
            counts["edges"] += len(place)
            self.progress("append edges", counts["edges"], columns.table.rows)
        return Appended(**counts)  # type: ignore[arg-type]

    def _mapped(self) -> str:
        """SQL of the edges in input order: src, dst (rows, NULL for an unknown end), edge_id, weight, time."""
        (src, of_src), (dst, of_dst) = self.source.row_of("src"), self.target.row_of("dst")
        relation = self.columns.relation((self.source.kind, self.target.kind))
        rest = ", ".join(["edge_id", *self.columns.rest])
        return f"SELECT {src}, {dst}, {rest} FROM ({relation}) e {of_src} {of_dst} ORDER BY edge_id"

    def _edge_features(self, columns: EdgeColumns) -> Mapping[str, Column]:
        """Edge features as stored, one row per input edge, in files."""
        patterns, folder = self.spec.edge_feature_patterns(), self.root / self.part.array("")
        there = sorted(self.part.type.arrays)
        if set(patterns) != set(there):
            wanted, given = ", ".join(there) or "none", ", ".join(sorted(patterns)) or "none"
            raise ConfigError(f"the edges of {self.shown} have the features {wanted}; given: {given} (`edge_features`)")
        staged = {}
        for name, pattern in patterns.items():
            with closing(open_zarr_rows(self.root, self.part.array(name), "mmap")) as rows:
                encoding = encoding_of(rows, folder)
                given_rows = rows_of(self.duck, columns, name, pattern, rows.attributes.get(SOURCES, ()))
                staged[name] = stage_features(self.stage, f"edge-{name}", given_rows, rows, encoding, self.spec, self.progress)
        return staged


def _ends(batch: pa.RecordBatch) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Rows of sources and destinations, and whether both are nodes."""
    known, ends = np.ones(batch.num_rows, bool), []
    for name in ("src", "dst"):
        column = batch.column(name)
        if column.null_count:
            known &= column.is_valid().to_numpy(zero_copy_only=False)
            column = column.fill_null(-1)
        ends.append(column.to_numpy().astype(np.int64))
    return ends[0], ends[1], known

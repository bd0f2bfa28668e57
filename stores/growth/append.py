"""`append`: new edges, new nodes and new rows of existing ones, checked like an ingest, in one transaction."""

import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ooc.stores import manifest as names
from ooc.stores.arrays.encoding import encoding_of
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.growth.delta import EDGES, FEATURE, Appended, Appending, appending, record_rows
from ooc.stores.growth.new_edge_labels import NewEdgeLabels
from ooc.stores.growth.newnodes import NewNodes, stage_features
from ooc.stores.growth.sorting import Column
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.growth.versions import alone
from ooc.stores.ingest.datasets import gather
from ooc.stores.ingest.duck import Duck, Progress, silent
from ooc.stores.ingest.edge_features import rows_of
from ooc.stores.ingest.ids import EdgeColumns
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.times import TimeColumn, time_column
from ooc.stores.manifest import VERSIONS, Manifest, arrays_of, read_manifest, version_of


@dataclass(frozen=True)
class AppendResult:
    """Result of an append."""

    path: Path
    appended: Appended
    seconds: float
    notes: list[str]
    """possible mistakes, one line each"""


def append(spec: AppendSpec, progress: Progress = silent) -> AppendResult:
    """Append to the store `spec.out`; durable when it returns, without effect if it raises or is killed.

    Time and disk space are proportional to what is added; memory stays within `spec.memory`. The next reader sees it, and
    `compact` merges it into the arrays.

    Raises:
        InputError: If the input is wrong; names file, row and value.
        ConfigError: If columns that the store's edges or nodes have are missing.
        StoreError: If there is no store, the disk is full, or another append is in progress.
        BudgetError: If there is less memory than an ingest needs.

    >>> append(AppendSpec(out="papers.ooc", edges="new.parquet")).appended.edges
    1000000
    """
    begin, path = time.perf_counter(), spec.out
    read_manifest(path)  # a folder that is no store gets no locks
    with alone(path, "growth", wait=False):
        version = version_of(path)
        root, stage = arrays_of(path, version), path / VERSIONS / "append.partial"
        manifest = read_manifest(root)
        refuse(path, manifest)
        shutil.rmtree(stage, ignore_errors=True)
        try:
            stage.mkdir()
            with Duck(spec.memory_bytes, stage / "spill") as duck, appending(path, version) as delta:
                done = _Append(spec, root, manifest, duck, delta, stage, progress).run()
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    notes = []
    if done.edges and done.edges_digest in {each.edges_digest for each in delta.appends}:
        notes.append("an append that waits already has the very same edges; they are there twice now")
    return AppendResult(path, done, time.perf_counter() - begin, notes)


def refuse(path: Path, manifest: Manifest) -> None:
    """Raise ConfigError for a store that cannot grow and keep its properties."""
    why = None
    if manifest.is_hetero:
        why = "is heterogeneous"
    elif manifest.graphs is not None:
        why = f"holds {manifest.graphs.count:,} graphs, and an append adds to one"
    elif manifest.partition is not None:
        why = f"numbers its nodes by {manifest.partition.parts} parts of the graph, which new edges change"
    elif manifest.order != "input":
        why = f"numbers its nodes by {manifest.order}, which new edges change"
    elif manifest.input is not None and manifest.input.drop_duplicates:
        why = "holds each edge once, and whether a new one is there already only an ingest finds out"
    elif set(manifest.columns) <= {"weight"}:
        why = "has no ids of edges, which were left out when it was ingested (`edge_ids`)"
    elif "edge_id" not in manifest.columns or set(manifest.columns) - {"edge_id", "weight", "time"}:
        why = f"has the edge columns {', '.join(manifest.columns) or 'none'}, not those of an ingest"
    elif manifest.time is None and manifest.edge_types[0].arrays:
        why = f"has edge features ({', '.join(manifest.edge_types[0].arrays)}) and no times"
    if why:
        raise ConfigError(f"nothing can be appended to {path}: it {why}; ingest everything anew")


class _Append:
    """One append."""

    def __init__(
        self, spec: AppendSpec, root: Path, manifest: Manifest, duck: Duck, delta: Appending, stage: Path, progress: Progress
    ) -> None:
        self.spec, self.root, self.manifest, self.duck, self.delta = spec, root, manifest, duck, delta
        self.stage, self.progress = stage, progress

    def run(self) -> Appended:
        inputs = gather(self.spec, self.duck, self.stage, None, self.progress)
        columns = None if self.spec.edges is None else self._columns(inputs)
        with closing(NewNodes(self.spec, self.root, self.manifest, self.duck, self.delta, self.stage, inputs)) as new:
            if columns is not None:
                new.look_at_edges(columns)
            new.settle()
            counts = Appended() if columns is None else self._edges(columns, new)
            rows = new.write(None if columns is None else columns.time)
        return self.delta.finish(replace(counts, nodes=new.count, rows=rows))

    def _columns(self, inputs: Inputs) -> EdgeColumns:
        """Columns of the edges: exactly those the store's edges have."""
        table, spec, manifest = inputs.edges, self.spec, self.manifest
        there = {"weight": (spec.weight, manifest.weighted), "time": (spec.time, manifest.time is not None)}
        for name, (given, has) in there.items():
            if has and given is None:
                raise ConfigError(f"the edges of {spec.out} have a {name}: name the column of the new edges' as `{name}`")
            if given is not None and not has:
                raise ConfigError(f"the edges of {spec.out} have no {name}: leave `{name}` out")
        src = table.column(spec.src, "sources", ("src", 0))
        dst = table.column(spec.dst, "destinations", ("dst", 1))
        weight = None if spec.weight is None else table.column(spec.weight, "weights")
        return EdgeColumns(table, src, dst, weight, self._time(inputs))

    def _time(self, inputs: Inputs) -> TimeColumn | None:
        held = self.manifest.time
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

    def _edges(self, columns: EdgeColumns, new: NewNodes) -> Appended:
        """Write the edges' records; returns how many were added and dropped."""
        staged = NewEdgeLabels(self.spec, self.root, self.manifest, self.duck, self.stage, columns).columns()
        features = {**self._edge_features(columns), **staged}
        held = self.manifest.time
        kinds = {"weight": np.dtype(np.float32)} if columns.weight is not None else {}
        kinds |= {"time": np.dtype(held.dtype)} if held is not None else {}
        drop_loops = self.manifest.input is not None and self.manifest.input.drop_self_loops
        counts = {"given": columns.table.rows, "edges": 0, "missing": 0, "self_loops": 0}
        row_bytes = sum(rows.row_bytes for rows in features.values())
        for batch in self.duck.stream(new.mapped(columns), batch_rows=record_rows(32 + row_bytes)):
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
            self.delta.put(EDGES, record)
            counts["edges"] += len(place)
            self.progress("append edges", counts["edges"], columns.table.rows)
        return Appended(**counts)  # type: ignore[arg-type]

    def _edge_features(self, columns: EdgeColumns) -> Mapping[str, Column]:
        """Edge features as stored, one row per input edge, in files."""
        patterns, folder = self.spec.edge_feature_patterns(), self.root / names.edge_array("")
        there = sorted(self.manifest.edge_types[0].arrays)
        if set(patterns) != set(there):
            wanted, given = ", ".join(there) or "none", ", ".join(sorted(patterns)) or "none"
            raise ConfigError(f"the edges of {self.spec.out} have the features {wanted}; given: {given} (`edge_features`)")
        staged = {}
        for name, pattern in patterns.items():
            with closing(open_zarr_rows(self.root, names.edge_array(name), "mmap")) as rows:
                encoding = encoding_of(rows, folder)
                given_rows = rows_of(self.duck, columns, name, pattern)
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

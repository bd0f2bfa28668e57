"""The nodes of an append: which rows new ones get, and what is said about them and about known ones."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import open_memmap

from stores import manifest as names
from stores.encoding import INT8_MOST, Encoding, arrays_in, encoding_of
from stores.errors import ConfigError, InputError
from stores.growth.delta import IDS, RECORD_ROWS, ROWS, Delta
from stores.growth.grow import pack_ids, unpack_ids
from stores.growth.lineage import input_arrays
from stores.growth.spec import AppendSpec
from stores.ids import IdMap
from stores.ingest import duck as sql
from stores.ingest import ids, nodes
from stores.ingest import splits as split_files
from stores.ingest.datasets import Inputs
from stores.ingest.duck import Duck, Progress, silent
from stores.ingest.ids import EdgeColumns, EdgeScan
from stores.ingest.node_inputs import NodeInputs
from stores.ingest.times import TimeColumn, time_column
from stores.manifest import SPLIT_CODES, IdKind, Manifest, Task
from stores.rows import AnyArray
from stores.zarr_rows import ForeignRows, ShardedRows, open_zarr_rows

_RECORD_BYTES = 2**22
_STORED = ("float32", "float16", "bfloat16", "int8")


class NewNodes:
    """The nodes of one append. Call `look_at_edges`, `settle`, then the rest.

    Raises InputError and ConfigError as an ingest does.
    """

    def __init__(
        self, spec: AppendSpec, root: Path, manifest: Manifest, duck: Duck, delta: Delta, stage: Path, inputs: Inputs
    ) -> None:
        self.spec, self.root, self.manifest, self.duck, self.delta = spec, root, manifest, duck, delta
        self.stage, self.table = stage, inputs.nodes
        self.held = NodeInputs(spec, inputs, duck)
        self.is_mapped = manifest.node_type().id_kind is not None
        self.kind: IdKind = manifest.node_type().id_kind or "int"
        self.now = manifest.num_nodes + sum(each.nodes for each in delta.appends)
        self.count = 0
        """new nodes"""
        self.there = arrays_in(root / names.node_array(""))
        self._needed = input_arrays(root)
        self._columns: EdgeColumns | None = None
        self._scan: EdgeScan | None = None
        self._limit = self.now
        self._new_ids: list[Any] = []
        self._pending: dict[Any, int] = {}
        for _, record in delta.records(IDS):
            first = manifest.num_nodes + len(self._pending)
            self._pending |= {external: first + at for at, external in enumerate(unpack_ids(record))}
        self._rows = np.empty(0, np.int64)  # of the table, or of what is given for new nodes

    def look_at_edges(self, columns: EdgeColumns) -> None:
        """One pass over them; see `ids.scan`."""
        table = columns.table
        if not self.is_mapped or not table.text:
            kind = ids.id_kind(self.duck, table, [columns.src, columns.dst], self.kind)
            if kind != self.kind:
                raise InputError(f"{table.shown} has text ids; those of {self.spec.out} are whole numbers")
        self._columns = columns
        self._scan, _ = ids.scan(self.duck, columns, self.kind, count_ids=False, allow_nan=self.spec.allow_nan)

    def settle(self) -> None:
        """Give rows to new nodes."""
        for name in self.held.names:
            if name not in self.there:
                raise ConfigError(f"the nodes of {self.spec.out} have no {name!r}: there are {', '.join(self.there) or 'none'}")
        if self.table is not None:
            self._rows = self._rows_of_table()
        elif given := [rows for rows in (*map(self.held.features, self.held.names), self.held.labels()) if rows is not None]:
            if self.is_mapped:
                raise ConfigError(f"{given[0].shown} has rows of new nodes, but not their ids: list them in a table, --nodes")
            self.count = given[0].count
            self._rows = np.arange(self.now, self.now + self.count)
        self._limit = self.now + self.count
        if self._columns is not None:
            if self.is_mapped:
                self._settle_ids(self._columns)
            else:
                self._settle_rows(self._columns)
        missing = [name for name in self._needed if name not in self.held.names]
        if self.count and missing:
            raise InputError(
                f"{self.count} new nodes have no row of {', '.join(missing)}: give one each, by --features or --x-cols"
            )

    def _rows_of_table(self) -> AnyArray:
        """int64[k]: the row of each node of the table."""
        table = self.table
        assert table is not None
        column = table.column(self.spec.id, "node ids", ("id", 0))
        if ids.id_kind(self.duck, table, [column], self.kind) != self.kind:
            raise InputError(f"{table.shown} has text ids; those of {self.spec.out} are whole numbers")
        ids.check_node_ids(self.duck, table, column, self.kind)
        relation = ids.node_rows(table, column, self.kind)
        listed = [batch.column(0) for batch in self.duck.stream(f"SELECT id FROM ({relation}) ORDER BY row")]
        external: list[Any] = [each for part in listed for each in part.to_pylist()]
        if self.is_mapped:
            rows = self._find(external)
            new = np.flatnonzero(rows < 0)
            rows[new] = self.now + np.arange(len(new))
            self._new_ids = [external[at] for at in new.tolist()]
        else:
            rows = np.array(external, np.int64)
            new = np.flatnonzero(rows >= self.now)
            wrong = np.flatnonzero((rows < 0) | (rows >= self.now + len(new)))
            if len(wrong):
                at = int(wrong[0])
                raise InputError(
                    f"{table.where(at)}: {column} {rows[at]} is out of range: {len(new)} new nodes are {self.now} to "
                    f"{self.now + len(new) - 1}, as a node's id is its row here; correct it"
                )
        self.count = len(new)
        return rows

    def _find(self, external: list[Any]) -> AnyArray:
        """int64[k]: rows of external ids, -1 of those that neither the store nor an append has."""
        opened = IdMap(self.root / names.IDS, self.kind)
        try:
            rows = opened.find(external)
        finally:
            opened.close()
        if self._pending:
            unknown = np.flatnonzero(rows < 0)
            rows[unknown] = [self._pending.get(external[at], -1) for at in unknown.tolist()]
        return rows

    def _settle_rows(self, columns: EdgeColumns) -> None:
        """Where a node's id is its row."""
        scan, given = self._scan, self.table is not None or bool(len(self._rows))
        assert scan is not None
        if self.spec.drop_missing:
            return
        why = f"as {self.spec.out} and what is given say"
        if not given and not self._needed:
            most = ids.DENSE * (self.now + 2 * scan.edges)
            self._limit = max(self.now, min(scan.high + 1, most))
            self.count, why = self._limit - self.now, "a greater id is taken for a mistake"
        ids.refuse_out_of_range(self.duck, columns, scan, self._limit, why)

    def _settle_ids(self, columns: EdgeColumns) -> None:
        """Write stage/ids.parquet: the edges' distinct ids and their rows, null where an edge is to be left out."""
        relation = columns.relation(self.kind)
        ends = f"SELECT src AS id FROM ({relation}) UNION ALL SELECT dst FROM ({relation})"
        found = [batch.column(0) for batch in self.duck.stream(f"SELECT DISTINCT id FROM ({ends}) ORDER BY id")]
        external: list[Any] = [each for part in found for each in part.to_pylist()]
        rows = self._find(external)
        if self._new_ids:
            listed = {each: self.now + at for at, each in enumerate(self._new_ids)}
            rows = np.where(rows < 0, [listed.get(each, -1) for each in external], rows)
        unknown = np.flatnonzero(rows < 0)
        path = self.stage / "ids.parquet"
        free = self.table is None and not self._needed and not self.spec.drop_missing
        if free:
            rows[unknown] = self.now + np.arange(len(unknown))
            self._new_ids, self.count = [external[at] for at in unknown.tolist()], len(unknown)
        held = pa.array(external, pa.int64() if self.kind == "int" else pa.string())
        pq.write_table(pa.table({"id": held, "row": pa.array(rows, mask=rows < 0)}), path)
        if len(unknown) and not free and not self.spec.drop_missing:
            known = f"SELECT id FROM read_parquet({sql.text(path)}) WHERE row IS NOT NULL"
            shown = str(self.spec.out) + ("" if self.table is None else f" nor in {self.table.shown}")
            ids.refuse_missing(self.duck, columns, self.kind, known, shown)

    def mapped(self, columns: EdgeColumns) -> str:
        """SQL of the edges in the input's order: src, dst (rows, NULL where an end is no node), edge_id, weight, time."""
        relation, rest = columns.relation(self.kind), ", ".join(["edge_id", *columns.rest])
        if not self.is_mapped:
            ends = [f"CASE WHEN {end} BETWEEN 0 AND {self._limit - 1} THEN {end} END AS {end}" for end in ("src", "dst")]
            return f"SELECT {', '.join(ends)}, {rest} FROM ({relation}) ORDER BY edge_id"
        pairs = f"read_parquet({sql.text(self.stage / 'ids.parquet')})"
        joined = f"({relation}) e JOIN {pairs} s ON e.src = s.id JOIN {pairs} d ON e.dst = d.id"
        return f"SELECT s.row AS src, d.row AS dst, {rest} FROM {joined} ORDER BY edge_id"

    def write(self, number: int, time: TimeColumn | None) -> dict[str, int]:
        """Write the records of append `number`: ids of new nodes, and rows; how many of each array."""
        if self._new_ids:
            self.delta.put(number, IDS, pack_ids(self._new_ids))
        written: dict[str, int] = {}
        for name, values in self._values(time):
            if len(values) == 0:
                continue
            row_bytes = max(1, values.nbytes // len(values))
            step = max(1, min(RECORD_ROWS, _RECORD_BYTES // row_bytes))
            for first in range(0, len(values), step):
                part = slice(first, first + step)
                self.delta.put(number, f"{ROWS}/{name}", {"row": self._rows[part], "value": np.asarray(values[part])})
            written[name] = len(values)
        return written

    def _values(self, time: TimeColumn | None) -> Iterator[tuple[str, AnyArray]]:
        """(node array, a row each of what is given, as stored)."""
        count, why = len(self._rows), "as " + ("the new nodes" if self.table is None else self.table.shown)
        for name in self.held.names:
            with closing(open_zarr_rows(self.root, names.node_array(name), "mmap")) as rows:
                encoding = encoding_of(rows, self.root / names.node_array(""))
                given = self.held.features(name).expect(count, why)
                yield name, stage_features(self.stage, f"node-{name}", given, rows, encoding, self.spec, silent)
        labels = self.held.labels()
        if labels is not None:
            yield "y", self._labels(labels.expect(count, why))
        if self.spec.split is not None:
            yield from self._splits()
        if self.spec.birth is not None:
            yield "birth", self._births(time)

    def _labels(self, given: nodes.Rows) -> AnyArray:
        if self.manifest.task is None or "y" not in self.there:
            raise ConfigError(f"the nodes of {self.spec.out} have no labels: leave --label and --labels out")
        with closing(open_zarr_rows(self.root, names.node_array("y"), "mmap")) as rows:
            shape, dtype = rows.shape[1:], rows.dtype
        parts = [label_block(block, self.manifest.task, self.manifest.num_classes or 2, given) for block in given.blocks()]
        values = np.concatenate(parts)
        if values.size != given.count * int(np.prod(shape, dtype=np.int64)):
            raise InputError(
                f"{given.shown} has labels of shape {list(values.shape)}; the store's are [N{shape}]: give them alike"
            )
        return values.reshape(-1, *shape).astype(dtype)

    def _splits(self) -> Iterator[tuple[str, AnyArray]]:
        assert self.table is not None
        assert self.spec.split is not None
        bits = np.concatenate([*split_files.bits_of_table(self.duck, self.table, self.table.column(self.spec.split, "splits"))])
        if "split" in self.there:
            codes = np.full(max(split_files.BITS.values()) + 1, -1, np.int8)
            for name, bit in split_files.BITS.items():
                codes[bit] = SPLIT_CODES[name]
            yield "split", codes[bits]
            return
        own = {name: bit for name, bit in split_files.BITS.items() if f"split_{name}" in self.there}
        other = bits & ~np.uint8(sum(own.values()))
        if not own or other.any():
            have = ", ".join(self.manifest.node_type().splits) or "none"
            raise InputError(f"{self.table.shown} has splits that {self.spec.out} has not: it has {have}")
        for name, bit in own.items():
            yield f"split_{name}", (bits & bit) > 0

    def _births(self, time: TimeColumn | None) -> AnyArray:
        held = self.manifest.time
        assert self.table is not None
        assert self.spec.birth is not None
        if held is None or "birth" not in self.there:
            raise ConfigError(f"the nodes of {self.spec.out} have no births: leave --birth out")
        found = time_column(self.duck, self.table, self.spec.birth, "births", held.unit, optional=True)
        if found.unit != held.unit or (time is not None and (found.kind == "timestamp") != (time.kind == "timestamp")):
            raise InputError(f"{self.table.shown}: births are {found.kind}s in {found.unit}, times are not: give both alike")
        dtype = np.dtype(held.dtype)
        least = np.iinfo(np.int64).min if dtype.kind == "i" else -np.inf
        parts = []
        for batch in self.duck.stream(f"SELECT {found.sql(self.table)} AS birth FROM {self.table.relation()}"):
            values = batch.column(0).fill_null(0).to_numpy().astype(dtype)
            values[batch.column(0).is_null().to_numpy(zero_copy_only=False)] = least
            parts.append(values)
        return np.concatenate(parts)


def label_block(block: AnyArray, task: Task, num_classes: int, given: nodes.Rows) -> AnyArray:
    """Labels as whole numbers, -1 for none. Raises InputError for one that the store's task does not have."""
    values = np.where(np.isnan(block), -1, block) if block.dtype.kind == "f" else block
    most = num_classes - 1 if task == "multiclass" else 1
    wrong = (values < -1) | (values > most) | (values != np.floor(values))
    if wrong.any():
        raise InputError(
            f"{given.shown}: label {values[wrong][0]} is none of 0..{most}, which the store's task has, nor -1 for none"
        )
    return np.asarray(values)


def stage_features(
    stage: Path,
    name: str,
    given: nodes.Rows,
    held: ShardedRows | ForeignRows,
    encoding: Encoding,
    spec: AppendSpec,
    progress: Progress,
) -> AnyArray:
    """The rows `given` as the store's array `held` keeps them, [count, *row shape], in a file below `stage`.

    Raises InputError for another width, values that are not finite (unless allowed) or beyond int8's scale; ConfigError for
    an array whose values were normalised by statistics that are not kept, or of a type that no ingest writes.
    """
    if "normalize" in held.attributes:
        how = held.attributes["normalize"]
        raise ConfigError(
            f"{given.shown}: the store's rows were normalised ({how}), by what is not kept; ingest everything anew"
        )
    width = int(np.prod(held.shape[1:], dtype=np.int64))
    if (given.width or 1) != width:
        raise InputError(f"{given.shown} has {given.width or 1} columns; the rows of the store have {width}")
    if encoding.name not in _STORED or (encoding.name == "int8" and not len(encoding.scale)):
        raise ConfigError(
            f"{given.shown}: the store's rows are {encoding.name}, which no ingest writes; ingest everything anew"
        )
    step = encoding.scale if encoding.name == "int8" else None
    if step is not None:
        _check_scale(given, step)
    made: list[_File] = []

    def make_sink(
        group_path: Path, name: str, row_shape: tuple[int, ...], dtype: Any, attributes: Any = None, *, count: int
    ) -> "_File":
        made.append(_File(group_path / f"{name}.npy", (count, *row_shape), dtype))
        return made[0]

    storage, unscaled = nodes.Storage(encoding.name, step), nodes.Scale("none", np.zeros(1))
    nodes.write_features(stage, name, given, storage, unscaled, spec.allow_nan, progress, make_sink, _same)
    return made[0].rows.reshape(-1, *held.shape[1:])


def _same(name: str) -> str:
    return name


def _check_scale(given: nodes.Rows, step: AnyArray) -> None:
    done = 0
    for block in given.blocks():
        values = block.astype(np.float32).reshape(len(block), -1)
        wrong = ~(np.abs(values) <= step * np.float32(INT8_MOST * (1 + 2**-20)))  # NaN too
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            shown = given.columns[column] if given.columns else column
            raise InputError(
                f"{given.where(done + row)} column {shown} is {values[row, column]}, beyond the scale of the store's int8 "
                f"rows ({step[column] * INT8_MOST:g} at most); correct it, or ingest everything anew"
            )
        done += len(block)


class _File:
    """A sink that is an npy file."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any) -> None:
        self.rows = open_memmap(path, "w+", dtype, (max(shape[0], 1), *shape[1:]))[: shape[0]]
        self._done = 0

    def append(self, rows: AnyArray) -> None:
        self.rows[self._done : self._done + len(rows)] = rows
        self._done += len(rows)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        pass

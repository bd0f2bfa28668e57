"""The nodes of an append: rows of new nodes, and values for new and existing ones."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ooc.stores import manifest as names
from ooc.stores.arrays.encoding import INT8_MOST, Encoding, arrays_in, encoding_of
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.zarr_rows import ForeignRows, ShardedRows, open_zarr_rows
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.growth.delta import IDS, ROWS, Appending, record_rows
from ooc.stores.growth.lineage import input_arrays
from ooc.stores.growth.newids import IdIndex, pack_ids, unpack_ids
from ooc.stores.growth.sorting import Column, ColumnWriter
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.ids import IdMap
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest import ids, nodes
from ooc.stores.ingest import splits as split_files
from ooc.stores.ingest.duck import Duck, Progress, silent
from ooc.stores.ingest.ids import EdgeColumns, EdgeScan
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.labels import LabelKind, refuse_infinite
from ooc.stores.ingest.node_inputs import NodeInputs
from ooc.stores.ingest.times import TimeColumn, time_column
from ooc.stores.manifest import SPLIT_CODES, IdKind, Manifest, Task

_STORED = ("float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
_ID_BYTES = 64
"""approximate size of an id in a record"""


class NewNodes:
    """The nodes of one append. Call `look_at_edges`, `settle`, then the rest; and `close`.

    Values are kept in files below `stage`, with one block in memory. Raises InputError and ConfigError as an ingest does.
    """

    def __init__(
        self, spec: AppendSpec, root: Path, manifest: Manifest, duck: Duck, delta: Appending, stage: Path, inputs: Inputs
    ) -> None:
        self.spec, self.root, self.manifest, self.duck, self.delta = spec, root, manifest, duck, delta
        self.stage, self.table = stage, inputs.nodes
        kind: LabelKind = "regression" if manifest.task == "regression" else "classification"
        self.held = NodeInputs(spec, inputs, duck, _words_of(root), manifest.class_names, kind)
        self.is_mapped = manifest.node_type().id_kind is not None
        self.kind: IdKind = manifest.node_type().id_kind or "int"
        self.now = manifest.num_nodes + sum(each.nodes for each in delta.appends)
        self.count = 0
        """number of new nodes"""
        self.there = arrays_in(root / names.node_array(""))
        self._needed = input_arrays(root)
        self._columns: EdgeColumns | None = None
        self._scan: EdgeScan | None = None
        self._limit = self.now
        self._given = 0
        """number of rows given for each array: of the table's nodes, or of new ones"""
        self._rows: Callable[[int, int], NDArray[np.int64]] = lambda first, last: np.arange(self.now + first, self.now + last)
        self._open = ExitStack()
        if self.is_mapped:
            self._ids = self._open.enter_context(closing(IdMap(root / names.IDS, self.kind)))
            self._later = self._open.enter_context(closing(IdIndex(stage / "later", self.kind)))
            """ids of nodes from earlier appends, and of this one's"""
            row = manifest.num_nodes
            for _, record in delta.records(IDS):
                external = unpack_ids(record)
                self._later.add(external, np.arange(row, row + len(external)))
                row += len(external)

    def close(self) -> None:
        """Close files; idempotent."""
        self._open.close()

    def look_at_edges(self, columns: EdgeColumns) -> None:
        """Scan the edges once; see `ids.scan`."""
        table = columns.table
        if not self.is_mapped or not table.text:
            kind = ids.id_kind(self.duck, table, [columns.src, columns.dst], self.kind)
            if kind != self.kind:
                raise InputError(f"{table.shown} has text ids; those of {self.spec.out} are whole numbers")
        self._columns = columns
        settings = {"allow_nan": self.spec.allow_nan, "drop_missing": self.spec.drop_missing}
        self._scan = ids.scan(self.duck, columns, (self.kind, self.kind), count_ids=False, **settings)
        if not self._scan.edges:
            raise InputError(f"{table.shown} has no edges: there is nothing to append")

    def settle(self) -> None:
        """Assign rows to new nodes."""
        for name in self.held.names:
            if name not in self.there:
                raise ConfigError(f"the nodes of {self.spec.out} have no {name!r}: there are {', '.join(self.there) or 'none'}")
        if self.table is not None:
            self._look_at_table()
        elif given := [rows for rows in (*map(self.held.features, self.held.names), self.held.labels()) if rows is not None]:
            if self.is_mapped:
                raise ConfigError(f"{given[0].shown} has rows of new nodes, but not their ids: list them in a table, `nodes`")
            self.count = self._given = given[0].count
        self._limit = self.now + self.count
        if self._columns is not None:
            if self.is_mapped:
                self._settle_ids(self._columns)
            else:
                self._settle_rows(self._columns)
        missing = [name for name in self._needed if name not in self.held.names]
        if self.count and missing:
            raise InputError(
                f"{self.count} new nodes have no row of {', '.join(missing)}: give one each, by `features` or `x_cols`"
            )

    def _look_at_table(self) -> None:
        """Find the row of each node of the table; new ones get theirs."""
        table = self.table
        assert table is not None
        column = table.column(self.spec.id, "node ids", ("id", 0))
        if ids.id_kind(self.duck, table, [column], self.kind) != self.kind:
            raise InputError(f"{table.shown} has text ids; those of {self.spec.out} are whole numbers")
        ids.check_node_ids(self.duck, table, column, self.kind)
        relation = ids.node_rows(table, column, self.kind)
        if not self.is_mapped:
            self.count = int(self.duck.one(f"SELECT count_if(id >= {self.now}) FROM ({relation})")[0])
        with ColumnWriter(self.stage / "rows", np.int64) as sink:
            for batch in self.duck.stream(f"SELECT id FROM ({relation}) ORDER BY row"):
                if self.is_mapped:
                    sink.append(self._rows_of(batch.column(0).to_pylist(), take_in=True))
                    continue
                rows = batch.column(0).to_numpy()
                wrong = np.flatnonzero((rows < 0) | (rows >= self.now + self.count))
                if len(wrong):
                    at = int(wrong[0])
                    raise InputError(
                        f"{table.where(sink.count + at)}: {column} {rows[at]} is out of range: {self.count} new nodes are "
                        f"{self.now} to {self.now + self.count - 1}, as a node's id is its row here; correct it"
                    )
                sink.append(rows)
        self._given, self._rows = table.rows, sink.column.read

    def _rows_of(self, external: list[Any], take_in: bool) -> NDArray[np.int64]:
        """Return the rows of external ids, int64[n]; unknown ones are added, or get -1."""
        rows = self._ids.find(external)
        unknown = np.flatnonzero(rows < 0)
        rows[unknown] = self._later.find([external[at] for at in unknown.tolist()])
        unknown = unknown[rows[unknown] < 0]
        if take_in and len(unknown):
            new = [external[at] for at in unknown.tolist()]
            rows[unknown] = self.now + self.count + np.arange(len(new))
            self._later.add(new, rows[unknown])
            step = record_rows(_ID_BYTES)
            for first in range(0, len(new), step):
                self.delta.put(IDS, pack_ids(new[first : first + step]))
            self.count += len(new)
        return rows

    def _settle_rows(self, columns: EdgeColumns) -> None:
        """Assign rows if a node's id is its row."""
        scan, given = self._scan, self.table is not None or bool(self._given)
        assert scan is not None
        if self.spec.drop_missing:
            return
        why = f"as {self.spec.out} and what is given say"
        if not given and not self._needed:
            most = ids.DENSE * (self.now + 2 * scan.edges)
            self._limit = max(self.now, min(max(scan.src.high, scan.dst.high) + 1, most))
            self.count, why = self._limit - self.now, "a greater id is taken for a mistake"
        ids.refuse_out_of_range(self.duck, columns, scan, [ids.Bound(side, self._limit, why) for side in ("src", "dst")])

    def _settle_ids(self, columns: EdgeColumns) -> None:
        """Write stage/pairs.parquet: the edges' distinct ids and their rows, null if an edge is to be dropped."""
        relation = columns.relation((self.kind, self.kind))
        ends = [f"SELECT {side} AS id FROM ({relation})" for side in ("src", "dst")]
        ids.distinct_ids(self.duck, ends, 0, self.stage, silent)
        free = self.table is None and not self._needed and not self.spec.drop_missing
        schema = pa.schema([("id", pa.int64() if self.kind == "int" else pa.string()), ("row", pa.int64())])
        missing = False
        with pq.ParquetWriter(self.stage / "pairs.parquet", schema) as writer:
            for batch in self.duck.stream(f"SELECT id FROM {sql.parquet([self.stage / 'ids.parquet'])}"):
                rows = self._rows_of(batch.column(0).to_pylist(), take_in=free)
                missing |= bool((rows < 0).any())
                held = [batch.column(0).cast(schema.field("id").type), pa.array(rows, mask=rows < 0)]
                writer.write_table(pa.table(held, schema=schema))
        if missing and not self.spec.drop_missing:
            known = f"SELECT id FROM {self._pairs} WHERE row IS NOT NULL"
            shown = str(self.spec.out) + ("" if self.table is None else f" nor in {self.table.shown}")
            tables = [ids.IdTable(side, known, shown) for side in ("src", "dst")]
            ids.refuse_missing(self.duck, columns, (self.kind, self.kind), tables)

    @property
    def _pairs(self) -> str:
        return sql.parquet([self.stage / "pairs.parquet"])

    def mapped(self, columns: EdgeColumns) -> str:
        """SQL of the edges in input order: src, dst (rows, NULL for an unknown end), edge_id, weight, time."""
        relation, rest = columns.relation((self.kind, self.kind)), ", ".join(["edge_id", *columns.rest])
        if not self.is_mapped:
            ends = [f"CASE WHEN {end} BETWEEN 0 AND {self._limit - 1} THEN {end} END AS {end}" for end in ("src", "dst")]
            return f"SELECT {', '.join(ends)}, {rest} FROM ({relation}) ORDER BY edge_id"
        joined = f"({relation}) e LEFT JOIN {self._pairs} s ON e.src = s.id LEFT JOIN {self._pairs} d ON e.dst = d.id"
        return f"SELECT s.row AS src, d.row AS dst, {rest} FROM {joined} ORDER BY edge_id"

    def write(self, time: TimeColumn | None) -> dict[str, int]:
        """Write the records of node values; returns the rows per array."""
        written: dict[str, int] = {}
        for name, values in self._values(time):
            step = record_rows(8 + values.row_bytes)
            for first in range(0, values.count, step):
                part = first, min(first + step, values.count)
                self.delta.put(f"{ROWS}/{name}", {"row": self._rows(*part), "value": values.read(*part)})
            if values.count:
                written[name] = values.count
        return written

    def _values(self, time: TimeColumn | None) -> Iterator[tuple[str, Column]]:
        """Yield (node array, one row per given node, as stored)."""
        count, why = self._given, "as " + ("the new nodes" if self.table is None else self.table.shown)
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

    def _stage(self, name: str, dtype: Any, shape: tuple[int, ...], blocks: Iterable[AnyArray]) -> Column:
        with ColumnWriter(self.stage / f"node-{name}", dtype, shape) as sink:
            for block in blocks:
                sink.append(block)
        return sink.column

    def _labels(self, given: nodes.Rows) -> Column:
        if self.manifest.task is None or "y" not in self.there:
            raise ConfigError(f"the nodes of {self.spec.out} have no labels: leave `label` and `labels` out")
        with closing(open_zarr_rows(self.root, names.node_array("y"), "mmap")) as rows:
            shape, dtype = rows.shape[1:], rows.dtype
        if (given.width or 1) != int(np.prod(shape, dtype=np.int64)):
            own = [given.count, *([] if given.width is None else [given.width])]
            raise InputError(f"{given.shown} has labels of shape {own}; the store's are [N{shape}]: give them alike")
        task, classes = self.manifest.task, self.manifest.num_classes or 2
        blocks = (
            target_blocks(given) if task == "regression" else (label_block(b, task, classes, given) for b in given.blocks())
        )
        return self._stage("y", dtype, shape, blocks)

    def _splits(self) -> Iterator[tuple[str, Column]]:
        assert self.table is not None
        assert self.spec.split is not None
        bits = self._stage("bits", np.uint8, (), split_files.bits_of_table(self.duck, self.table, self.spec.split))
        found = split_columns_of(bits, self.there, self._stage)
        if found is None:
            have = ", ".join(self.manifest.node_type().splits) or "none"
            raise InputError(f"{self.table.shown} has splits that {self.spec.out} has not: it has {have}")
        yield from found

    def _births(self, time: TimeColumn | None) -> Column:
        held = self.manifest.time
        assert self.table is not None
        assert self.spec.birth is not None
        if held is None or "birth" not in self.there:
            raise ConfigError(f"the nodes of {self.spec.out} have no births: leave `birth` out")
        found = time_column(self.duck, self.table, self.spec.birth, "births", held.unit, optional=True)
        if found.unit != held.unit or (time is not None and (found.kind == "timestamp") != (time.kind == "timestamp")):
            raise InputError(f"{self.table.shown}: births are {found.kind}s in {found.unit}, times are not: give both alike")
        dtype = np.dtype(held.dtype)
        least = np.iinfo(np.int64).min if dtype.kind == "i" else -np.inf

        def blocks() -> Iterator[AnyArray]:
            assert self.table is not None
            for batch in self.duck.stream(f"SELECT {found.sql(self.table)} AS birth FROM {self.table.relation()}"):
                values = batch.column(0).fill_null(0).to_numpy().astype(dtype)
                values[batch.column(0).is_null().to_numpy(zero_copy_only=False)] = least
                yield values

        return self._stage("birth", dtype, (), blocks())


def _words_of(root: Path) -> dict[str, Any]:
    """The words of the columns of the store's `x`; see `nodes.Rows.categories`."""
    if "x" not in arrays_in(root / names.node_array("")):
        return {}
    with closing(open_zarr_rows(root, names.node_array("x"), "mmap")) as rows:
        return dict(rows.attributes.get(nodes.CATEGORIES, {}))


def _blocks(column: Column) -> Iterator[AnyArray]:
    """Yield a column sequentially."""
    step = 2**20
    return (column.read(first, min(first + step, column.count)) for first in range(0, column.count, step))


def split_columns_of(
    bits: Column, there: Collection[str], stage: Callable[[str, Any, tuple[int, ...], Iterable[AnyArray]], Column]
) -> list[tuple[str, Column]] | None:
    """Arrays of splits that a store has, of rows whose splits are `bits`; None where these have others. stage: writes a column
    of a name, dtype, shape and blocks."""
    if "split" in there:
        codes = np.full(max(split_files.BITS.values()) + 1, -1, np.int8)
        for name, bit in split_files.BITS.items():
            codes[bit] = SPLIT_CODES[name]
        return [("split", stage("split", np.int8, (), (codes[part] for part in _blocks(bits))))]
    own = {name: bit for name, bit in split_files.BITS.items() if f"split_{name}" in there}
    other = ~np.uint8(sum(own.values()))
    if not own or any((part & other).any() for part in _blocks(bits)):
        return None
    return [
        (f"split_{name}", stage(f"split_{name}", np.bool_, (), ((part & bit) > 0 for part in _blocks(bits))))
        for name, bit in own.items()
    ]


def target_blocks(given: nodes.Rows) -> Iterator[AnyArray]:
    """Yield the targets of a regression. Raises InputError for an infinite one."""
    done = 0
    for block in given.blocks():
        refuse_infinite(given, done, block)
        yield block
        done += len(block)


def label_block(block: AnyArray, task: Task, num_classes: int, given: nodes.Rows) -> AnyArray:
    """Convert labels to integers, -1 for none. Raises InputError for one that the store's task does not have."""
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
) -> Column:
    """Convert the rows `given` to the format of the store's array `held`, [count, *row shape], in a file below `stage`.

    Raises InputError for another width, or values that are not finite (unless allowed) or exceed int8's scale; ConfigError for
    an array normalized by statistics that are not stored, or of a type that ingest does not write.
    """
    if "normalize" in held.attributes:
        how = held.attributes["normalize"]
        raise ConfigError(
            f"{given.shown}: the store's rows were normalised ({how}), by what is not kept; ingest everything anew"
        )
    width = int(np.prod(held.shape[1:], dtype=np.int64))
    if (given.width or 1) != width:
        raise InputError(f"{given.shown} has {given.width or 1} columns; the rows of the store have {width}")
    if encoding.name not in _STORED:
        raise ConfigError(
            f"{given.shown}: the store's rows are {encoding.name}, which no ingest writes; ingest everything anew"
        )
    step = encoding.scale if len(encoding.scale) else None
    if step is not None:
        _check_scale(given, step)
    if encoding.name == "float32" and (found := given.rounded()) is not None:
        raise InputError(f"{found}, which the store's float32 rows would round; give a number that float32 holds")
    made: list[ColumnWriter] = []

    def make_sink(
        group_path: Path, name: str, row_shape: tuple[int, ...], dtype: Any, attributes: Any = None, *, count: int
    ) -> ColumnWriter:
        made.append(ColumnWriter(group_path / name, dtype, row_shape))
        return made[0]

    storage, unscaled = nodes.Storage(encoding.name, step), nodes.Scale("none", np.zeros(1))
    nodes.write_features(stage, name, given, storage, unscaled, spec.allow_nan, progress, make_sink, _same)
    return replace(made[0].column, shape=held.shape[1:])


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

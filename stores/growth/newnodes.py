"""The nodes of an append: rows of new nodes, and values for new and existing ones."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.encoding import arrays_in, encoding_of
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.feature_map import read_map
from ooc.stores.growth.delta import IDS, ROWS, Appending, record_rows
from ooc.stores.growth.lineage import input_arrays
from ooc.stores.growth.newids import IdIndex, pack_ids, unpack_ids
from ooc.stores.growth.parts import NodePart
from ooc.stores.growth.sorting import Column, ColumnWriter
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.growth.staged_values import label_block, split_columns_of, stage_features, target_blocks
from ooc.stores.ids import IdMap
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest import ids, nodes
from ooc.stores.ingest import splits as split_files
from ooc.stores.ingest.duck import Duck, silent
from ooc.stores.ingest.fit_map import narrowed
from ooc.stores.ingest.ids import EdgeColumns, EdgeScan
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.labels import LabelKind
from ooc.stores.ingest.node_inputs import NodeInputs
from ooc.stores.ingest.sources import STAGED_ROWS
from ooc.stores.ingest.times import TimeColumn, time_column
from ooc.stores.manifest import IdKind, NodeType

_ID_BYTES = 64
"""approximate size of an id in a record"""


class End(NamedTuple):
    """One end of new edges, which is of a node type."""

    columns: EdgeColumns
    side: str
    """src or dst"""
    kinds: ids.Kinds
    scan: EdgeScan


class NewNodes:
    """The nodes of one type of an append. Call `settle`, then the rest; and `close`.

    Values are kept in files below `stage`, with one block in memory. Raises InputError and ConfigError as an ingest does.
    """

    def __init__(
        self, spec: AppendSpec, root: Path, part: NodePart, duck: Duck, delta: Appending, stage: Path, inputs: Inputs
    ) -> None:
        self.spec, self.root, self.part, self.duck, self.delta = spec, root, part, duck, delta
        self.stage, self.table = stage, inputs.nodes
        kind: LabelKind = "regression" if part.task == "regression" else "classification"
        self.held = NodeInputs(spec, inputs, duck, partial(_attributes_of, root, part), part.class_names, kind)
        self.is_mapped = part.type.id_kind is not None
        self.kind: IdKind = part.type.id_kind or "int"
        own = delta.of(part.prefix)
        self.now = part.type.count + sum(each.nodes for each in own.appends)
        """number of nodes so far"""
        self.count = 0
        """number of new nodes"""
        self.there = sorted(arrays_in(root / part.array("")))
        self._needed = input_arrays(root, part.type.name)
        self._limit = self.now
        self._given = 0
        """number of rows given for each array: of the table's nodes, or of new ones"""
        self._rows: Callable[[int, int], NDArray[np.int64]] = lambda first, last: np.arange(self.now + first, self.now + last)
        self._open = ExitStack()
        if self.is_mapped:
            self._ids = self._open.enter_context(closing(IdMap(root / names.IDS, self.kind, part.type.name)))
            self._later = self._open.enter_context(closing(IdIndex(stage / "later", self.kind)))
            """ids of nodes from earlier appends, and of this one's"""
            row = part.type.count
            for _, record in own.records(IDS):
                external = unpack_ids(record)
                self._later.add(external, np.arange(row, row + len(external)))
                row += len(external)

    def close(self) -> None:
        """Close files; idempotent."""
        self._open.close()

    def check_kind(self, columns: EdgeColumns, sides: Sequence[str]) -> None:
        """Raise InputError where ends of edges cannot be ids of these nodes."""
        table = columns.table
        if self.is_mapped and table.text:
            return
        if ids.id_kind(self.duck, table, [columns.column(side) for side in sides], self.kind) != self.kind:
            raise InputError(f"{table.shown} has text ids; those of {self.spec.out}{self.part.of} are whole numbers")

    def settle(self, ends: Sequence[End] = ()) -> None:
        """Assign rows to new nodes: those of the table, and of ends of new edges."""
        for name in self.held.names:
            if name not in self.there:
                there = ", ".join(self.there) or "none"
                raise ConfigError(f"the nodes of {self.spec.out}{self.part.of} have no {name!r}: there are {there}")
        if self.table is not None:
            self._look_at_table()
        elif given := [rows for rows in (*map(self.held.features, self.held.names), self.held.labels()) if rows is not None]:
            if self.is_mapped:
                raise ConfigError(f"{given[0].shown} has rows of new nodes, but not their ids: list them in a table, `nodes`")
            self.count = self._given = given[0].count
        self._limit = self.now + self.count
        if ends:
            if self.is_mapped:
                self._settle_ids(ends)
            else:
                self._settle_rows(ends)
        missing = [name for name in self._needed if name not in self.held.names]
        if self.count and missing:
            new = f"1 new node{self.part.of} has" if self.count == 1 else f"{self.count} new nodes{self.part.of} have"
            lack = f"{new} no row of {', '.join(missing)}{self._first_new()}"
            raise InputError(f"{lack}: give each one, by `features` or `x_cols`, or correct ids that are meant to be there")

    def _first_new(self) -> str:
        """Where the first new node is in the table, in words; "" without a table."""
        table = self.table
        if table is None:
            return ""
        for first in range(0, table.rows, STAGED_ROWS):
            new = np.flatnonzero(self._rows(first, min(first + STAGED_ROWS, table.rows)) >= self.now)
            if len(new):
                return f", the first in {table.where(first + int(new[0]))}"
        return ""

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
            self.count = int(self.duck.one(f"SELECT count_if(id >= {self.now}) FROM ({relation})")[0] or 0)  # NULL of no rows
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
                self.delta.put(IDS, pack_ids(new[first : first + step]), self.part.prefix)
            self.count += len(new)
        return rows

    def _settle_rows(self, ends: Sequence[End]) -> None:
        """Assign rows if a node's id is its row."""
        if self.spec.drop_missing:
            return
        given, why = self.table is not None or bool(self._given), f"as {self.spec.out} and what is given say"
        if not given and not self._needed:
            most = ids.DENSE * (self.now + sum(end.scan.edges for end in ends))
            high = max((end.scan.src if end.side == "src" else end.scan.dst).high for end in ends)
            self._limit = max(self.now, min(high + 1, most))
            self.count, why = self._limit - self.now, "a greater id is taken for a mistake"
        for end, sides in _by_table(ends):
            bounds = [ids.Bound(side, self._limit, why) for side in sides]
            ids.refuse_out_of_range(self.duck, end.columns, end.scan, bounds)

    def _settle_ids(self, ends: Sequence[End]) -> None:
        """Write stage/pairs.parquet: the edges' distinct ids and their rows, null if an edge is to be dropped."""
        every = [f"SELECT {end.side} AS id FROM ({end.columns.relation(end.kinds)})" for end in ends]
        ids.distinct_ids(self.duck, every, 0, self.stage, silent)
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
            for end, sides in _by_table(ends):
                ids.refuse_missing(self.duck, end.columns, end.kinds, [ids.IdTable(side, known, shown) for side in sides])

    @property
    def _pairs(self) -> str:
        return sql.parquet([self.stage / "pairs.parquet"])

    def row_of(self, side: str) -> tuple[str, str]:
        """SQL of the row, NULL if unknown, of an end of edges `e`, and of the join that it needs, if any."""
        if not self.is_mapped:
            return f"CASE WHEN e.{side} BETWEEN 0 AND {self._limit - 1} THEN e.{side} END AS {side}", ""
        return f"of_{side}.row AS {side}", f"LEFT JOIN {self._pairs} of_{side} ON e.{side} = of_{side}.id"

    def write(self, time: TimeColumn | None) -> dict[str, int]:
        """Write the records of node values; returns the rows per array."""
        written: dict[str, int] = {}
        for name, values in self._values(time):
            step = record_rows(8 + values.row_bytes)
            for first in range(0, values.count, step):
                part = first, min(first + step, values.count)
                record = {"row": self._rows(*part), "value": values.read(*part)}
                self.delta.put(f"{ROWS}/{name}", record, self.part.prefix)
            if values.count:
                written[name] = values.count
        return written

    def _values(self, time: TimeColumn | None) -> Iterator[tuple[str, Column]]:
        """Yield (node array, one row per given node, as stored)."""
        count, why = self._given, "as " + ("the new nodes" if self.table is None else self.table.shown)
        for name in self.held.names:
            with closing(open_zarr_rows(self.root, self.part.array(name), "mmap")) as rows:
                encoding = encoding_of(rows, self.root / self.part.array(""))
                given = narrow(self.held.features(name).expect(count, why), self.root, name, self.part.type)
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
        if self.part.task is None or "y" not in self.there:
            raise ConfigError(f"the nodes of {self.spec.out}{self.part.of} have no labels: leave `label` and `labels` out")
        with closing(open_zarr_rows(self.root, self.part.array("y"), "mmap")) as rows:
            shape, dtype = rows.shape[1:], rows.dtype
        if (given.width or 1) != int(np.prod(shape, dtype=np.int64)):
            own = [given.count, *([] if given.width is None else [given.width])]
            raise InputError(f"{given.shown} has labels of shape {own}; the store's are [N{shape}]: give them alike")
        task, classes = self.part.task, self.part.num_classes or 2
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
            have = ", ".join(self.part.type.splits) or "none"
            raise InputError(f"{self.table.shown} has splits that {self.spec.out} has not: it has {have}")
        yield from found

    def _births(self, time: TimeColumn | None) -> Column:
        held = self.part.time
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


def _by_table(ends: Sequence[End]) -> Iterator[tuple[End, list[str]]]:
    """An end of each edge table, and which sides of it there are."""
    for number, end in enumerate(ends):
        same = [other for other in ends if other.columns is end.columns]
        if same[0] is ends[number]:
            yield end, [other.side for other in same]


def narrow(given: nodes.Rows, root: Path, name: str, node_type: NodeType) -> nodes.Rows:
    """The rows as wide as the store's, by the map that it has of the array. Raises InputError for rows of another width than
    the input had, those of the store's width too."""
    found = read_map(root, name, node_type)
    if found is None:
        return given
    if (given.width or 1) != found.reduced.columns:
        raise InputError(
            f"{given.shown} has {given.width or 1} columns; the store's {name} is {found.reduced}: give all "
            f"{found.reduced.columns}, as the input had them, and the store makes them narrower"
        )
    return narrowed(given, found)


def _attributes_of(root: Path, part: NodePart, name: str) -> Mapping[str, Any]:
    """The attributes of one of the store's node arrays; none where it lacks the array."""
    if name not in arrays_in(root / part.array("")):
        return {}
    with closing(open_zarr_rows(root, part.array(name), "mmap")) as rows:
        return rows.attributes

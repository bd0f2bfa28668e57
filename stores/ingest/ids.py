"""External ids to rows: choosing the id space, mapping edges by joins, and ids.lmdb.

Integer ids that are rows already (0..N-1) need no mapping. Other ids get the row of their node in the node table or, without
one, their rank among the sorted distinct ids.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ooc.stores.errors import InputError
from ooc.stores.ids import write_ids
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest.duck import Duck, MemoryShort, Progress
from ooc.stores.ingest.sources import INT_TYPES, TEXT_TYPES, Table, first
from ooc.stores.ingest.times import TimeColumn
from ooc.stores.manifest import IdKind

ID_BYTES = 300
"""memory of one distinct id in DuckDB's hash table (measured: 160 for 11 characters), rounded up"""
WORDS_SHARE = 0.1
"""share of non-numeric ids above which ids are text; below it they are treated as mistakes"""
DENSE = 4
"""ids below DENSE times the number of distinct sources (or destinations) are used as rows"""


@dataclass(frozen=True)
class EdgeScan:
    """Result of one pass over the edges."""

    edges: int
    kind: IdKind
    low: int
    high: int
    """smallest and largest endpoint, for integer ids"""
    distinct: int | None
    """estimate of the distinct sources or destinations, whichever are more; None if not requested"""
    empty: int = 0
    """edges without a source or destination"""


@dataclass(frozen=True)
class EdgeColumns:
    """Columns of the edge table, and SQL of its rows: src, dst (BIGINT or VARCHAR), edge_id, and optional weight and time."""

    table: Table
    src: str
    dst: str
    weight: str | None
    time: TimeColumn | None = None

    @property
    def rest(self) -> dict[str, np.dtype[Any]]:
        """Names and stored dtypes of an edge's further columns."""
        weight = {} if self.weight is None else {"weight": np.dtype(np.float32)}
        return weight if self.time is None else weight | {"time": self.time.dtype}

    @property
    def taken(self) -> set[str]:
        """Columns that are not features."""
        time = [] if self.time is None else [self.time.column]
        return {self.src, self.dst, *time, *([] if self.weight is None else [self.weight])}

    def relation(self, kind: IdKind) -> str:
        columns = f"{cast(self.table, self.src, kind)} AS src, {cast(self.table, self.dst, kind)} AS dst"
        columns += f", {self.table.position()} AS edge_id"
        if self.weight is not None:
            columns += f", {self.table.number(self.weight, 'FLOAT')} AS weight"
        if self.time is not None:
            columns += f", {self.time.sql(self.table)} AS time"
        return f"SELECT {columns} FROM {self.table.relation()}"


def cast(table: Table, column: str, kind: IdKind) -> str:
    """SQL of an id column as BIGINT (NULL if not an integer) or VARCHAR."""
    return table.whole(column) if kind == "int" else f"nullif(try_cast({sql.name(column)} AS VARCHAR), '')"


def id_kind(duck: Duck, table: Table, columns: list[str], asked: str, what: str = "node ids") -> IdKind:
    """Return whether the ids are integers or text. Raises InputError for other types and for words among numbers."""
    for column in columns:
        found = table.columns[column]
        if found not in INT_TYPES | TEXT_TYPES:
            raise InputError(f"{table.shown} column {column!r} holds {found}: {what} are whole numbers or text")
    if asked == "str":
        return "str"
    texts = [column for column in columns if table.columns[column] in TEXT_TYPES]
    if not texts:
        return "int"
    if asked == "auto" and not table.text:
        return "str"
    parts = ", ".join(f"count({sql.name(c)}), count({cast(table, c, 'int')})" for c in texts)
    counts = duck.one(f"SELECT {parts} FROM {table.relation()}")
    held, numbers = sum(counts[0::2]), sum(counts[1::2])
    if numbers == held:
        padded = " OR ".join(f"regexp_matches({sql.name(c)}, '^-?0[0-9]')" for c in texts)  # 007 is not 7
        return "str" if asked == "auto" and duck.one(f"SELECT count_if({padded}) FROM {table.relation()}")[0] else "int"
    if asked == "auto" and held - numbers > WORDS_SHARE * held:
        return "str"
    wrong = " OR ".join(f"({sql.name(c)} IS NOT NULL AND {cast(table, c, 'int')} IS NULL)" for c in texts)
    position, *values = _found(duck, table, wrong, texts)
    column, value = next((c, v) for c, v in zip(texts, values, strict=True) if not _whole(v))
    hint = "" if asked == "int" else " (if ids are words here, say so with `id_type='str'`)"
    raise InputError(f"{table.where(position)}: {column} {value!r} is not a whole number of 64 bits; correct it{hint}")


def _found(duck: Duck, table: Table, condition: str, columns: list[str]) -> tuple[Any, ...]:
    """`first` of a condition that some row is known to meet."""
    row = first(duck, table, condition, columns)
    assert row is not None
    return row


def scan(
    duck: Duck,
    edges: EdgeColumns,
    kind: IdKind,
    *,
    count_ids: bool,
    allow_nan: bool,
    exact: bool = True,
    drop_missing: bool = False,
) -> tuple[EdgeScan, int]:
    """Scan the edges once; returns the result and the number of non-finite weights.

    Raises InputError for an empty endpoint (unless `drop_missing`), or one that is no id, a missing, non-numeric or non-finite
    weight, or with `exact` for an integer that float32 would round.
    """
    low_high = "min(least(src, dst)), max(greatest(src, dst))" if kind == "int" else "0, 0"
    distinct = "greatest(approx_count_distinct(src), approx_count_distinct(dst))" if count_ids else "NULL"
    weights = "count(weight), count_if(NOT isfinite(weight))" if edges.weight is not None else "count(*), 0"
    found = f"count(*), count(src), count(dst), {low_high}, {distinct}, {weights}, count_if(src IS NULL OR dst IS NULL)"
    total, src, dst, low, high, ids, weighted, wild, empty = duck.one(f"SELECT {found} FROM ({edges.relation(kind)})")
    for column, count in ((edges.src, src), (edges.dst, dst)):
        held = f" AND nullif(trim({sql.name(column)}::VARCHAR), '') IS NOT NULL" if drop_missing else ""
        wrong = f"{cast(edges.table, column, kind)} IS NULL{held}"
        if count < total and (row := first(duck, edges.table, wrong, [column])) is not None:
            position, value = row
            what = "empty" if value in (None, "") else f"{value!r}, not a whole number of 64 bits"
            advice = "correct it, or pass `drop_missing=True`" if value in (None, "") else "correct it"
            raise InputError(f"{edges.table.where(position)}: {column} is {what}; {advice}")
    if edges.weight is not None and (weighted < total or (wild and not allow_nan)):
        number = edges.table.number(edges.weight, "FLOAT")
        wrong = f"{number} IS NULL" if weighted < total else f"NOT isfinite({number})"
        position, value = _found(duck, edges.table, wrong, [edges.weight])
        advice = "correct it" if weighted < total else f"{wild} weights are not finite: correct them or pass `allow_nan=True`"
        raise InputError(f"{edges.table.where(position)}: {edges.weight} is {value!r}, not a finite number; {advice}")
    if edges.weight is not None and exact and (test := edges.table.rounded(edges.weight)) is not None:
        row = first(duck, edges.table, test, [edges.weight])
        if row is not None:
            raise InputError(
                f"{edges.table.where(row[0])}: {edges.weight} is {row[1]}, which float32 would round; divide the weights, or "
                "say `dtype='float32'` to round them"
            )
    low, high = (0, -1) if low is None else (low, high)
    return EdgeScan(total, kind, low, high, ids, empty), int(wild)


def refuse_out_of_range(duck: Duck, edges: EdgeColumns, found: EdgeScan, num_nodes: int, why: str) -> None:
    """Raise InputError for the first endpoint outside 0..num_nodes-1."""
    if found.low >= 0 and found.high < num_nodes:
        return
    ends = [(column, cast(edges.table, column, "int")) for column in (edges.src, edges.dst)]
    wrong = " OR ".join(f"{end} NOT BETWEEN 0 AND {num_nodes - 1}" for _, end in ends)
    position, *values = _found(duck, edges.table, wrong, [edges.src, edges.dst])
    column, value = next((c, v) for (c, _), v in zip(ends, values, strict=True) if not 0 <= int(v) < num_nodes)
    raise InputError(
        f"{edges.table.where(position)}: {column} {value} is out of range 0..{num_nodes - 1} ({why}); "
        "fix it or pass `drop_missing=True`"
    )


def distinct_ids(duck: Duck, edges: str, estimate: int, stage: Path, progress: Progress) -> int:
    """Write stage/ids.parquet, the sorted distinct endpoints (column id), and return their number.

    They are found in parts by hash that fit the memory, because DuckDB's grouping fails instead of spilling if the strings
    alone exceed it.
    """
    parts = max(1, -(-estimate * ID_BYTES // duck.limit))
    while True:
        try:
            paths = [stage / f"distinct-{part:04d}.parquet" for part in range(parts)]
            for part, path in enumerate(paths):
                progress("distinct ids", part, parts, "parts")
                ends = f"SELECT src AS id FROM ({edges}) UNION ALL SELECT dst FROM ({edges})"
                part_of = f"id IS NOT NULL AND hash(id) % {parts} = {part}"
                duck.copy(f"SELECT DISTINCT id FROM ({ends}) WHERE {part_of}", path, ordered=False)
            break
        except MemoryShort:
            if parts >= 4096:
                raise
            parts *= 2
    progress("distinct ids", parts, parts, "parts")
    count = duck.copy(f"SELECT id FROM {sql.parquet(paths)} ORDER BY id", stage / "ids.parquet", ordered=True)
    for path in stage.glob("distinct-*.parquet"):
        path.unlink()
    return count


def node_rows(table: Table, column: str, kind: IdKind) -> str:
    """SQL of (id, row) of a node table."""
    return f"SELECT {cast(table, column, kind)} AS id, {table.position()} AS row FROM {table.relation()}"


def check_node_ids(duck: Duck, table: Table, column: str, kind: IdKind, what: str = "node") -> bool:
    """Return whether the id of each node (or `what`) is its row. Raises InputError for an empty or duplicate id."""
    rows = node_rows(table, column, kind)
    same = "count_if(id = row)" if kind == "int" else "0"
    held, identical = duck.one(f"SELECT count(id), {same} FROM ({rows})")
    if held < table.rows:
        position, value = _found(duck, table, f"{cast(table, column, kind)} IS NULL", [column])
        raise InputError(
            f"{table.where(position)}: {column} is {'empty' if value is None else repr(value)}; give every {what} an id"
        )
    if identical == table.rows:
        return True
    before: Any = None
    for batch in duck.stream(f"SELECT id, row FROM ({rows}) ORDER BY id, row"):
        ids = batch.column(0)
        if before is not None and before == ids[0].as_py():
            at = 0
        else:
            equal = pa.compute.equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
            at = int(np.argmax(equal)) + 1 if equal.any() else -1
        if at >= 0:
            where = table.where(batch.column(1)[at].as_py())
            raise InputError(f"{where}: {column} {ids[at].as_py()!r} stands there already; every {what} is listed once")
        before = ids[len(ids) - 1].as_py()
    return False


def map_edges(duck: Duck, edges: str, total: int, ids: str, stage: Path, columns: Iterable[str], progress: Progress) -> int:
    """Write stage/mapped.parquet (src, dst as rows, edge_id, `columns`) by an inner join per end; returns the remaining rows.

    One end at a time, so that only one hash table of ids is in memory. Rows are in no particular order.
    """
    rest = ", ".join(["edge_id", *columns])
    half = stage / "half.parquet"
    join = f"SELECT i.row AS src, dst, {rest} FROM ({edges}) e JOIN ({ids}) i ON e.src = i.id"
    duck.copy(join, half, ordered=False, progress=progress, step="map sources", total=total)
    join = f"SELECT src, i.row AS dst, {rest} FROM {sql.parquet([half])} e JOIN ({ids}) i ON e.dst = i.id"
    left = duck.copy(join, stage / "mapped.parquet", ordered=False, progress=progress, step="map destinations", total=total)
    half.unlink()
    return left


def refuse_missing(duck: Duck, edges: EdgeColumns, kind: IdKind, ids: str, where: str) -> None:
    """Raise InputError for the first edge with an end not among `ids` (SQL, column id), which `where` describes."""
    ends = " UNION ALL ".join(
        f"SELECT edge_id, {end} AS id, {order} AS side FROM ({edges.relation(kind)})"
        for order, end in enumerate(("src", "dst"))
    )
    missing = f"SELECT edge_id, side, id FROM ({ends}) e ANTI JOIN ({ids}) i ON e.id = i.id"
    position, side, value = duck.one(
        f"SELECT min(edge_id), arg_min(side, (edge_id, side)), arg_min(id, (edge_id, side)) FROM ({missing})"
    )
    column = (edges.src, edges.dst)[side]
    shown = value if kind == "int" else repr(value)
    raise InputError(f"{edges.table.where(position)}: {column} {shown} is not in {where}; fix it or pass `drop_missing=True`")


def write_lmdb(duck: Duck, path: Path, kind: IdKind, ids: str, count: int, progress: Progress) -> None:
    """Fill ids.lmdb in both directions, each database in key order."""

    def pairs(order: str, done: int) -> Iterator[tuple[pa.Array, NDArray[np.int64]]]:
        for batch in duck.stream(f"SELECT id, row FROM ({ids}) ORDER BY {order}"):
            yield batch.column(0), batch.column(1).to_numpy()
            done += len(batch)
            progress("ids", done, 2 * count)

    write_ids(path, kind, pairs("id", 0), pairs("row", count))


def to_json(found: EdgeScan) -> dict[str, Any]:
    return asdict(found)


def _whole(value: Any) -> bool:
    """Whether a value of an id column is empty or a whole number of 64 bits."""
    if value is None or isinstance(value, int):
        return True
    return re.fullmatch(r"[+-]?0*[0-9]{1,19}", value.strip()) is not None and -(2**63) <= int(value) < 2**63

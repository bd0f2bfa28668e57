"""External ids to rows: choosing the id space, mapping edges by joins, and ids.lmdb.

Integer ids that are rows already (0..N-1) need no mapping. Other ids get the row of their node in the node table or, without
one, their rank among the sorted distinct ids.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ooc.stores.array_names import NODE
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


Kinds = tuple[IdKind, IdKind]
"""of the sources and of the destinations"""


@dataclass(frozen=True)
class EndScan:
    """What one pass over the edges found of their sources, or destinations."""

    low: int
    high: int
    """smallest and largest, for integer ids"""
    distinct: int | None
    """estimate of how many there are; None if not requested"""


@dataclass(frozen=True)
class EdgeScan:
    """Result of one pass over the edges."""

    edges: int
    src: EndScan
    dst: EndScan
    empty: int = 0
    """edges without a source or destination"""
    wild: int = 0
    """non-finite weights"""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "EdgeScan":
        """From `dataclasses.asdict`."""
        return cls(**{**value, "src": EndScan(**value["src"]), "dst": EndScan(**value["dst"])})


NO_EDGES = EdgeScan(0, EndScan(0, -1, None), EndScan(0, -1, None))


@dataclass(frozen=True)
class Bound:
    """The rows that one end of an edge may have, 0 to num_nodes - 1."""

    side: str
    """src or dst"""
    num_nodes: int
    why: str
    """where that number comes from, for messages"""


@dataclass(frozen=True)
class IdTable:
    """The ids that one end of an edge may have."""

    side: str
    """src or dst"""
    pairs: str
    """SQL of (id, row)"""
    where: str
    """in which table, for messages"""


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

    def column(self, side: str) -> str:
        """The column of the sources ("src") or the destinations ("dst")."""
        return self.src if side == "src" else self.dst

    def relation(self, kinds: Kinds) -> str:
        columns = f"{cast(self.table, self.src, kinds[0])} AS src, {cast(self.table, self.dst, kinds[1])} AS dst"
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
    """Return whether the ids are integers or text. Raises InputError for other types, and for words or fractions among
    numbers."""
    for column in columns:
        found = table.columns[column]
        if found not in INT_TYPES | TEXT_TYPES:
            kind = (
                "int64 (in pandas Int64, where some are missing)"
                if found in ("float", "double", "halffloat")
                else "int64 or text"
            )
            raise InputError(f"{table.shown} column {column!r} holds {found}: {what} are whole numbers or text; make it {kind}")
    if asked == "str":
        return "str"
    texts = [column for column in columns if table.columns[column] in TEXT_TYPES]
    if not texts:
        return "int"
    if asked == "auto" and not table.text:
        return "str"
    parts = ", ".join(f"count({sql.name(c)}), count({cast(table, c, 'int')}), {_odd_numbers(c)}" for c in texts)
    counts = duck.one(f"SELECT {parts} FROM {table.relation()}")
    held, numbers, odd = (sum(counts[at::3]) for at in range(3))
    if numbers == held:
        padded = " OR ".join(f"regexp_matches({sql.name(c)}, '^-?0[0-9]')" for c in texts)  # 007 is not 7
        return "str" if asked == "auto" and duck.one(f"SELECT count_if({padded}) FROM {table.relation()}")[0] else "int"
    if asked == "auto" and held - numbers - odd > WORDS_SHARE * held:
        return "str"
    wrong = " OR ".join(f"({sql.name(c)} IS NOT NULL AND {cast(table, c, 'int')} IS NULL)" for c in texts)
    position, *values = _found(duck, table, wrong, texts)
    column, value = next((c, v) for c, v in zip(texts, values, strict=True) if not _whole(v))
    hint = "" if asked == "int" else " (if ids are words here, say so with `id_type='str'`)"
    raise InputError(f"{table.where(position)}: {column} {value!r} is not a whole number of 64 bits; correct it{hint}")


def _odd_numbers(column: str) -> str:
    """SQL of how many texts are numbers, but not whole ones as they are written: 1.0, as pandas writes ids where some are
    missing, or 1e3."""
    number = "[+-]?[0-9]+([.][0-9]*([eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)"
    return f"count(*) FILTER (WHERE regexp_full_match(trim({sql.name(column)}), '{number}'))"


def _found(duck: Duck, table: Table, condition: str, columns: list[str]) -> tuple[Any, ...]:
    """`first` of a condition that some row is known to meet."""
    row = first(duck, table, condition, columns)
    assert row is not None
    return row


def scan(
    duck: Duck,
    edges: EdgeColumns,
    kinds: Kinds,
    *,
    count_ids: bool,
    allow_nan: bool,
    exact: bool = True,
    drop_missing: bool = False,
) -> EdgeScan:
    """Scan the edges once.

    Raises InputError for an empty endpoint (unless `drop_missing`), or one that is no id, a missing, non-numeric or non-finite
    weight, or with `exact` for an integer that float32 would round.
    """
    ends = [_scan_sql(side, kind, count_ids) for side, kind in zip(("src", "dst"), kinds, strict=True)]
    weights = "count(weight), count_if(NOT isfinite(weight))" if edges.weight is not None else "count(*), 0"
    found = f"count(*), {weights}, count_if(src IS NULL OR dst IS NULL), {', '.join(ends)}"
    total, weighted, wild, empty, *of_ends = duck.one(f"SELECT {found} FROM ({edges.relation(kinds)})")
    if total == 0:
        return NO_EDGES
    for column, kind, count in zip((edges.src, edges.dst), kinds, of_ends[0::4], strict=True):
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
    scans = [
        EndScan(0, -1, distinct) if low is None else EndScan(low, high, distinct)
        for _, low, high, distinct in (of_ends[:4], of_ends[4:])
    ]
    return EdgeScan(total, scans[0], scans[1], empty, int(wild))


def _scan_sql(side: str, kind: IdKind, count_ids: bool) -> str:
    """SQL of how many ends there are, the smallest, the largest, and about how many different ones."""
    low_high = f"min({side}), max({side})" if kind == "int" else "0, 0"
    return f"count({side}), {low_high}, {f'approx_count_distinct({side})' if count_ids else 'NULL'}"


def refuse_out_of_range(duck: Duck, edges: EdgeColumns, found: EdgeScan, bounds: Sequence[Bound]) -> None:
    """Raise InputError for the first endpoint outside its bounds."""
    scans = {"src": found.src, "dst": found.dst}
    if all(scans[each.side].low >= 0 and scans[each.side].high < each.num_nodes for each in bounds):
        return
    columns = [edges.column(each.side) for each in bounds]
    outside = [
        f"{cast(edges.table, column, 'int')} NOT BETWEEN 0 AND {each.num_nodes - 1}"
        for column, each in zip(columns, bounds, strict=True)
    ]
    position, *values = _found(duck, edges.table, " OR ".join(outside), columns)
    column, value, bound = next(
        each
        for each in zip(columns, values, bounds, strict=True)
        if each[1] not in (None, "") and not 0 <= int(each[1]) < each[2].num_nodes
    )
    raise InputError(
        f"{edges.table.where(position)}: {column} {value} is out of range 0..{bound.num_nodes - 1} ({bound.why}); "
        "fix it or pass `drop_missing=True`"
    )


def distinct_ids(duck: Duck, ends: Sequence[str], estimate: int, stage: Path, progress: Progress) -> int:
    """Write stage/ids.parquet, the sorted distinct ids of `ends` (SQL, column id), and return their number.

    They are found in parts by hash that fit the memory, because DuckDB's grouping fails instead of spilling if the strings
    alone exceed it.
    """
    parts = max(1, -(-estimate * ID_BYTES // duck.limit))
    while True:
        try:
            paths = [stage / f"distinct-{part:04d}.parquet" for part in range(parts)]
            for part, path in enumerate(paths):
                progress("distinct ids", part, parts, "parts")
                part_of = f"id IS NOT NULL AND hash(id) % {parts} = {part}"
                duck.copy(f"SELECT DISTINCT id FROM ({' UNION ALL '.join(ends)}) WHERE {part_of}", path, ordered=False)
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


def map_edges(
    duck: Duck, edges: str, total: int, tables: Sequence[IdTable], stage: Path, columns: Iterable[str], progress: Progress
) -> int:
    """Write stage/mapped.parquet (src, dst, edge_id, `columns`) with rows for ids, by an inner join per end that has a table.

    One end at a time, so that only one hash table of ids is in memory. Rows are in no particular order. Returns how many edges
    remain.
    """
    rest, left = ", ".join(["edge_id", *columns]), 0
    steps = {"src": "map sources", "dst": "map destinations"}
    half, mapped = stage / "half.parquet", stage / "mapped.parquet"
    for number, each in enumerate(tables):
        ends = "i.row AS src, dst" if each.side == "src" else "src, i.row AS dst"
        join = f"SELECT {ends}, {rest} FROM ({edges}) e JOIN ({each.pairs}) i ON e.{each.side} = i.id"
        path = mapped if number == len(tables) - 1 else half
        left = duck.copy(join, path, ordered=False, progress=progress, step=steps[each.side], total=total)
        edges = f"SELECT * FROM {sql.parquet([half])}"
    half.unlink(missing_ok=True)
    return left


def refuse_missing(duck: Duck, edges: EdgeColumns, kinds: Kinds, tables: Sequence[IdTable]) -> None:
    """Raise InputError for the first edge with an end that is not among the ids of its table, if there is one."""
    order = {"src": 0, "dst": 1}
    missing = " UNION ALL ".join(
        f"SELECT edge_id, {order[each.side]} AS side, {each.side}::VARCHAR AS id FROM ({edges.relation(kinds)}) e "
        f"ANTI JOIN ({each.pairs}) i ON e.{each.side} = i.id"
        for each in tables
    )
    position, side, value = duck.one(
        f"SELECT min(edge_id), arg_min(side, (edge_id, side)), arg_min(id, (edge_id, side)) FROM ({missing})"
    )
    if position is None:
        return
    table = next(each for each in tables if order[each.side] == side)
    shown = value if kinds[side] == "int" else repr(value)
    raise InputError(
        f"{edges.table.where(position)}: {edges.column(table.side)} {shown} is not in {table.where}; "
        "fix it or pass `drop_missing=True`"
    )


def write_lmdb(duck: Duck, path: Path, kind: IdKind, ids: str, count: int, progress: Progress, node_type: str = NODE) -> None:
    """Fill the databases of a node type in ids.lmdb in both directions, each in key order."""

    def pairs(order: str, done: int) -> Iterator[tuple[pa.Array, NDArray[np.int64]]]:
        for batch in duck.stream(f"SELECT id, row FROM ({ids}) ORDER BY {order}"):
            yield batch.column(0), batch.column(1).to_numpy()
            done += len(batch)
            progress("ids", done, 2 * count)

    write_ids(path, kind, pairs("id", 0), pairs("row", count), node_type)


def _whole(value: Any) -> bool:
    """Whether a value of an id column is empty or a whole number of 64 bits."""
    if value is None or isinstance(value, int):
        return True
    return re.fullmatch(r"[+-]?0*[0-9]{1,19}", value.strip()) is not None and -(2**63) <= int(value) < 2**63

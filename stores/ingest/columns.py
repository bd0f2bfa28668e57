"""Columns of a table as rows of numbers: numbers, lists of numbers, and words as codes or one-hot."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ooc.stores.errors import InputError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.nodes import BLOCK_BYTES, Block, Rows
from ooc.stores.ingest.sources import EXACT, INT_TYPES, Table, first

MOST_ONE_HOT = 4096
"""words of a column that become one column each"""
_NUMBERS = ("int", "uint", "float", "double", "halffloat", "bool", "decimal")
_LIST = re.compile(r"(?:large_|fixed_size_)?list<[^:]*: (\w+)(?: not null)?>(?:\[\d+\])?")

Encoded = Literal["codes", "one-hot"]


@dataclass(frozen=True)
class Column:
    """A column of a table and the numbers of its cells."""

    name: str
    sql: str
    """of its cells"""
    names: tuple[str, ...]
    """of its numbers"""
    dtype: np.dtype[Any]
    numbers: Callable[[pa.Array], NDArray[Any]]
    """cells -> [n, numbers of a cell]"""


def table_rows(
    duck: Duck,
    table: Table,
    columns: list[str],
    categories: Mapping[str, Mapping[str, Any]] | None = None,
    advice: str | None = None,
) -> Rows:
    """Columns of a table as rows of numbers.

    Integers if all are and no cell is empty, float32 if that suffices for all, else float64; empty cells are NaN. A list gives
    as many numbers as it has items. `categories` (see `Rows.categories`) say which columns hold words, and which. `blocks`
    raises InputError for a word where a number or another word is expected; `advice` says what to do about it.
    """
    encoded = categories or {}
    plain = [column for column in columns if column not in encoded and not is_list(table, column)]
    kind, dtype = _type_of(duck, table, plain)
    made = [_column(duck, table, column, encoded.get(column), kind, dtype) for column in columns]
    dtype = np.result_type(*(column.dtype for column in made))
    names = tuple(name for column in made for name in column.names)
    texts = [column for column in plain if table.is_text(column)]
    wrong = " OR ".join(f"({sql.name(column)} IS NOT NULL AND {table.number(column, kind)} IS NULL)" for column in texts)
    step = max(1, BLOCK_BYTES // (8 * len(names)))

    def blocks() -> Iterator[Block]:
        found = first(duck, table, wrong, texts) if wrong else None
        if found is not None:
            raise InputError(f"{table.where(found[0])}: {_word(texts, found[1:], advice)}")
        for name, words in encoded.items():
            if name in columns:
                _refuse_other_words(duck, table, name, words["values"])
        selected = ", ".join(f"{column.sql} AS c{i}" for i, column in enumerate(made))
        batches = duck.stream(f"SELECT {selected} FROM {table.relation()}", batch_rows=min(step, sql.BATCH_ROWS))
        yield from _joined(batches, step, made, dtype)

    def rounded() -> str | None:
        tests = [test for column in plain if (test := table.rounded(column)) is not None]
        found = first(duck, table, " OR ".join(tests), plain) if tests else None
        if found is None:
            return None
        wrong = next(i for i, value in enumerate(found[1:]) if _is_rounded(value))
        return f"{table.where(found[0])} column {plain[wrong]} is {found[1 + wrong]}"

    shown = {name: dict(words) for name, words in encoded.items() if name in columns}
    return Rows(table.shown, table.rows, len(names), dtype, blocks, table.where, names, rounded, shown, tuple(columns))


def is_list(table: Table, column: str) -> bool:
    """Whether a column holds lists of numbers."""
    held = _LIST.fullmatch(table.columns[column])
    return held is not None and held[1].startswith(_NUMBERS)


def categories_of(duck: Duck, table: Table, column: str, how: Encoded) -> dict[str, Any]:
    """Find the words of a column, sorted by their UTF-8 bytes: {as, values}. Raises InputError for more than one-hot allows."""
    word = _word_sql(column)
    found = f"SELECT DISTINCT {word} AS word FROM {table.relation()} WHERE {word} IS NOT NULL"
    if how == "one-hot" and (count := duck.one(f"SELECT count(*) FROM ({found})")[0]) > MOST_ONE_HOT:
        advice = f"give `codes={column!r}`, and an Embedding in the model"
        raise InputError(f"{table.shown} column {column!r} has {count:,} different values, too many for `one_hot`; {advice}")
    return {"as": how, "values": [word for (word,) in duck.rows(f"{found} ORDER BY word")]}


def _word_sql(column: str) -> str:
    """A cell as text, NULL if empty."""
    return f"nullif({sql.name(column)}::VARCHAR, '')"


def _refuse_other_words(duck: Duck, table: Table, column: str, words: list[str]) -> None:
    known = ", ".join(map(sql.text, words)) or "''"
    found = first(duck, table, f"{_word_sql(column)} NOT IN ({known})", [column])
    if found is not None:
        raise InputError(f"{table.where(found[0])}: {column} is {found[1]!r}, a value that the store does not have; correct it")


def _column(duck: Duck, table: Table, column: str, words: Mapping[str, Any] | None, kind: str, dtype: np.dtype[Any]) -> Column:
    if words is not None:
        values = pa.array(words["values"], pa.string())
        if words["as"] == "codes":
            return Column(column, _word_sql(column), (column,), np.dtype(np.int64), partial(_codes, values))
        names = tuple(f"{column}={word}" for word in words["values"])
        return Column(column, _word_sql(column), names, np.dtype(np.float32), partial(_one_hot, values))
    if not is_list(table, column):
        return Column(column, table.number(column, kind), (column,), dtype, lambda cells: _array(cells)[:, None])
    width, item = _list_width(duck, table, column), _LIST.fullmatch(table.columns[column])
    assert item is not None
    whole = (
        item[1] in INT_TYPES
        and not duck.one(
            f"SELECT count(*) FROM (SELECT unnest({sql.name(column)}) AS i FROM {table.relation()}) WHERE i IS NULL"
        )[0]
    )
    short = item[1] in ("float", "halffloat")
    held = np.dtype(item[1] if whole else np.float32 if short else np.float64)
    names = tuple(f"{column}[{i}]" for i in range(width))
    return Column(column, sql.name(column), names, held, lambda cells: _array(cells.flatten()).reshape(len(cells), width))


def _list_width(duck: Duck, table: Table, column: str) -> int:
    """Items of a column's lists, 1 or more. Raises InputError unless all have as many."""
    size = f"len({sql.name(column)})"
    width = duck.one(f"SELECT {size} FROM {table.relation()} LIMIT 1")[0] or 0
    found = first(duck, table, f"coalesce({size}, 0) <> {width} OR {width} = 0", [column])
    if found is not None:
        has = "is empty" if not found[1] else f"has {len(found[1])} items, the first row {width}"
        raise InputError(f"{table.where(found[0])}: {column} {has}; lists of features are equally long")
    return int(width)


def _array(cells: pa.Array) -> NDArray[Any]:
    return np.asarray(cells.to_numpy(zero_copy_only=False))


def _codes(values: pa.Array, cells: pa.Array) -> NDArray[Any]:
    """Positions of the cells among the words, [n, 1]; -1 for an empty cell."""
    return _array(pc.fill_null(pc.index_in(cells, values), -1))[:, None]


def _one_hot(values: pa.Array, cells: pa.Array) -> NDArray[Any]:
    """[n, words]: 1 at the word of each cell; zeros for an empty cell."""
    code = _codes(values, cells)[:, 0]
    made = np.zeros((len(code), len(values)), np.float32)
    row = np.flatnonzero(code >= 0)
    made[row, code[row]] = 1
    return made


def _type_of(duck: Duck, table: Table, columns: list[str]) -> tuple[str, np.dtype[Any]]:
    """SQL's and numpy's type of these columns together."""
    kinds = [table.columns[column] for column in columns]
    if kinds and all(kind in INT_TYPES for kind in kinds):
        counts = ", ".join(f"count({table.whole(column)})" for column in columns)
        if all(count == table.rows for count in duck.one(f"SELECT {counts} FROM {table.relation()}")):
            return "BIGINT", np.result_type(*map(np.dtype, kinds))
    short = all(kind in ("float", "halffloat") for kind in kinds)
    return ("FLOAT", np.dtype(np.float32)) if short else ("DOUBLE", np.dtype(np.float64))


def _is_rounded(value: Any) -> bool:
    try:
        return abs(int(value)) > EXACT and int(np.float32(int(value))) != int(value)
    except (TypeError, ValueError):
        return False  # an empty cell, or a number with a fraction


def _joined(batches: Iterator[pa.RecordBatch], step: int, columns: list[Column], dtype: np.dtype[Any]) -> Iterator[Block]:
    """Regroup the batches' rows into blocks of one size, so that sums do not depend on the engine's batches."""
    ends = np.cumsum([0, *(len(column.names) for column in columns)]).tolist()
    block, filled = np.empty((step, ends[-1]), dtype), 0
    for batch in batches:
        taken = 0
        while taken < batch.num_rows:
            count = min(step - filled, batch.num_rows - taken)
            for j, (column, cells) in enumerate(zip(columns, batch.columns, strict=True)):
                block[filled : filled + count, ends[j] : ends[j + 1]] = column.numbers(cells.slice(taken, count))
            taken, filled = taken + count, filled + count
            if filled == step:
                yield block
                block, filled = np.empty((step, ends[-1]), dtype), 0
    if filled:
        yield block[:filled]


def _word(columns: list[str], values: tuple[Any, ...], advice: str | None) -> str:
    """What is wrong with a row that has a word among numbers."""
    for column, value in zip(columns, values, strict=True):
        try:
            float("0" if value is None else value)
            wrong = "_" in str(value)
        except ValueError:
            wrong = True
        if wrong:
            encoded = f"correct it, or encode the column by `one_hot={column!r}` or `codes={column!r}`"
            return f"{column} is {value!r}, not a number; {advice or encoded}"
    return "not numbers; correct it"


def match_columns(table: Table, patterns: str, taken: set[str], argument: str = "`x_cols`") -> list[str]:
    """Columns matching `f*,age`, in table order without the `taken` ones. Raises InputError naming the argument."""
    found: list[str] = []
    for pattern in patterns.split(","):
        matches = [column for column in table.columns if fnmatch.fnmatchcase(column, pattern.strip()) and column not in taken]
        if not matches:
            there = ", ".join(list(table.columns)[:20])
            raise InputError(f"{table.shown} has no column like {pattern!r} for {argument}: it has {there}")
        found += [column for column in matches if column not in found]
    return found


def in_order(table: Table, what: str, found: list[str], held: Sequence[str]) -> list[str]:
    """Columns in the order of those that a store was made of, `held` (none where it does not know): they are matched by name.

    A single column may have another name. Raises InputError where they are not the same ones.
    """
    if not held or len(found) == len(held) == 1:
        return found
    if set(found) != set(held):
        given = ", ".join(column for column in found if column not in held) or "none"
        there = ", ".join(column for column in held if column not in found) or "none"
        differ = f"only given: {given}; only in the store: {there}"
        raise InputError(f"{table.shown}: the {what} are not those of the store ({differ}): name the same columns")
    return list(held)


def refuse_no_numbers(table: Table, columns: list[str]) -> None:
    """Raise InputError for a column that holds neither numbers nor lists of them; text files may have numbers in any."""
    for column in columns:
        kind = table.columns[column]
        if not table.text and not kind.startswith(_NUMBERS) and not is_list(table, column):
            advice = f"; encode its words by `one_hot={column!r}` or `codes={column!r}`" if table.is_text(column) else ""
            raise InputError(f"{table.shown} column {column!r} holds {kind}: features are numbers{advice}")

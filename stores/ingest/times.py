"""Times of edges and nodes: the type of a time column, and SQL that converts it to a number."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ooc.stores.errors import InputError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.sources import TEXT_TYPES, Table, first
from ooc.stores.manifest import TimeUnit

Kind = Literal["int", "float", "timestamp"]
_WHOLE = ("int", "uint")
_MOMENTS = ("timestamp", "date")
_EXACT = 2**53
"""every integer below is exactly representable as a double"""


@dataclass(frozen=True)
class TimeColumn:
    """A column of times. kind: its type; whole: whether doubles are integers; unit: unit of the numbers in the store,
    microseconds since 1970 (UTC) for timestamps and dates."""

    column: str
    kind: Kind
    whole: bool
    unit: TimeUnit

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64, or float64 if the input has fractions."""
        return np.dtype(np.float64 if self.kind == "float" and not self.whole else np.int64)

    def sql(self, table: Table) -> str:
        """SQL of the time as BIGINT or DOUBLE; NULL if missing."""
        if self.kind == "int":
            return table.whole(self.column)
        if self.kind == "timestamp":
            return _moment(table, self.column)
        number = table.number(self.column, "DOUBLE")
        return f"CAST({number} AS BIGINT)" if self.whole else number


def _moment(table: Table, column: str) -> str:
    held, kind = sql.name(column), table.columns[column]
    if kind in TEXT_TYPES:
        return f"epoch_us(try_cast({held} AS TIMESTAMPTZ))"  # TIMESTAMP would drop the offset from UTC
    return f"epoch_us({held}::{'TIMESTAMPTZ' if 'tz=' in kind else 'TIMESTAMP'})"


def time_column(duck: Duck, table: Table, wanted: str, what: str, unit: TimeUnit, optional: bool = False) -> TimeColumn:
    """Inspect the time column `wanted`; `unit` is that of numbers, `optional` allows rows without a time.

    Text is parsed as numbers if all of it is numeric, else as timestamps (ISO 8601, UTC by default). Raises InputError if the
    column does not exist, cannot be a time, or a row has no finite time.
    """
    column = table.column(wanted, what)
    kind = table.columns[column]
    if kind.startswith(_MOMENTS):
        found = TimeColumn(column, "timestamp", True, "us")
    elif kind.startswith(_WHOLE):
        found = TimeColumn(column, "int", True, unit)
    elif kind in TEXT_TYPES:
        found = _of_text(duck, table, column, unit)
    elif kind.startswith(("float", "double", "halffloat", "decimal")):
        found = _of_numbers(duck, table, column, unit)
    else:
        raise InputError(f"{table.shown} column {column!r} holds {kind}: {what} are numbers, timestamps or dates")
    _refuse(duck, table, found, optional)
    return found


def _of_numbers(duck: Duck, table: Table, column: str, unit: TimeUnit) -> TimeColumn:
    number = table.number(column, "DOUBLE")
    whole = duck.one(
        f"SELECT bool_and(isfinite(t) AND t = floor(t) AND abs(t) < {_EXACT}) "
        f"FROM (SELECT {number} AS t FROM {table.relation()})"
    )
    return TimeColumn(column, "float", bool(whole[0]), unit)


def _of_text(duck: Duck, table: Table, column: str, unit: TimeUnit) -> TimeColumn:
    held = sql.name(column)
    ways = table.whole(column), table.number(column, "DOUBLE"), _moment(table, column)
    counts = ", ".join(f"count({way})" for way in ways)
    total, whole, number, moment = duck.one(f"SELECT count({held}), {counts} FROM {table.relation()}")
    if whole == total:
        return TimeColumn(column, "int", True, unit)
    if number == total or number > moment:
        return _of_numbers(duck, table, column, unit)
    return TimeColumn(column, "timestamp", True, "us")


def _refuse(duck: Duck, table: Table, time: TimeColumn, optional: bool) -> None:
    """Raise InputError for the first row without a finite time (if optional: with an invalid one)."""
    held, number = sql.name(time.column), time.sql(table)
    wrong = f"{number} IS NULL" + (f" AND {held} IS NOT NULL" if optional else "")
    if time.dtype.kind == "f":
        wrong = f"({wrong}) OR NOT isfinite({number})"
    found = first(duck, table, wrong, [time.column])
    if found is None:
        return
    position, value = found
    is_text = {"int": "not a whole number", "float": "not a finite number", "timestamp": "neither a number nor a timestamp"}
    fault = "empty" if value is None else f"{str(value)!r}, {is_text[time.kind]}"
    raise InputError(f"{table.where(position)}: {time.column} is {fault}; correct it")

"""Labels: determines their task, checks them, and stores them compactly."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ooc.stores.array_names import node_array
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import InputError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.columns import categories_of, in_order, match_columns, table_rows
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.nodes import Rows
from ooc.stores.ingest.sources import Table
from ooc.stores.labels import Task, as_targets, label_attributes, label_dtype

LabelKind = Literal["auto", "classification", "regression"]
"""what is said of labels: classes, or numbers to predict; auto: numbers if many have a fraction"""
MOST_CLASSES = 1000
"""more classes than both this and the nodes are treated as a mistake"""


_CLASSES = "labels are 0..{}, -1 or NaN for none"
_NUMBERS = "correct it, or say `task='regression'` if the labels are numbers to predict"
FRACTIONS_SHARE = 0.1
"""share of labels with a fraction from which on all are targets of a regression; below it they are treated as mistakes"""
_NO_NUMBER = "correct it, or leave the cell empty where the label is unknown"
WORDS_SHARE = 0.1
"""share of labels that are no numbers above which all are names of classes; below it they are treated as mistakes"""


@dataclass(frozen=True)
class Labels:
    """The task of the labels."""

    task: Task
    num_classes: int
    width: int | None
    """columns of the array, None for [N]"""
    names: list[str] | None = None
    """of the classes, if the labels were words; of the columns, if there are several of a table"""


def label_columns(
    table: Table, wanted: str, taken: set[str], class_names: list[str] | None = None, argument: str = "label"
) -> list[str]:
    """Columns of a table that `wanted` names: one, or the patterns of several (comma-separated), each a label of its own.

    Several come in the order given, or in that of `class_names`, the labels of a store that is appended to. Raises InputError
    if there are none, or not those of the store.
    """
    if wanted in table.columns or not re.search(r"[,*?\[]", wanted):
        return [table.column(wanted, "labels")]
    found = match_columns(table, wanted, taken, f"`{argument}`")
    several = class_names is not None and len(found) == len(class_names) > 1
    return in_order(table, "labels", found, class_names or ()) if several else found


def label_rows(
    duck: Duck, table: Table, columns: list[str], asked: LabelKind = "auto", class_names: list[str] | None = None
) -> Rows:
    """Rows of a table's label columns: numbers, or positions in the sorted names of the classes if a single one holds words.

    `class_names` are those of a store that is appended to. Raises InputError for a name that is none of them, and for words
    that name too many classes.
    """
    if len(columns) > 1 or asked == "regression":
        return table_rows(duck, table, columns, advice=_NO_NUMBER)
    (column,) = columns
    if class_names is not None:
        return table_rows(duck, table, columns, {column: {"as": "codes", "values": class_names}})
    if not table.is_text(column):
        return table_rows(duck, table, columns, advice=_NO_NUMBER)
    cell, number = sql.name(column), table.number(column, "DOUBLE")
    held, numbers = duck.one(f"SELECT count(nullif({cell}, '')), count({number}) FROM {table.relation()}")
    if held - numbers <= WORDS_SHARE * held:
        return table_rows(duck, table, columns, advice=_NO_NUMBER)
    words = categories_of(duck, table, column, "codes")
    if len(words["values"]) > max(MOST_CLASSES, held // 2):
        raise InputError(
            f"{table.shown} column {column!r} names {len(words['values']):,} classes in {held:,} rows; labels name a class"
        )
    return table_rows(duck, table, columns, {column: words})


def look_at_labels(rows: Rows, num_nodes: int, names: list[str] | None = None, asked: LabelKind = "auto") -> Labels:
    """Determine the task of the labels in one pass; -1 and NaN mean unlabeled, of targets NaN alone.

    [N] or [N, 1] is multiclass, or binary for the classes 0 and 1; [N, C] is multilabel of 0 and 1, with the `names` of its
    columns. Numbers are the targets of a regression if that is `asked` for, or (auto) where a share of them has a fraction.
    Raises InputError for a label that is no whole number or out of range, and for an infinite target, with file, row and value.
    """
    if asked == "regression":
        return _targets(rows, names)
    width = rows.width if rows.width is not None and rows.width > 1 else None
    most = 1 if width else max(num_nodes, MOST_CLASSES) - 1
    greatest, done, known, fractions = -1, 0, 0, 0
    mistake: str | None = None
    for block in rows.blocks():
        values = np.where(np.isnan(block), -1, block) if block.dtype.kind == "f" else block
        fraction = _fractions(values)
        wrong = (values < -1) | (values > most) | fraction
        if mistake is None and wrong.any():
            at = np.argwhere(wrong)[0]
            mistake = f"{_where(rows, done, at, names)}: {_mistaken(values[tuple(at)], most)}"
        known += int(np.count_nonzero(values != -1))
        fractions += int(np.count_nonzero(fraction))
        if mistake is None and len(values):
            greatest = max(greatest, int(values.max()))
        done += len(block)
    if asked == "auto" and fractions and fractions >= FRACTIONS_SHARE * known:
        return _targets(rows, names)
    if mistake is not None:
        raise InputError(mistake)
    if greatest < 0:
        raise InputError(f"{rows.shown} has no labels: every value is -1 or NaN")
    if width:
        return Labels("multilabel", width, width, names)
    if rows.categories:
        (words,) = rows.categories.values()
        names = list(words["values"])
        return Labels("binary" if len(names) <= 2 else "multiclass", max(2, len(names)), None, names)
    return Labels("binary", 2, None) if greatest <= 1 else Labels("multiclass", greatest + 1, None)


def _targets(rows: Rows, names: list[str] | None) -> Labels:
    """The labels as targets of a regression: [N], or [N, T] for an array that has columns, or several columns of a table."""
    done, any_known = 0, False
    for block in rows.blocks():
        refuse_infinite(rows, done, block, names)
        any_known |= bool(known(block, "regression").any())
        done += len(block)
    if not any_known:
        raise InputError(f"{rows.shown} has no labels: every value is NaN or empty")
    width = rows.width if not rows.columns or (rows.width or 1) > 1 else None
    return Labels("regression", width or 1, width, names)


def refuse_infinite(rows: Rows, first: int, block: NDArray[Any], names: list[str] | None = None) -> None:
    """Raise InputError for a target of a block, which begins at row `first`, that is no finite number in float32."""
    _, infinite = as_targets(block)
    if infinite.any():
        at = np.argwhere(infinite)[0]
        raise InputError(
            f"{_where(rows, first, at, names)}: target {block[tuple(at)]} is infinite or beyond float32: correct it, or make "
            "it NaN (in a table: leave the cell empty) where it is unknown"
        )


def _where(rows: Rows, first: int, at: NDArray[np.intp], names: list[str] | None) -> str:
    """File, row and, of several columns, column of the value at `at` of a block that begins at row `first`."""
    several = rows.width is not None and rows.width > 1
    return rows.where(first + int(at[0])) + (f" column {names[at[1]] if names else at[1]}" if several else "")


def _mistaken(value: Any, most: int) -> str:
    """What is wrong with a label that is no class."""
    wrong = "no whole number" if np.floor(value) != value else "out of range"
    return f"label {value} is {wrong}: {_CLASSES.format(most)}; {_NUMBERS}"


def known(block: NDArray[Any], task: Task | None) -> NDArray[np.bool_]:
    """Which rows of labels (numbers [n] or [n, C]) have one: any that is not NaN and, of classes, not negative."""
    there = ~np.isnan(block) if task == "regression" else block >= 0
    return np.asarray(there.reshape(len(block), -1).any(axis=1))


def _fractions(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind != "f":
        return np.zeros(values.shape, bool)
    return np.asarray(values != np.floor(values))  # infinity is out of range


def write_labels(
    store: Path, rows: Rows, labels: Labels, make_sink: MakeSink = Appender, array: Callable[[str], str] = node_array
) -> None:
    """Append the labels as node array y (or `array("y")`), in the smallest suitable dtype."""
    dtype = label_dtype(labels.task, labels.num_classes)
    shape = () if labels.width is None else (labels.width,)
    with make_sink(store, array("y"), shape, dtype, label_attributes(labels.task), count=rows.count) as sink:
        for block in rows.blocks():
            unlabeled = block.dtype.kind == "f" and labels.task != "regression"
            values = np.where(np.isnan(block), -1, block) if unlabeled else block
            sink.append(np.ascontiguousarray(values.astype(dtype).reshape(len(block), *shape)))

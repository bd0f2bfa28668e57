"""Labels: determines their task, checks them, and stores them compactly."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import InputError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.columns import categories_of, match_columns, table_rows
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.nodes import Rows
from ooc.stores.ingest.sources import Table
from ooc.stores.manifest import Task, label_dtype, node_array

MOST_CLASSES = 1000
"""more classes than both this and the nodes are treated as a mistake"""


_CLASSES = "labels are 0..{}, -1 or NaN for none"
_REGRESSION = "numbers to predict (a regression) are not supported: make classes of them, or store them as `features`"
WORDS_SHARE = 0.1
"""share of labels that are no numbers above which all are names of classes; below it they are treated as mistakes"""


@dataclass(frozen=True)
class Labels:
    """The task of the labels."""

    task: Task
    num_classes: int
    width: int | None
    """label columns of a multilabel task, else None"""
    names: list[str] | None = None
    """of the classes, if the labels were words; of the labels, if they are columns of a table"""


def label_columns(table: Table, wanted: str, taken: set[str], class_names: list[str] | None = None) -> list[str]:
    """Columns of a table that `wanted` names: one, or the patterns of several (comma-separated), each a label of its own.

    Several come in the order given, or in that of `class_names`, the labels of a store that is appended to. Raises InputError
    if there are none, or not those of the store.
    """
    if wanted in table.columns or not re.search(r"[,*?\[]", wanted):
        return [table.column(wanted, "labels")]
    found = match_columns(table, wanted, taken, "`label`")
    if len(found) > 1 and class_names is not None and len(found) == len(class_names):
        if set(found) != set(class_names):
            given, there = ", ".join(found), ", ".join(class_names)
            raise InputError(f"{table.shown}: the labels given are {given}, those of the store {there}: name the same columns")
        return class_names
    return found


def label_rows(duck: Duck, table: Table, column: str, class_names: list[str] | None = None) -> Rows:
    """Rows of a table's label column: numbers, or positions in the sorted names of the classes if it holds words.

    `class_names` are those of a store that is appended to. Raises InputError for a name that is none of them, and for words
    that name too many classes.
    """
    if class_names is not None:
        return table_rows(duck, table, [column], {column: {"as": "codes", "values": class_names}})
    if not table.is_text(column):
        return table_rows(duck, table, [column])
    cell, number = sql.name(column), table.number(column, "DOUBLE")
    held, numbers = duck.one(f"SELECT count(nullif({cell}, '')), count({number}) FROM {table.relation()}")
    if held - numbers <= WORDS_SHARE * held:
        return table_rows(duck, table, [column])
    words = categories_of(duck, table, column, "codes")
    if len(words["values"]) > max(MOST_CLASSES, held // 2):
        raise InputError(
            f"{table.shown} column {column!r} names {len(words['values']):,} classes for {held:,} nodes; labels name a class"
        )
    return table_rows(duck, table, [column], {column: words})


def look_at_labels(rows: Rows, num_nodes: int, names: list[str] | None = None) -> Labels:
    """Determine the task of the labels in one pass; -1 and NaN mean unlabeled.

    [N] or [N, 1] is multiclass, or binary for the classes 0 and 1; [N, C] is multilabel of 0 and 1, with the `names` of its
    columns. Raises InputError for a label that is not an integer or out of range, naming file, row and value.
    """
    width = rows.width if rows.width is not None and rows.width > 1 else None
    most = 1 if width else max(num_nodes, MOST_CLASSES) - 1
    greatest, done = -1, 0
    for block in rows.blocks():
        values = np.where(np.isnan(block), -1, block) if block.dtype.kind == "f" else block
        wrong = (values < -1) | (values > most) | _fractions(values)
        if wrong.any():
            at = np.argwhere(wrong)[0]
            where = rows.where(done + int(at[0])) + (f" column {names[at[1]] if names else at[1]}" if width else "")
            if _fractions(values)[tuple(at)]:
                raise InputError(
                    f"{where}: label {values[tuple(at)]} is no whole number: {_CLASSES.format(most)}; {_REGRESSION}"
                )
            raise InputError(f"{where}: label {values[tuple(at)]} is out of range: {_CLASSES.format(most)}")
        greatest = max(greatest, int(values.max()) if len(values) else -1)
        done += len(block)
    if greatest < 0:
        raise InputError(f"{rows.shown} labels no node at all: every value is -1 or NaN")
    if width:
        return Labels("multilabel", width, width, names)
    if rows.categories:
        (words,) = rows.categories.values()
        names = list(words["values"])
        return Labels("binary" if len(names) <= 2 else "multiclass", max(2, len(names)), None, names)
    return Labels("binary", 2, None) if greatest <= 1 else Labels("multiclass", greatest + 1, None)


def known(block: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows of labels (numbers [n] or [n, C]) have one: any that is neither negative nor NaN."""
    return np.asarray((block >= 0).reshape(len(block), -1).any(axis=1))


def _fractions(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind != "f":
        return np.zeros(values.shape, bool)
    return np.asarray(values != np.floor(values))  # infinity is out of range


def write_labels(store: Path, rows: Rows, labels: Labels, make_sink: MakeSink = Appender) -> None:
    """Append the labels as node array y, in the smallest suitable dtype."""
    dtype = label_dtype(labels.task, labels.num_classes)
    shape = () if labels.width is None else (labels.width,)
    with make_sink(store, node_array("y"), shape, dtype, count=rows.count) as sink:
        for block in rows.blocks():
            values = np.where(np.isnan(block), -1, block) if block.dtype.kind == "f" else block
            sink.append(np.ascontiguousarray(values.astype(dtype).reshape(len(block), *shape)))

"""Labels and splits: what task they make, checked, as compact as they go."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stores.errors import InputError
from stores.ingest import duck as sql
from stores.ingest.duck import Duck
from stores.ingest.nodes import Rows
from stores.ingest.sources import Table, open_array
from stores.manifest import SPLIT_CODES, Task, label_dtype, node_array, split_array
from stores.zarr_write import Appender, write_array

MOST_CLASSES = 1000
"""more classes than both this and the nodes are taken for a mistake"""
_SPLIT_WORDS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}
_NO_SPLIT = {"", "none", "unlabeled", "-1"}
_MASK_ROWS = 1 << 20


@dataclass(frozen=True)
class Labels:
    """What the labels turned out to be."""

    task: Task
    num_classes: int
    width: int | None
    """label columns of a multilabel task, else None"""


def look_at_labels(rows: Rows, num_nodes: int) -> Labels:
    """The task that labels make, in one pass; -1 and NaN mean unlabeled.

    [N] or [N, 1]: multiclass, or binary for the classes 0 and 1; [N, C]: multilabel of 0 and 1.
    Raises InputError for a label that is no whole number or out of range, naming file, row and value.
    """
    width = rows.width if rows.width is not None and rows.width > 1 else None
    most = 1 if width else max(num_nodes, MOST_CLASSES) - 1
    greatest, done = -1, 0
    for block in rows.blocks():
        values = np.where(np.isnan(block), -1, block) if block.dtype.kind == "f" else block
        wrong = (values < -1) | (values > most)
        if block.dtype.kind == "f":
            with np.errstate(invalid="ignore"):
                wrong |= values != np.floor(values)
        if wrong.any():
            at = np.argwhere(wrong)[0]
            where = rows.where(done + int(at[0])) + (f" column {at[1]}" if width else "")
            raise InputError(f"{where}: label {block[tuple(at)]} is out of range: whole numbers 0..{most}, -1 for none")
        greatest = max(greatest, int(values.max()) if len(values) else -1)
        done += len(block)
    if greatest < 0:
        raise InputError(f"{rows.shown} labels no node at all: every value is -1 or NaN")
    if width:
        return Labels("multilabel", width, width)
    return Labels("binary", 2, None) if greatest <= 1 else Labels("multiclass", greatest + 1, None)


def write_labels(store: Path, rows: Rows, labels: Labels) -> None:
    """Append the labels as node array y, in the smallest type that holds them."""
    dtype = label_dtype(labels.task, labels.num_classes)
    shape = () if labels.width is None else (labels.width,)
    with Appender(store, node_array("y"), shape, dtype, count=rows.count) as appender:
        for block in rows.blocks():
            values = np.where(np.isnan(block), -1, block) if block.dtype.kind == "f" else block
            appender.append(np.ascontiguousarray(values.astype(dtype).reshape(len(block), *shape)))


def read_split(path: str, shown: str, num_nodes: int, split_index: int | None) -> NDArray[np.bool_]:
    """bool[N] of a split given as row ids, as a mask [N], or as masks [S, N] or [N, S] of which one is chosen.

    Raises InputError for an id out of range, a mask that does not fit, or masks without a choice among them.
    """
    array = open_array(Path(path), shown)
    if array.dtype == bool:
        return _mask(array, shown, num_nodes, split_index)
    if split_index is not None:
        raise InputError(f"--split-index chooses among masks [S, N], but {shown} holds {array.dtype} {list(array.shape)}")
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InputError(f"{shown} holds {array.dtype} {list(array.shape)}: a split is row ids [k] or a boolean mask [N]")
    mask = np.zeros(num_nodes, bool)
    for start in range(0, len(array), _MASK_ROWS):
        ids = np.asarray(array[start : start + _MASK_ROWS])
        wrong = (ids < 0) | (ids >= num_nodes)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(f"{shown} entry {start + at}: node {ids[at]} is out of range 0..{num_nodes - 1}; correct it")
        mask[ids] = True
    return mask


def overlaps(masks: dict[str, NDArray[np.bool_]]) -> list[str]:
    """A line for each two splits that share nodes: a model is then judged by what it was trained on."""
    shared = ((one, other, int((masks[one] & masks[other]).sum())) for one, other in combinations(masks, 2))
    return [f"the splits {one} and {other} share {count:,} nodes" for one, other, count in shared if count]


def _mask(array: NDArray[Any], shown: str, num_nodes: int, split_index: int | None) -> NDArray[np.bool_]:
    if array.ndim == 2:
        if num_nodes not in array.shape:
            raise InputError(f"{shown} has shape {list(array.shape)}, neither side of which is the {num_nodes} nodes")
        masks = array if array.shape[1] == num_nodes else array.T
        if split_index is None and len(masks) > 1:
            raise InputError(f"{shown} holds {len(masks)} splits: choose one with --split-index 0..{len(masks) - 1}")
        if (split_index or 0) >= len(masks):
            raise InputError(f"{shown} holds {len(masks)} splits: --split-index {split_index} is none of 0..{len(masks) - 1}")
        return np.array(masks[split_index or 0])
    if split_index is not None:
        raise InputError(f"--split-index chooses among masks [S, N], but {shown} has shape {list(array.shape)}; leave it out")
    if array.shape != (num_nodes,):
        raise InputError(f"{shown} is a mask of shape {list(array.shape)}, but there are {num_nodes} nodes")
    return np.array(array)


def table_splits(duck: Duck, table: Table, column: str) -> dict[str, NDArray[np.bool_]]:
    """bool[N] of each split named in a table's column: train, val (valid, validation), test, or 0, 1, 2; empty or -1: none."""
    codes = np.full(table.rows, -1, np.int8)
    values = {
        str(value): None for (value,) in duck.rows(f"SELECT DISTINCT {sql.name(column)}::VARCHAR FROM {table.relation()}")[:50]
    }
    known = _SPLIT_WORDS | {str(code): code for code in (0, 1, 2)}
    for value in values:
        if value != "None" and value.strip().lower() not in known and value.strip().lower() not in _NO_SPLIT:
            from_here = f"{sql.name(column)}::VARCHAR = {sql.text(value)}"
            at = duck.one(f"SELECT min({table.position()}) FROM {table.relation()} WHERE {from_here}")[0]
            raise InputError(f"{table.where(at)}: {column} is {value!r}: a split is train, val or test (or 0, 1, 2)")
    cases = " ".join(f"WHEN {sql.text(word)} THEN {code}" for word, code in known.items())
    code = f"(CASE lower(trim({sql.name(column)}::VARCHAR)) {cases} ELSE -1 END)::TINYINT"
    for start, part in _at(duck, f"SELECT {code} AS code FROM {table.relation()}"):
        codes[start : start + len(part)] = part
    return {name: codes == number for name, number in SPLIT_CODES.items() if (codes == number).any()}


def _at(duck: Duck, query: str) -> Iterator[tuple[int, NDArray[Any]]]:
    start = 0
    for batch in duck.stream(query):
        yield start, batch.column(0).to_numpy()
        start += len(batch)


def write_splits(store: Path, masks: dict[str, NDArray[np.bool_]]) -> tuple[dict[str, int], list[str]]:
    """Write `split` int8[N], or one boolean array a split where they overlap; ({split: nodes}, names of the arrays).

    Raises InputError for an empty split.
    """
    for name, mask in masks.items():
        if not mask.any():
            raise InputError(f"the split {name} holds no node: leave it out, or give its nodes")
    sizes = {name: int(mask.sum()) for name, mask in masks.items()}
    total = np.zeros(len(next(iter(masks.values()))), np.int8)
    for mask in masks.values():
        total += mask
    if (total > 1).any():
        for name, mask in masks.items():
            write_array(store, split_array(name), mask)
        return sizes, [f"split_{name}" for name in masks]
    codes = np.full(len(total), -1, np.int8)
    for name, mask in masks.items():
        codes[mask] = SPLIT_CODES[name]
    write_array(store, node_array("split"), codes)
    return sizes, ["split"]

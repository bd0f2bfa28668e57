"""Rows of a model's outputs as files: predictions as a Parquet table, embeddings as a Zarr array; each appears whole."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from ooc.stores.arrays.rows import Ids, Rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import ConfigError
from ooc.stores.io.atomic import disk_errors, partial_path, publish, sync_dir
from ooc.stores.node_set import NodeSet

ROWS_AT_ONCE, BYTES_AT_ONCE = 2**16, 2**24
"""of a model's output in memory: the fewer of the two, but a thousand rows"""
EMBEDDINGS = "x"
"""name of the array in the group that `embed` writes"""
NAMES = "class_names"
"""key of a table's metadata: the names of the classes, in the order of the probabilities, or of the targets, as JSON"""
_SINGULAR = {"probabilities": "probability", "predictions": "prediction", "outputs": "output"}
"""column of several numbers a node -> the beginning of the names of its columns in CSV"""


def row_parts(rows: Rows) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """(nodes, their rows), front to back; one part at least."""
    step = max(1024, min(ROWS_AT_ONCE, BYTES_AT_ONCE // max(1, rows.row_bytes)))
    for first in range(0, max(1, rows.shape[0]), step):
        node = np.arange(first, min(first + step, rows.shape[0]))
        values = np.empty((len(node), *rows.shape[1:]), rows.dtype)
        rows.read(node, values)
        yield node, values


def write_zarr(out: Path, rows: Rows, beside: Mapping[str, tuple[NDArray[Any], dict[str, Any]]] | None = None) -> None:
    """Write rows as the array `x` of a Zarr group, appended in order. beside: further arrays and their attributes, by name."""
    partial = partial_path(out)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_errors(out):
            with Appender(partial, EMBEDDINGS, rows.shape[1:], rows.dtype, count=rows.shape[0]) as array:
                for _, values in row_parts(rows):
                    array.append(values)
            for name, (own, attributes) in (beside or {}).items():
                with Appender(partial, name, own.shape[1:], own.dtype, attributes) as array:
                    array.append(own)
        publish(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its room back
        raise


def check_table(out: Path) -> None:
    """Raise ConfigError if the ending of `out` names no format of tables."""
    if out.suffix not in TABLES:
        raise ConfigError(f"{out}: a table is written as Parquet or CSV: end the name in {' or '.join(TABLES)}")


def check_group(out: Path) -> None:
    """Raise ConfigError if the ending of `out` names a table, which embeddings are not written as."""
    if out.suffix in TABLES:
        raise ConfigError(f"{out}: embeddings are written as a Zarr group: end the name in .zarr")


def write_table(out: Path, rows: Rows, nodes: NodeSet, task: str | None, class_names: list[str] | None = None) -> None:
    """Write the table of `predictions` of all nodes, a part at a time."""
    write_parts(out, ((nodes.external(node), logits) for node, logits in row_parts(rows)), task, class_names)


def write_parts(
    out: Path, parts: Iterator[tuple[Any, NDArray[Any]]], task: str | None, class_names: list[str] | None = None
) -> None:
    """Write the table of `predictions` of parts (external ids, logits [n, C]); the file appears whole."""
    write_tables(out, (predictions(ids, torch.from_numpy(logits), task, class_names) for ids, logits in parts))


def write_tables(out: Path, tables: Iterator[pa.Table]) -> None:
    """Write the rows of tables, one at least, to a file of the format of its ending; it appears whole."""
    partial = partial_path(out)
    kind, shaped = TABLES[out.suffix]
    writer: Any = None
    with disk_errors(out):
        try:
            for each in _joined(tables):
                table = shaped(each)
                writer = writer or kind(partial.absolute(), table.schema)  # pyarrow takes a:b for a URI
                writer.write_table(table)
            assert writer is not None, "there is a table"
            writer.close()
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, out)
            sync_dir(out.absolute().parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def external_ids(nodes: NodeSet, rows: Ids) -> pa.Array:
    """The user's own ids of nodes."""
    found = nodes.external(rows)
    return pa.array(found, pa.string() if isinstance(found, list) else pa.int64())


def _joined(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The rows of tables in fewer tables, as each is a row group of a Parquet file."""
    held: list[pa.Table] = []
    for each in tables:
        held.append(each)
        if sum(map(len, held)) >= ROWS_AT_ONCE or sum(table.nbytes for table in held) >= BYTES_AT_ONCE:
            yield pa.concat_tables(held).combine_chunks()
            held = []
    if held:
        yield pa.concat_tables(held).combine_chunks()


def predictions(ids: Any, logits: torch.Tensor, task: str | None, class_names: list[str] | None = None) -> pa.Table:
    """A table of what logits [n, C] say: see `infer`. ids: int64[n] or a list of str; task: kind of the labels, None for the
    numbers themselves.

    >>> predictions(np.array([7]), torch.tensor([[0.0, 2.0]]), "multiclass")["class"].to_pylist()
    [1]
    """
    columns: dict[str, Any] = {"id": pa.array(ids)}
    named = None if class_names is None else {NAMES: json.dumps(class_names)}
    if task is None:
        return pa.table({**columns, "outputs": _lists(logits)})
    if task == "regression":
        several = logits.shape[1] > 1
        columns |= {"predictions": _lists(logits)} if several else {"prediction": pa.array(logits.view(-1).numpy())}
        return pa.table(columns, metadata=named)
    if task == "binary":
        probability = logits.view(-1).sigmoid()
        columns |= _classes((probability >= 0.5).int(), class_names)
        columns["probability"] = pa.array(probability.numpy())
        return pa.table(columns)
    probability = logits.softmax(1) if task == "multiclass" else logits.sigmoid()
    if task == "multiclass":
        columns |= _classes(probability.argmax(1).int(), class_names)
    else:
        chosen = probability >= 0.5
        offsets = np.concatenate([[0], np.cumsum(chosen.sum(1).numpy())]).astype(np.int32)
        numbers = pa.array(chosen.nonzero()[:, 1].int().numpy())
        columns["classes"] = pa.ListArray.from_arrays(offsets, numbers)
        if class_names is not None:
            names = pa.array(class_names, pa.string()).take(numbers)
            columns["class_names"] = pa.ListArray.from_arrays(offsets, names)
    columns["probabilities"] = _lists(probability)
    return pa.table(columns, metadata=named)


def _lists(values: torch.Tensor) -> pa.Array:
    """A column of lists of equal length, from [n, C]."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1).numpy()), values.shape[1])


def _classes(number: torch.Tensor, names: list[str] | None) -> dict[str, pa.Array]:
    """Columns of the predicted classes (int32[n]): their numbers, and their names where they have some."""
    numbers = pa.array(number.numpy())
    if names is None:
        return {"class": numbers}
    known = pa.array([*names, *[None] * (2 - len(names))], pa.string())  # a binary task may have one name
    return {"class": numbers, "class_name": known.take(numbers)}


def flat(table: pa.Table) -> pa.Table:
    """A table without lists, as CSV needs it: probabilities and predictions in columns, classes between spaces, names between
    semicolons.

    >>> flat(pa.table({"probabilities": pa.array([[0.25, 0.75]], pa.list_(pa.float32(), 2))})).column_names
    ['probability_0', 'probability_1']
    """
    columns: dict[str, Any] = {}
    known = json.loads((table.schema.metadata or {}).get(NAMES.encode(), b"[]"))
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_fixed_size_list(column.type):
            width = column.type.list_size
            singular, names = _SINGULAR[name], [] if name == "outputs" else known
            values = column.flatten().to_numpy().reshape(-1, width)
            columns |= {
                f"{singular}_{each}": pa.array(np.ascontiguousarray(values[:, number]))
                for number, each in enumerate(names or range(width))
            }
        elif pa.types.is_list(column.type):
            sign = ";" if name == NAMES else " "
            columns[name] = pa.array([sign.join(map(str, each)) for each in column.to_pylist()], pa.string())
        else:
            columns[name] = column
    return pa.table(columns)


TABLES: dict[str, tuple[Any, Callable[[pa.Table], pa.Table]]] = {
    ".parquet": (pq.ParquetWriter, lambda table: table),
    ".csv": (pyarrow.csv.CSVWriter, flat),
}
"""ending of a file of predictions -> (what writes it, how its tables are shaped)"""

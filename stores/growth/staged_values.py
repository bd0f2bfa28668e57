"""Values of an append in the form that the arrays of the store have: features, labels and splits, in files."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.array_names import SPLIT_CODES
from ooc.stores.arrays.encoding import INT8_MOST, Encoding
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.arrays.zarr_rows import ForeignRows, ShardedRows
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.growth.sorting import Column, ColumnWriter
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.ingest import nodes
from ooc.stores.ingest import splits as split_files
from ooc.stores.ingest.duck import Progress
from ooc.stores.ingest.labels import refuse_infinite
from ooc.stores.labels import Task

_STORED = ("float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")


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

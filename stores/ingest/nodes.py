"""Node features: streamed from npy files or table columns, checked, normalized, appended; one block in memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.array_names import node_array
from ooc.stores.arrays.encoding import DTYPE, SCALE, scale_name, scale_of, to_bfloat16, to_int8
from ooc.stores.arrays.zarr_write import Appender, write_array
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.duck import Progress
from ooc.stores.ingest.lazy import LazyArray
from ooc.stores.ingest.sources import EXACT, open_array, read_rows
from ooc.stores.io.threads import ahead

BLOCK_BYTES = 16 << 20
Block = NDArray[Any]
CATEGORIES = "ooc_categories"
"""attribute of an array: the words of the columns that were encoded; see `Rows.categories`"""
SOURCES = "ooc_columns"
"""attribute of an array: the columns of the table that it was made of; see `Rows.sources`"""
_NUMBERS = "fiub"
_WILD = "NaN, infinite or beyond {}"


@dataclass(frozen=True)
class Rows:
    """A numeric node array [count, width] (or [count]: width None) that can be read sequentially any number of times."""

    shown: str
    count: int
    width: int | None
    dtype: np.dtype[Any]
    blocks: Callable[[], Iterator[Block]]
    where: Callable[[int], str]
    """file and row of a row, for messages"""
    columns: tuple[str, ...] = ()
    """column names, for a table"""
    rounded: Callable[[], str | None] = lambda: None
    """describes the first integer that float32 cannot hold; None if there is none"""
    categories: dict[str, dict[str, Any]] = field(default_factory=dict)
    """column of words -> {as: codes or one-hot, values: its words}; attributes of the array"""
    sources: tuple[str, ...] = ()
    """the columns of the table, a list or encoded words as one, before any are left out; an attribute of the array"""

    def expect(self, count: int, why: str, what: str = "node") -> "Rows":
        """Return self if it has one row per node (or `what`). Raises InputError otherwise."""
        if self.count != count:
            raise InputError(f"{self.shown} has {self.count} rows, but there are {count} {what}s ({why}); one row a {what}")
        return self


def npy_rows(
    paths: list[str], name: Callable[[str], str] = str, opened: Callable[[str], Block | LazyArray] | None = None
) -> Rows:
    """Rows of concatenated npy files. Raises InputError if their widths differ or they are not numeric.

    `opened` gives the array of a path; by default it is a file.
    """
    arrays = [open_array(Path(path), name(path)) if opened is None else opened(path) for path in paths]
    for path, array in zip(paths, arrays, strict=True):
        if array.dtype.kind not in _NUMBERS or array.ndim not in (1, 2):
            raise InputError(f"{name(path)} holds {array.dtype} {list(array.shape)}: numbers [N] or [N, F] are wanted")
        if array.shape[1:] != arrays[0].shape[1:]:
            have, want = list(array.shape), list(arrays[0].shape)
            raise InputError(f"{name(path)} has shape {have} and {name(paths[0])} {want}: parts must be equally wide")
        if array.dtype != arrays[0].dtype:
            raise InputError(f"{name(path)} holds {array.dtype} and {name(paths[0])} {arrays[0].dtype}: save them alike")
    width = arrays[0].shape[1] if arrays[0].ndim == 2 else None
    if width == 0:
        raise InputError(f"{name(paths[0])} has shape {list(arrays[0].shape)}: rows without columns hold nothing")
    step = max(1, BLOCK_BYTES // (arrays[0].dtype.itemsize * (width or 1)))
    dtype = arrays[0].dtype.newbyteorder("=")

    def blocks() -> Iterator[Block]:
        for array in arrays:
            for start in range(0, len(array), step):
                yield read_rows(array, start, min(step, len(array) - start))

    def rounded() -> str | None:
        done = 0
        for block in blocks() if dtype.kind in "iu" and dtype.itemsize > 2 else ():
            wrong = np.argwhere(_two_d(_rounds(block)))
            if len(wrong):
                row, column = wrong[0].tolist()
                return f"{where(done + row)} column {column} is {_two_d(block)[row, column]}"
            done += len(block)
        return None

    def where(row: int) -> str:
        for path, array in zip(paths, arrays, strict=True):
            if row < len(array):
                return f"{name(path)} row {row}"
            row -= len(array)
        raise AssertionError("row beyond the files")

    rest = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Rows(name(paths[0]) + rest, sum(map(len, arrays)), width, dtype, blocks, where, rounded=rounded)


def _rounds(block: Block) -> NDArray[np.bool_]:
    """Which integers float32 cannot hold; those up to 2**24 it can, and sums in float64 would hide the others."""
    single = block.astype(np.float32).astype(np.float64)
    back = np.where(np.abs(single) < 2.0**63, single, 0).astype(block.dtype)
    return np.asarray((np.abs(single) > EXACT) & (back != block))


@dataclass(frozen=True)
class Scale:
    """Normalization of a block. `row` subtracts the global minimum and divides each row by its sum, at least 1 (PyG's
    NormalizeFeatures); `standard` gives every column mean 0 and deviation 1 over the training rows."""

    kind: str
    shift: NDArray[np.float64]
    divisor: NDArray[np.float64] | None = None

    def __call__(self, block: Block) -> Block:
        if self.kind == "none":
            return block
        moved = block.astype(np.float64) - self.shift
        if self.kind == "row":
            with np.errstate(invalid="ignore"):
                return np.asarray(moved / np.maximum(moved.sum(axis=1, keepdims=True), 1.0))
        assert self.divisor is not None
        return np.asarray(moved / self.divisor)


def scaled(rows: Rows, scale: Scale) -> Rows:
    """The rows after normalization."""
    if scale.kind == "none":
        return rows

    def blocks() -> Iterator[Block]:
        return (scale(_two_d(block)) for block in rows.blocks())

    return replace(rows, dtype=np.dtype(np.float64), blocks=blocks, rounded=lambda: None)


def fit_scale(rows: Rows, kind: str, training: Callable[[int, int], NDArray[np.bool_]] | None, progress: Progress) -> Scale:
    """Compute the statistics for `kind` in one pass, ignoring NaN and infinity; training(first, last) is bool per row."""
    if kind == "none":
        return Scale(kind, np.zeros(1))
    if kind == "row":
        least, done = np.inf, 0
        for block in rows.blocks():
            values = block.astype(np.float64, copy=False)
            least = min(least, float(np.min(values, initial=np.inf, where=np.isfinite(values))))
            done += len(block)
            progress("statistics", done, rows.count)
        return Scale(kind, np.array([least if np.isfinite(least) else 0.0]))
    if training is None:
        raise ConfigError("`normalize='standard'` takes its statistics from the training rows: give `train` (or `split`)")
    count, mean, squares = (np.zeros(rows.width or 1) for _ in range(3))
    done = 0
    for block in rows.blocks():
        chosen = _two_d(block)[training(done, done + len(block))].astype(np.float64)
        count, mean, squares = _merge(count, mean, squares, chosen)
        done += len(block)
        progress("statistics", done, rows.count)
    deviation = np.sqrt(squares / np.maximum(count, 1.0))
    return Scale(kind, mean, np.where(deviation > 0, deviation, 1.0))


def _merge(
    count: NDArray[np.float64], mean: NDArray[np.float64], squares: NDArray[np.float64], block: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Add `block` to the count, mean and squared deviations of each column (Chan, Golub and LeVeque, 1979)."""
    good = np.isfinite(block)
    held = good.sum(axis=0).astype(np.float64)
    own = np.where(good, block, 0.0).sum(axis=0) / np.maximum(held, 1.0)
    spread = (np.where(good, block - own, 0.0) ** 2).sum(axis=0)
    total = np.maximum(count + held, 1.0)
    step = own - mean
    return count + held, mean + step * held / total, squares + spread + step**2 * count * held / total


@dataclass(frozen=True)
class Storage:
    """Storage of values: dtype float32, float16, bfloat16, or of integers; step: float32[F], the scales of scaled int8."""

    dtype: str
    step: NDArray[np.float32] | None = None

    @property
    def whole(self) -> bool:
        """Whether integers are stored as they are."""
        return self.step is None and self.stored.kind in "iu" and self.dtype != "bfloat16"

    @property
    def stored(self) -> np.dtype[Any]:
        """Dtype of the array; Zarr has no bfloat16."""
        return np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)

    def attributes(self, name: str) -> dict[str, str]:
        """Attributes that describe the values if the dtype does not; see `ooc.stores.arrays.encoding`."""
        scale = {} if self.step is None else {SCALE: scale_name(name)}
        return {} if self.dtype in ("float32", "float16") or self.whole else {DTYPE: self.dtype, **scale}

    def __call__(self, block: Block) -> tuple[Block, NDArray[np.bool_] | None]:
        """Encode values [b, F]; also returns which of them the dtype cannot hold, None if it holds all."""
        if self.whole:
            final = np.ascontiguousarray(block).astype(self.stored, copy=False)
            return final, None if np.can_cast(block.dtype, self.stored) else final != block
        if self.dtype in ("float32", "float16"):
            final = np.ascontiguousarray(block, dtype=self.dtype)
            finite = np.isfinite(final.sum(dtype=np.float32))  # cheaper than checking each
            return final, None if finite else ~np.isfinite(final)
        values = np.ascontiguousarray(block, dtype=np.float32)
        if self.step is not None:
            return to_int8(values, self.step), None
        final = to_bfloat16(values)
        return final, (final & 0x7F80) == 0x7F80


_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
"""unsigned types with few operations in torch"""


def fit_storage(rows: Rows, dtype: str, scale: Scale, progress: Progress) -> Storage:
    """Determine the storage.

    "auto" keeps integers, and stores everything else as float32; it raises InputError for an integer among other numbers that
    float32 would round. int8's scales take one pass and require finite values (InputError names the first other one).
    """
    if dtype == "auto" and rows.dtype.kind in "iu" and scale.kind == "none":
        return Storage(_WIDER.get(str(rows.dtype), str(rows.dtype)))
    if dtype == "auto":
        refuse_rounded(rows)
        return Storage("float32")
    if dtype != "int8":
        return Storage(dtype)
    largest, done = np.zeros(rows.width or 1, np.float32), 0
    for values in ahead(_single(scale(_two_d(block))) for block in rows.blocks()):
        largest = np.maximum(largest, np.maximum(values.max(axis=0), -values.min(axis=0)))  # propagates NaN and infinity
        if not np.isfinite(largest).all():
            row, column = np.argwhere(~np.isfinite(values))[0].tolist()
            shown = rows.columns[column] if rows.columns else column
            raise InputError(
                f"{rows.where(done + row)} column {shown} is NaN, infinite or beyond float32, which int8 cannot hold; "
                "correct it, or store features as `dtype='bfloat16'`"
            )
        done += len(values)
        progress("scales", done, rows.count)
    return Storage(dtype, scale_of(largest))


def refuse_rounded(rows: Rows) -> None:
    """Raise InputError for an integer that float32 cannot hold."""
    found = rows.rounded()
    if found is not None:
        raise InputError(
            f"{found}, which float32 would round; store whole numbers as `dtype='int64'`, or round by `dtype='float32'`"
        )


def _single(block: Block) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(block, dtype=np.float32)


def write_features(
    store: Path,
    name: str,
    rows: Rows,
    storage: Storage,
    scale: Scale,
    allow_nan: bool,
    progress: Progress,
    make_sink: MakeSink = Appender,
    array: Callable[[str], str] = node_array,
    flat: bool = False,
    more: Mapping[str, Any] | None = None,
) -> int:
    """Append the rows as node array `name` [N, F] (or `array(name)`) with its scales; returns the number of non-finite values.

    `flat` keeps rows without columns as they are, [N], where they need no scale; `more` are further attributes.

    Raises InputError for such values unless `allow_nan`, with their number and the first one's file, row and column. Values
    that overflow the dtype count as infinite.
    """
    wild, at, done = 0, (-1, -1), 0
    attributes: dict[str, Any] = storage.attributes(name) | ({} if scale.kind == "none" else {"normalize": scale.kind})
    attributes |= {CATEGORIES: rows.categories} if rows.categories else {}
    attributes |= {SOURCES: list(rows.sources)} if rows.sources else {}
    attributes |= dict(more or {})
    if storage.step is not None:
        write_array(store, array(scale_name(name)), storage.step)
    plain = flat and rows.width is None and storage.step is None
    shape = () if plain else (rows.width or 1,)
    with make_sink(store, array(name), shape, storage.stored, attributes, count=rows.count) as sink:
        for final, bad in ahead(_finished(block, scale, storage) for block in rows.blocks()):
            if bad is not None and bad.any():
                if not wild:
                    row, column = np.argwhere(bad)[0]
                    at = done + int(row), int(column)
                wild += int(bad.sum())
            sink.append(final[:, 0] if plain else final)
            done += len(final)
            progress(f"features {name}", done, rows.count)
        if wild and (storage.whole or not allow_nan):
            column = rows.columns[at[1]] if rows.columns else at[1]
            what = f"no whole number that {storage.dtype} holds" if storage.whole else _WILD.format(storage.dtype)
            advice = "correct them" if storage.whole else "correct them or pass `allow_nan=True`"
            raise InputError(f"{rows.where(at[0])} column {column} is {what}, the first of {wild} such values; {advice}")
    return wild


def _finished(block: Block, scale: Scale, storage: Storage) -> tuple[Block, NDArray[np.bool_] | None]:
    """Encode a block; also returns which of its values cannot be held."""
    with np.errstate(over="ignore", invalid="ignore"):
        return storage(scale(_two_d(block)))


def _two_d(block: Block) -> Block:
    return block if block.ndim == 2 else block[:, None]

"""Splits in bounded memory: a byte per node in a file of the working directory, with one bit per split.

Nodes are processed in windows: the inputs set the bits of one window in memory, which is appended to the file. Counts of the
eight bit combinations give the size of every split and the overlaps.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from ooc.stores.array_names import SPLIT_CODES, node_array
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import InputError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.duck import Duck
from ooc.stores.ingest.sources import Table, open_array, read_column, read_items
from ooc.stores.ingest.sources import first as first_row

BITS = {name: 1 << code for name, code in SPLIT_CODES.items()}
WINDOW_NODES = 1 << 25
"""nodes whose bits are in memory at a time; row ids are read once per window"""
READ_ITEMS = 1 << 20
"""entries of a split's array, or of the file, in memory at a time"""
_WORDS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "test": 2, "testing": 2}
_WORDS |= {str(code): code for code in SPLIT_CODES.values()}
_TRUE, _FALSE = ("true", "t", "1", "1.0", "yes"), ("false", "f", "0", "0.0", "no")
_NO_SPLIT = ("", "none", "unlabeled", "-1")

Bits = NDArray[np.uint8]
Split = Callable[[int, Bits, int], None]
"""split(first, window, bit): sets `bit` of window[i] if node first + i is in the split"""


def open_split(path: str, shown: str, num_nodes: int, split_index: int | None, what: str = "node") -> Split:
    """Open a split of nodes (or `what`): an npy of row ids [k], a mask [N], or boolean masks [S, N] or [N, S], one selected.

    A mask may also be of whole numbers that are all 0 or 1.

    Raises InputError for any other array, a mask that does not fit, or masks without a selection; the split raises it for an id
    out of range.
    """
    array = open_array(Path(path), shown)
    if array.dtype == bool or _is_mask(array, num_nodes):
        return _mask(array, shown, num_nodes, split_index, what)
    if split_index is not None:
        raise InputError(f"`split_index` chooses among masks [S, N], but {shown} holds {array.dtype} {list(array.shape)}")
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InputError(f"{shown} holds {array.dtype} {list(array.shape)}: a split is row ids [k] or a boolean mask [N]")

    def split(first: int, window: Bits, bit: int) -> None:
        for start in range(0, len(array), READ_ITEMS):
            ids = read_items(array, start, min(READ_ITEMS, len(array) - start))
            wrong = (ids < 0) | (ids >= num_nodes)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise InputError(f"{shown} entry {start + at}: {what} {ids[at]} is out of range 0..{num_nodes - 1}; correct it")
            here = ids[(ids >= first) & (ids < first + len(window))].astype(np.int64)
            window[here - first] |= np.uint8(bit)

    return split


def _is_mask(array: NDArray[Any], num_nodes: int) -> bool:
    """Whether whole numbers are a mask: as ids, so many 0s and 1s would be the first two nodes, again and again."""
    if array.dtype.kind not in "iu" or array.shape != (num_nodes,) or num_nodes <= 2:
        return False
    blocks = (read_items(array, start, min(READ_ITEMS, num_nodes - start)) for start in range(0, num_nodes, READ_ITEMS))
    return all(((block == 0) | (block == 1)).all() for block in blocks)


def _mask(array: NDArray[Any], shown: str, num_nodes: int, split_index: int | None, what: str) -> Split:
    if array.ndim == 2:
        if num_nodes not in array.shape:
            raise InputError(f"{shown} has shape {list(array.shape)}, neither side of which is the {num_nodes} {what}s")
        masks = array.T if array.shape[1] == num_nodes else array  # [N, S]
        count = masks.shape[1]
        if split_index is None and count > 1:
            raise InputError(f"{shown} holds {count} splits: choose one with `split_index`, 0 to {count - 1}")
        if (split_index or 0) >= count:
            raise InputError(f"{shown} holds {count} splits: `split_index={split_index}` is none of 0..{count - 1}")
    elif split_index is not None:
        raise InputError(f"`split_index` chooses among masks [S, N], but {shown} has shape {list(array.shape)}; leave it out")
    elif array.shape != (num_nodes,):
        raise InputError(f"{shown} is a mask of shape {list(array.shape)}, but there are {num_nodes} {what}s")
    else:
        masks = array[:, None]
    step = max(1, READ_ITEMS // masks.shape[1])

    def split(first: int, window: Bits, bit: int) -> None:
        for start in range(0, len(window), step):
            part = window[start : start + step]
            part |= (read_column(masks, split_index or 0, first + start, len(part)) != 0) * np.uint8(bit)

    return split


def bits_of(splits: Mapping[str, Split], num_nodes: int) -> Iterator[Bits]:
    """Yield uint8 blocks of all nodes in order, with BITS of their splits; needs memory for a window and a block."""
    held = np.empty(min(num_nodes, WINDOW_NODES), np.uint8)
    for first in range(0, num_nodes, WINDOW_NODES):
        window = held[: num_nodes - first]
        window[:] = 0
        for name, split in splits.items():
            split(first, window, BITS[name])
        for start in range(0, len(window), READ_ITEMS):
            yield window[start : start + READ_ITEMS]


def split_columns(table: Table, wanted: str) -> dict[str, str]:
    """Return {"": column} of the words of splits, or {split: its boolean column} for comma-separated columns.

    Raises InputError for a column that the table lacks, or one of several that is no split's by its name.
    """
    names = [wanted] if wanted in table.columns else [each.strip() for each in wanted.split(",")]
    if len(names) == 1 and table.columns.get(names[0]) != "bool":
        return {"": table.column(names[0], "splits")}
    found: dict[str, str] = {}
    for column in names:
        code = _WORDS.get(re.split(r"[^a-z]", table.column(column, "splits").lower())[0])
        if code is None:
            raise InputError(
                f"{table.shown} column {column!r}: a boolean column's name begins with train, val or test, as in train_mask"
            )
        found[next(name for name, each in SPLIT_CODES.items() if each == code)] = column
    if len(found) < len(names):
        raise InputError(f"{table.shown}: {wanted!r} names two columns for one split: give one for each of train, val and test")
    return found


def bits_of_table(duck: Duck, table: Table, wanted: str) -> Iterator[Bits]:
    """Yield the same for a table's columns (see `split_columns`): train, val (valid, validation), test, or 0, 1, 2; empty or -1
    for none; of boolean columns true, false, 1, 0, or empty for false.

    Raises InputError, before the first block, for any other word, naming the row.
    """
    columns = split_columns(table, wanted)
    strange, bits = zip(*(_mask_sql(*pair) if pair[0] else _words_sql(pair[1]) for pair in columns.items()), strict=True)
    for column, condition in zip(columns.values(), strange, strict=True):
        found = first_row(duck, table, condition, [column])
        if found is not None:
            at, value = found
            expected = "a mask is true or false" if "" not in columns else "a split is train, val or test (or 0, 1, 2)"
            raise InputError(f"{table.where(at)}: {column} is {str(value)!r}: {expected}")
    for batch in duck.stream(f"SELECT ({' | '.join(bits)})::UTINYINT AS bits FROM {table.relation()}"):
        yield batch.column(0).to_numpy()


def _words_sql(column: str) -> tuple[str, str]:
    """SQL of whether a cell is no split's word, and of its bit."""
    word = f"lower(trim({sql.name(column)}::VARCHAR))"
    known = ", ".join(sql.text(each) for each in (*_WORDS, *_NO_SPLIT))
    cases = " ".join(f"WHEN {sql.text(each)} THEN {1 << code}" for each, code in _WORDS.items())
    return f"{word} NOT IN ({known})", f"(CASE {word} {cases} ELSE 0 END)"  # NULL satisfies neither IN nor NOT IN


def _mask_sql(split: str, column: str) -> tuple[str, str]:
    """SQL of whether a cell is no boolean, and of its bit for the split."""
    word = f"lower(trim({sql.name(column)}::VARCHAR))"
    known = ", ".join(map(sql.text, ("", *_TRUE, *_FALSE)))
    true = ", ".join(map(sql.text, _TRUE))
    return f"{word} NOT IN ({known})", f"(CASE WHEN {word} IN ({true}) THEN {BITS[split]} ELSE 0 END)"


def write_splits(
    store: Path,
    bits: Iterable[Bits],
    stage: Path,
    given: Collection[str],
    make_sink: MakeSink = Appender,
    place: Callable[[str], str] = node_array,
    what: str = "node",
) -> dict[str, Any]:
    """Write `split` int8[N], or one boolean array per split if they overlap.

    Args:
        store: The group.
        bits: Bits of all nodes in order.
        stage: Temporary file for them.
        given: Splits that the store has even if they are empty.
        make_sink: Creates the arrays.
        place: The path of an array by its name.
        what: What there are N of.

    Returns:
        {sizes: {split: number}, arrays: [names], notes: [a line per empty split, and per overlapping pair, because scores would
        be misleading]}.
    """
    counts = np.zeros(1 << len(BITS), np.int64)  # nodes of each combination of splits
    with stage.open("wb") as file:
        for part in bits:
            counts += np.bincount(part, minlength=len(counts))
            file.write(part.data)
    held = {name: np.arange(len(counts)) & bit > 0 for name, bit in BITS.items()}
    sizes = {name: int(counts[each].sum()) for name, each in held.items()}
    empty = [f"the split {name} holds no {what}" for name in given if not sizes[name]]
    sizes = {name: size for name, size in sizes.items() if size or name in given}
    shared = [(one, other, int(counts[held[one] & held[other]].sum())) for one, other in combinations(sizes, 2)]
    notes = [f"the splits {one} and {other} share {count:,} {what}s" for one, other, count in shared if count]
    arrays = [f"split_{name}" for name in sizes] if notes else ["split"] if sizes else []
    _append(store, stage, int(counts.sum()), list(sizes), bool(notes), make_sink, place)
    stage.unlink()
    return {"sizes": sizes, "arrays": arrays, "notes": [*empty, *notes]}


def _append(
    store: Path,
    stage: Path,
    num_nodes: int,
    splits: list[str],
    overlapping: bool,
    make_sink: MakeSink,
    place: Callable[[str], str],
) -> None:
    if overlapping:
        for name in splits:
            with make_sink(store, place(f"split_{name}"), (), np.bool_, count=num_nodes) as sink:
                for part in _staged(stage):
                    sink.append(part & BITS[name] > 0)
    elif splits:
        codes = np.full(1 << len(BITS), -1, np.int8)
        for name, bit in BITS.items():
            codes[bit] = SPLIT_CODES[name]
        with make_sink(store, place("split"), (), np.int8, count=num_nodes) as sink:
            for part in _staged(stage):
                sink.append(codes[part])


def _staged(stage: Path) -> Iterator[Bits]:
    with stage.open("rb") as file:
        while piece := file.read(READ_ITEMS):
            yield np.frombuffer(piece, np.uint8)


def training_rows(
    store: Path, arrays: Iterable[str], place: Callable[[str], str] = node_array
) -> Callable[[int, int], NDArray[np.bool_]]:
    """Return a function that reads which of the rows first..last-1 are training rows from the store's split arrays.

    `place` is the path of an array by its name.

    >>> training_rows(store, ["split"])(0, 3)
    array([ True, False, False])
    """
    own = "split_train" in arrays
    array: Any = zarr.open_group(store, mode="r")[place("split_train" if own else "split")]
    wanted = True if own else SPLIT_CODES["train"]
    return lambda first, last: np.asarray(array[first:last]) == wanted

"""Input files in a uniform form: tables as ordered Parquet files, arrays as memory-mapped npy.

A row is identified by its position (files sorted, rows in order), so errors can name file and row. Text tables are staged as
Parquet with every column as text; numbers are parsed and checked later.
"""

import glob
import lzma
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ooc.stores.errors import InputError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest import text
from ooc.stores.ingest.duck import Duck, Progress, silent
from ooc.stores.ingest.lazy import LazyArray, read_ends

EDGE_LISTS = (".edgelist", ".edges", ".el", ".wel")
"""text with fields between any number of blanks and tabs, as NetworkX, SNAP and others write it"""
TABLES = (".parquet", ".pq", ".csv", ".tsv", ".txt", *EDGE_LISTS)
TEXT_TYPES = {"string", "large_string", "string_view"}
INT_TYPES = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
EXACT = 2**24
"""every integer up to this magnitude is a float32"""
STAGED_ROWS = 1 << 20
_MAGIC = {".parquet": b"PAR1", ".pq": b"PAR1", ".gz": b"\x1f\x8b", ".npy": b"\x93NUMPY", ".npz": b"PK"}


@dataclass(frozen=True)
class TableFile:
    """One file of a table: its name in messages, the Parquet file with its rows, and their number."""

    shown: str
    parquet: str
    rows: int
    first_line: int | None = None
    """for a text table: the line of row 0, counted from 1"""


@dataclass(frozen=True)
class Table:
    """Concatenated files of a table.

    >>> table = open_table(duck, "edges/*.parquet", stage)
    >>> table.where(17)
    'edges/part_0.parquet row 17'
    """

    files: tuple[TableFile, ...]
    columns: dict[str, str]
    """name -> Arrow type; text tables have `string` only"""
    text: bool
    header: bool = True
    view: str | None = None
    """what DuckDB calls the rows where they are read from an array as they are needed, not from files"""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def shown(self) -> str:
        rest = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return self.files[0].shown + rest

    def where(self, position: int) -> str:
        """File and row (from 0; for text files the line, from 1) of the table's row `position`."""
        for file in self.files:
            if position < file.rows:
                if file.first_line is None:
                    return f"{file.shown} row {position}"
                return f"{file.shown} line {position + file.first_line}"
            position -= file.rows
        raise AssertionError("position beyond the table")

    def relation(self) -> str:
        """SQL of all rows, with the virtual columns used by `position`."""
        if self.view is not None:
            return sql.name(self.view)
        return sql.parquet((Path(file.parquet) for file in self.files), position=True)

    def position(self) -> str:
        """SQL of a row's number among the rows of all files."""
        if len(self.files) == 1:
            return "file_row_number"
        starts = np.cumsum([0, *(file.rows for file in self.files[:-1])]).tolist()
        return f"({starts}::BIGINT[])[file_index::BIGINT + 1] + file_row_number"

    def whole(self, column: str) -> str:
        """SQL of a column as BIGINT, NULL if not an integer; DuckDB would round 1.5 and accept 1e1 and 1_000."""
        number = f"try_cast({sql.name(column)} AS BIGINT)"
        if not self.is_text(column):
            return number
        return f"CASE WHEN regexp_full_match(trim({sql.name(column)}), '[+-]?[0-9]+') THEN {number} END"

    def number(self, column: str, kind: str) -> str:
        """SQL of a column as FLOAT or DOUBLE (`kind`), NULL if not a number; DuckDB would accept 1_000."""
        number = f"try_cast({sql.name(column)} AS {kind})"
        return f"CASE WHEN NOT contains({sql.name(column)}, '_') THEN {number} END" if self.is_text(column) else number

    def rounded(self, column: str) -> str | None:
        """SQL of whether float32 cannot hold a column's integer; None for a column without integers."""
        if not self.is_text(column) and self.columns[column] not in INT_TYPES:
            return None
        whole = f"try_cast({sql.name(column)} AS HUGEINT)"
        if self.is_text(column):
            whole = f"CASE WHEN regexp_full_match(trim({sql.name(column)}), '[+-]?[0-9]+') THEN {whole} END"
        return f"({whole} NOT BETWEEN {-EXACT} AND {EXACT} AND try_cast(({whole})::FLOAT AS HUGEINT) <> {whole})"

    def is_text(self, column: str) -> bool:
        """Whether a column is text, which may contain numbers."""
        return self.columns[column] in TEXT_TYPES

    def column(self, wanted: str, what: str, default: tuple[str, int] | None = None) -> str:
        """Return the name of a required column; a table without a header uses its `default` (name, position).

        Raises InputError listing the existing columns.
        """
        if wanted in self.columns:
            return wanted
        if default is not None and not self.header and wanted == default[0] and default[1] < len(self.columns):
            return list(self.columns)[default[1]]
        there = ", ".join(list(self.columns)[:20])
        raise InputError(f"{self.shown} has no column {wanted!r} for {what}: it has {there}; name one of them{self._hint()}")

    def _hint(self) -> str:
        return text.NO_HEADER if self.text and self.header else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        files = tuple(TableFile(**file) for file in value["files"])
        return cls(files, value["columns"], value["text"], value["header"], value.get("view"))


def find(pattern: str, natural: bool = False) -> list[Path]:
    """Return the files of a path or glob, sorted by name (`natural`: part_2 before part_10). Raises InputError if there are
    none."""
    found = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
    paths = [Path(path) for path in found if Path(path).is_file()]
    if not paths and Path(pattern).is_dir():
        raise InputError(f"{pattern} is a directory: name its files by a glob, as in '{pattern}/*.parquet'")
    if not paths:
        raise InputError(f"no file matches {pattern}: check the path (quote a glob so that the shell leaves it alone)")
    return sorted(paths, key=_natural if natural else str)


def kind_of(path: Path) -> str:
    """Return the suffix that gives a file's type (`.csv` for `.csv.gz`). Raises InputError if the content differs."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check the path and the permissions") from None
    magic = _MAGIC.get(suffix)
    if magic is not None and not head.startswith(magic):
        raise InputError(f"{path} is not what its name says: it does not begin like a {suffix} file; check or rename it")
    if suffix == ".gz":
        return Path(path.stem).suffix.lower()
    if magic is None and b"\0" in head:
        raise InputError(f"{path} is not what its name says: it holds binary data, not text; check or rename it")
    return suffix


def open_table(
    duck: Duck,
    pattern: str,
    stage: Path,
    header: bool | None = None,
    names: tuple[str, ...] = (),
    progress: Progress = silent,
) -> Table:
    """Open a table of Parquet or text files; text is staged below `stage`. `names` are columns a header would have.

    Raises InputError for a file that is not a table, is damaged, or lacks columns of the first one.
    """
    files: list[TableFile] = []
    columns: dict[str, str] = {}
    kinds, headed = set[bool](), True
    for index, path in enumerate(find(pattern)):
        suffix = kind_of(path)
        if suffix not in TABLES:
            raise InputError(f"{path} is no table: Parquet (.parquet), CSV or TSV (.csv, .tsv, .txt, also .gz) go")
        if suffix in EDGE_LISTS:
            staged, headed = stage / f"{index:05d}.parquet", False
            file, there = _edge_list(duck, path, staged, progress)
        elif suffix in (".parquet", ".pq"):
            file, there = _parquet_file(path)
        else:
            staged = stage / f"{index:05d}.parquet"
            file, there, headed = _text_file(duck, path, staged, header, names, progress)
        kinds.add(file.first_line is not None)
        if len(kinds) > 1:
            raise InputError(f"{pattern} matches both Parquet and text files: give one kind")
        if index and list(there) != list(columns) and not set(columns) <= set(there):
            missing = next(each for each in columns if each not in there)
            hint = text.NO_HEADER if headed and file.first_line is not None else ""
            raise InputError(f"{path} has no column {missing!r}, which {files[0].shown} has: files of a table must agree{hint}")
        _refuse_other_types(path, there, files[0].shown if files else "", columns)
        if not index:
            columns = there
        files.append(file)
    return Table(tuple(files), columns, kinds == {True}, headed)


_FAMILIES = {
    "whole numbers": ("int", "uint"),
    "numbers": ("float", "double", "halffloat", "decimal"),
    "times": ("date", "timestamp"),
}
"""Arrow types that are converted into each other without loss, or with an error"""


def _refuse_other_types(path: Path, there: dict[str, str], shown: str, columns: dict[str, str]) -> None:
    """Raise InputError for a column that DuckDB would round, or read as text, to fit the type it has in the first file."""
    for name, kind in columns.items():
        one, other = _family(kind), _family(there[name])
        if one != other and other != "null" and (one, other) != ("numbers", "whole numbers"):
            have = f"holds {there[name]}, but {kind} in {shown}"
            raise InputError(f"{path} column {name!r} {have}: files of a table must agree; write it alike")


def _family(kind: str) -> str:
    if kind in TEXT_TYPES:
        return "text"
    return next((family for family, kinds in _FAMILIES.items() if kind.startswith(kinds)), kind)


def first(duck: Duck, table: Table, condition: str, columns: list[str]) -> tuple[Any, ...] | None:
    """Return (position, values of `columns`) of the first row of `table` that meets an SQL condition, or None.

    The condition filters an aggregate instead of rows, because DuckDB would use Parquet statistics, which ignore NaN.
    """
    position = duck.one(f"SELECT min({table.position()}) FILTER (WHERE {condition}) FROM {table.relation()}")[0]
    if position is None:
        return None
    shown = ", ".join(sql.name(column) for column in columns)
    return int(position), *duck.one(f"SELECT {shown} FROM {table.relation()} WHERE {table.position()} = {position}")


def _parquet_file(path: Path) -> tuple[TableFile, dict[str, str]]:
    try:
        with pq.ParquetFile(path.absolute()) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged or no Parquet file: {str(error).splitlines()[0][:200]}") from None
    text.refuse_equal_names(path, schema.names)
    return TableFile(str(path), str(path.resolve()), rows), {field.name: str(_held(field.type)) for field in schema}


def _held(kind: pa.DataType) -> pa.DataType:
    """The value type of a column, ignoring dictionary encoding."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _text_file(
    duck: Duck, path: Path, staged: Path, header: bool | None, names: tuple[str, ...], progress: Progress
) -> tuple[TableFile, dict[str, str], bool]:
    delimiter, columns, headed = text.sniff(path, header, names)
    skip = text.lines_before(path)
    types = "{" + ", ".join(f"{sql.text(each)}: 'VARCHAR'" for each in columns) + "}"
    options = f"delim = {sql.text(delimiter)}, header = {headed}, columns = {types}, auto_detect = false, skip = {skip}"
    options += ", null_padding = false, quote = '\"', escape = '\"'"
    source = f"SELECT * FROM {sql.csv(path, options)}"
    try:
        # a space at the end of a row is no field that is missing
        counted = (None if delimiter == " " else delimiter), len(columns), skip
        rows = text.checked(path, lambda: duck.copy(source, staged, True, progress, f"read {path.name}", 100), *counted)
    except InputError as error:
        line = re.search(r"Line: (\d+)", str(error))
        where = f"{path} line {line[1]}" if line else str(path)
        detail = re.sub(r".*?(Expected Number of Columns: \d+ Found: \d+).*", r"\1", str(error))
        raise InputError(f"{where} cannot be read: {detail[:200]}; correct the line") from error
    file = TableFile(str(path), str(staged.resolve()), rows, skip + (2 if headed else 1))
    return file, dict.fromkeys(columns, "string"), headed


def _edge_list(duck: Duck, path: Path, staged: Path, progress: Progress) -> tuple[TableFile, dict[str, str]]:
    """Stage an edge list without a header: lines of fields between blanks or tabs, comments behind # or %."""
    fields = text.fields_of_edge_list(path)
    options = "delim = '\x01', header = false, columns = {line: 'VARCHAR'}, auto_detect = false, quote = '', escape = ''"
    lines = f"SELECT trim(line, ' \t\r') AS line FROM {sql.csv(path, options)}"
    rows = f"SELECT line, string_split_regex(line, '[ \t]+') AS f FROM ({lines}) WHERE regexp_matches(line, '^[^#%]')"
    wrong = f"error('the line ' || line || ' has ' || len(f) || ' fields, the first one {len(fields)}')"
    columns = [f"column{i}" for i in range(len(fields))]
    taken = ", ".join(f"f[{i + 1}] AS {column}" for i, column in enumerate(columns))
    source = f"SELECT {taken} FROM (SELECT CASE WHEN len(f) = {len(fields)} THEN f ELSE {wrong} END AS f FROM ({rows}))"
    try:
        count = text.checked(path, lambda: duck.copy(source, staged, True, progress, f"read {path.name}", 100))
    except InputError as error:
        found = re.search(r"the line .* has \d+ fields, the first one \d+", str(error))
        raise InputError(f"{path}: {found[0] if found else str(error)[:200]}; correct the line") from error
    return TableFile(str(path), str(staged.resolve()), count, text.edge_list_start(path)), dict.fromkeys(columns, "string")


def open_array(path: Path, shown: str | None = None) -> NDArray[Any]:
    """Memory-map an npy file, called `shown` in messages. Raises InputError for pickled objects, damage or another format."""
    if kind_of(path) != ".npy":
        raise InputError(f"{path} is no array: an .npy file is wanted")
    try:
        with np.errstate(over="ignore"):  # of huge shapes, which are refused
            return np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python, with many kinds of errors
        if "pickled" in str(error) or "Python objects" in str(error):
            message = "holds pickled objects, which are never loaded: save it as a plain number array"
        else:
            message = f"is damaged or truncated: {' '.join(str(error).split())[:200] or type(error).__name__}"
        raise InputError(f"{shown or path} {message}") from None


def read_items(array: NDArray[Any], start: int, count: int) -> NDArray[Any]:
    """Read items start..start+count-1 of a C-contiguous array in memory order and native byte order.

    Memory-mapped files are read with plain reads: mapped pages would count as the process's memory and be slow. Raises
    InputError if the file ends earlier.
    """
    if isinstance(array, np.memmap) and array.filename is not None:
        offset = array.offset + start * array.itemsize
        items = np.fromfile(array.filename, array.dtype, count, offset=offset)
        if len(items) < count:
            raise InputError(f"{array.filename} is truncated: it ends in item {start + len(items)} of {array.size}")
    else:
        items = array.reshape(-1)[start : start + count]
    return items.astype(items.dtype.newbyteorder("="), copy=False)


def read_rows(array: NDArray[Any] | LazyArray, start: int, count: int) -> NDArray[Any]:
    """Read rows start..start+count-1 of an array [N] or [N, F] in C or Fortran order, like `read_items`."""
    if isinstance(array, LazyArray):
        return array[start : start + count]
    if array.flags.c_contiguous:
        width = int(np.prod(array.shape[1:], dtype=np.int64))
        return read_items(array, start * width, count * width).reshape(count, *array.shape[1:])
    return np.stack([read_column(array, column, start, count) for column in range(array.shape[1])], axis=1)


def read_column(array: NDArray[Any], column: int, start: int, count: int) -> NDArray[Any]:
    """Read one column of these rows of an array [N, F]."""
    if array.T.flags.c_contiguous:
        return read_items(array.T, column * len(array) + start, count)
    return read_rows(array, start, count)[:, column]


def unpack_npz(path: Path, stage: Path) -> dict[str, Path]:
    """Return key -> npy file of each array of an npz (a zip of npy files), extracted so that they can be mapped."""
    kind_of(path)
    found = {}
    stage.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(path) as archive:
            for index, member in enumerate(archive.namelist()):
                target = stage / f"{index:03d}.npy"
                with archive.open(member) as source, target.open("wb") as sink:
                    while piece := source.read(1 << 22):
                        sink.write(piece)
                found[member.removesuffix(".npy")] = target
    except (zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path} is damaged or no npz file: {error}") from None
    except (RuntimeError, NotImplementedError) as error:  # how zipfile says that it is encrypted, or of an unknown kind
        raise InputError(f"{path} cannot be unpacked: {error}; save it with numpy.savez") from None
    return found


def check_edges(edges: NDArray[Any] | LazyArray, shown: str) -> None:
    """Raise InputError for an array that holds no edges."""
    if edges.dtype.kind not in "iu" or edges.ndim != 2 or 2 not in edges.shape:
        raise InputError(f"{shown} holds {edges.dtype} {list(edges.shape)}: edges are whole numbers [2, E] or [E, 2]")


def stage_edge_array(
    edges: NDArray[Any] | LazyArray, shown: str, staged: Path, columns: Mapping[str, NDArray[Any]] | None = None
) -> TableFile:
    """Write edges [2, E] or [E, 2] as a Parquet table with columns src and dst, and `columns`: weights or times, [E] each."""
    check_edges(edges, shown)
    ends_apart, count = edges.shape[0] == 2, edges.size // 2
    columns = columns or {}
    for name, values in columns.items():
        what = "weights" if name == "weight" else "times"
        if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
            raise InputError(f"{shown}: the {what} are {values.dtype}, not numbers of 64 bits or less; save them as float32")
        if values.shape != (count,):
            raise InputError(f"{shown}: {what} of shape {list(values.shape)} do not fit {count} edges")
    if not isinstance(edges, LazyArray) and not edges.flags.c_contiguous:
        edges, ends_apart = edges.T, not ends_apart
    kinds = {"src": edges.dtype, "dst": edges.dtype, **{name: values.dtype for name, values in columns.items()}}
    schema = pa.schema([(key, pa.from_numpy_dtype(kind.newbyteorder("="))) for key, kind in kinds.items()])
    staged.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(staged, schema, use_dictionary=False) as writer:
        for start in range(0, count, STAGED_ROWS):
            rows = min(STAGED_ROWS, count - start)
            if isinstance(edges, LazyArray):
                src, dst = read_ends(edges, start, rows)
            elif ends_apart:
                src, dst = read_items(edges, start, rows), read_items(edges, count + start, rows)
            else:
                src, dst = np.ascontiguousarray(read_items(edges, 2 * start, 2 * rows).reshape(rows, 2).T)
            part = {"src": src, "dst": dst, **{name: read_items(values, start, rows) for name, values in columns.items()}}
            writer.write_table(pa.table(part, schema=schema))
    return TableFile(shown, str(staged.resolve()), count)


def arrow_type(dtype: np.dtype[Any]) -> str:
    """Name of a numpy dtype in `Table.columns`."""
    return str(pa.from_numpy_dtype(dtype.newbyteorder("=")))


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]

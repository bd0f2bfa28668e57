"""Text tables: their lines as they are in the file, what their first line says, and what DuckDB passes over in them."""

import gzip
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, TextIO, TypeVar, cast

from ooc.stores.errors import InputError, OocError
from ooc.stores.ingest.lines import PIECE, LineCheck

DELIMITERS = "\t,;| "
NO_HEADER = ", or pass `header=False` if its first line is data"
"""for text tables whose first line was taken for a header"""
MOST_COLUMNS = 10_000
"""columns of a text table: DuckDB's time grows with their square (measured: 10 s for 16,000)"""
LINE_CHARACTERS = 1 << 20
"""longest line that is looked at"""
_NO_EDGE = re.compile(r"\s*($|[#%])")
_NO_ROW = re.compile(r"\s*$|#\s")
"""a blank line or a comment; `#word` may be an id"""
T = TypeVar("T")


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a text file, also a gzipped one, behind its byte order mark. Raises InputError if it is damaged or no UTF-8 text."""
    with _damage(path), (gzip.open if is_gzip(path) else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield cast(TextIO, file)


def is_gzip(path: Path) -> bool:
    """Whether a file is compressed, by its name."""
    return path.suffix.lower() == ".gz"


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise InputError(f"{path} is truncated: its compressed data ends early; fetch it again") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is damaged: its compressed data cannot be read ({error}); fetch it again") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} is not what its name says: it is no UTF-8 text ({error})") from None


def checked(path: Path, read: Callable[[], T], delimiter: str | None = None, columns: int = 0, skip: int = 0) -> T:
    """Return `read()`, in which DuckDB reads a text file, while a thread looks for what DuckDB passes over.

    That is a wrong checksum of a gzipped file, and what `LineCheck` finds, whose arguments the others are. Raises InputError.
    """
    stopped = threading.Event()
    check = LineCheck(path, partial(_bytes_of, path), delimiter, columns, skip)
    with ThreadPoolExecutor(1, "ooc-ingest-check") as pool:
        found = pool.submit(_check, path, check, stopped)
        try:
            result = read()
        except OocError:  # as what damage appears to DuckDB
            found.result()
            raise
        except BaseException:
            stopped.set()
            raise
        found.result()
    return result


def _bytes_of(path: Path) -> BinaryIO:
    return cast(BinaryIO, (gzip.open if is_gzip(path) else open)(path, "rb"))


def _check(path: Path, check: LineCheck, stopped: threading.Event) -> None:
    with _damage(path), _bytes_of(path) as file:
        while not stopped.is_set() and (piece := file.read(PIECE)):
            check.add(piece)
        if not stopped.is_set():
            check.finish()


def lines_before(path: Path) -> int:
    """Number of blank lines and `# ` comments (as in SNAP's files) before the first row or header."""
    with opened(path) as file:
        return sum(1 for _ in takewhile(_NO_ROW.match, file))


def edge_list_start(path: Path) -> int:
    """Number of the first line of an edge list that is no comment, from 1."""
    with opened(path) as file:
        return 1 + sum(1 for _ in takewhile(_NO_EDGE.match, file))


def fields_of_edge_list(path: Path) -> list[str]:
    """The fields of an edge list's first line, [] if it has none. Raises InputError for attributes written as a dictionary."""
    with opened(path) as file:
        fields = next((line.split() for line in file if not _NO_EDGE.match(line)), [])
    if not fields:
        raise InputError(f"{path} is empty: it has no rows")
    if len(fields) < 2 or any(field.startswith("{") for field in fields):
        advice = "an edge is a source, a destination, and further fields (in NetworkX: write_edgelist(..., data=['weight']))"
        raise InputError(f"{path}: {' '.join(fields)[:100]!r} is no edge; {advice}")
    return fields


def sniff(path: Path, header: bool | None = None, names: tuple[str, ...] = ()) -> tuple[str, list[str], bool]:
    """Return the delimiter, the column names, and whether the first line of a text table is a header.

    The delimiter is the first of tab, comma, semicolon, bar and space that occurs equally often in the first lines. A first
    line with one of `names`, or without any number, is a header; columns without one are column0, column1, ...
    """
    lines = _first_lines(path)
    counts = {each: {line.count(each) for line in lines} for each in DELIMITERS}
    even = [each for each, found in counts.items() if len(found) == 1 and found != {0}]
    some = [each for each in DELIMITERS if lines[0].count(each)]
    delimiter = (even or some or [","])[0]
    fields = [field.strip().strip('"') for field in lines[0].split(delimiter)]
    headed = header if header is not None else bool(set(names) & set(fields)) or not any(map(_is_number, fields))
    columns = fields if headed else [f"column{i}" for i in range(len(fields))]
    if len(columns) > MOST_COLUMNS:
        raise InputError(
            f"{path} has {len(columns):,} columns, and a text table at most {MOST_COLUMNS:,}: save them as an npy array"
        )
    if headed:
        refuse_equal_names(f"{path} line 1", columns, NO_HEADER)
    return delimiter, columns, headed


def _first_lines(path: Path) -> list[str]:
    """The first 50 lines, without blank ones and comments. Raises InputError if there are none, or one is very long."""
    with opened(path) as file:
        found = [file.readline(LINE_CHARACTERS) for _ in range(50)]
    long = next((number for number, line in enumerate(found, 1) if len(line) == LINE_CHARACTERS), None)
    if long is not None:
        raise InputError(f"{path} line {long} has a million characters or more: it is no table; save wide rows as an npy array")
    lines = [line.rstrip("\r\n") for line in found if not _NO_ROW.match(line)]
    if not lines:
        raise InputError(f"{path} is empty: it has no rows")
    return lines


def refuse_equal_names(where: Path | str, names: list[str], hint: str = "") -> None:
    """Raise InputError for a column that is named twice; in DuckDB names that differ in upper and lower case are equal."""
    known: dict[str, str] = {}
    for name in names:
        other = known.get(name.lower())
        if other is not None:
            case = "" if other == name else f" ({other!r} and {name!r}: upper and lower case are the same)"
            raise InputError(f"{where} names a column twice{case}: {', '.join(names)[:200]}; rename one{hint}")
        known[name.lower()] = name


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True

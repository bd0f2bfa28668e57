"""Lines of text tables that DuckDB drops or shortens silently: very long ones, and rows with more delimiters than columns."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import InputError
from ooc.stores.jit import kernel
from ooc.stores.sizes import format_bytes

LINE_BYTES = 2_000_000
"""Longest line of a text table, given to DuckDB as `max_line_size`. It drops a last line longer than its buffer, which has
16 times as much."""
PIECE = 1 << 20
"""bytes read at once; fewer than LINE_BYTES, so that a line within a piece is short"""
_SHOWN = 60
_CR, _LF, _QUOTE = 13, 10, 34
_BEGINS, _FIELDS, _LINE, _BEGAN, _STATE = 2, 3, 5, 8, 9
"""places in the state of `_find_surplus`: whether a field begins, fields of the row, number and place of its first line"""
Open = Callable[[], AbstractContextManager[BinaryIO]]


class LineCheck:
    """Checks a text table, whose bytes pass through `add`.

    Args:
        path: Its name in messages.
        open_file: Opens it for reading its bytes, decompressed.
        delimiter: Between the fields of a row; None if rows may end with one.
        columns: Number of columns.
        skip: Lines before the header or first row.

    >>> check = LineCheck(path, lambda: path.open("rb"), ",", columns=2)
    >>> with path.open("rb") as file:
    ...     while piece := file.read(PIECE):
    ...         check.add(piece)
    >>> check.finish()
    """

    def __init__(self, path: Path, open_file: Open, delimiter: str | None, columns: int = 0, skip: int = 0) -> None:
        self._path, self._open = path, open_file
        self._delimiter = -1 if delimiter is None else ord(delimiter)
        self._columns, self._skip = columns, skip
        self._end, self._ended = b"\n", False
        self._lines, self._length, self._last = 0, 0, -1
        self._empty_last_fields = False

    def add(self, piece: bytes) -> None:
        """Raise InputError for a line that is too long. `piece`: at most PIECE bytes."""
        if not self._ended and (b"\n" in piece or b"\r" in piece[:-1]):
            self._end, self._ended = b"\n" if b"\n" in piece else b"\r", True
        first = piece.find(self._end)
        if self._length + (len(piece) if first < 0 else first) > LINE_BYTES:
            raise InputError(
                f"{self._path} line {self._lines + 1} is longer than {format_bytes(LINE_BYTES)}: it is no row of a table; "
                "check the file's line ends and quotes, or save wide rows as an npy array"
            )
        self._length = self._length + len(piece) if first < 0 else len(piece) - 1 - piece.rfind(self._end)
        lines, found = _survey(np.frombuffer(piece, np.uint8), self._end[0], self._delimiter, self._last)
        self._lines += lines
        self._empty_last_fields |= found
        self._last = piece[-1]

    def finish(self) -> None:
        """Raise InputError for a row with more delimiters than columns have; call it after the last piece."""
        if self._empty_last_fields or self._last == self._delimiter >= 0:
            state = np.zeros(_STATE, np.int64)
            state[_BEGINS] = state[_FIELDS] = 1
            counted = self._end[0], self._delimiter, self._columns, self._skip
            for piece in self._pieces():
                if _find_surplus(np.frombuffer(piece, np.uint8), *counted, state):
                    raise self._surplus(state)

    def _pieces(self) -> Iterator[bytes]:
        with self._open() as file:
            while piece := file.read(PIECE):
                yield piece
        yield self._end  # ends a last line without one

    def _surplus(self, state: NDArray[np.int64]) -> InputError:
        with self._open() as file:
            file.seek(int(state[_BEGAN]))
            row = file.readline(_SHOWN).decode(errors="replace").rstrip("\r\n")
        return InputError(
            f"{self._path} line {state[_LINE] + 1}: the row {row!r} ends with a delimiter and has {state[_FIELDS]} fields for "
            f"{self._columns} columns; remove it, or name the last column too"
        )


@kernel
def _survey(piece: NDArray[np.uint8], end: int, delimiter: int, last: int) -> Any:
    """Return the number of line ends, and whether a line ends with a delimiter. `last` is the byte before the piece."""
    lines = found = 0
    for i in range(len(piece) - 1):
        after = piece[i + 1]
        lines += piece[i] == end
        found += (piece[i] == delimiter) & ((after == _LF) | (after == _CR))
    if len(piece):
        lines += piece[-1] == end
        found += (last == delimiter) & ((piece[0] == _LF) | (piece[0] == _CR))
    return lines, found > 0


@kernel
def _find_surplus(
    piece: NDArray[np.uint8], end: int, delimiter: int, columns: int, skip: int, state: NDArray[np.int64]
) -> bool:
    """Whether a row that ends in the piece has more fields than columns and an empty last one; `state` then says where it is.

    Rows with quotes inside of unquoted fields are left out, as readers differ in what they mean.
    """
    quoted, after_quote, begins, fields, odd, line, last, offset, began = state
    found = False
    for i in range(len(piece)):
        here = piece[i]
        offset += 1
        if line < skip or (quoted and here != _QUOTE):
            line += here == end
            began = began if quoted else offset
        elif here == _QUOTE:
            odd |= not (quoted or after_quote or begins)
            quoted, after_quote = begins or after_quote, quoted
            begins, last = 0, here
        elif here == end:
            if fields > columns and last == delimiter and not odd:
                found = True
                break
            line, began = line + 1, offset
            after_quote, begins, fields, odd, last = 0, 1, 1, 0, 0
        elif here != _CR:
            odd |= after_quote and here != delimiter
            begins = here == delimiter
            fields += begins
            after_quote, last = 0, here
    state[:] = quoted, after_quote, begins, fields, odd, line, last, offset, began
    return found

"""`JoinedRows`: the rows of several arrays as one, one array behind the other."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.rows import AnyArray, Ids, Rows, check_request
from ooc.stores.io.threads import Background
from ooc.stores.jit import kernel

_ALIGN = 8
"""bytes that a row's length is a multiple of, where parts differ, so that each part's values are aligned"""


class JoinedRows(Background):
    """The rows of `parts` (name -> Rows), numbered one part behind the other: row i of a part is row `begin[name] + i`.

    Where all parts have rows of one dtype and shape, so have these. Otherwise a row is uint8[width], as wide as the widest
    part's, and begins with the bytes of the part's row; `view` and `take` give them as the part has them.

    >>> joined = JoinedRows({"author": authors, "paper": papers})
    >>> joined.read(joined.begin["paper"] + np.array([4, 7]), out)
    """

    def __init__(self, parts: Mapping[str, Rows]) -> None:
        self.parts = dict(parts)
        counts = [rows.shape[0] for rows in self.parts.values()]
        self._ends = np.cumsum(counts)
        self.begin = {name: int(end) - count for name, end, count in zip(self.parts, self._ends, counts, strict=True)}
        kinds = {(rows.dtype, rows.shape[1:]) for rows in self.parts.values()}
        if len(kinds) == 1:
            self.dtype, row_shape = next(iter(kinds))
        else:
            widest = max((rows.row_bytes for rows in self.parts.values()), default=0)
            self.dtype, row_shape = np.dtype(np.uint8), (-(-widest // _ALIGN) * _ALIGN,)
        self.shape: tuple[int, ...] = (sum(counts), *row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, of the widest part."""
        return int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=np.int64))

    @property
    def even(self) -> bool:
        """Whether the rows of all parts are of the same length."""
        return len({rows.row_bytes for rows in self.parts.values()}) < 2

    def view(self, name: str, rows: AnyArray) -> AnyArray:
        """Rows of these ([n, *row shape]) as rows of the part `name`, over the same memory."""
        part = self.parts[name]
        if (rows.dtype, rows.shape[1:]) == (part.dtype, part.shape[1:]):
            return rows
        return rows[:, : part.row_bytes].view(part.dtype).reshape(len(rows), *part.shape[1:])

    def take(self, name: str, rows: AnyArray, at: NDArray[Any]) -> AnyArray:
        """A copy of rows[at] as rows of the part `name`: [n, *row shape of the part]; at: int32|int64[n], in range."""
        if rows.dtype != np.uint8 or rows.ndim != 2:  # all parts have these rows
            return np.take(rows, at, axis=0)
        out = np.empty((len(at), self.parts[name].row_bytes), np.uint8)
        _copy_rows(rows, at, out)
        return self.view(name, out)

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """Set out[i], or out[at[i]], to row ids[i]; see `Rows.read`. Each part plans its own reads."""
        check_request(self, ids, out, at)
        of = np.searchsorted(self._ends, ids, side="right")
        nbytes = 0
        for number, (name, part) in enumerate(self.parts.items()):
            mine = np.flatnonzero(of == number)
            if len(mine):
                row, place = ids[mine] - self.begin[name], mine if at is None else at[mine]
                nbytes += self._read_part(name, part, row, out, place)
        return nbytes

    def _read_part(self, name: str, part: Rows, row: Ids, out: AnyArray, place: Ids) -> int:
        own = self.view(name, out)
        if own.flags.c_contiguous:
            return part.read(row, own, place)
        values = np.empty((len(row), *part.shape[1:]), part.dtype)
        nbytes = part.read(row, values)
        own[place] = values
        return nbytes

    def close(self) -> None:
        """Close all parts; idempotent."""
        self._end_background()
        for part in self.parts.values():
            part.close()


@kernel
def _copy_rows(rows: NDArray[np.uint8], at: NDArray[Any], out: NDArray[np.uint8]) -> None:
    """out[i] = the first bytes of rows[at[i]]: uint8[count, width], int32|int64[n], uint8[n, at most width]."""
    for i in range(len(at)):
        out[i, :] = rows[at[i], : out.shape[1]]

"""`DeltaRows`: rows of an array with some of them new or changed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.array_names import NODE
from ooc.stores.arrays.rows import AnyArray, Ids, Rows, check_request
from ooc.stores.io.threads import Background

DELTA_ROWS, DELTA_VALUES = "row", "value"
"""arrays of a view: the new or changed rows, ascending, and their values"""


def delta_array(name: str, what: str, node_type: str = NODE) -> str:
    """Path of such an array: `delta_array("x", DELTA_ROWS)` is `"delta/x/row"`, of a type of several `"delta/paper/x/row"`."""
    return f"delta/{name}/{what}" if node_type == NODE else f"delta/{node_type}/{name}/{what}"


class DeltaRows(Background):
    """`new` overlaid on `old`: row `row[i]` is new row i, any other the old one.

    `row` is int64[d], ascending, possibly memory-mapped. Each side plans its own reads.

    >>> DeltaRows(old, new, np.array([3, 1000]), count=1001).read(ids, out)
    """

    def __init__(self, old: Rows, new: Rows, row: NDArray[np.int64], count: int) -> None:
        """`count` is the total number of rows; those after the old ones must all be in `row`."""
        self.old, self.new, self._row = old, new, row
        self.shape: tuple[int, ...] = (count, *old.shape[1:])
        self.dtype: np.dtype[Any] = old.dtype
        self.attributes: dict[str, Any] = dict(getattr(old, "attributes", {}))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored."""
        return self.old.row_bytes

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """Set out[i] to row ids[i]; see `Rows.read`. Returns the bytes read from disk."""
        check_request(self, ids, out, at)
        found = np.searchsorted(self._row, ids)
        is_new = found < len(self._row)
        is_new[is_new] = self._row[found[is_new]] == ids[is_new]
        if not is_new.any():
            return self.old.read(ids, out, at)
        place = np.arange(len(ids)) if at is None else at
        nbytes = self.old.read(ids[~is_new], out, place[~is_new])
        return nbytes + self.new.read(found[is_new], out, place[is_new])

    def close(self) -> None:
        """Close both sides; idempotent."""
        self._end_background()
        self.old.close()
        self.new.close()

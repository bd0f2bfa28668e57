"""What a verb returns of all nodes: rows to be indexed, or what was written."""

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores.arrays.rows import AnyArray, Rows
from ooc.stores.sizes import format_bytes


@dataclass(frozen=True)
class WrittenRows:
    """What was written, and the bytes read and written for it; reading: how features were read, by which engine and why;
    method: how the rows were computed; of: what each row is of, "nodes", "edges" or "graphs"."""

    path: Path
    rows: int
    columns: int
    bytes_read: int
    bytes_written: int
    reading: str
    method: str = ""
    of: str = "nodes"

    @property
    def moved(self) -> str:
        """What was read and written, for people."""
        moved = f"{format_bytes(self.bytes_read)} read, {format_bytes(self.bytes_written)} written"
        return "; ".join(filter(None, [moved, self.reading and f"features by {self.reading}", self.method]))


class NodeRows:
    """float32 rows of all nodes [N, columns], in memory or in a temporary folder; indexed as an array, by node.

    `rows[ids]` (an integer, a slice, ids or a boolean mask) are read when they are asked for; `np.asarray(rows)` reads all of
    them. `close`, or the end of a `with` block, removes what is on disk; so does garbage collection.
    """

    def __init__(self, rows: Rows, release: Any) -> None:
        self._rows = rows
        self.shape: tuple[int, ...] = rows.shape
        self.dtype = np.dtype(rows.dtype)
        self._release = weakref.finalize(self, release)

    @property
    def rows(self) -> Rows:
        """The rows themselves."""
        return self._rows

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, nodes: Any) -> AnyArray:
        """Read rows by node. Raises IndexError for ids out of range."""
        if isinstance(nodes, slice):
            ids = np.arange(*nodes.indices(len(self)))
        else:
            ids = np.asarray(nodes)
            if ids.dtype == bool:
                if ids.shape != self.shape[:1]:
                    raise IndexError(f"the mask has shape {ids.shape}: it must have one entry per node, ({len(self)},)")
                ids = np.flatnonzero(ids)
            elif ids.dtype.kind not in "iu" and ids.size:
                raise IndexError(f"rows are indexed by node ids, not by {ids.dtype}")
        flat = ids.reshape(-1).astype(np.int64)
        out = np.empty((len(flat), *self.shape[1:]), self.dtype)
        self._rows.read(np.where(flat < 0, flat + len(self), flat), out)
        return out.reshape(*ids.shape, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> AnyArray:
        return self[:] if dtype is None else self[:].astype(dtype)

    def close(self) -> None:
        """Release the rows; idempotent."""
        self._release()

    def __enter__(self) -> "NodeRows":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype})"

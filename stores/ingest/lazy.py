"""Arrays that are read a slice at a time, when their rows are needed: Zarr's, h5py's, Dask's, or the caller's own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ooc.stores.errors import InputError
from ooc.stores.io.threads import ahead

PIECE_ITEMS = 1 << 20
BATCH_EDGES = 1 << 20
SAMPLES, SAMPLE_ROWS = 64, 256
"""pieces of an array, and rows of each, that say whether it is the one of an interrupted ingest"""


class LazyArray:
    """An array of numbers behind an object with `shape`, `dtype` and slices, none of which is read before it is needed.

    Args:
        held: The object: `held[a:b]` are rows a..b-1; of edges [2, E], `held[:, a:b]` are both ends of edges a..b-1.
        name: What it is called in messages.

    >>> LazyArray(zarr.open_array("x.zarr"), "x")[10:12].shape
    (2, 128)
    """

    def __init__(self, held: Any, name: str = "an array") -> None:
        self._held, self.name = held, name
        self.shape: tuple[int, ...] = tuple(int(size) for size in held.shape)
        self.dtype: np.dtype[Any] = np.dtype(held.dtype)
        self.ndim, self.size = len(self.shape), int(np.prod(self.shape, dtype=np.int64))

    @staticmethod
    def fits(value: Any) -> bool:
        """Whether an object that is no array of NumPy or torch is one of numbers that can be read by slices."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if not hasattr(value, "__getitem__") or not isinstance(shape, tuple) or not shape:
            return False
        try:
            return all(size == int(size) for size in shape) and np.dtype(dtype).kind in "fiub"
        except (TypeError, ValueError, OverflowError):
            return False

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | tuple[slice, ...]) -> NDArray[Any]:
        """Read a slice, in native byte order. Raises InputError if it has another shape or dtype than the array says."""
        slices = key if isinstance(key, tuple) else (key,)
        found = np.asarray(self._held[key])
        sizes = (len(range(*each.indices(size))) for each, size in zip(slices, self.shape, strict=False))
        expected = (*sizes, *self.shape[len(slices) :])
        if found.shape != expected or found.dtype != self.dtype:
            where = ", ".join(f"{each.start or 0}:{each.stop}" if each.stop is not None else ":" for each in slices)
            said, read = f"{self.dtype} {list(expected)}", f"{found.dtype} {list(found.shape)}"
            raise InputError(f"{self.name}[{where}] is {read}, but its shape and dtype say {said}: correct the object")
        return found.astype(found.dtype.newbyteorder("="), copy=False)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All items in the order of C, some rows at a time; of few long rows, parts of one."""
        width = self.size // len(self) if len(self) else 1
        if width > PIECE_ITEMS and self.ndim > 1:
            for row in range(len(self)):
                for first in range(0, self.shape[1], PIECE_ITEMS):
                    yield self[row : row + 1, first : first + PIECE_ITEMS]
            return
        step = max(1, PIECE_ITEMS // max(1, width))
        for first in range(0, len(self), step):
            yield self[first : min(first + step, len(self))]

    def sample(self) -> Iterator[NDArray[Any]]:
        """SAMPLES pieces, evenly spaced along the longer of the first two dimensions."""
        wide = self.ndim > 1 and self.shape[1] > len(self)
        count = self.shape[1] if wide else len(self)
        for first in np.unique(np.linspace(0, max(0, count - SAMPLE_ROWS), SAMPLES, dtype=np.int64)).tolist():
            part = slice(first, min(first + SAMPLE_ROWS, count))
            yield self[:, part] if wide else self[part]

    def whole(self) -> NDArray[Any]:
        """The array in memory."""
        return self[: len(self)]


class EdgeStream:
    """Edges [2, E] or [E, 2] as a table that DuckDB scans a batch at a time, as often as it is asked.

    Columns: src, dst, and `file_row_number`, as of a Parquet file. Whatever a slice raises is kept in `failure`, because DuckDB
    passes on no more than its text.
    """

    def __init__(self, edges: LazyArray) -> None:
        self._edges = edges
        kind = pa.from_numpy_dtype(edges.dtype.newbyteorder("="))
        self._schema = pa.schema([("src", kind), ("dst", kind), ("file_row_number", pa.int64())])
        self.failure: Exception | None = None

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        batches = pa.RecordBatchReader.from_batches(self._schema, self._batches())
        return batches.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from ahead(self._read())
        except Exception as error:
            self.failure = error
            raise

    def _read(self) -> Iterator[pa.RecordBatch]:
        for first in range(0, self._edges.size // 2, BATCH_EDGES):
            src, dst = read_ends(self._edges, first, BATCH_EDGES)
            columns = [src, dst, np.arange(first, first + len(src))]
            yield pa.record_batch([pa.array(column) for column in columns], schema=self._schema)


def read_ends(edges: LazyArray, first: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sources and destinations of `count` edges [2, E] or [E, 2] from `first` on, fewer at the end."""
    last = min(first + count, edges.size // 2)
    both = edges[:, first:last] if edges.shape[0] == 2 else edges[first:last].T
    return np.ascontiguousarray(both[0]), np.ascontiguousarray(both[1])

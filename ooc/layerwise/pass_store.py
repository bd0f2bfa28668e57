"""The values of a pass: rows by name, read ahead and written behind."""

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.ir import FEATURES, ValueRef
from ooc.layerwise.pass_plan import LayerwisePlan, ModelShape
from ooc.layerwise.program import files_of
from ooc.layerwise.row_files import Files, Kept, RowWriter
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import read_range
from stores.arrays.rows import Rows
from stores.dataset import Dataset


class RowReader:
    """Reads values in one dtype. dtype: of what is read; the features, as stored, are decoded."""

    def __init__(self, dataset: Dataset, dtype: np.dtype[Any], stats: IoStats, buffers: Buffers) -> None:
        self.dtype, self._dataset, self._stats, self._buffers = dtype, dataset, stats, buffers
        self._x: Rows = dataset.stored("x")

    def rows(self, name: str) -> Rows:
        """A value's rows, as they are stored."""
        raise NotImplementedError

    def read(self, name: str, first: int, stop: int) -> NDArray[Any]:
        """Rows first:stop in `dtype`; a view where they are in memory so. Thread-safe."""
        began = perf_counter()
        values, nbytes = read_range(self.rows(name), first, stop, self._buffers)
        self._stats.read(nbytes, began)
        encoding = self._dataset.encoding("x")
        if name == FEATURES.name and encoding.is_short:
            stored = values
            values = self._buffers.empty(stored.shape, np.dtype(np.float32))
            encoding.gather(stored, np.arange(len(stored)), values)
        return values.astype(self.dtype, copy=False)

    def gather(self, name: str, node: NDArray[np.int64]) -> NDArray[Any]:
        """The rows of some nodes (int64[n]), in `dtype`. Thread-safe."""
        rows, encoding, began = self.rows(name), self._dataset.encoding("x"), perf_counter()
        values = np.empty((len(node), *rows.shape[1:]), rows.dtype)
        self._stats.read(rows.read(node, values), began)
        if name == FEATURES.name and encoding.is_short:
            x = np.empty(values.shape, np.float32)
            encoding.gather(values, np.arange(len(node)), x)
            values = x
        return values.astype(self.dtype, copy=False)


class PassStore(RowReader):
    """The values of a forward pass in `files`, some of them in blocks of columns. A block goes by the name of its file.

    >>> store.put("rows1", 0, values)
    >>> store.read("rows1", 0, 8192)
    """

    def __init__(self, files: Files, dataset: Dataset, shape: ModelShape, plan: LayerwisePlan, stats: IoStats) -> None:
        super().__init__(dataset, np.dtype(np.float32), stats, Buffers(kept=8, direct=True, least_bytes=1))
        self._files, self._nodes = files, shape.num_nodes
        self._writer = RowWriter(stats.written)
        layers = range(len(shape.layers))
        refs = [ref for layer in (*layers, len(layers)) for ref in shape.made(layer) if ref != FEATURES]
        refs += [ValueRef("sums", layer) for layer in layers if shape.layers[layer].kind is not None]
        self._kept = {ref.name: files_of(shape, plan, ref) for ref in refs}
        self._columns = dict(own for kept in self._kept.values() for own in kept)

    def files_of(self, names: Iterable[str]) -> set[str]:
        """The files of some values."""
        return {file for name in names if name != FEATURES.name for file in self._blocks(name)}

    def _blocks(self, name: str) -> list[str]:
        return [file for file, _ in self._kept[name]] if name in self._kept else [name]

    def rows(self, name: str) -> Rows:
        """The features, or the rows of a value that is kept in one file."""
        return self._x if name == FEATURES.name else self.open(name)

    def open(self, name: str) -> Kept:
        """The rows of a value that is kept in one file, made where there are none."""
        (file,) = self._blocks(name)
        return self._files.rows(file, (self._nodes, self._columns[file]))

    def read(self, name: str, first: int, stop: int) -> NDArray[Any]:
        """See `RowReader.read`; blocks of columns side by side."""
        parts = [super(PassStore, self).read(file, first, stop) for file in self._blocks(name)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def put(self, name: str, first: int, values: NDArray[Any]) -> None:
        """Rows first, first + 1, ... of a value, in the background."""
        at = 0
        for file in self._blocks(name):
            columns = self._columns[file]
            self._writer.put(self.open(file), first, values[:, at : at + columns])
            at += columns

    def take(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array of any content, for sums."""
        return np.empty(shape, self.dtype)

    def give(self, array: NDArray[Any]) -> None:
        """Nobody needs an array of `take` any more."""

    def drain(self) -> None:
        """Wait until all is written. Raises StoreError where something could not be."""
        self._writer.drain()

    def close(self) -> None:
        """End the threads; idempotent."""
        self._writer.close()

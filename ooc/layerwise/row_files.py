"""Values over all nodes by name: files of rows, on disk or in memory, written behind and read ahead."""

import fcntl
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.layerwise.device_rows import DeviceRows
from ooc.layerwise.io_stats import IoStats, Noted, unnoted
from ooc.layerwise.node_ranges import NodeRange
from ooc.layerwise.pass_notes import Note, PassNotes
from ooc.layerwise.pass_plan import FEATURES, LayerwisePlan, ModelShape, ValueRef, files_of
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import MemoryRows, WriteBehind, read_range, write_range
from ooc.runtime.ranks import ALONE, Ranks
from ooc.runtime.transfer import HostCopy
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import disk_errors, remove_tree

MOST_KEPT = 64 * 2**20
"""of a buffer that waits for its next use, as those of chunks do; those of gathered ranges take what memory there is"""
_PENDING = 4
Array = NDArray[Any]
Kept = DiskRows | MemoryRows


class Files:
    """Rows by name, in a folder, or with `in_ram` in memory, where the folder only shows others that a process uses it.

    Several `ranks` have one folder, which rank 0 makes and removes rows in: `lock`, `make`, `keep_only`, `progress` and
    `forget` are called by all of them. own: the nodes whose rows this rank writes; None: all.
    """

    def __init__(
        self, folder: Path | None, engine: str, in_ram: bool = False, ranks: Ranks = ALONE, own: NodeRange | None = None
    ) -> None:
        self._own, self._engine, self._ranks = folder, engine, ranks
        self.folder = None if in_ram else folder
        self._notes, self._nodes = PassNotes(self.folder, ranks), own or (0, 0)
        self._rows: dict[str, Kept] = {}
        self._opening = threading.Lock()  # readers ask for the same rows at once: opened twice, one would never be closed
        self._lock: int | None = None
        self._has_folder = False

    def lock(self) -> None:
        """Have the folder, made where there is none, for this process until `close`. Raises StoreError where another has it."""
        if self._own is None or self._has_folder:
            return
        self._ranks.decided(partial(self._take_lock, self._own))
        self._has_folder = True

    def _take_lock(self, folder: Path) -> None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it with the process, however it ends
                taken = not os.path.samestat(os.fstat(descriptor), os.stat(folder))  # removed meanwhile
            except (BlockingIOError, FileNotFoundError):
                taken = True
        if taken:
            os.close(descriptor)
            raise StoreError(f"{folder}: another process computes there; wait for it, or choose another name")
        self._lock = descriptor

    def rows(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Kept:
        """The rows of that name, those an earlier process left where there are any. StoreError where the disk is full."""
        with self._opening:
            if name not in self._rows:
                self._rows[name] = self._open(name, shape, dtype)
            return self._rows[name]

    def _open(self, name: str, shape: tuple[int, ...], dtype: str) -> Kept:
        if self.folder is None:
            return MemoryRows.create(shape, dtype)
        path = self.folder / name
        if path.exists():
            try:
                found = DiskRows.open(path, self._engine)
            except StoreError as error:
                raise StoreError(f"{error}: remove {self.folder}, and it begins anew") from error
            if (found.shape, found.dtype) == (shape, np.dtype(dtype)):
                return found
            found.close()
            remove_tree(path)
        return DiskRows.create(path, shape, dtype, self._engine)

    def add_rows(self, name: str, rows: Kept) -> None:
        """Have rows of that name that were made elsewhere."""
        self._rows[name] = rows

    def opened(self, name: str) -> Kept | None:
        """The rows of that name where this process has opened them."""
        return self._rows.get(name)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are open."""
        return sum(math.prod(rows.shape) * rows.dtype.itemsize for rows in self._rows.values())

    def make(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Have rank 0 make rows of these names and shapes, before any rank opens them. One process makes its own in time."""
        if self._ranks.first and not self._ranks.alone:
            for name, shape in shapes.items():
                self.rows(name, shape)
        self._ranks.barrier()

    def drop(self, name: str) -> None:
        """Remove the rows of that name, where there are any."""
        if name in self._rows:
            self._rows.pop(name).close()
        if self.folder is not None and (self.folder / name).exists():
            remove_tree(self.folder / name)

    def keep_only(self, names: set[str]) -> None:
        """Remove all rows but these."""
        for name in [name for name in self._rows if name not in names]:
            self._rows.pop(name).close()
        self._ranks.barrier()
        if self._ranks.first and self.folder is not None and self.folder.exists():
            for path in list(self.folder.iterdir()):
                if path.is_dir() and path.name not in names:
                    remove_tree(path)

    def progress(self) -> list[Note]:
        """What every rank noted last, by rank; none where there is nothing (or nothing that can be read: the pass begins
        anew)."""
        return self._notes.read()

    def note(self, progress: Note, written: list[Kept]) -> None:
        """Keep how far this rank came, once the rows that were written for it are durable."""
        if self.folder is None:
            return
        for rows in written:
            rows.sync()
        self._notes.write(progress, self._nodes)

    def take_over(self) -> None:
        """Remove what another number of ranks noted, once all of these have noted where they go on."""
        self._notes.remove_others()

    def forget(self) -> None:
        """Remove the notes, before rows are changed otherwise than they say."""
        self._notes.forget()

    def discard(self) -> None:
        """Close all rows, and have rank 0 remove the folder; the others have read what they wanted of it."""
        self.close_rows()
        if self._ranks.first and self._own is not None:
            remove_tree(self._own)  # before another process may have it

    def close_rows(self) -> None:
        """Close all rows; the folder stays this process's."""
        while self._rows:
            self._rows.popitem()[1].close()

    def close(self) -> None:
        """Close all rows, and let go of the folder; idempotent."""
        self.close_rows()
        self._has_folder = False
        if self._lock is not None:
            lock, self._lock = self._lock, None
            if self.folder is None and self._own is not None:
                with suppress(OSError):  # what a process with less memory left there stays
                    if os.path.samestat(os.fstat(lock), os.stat(self._own)):  # and what is another's by now
                        self._own.rmdir()
            os.close(lock)


def copy(values: Array, into: Array) -> None:
    """Copy by all of torch's threads; one alone does not keep up with what computes."""
    torch.from_numpy(into).copy_(torch.from_numpy(values))


def as_array(values: Array | Tensor) -> Array:
    """Of a tensor in the host's memory, over the same memory."""
    return values if isinstance(values, np.ndarray) else values.numpy()


class RowWriter:
    """Writes chunks of rows in the background, a few at a time, from aligned copies of them. written: is called by the threads
    that write."""

    def __init__(self, written: Noted = unnoted) -> None:
        self._written = written
        self._writes = WriteBehind("ooc-write-rows", _PENDING)
        self._buffers = Buffers(kept=_PENDING, direct=True, least_bytes=1)

    def put(self, rows: Kept, first: int, values: NDArray[Any]) -> None:
        """Rows first, first + 1, ... are to become `values` [n, f], which may change once this returns."""
        if isinstance(rows, MemoryRows):
            copy(values, rows.array[first : first + len(values)])
            return
        self._writes.make_room()
        copied = self._buffers.empty(values.shape, rows.dtype)
        copy(values, copied)
        self._writes.submit(partial(self._write, rows, first, copied))

    def _write(self, rows: Kept, first: int, values: NDArray[Any]) -> None:
        began = perf_counter()
        self._written(write_range(rows, first, values), began)

    def drain(self) -> None:
        """Wait until all is written. Raises StoreError where something could not be."""
        self._writes.drain()

    def close(self) -> None:
        """End the threads; idempotent."""
        self._writes.close()


class RowStore:
    """Values by name, in one dtype. columns: of a row, by name; count: rows, by name, of those that have others than nodes.
    x: the feature rows, by default those of the store."""

    def __init__(
        self,
        dataset: Dataset,
        dtype: np.dtype[Any],
        columns: dict[str, int],
        stats: IoStats,
        buffers: Buffers,
        count: Mapping[str, int] = MappingProxyType({}),
        x: Rows | None = None,
    ) -> None:
        self.dtype, self._dataset, self._columns, self._stats, self._buffers = dtype, dataset, columns, stats, buffers
        self._nodes, self._count, self._writer = dataset.num_nodes, count, RowWriter(stats.written)
        self._x: Rows = dataset.stored("x") if x is None else x

    def open(self, name: str) -> Kept:
        """The rows of a value, made where there are none."""
        raise NotImplementedError

    def count(self, name: str) -> int:
        """Rows of a value."""
        return self._count.get(name, self._nodes)

    def rows(self, name: str) -> Rows:
        """A value's rows, as they are stored."""
        return self._x if name == FEATURES.name else self.open(name)

    def read(self, name: str, first: int, stop: int) -> Array:
        """Rows first:stop in `dtype`; a view where they are in memory so. Thread-safe."""
        began = perf_counter()
        values, nbytes = read_range(self.rows(name), first, stop, self._buffers)
        self._stats.read(nbytes, began)
        return self._decoded(name, values, self._buffers.empty)

    def gather(self, name: str, node: NDArray[np.int64]) -> Array:
        """The rows of some nodes (int64[n]), in `dtype`. Thread-safe."""
        rows, began = self.rows(name), perf_counter()
        values = np.empty((len(node), *rows.shape[1:]), rows.dtype)
        self._stats.read(rows.read(node, values), began)
        return self._decoded(name, values, np.empty)

    def _decoded(self, name: str, values: Array, empty: Callable[[tuple[int, ...], np.dtype[Any]], Array]) -> Array:
        encoding = self._dataset.encoding("x")
        if name == FEATURES.name and encoding.is_short:
            stored, values = values, empty(values.shape, np.dtype(np.float32))
            encoding.gather(stored, np.arange(len(stored)), values)
        return values.astype(self.dtype, copy=False)

    def device_rows(self, name: str) -> DeviceRows:
        """A value's rows on a device; of a store that has them there."""
        raise NotImplementedError

    def computed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What was computed, where the rows are; from a GPU's memory to the host's it is waited for."""
        return HostCopy(tensors).tensors()

    def tensor(self, values: Array | Tensor) -> Tensor:
        """Rows that were read, or other numbers of the host's, as a tensor where the rows are."""
        return torch.from_numpy(values) if isinstance(values, np.ndarray) else values

    def put(self, name: str, first: int, values: Array | Tensor) -> None:
        """Rows first, first + 1, ... of a value, in the background."""
        self._writer.put(self.open(name), first, as_array(values))

    def take(self, shape: tuple[int, ...]) -> Array:
        """An array of any content, for sums."""
        return np.empty(shape, self.dtype)

    def give(self, array: Array) -> None:
        """Nobody needs an array of `take` any more."""

    def drain(self) -> None:
        """Wait until all is written. Raises StoreError where something could not be."""
        self._writer.drain()

    def close(self) -> None:
        """End the threads; idempotent."""
        self._writer.close()


class PassStore(RowStore):
    """The float32 values of a forward pass in `files`, some of them in blocks of columns. A block goes by the name of its
    file. x: see `RowStore`."""

    def __init__(
        self, files: Files, dataset: Dataset, shape: ModelShape, plan: LayerwisePlan, stats: IoStats, x: Rows | None = None
    ) -> None:
        layers = range(len(shape.layers))
        refs = [ref for layer in (*layers, len(layers)) for ref in shape.made(layer) if ref != FEATURES]
        refs += [ValueRef("sums", layer) for layer in layers if shape.layers[layer].kind is not None]
        kept = {ref.name: files_of(shape, plan, ref) for ref in refs}
        columns = dict(own for each in kept.values() for own in each)
        super().__init__(dataset, np.dtype(np.float32), columns, stats, Buffers(kept=8, direct=True, least_bytes=1), x=x)
        self._files = files
        self._blocks = {name: [file for file, _ in own] for name, own in kept.items()} | {file: [file] for file in columns}

    def files_of(self, names: Iterable[str]) -> set[str]:
        """The files of some values."""
        return {file for name in names if name != FEATURES.name for file in self._blocks[name]}

    def make(self, names: Iterable[str]) -> None:
        """Have rank 0 make the files of some values, before any rank opens them."""
        self._files.make({file: (self._nodes, self._columns[file]) for file in sorted(self.files_of(names))})

    def open(self, name: str) -> Kept:
        """See `RowStore.open`; of a value that is kept in one file."""
        (file,) = self._blocks[name]
        return self._files.rows(file, (self._nodes, self._columns[file]))

    def read(self, name: str, first: int, stop: int) -> Array:
        """See `RowStore.read`; blocks of columns side by side."""
        parts = [super(PassStore, self).read(file, first, stop) for file in self._blocks.get(name, [name])]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def put(self, name: str, first: int, values: Array | Tensor) -> None:
        """See `RowStore.put`."""
        at = 0
        for file in self._blocks[name]:
            columns = self._columns[file]
            super().put(file, first, values[:, at : at + columns])
            at += columns

"""What a pass keeps: rows by name, on disk or in memory, and how far it came."""

import fcntl
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import MemoryRows, WriteBehind, write_range
from stores.arrays.mutable_rows import DiskRows
from stores.errors import StoreError
from stores.io.atomic import disk_errors, remove_tree, sync_dir, write_file

PROGRESS = "progress.json"
_PENDING = 4
Kept = DiskRows | MemoryRows
Noted = Callable[[int, float], None]
"""noted(bytes, when it began): what a thread read or wrote, once it is done"""


class Files:
    """Rows by name, in a folder, or with `in_ram` in memory, where the folder only tells others that a process is at it.

    >>> files = Files(Path("run/sweep"), "auto")
    >>> files.rows("out", (num_nodes, 32), "float32")
    """

    def __init__(self, folder: Path | None, engine: str, in_ram: bool = False) -> None:
        self._own, self._engine = folder, engine
        self.folder = None if in_ram else folder
        self._rows: dict[str, Kept] = {}
        self._opening = threading.Lock()  # readers ask for the same rows at once: opened twice, one would never be closed
        self._lock: int | None = None

    def lock(self) -> None:
        """Have the folder, made where there is none, for this process until `close`. Raises StoreError where another has it."""
        if self._own is None or self._lock is not None:
            return
        with disk_errors(self._own):
            self._own.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._own, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it with the process, however it ends
                taken = not os.path.samestat(os.fstat(descriptor), os.stat(self._own))  # removed meanwhile
            except (BlockingIOError, FileNotFoundError):
                taken = True
        if taken:
            os.close(descriptor)
            raise StoreError(f"{self._own}: another process computes there; wait for it, or choose another name")
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
        return sum(int(np.prod(rows.shape, dtype=np.int64)) * rows.dtype.itemsize for rows in self._rows.values())

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
        if self.folder is not None and self.folder.exists():
            for path in list(self.folder.iterdir()):
                if path.is_dir() and path.name not in names:
                    remove_tree(path)

    def progress(self) -> dict[str, Any] | None:
        """What `note` kept last; None where there is nothing (or nothing that can be read: the pass begins anew)."""
        if self.folder is None or not (self.folder / PROGRESS).exists():
            return None
        try:
            found: dict[str, Any] = json.loads((self.folder / PROGRESS).read_bytes())
            return found
        except ValueError:
            return None

    def note(self, progress: dict[str, Any], written: list[Kept]) -> None:
        """Keep how far the pass came, once the rows that were written for it are durable."""
        if self.folder is None:
            return
        for rows in written:
            rows.sync()
        write_file(self.folder / PROGRESS, json.dumps(progress).encode() + b"\n")

    def forget(self) -> None:
        """Before rows are changed otherwise than the last note goes on from: after a crash they are not what it says."""
        if self.folder is not None and (self.folder / PROGRESS).exists():
            (self.folder / PROGRESS).unlink()
            sync_dir(self.folder)

    def close_rows(self) -> None:
        """Close all rows; the folder stays this process's."""
        while self._rows:
            self._rows.popitem()[1].close()

    def close(self) -> None:
        """Close all rows, and let go of the folder; idempotent."""
        self.close_rows()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            if self.folder is None and self._own is not None:
                with suppress(OSError):  # what a process with less memory left there stays
                    if os.path.samestat(os.fstat(lock), os.stat(self._own)):  # and what is another's by now
                        self._own.rmdir()
            os.close(lock)


class RowWriter:
    """Writes chunks of rows in the background, a few at a time, from aligned copies of them."""

    def __init__(self, written: Noted = lambda nbytes, began: None) -> None:
        """written: is called with what was written (bytes, and when it began), in the threads that write."""
        self._written = written
        self._writes = WriteBehind("ooc-write-rows", _PENDING)
        self._buffers = Buffers(kept=_PENDING, direct=True, least_bytes=1)

    def put(self, rows: Kept, first: int, values: NDArray[Any]) -> None:
        """Rows first, first + 1, ... are to become `values` [n, f], which may change once this returns."""
        if isinstance(rows, MemoryRows):
            write_range(rows, first, values)
            return
        self._writes.make_room()
        copy = self._buffers.empty(values.shape, rows.dtype)
        copy[:] = values
        self._writes.submit(lambda: self._write(rows, first, copy))

    def _write(self, rows: Kept, first: int, values: NDArray[Any]) -> None:
        began = perf_counter()
        self._written(write_range(rows, first, values), began)

    def drain(self) -> None:
        """Wait until all is written. Raises StoreError where something could not be."""
        self._writes.drain()

    def close(self) -> None:
        """End the threads; idempotent."""
        self._writes.close()

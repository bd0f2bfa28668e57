"""LMDB records as Rows: keys are big-endian uint64 rows, values the raw bytes of a row."""

import os
import struct
import threading
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import DTypeLike

from ooc.stores.arrays.rows import AnyArray, Ids, check_request
from ooc.stores.errors import StoreError
from ooc.stores.io.bus_errors import Watched
from ooc.stores.io.engines.tasks import Gate
from ooc.stores.io.segments import forget_map, map_of
from ooc.stores.io.threads import Background

_BATCH_ROWS = 4096
_KEY = struct.Struct(">Q")
MAPPED_BYTES = 2**26
"""most mapped pages that a read keeps in the process"""
_AROUND_BYTES = 3 * 2**16
"""a fault maps cached pages of the 64 KiB around it; a record and its key may lie in three such parts"""
SPARE_BYTES = 2**26
"""map size beyond twice the rows; it grows if needed, and the file only takes what is written"""
_File = tuple[int, int]
"""device and inode: a path may lead to another file later (a store built again), and two to the same one (hard links)"""
_lock = threading.Lock()
_open: dict[_File, tuple["lmdb.Environment", int, Watched | None]] = {}
"""environment, its users, and its map, in which a page that cannot be read ends the process with one line"""


class Environment:
    """A reference to the shared environment of a file; `.env` is the lmdb.Environment. Close it after use."""

    def __init__(self, file: _File, env: "lmdb.Environment", path: Path) -> None:
        self.env = env
        self._file: _File | None = file
        self._map = map_of(path)

    def forget(self) -> None:
        """Unmap what was read from this process (it stays in the page cache), which would otherwise be the whole file."""
        if self._map is not None:
            forget_map(*self._map)

    def close(self) -> None:
        """Drop the reference; the last user closes the environment. Idempotent."""
        with _lock:
            if self._file is None:
                return
            env, users, watched = _open[self._file]
            if users == 1:
                del _open[self._file]
                if watched is not None:
                    watched.close()
                env.close()
            else:
                _open[self._file] = env, users - 1, watched
            self._file = None


def environment(path: Path | str) -> Environment:
    """Return the read-only environment at `path`, shared by all users in the process, because LMDB forbids opening one twice.

    What is put at `path` later is another environment. Opened without a lock file, so the store may be on read-only media; it
    must not be written meanwhile. Raises StoreError if there is none.

    >>> ids = environment("papers.ooc/ids.lmdb")
    >>> with ids.env.begin(db=ids.env.open_db(b"node")) as txn: ...
    >>> ids.close()
    """
    data = _data(path)
    with _lock:
        try:
            file = _file_of(data)
            env, users, watched = _open.get(file, (None, 0, None))
            if env is None:
                subdir = data != Path(path)
                env = lmdb.open(str(path), readonly=True, lock=False, create=False, readahead=False, max_dbs=64, subdir=subdir)
                found = map_of(data)
                watched = None if found is None else Watched(*found, data, checked=False)
        except (lmdb.Error, OSError) as error:
            detail = error.strerror if isinstance(error, OSError) else error
            raise StoreError(f"{path} cannot be opened as an LMDB environment: {detail}") from error
        _open[file] = env, users + 1, watched
        return Environment(file, env, data)


def _data(path: Path | str) -> Path:
    """The file of the environment at `path`, a directory or the file itself."""
    return Path(path, "data.mdb") if os.path.isdir(path) else Path(path)


def _file_of(data: Path) -> _File:
    found = data.stat()
    return found.st_dev, found.st_ino


class LmdbRows(Background):
    """Rows stored as LMDB records, for sparse rows or rows written by others.

    Args:
        path: The environment.
        name: Name of the database in it; None for the main one.
        dtype: Dtype of the rows.
        shape: [count, *row shape].

    Raises:
        StoreError: If the database is missing, and on reading if a record is missing or has another size.

    >>> LmdbRows("x.lmdb", dtype="float32", shape=(1000, 128)).read(ids, out)
    """

    def __init__(self, path: Path | str, name: str | None = None, *, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
        self.path = Path(path)
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._held = environment(path)
        self._db: Any = None
        if name is not None:
            try:
                self._db = self._held.env.open_db(name.encode(), create=False)
            except lmdb.Error as error:
                self._held.close()
                raise StoreError(f"{path} has no database {name!r}") from error
        self._gate = Gate(path)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored."""
        return int(self.dtype.itemsize * np.prod(self.shape[1:], dtype=np.int64))

    def read(self, ids: Ids, out: AnyArray, at: Ids | None = None) -> int:
        """Set out[i] to row ids[i]; see `Rows.read`. Returns the bytes of the records, each read once in key order."""
        check_request(self, ids, out, at)
        with self._gate.reading():  # closing unmaps the environment even during reads
            return self._read(ids, out, at)

    def _read(self, ids: Ids, out: AnyArray, at: Ids | None) -> int:
        rows, inverse = np.unique(ids, return_inverse=True)
        unsorted = np.argsort(inverse, kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(rows)))]).astype(np.int64)
        step = max(1, MAPPED_BYTES // (self.row_bytes + _AROUND_BYTES))
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            block = np.frombuffer(self._records(part), self.dtype).reshape(-1, *self.shape[1:])
            begin, end = bounds[first], bounds[first + len(part)]
            places = unsorted[begin:end]
            out[places if at is None else at[places]] = block[inverse[places] - first]
            self._held.forget()
        return len(rows) * self.row_bytes

    def _records(self, rows: Ids) -> bytes:
        """The values of `rows`, concatenated."""
        keys = rows.astype(">u8").tobytes()
        size = self.row_bytes
        values = []
        with self._held.env.begin(db=self._db, buffers=True) as txn:
            for position, row in enumerate(rows.tolist()):
                value = txn.get(keys[position * 8 : position * 8 + 8])
                if value is None or len(value) != size:
                    what = "is missing" if value is None else f"has {len(value)} bytes, not {size}"
                    raise StoreError(f"{self.path}: the record of row {row} {what}; write the environment again")
                values.append(value)
            return b"".join(values)

    def close(self) -> None:
        """Release the environment and threads; idempotent."""
        self._end_background()
        if self._gate.close():
            self._held.close()


def write_lmdb_rows(path: Path | str, array: AnyArray, name: str | None = None) -> None:
    """Write array [count, *row shape] as records in key order, creating the environment if needed.

    The map grows as needed. Raises StoreError if the disk is full or the environment is open in this process.

    >>> write_lmdb_rows("x.lmdb", features)
    """
    data = _data(path)
    with _lock:
        if data.exists() and _file_of(data) in _open:
            raise StoreError(f"{path} is open in this process; close it before writing")
        _open_and_write(Path(path), array, name)


def _open_and_write(path: Path, array: AnyArray, name: str | None) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with lmdb.open(str(path), map_size=SPARE_BYTES + 2 * array.nbytes, max_dbs=64, lock=False) as env:
            db = env.open_db(name.encode() if name is not None else None)
            with env.begin(db=db) as txn:
                if txn.get(_KEY.pack(0)) is not None:
                    raise StoreError(f"{path} already holds rows; remove it or write elsewhere")
            for first in range(0, len(array), _BATCH_ROWS):
                block = np.ascontiguousarray(array[first : first + _BATCH_ROWS])
                items = [(_KEY.pack(first + i), row.tobytes()) for i, row in enumerate(block)]
                _put(env, db, items)
            env.sync(True)
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"{path} cannot be written: {error}; check free space and permissions") from error


def _put(env: "lmdb.Environment", db: Any, items: list[tuple[bytes, bytes]]) -> None:
    while True:
        try:
            with env.begin(db=db, write=True) as txn, txn.cursor() as cursor:
                cursor.putmulti(items, append=True)
            return
        except lmdb.MapFullError:
            env.set_mapsize(2 * env.info()["map_size"])

"""What was appended to a store and is not in its arrays yet: `delta.lmdb`, one transaction an append.

An append is packed records of many rows (npz, which has a checksum of every array) and one line about it; so it costs in
proportion to what is added, and is there whole or not at all. Rows are final numbers, values as the arrays hold them. Keys
rise, so records stand in the order in which they were written. Which version of the arrays it adds to is written in it: once
those are another version, they hold it already.
"""

import hashlib
import io
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from stores.atomic import disk_errors, remove_tree, sync_dir
from stores.errors import StoreError
from stores.rows import AnyArray

DELTA = "delta.lmdb"
RECORD_ROWS = 2**16
EDGES, ROWS, IDS = "edges", "rows", "ids"
"""kinds of records: edges; rows of a node array (`rows/x`); external ids of new nodes"""
_BASE, _APPENDS, _DATA = b"base", b"append/", b"data/"
_MAP_BYTES = 2**40
_one = threading.RLock()
"""LMDB forbids a second environment of a path in a process; nothing here keeps one open for long"""

Record = dict[str, AnyArray]


@dataclass(frozen=True)
class Appended:
    """What appends brought: one, or several together."""

    given: int = 0
    """edges of the input"""
    edges: int = 0
    """edges taken"""
    nodes: int = 0
    """new nodes"""
    rows: dict[str, int] = field(default_factory=dict)
    """node array -> rows, of new nodes and of others that were given anew"""
    missing: int = 0
    self_loops: int = 0
    """edges left out"""
    digest: str = ""
    """of the records"""

    def __add__(self, other: "Appended") -> "Appended":
        rows = {name: self.rows.get(name, 0) + other.rows.get(name, 0) for name in {*self.rows, *other.rows}}
        digest = hashlib.sha256(f"{self.digest}{other.digest}".encode()).hexdigest()
        counts = {
            name: getattr(self, name) + getattr(other, name) for name in ("given", "edges", "nodes", "missing", "self_loops")
        }
        return Appended(**counts, rows=rows, digest=digest)


class Delta:
    """One transaction's look at the appends of a store, for reading or for one more; see `reading` and `appending`."""

    def __init__(self, transaction: "lmdb.Transaction", base: str, path: Path) -> None:
        self.path = path
        self._transaction = transaction
        held = transaction.get(_BASE)
        self._stale = held is not None and bytes(held).decode() != base
        self._base = base
        self._records = 0
        self._hash = hashlib.sha256()

    @property
    def appends(self) -> list[Appended]:
        """Those to the version that is asked about, one after the other."""
        return [Appended(**json.loads(value)) for _, value in self._entries(_APPENDS)]

    def records(self, kind: str) -> Iterator[tuple[int, Record]]:
        """(append's number, record) of a kind, in the order in which they were written. Raises StoreError for a damaged one."""
        for key, value in self._entries(_DATA):
            _, number, where = key.decode().split("/", 2)
            if where.rsplit("/", 1)[0] != kind:
                continue
            try:
                with np.load(io.BytesIO(value), allow_pickle=False) as packed:
                    record = {name: packed[name] for name in packed.files}
            except Exception as error:  # zipfile's, zlib's and numpy's own
                raise StoreError(f"{self.path}: record {key.decode()} of the appends is damaged ({error})") from error
            yield int(number), record

    def kinds(self) -> set[str]:
        """Kinds of records that there are."""
        return {key.decode().split("/", 2)[2].rsplit("/", 1)[0] for key, _ in self._entries(_DATA)}

    def put(self, number: int, kind: str, record: Record) -> None:
        """One more record of append `number`."""
        packed = io.BytesIO()
        np.savez(packed, **record)  # type: ignore[arg-type]
        key = _DATA + f"{number:08d}/{kind}/{self._records:08d}".encode()
        self._transaction.put(key, packed.getvalue())
        self._hash.update(packed.getvalue())
        self._records += 1

    def finish(self, number: int, appended: Appended) -> Appended:
        """The line about append `number`, behind its records."""
        done = Appended(**{**asdict(appended), "digest": self._hash.hexdigest()})
        self._transaction.put(_BASE, self._base.encode())
        self._transaction.put(_APPENDS + f"{number:08d}".encode(), json.dumps(asdict(done)).encode())
        return done

    def _entries(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        if self._stale:
            return
        cursor = self._transaction.cursor()
        if not cursor.set_range(prefix):
            return
        for key, value in cursor:
            if not bytes(key).startswith(prefix):
                return
            yield bytes(key), bytes(value)


@contextmanager
def reading(store: Path, base: str) -> Iterator[Delta | None]:
    """The appends to version `base` of a store as they are now; None where nothing was ever appended."""
    path = store / DELTA
    with _one, ExitStack() as stack:
        transaction = _look(path, stack)
        yield None if transaction is None else Delta(transaction, base, path)


def _look(path: Path, stack: ExitStack) -> "lmdb.Transaction | None":
    """What is there now; None where nothing is, also where a compaction takes it away while it is opened."""
    if not (path / "data.mdb").exists():
        return None
    try:
        return stack.enter_context(stack.enter_context(_for_reading(path)).begin())
    except lmdb.Error as error:
        if not (path / "data.mdb").exists():
            return None
        raise StoreError(f"{path}, which holds what was appended, cannot be opened: {error}") from error


def _for_reading(path: Path) -> "lmdb.Environment":
    """Beside a writer readers are listed in a lock file; where that cannot be written, nobody writes the rest either."""
    settings: dict[str, Any] = {"readonly": True, "create": False, "readahead": False, "map_size": _MAP_BYTES}
    try:
        return lmdb.open(str(path), lock=True, **settings)
    except (lmdb.ReadonlyError, lmdb.Error):
        return lmdb.open(str(path), lock=False, **settings)


@contextmanager
def appending(store: Path, base: str) -> Iterator[Delta]:
    """One transaction to append in: durable when left, undone by an exception. Whoever calls it has the store's growth lock.

    Raises StoreError for a full disk.
    """
    path = store / DELTA
    with _one, disk_errors(path):
        with reading(store, base) as found:
            stale = found is not None and found._stale
        if stale:
            remove_tree(path)
        new = not path.exists()
        path.mkdir(exist_ok=True)
        try:
            with lmdb.open(str(path), map_size=_MAP_BYTES, readahead=False) as env, env.begin(write=True) as transaction:
                yield Delta(transaction, base, path)
        except lmdb.Error as error:
            raise StoreError(f"cannot write {path}: {error}; free some space there, or choose another disk") from error
        if new:
            sync_dir(path)
            sync_dir(store)


def remove(store: Path) -> None:
    """Forget what was appended; it is in the arrays."""
    with _one:
        remove_tree(store / DELTA)

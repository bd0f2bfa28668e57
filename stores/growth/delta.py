"""What was appended to a store and is not in its arrays yet: `delta.lmdb`.

An append is packed records of many rows (npz, which has a checksum of every array) and one line about it, written last: with
that line it is there, whole; records without one are nobody's, and the next append removes them. So it costs in proportion to
what is added, and although LMDB holds in memory what a transaction wrote, no more than TRANSACTION_BYTES of it. Rows are final
numbers, values as the arrays hold them. Keys rise, so records stand in the order in which they were written. Which version of
the arrays it adds to is written in it: once those are another version, they hold it already.
"""

import hashlib
import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from stores.arrays.rows import AnyArray
from stores.errors import StoreError
from stores.io.atomic import database_error, disk_errors, remove_tree, sync_dir
from stores.io.segments import forget_map, map_of

DELTA = "delta.lmdb"
RECORD_ROWS = 2**16
RECORD_BYTES = 2**22
TRANSACTION_BYTES = 2**26
"""of records, in memory until they are on the disk"""
EDGES, ROWS, IDS = "edges", "rows", "ids"
"""kinds of records: edges; rows of a node array (`rows/x`); external ids of new nodes"""
FEATURE = "feature."
"""what names of edge features begin with in a record, and no other"""
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
    edges_digest: str = ""
    """of those of edges, of one append"""
    records: dict[str, int] = field(default_factory=dict)
    """kind -> records, of one append: none is to be looked for, as a cursor reads the values of all keys that it passes"""

    def __add__(self, other: "Appended") -> "Appended":
        rows = {name: self.rows.get(name, 0) + other.rows.get(name, 0) for name in {*self.rows, *other.rows}}
        digest = hashlib.sha256(f"{self.digest}{other.digest}".encode()).hexdigest()
        counts = {
            name: getattr(self, name) + getattr(other, name) for name in ("given", "edges", "nodes", "missing", "self_loops")
        }
        return Appended(**counts, rows=rows, digest=digest)


def record_rows(row_bytes: int) -> int:
    """Rows of a record of rows of so many bytes."""
    return max(1, min(RECORD_ROWS, RECORD_BYTES // max(1, row_bytes)))


def _record_key(number: int, kind: str, place: int) -> bytes:
    return _DATA + f"{number:08d}/{kind}/{place:08d}".encode()


class Delta:
    """One transaction's look at the appends of a store; see `reading`."""

    def __init__(self, transaction: "lmdb.Transaction", base: str, path: Path) -> None:
        self.path = path
        self._transaction = transaction
        held = transaction.get(_BASE)
        self._stale = held is not None and bytes(held).decode() != base
        self._map = map_of(path / "data.mdb")
        self.appends = [] if self._stale else [Appended(**json.loads(value)) for value in self._lines()]
        """those to the version that is asked about, one after the other"""

    def _lines(self) -> Iterator[bytes]:
        cursor = self._transaction.cursor()
        for key in self._keys(_APPENDS):
            cursor.set_key(key)
            yield bytes(cursor.value())

    def records(self, kind: str) -> Iterator[tuple[int, Record]]:
        """(append's number, record) of a kind, in the order in which they were written. Raises StoreError for a damaged one."""
        for number, append in enumerate(self.appends):
            for place in range(append.records.get(kind, 0)):
                key = _record_key(number, kind, place)
                value = bytes(self._transaction.get(key) or b"")
                self._forget()
                try:
                    with np.load(io.BytesIO(value), allow_pickle=False) as packed:
                        record = {name: packed[name] for name in packed.files}
                except Exception as error:  # zipfile's, zlib's and numpy's own
                    raise StoreError(f"{self.path}: record {key.decode()} of the appends is damaged ({error})") from error
                yield number, record

    def kinds(self) -> set[str]:
        """Kinds of records that there are."""
        return {kind for append in self.appends for kind in append.records}

    def _keys(self, prefix: bytes) -> Iterator[bytes]:
        cursor = self._transaction.cursor()
        if not cursor.set_range(prefix):
            return
        for key in cursor.iternext(keys=True, values=False):
            if not bytes(key).startswith(prefix):
                return
            yield bytes(key)

    def _forget(self) -> None:
        """Take what was read out of this process, or it would come to hold the whole file."""
        if self._map is not None:
            forget_map(*self._map)


class Appending(Delta):
    """The appends of a store, and one more that is written; see `appending`."""

    def __init__(self, env: "lmdb.Environment", base: str, path: Path) -> None:
        self._env = env
        super().__init__(env.begin(write=True), base, path)
        self.number = len(self.appends)
        self._base = base
        self._records = Counter[str]()
        self._waiting = 0
        self._hash, self._edges_hash = hashlib.sha256(), hashlib.sha256()
        self._drop()

    def put(self, kind: str, record: Record) -> None:
        """One more record of this append."""
        packed = io.BytesIO()
        np.savez(packed, **record)  # type: ignore[arg-type]
        value = packed.getvalue()
        self._transaction.put(_record_key(self.number, kind, self._records[kind]), value)
        self._hash.update(value)
        if kind == EDGES:
            self._edges_hash.update(value)
        self._records[kind] += 1
        self._waiting += len(value)
        if self._waiting >= TRANSACTION_BYTES:
            self._transaction.commit()
            self._transaction, self._waiting = self._env.begin(write=True), 0
            self._forget()

    def finish(self, appended: Appended) -> Appended:
        """The line about this append, with which it is there, and durable."""
        digests = {"digest": self._hash.hexdigest(), "edges_digest": self._edges_hash.hexdigest() if appended.edges else ""}
        done = Appended(**{**asdict(appended), **digests, "records": dict(self._records)})
        self._transaction.put(_BASE, self._base.encode())
        self._transaction.put(_APPENDS + f"{self.number:08d}".encode(), json.dumps(asdict(done)).encode())
        self._transaction.commit()
        return done

    def give_up(self) -> None:
        """Remove what was written, as far as the disk lets it: its room is used again by the next append."""
        with suppress(lmdb.Error):
            self._transaction.abort()
            self._transaction = self._env.begin(write=True)
            self._drop()
            self._transaction.commit()

    def _drop(self) -> None:
        """Remove records of an append that did not come to its end."""
        for key in [*self._keys(_DATA + f"{self.number:08d}/".encode())]:
            self._transaction.delete(key)


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
def appending(store: Path, base: str) -> Iterator[Appending]:
    """An append under way: there and durable once `finish` is called, undone by an exception. Whoever calls this has the
    store's growth lock. Raises StoreError for a full disk.
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
            with lmdb.open(str(path), map_size=_MAP_BYTES, readahead=False) as env:
                for folder in (path, store) if new else ():
                    sync_dir(folder)
                delta = Appending(env, base, path)
                try:
                    yield delta
                except BaseException:
                    delta.give_up()
                    raise
        except BaseException as error:
            if new:
                remove_tree(path)
            if isinstance(error, lmdb.Error):
                raise database_error(error, path) from error
            raise


def remove(store: Path) -> None:
    """Forget what was appended; it is in the arrays."""
    with _one:
        remove_tree(store / DELTA)


def small(name: str) -> bool:
    """Whether a node array is of labels, splits or births: of a few bytes a node, and nothing that a model computes on."""
    return name in ("y", "split", "birth") or name.startswith("split_")

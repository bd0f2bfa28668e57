"""`delta.lmdb`: data appended to a store and not yet merged into its arrays.

An append is packed records of many rows (npz, with a checksum per array) and, written last, a summary line that makes it valid;
records without one are removed by the next append. LMDB keeps a transaction in memory, so one writes at most TRANSACTION_BYTES.
Row numbers are final and values as in the arrays. Keys ascend, so records are in write order. The delta names the version of
the arrays it adds to; other versions already include it.
"""

import hashlib
import io
import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from ooc.stores.array_names import DELTA, VERSIONS
from ooc.stores.arrays.descriptions import write_placeholder
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import database_error, disk_errors, publish, remove_tree, removed_path
from ooc.stores.io.segments import forget_map, map_of
from ooc.stores.metadata import says_appended, set_appended

RECORD_ROWS = 2**16
RECORD_BYTES = 2**22
TRANSACTION_BYTES = 2**26
"""bytes of records in memory until they are on disk"""
EDGES, ROWS, IDS = "edges", "rows", "ids"
"""kinds of records: edges; rows of a node array (`rows/x`); external ids of new nodes"""
FEATURE = "feature."
"""prefix of edge features in a record"""
_OF = "//"
"""between a type of a heterogeneous store and the kind of its records"""
_BASE, _APPENDS, _DATA = b"base", b"append/", b"data/"
_MAP_BYTES = 2**40
_one = threading.RLock()
"""LMDB forbids a second environment of a path per process; none is kept open for long"""

Record = dict[str, AnyArray]


@dataclass(frozen=True)
class Appended:
    """Counts of one or several appends."""

    given: int = 0
    """edges of the input"""
    edges: int = 0
    """edges added"""
    nodes: int = 0
    """new nodes"""
    rows: dict[str, int] = field(default_factory=dict)
    """node array -> rows, of new nodes and of existing ones"""
    missing: int = 0
    self_loops: int = 0
    """dropped edges"""
    digest: str = field(default="", repr=False)
    """digest of the records"""
    edges_digest: str = field(default="", repr=False)
    """digest of the edges' records, for one append"""
    records: dict[str, int] = field(default_factory=dict, repr=False)
    """kind -> number of records, for one append; avoids searches, as a cursor reads the values of keys it passes"""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """of a heterogeneous store: type -> its own counts"""

    def of(self, prefix: str) -> "Appended":
        """The counts of one type; all of them where the store has one of each."""
        if not prefix:
            return self
        own = {kind.removeprefix(f"{prefix}{_OF}"): count for kind, count in self.records.items() if _is_of(kind, prefix)}
        return Appended(**self.parts.get(prefix, {}), records=own)

    def __add__(self, other: "Appended") -> "Appended":
        rows = {name: self.rows.get(name, 0) + other.rows.get(name, 0) for name in {*self.rows, *other.rows}}
        digest = hashlib.sha256(f"{self.digest}{other.digest}".encode()).hexdigest()
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        parts = {name: _counts(self.of(name) + other.of(name)) for name in [*{**self.parts, **other.parts}]}
        return Appended(**counts, rows=rows, digest=digest, parts=parts)


_COUNTS = ("given", "edges", "nodes", "missing", "self_loops")


def _counts(own: Appended) -> dict[str, Any]:
    return {**{name: getattr(own, name) for name in _COUNTS}, "rows": own.rows}


def total_of(parts: Mapping[str, Appended]) -> Appended:
    """The counts of an append by those of its types: part -> counts, which has one "" in a homogeneous store.

    >>> total_of({"user": Appended(nodes=2), "user:visits:item": Appended(given=5, edges=5)}).nodes
    2
    """
    own = {name: _counts(each) for name, each in parts.items() if name}
    rows: Counter[str] = Counter()
    for name, each in parts.items():
        rows.update({f"{name}/{array}" if name else array: count for array, count in each.rows.items()})
    return Appended(
        **{name: sum(getattr(each, name) for each in parts.values()) for name in _COUNTS}, rows=dict(rows), parts=own
    )


def _is_of(kind: str, prefix: str) -> bool:
    return kind.startswith(f"{prefix}{_OF}")


def record_rows(row_bytes: int) -> int:
    """Number of rows in a record, by row size."""
    return max(1, min(RECORD_ROWS, RECORD_BYTES // max(1, row_bytes)))


def _record_key(number: int, kind: str, place: int) -> bytes:
    return _DATA + f"{number:08d}/{kind}/{place:08d}".encode()


class Delta:
    """The appends of a store as seen by one transaction; see `reading`."""

    def __init__(self, transaction: "lmdb.Transaction", base: str, path: Path) -> None:
        self.path = path
        self._transaction = transaction
        held = transaction.get(_BASE)
        self._stale = held is not None and bytes(held).decode() != base
        self._map = map_of(path / "data.mdb")
        self.appends = [] if self._stale else [Appended(**json.loads(value)) for value in self._lines()]
        """the appends to the requested version, in order"""

    def _lines(self) -> Iterator[bytes]:
        cursor = self._transaction.cursor()
        for key in self._keys(_APPENDS):
            cursor.set_key(key)
            yield bytes(cursor.value())

    def records(self, kind: str) -> Iterator[tuple[int, Record]]:
        """Yield (append's number, record) of a kind in write order. Raises StoreError for a damaged one."""
        for number, append in enumerate(self.appends):
            for place in range(append.records.get(kind, 0)):
                key = _record_key(number, kind, place)
                value = bytes(self._transaction.get(key) or b"")
                self._forget()
                try:
                    with np.load(io.BytesIO(value), allow_pickle=False) as packed:
                        record = {name: packed[name] for name in packed.files}
                except Exception as error:  # exceptions of zipfile, zlib and numpy
                    raise StoreError(f"{self.path}: record {key.decode()} of the appends is damaged ({error})") from error
                yield number, record

    def kinds(self) -> set[str]:
        """Kinds of existing records."""
        return {kind for append in self.appends for kind in append.records}

    def of(self, prefix: str) -> "DeltaPart":
        """What is of one type of a heterogeneous store; everything without a prefix."""
        return DeltaPart(self, prefix)

    def _keys(self, prefix: bytes) -> Iterator[bytes]:
        cursor = self._transaction.cursor()
        if not cursor.set_range(prefix):
            return
        for key in cursor.iternext(keys=True, values=False):
            if not bytes(key).startswith(prefix):
                return
            yield bytes(key)

    def _forget(self) -> None:
        """Unmap what was read, which would otherwise be the whole file."""
        if self._map is not None:
            forget_map(*self._map)


class DeltaPart:
    """The appends of one type of a store, whose records have a prefix; see `Delta.of`."""

    def __init__(self, delta: Delta, prefix: str) -> None:
        self._delta, self._prefix = delta, f"{prefix}{_OF}" if prefix else ""
        self.appends = [each.of(prefix) for each in delta.appends]
        """its counts in each append"""

    def records(self, kind: str) -> Iterator[tuple[int, Record]]:
        """See `Delta.records`."""
        return self._delta.records(f"{self._prefix}{kind}")

    def kinds(self) -> set[str]:
        """See `Delta.kinds`."""
        return {kind for append in self.appends for kind in append.records}


class Appending(Delta):
    """The appends of a store, and one being written; see `appending`."""

    def __init__(self, env: "lmdb.Environment", base: str, path: Path) -> None:
        self._env = env
        super().__init__(env.begin(write=True), base, path)
        self.number = len(self.appends)
        self._base = base
        self._records = Counter[str]()
        self._waiting = 0
        self._hash, self._edges_hash = hashlib.sha256(), hashlib.sha256()
        self._drop()

    def put(self, kind: str, record: Record, prefix: str = "") -> None:
        """Add a record to this append, of a type in a heterogeneous store."""
        kind, of_edges = f"{prefix}{_OF}{kind}" if prefix else kind, kind == EDGES
        packed = io.BytesIO()
        np.savez(packed, **record)  # type: ignore[arg-type]
        value = packed.getvalue()
        self._transaction.put(_record_key(self.number, kind, self._records[kind]), value)
        self._hash.update(value)
        if of_edges:
            self._edges_hash.update(value)
        self._records[kind] += 1
        self._waiting += len(value)
        if self._waiting >= TRANSACTION_BYTES:
            self._transaction.commit()
            self._transaction, self._waiting = self._env.begin(write=True), 0
            self._forget()

    def finish(self, appended: Appended) -> Appended:
        """Write this append's summary line, which makes it valid and durable."""
        digests = {"digest": self._hash.hexdigest(), "edges_digest": self._edges_hash.hexdigest() if appended.edges else ""}
        done = Appended(**{**asdict(appended), **digests, "records": dict(self._records)})
        self._announce([*self.appends, done])  # before it is valid: no reader of the arrays alone may believe that it has all
        self._transaction.put(_BASE, self._base.encode())
        self._transaction.put(_APPENDS + f"{self.number:08d}".encode(), json.dumps(asdict(done)).encode())
        self._transaction.commit()
        return done

    def give_up(self) -> None:
        """Remove what was written if possible; its space is reused by the next append."""
        with suppress(lmdb.Error):
            self._transaction.abort()
            self._transaction = self._env.begin(write=True)
            self._drop()
            self._transaction.commit()
        with suppress(StoreError):
            self._announce(self.appends)

    def _announce(self, appends: list[Appended]) -> None:
        """Say in the store's attributes what the appends hold."""
        total = sum(appends, Appended())
        counts = {"appends": len(appends), "edges": total.edges, "nodes": total.nodes, "rows": total.rows}
        set_appended(self.path.parent, counts if appends else None)

    def _drop(self) -> None:
        """Remove records of an unfinished append."""
        for key in [*self._keys(_DATA + f"{self.number:08d}/".encode())]:
            self._transaction.delete(key)


@contextmanager
def reading(store: Path, base: str) -> Iterator[Delta | None]:
    """The current appends to version `base` of a store; None if nothing was ever appended."""
    path = store / DELTA
    with _one, ExitStack() as stack:
        transaction = _look(path, stack)
        yield None if transaction is None else Delta(transaction, base, path)


def _look(path: Path, stack: ExitStack) -> "lmdb.Transaction | None":
    """Open the current state, None if there is none or a compaction removes it meanwhile."""
    if not _begun(path):
        if says_appended(path.parent):
            raise StoreError(f"{path}, which holds what was appended, is missing or empty: copy the whole store again")
        return None
    try:
        return stack.enter_context(stack.enter_context(_for_reading(path)).begin())
    except lmdb.Error as error:
        if not _begun(path):
            return None
        raise StoreError(f"{path}, which holds what was appended, cannot be opened: {error}") from error


def _begun(path: Path) -> bool:
    """Whether anything was ever written; an append of an earlier ooc that was killed may have left a file without a byte."""
    try:
        return (path / "data.mdb").stat().st_size > 0
    except FileNotFoundError:
        return False


def _for_reading(path: Path) -> "lmdb.Environment":
    """Readers next to a writer are listed in a lock file; if that cannot be written, nothing else can be."""
    settings: dict[str, Any] = {"readonly": True, "create": False, "readahead": False, "map_size": _MAP_BYTES}
    try:
        return lmdb.open(str(path), lock=True, **settings)
    except (lmdb.ReadonlyError, lmdb.Error):
        return lmdb.open(str(path), lock=False, **settings)


@contextmanager
def appending(store: Path, base: str) -> Iterator[Appending]:
    """An append in progress: valid and durable once `finish` is called, undone by an exception.

    The caller must have the store's growth lock. Raises StoreError for a full disk.
    """
    path = store / DELTA
    with _one, disk_errors(path):
        with reading(store, base) as found:
            stale = found is not None and found._stale
        if stale or not _begun(path):
            remove_tree(path)
        shutil.rmtree(removed_path(path), ignore_errors=True)  # left by a removal that was killed
        new = not path.exists()
        try:
            if new:
                _create(path)
            with lmdb.open(str(path), map_size=_MAP_BYTES, readahead=False) as env:
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


def _create(path: Path) -> None:
    """Make an empty environment that is whole as soon as it is at `path`: LMDB cannot read one without its first two pages."""
    partial = path.parent / VERSIONS / f"{DELTA}.partial"  # appends and compactions remove what a killed one left there
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        lmdb.open(str(partial), map_size=_MAP_BYTES).close()
        write_placeholder(partial, "an LMDB environment: what was appended, until `ooc compact` merges it into the arrays")
        publish(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove(store: Path) -> None:
    """Delete the appended data, which is in the arrays."""
    with _one:
        remove_tree(store / DELTA)


def small(name: str) -> bool:
    """Whether a node array is of labels, splits or births: a few bytes per node, not used as model input."""
    return name in ("y", "split", "birth") or name.startswith("split_")

"""External ids: the mapping between the user's node ids and rows, in both directions, in one LMDB environment.

Each node type has two databases: `<type>/row` maps an external id to its row, `<type>/id` a row to its external id. Rows are
big-endian uint64. Ids of kind "int" are big-endian int64 with the sign bit flipped, so that key order is numeric order; ids of
kind "str" are UTF-8. Both are filled in key order (LMDB's append: 3.4 M puts per second, against 0.8 M in random order).
"""

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, pairwise
from operator import index
from pathlib import Path
from typing import Any, cast

import lmdb
import numpy as np
from numpy.typing import NDArray

from ooc.stores.array_names import NODE
from ooc.stores.arrays.lmdb_rows import Environment, environment
from ooc.stores.errors import InputError, StoreError
from ooc.stores.io.atomic import database_error, disk_errors
from ooc.stores.io.remote.group import RemoteGroup
from ooc.stores.manifest import IdKind

MAX_ID_BYTES = 511
"""LMDB's limit on a key"""
_MAP_BYTES = 2**40
"""address space of the writer, not memory: the file grows with its contents"""
_PUTS = 2**18
"""puts per transaction, whose dirty pages the writer keeps in memory"""

Pairs = Iterable[tuple[Any, NDArray[np.int64]]]


def write_ids(path: Path | str, kind: IdKind, by_id: Pairs, by_row: Pairs, node_type: str = NODE) -> int:
    """Fill both databases of `node_type` in the environment at `path` (created if missing); returns the number of ids.

    Needs memory for one chunk and the dirty pages of one transaction.

    Args:
        path: The environment.
        kind: "int" or "str".
        by_id: Chunks (external ids, rows) ordered by external id: int64[n] or an Arrow array, for "str" a list of str or an
            Arrow string array, ordered by UTF-8 bytes; rows int64[n].
        by_row: The same pairs ordered by row.
        node_type: The node type.

    Raises:
        InputError: If an id is null, empty, longer than 511 bytes or a duplicate.
        StoreError: If the disk is full.

    >>> write_ids("papers.ooc/ids.lmdb", "str", [(["a", "b"], np.array([1, 0]))], [(["b", "a"], np.array([0, 1]))])
    2
    """
    encode = _ENCODERS[kind]
    Path(path).mkdir(parents=True, exist_ok=True)
    with disk_errors(path), lmdb.open(str(path), map_size=_MAP_BYTES, max_dbs=256, sync=False, lock=False) as env:
        try:
            pairs = (zip(encode(external), _row_keys(rows), strict=True) for external, rows in by_id)
            count = _fill(env, _database(node_type, "row"), pairs, _SHOW[kind])
            pairs = (zip(_row_keys(rows), encode(external), strict=True) for external, rows in by_row)
            back = _fill(env, _database(node_type, "id"), pairs, _show_row)
            env.sync(True)
        except lmdb.Error as error:
            raise database_error(error, path) from None
    if count != back:
        raise InputError(f"{path}: {count} ids in id order, but {back} in row order; each must be in both once")
    return count


def grow_ids(old: Path | str, path: Path | str, kind: IdKind, by_id: Pairs, by_row: Pairs, node_type: str = NODE) -> None:
    """Write the ids of the environment `old` and of new nodes to `path`, byte for byte as `write_ids` would for all.

    `by_id` and `by_row` are those of the new nodes, whose rows follow the old ones. Raises as `write_ids` does.
    """
    Path(path).mkdir(parents=True, exist_ok=True)
    previous, encode = environment(old), _ENCODERS[kind]
    try:
        with (
            disk_errors(path),
            lmdb.open(str(path), map_size=_MAP_BYTES, max_dbs=256, sync=False, lock=False) as env,
            previous.env.begin() as transaction,
        ):
            was = {name: previous.env.open_db(_database(node_type, name), transaction, create=False) for name in ("row", "id")}
            new = chain.from_iterable(zip(encode(ids), _row_keys(rows), strict=True) for ids, rows in by_id)
            _fill(
                env, _database(node_type, "row"), [heapq.merge(_pairs_of(previous, transaction, was["row"]), new)], _SHOW[kind]
            )
            behind = (zip(_row_keys(rows), encode(ids), strict=True) for ids, rows in by_row)
            _fill(env, _database(node_type, "id"), chain([_pairs_of(previous, transaction, was["id"])], behind), _show_row)
            env.sync(True)
    except lmdb.Error as error:
        raise database_error(error, path) from None
    finally:
        previous.close()


def _pairs_of(held: Environment, transaction: lmdb.Transaction, database: Any) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs of a database, releasing its pages from the process."""
    for at, pair in enumerate(transaction.cursor(database)):
        if at % _PUTS == 0:
            held.forget()
        yield cast(tuple[bytes, bytes], pair)


def encode_ids(external: Any, kind: IdKind) -> list[bytes]:
    """Encode ids as database keys, which have the order of the ids. Raises InputError for an invalid id."""
    return _ENCODERS[kind](external)


def decode_ids(keys: list[bytes], kind: IdKind) -> NDArray[np.int64] | list[str]:
    """Decode the result of `encode_ids`."""
    return _decode_ints(keys) if kind == "int" else [key.decode() for key in keys]


class IdMap:
    """The external ids of one node type of a finished store; thread-safe.

    >>> ids = IdMap("papers.ooc/ids.lmdb", "str")
    >>> ids.external(np.array([1, 0])), ids.row("a")
    (['a', 'b'], 1)
    """

    def __init__(self, path: Path | str, kind: IdKind, node_type: str = NODE, what: str = "node") -> None:
        """Open the databases; `what` has the ids. Raises StoreError if they are missing or damaged."""
        self.path, self.what = Path(path), what
        self.kind: IdKind = kind
        self._environment = environment(path)
        try:
            env = self._environment.env
            self._rows, self._ids = (env.open_db(_database(node_type, name), create=False) for name in ("row", "id"))
        except lmdb.Error as error:
            self._environment.close()
            raise StoreError(f"{path} has no ids of node type {node_type!r} ({error}); build the store again") from None

    def external(self, rows: Any) -> NDArray[np.int64] | list[str]:
        """Return the external ids of `rows` (int64[n], any order) in the same order, int64[n] or a list of str.

        One read transaction. Raises InputError for a row without an id.
        """
        rows = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        values = self._get(self._ids, _row_keys(rows), rows.tolist(), "row")
        return decode_ids(values, self.kind)

    def rows(self, external: Any) -> NDArray[np.int64]:
        """Return the rows of external ids, int64[n], in one read transaction. Raises InputError for unknown ids."""
        return _all_known(self.find(self.parse(external)), external, self.path, self.what)

    def parse(self, external: Any) -> Any:
        """Convert ids given as a sequence, array or tensor to those of the store's kind. Raises InputError for another kind."""
        if self.kind == "int":
            ids = np.asarray(external)
            if ids.dtype.kind in "iu" and not (ids.dtype == np.uint64 and len(ids) and ids.max() >= 2**63):
                return ids.astype(np.int64)
        return [self._parse(each) for each in external]

    def find(self, external: Any) -> NDArray[np.int64]:
        """Return the rows of external ids (of the store's kind), int64[n], -1 if unknown, in one read transaction."""
        keys = _ENCODERS[self.kind](external)
        with self._environment.env.begin(db=self._rows, buffers=False) as transaction:
            row_of = dict(transaction.cursor().getmulti(keys))
        self._environment.forget()
        return np.array([int.from_bytes(row_of[key]) if key in row_of else -1 for key in keys], np.int64)

    def row(self, external: Any) -> int:
        """Return the row of one external id. Raises InputError for an unknown id."""
        return int(self.rows([external])[0])

    def __len__(self) -> int:
        with self._environment.env.begin() as transaction:
            return int(transaction.stat(self._rows)["entries"])

    def close(self) -> None:
        """Release the environment; idempotent."""
        self._environment.close()

    def _parse(self, external: Any) -> int | str:
        if self.kind == "int":
            return whole_number(external, self.path, self.what)
        if not 0 < len(str(external).encode()) <= MAX_ID_BYTES:
            raise _unknown("id", external, self.path, self.what)
        return str(external)

    def _get(self, database: Any, keys: list[bytes], requested: Any, what: str) -> list[bytes]:
        with self._environment.env.begin(db=database, buffers=False) as transaction:
            values = transaction.cursor().getmulti(keys)
        self._environment.forget()
        if len(values) != len(keys):
            have = {key for key, _ in values}
            missing = next(each for each, key in zip(requested, keys, strict=True) if key not in have)
            raise _unknown(what, missing, self.path, self.what)
        return [value for _, value in values]


class GrownIds:
    """The ids of a store and of nodes appended to it, whose rows follow; interface of `IdMap`."""

    def __init__(self, old: IdMap, new: IdMap, first: int) -> None:
        """`first` is the first new row."""
        self.old, self.new, self.first = old, new, first
        self.kind: IdKind = old.kind

    def external(self, rows: Any) -> NDArray[np.int64] | list[str]:
        """See `IdMap.external`."""
        rows = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        new = rows >= self.first
        ids = np.empty(len(rows), np.int64 if self.kind == "int" else object)
        ids[~new], ids[new] = self.old.external(rows[~new]), self.new.external(rows[new])
        return ids if self.kind == "int" else list(ids.tolist())

    def find(self, external: Any) -> NDArray[np.int64]:
        """See `IdMap.find`."""
        return np.maximum(self.old.find(external), self.new.find(external))

    def rows(self, external: Any) -> NDArray[np.int64]:
        """See `IdMap.rows`."""
        return _all_known(self.find(self.old.parse(external)), external, self.old.path)

    def row(self, external: Any) -> int:
        """See `IdMap.row`."""
        return int(self.rows([external])[0])

    def __len__(self) -> int:
        return len(self.old) + len(self.new)

    def close(self) -> None:
        """Close both; idempotent."""
        self.old.close()
        self.new.close()


class FetchedIds:
    """The ids of a store far away, whose file is fetched when they are first used; interface of `IdMap`; thread-safe."""

    def __init__(
        self,
        group: RemoteGroup,
        name: str,
        kind: IdKind,
        node_type: str = NODE,
        crc32c: str | None = None,
        what: str = "node",
    ) -> None:
        """`name` is the environment in the group, `crc32c` the checksum of its file; others as for `IdMap`."""
        self.kind: IdKind = kind
        self._group, self._name, self._crc32c = group, name, crc32c
        self._open = partial(IdMap, group.folder / name, kind, node_type, what)
        self._lock = threading.Lock()
        self._ids: IdMap | None = None

    def _opened(self) -> IdMap:
        with self._lock:
            if self._ids is None:
                self._group.file(f"{self._name}/data.mdb", self._crc32c)
                self._ids = self._open()
            return self._ids

    def external(self, rows: Any) -> NDArray[np.int64] | list[str]:
        """See `IdMap.external`. Raises StoreError if the ids cannot be fetched, as all methods do."""
        return self._opened().external(rows)

    def rows(self, external: Any) -> NDArray[np.int64]:
        """See `IdMap.rows`."""
        return self._opened().rows(external)

    def row(self, external: Any) -> int:
        """See `IdMap.row`."""
        return self._opened().row(external)

    def close(self) -> None:
        """Release the environment; idempotent."""
        with self._lock:
            if self._ids is not None:
                self._ids.close()


AnyIds = IdMap | GrownIds | FetchedIds


def whole_number(external: Any, where: Path, of: str = "node") -> int:
    """Convert an int or its text to int64. Raises InputError, naming `where`, for anything else."""
    try:
        number = int(external) if isinstance(external, str) else index(external)
    except (TypeError, ValueError):
        raise InputError(f"no {of} has the id {external!r}: the ids of {where} are whole numbers") from None
    if not -(2**63) <= number < 2**63:
        raise _unknown("id", number, where, of)
    return number


def _unknown(what: str, value: Any, where: Path, of: str) -> InputError:
    return InputError(f"no {of} has the {what} {value!r} in {where}: check it against the data it was built from")


def _all_known(rows: NDArray[np.int64], external: Any, where: Path, of: str = "node") -> NDArray[np.int64]:
    """Return `rows`. Raises InputError if some of them are -1, naming the first ids."""
    unknown = np.flatnonzero(rows < 0)
    if not len(unknown):
        return rows
    ids = np.asarray(external)
    values = [ids[at].item() for at in unknown[:3].tolist()]
    if len(unknown) == 1:
        raise _unknown("id", values[0], where, of)
    shown = ", ".join(map(repr, values)) + (", ..." if len(unknown) > 3 else "")
    raise InputError(f"{len(unknown):,} of {len(rows):,} ids are of no {of} in {where}: {shown}; check them against its data")


def rows_by_identity(external: Any, count: int, where: Path, of: str = "node") -> NDArray[np.int64]:
    """Rows of a store without ids.lmdb, whose ids are rows. Raises InputError for ids that are none."""
    ids = np.asarray(external)
    if ids.dtype.kind not in "iu":
        ids = np.array([whole_number(each, where, of) for each in external], np.int64)
    return _all_known(np.where((ids >= 0) & (ids < count), ids, -1).astype(np.int64), external, where, of)


def _database(node_type: str, direction: str) -> bytes:
    return f"{node_type}/{direction}".encode()


def _fill(
    env: lmdb.Environment, name: bytes, chunks: Iterable[Iterable[tuple[bytes, bytes]]], show: Callable[[bytes], str]
) -> int:
    """Append pairs in key order with a fixed number per transaction, so that the file does not depend on the chunks."""
    database = env.open_db(name)
    pairs = chain.from_iterable(chunks)
    count, last = 0, b""
    while batch := list(islice(pairs, _PUTS)):
        with env.begin(write=True, db=database) as transaction:
            _, added = transaction.cursor().putmulti(batch, append=True)
            if added != len(batch):  # LMDB skips a key that is not ascending
                keys = [last, *(key for key, _ in batch)]
                bad = next(key for before, key in pairwise(keys) if key <= before)
                raise InputError(f"ids must be ascending and unique: {show(bad)} is a duplicate or out of order")
        count, last = count + len(batch), batch[-1][0]
    return count


def _row_keys(rows: NDArray[np.int64]) -> list[bytes]:
    return cast(list[bytes], np.ascontiguousarray(rows, ">u8").view("V8").tolist())


def _encode_ints(external: Any) -> list[bytes]:
    import pyarrow as pa  # 30 MB, which readers of a store do without

    if isinstance(external, pa.Array | pa.ChunkedArray):
        _no_nulls(external)
        external = external.to_numpy()
    numbers = np.ascontiguousarray(external, np.int64).view(np.uint64) ^ np.uint64(1 << 63)
    return _row_keys(cast(Any, numbers))


def _decode_ints(values: list[bytes]) -> NDArray[np.int64]:
    numbers = np.frombuffer(b"".join(values), ">u8").astype(np.uint64)
    return (numbers ^ np.uint64(1 << 63)).view(np.int64)


def _encode_texts(external: Any) -> list[bytes]:
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = external if isinstance(external, pa.Array | pa.ChunkedArray) else pa.array(external, pa.large_string())
    _no_nulls(texts)
    encoded = texts.cast(pa.large_binary())
    sizes = pc.binary_length(encoded)
    if len(texts) and pc.min(sizes).as_py() == 0:
        raise InputError("a node id is empty: give every node an id")
    if len(texts) and pc.max(sizes).as_py() > MAX_ID_BYTES:
        worst = texts[pc.index(pc.greater(sizes, MAX_ID_BYTES), True).as_py()].as_py()
        raise InputError(
            f"node id {worst[:40]!r}... has {len(worst.encode())} bytes: at most {MAX_ID_BYTES} are allowed, shorten it"
        )
    return cast(list[bytes], encoded.to_pylist())


def _no_nulls(external: Any) -> None:
    if external.null_count:
        raise InputError(f"{external.null_count} node ids are missing: give every node an id")


def _show_row(key: bytes) -> str:
    return f"row {int.from_bytes(key)}"


_ENCODERS = {"int": _encode_ints, "str": _encode_texts}
_SHOW: dict[str, Callable[[bytes], str]] = {
    "int": lambda key: str(_decode_ints([key])[0]),
    "str": lambda key: repr(key.decode()),
}


def identity(rows: Any, count: int, what: str = "node") -> NDArray[np.int64]:
    """External ids of a store without ids.lmdb: the rows themselves. Raises InputError for a row out of range.

    `what` there are `count` of.
    """
    rows = np.atleast_1d(np.asarray(rows, dtype=np.int64))
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        bad = rows[(rows < 0) | (rows >= count)][0]
        raise InputError(f"no {what} has the row {bad}: there are {count} {what}s")
    return rows

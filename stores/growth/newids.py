"""External ids of new nodes: as records of the delta, and sorted and searched in any number."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, cast

import lmdb
import numpy as np
from numpy.typing import NDArray

from ooc.stores.arrays.rows import AnyArray
from ooc.stores.ids import decode_ids, encode_ids
from ooc.stores.io.atomic import database_error, disk_errors
from ooc.stores.io.segments import forget_map, map_of
from ooc.stores.manifest import IdKind

_PUTS = 2**14
"""puts per transaction; in random order each may dirty its own page, which stays in memory until then"""
_AT_ONCE = 2**16
_MAP_BYTES = 2**40


def pack_ids(external: list[Any]) -> dict[str, NDArray[Any]]:
    """Pack external ids, int or str, into a record."""
    if not external or isinstance(external[0], int):
        return {"number": np.array(external, np.int64)}
    encoded = [each.encode() for each in external]
    lengths = np.array([len(each) for each in encoded], np.int64)
    return {"text": np.frombuffer(b"".join(encoded), np.uint8), "length": lengths}


def unpack_ids(record: dict[str, NDArray[Any]]) -> list[Any]:
    """Unpack the result of `pack_ids`."""
    if "number" in record:
        return list(record["number"].tolist())
    text, ends = record["text"].tobytes(), np.cumsum(record["length"]).tolist()
    return [text[first:last].decode() for first, last in zip([0, *ends], ends, strict=False)]


class IdIndex:
    """External ids with their rows in a scratch file sorted by LMDB; only one transaction's pages are in memory.

    Raises StoreError for a full disk.

    >>> index = IdIndex(stage / "ids", "str")
    >>> index.add(["b", "a"], np.array([7, 8]))
    >>> index.find(["a", "c"]), next(index.by_id())
    (array([8, -1]), (['a', 'b'], array([8, 7])))
    """

    def __init__(self, folder: Path, kind: IdKind) -> None:
        self.folder, self.kind = folder, kind
        with self._errors():
            folder.mkdir()
            self._env = lmdb.open(str(folder), map_size=_MAP_BYTES, sync=False, lock=False, readahead=False)
        self._map = map_of(folder / "data.mdb")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with disk_errors(self.folder):
            try:
                yield
            except lmdb.Error as error:
                raise database_error(error, self.folder) from None

    def add(self, external: list[Any], rows: NDArray[np.int64]) -> None:
        """Add distinct ids and their rows (int64[n])."""
        pairs = zip(encode_ids(external, self.kind), cast(list[bytes], rows.astype(">i8").view("V8").tolist()), strict=True)
        with self._errors():
            while batch := list(islice(pairs, _PUTS)):
                with self._env.begin(write=True) as transaction:
                    transaction.cursor().putmulti(batch)
        self._forget()

    def find(self, external: list[Any]) -> NDArray[np.int64]:
        """Return the rows of ids, -1 if unknown: int64[n]."""
        keys = encode_ids(external, self.kind)
        with self._env.begin() as transaction:
            found = dict(transaction.cursor().getmulti(keys))
        self._forget()
        return np.array([int.from_bytes(found[key]) if key in found else -1 for key in keys], np.int64)

    def by_id(self) -> Iterator[tuple[AnyArray | list[str], NDArray[np.int64]]]:
        """Yield (external ids, rows) in id order, a block at a time."""
        with self._env.begin() as transaction:
            pairs = iter(transaction.cursor())
            while batch := list(islice(pairs, _AT_ONCE)):
                rows = np.frombuffer(b"".join(value for _, value in batch), ">i8").astype(np.int64)
                yield decode_ids([key for key, _ in batch], self.kind), rows
                self._forget()

    def _forget(self) -> None:
        if self._map is not None:
            forget_map(*self._map)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._env.close()

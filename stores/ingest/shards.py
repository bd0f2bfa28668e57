"""`--shard i/n`: one of n ingests of the same input, which builds a range of the nodes and of the edges.

The i-th of n ranges of N things is N * (i - 1) // n to N * i // n - 1: of destination nodes for the graph, of nodes and edges
for arrays with a row per node and per edge id. All shards see the whole input, so they agree on what depends on it (rows of
external ids, classes, scales) without talking to each other. `ooc.stores.ingest.join` puts shards together.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import DTypeLike, NDArray

from ooc.stores.array_names import IDS
from ooc.stores.errors import ConfigError
from ooc.stores.fingerprints import file_crc32c
from ooc.stores.ingest.arrange import MakeSink, Sink
from ooc.stores.io.atomic import check_absent, publish, remove_unfinished
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import SHARD, write_group

_FOLDERS = re.compile(r"[^=,]*/")


@dataclass(frozen=True)
class Shard:
    """Shard `index` (from 1) of `count`.

    >>> Shard.parse("2/3").range(10)
    range(3, 6)
    """

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From "i/n". Raises ConfigError if it is no such text."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"`shard={text!r}`: write it i/n, i from 1 to n, as in 2/8 for the second of eight")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def range(self, total: int) -> range:
        """Its part of 0 to total - 1."""
        return range(total * (self.index - 1) // self.count, total * self.index // self.count)

    def where(self, relation: str, column: str, total: int) -> str:
        """SQL of the rows of `relation` whose `column`, 0 to total - 1, is in the shard."""
        if self.count == 1:
            return relation
        part = self.range(total)
        return f"SELECT * FROM ({relation}) WHERE {column} >= {part.start} AND {column} < {part.stop}"

    def sink(self, make_sink: MakeSink) -> MakeSink:
        """Make sinks that are given the rows of all nodes (or edges) and pass on those of the shard."""
        return make_sink if self.count == 1 else partial(_sliced, self, make_sink)


def _sliced(
    shard: Shard,
    make_sink: MakeSink,
    group_path: Path,
    name: str,
    row_shape: tuple[int, ...],
    dtype: DTypeLike,
    attributes: Mapping[str, Any] | None = None,
    *,
    count: int,
) -> Sink:
    part = shard.range(count)
    return _Slice(make_sink(group_path, name, row_shape, dtype, attributes, count=len(part)), part)


class _Slice:
    """Passes on the rows of a range of all rows appended."""

    def __init__(self, inner: Sink, part: range) -> None:
        self._inner, self._part, self._done = inner, part, 0

    def append(self, rows: NDArray[Any]) -> None:
        """Append the next rows [b, *row_shape]."""
        first, last = (min(max(each - self._done, 0), len(rows)) for each in (self._part.start, self._part.stop))
        self._inner.append(rows[first:last])
        self._done += len(rows)

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, trace)


def input_key(settings: Mapping[str, Any], files: Iterable[Path], more: str) -> str:
    """Hex digest of what the shards of one store have in common: settings, and the names and sizes of input files.

    Folders do not count, which may differ from machine to machine. `more` is further text.
    """
    held = [(path.name, path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps([_without_folders(settings), held, more], default=str).encode()).hexdigest()


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_folders(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(each) for each in value]
    return _FOLDERS.sub("", str(value)) if isinstance(value, str | Path) else value


def finish_shard(built: Path, final: Path, shard: Shard, key: str, manifest: Manifest) -> Path:
    """Publish what is in the folder `built` as a shard: a Zarr group that says of which store it is a part.

    Raises StoreError if `final` exists.
    """
    check_absent(final)
    remove_unfinished(built)
    ids = built / IDS / "data.mdb"
    known = {"index": shard.index, "count": shard.count, "input": key, "ids": file_crc32c(ids) if ids.exists() else None}
    write_group(built, {SHARD: {**known, "manifest": manifest.as_json()}})
    return publish(built, final)

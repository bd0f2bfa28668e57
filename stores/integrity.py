"""`verify`, which locates a store's damage down to the chunk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import google_crc32c
import zarr

from ooc.stores import array_names as names
from ooc.stores.array_names import DELTA
from ooc.stores.arrays.checksums import checksums, has_checksums
from ooc.stores.arrays.encoding import encoding_of
from ooc.stores.arrays.zarr_rows import ForeignRows, ShardedRows, open_zarr_rows
from ooc.stores.errors import StoreError
from ooc.stores.feature_map import map_rows
from ooc.stores.fingerprints import array_names, file_crc32c
from ooc.stores.growth.delta import reading
from ooc.stores.io.remote.array import RemoteArray
from ooc.stores.io.remote.group import RemoteGroup
from ooc.stores.io.working import tidy
from ooc.stores.manifest import EdgeType, Manifest
from ooc.stores.metadata import arrays_of, damaged_metadata, read_manifest, version_of
from ooc.stores.remote.mirror import opened

Progress = Callable[[int, int], None]
"""called with (bytes done, total bytes)"""


@dataclass(frozen=True)
class Damage:
    """A defect of a store; `str()` is one line."""

    array: str
    """the array's path in the group, or ids.lmdb"""
    message: str
    chunk: int | None = None
    """number of the inner chunk along the rows; None if the damage is not limited to a chunk"""
    rows: tuple[int, int] | None = None
    """rows [first, last) of the chunk"""

    def __str__(self) -> str:
        where = (
            ""
            if self.chunk is None or self.rows is None
            else f" chunk {self.chunk} (rows {self.rows[0]} to {self.rows[1] - 1})"
        )
        return f"{self.array}{where}: {self.message}"


def verify(
    path: str | PathLike[str],
    progress: Progress | None = None,
    cache_dir: Path | str | None = None,
    cache: int | str | None = None,
) -> list[Damage]:
    """Check every chunk of a store against its checksum.

    Contiguous arrays are compared with `checksums/`; arrays written by others are decoded. Needs memory for one chunk, of a
    store at a URL for 64 MiB. There the objects are read, not what the cache holds of them.

    Args:
        path: The store, a directory or a URL.
        progress: Called with (bytes done, total bytes).
        cache_dir, cache: Of a store at a URL, as of `ooc.open`.

    Returns:
        The damage found, one `Damage` per chunk (`str` of it is a line); [] for a sound store.

    Raises:
        StoreError: If there is no store, it cannot be reached, or its manifest cannot be read.

    >>> for damage in verify("papers.ooc"):
    ...     print(damage)
    """
    with opened(path, cache_dir, cache) as store:
        tidy(store)
        return _verify(store, progress)


def _verify(store: Path, progress: Progress | None) -> list[Damage]:
    path = arrays_of(store)
    manifest = read_manifest(path)
    expected = expected_rows(manifest) | _edge_splits(path, manifest)
    changed = damaged_metadata(path)
    damages: list[Damage] = []
    arrays: dict[str, ShardedRows | ForeignRows] = {}
    for name in sorted({*expected, *array_names(path)}):
        try:
            arrays[name] = open_zarr_rows(path, name, engine="mmap")
        except StoreError as error:
            damages.append(Damage(name, str(error)))
    total = sum(rows.shape[0] * rows.row_bytes for rows in arrays.values())
    done = 0
    for name, rows in arrays.items():
        count = expected.get(name)
        try:
            encoding_of(rows, (path / name).parent)
        except StoreError as error:
            damages.append(Damage(name, str(error)))
        if count is not None and rows.shape[0] != count:
            damages.append(Damage(name, f"it has {rows.shape[0]} rows, but the manifest says {count}"))
        elif name in changed:
            damages.append(Damage(name, "its zarr.json does not match its checksum"))
        for nbytes, damage in _check(path, name, rows):
            damages.extend([damage] if damage else [])
            done += nbytes
            if progress is not None:
                progress(min(done, total), total)
        rows.close()
    return damages + _check_ids(path, manifest) + _check_appends(store)


def _check_appends(store: Path) -> list[Damage]:
    try:
        with reading(store, version_of(store)) as delta:
            if delta is not None:
                for kind in delta.kinds():
                    for _ in delta.records(kind):
                        pass
    except StoreError as error:
        return [Damage(DELTA, str(error))]
    return []


def expected_rows(manifest: Manifest) -> dict[str, int | None]:
    """Rows of every array the manifest lists; None if it does not say how many."""
    expected: dict[str, int | None] = {}
    for edge_type in manifest.edge_types:
        expected |= _rows_of_graph(manifest, edge_type)
    if manifest.partition is not None:
        expected[names.PARTS] = manifest.partition.parts + 1
    for node_type in manifest.node_types:
        expected |= {names.node_array(name, node_type.name): node_type.count for name in node_type.arrays}
        expected |= map_rows(node_type)
    if manifest.graphs is not None:
        expected |= dict.fromkeys((names.GRAPH_PTR, names.GRAPH_EDGE_PTR), manifest.graphs.count + 1)
        expected |= {names.graphs_array(name): manifest.graphs.count for name in manifest.graphs.arrays}
    events = None if manifest.time is None else manifest.time.events
    if manifest.time is not None:
        own = ["src", "dst", "time", *(["weight"] if manifest.weighted else []), *([] if manifest.time.sorted else ["input"])]
        expected |= {names.event_array(name): events for name in own}
    for edge_type in manifest.edge_types:
        labels = ["y"] if edge_type.task is not None else []
        expected |= {names.edge_array(name, edge_type.key): events for name in (*edge_type.arrays, *labels)}
    return expected


def _edge_splits(path: Path, manifest: Manifest) -> dict[str, int | None]:
    """The arrays of the splits of edges: one, or one a split if they overlap."""
    found: dict[str, int | None] = {}
    for edge_type in manifest.edge_types:
        single, *several = (names.edge_array(name, edge_type.key) for name in ("split", *_own_splits(edge_type)))
        if several:
            alone = not any((path / each).exists() for each in several)
            found |= dict.fromkeys([single] if alone else several)
    return found


def _own_splits(edge_type: EdgeType) -> list[str]:
    return [f"split_{name}" for name in edge_type.splits]


def _rows_of_graph(manifest: Manifest, edge_type: EdgeType) -> dict[str, int | None]:
    nodes, described = manifest.node_type(edge_type.target).count, edge_type if manifest.is_hetero else manifest
    rows: dict[str, int | None] = {"indptr": nodes + 1, **dict.fromkeys(["indices", *described.columns], edge_type.count)}
    if described.weighted:
        rows["weight_sum"] = nodes
    if described.has_self_loops:
        rows |= {"self_loops": None, **({"loop_weight": None} if described.weighted else {})}
    return {names.graph_array(name, edge_type.key): count for name, count in rows.items()}


Step = Iterator[tuple[int, Damage | None]]


def _check(path: Path, name: str, rows: ShardedRows | ForeignRows) -> Step:
    if isinstance(rows, ShardedRows) and has_checksums(path, name):
        return _check_checksums(path, name, rows)
    return _check_decoding(path, name, rows)


def _check_checksums(path: Path, name: str, rows: ShardedRows) -> Step:
    """Yield (bytes read, damage) per inner chunk."""
    chunk_rows = zarr.open_array(path / name, mode="r").chunks[0]
    nbytes = chunk_rows * rows.row_bytes
    try:
        known = checksums(path, name)
    except StoreError as error:
        yield 0, Damage(name, str(error))
        return
    chunks = rows.segments.total // nbytes
    if len(known) != chunks:
        yield 0, Damage(name, f"{names.CHECKSUMS} has {len(known)} entries, but the array has {chunks} chunks")
        return
    for number, (where, data) in enumerate(_chunks(rows, nbytes)):
        span = number * chunk_rows, min((number + 1) * chunk_rows, rows.shape[0])
        good = google_crc32c.value(data) == int(known[number])
        yield nbytes, None if good else Damage(name, f"the checksum of its bytes in {where} does not match", number, span)


def _chunks(rows: ShardedRows, nbytes: int) -> Iterator[tuple[str, Any]]:
    """Yield where each chunk is and its bytes, in order."""
    segments = rows.segments
    if isinstance(segments.far, RemoteArray):
        for number, data in segments.far.objects():
            yield segments.far.object_of(number), data
        return
    for file, payload in zip(segments.paths, segments.payload.tolist(), strict=True):
        with file.open("rb") as shard:
            for _ in range(payload // nbytes):
                yield str(file), shard.read(nbytes)


def _check_decoding(path: Path, name: str, rows: ShardedRows | ForeignRows) -> Step:
    """Yield (bytes decoded, damage) per chunk of an array without checksums."""
    array = zarr.open_array(path / name, mode="r")
    step = array.chunks[0]
    for number, first in enumerate(range(0, rows.shape[0], step)):
        span = first, min(first + step, rows.shape[0])
        damage = None
        try:
            array[span[0] : span[1]]
        except Exception as error:  # a codec may raise anything: all of it is damage
            damage = Damage(name, f"it cannot be decoded ({type(error).__name__}: {str(error).splitlines()[:1]})", number, span)
        yield (span[1] - span[0]) * rows.row_bytes, damage


def _check_ids(path: Path, manifest: Manifest) -> list[Damage]:
    of_nodes = any(node_type.id_kind for node_type in manifest.node_types)
    of_graphs = manifest.graphs is not None and manifest.graphs.id_kind is not None
    damages = []
    remote = RemoteGroup.at(path)
    for name, has_ids in ((names.IDS, of_nodes), (names.GRAPH_IDS, of_graphs)):
        if remote is not None and (has_ids or name in manifest.fingerprints):
            try:
                remote.file(f"{name}/data.mdb", manifest.fingerprints.get(name), again=True)
            except StoreError as error:
                damages.append(Damage(name, str(error)))
            continue
        expected, file = manifest.fingerprints.get(name), path / name / "data.mdb"
        if (expected is not None or has_ids) and not file.exists():
            damages.append(Damage(name, f"{file} is missing"))
        elif expected is not None and expected != file_crc32c(file):
            damages.append(Damage(name, f"the checksum of {file} does not match"))
    return damages

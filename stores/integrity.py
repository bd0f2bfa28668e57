"""Checksums: a store's fingerprint, and `verify`, which locates damage down to the chunk."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import zarr
from numpy.typing import NDArray

from stores import manifest as names
from stores.arrays.encoding import encoding_of, meaning
from stores.arrays.zarr_rows import ForeignRows, ShardedRows, open_zarr_rows
from stores.errors import StoreError
from stores.manifest import Manifest, arrays_of, read_manifest, version_of

Progress = Callable[[int, int], None]
"""called with (bytes done, total bytes)"""
_READ_BYTES = 2**22


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


def verify(path: Path | str, progress: Progress | None = None) -> list[Damage]:
    """Check every chunk of the store at `path` against its checksum; returns the damage found, [] for a sound store.

    Contiguous arrays are compared with `checksums/`; arrays written by others are decoded. Needs memory for one chunk. Raises
    StoreError if there is no store or its manifest cannot be read.

    >>> for damage in verify("papers.ooc"):
    ...     print(damage)
    """
    path, store = arrays_of(path), Path(path)
    manifest = read_manifest(path)
    expected = expected_rows(manifest)
    damages: list[Damage] = []
    opened: dict[str, ShardedRows | ForeignRows] = {}
    for name in sorted({*expected, *array_names(path)}):
        try:
            opened[name] = open_zarr_rows(path, name, engine="mmap")
        except StoreError as error:
            damages.append(Damage(name, str(error)))
    total = sum(rows.shape[0] * rows.row_bytes for rows in opened.values())
    done = 0
    for name, rows in opened.items():
        count = expected.get(name)
        try:
            encoding_of(rows, (path / name).parent)
        except StoreError as error:
            damages.append(Damage(name, str(error)))
        if count is not None and rows.shape[0] != count:
            damages.append(Damage(name, f"it has {rows.shape[0]} rows, but the manifest says {count}"))
        for nbytes, damage in _check(path, name, rows):
            damages.extend([damage] if damage else [])
            done += nbytes
            if progress is not None:
                progress(min(done, total), total)
        rows.close()
    return damages + _check_ids(path, manifest) + _check_appends(store)


def _check_appends(store: Path) -> list[Damage]:
    from stores.growth.delta import DELTA, reading

    try:
        with reading(store, version_of(store)) as delta:
            if delta is not None:
                for kind in delta.kinds():
                    for _ in delta.records(kind):
                        pass
    except StoreError as error:
        return [Damage(DELTA, str(error))]
    return []


def fingerprint(path: Path | str) -> str:
    """Return the sha256 (hex) of the manifest and all checksums of a store; equal fingerprints mean equal data.

    Arrays without checksums (written by others) contribute their metadata.
    """
    path = arrays_of(path)
    return fingerprint_of(path, read_manifest(path))


def fingerprint_of(path: Path, manifest: Manifest) -> str:
    """`fingerprint` of the arrays in the folder `path`, described by `manifest`, of any version."""
    digest = hashlib.sha256(manifest.canonical())
    for name in array_names(path):
        digest.update(f"\0{name}\0".encode())
        if _has_checksums(path, name):
            digest.update(_checksums(path, name).tobytes())
            digest.update(meaning(path / name).encode())
        else:
            digest.update((path / name / "zarr.json").read_bytes())
    return digest.hexdigest()


def array_names(path: Path | str) -> list[str]:
    """Paths of all arrays in the group at `path`, sorted, without checksums and other versions."""
    path = Path(path)
    found = []
    for metadata in path.rglob("zarr.json"):
        name = metadata.parent.relative_to(path).as_posix()
        if not name.startswith((f"{names.CHECKSUMS}/", f"{names.VERSIONS}/")) and name != "." and _may_be_array(metadata):
            found.append(name)
    return sorted(found)


def _may_be_array(metadata: Path) -> bool:
    """False for a group; unreadable metadata counts as an array, so that opening it reports the error."""
    try:
        return bool(json.loads(metadata.read_bytes())["node_type"] == "array")
    except (ValueError, KeyError, TypeError):
        return True


def expected_rows(manifest: Manifest) -> dict[str, int | None]:
    """Rows of every array the manifest lists; None if it does not say how many."""
    edges = [names.INDICES, *(names.column(name) for name in manifest.columns)]
    expected: dict[str, int | None] = {names.INDPTR: manifest.num_nodes + 1, **dict.fromkeys(edges, manifest.num_edges)}
    if manifest.weighted:
        expected[names.WEIGHT_SUM] = manifest.num_nodes
    if manifest.has_self_loops:
        expected[names.SELF_LOOPS] = None
        expected |= {names.LOOP_WEIGHT: None} if manifest.weighted else {}
    if manifest.partition is not None:
        expected[names.PARTS] = manifest.partition.parts + 1
    for node_type in manifest.node_types:
        expected |= {names.node_array(name, node_type.name): node_type.count for name in node_type.arrays}
    events = None if manifest.time is None else manifest.time.events
    if manifest.time is not None:
        own = ["src", "dst", "time", *(["weight"] if manifest.weighted else []), *([] if manifest.time.sorted else ["input"])]
        expected |= {names.event_array(name): events for name in own}
    for edge_type in manifest.edge_types:
        expected |= {names.edge_array(name, edge_type.name): events for name in edge_type.arrays}
    return expected


def file_crc32c(path: Path | str) -> str:
    """crc32c of a file as eight hex digits."""
    crc = 0
    with Path(path).open("rb") as file:
        while block := file.read(_READ_BYTES):
            crc = google_crc32c.extend(crc, block)
    return f"{crc:08x}"


Step = Iterator[tuple[int, Damage | None]]


def _check(path: Path, name: str, rows: ShardedRows | ForeignRows) -> Step:
    if isinstance(rows, ShardedRows) and _has_checksums(path, name):
        return _check_checksums(path, name, rows)
    return _check_decoding(path, name, rows)


def _check_checksums(path: Path, name: str, rows: ShardedRows) -> Step:
    """Yield (bytes read, damage) per inner chunk."""
    chunk_rows = zarr.open_array(path / name, mode="r").chunks[0]
    nbytes = chunk_rows * rows.row_bytes
    checksums = _checksums(path, name)
    chunks = rows.segments.total // nbytes
    if len(checksums) != chunks:
        yield 0, Damage(name, f"{names.CHECKSUMS} has {len(checksums)} entries, but the array has {chunks} chunks")
        return
    number = 0
    for file, payload in zip(rows.segments.paths, rows.segments.payload.tolist(), strict=True):
        with file.open("rb") as shard:
            for _ in range(payload // nbytes):
                span = number * chunk_rows, min((number + 1) * chunk_rows, rows.shape[0])
                good = google_crc32c.value(shard.read(nbytes)) == int(checksums[number])
                yield (
                    nbytes,
                    None if good else Damage(name, f"the checksum of its bytes in {file} does not match", number, span),
                )
                number += 1


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
    expected = manifest.fingerprints.get(names.IDS)
    file = path / names.IDS / "data.mdb"
    if expected is None and not any(node_type.id_kind for node_type in manifest.node_types):
        return []
    if not file.exists():
        return [Damage(names.IDS, f"{file} is missing")]
    return [] if expected in (None, file_crc32c(file)) else [Damage(names.IDS, f"the checksum of {file} does not match")]


def _has_checksums(path: Path, name: str) -> bool:
    return (path / names.checksum_array(name) / "zarr.json").exists()


def _checksums(path: Path, name: str) -> NDArray[np.uint32]:
    try:
        return np.asarray(zarr.open_array(path / names.checksum_array(name), mode="r")[:], dtype=np.uint32)
    except Exception as error:  # zarr passes on any exception
        raise StoreError(f"{path / names.checksum_array(name)} is damaged: {error}; build the store again") from error

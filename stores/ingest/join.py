"""`join`: puts the shards of an ingest together, array by array, as one ingest would have written them."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from pydantic import ValidationError

from ooc.stores import array_names as names
from ooc.stores.arrays.checksums import checksums
from ooc.stores.arrays.encoding import SCALE
from ooc.stores.arrays.whole import blocks
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.build import finish_store
from ooc.stores.errors import InputError, StoreError
from ooc.stores.fingerprints import array_names, file_crc32c
from ooc.stores.ingest.duck import Progress, silent
from ooc.stores.ingest.spec import IngestResult
from ooc.stores.ingest.steps import Steps, fingerprint
from ooc.stores.io.atomic import check_absent, disk_errors, write_error
from ooc.stores.io.remote.url import refuse_url
from ooc.stores.io.working import tidy
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import SHARD

_INDPTR = "indptr"


@dataclass(frozen=True)
class _Part:
    """A shard on disk."""

    path: Path
    index: int
    count: int
    input: str
    """what the shards of one store have in common; see `ooc.stores.ingest.shards.input_key`"""
    ids: str | None
    """crc32c of the file of external ids, which the first shard has if there are any"""
    manifest: Manifest
    """that of a store with the shard's edges"""

    @classmethod
    def open(cls, path: Path) -> "_Part":
        """Raises InputError if there is no shard."""
        try:
            attributes = json.loads((path / "zarr.json").read_bytes())["attributes"]
            return cls(path=path, **{**attributes[SHARD], "manifest": Manifest.model_validate(attributes[SHARD]["manifest"])})
        except (OSError, ValueError, LookupError, TypeError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "its zarr.json does not say so"
            raise InputError(f"{path} is no shard ({why}): `ooc ingest` with `shard` makes one") from None


def join(out: Path | str, shards: Sequence[Path | str], progress: Progress | None = None) -> IngestResult:
    """Put the shards of a store together, byte for byte as one ingest would have written it.

    Rows are read and written once, in a few MiB of memory, and compared with their checksums. The store is built in
    `<out>.partial` and appears whole. A killed join leaves no store, and the same call goes on after the last finished array.
    The shards remain.

    Args:
        out: Directory of the store to write.
        shards: Directories that ingests with `shard="1/n"` to "n/n" wrote, in any order.
        progress: Called with the step, the units done, and in total.

    Returns:
        Path and counts of the store.

    Raises:
        InputError: If a shard is missing, there twice, or of another store.
        StoreError: If `out` exists, a shard is damaged, or the disk is full.

    >>> ooc.ingest("papers-1", edges="edges/*.parquet", num_nodes=8_000_000, shard="1/2")
    >>> ooc.ingest("papers-2", edges="edges/*.parquet", num_nodes=8_000_000, shard="2/2")
    >>> ooc.join("papers.ooc", ["papers-1", "papers-2"]).num_nodes
    8000000
    """
    begin, out = time.perf_counter(), refuse_url(out, "joined")
    tidy(out)
    check_absent(out)
    parts = _in_order([_Part.open(refuse_url(path, "joined")) for path in shards])
    steps = Steps(out, fingerprint("join", [part.path / "zarr.json" for part in parts]))
    keep = False
    try:
        manifest = _Join(parts, steps, progress or silent).run()
        finish_store(steps.store, out, manifest)
    except OSError as error:
        raise write_error(error, out) from error
    except (KeyboardInterrupt, SystemExit, MemoryError):
        keep = steps.store.is_dir()  # interrupted, not failed: the same call goes on, unless the store was published
        raise
    finally:
        steps.close(keep)
    seconds, resumed = time.perf_counter() - begin, tuple(steps.resumed)
    counts = manifest.num_nodes, manifest.num_edges
    return IngestResult(out, *counts, seconds=seconds, resumed=resumed)


def _in_order(parts: Sequence[_Part]) -> list[_Part]:
    """The shards by number. Raises InputError unless they are all shards of one store, each once."""
    if not parts:
        raise InputError("there is no shard to join: name the directories that ingests with `shard` wrote")
    first = parts[0]
    for part in parts:
        if part.count != first.count:
            raise InputError(
                f"{part.path} is one of {part.count} shards, {first.path} one of {first.count}: give those of one store"
            )
        if part.input != first.input:
            raise InputError(
                f"{part.path} is not of the same store as {first.path}: it was built with other settings or input files, or by "
                "another version of ooc; build it again as the others"
            )
    by_index = {part.index: part for part in parts}
    for part in parts:
        if by_index[part.index] is not part:
            raise InputError(f"{by_index[part.index].path} and {part.path} are both shard {part.index}: give each once")
    missing = [f"{index}/{first.count}" for index in range(1, first.count + 1) if index not in by_index]
    if missing:
        are = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise InputError(f"shard {missing[0]}{are} missing: give all {first.count}, or build it by `shard={missing[0]!r}`")
    return [by_index[index] for index in range(1, first.count + 1)]


class _Join:
    """One join; a step is an array."""

    def __init__(self, parts: list[_Part], steps: Steps, progress: Progress) -> None:
        self.parts, self.steps, self.progress = parts, steps, progress

    def run(self) -> Manifest:
        manifest = _summed([part.manifest for part in self.parts], self.parts)
        arrays = array_names(self.parts[0].path)
        for part in self.parts[1:]:
            if array_names(part.path) != arrays:
                raise StoreError(f"{part.path} has other arrays than {self.parts[0].path}: build it again")
        scales = {name for array in arrays if (name := self._scales_of(array)) is not None}
        for name in arrays:
            write = partial(self._copy if name in scales else self._append, name)
            self.steps.run(name, write, [self.steps.store / name, self.steps.store / names.checksum_array(name)])
        self._copy_ids()
        return manifest

    def _scales_of(self, name: str) -> str | None:
        """The array with the scales of an array, which are the same in all shards."""
        scale = _attributes(self.parts[0].path / name).get(SCALE)
        return None if scale is None else f"{name.rpartition('/')[0]}/{scale}"

    def _copy(self, name: str) -> dict[str, Any]:
        """Write an array that all shards have whole."""
        for part in self.parts[1:]:
            if not np.array_equal(checksums(part.path, name), checksums(self.parts[0].path, name)):
                raise StoreError(f"{part.path / name} differs from that of {self.parts[0].path}: build the shards again")
        return self._write(name, self.parts[:1])

    def _append(self, name: str) -> dict[str, Any]:
        """Write the rows of all shards, one behind the other."""
        return self._write(name, self.parts)

    def _write(self, name: str, parts: Sequence[_Part]) -> dict[str, Any]:
        bounds = name.startswith("graph/") and name.endswith(f"/{_INDPTR}")
        opened = [open_zarr_rows(part.path, name, "mmap") for part in parts]
        try:
            total = sum(rows.shape[0] for rows in opened)
            with Appender(
                self.steps.store, name, opened[0].shape[1:], opened[0].dtype, _attributes(parts[0].path / name)
            ) as sink:
                for block in _bounds(map(blocks, opened)) if bounds else (block for rows in opened for block in blocks(rows)):
                    sink.append(block)
                    self.progress(f"join {name}", sink.count, total)
        finally:
            for rows in opened:
                rows.close()
        return {}

    def _copy_ids(self) -> None:
        """Step ids.lmdb: the first shard has the ids of all nodes."""
        source, target = (path / names.IDS / "data.mdb" for path in (self.parts[0].path, self.steps.store))
        if self.parts[0].ids is None:
            return

        def copy() -> dict[str, Any]:
            with disk_errors(target):
                target.parent.mkdir(parents=True)
                try:
                    shutil.copyfile(source, target)
                except FileNotFoundError:
                    raise StoreError(f"{source} is missing: build shard 1 again") from None
            if file_crc32c(target) != self.parts[0].ids:
                raise StoreError(f"{source} is damaged: it does not match its checksum; build shard 1 again")
            return {}

        self.steps.run("ids.lmdb", copy, [target.parent])


def _bounds(of_parts: Iterator[Iterator[NDArray[Any]]]) -> Iterator[NDArray[Any]]:
    """The bounds of slots of all nodes: those of each shard count from 0, and its first one is the last one before it."""
    behind = 0
    for number, of_part in enumerate(of_parts):
        last, skipped = behind, number > 0
        for block in of_part:
            found = block + behind
            last = int(found[-1])
            yield found[1:] if skipped else found
            skipped = False
        behind = last


def _attributes(array: Path) -> Mapping[str, Any]:
    return dict(zarr.open_array(array, mode="r").attrs)


def _summed(manifests: Sequence[Manifest], parts: Sequence[_Part]) -> Manifest:
    """The manifest of all edges. Raises StoreError if the shards say different things of the rest."""
    first = manifests[0]
    for manifest, part in zip(manifests, parts, strict=True):
        if _without_edges(manifest) != _without_edges(first):
            raise StoreError(f"{part.path} describes another store than {parts[0].path}: build it again")
    types = []
    for i, edge_type in enumerate(first.edge_types):
        own = [manifest.edge_types[i] for manifest in manifests]
        loops = any(each.has_self_loops for each in own)
        types.append(edge_type.model_copy(update={"count": sum(each.count for each in own), "has_self_loops": loops}))
    changes = {
        "edge_types": types,
        "num_edges": sum(manifest.num_edges for manifest in manifests),
        "has_self_loops": any(manifest.has_self_loops for manifest in manifests),
    }
    return first.model_copy(update=changes)


def _without_edges(manifest: Manifest) -> Manifest:
    """What the shards' manifests have in common."""
    plain = {"count": 0, "has_self_loops": False}
    types = [each.model_copy(update=plain) for each in manifest.edge_types]
    return manifest.model_copy(update={"edge_types": types, "num_edges": 0, "has_self_loops": False})

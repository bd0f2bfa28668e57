"""A store's `zarr.json`: the manifest among the group's attributes, the current version, checksums of metadata."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import google_crc32c
from pydantic import ValidationError

from ooc.stores.array_names import CHECKSUMS, VERSIONS, node_array
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import write_file
from ooc.stores.manifest import FORMAT_VERSION, Manifest

ATTRIBUTE = "ooc"
"""the manifest's key among the group's attributes; other tools may add their own"""
VERSION = "ooc_version"
"""attribute that names the current version of a store; see `ooc.stores.growth`"""
ARRAYS = "ooc_arrays"
"""attribute for other Zarr readers: the folder of the current version's arrays, relative to the store"""
SHARD = "ooc_shard"
"""attribute of a shard of a store that is not yet put together; see `ooc.stores.ingest.shards`"""
APPENDED = "ooc_appended"
"""attribute for other Zarr readers: what `delta.lmdb` has and the arrays lack"""
SUMS = "ooc_checksums"
"""attribute with the crc32c (eight hex digits) of the manifest, under "", and of the metadata of each array with checksums"""
_MEANING = ("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "fill_value")


def write_manifest(path: Path | str, manifest: Manifest) -> None:
    """Atomically make directory `path` a Zarr group with the manifest in its attributes."""
    attributes: dict[str, Any] = {ATTRIBUTE: manifest.as_json()}
    write_group(path, {**attributes, SUMS: {"": _manifest_sum(attributes), **_metadata_sums(Path(path), _summed(Path(path)))}})


def set_version(path: Path | str, manifest: Manifest, version: str) -> None:
    """Atomically make `version`, described by `manifest`, the current one; other tools' attributes are preserved."""
    there = {name: value for name, value in _attributes(Path(path)).items() if name != APPENDED}
    own = {ATTRIBUTE: manifest.as_json(), VERSION: version, ARRAYS: f"{VERSIONS}/{version}"}
    write_group(path, {**there, **own, SUMS: {"": _manifest_sum(own)}})


def set_appended(path: Path | str, counts: dict[str, Any] | None) -> None:
    """Say to other Zarr readers of a store what was appended and is not in its arrays (None: nothing)."""
    before = _attributes(Path(path))
    after = {name: value for name, value in before.items() if name != APPENDED}
    if counts is not None:
        text = "rows of delta.lmdb that the arrays do not have: `ooc.open` reads them, `ooc compact` merges them"
        after[APPENDED] = {**counts, "description": text}
    if after != before:
        write_group(path, after)


def says_appended(path: Path | str) -> bool:
    """Whether a store's attributes say that something was appended; those of earlier stores do not."""
    return APPENDED in _attributes(Path(path))


def version_of(path: Path | str) -> str:
    """Current version of the store's arrays, "" if it was never compacted. Raises StoreError if there is no store."""
    version = _attributes(Path(path)).get(VERSION, "")
    if not isinstance(version, str) or (version and not version.isdecimal()):
        raise StoreError(f"{Path(path) / 'zarr.json'} is damaged: {VERSION} is {version!r}; build the store again")
    return version


def arrays_of(path: Path | str, version: str | None = None) -> Path:
    """Return the folder with the arrays of a version of the store at `path` (None: the current one), a store by itself.

    >>> arrays_of("papers.ooc")  # after `ooc compact papers.ooc`
    PosixPath('papers.ooc/versions/1')
    """
    version = version_of(path) if version is None else version
    return Path(path) / VERSIONS / version if version else Path(path)


def write_group(path: Path | str, attributes: dict[str, Any]) -> None:
    """Write the `zarr.json` of a Zarr v3 group."""
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    write_file(Path(path) / "zarr.json", json.dumps(metadata, indent=2).encode())


def read_manifest(path: Path | str) -> Manifest:
    """Read the manifest of the store at `path`.

    Raises StoreError if there is no store, its manifest is damaged, or its format is newer than supported.
    """
    path = Path(path)
    attributes = _attributes(path)
    manifest = attributes.get(ATTRIBUTE)
    if SHARD in attributes:
        raise StoreError(f"{path} is a shard of a store: put all of them together with `ooc join OUT SHARD...`")
    if not isinstance(manifest, dict):
        raise StoreError(f"{path} is a Zarr group but not a finished ooc store: build one with `ooc ingest`")
    version = manifest.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise StoreError(f"{path} has format version {version}, this ooc reads up to {FORMAT_VERSION}: upgrade ooc")
    if _known_sums(attributes).get("", _manifest_sum(attributes)) != _manifest_sum(attributes):
        raise StoreError(
            f"{path / 'zarr.json'} is damaged: the manifest does not match its checksum; "
            "restore the file or build the store again"
        )
    try:
        return Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        message = f"the manifest in {path / 'zarr.json'} is damaged at {where}: {first['msg']}; build the store again"
        raise StoreError(message) from None


def arrays_listed(path: Path | str) -> list[str]:
    """Return the arrays of the store at `path` by its attributes alone, sorted: those that were written with checksums.

    Raises StoreError as `read_manifest` does, and for a store of an earlier ooc, which lists none.
    """
    manifest = read_manifest(path)
    known = {name for name in _known_sums(_attributes(Path(path))) if name}
    if not known:
        raise StoreError(f"{path} was built by an earlier ooc, which did not list its arrays: ingest it again, or compact it")
    own = {node_array(name, each.name) for each in manifest.node_types for name in each.arrays}
    return sorted(known | own)


def damaged_metadata(path: Path | str) -> list[str]:
    """Return the arrays of the store at `path` whose metadata differ from those written with it, sorted.

    Only what says where and how values are stored counts, so that other tools may add attributes, and only arrays that have
    checksums. [] for stores of an earlier ooc, which have no checksums of metadata.
    """
    known = {name: crc for name, crc in _known_sums(_attributes(Path(path))).items() if name}
    now = _metadata_sums(Path(path), known)
    return sorted(name for name, crc in known.items() if now.get(name, crc) != crc)


def check_metadata(path: Path | str) -> None:
    """Raise StoreError if the metadata of an array of the store at `path` are damaged; see `damaged_metadata`."""
    for name in damaged_metadata(path):
        raise StoreError(
            f"{Path(path) / name} is damaged: its zarr.json does not match its checksum; "
            "restore the file or build the store again"
        )


def _known_sums(attributes: dict[str, Any]) -> dict[str, str]:
    known = attributes.get(SUMS)
    return known if isinstance(known, dict) else {}


def _manifest_sum(attributes: dict[str, Any]) -> str:
    return _json_sum([attributes[ATTRIBUTE], attributes.get(VERSION, "")])


def _summed(path: Path) -> list[str]:
    """Names of the arrays with checksums, sorted."""
    folder = path / CHECKSUMS
    arrays = [file.parent for file in folder.rglob("zarr.json") if json.loads(file.read_bytes())["node_type"] == "array"]
    return sorted(array.relative_to(folder).as_posix() for array in arrays)


def _metadata_sums(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Checksums of the metadata of those arrays that there are with checksums: name -> crc32c, "" if it cannot be read."""
    pairs = {name: (path / name, path / CHECKSUMS / name) for name in names}
    present = {name: pair for name, pair in pairs.items() if all((each / "zarr.json").exists() for each in pair)}
    sums = {name: _array_sum(*pair) for name, pair in present.items()}
    return {name: crc for name, crc in sums.items() if crc is not None}


def _array_sum(*arrays: Path) -> str | None:
    """Checksum of what the metadata of an array, and those of its checksums, say about the place and type of values.

    "" if they cannot be read; None for an array that another writer has replaced, which has no shards.
    """
    meant = []
    try:
        for array in arrays:
            metadata = json.loads((array / "zarr.json").read_bytes())
            attributes = metadata.get("attributes") or {}
            if array == arrays[0] and metadata["codecs"][0]["name"] in ("bytes", "transpose"):
                return None
            own = {key: value for key, value in attributes.items() if key.startswith("ooc_")}
            meant.append([[metadata.get(key) for key in _MEANING], own])
    except (OSError, ValueError, AttributeError, LookupError, TypeError):
        return ""
    return _json_sum(meant)


def _json_sum(value: Any) -> str:
    return f"{google_crc32c.value(json.dumps(value, sort_keys=True).encode()):08x}"


def _attributes(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise StoreError(f"there is no store at {path}: check the path, or build one with `ooc ingest`")
    try:
        metadata = json.loads((path / "zarr.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{path} is not a store: it has no zarr.json; build one with `ooc ingest`") from None
    except (ValueError, RecursionError):
        raise StoreError(f"{path / 'zarr.json'} is damaged: it is not JSON; build the store again") from None
    except OSError as error:
        raise StoreError(f"cannot read {path / 'zarr.json'}: {error.strerror}; check the permissions") from None
    attributes = metadata.get("attributes") if isinstance(metadata, dict) else None
    return attributes if isinstance(attributes, dict) else {}

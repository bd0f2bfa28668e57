"""Checksums of a store's arrays, and the fingerprint they make together."""

import hashlib
import json
from pathlib import Path

import google_crc32c

from ooc.stores import array_names as names
from ooc.stores.arrays.checksums import checksums, has_checksums
from ooc.stores.arrays.encoding import meaning
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import arrays_of, read_manifest

_READ_BYTES = 2**22


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
        if has_checksums(path, name):
            digest.update(checksums(path, name).tobytes())
            digest.update(meaning(path / name).encode())
        else:
            digest.update((path / name / "zarr.json").read_bytes())
    return digest.hexdigest()


def array_names(path: Path | str) -> list[str]:
    """Paths of all arrays in the group at `path`, sorted, without checksums, other versions and LMDB environments."""
    path = Path(path)
    found = []
    for metadata in path.rglob("zarr.json"):
        name = metadata.parent.relative_to(path).as_posix()
        other = name.partition("/")[0] in (".", names.CHECKSUMS, names.VERSIONS, names.IDS, names.GRAPH_IDS, names.DELTA)
        if not other and _may_be_array(metadata):
            found.append(name)
    return sorted(found)


def _may_be_array(metadata: Path) -> bool:
    """False for a group; unreadable metadata counts as an array, so that opening it reports the error."""
    try:
        return bool(json.loads(metadata.read_bytes())["node_type"] == "array")
    except (ValueError, KeyError, TypeError):
        return True


def file_crc32c(path: Path | str) -> str:
    """crc32c of a file as eight hex digits."""
    crc = 0
    with Path(path).open("rb") as file:
        while block := file.read(_READ_BYTES):
            crc = google_crc32c.extend(crc, block)
    return f"{crc:08x}"

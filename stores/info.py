"""Description of a store for `ooc info`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ooc.stores import array_names as names
from ooc.stores.arrays.encoding import encoding_of
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.fingerprints import array_names, fingerprint
from ooc.stores.growth.delta import Appended, reading
from ooc.stores.io.remote.group import RemoteGroup
from ooc.stores.io.remote.url import store_path
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import arrays_of, read_manifest, version_of
from ooc.stores.remote.mirror import opened


def describe(path: Path | str, cache_dir: Path | str | None = None, cache: int | str | None = None) -> dict[str, Any]:
    """Return the store at `path` as JSON-compatible data: counts, types, arrays, splits, fingerprints. Reads no rows.

    Appended data is listed separately under "appends" and "appended". `path` may be a URL; `cache_dir` and `cache` are as of
    `ooc.open`. Raises StoreError if there is no store, it cannot be reached, or an array is truncated.

    >>> describe("papers.ooc")["num_nodes"]
    """
    with opened(path, cache_dir, cache) as store:
        return {**_describe(store), "path": str(store_path(path))}


def _describe(store: Path) -> dict[str, Any]:
    path = arrays_of(store)
    manifest = read_manifest(path)
    with reading(store, version_of(store)) as delta:
        appends = [] if delta is None else delta.appends
    arrays = {name: _array(path, name) for name in array_names(path)}
    return {
        "path": str(store),
        **_described(manifest),
        "arrays": arrays,
        "reduced": _reduced(manifest),
        "bytes": sum(each["bytes"] for each in arrays.values()) + _ids_bytes(path),
        "fingerprint": fingerprint(path),
        "appends": len(appends),
        "appended": asdict(sum(appends, Appended())),
    }


def _described(manifest: Manifest) -> dict[str, Any]:
    """The fields of the manifest; of a homogeneous store also those it does not use, and those of its only node type."""
    found = manifest.as_json()
    if manifest.is_hetero:
        return found
    own = manifest.node_type()
    types = {name: found[name] for name in ("node_types", "edge_types")}
    return {**manifest.model_dump(mode="json"), **types, "splits": dict(own.splits), "has_ids": own.id_kind is not None}


def _reduced(manifest: Manifest) -> dict[str, str]:
    """Array -> how it was made narrower, in words."""
    types = [(each.name, name, reduced) for each in manifest.node_types for name, reduced in each.reduced.items()]
    return {names.node_array(name, node_type): reduced.text for node_type, name, reduced in types}


def _array(path: Path, name: str) -> dict[str, Any]:
    rows = open_zarr_rows(path, name, engine="mmap")
    try:
        meant = encoding_of(rows, (path / name).parent).shown
        return {"dtype": meant, "shape": list(rows.shape), "bytes": rows.shape[0] * rows.row_bytes}
    finally:
        rows.close()


def _ids_bytes(path: Path) -> int:
    remote = RemoteGroup.at(path)
    if remote is not None:
        return sum(remote.client.size(f"{name}/data.mdb") or 0 for name in (names.IDS, names.GRAPH_IDS))
    files = (path / name / "data.mdb" for name in (names.IDS, names.GRAPH_IDS))
    return sum(file.stat().st_size for file in files if file.exists())

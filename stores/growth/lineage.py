"""Earlier states of a store: whether known data is one of them, and which nodes changed since.

A state is a fingerprint as readers see it. `lineage.json` lists those left by compactions with their number of appends, up to
MOST_APPENDS back; `touched.npy` has the number of the last append that touched each node, four bytes per node. Both are in
`versions/state`, in earlier stores in `versions`. For appends not yet merged, both follow from the delta. It is written before
its version is published, so it may list one that never was.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.array_names import NODE, VERSIONS, node_array
from ooc.stores.arrays.encoding import arrays_in
from ooc.stores.errors import StoreError
from ooc.stores.fingerprints import fingerprint_of
from ooc.stores.growth.delta import EDGES, ROWS, Delta, DeltaPart, reading, small
from ooc.stores.growth.parts import NodePart, edge_parts, node_parts
from ooc.stores.growth.place import with_appends
from ooc.stores.growth.versions import STATE, state_folder
from ooc.stores.io.atomic import replacing, write_file
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import arrays_of, read_manifest, version_of

Ints = NDArray[np.int64]
Touched = Mapping[str, NDArray[np.int32]]
"""node type -> number of the last append that touched each of its nodes"""
_LINEAGE, _TOUCHED = "lineage.json", "touched.npy"
MOST_APPENDS = 10_000
"""a run may continue if it last saw the store at most this many appends ago"""


def last_touched(delta: Delta, manifest: Manifest, before: Touched, begin: int) -> Touched:
    """Return the number of the last append that touched each node by node type, int32[N], 0 for none.

    An append touches nodes with a new in-edge or row, and new nodes. The first append of `delta` has number begin + 1;
    `manifest` is that without these appends, `before` (int32[n]) the result for earlier ones.
    """
    found = {name: _of_nodes(delta.of(part.prefix), part, before[name], begin) for name, part in node_parts(manifest).items()}
    for part in edge_parts(manifest).values():
        both = part.undirected or part.reverses
        ends = {"dst": part.type.target, **({"src": part.type.source} if both else {})}
        for number, record in delta.of(part.prefix).records(EDGES):
            for column, name in ends.items():
                _touch(found[name], record[column], begin + number + 1)
    return found


def _of_nodes(delta: DeltaPart, part: NodePart, before: NDArray[np.int32], begin: int) -> NDArray[np.int32]:
    """`last_touched` of a node type, by its own appends."""
    nodes = np.cumsum([part.type.count, *(each.nodes for each in delta.appends)])
    found = np.zeros(int(nodes[-1]), np.int32)
    found[: len(before)] = before[: len(found)]
    for number in range(len(delta.appends)):
        found[nodes[number] : nodes[number + 1]] = begin + number + 1
    for kind in sorted(delta.kinds()):
        for number, record in delta.records(kind) if kind.startswith(f"{ROWS}/") else ():
            _touch(found, record["row"], begin + number + 1)
    return found


def _touch(found: NDArray[np.int32], node: Ints, number: int) -> None:
    found[node] = np.maximum(found[node], number)


def note(path: Path, root: Path, delta: Delta, final: Path) -> None:
    """Record, before version `final` is published, that it is the version `root` with the appends of `delta`."""
    base = read_manifest(root)
    states = _states(path)
    first = fingerprint_of(root, base)
    begin = states.setdefault(first, 0)
    touched = last_touched(delta, base, _touched(path, base, begin), begin)
    for name, numbers in touched.items():
        with replacing(state_folder(path) / _file_of(base, name)) as file:
            np.save(file, numbers)
    for number in range(len(delta.appends)):
        states[with_appends(first, delta.appends[: number + 1])] = begin + number + 1
    states[fingerprint_of(final, read_manifest(final))] = now = begin + len(delta.appends)
    kept = {state: number for state, number in states.items() if number >= now - MOST_APPENDS}
    write_file(state_folder(path) / _LINEAGE, json.dumps(kept).encode())


def touched_since(path: Path, fingerprint: str, now: str) -> Ints | None:
    """Return the nodes touched since the state `fingerprint`, int64[k] ascending; empty if its data equal those of state `now`.

    Nodes of several types are numbered behind one another, in the order of types.

    None if these are not states of the store at `path` in this order. Nodes touched after `now` may be included. Raises
    StoreError if the records are damaged.
    """
    version = version_of(path)
    root = arrays_of(path, version)
    base, states = read_manifest(root), _states(path)
    first = fingerprint_of(root, base)
    begin = states.setdefault(first, 0)
    with reading(path, version) as delta:
        appends = [] if delta is None else delta.appends
        states |= {with_appends(first, appends[:k]): begin + k for k in range(1, len(appends) + 1)}
        was, to = states.get(fingerprint), states.get(now)
        if was is None or to is None or was > to:
            return None
        if was == to:
            return np.empty(0, np.int64)
        touched = _touched(path, base, begin)
        if delta is not None:
            touched = last_touched(delta, base, touched, begin)
    return np.flatnonzero(np.concatenate([*touched.values()]) > was)


def forget_states(path: Path) -> None:
    """Remove what is known of earlier states, before a version that does not follow from them is published."""
    for folder in (path / VERSIONS / STATE, path / VERSIONS):
        for file in (folder / _LINEAGE, folder / _TOUCHED, *folder.glob(f"{Path(_TOUCHED).stem}-*.npy")):
            file.unlink(missing_ok=True)


def input_arrays(root: Path, node_type: str = NODE) -> list[str]:
    """Node arrays used as model input: all but labels, splits and births."""
    return [name for name in arrays_in(root / node_array("", node_type)) if not small(name)]


def _found(path: Path, name: str) -> Path:
    """Where a record is: compactions of an earlier ooc wrote it to `versions/` itself."""
    file, earlier = path / VERSIONS / STATE / name, path / VERSIONS / name
    return earlier if earlier.exists() and not file.exists() else file


def _states(path: Path) -> dict[str, int]:
    file = _found(path, _LINEAGE)
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise StoreError(f"{file} is damaged: it is not JSON; remove it, and start runs on this store anew") from None
    return {str(state): int(number) for state, number in found.items()}


def _file_of(manifest: Manifest, node_type: str) -> str:
    """The file with the numbers of a node type's nodes."""
    return f"{Path(_TOUCHED).stem}-{node_type}.npy" if manifest.is_hetero else _TOUCHED


def _touched(path: Path, manifest: Manifest, begin: int) -> Touched:
    """Node type -> int32[n], for the `begin` appends merged by compactions."""
    if not begin:
        return {name: np.empty(0, np.int32) for name in node_parts(manifest)}
    found = {}
    for name in node_parts(manifest):
        file = _found(path, _file_of(manifest, name))
        try:
            found[name] = np.asarray(np.load(file), np.int32)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{file}, the nodes that appends touched, cannot be read: {error}; start runs on this store anew"
            ) from None
    return found

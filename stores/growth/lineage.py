"""What a store was before it grew: whether data seen earlier is a state of it, and which nodes were touched since.

A state is a fingerprint, as readers see it. `versions/lineage.json` lists those that compactions left behind, each with the
number of appends that it has, and `versions/touched-<number>.npy` the nodes that an append touched; of appends that still wait
both follow from the delta. It is written before the version that it tells of is published, so it may know one that never was.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stores.atomic import write_file
from stores.encoding import arrays_in
from stores.errors import StoreError
from stores.growth.delta import EDGES, ROWS, Delta, reading
from stores.growth.place import with_appends
from stores.integrity import fingerprint_of
from stores.manifest import NODE, VERSIONS, Manifest, arrays_of, node_array, read_manifest, version_of

Ints = NDArray[np.int64]
_LINEAGE = "lineage.json"


def touched_by(delta: Delta, manifest: Manifest) -> list[Ints]:
    """int64[k], ascending, of each append: the nodes that have another in-edge than before, or a new row of any array."""
    found: list[list[Ints]] = [[] for _ in delta.appends]
    for kind in delta.kinds():
        for number, record in delta.records(kind):
            if kind == EDGES:
                found[number] += [record["dst"], *([record["src"]] if manifest.undirected else [])]
            elif kind.startswith(f"{ROWS}/"):
                found[number].append(record["row"])
    return [np.unique(np.concatenate([np.empty(0, np.int64), *each])) for each in found]


def note(path: Path, root: Path, delta: Delta, final: Path) -> None:
    """Before the version `final` is published: that it is what the version `root` is with the appends of `delta`."""
    base = read_manifest(root)
    states = _states(path)
    first = fingerprint_of(root, base)
    begin = states.setdefault(first, 0)
    for number, touched in enumerate(touched_by(delta, base)):
        states[with_appends(first, delta.appends[: number + 1])] = begin + number + 1
        file = path / VERSIONS / f"touched-{begin + number + 1}.npy"
        packed = io.BytesIO()
        np.save(packed, touched)
        write_file(file, packed.getvalue())
    states[fingerprint_of(final, read_manifest(final))] = begin + len(delta.appends)
    write_file(path / VERSIONS / _LINEAGE, json.dumps(states).encode())


def touched_since(path: Path, fingerprint: str, now: str) -> Ints | None:
    """int64[k], ascending: the nodes touched between two states, given by fingerprint; None where these are no states of the
    store at `path`, the first no later than the other.

    Raises StoreError where what is known of them is damaged.
    """
    version = version_of(path)
    root = arrays_of(path, version)
    base, states = read_manifest(root), _states(path)
    first = fingerprint_of(root, base)
    begin, waiting = states.setdefault(first, 0), list[Ints]()
    with reading(path, version) as delta:
        if delta is not None and delta.appends:
            waiting = touched_by(delta, base)
            states |= {with_appends(first, delta.appends[:k]): begin + k for k in range(1, len(waiting) + 1)}
    was, to = states.get(fingerprint), states.get(now)
    if was is None or to is None or was > to:
        return None
    parts = [waiting[k - begin - 1] if k > begin else _touched(path, k) for k in range(was + 1, to + 1)]
    return np.unique(np.concatenate([np.empty(0, np.int64), *parts]))


def input_arrays(root: Path) -> list[str]:
    """Node arrays that models compute on: all but labels, splits and births."""
    return [name for name in arrays_in(root / node_array("", NODE)) if not small(name)]


def small(name: str) -> bool:
    """Whether a node array is of labels, splits or births: of a few bytes a node, and nothing that a model computes on."""
    return name in ("y", "split", "birth") or name.startswith("split_")


def _states(path: Path) -> dict[str, int]:
    file = path / VERSIONS / _LINEAGE
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise StoreError(f"{file} is damaged: it is not JSON; remove it, and start runs on this store anew") from None
    return {str(state): int(number) for state, number in found.items()}


def _touched(path: Path, number: int) -> Ints:
    file = path / VERSIONS / f"touched-{number}.npy"
    try:
        return np.asarray(np.load(file), np.int64)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{file}, the nodes that an append touched, cannot be read: {error}; start runs on this store anew"
        ) from None

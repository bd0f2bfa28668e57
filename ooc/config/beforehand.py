"""What is known to be wrong with a run before torch is imported, which takes seconds.

What is checked here is checked once more where the run is opened: a store or a directory may have changed by then.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ooc.config.base import CONFIG, RunConfig, saved_config
from ooc.stores.errors import ConfigError
from ooc.stores.io.remote.url import StoreUrl
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import arrays_of, read_manifest

_RANDOM = "draw splits by `ooc split` with `random_split='0.6,0.2,0.2'`, or ingest with `{}`"
REMEDIES = {
    "node": _RANDOM.format("split"),
    "graph": _RANDOM.format("graph_split"),
    "edge": "ingest with `edge_split`",
}
"""task -> how a store gets splits for it"""


def check_run(config: RunConfig, starts: bool) -> None:
    """Raise ConfigError or StoreError where a run cannot be.

    Args:
        config: Its settings.
        starts: Whether its directory must not be there.
    """
    if _has_ranks():
        return
    if starts:
        refuse_existing(config.out)
    if not isinstance(config.store, StoreUrl):
        _check_split(config, read_manifest(arrays_of(config.store)))


def check_outputs(run: Path, store: Path) -> None:
    """Raise ConfigError or StoreError where there is no run, or no store, to compute outputs of."""
    if _has_ranks():
        return
    check_is_run(run)
    if not isinstance(store, StoreUrl):
        read_manifest(arrays_of(store))


def check_is_run(path: Path) -> None:
    """Raise ConfigError where `path` is not the directory of a run."""
    if saved_config(path) is None:
        raise ConfigError(f"{path} is not a run of `ooc train`: it holds no {CONFIG}; give the directory of a run")


def refuse_existing(out: Path) -> None:
    """Raise ConfigError if there is something at the path of a new run."""
    if not os.path.lexists(out):
        return
    if (out / CONFIG).is_file():
        raise ConfigError(f"{out} exists already: choose another `out`, or go on with that run by `resume=True`")
    raise ConfigError(f"{out} exists already and is no run: choose another `out`")


def no_split(store: Path, split: str, there: Iterable[str], task: str) -> ConfigError:
    """The error of a store without the split to train on; there: the names of those that it has."""
    have = ", ".join(there)
    remedy = "name another one as `train_split`" if have else REMEDIES[task]
    return ConfigError(f"{store} has no split {split!r} to train on (it has: {have or 'none'}): {remedy}")


def labelled(manifest: Manifest) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Task -> name of what has labels for it -> (the labels' kind, names of the splits)."""
    if manifest.is_hetero:
        of: dict[str, dict[str, tuple[str, list[str]]]] = {
            "node": {each.name: (each.task, [*each.splits]) for each in manifest.node_types if each.task},
            "edge": {":".join(each.key): (each.task, [*each.splits]) for each in manifest.edge_types if each.task},
        }
        return {task: types for task, types in of.items() if types}
    (nodes,), (edges,) = manifest.node_types, manifest.edge_types
    found: dict[str, Any] = {"node": ("", manifest.task, nodes.splits), "edge": ("edges", edges.task, edges.splits)}
    if manifest.graphs is not None:
        found["graph"] = "graphs", manifest.graphs.task, manifest.graphs.splits
    return {task: {name: (kind, [*splits])} for task, (name, kind, splits) in found.items() if kind is not None}


def _check_split(config: RunConfig, manifest: Manifest) -> None:
    """Raise ConfigError if what the run may learn of has labels, but not the split to train on."""
    split, types = getattr(config, "train_split", None), labelled(manifest).get(config.task, {})
    there = [splits for _, splits in types.values()]
    if split is not None and there and not any(split in splits for splits in there):
        raise no_split(config.store, split, dict.fromkeys(name for splits in there for name in splits), config.task)


def _has_ranks() -> bool:
    """Whether torchrun started this process: each of them would say the same, and one may have made the directory already."""
    return "RANK" in os.environ

"""`resplit`: new splits for a finished store, as a new version of its arrays."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores import manifest as names
from ooc.stores.arrays.encoding import arrays_in
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.build import finish_store
from ooc.stores.errors import ConfigError
from ooc.stores.growth.delta import reading
from ooc.stores.growth.lineage import forget_states
from ooc.stores.growth.links import link_the_rest
from ooc.stores.growth.versions import alone, remove_unused
from ooc.stores.ingest import labels
from ooc.stores.ingest.random_split import random_bits
from ooc.stores.ingest.splits import READ_ITEMS, bits_of, open_split, write_splits
from ooc.stores.io.atomic import partial_path
from ooc.stores.manifest import SPLIT_CODES, VERSIONS, Manifest, arrays_of, read_manifest, set_version, version_of

Bits = Iterator[NDArray[np.uint8]]


@dataclass(frozen=True)
class SplitResult:
    """Result of new splits."""

    sizes: dict[str, int]
    """nodes per split"""
    notes: list[str]
    """about empty and overlapping splits, one line each"""


def resplit(
    path: Path | str,
    shares: tuple[float, float, float] | None = None,
    files: Mapping[str, Path | str] | None = None,
    seed: int = 0,
    replace: bool = False,
) -> SplitResult:
    """Give the store at `path` other splits, in one transaction: a kill leaves it with the earlier ones.

    Open readers keep the splits they have. A run that was trained on the earlier splits is not resumed with these.

    Args:
        path: The store.
        shares: Of train, val and test, drawn at random among the labelled nodes (among all without labels).
        files: train, val, test -> npy file of rows or a boolean mask, instead of `shares`.
        seed: Seed of the random splits.
        replace: Whether splits that the store has are replaced.

    Raises:
        ConfigError: If the store has splits and `replace` is false, or appended data; or nothing is given.
        InputError: If a file does not fit.
        StoreError: If there is no store, the disk is full, or an append or compaction is in progress.

    >>> resplit("papers.ooc", shares=(0.6, 0.2, 0.2), seed=1).sizes
    {'train': 6000, 'val': 2000, 'test': 2000}
    """
    path = Path(path)
    if (shares is None) == (not files):
        raise ConfigError("give either `random_split`, or `train`, `val` and `test`")
    if read_manifest(path).is_hetero:  # a folder that is no store gets no locks
        raise ConfigError(f"{path} is heterogeneous: its node types are given splits when it is ingested")
    with alone(path, "growth", wait=False), alone(path, "view", wait=True):
        version = version_of(path)
        root = arrays_of(path, version)
        old = read_manifest(root)
        _check(path, version, old, files, replace)
        remove_unused(path, version, None)  # also what a killed call had written, but not made current
        new = str(int(version or 0) + 1)
        final = path / VERSIONS / new
        out = partial_path(final)
        shutil.rmtree(out, ignore_errors=True)
        try:
            out.mkdir(parents=True)
            bits = _drawn(root, old, shares, seed) if shares is not None else _read(old, files or {})
            given = [name for name, share in zip(SPLIT_CODES, shares, strict=True) if share] if shares else list(files or {})
            made = write_splits(out, bits, out / "splits.bits", given)
            link_the_rest(root, out, without=[names.node_array(name) for name in _split_arrays(root)])
            finish_store(out, final, _described(old, root, made))
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
        forget_states(path)
        set_version(path, read_manifest(final), new)
        remove_unused(path, new, None)
    return SplitResult(made["sizes"], made["notes"])


def _check(path: Path, version: str, old: Manifest, files: Mapping[str, Path | str] | None, replace: bool) -> None:
    with reading(path, version) as delta:
        if delta is not None and delta.appends:
            raise ConfigError(f"{path} has appended data, which splits would not cover: run `ooc compact {path}` first")
    there = old.node_type().splits
    if there and not replace:
        shown = ", ".join(f"{name} {count:,}" for name, count in there.items())
        raise ConfigError(f"{path} has splits ({shown}): `replace=True` gives it others, and runs on these are not resumed")
    if files and (old.partition is not None or old.order != "input"):
        raise ConfigError(f"the rows of {path} are not in the input's order, so files of rows do not fit: ingest it with them")


def _split_arrays(root: Path) -> list[str]:
    return [name for name in arrays_in(root / names.node_array("")) if name == "split" or name.startswith("split_")]


def _read(old: Manifest, files: Mapping[str, Path | str]) -> Bits:
    return bits_of({name: open_split(str(file), str(file), old.num_nodes, None) for name, file in files.items()}, old.num_nodes)


def _drawn(root: Path, old: Manifest, shares: tuple[float, float, float], seed: int) -> Bits:
    def labelled() -> Iterator[NDArray[np.bool_]]:
        parts = ((first, min(first + READ_ITEMS, old.num_nodes)) for first in range(0, old.num_nodes, READ_ITEMS))
        if old.task is None:
            yield from (np.ones(stop - first, bool) for first, stop in parts)
            return
        with closing(open_zarr_rows(root, names.node_array("y"))) as rows:
            for first, stop in parts:
                yield labels.known(read_range(rows, first, stop)[0], old.task)

    return random_bits(seed, shares, labelled)


def _described(old: Manifest, root: Path, made: Mapping[str, Any]) -> Manifest:
    own = old.node_type()
    arrays = sorted({*own.arrays} - {*_split_arrays(root)} | {*made["arrays"]})
    node_type = own.model_copy(update={"splits": made["sizes"], "arrays": arrays})
    others = [node_type if each.name == own.name else each for each in old.node_types]
    return old.model_copy(update={"node_types": others})

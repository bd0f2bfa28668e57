"""`resplit`: new splits for a finished store, as a new version of its arrays."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.array_names import SPLIT_CODES
from ooc.stores.arrays.encoding import arrays_in
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.build import finish_store
from ooc.stores.errors import ConfigError
from ooc.stores.growth.delta import reading
from ooc.stores.growth.links import link_the_rest
from ooc.stores.growth.next_version import next_version
from ooc.stores.growth.versions import alone
from ooc.stores.ingest import labels
from ooc.stores.ingest.random_split import random_bits
from ooc.stores.ingest.splits import READ_ITEMS, bits_of, open_split, write_splits
from ooc.stores.labels import Task
from ooc.stores.manifest import Graphs, Manifest, NodeType
from ooc.stores.metadata import arrays_of, read_manifest, version_of

Bits = Iterator[NDArray[np.uint8]]


@dataclass(frozen=True)
class SplitResult:
    """Result of new splits."""

    sizes: dict[str, int]
    """nodes, or graphs, per split"""
    notes: list[str]
    """about empty and overlapping splits, one line each"""
    what: Literal["node", "graph"] = "node"
    """what is split"""


def resplit(
    path: Path | str,
    shares: tuple[float, float, float] | None = None,
    files: Mapping[str, Path | str] | None = None,
    seed: int = 0,
    replace: bool = False,
    node_type: str | None = None,
) -> SplitResult:
    """Give the store at `path` other splits, in one transaction: a kill leaves it with the earlier ones.

    Of a store of many graphs, the splits are of graphs. Open readers keep the splits they have. A run that was
    trained on the earlier splits is not resumed with these.

    Args:
        path: The store.
        shares: Of train, val and test, drawn at random among the labelled nodes (among all without labels).
        files: train, val, test -> npy file of rows or a boolean mask, instead of `shares`.
        seed: Seed of the random splits.
        replace: Whether splits that the store has are replaced.
        node_type: The type of the nodes to split, in a heterogeneous store.

    Raises:
        ConfigError: If the store has splits and `replace` is false, or appended data; nothing is given, or no such node type.
        InputError: If a file does not fit.
        StoreError: If there is no store, the disk is full, or an append or compaction is in progress.

    >>> resplit("papers.ooc", shares=(0.6, 0.2, 0.2), seed=1).sizes
    {'train': 6000, 'val': 2000, 'test': 2000}
    """
    path = Path(path)
    if (shares is None) == (not files):
        raise ConfigError("give either `random_split`, or `train`, `val` and `test`")
    _subject(path, read_manifest(path), node_type)  # a folder that is no store gets no locks
    with alone(path, "growth", wait=False), alone(path, "view", wait=True):
        version = version_of(path)
        root = arrays_of(path, version)
        old = read_manifest(root)
        subject = _subject(path, old, node_type)
        _check(path, version, old, subject, files, replace)
        with next_version(path, version) as (out, final):
            bits = _drawn(root, subject, shares, seed) if shares is not None else _read(subject, files or {})
            given = [name for name, share in zip(SPLIT_CODES, shares, strict=True) if share] if shares else list(files or {})
            made = write_splits(out, bits, out / "splits.bits", given, place=subject.array, what=subject.what)
            link_the_rest(root, out, without=[subject.array(name) for name in _split_arrays(root, subject)])
            finish_store(out, final, _described(old, root, made, subject))
    return SplitResult(made["sizes"], made["notes"], subject.what)


def _check(
    path: Path, version: str, old: Manifest, subject: "_Subject", files: Mapping[str, Path | str] | None, replace: bool
) -> None:
    with reading(path, version) as delta:
        if delta is not None and delta.appends:
            raise ConfigError(f"{path} has appended data, which splits would not cover: run `ooc compact {path}` first")
    there = subject.splits
    if there and not replace:
        shown = ", ".join(f"{name} {count:,}" for name, count in there.items())
        raise ConfigError(
            f"{path} has splits{subject.of} ({shown}): `replace=True` gives it others, and runs on these are not resumed"
        )
    if files and (old.partition is not None or old.order != "input"):
        raise ConfigError(f"the rows of {path} are not in the input's order, so files of rows do not fit: ingest it with them")


class _Subject(NamedTuple):
    """What is split: the nodes of a type, or the graphs of a store of many."""

    what: Literal["node", "graph"]
    rows: int
    array: Callable[[str], str]
    """path of an array by its name"""
    task: Task | None
    splits: dict[str, int]
    name: str = names.NODE
    """the node type"""

    @property
    def of(self) -> str:
        """The type in messages, "" in a homogeneous store."""
        return "" if self.name == names.NODE else f" of node type {self.name!r}"


def _subject(path: Path, old: Manifest, node_type: str | None) -> _Subject:
    """What to split of a store. Raises ConfigError unless `node_type` is a type of a heterogeneous store, None of another."""
    if not old.is_hetero and node_type is not None:
        raise ConfigError(f"`node_type` is for stores of several types, and {path} has one: leave it out")
    if old.graphs is not None:
        return _Subject("graph", old.graphs.count, names.graphs_array, old.graphs.task, old.graphs.splits)
    if not old.is_hetero:
        return _Subject("node", old.num_nodes, names.node_array, old.task, old.node_type().splits)
    there = [each.name for each in old.node_types]
    if node_type not in there:
        what = f"no node type {node_type!r}" if node_type else "several node types"
        raise ConfigError(f"{path} has {what}: give one of {', '.join(there)} as `node_type`")
    own = old.node_type(node_type)
    return _Subject("node", own.count, partial(names.node_array, node_type=own.name), own.task, own.splits, own.name)


def _split_arrays(root: Path, subject: _Subject) -> list[str]:
    return [name for name in arrays_in(root / subject.array("")) if name == "split" or name.startswith("split_")]


def _read(subject: _Subject, files: Mapping[str, Path | str]) -> Bits:
    opened = {name: open_split(str(file), str(file), subject.rows, None, subject.what) for name, file in files.items()}
    return bits_of(opened, subject.rows)


def _drawn(root: Path, subject: _Subject, shares: tuple[float, float, float], seed: int) -> Bits:
    def labelled() -> Iterator[NDArray[np.bool_]]:
        parts = ((first, min(first + READ_ITEMS, subject.rows)) for first in range(0, subject.rows, READ_ITEMS))
        if subject.task is None:
            yield from (np.ones(stop - first, bool) for first, stop in parts)
            return
        with closing(open_zarr_rows(root, subject.array("y"))) as rows:
            for first, stop in parts:
                yield labels.known(read_range(rows, first, stop)[0], subject.task)

    return random_bits(seed, shares, labelled)


def _described(old: Manifest, root: Path, made: Mapping[str, Any], subject: _Subject) -> Manifest:
    own: NodeType | Graphs = old.node_type(subject.name) if old.graphs is None else old.graphs
    arrays = sorted({*own.arrays} - {*_split_arrays(root, subject)} | {*made["arrays"]})
    if old.graphs is not None:
        return old.model_copy(update={"graphs": old.graphs.model_copy(update={"splits": made["sizes"], "arrays": arrays})})
    node_type = old.node_type(subject.name).model_copy(update={"splits": made["sizes"], "arrays": arrays})
    others = [node_type if each.name == node_type.name else each for each in old.node_types]
    return old.model_copy(update={"node_types": others})

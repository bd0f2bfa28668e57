"""`reduce`: fewer feature columns for a finished store, as a new version of its arrays."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.encoding import Encoding, arrays_in, encoding_of, scale_name
from ooc.stores.arrays.whole import blocks, whole
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.build import finish_store
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.feature_map import with_reduced, write_map
from ooc.stores.growth.delta import reading
from ooc.stores.growth.links import link_the_rest
from ooc.stores.growth.next_version import next_version
from ooc.stores.growth.versions import alone
from ooc.stores.ingest import nodes
from ooc.stores.ingest.duck import Progress, silent
from ooc.stores.ingest.fit_map import Fit, Labels, fit_map, narrowed
from ooc.stores.ingest.reductions import Reduction
from ooc.stores.ingest.splits import training_rows
from ooc.stores.manifest import Manifest, NodeType, Reduced
from ooc.stores.metadata import arrays_of, read_manifest, version_of
from ooc.stores.sizes import format_bytes

OUTSIDE_BYTES = 350_000_000
"""memory beside the matrices: Python, its libraries, pieces of rows, the sample of `mutual`"""
FEATURE = "x"


@dataclass(frozen=True)
class ReduceResult:
    """Result of `reduce`."""

    reduced: Reduced
    """method, numbers of columns, what is kept"""
    before: int
    """bytes of the features before"""
    now: int
    """bytes of the features now"""
    seconds: float


def reduce(
    path: Path | str,
    asked: Reduction,
    *,
    node_type: str | None = None,
    seed: int = 0,
    memory: int = 2 * 10**9,
    progress: Progress = silent,
) -> ReduceResult:
    """Make the features x of the store at `path` narrower, in one transaction: a kill leaves it as it was, or as it is to be.

    One pass for the statistics, for wide rows several, and one that writes. Rows keep their type: float16, bfloat16 and int8
    with new scales; integers become float32, unless columns are chosen. Open readers keep the wide rows, whose disk space is
    free when the last of them closes. A run that was trained on these is not resumed with the narrow ones.

    Args:
        path: The store.
        asked: The method and the number of columns.
        node_type: The type of the nodes, in a heterogeneous store.
        seed: Of what is drawn.
        memory: Limit for the process in bytes.
        progress: Called with (step, done, total, unit).

    Raises:
        ConfigError: If features are narrower already, or were appended to; there are none, or no such node type.
        InputError: If there are too few columns or rows, or a value is NaN or infinite.
        BudgetError: If the matrices do not fit in the memory.
        StoreError: If there is no store, the disk is full, or an append or compaction is in progress.

    >>> reduce("papers.ooc", Reduction("pca", 64)).reduced.width
    64
    """
    begin, path = time.perf_counter(), Path(path)
    _subject(path, read_manifest(path), node_type)  # a folder that is no store gets no locks
    if memory < OUTSIDE_BYTES:
        raise BudgetError(
            f"`ooc reduce` needs at least {format_bytes(OUTSIDE_BYTES)} of memory, not {format_bytes(memory)}: give that as "
            "`memory`"
        )
    with alone(path, "growth", wait=False), alone(path, "view", wait=True):
        version = version_of(path)
        root = arrays_of(path, version)
        old = read_manifest(root)
        own = _subject(path, old, node_type)
        with reading(path, version) as delta:
            if delta is not None and delta.appends:
                raise ConfigError(f"{path} has appended data, which stays as wide as it is: run `ooc compact {path}` first")
        with next_version(path, version) as (out, final), closing(_Features(path, root, old, own)) as features:
            labels = features.labels() if asked.method == "mutual" else None
            reduced = features.write(out, Fit(asked, seed, memory - OUTSIDE_BYTES, labels), progress)
            before, now = features.row_bytes * own.count, features.written * own.count
            link_the_rest(root, out, without=features.replaced)
            finish_store(out, final, with_reduced(old, own.name, {FEATURE: reduced}))
    return ReduceResult(reduced, before, now, time.perf_counter() - begin)


def _subject(path: Path, old: Manifest, node_type: str | None) -> NodeType:
    """The node type whose features get narrower. Raises ConfigError if that is none, or cannot be."""
    there = [each.name for each in old.node_types]
    if not old.is_hetero and node_type is not None:
        raise ConfigError(f"`node_type` is for stores of several types, and {path} has one: leave it out")
    if old.is_hetero and node_type not in there:
        what = f"no node type {node_type!r}" if node_type else "several node types"
        raise ConfigError(f"{path} has {what}: give one of {', '.join(there)} as `node_type`")
    own = old.node_type(node_type or names.NODE)
    of = f" of node type {own.name!r}" if old.is_hetero else ""
    if FEATURE in own.reduced:
        raise ConfigError(f"{path}: the features{of} are {own.reduced[FEATURE]} already; ingest them again for another map")
    if FEATURE not in own.arrays:
        raise ConfigError(f"{path} has no features x{of}: there is nothing to make narrower")
    return own


class _Features:
    """The features of a node type in a store, and the narrow ones in another folder."""

    def __init__(self, path: Path, root: Path, manifest: Manifest, own: NodeType) -> None:
        self.path, self.root, self.manifest, self.own = path, root, manifest, own
        self._path = partial(names.node_array, node_type=own.name)
        self._rows = open_zarr_rows(root, self._path(FEATURE), "mmap")
        self._encoding = encoding_of(self._rows, root / self._path(""))
        self.row_bytes, self.written = self._rows.row_bytes, 0
        """bytes of a row, and of one that was written"""
        self.replaced = [self._path(FEATURE), self._path(scale_name(FEATURE))]
        """the arrays of the store that do not stay"""

    def close(self) -> None:
        self._rows.close()

    def write(self, out: Path, fit: Fit, progress: Progress) -> Reduced:
        """Fit a map, write it and the narrow rows."""
        attributes = self._rows.attributes
        shape = self._rows.shape
        rows = nodes.Rows(
            f"{self.path / self._path(FEATURE)}",
            shape[0],
            int(np.prod(shape[1:], dtype=np.int64)),
            self._encoding.dtype,
            partial(_decoded, self._rows, self._encoding),
            lambda row: f"{self.path / self._path(FEATURE)} row {row}",
            categories=dict(attributes.get(nodes.CATEGORIES, {})),
            sources=tuple(attributes.get(nodes.SOURCES, ())),
        )
        found = fit_map(rows, fit, progress)
        write_map(out, FEATURE, found, self.own.name)
        narrow, unscaled = narrowed(rows, found), nodes.Scale("none", np.zeros(1))
        scaled = len(self._encoding.scale) > 0
        dtype = self._encoding.name if scaled or self._encoding.name in ("float32", "float16", "bfloat16") else "auto"
        storage = nodes.fit_storage(narrow, dtype, unscaled, progress)
        more = {"normalize": attributes["normalize"]} if "normalize" in attributes else {}
        nodes.write_features(out, FEATURE, narrow, storage, unscaled, False, progress, array=self._path, more=more)
        self.written = storage.stored.itemsize * found.reduced.width
        return found.reduced

    def labels(self) -> Labels | None:
        """Labels of the training nodes. Raises ConfigError unless they are classes."""
        task = self.own.task if self.manifest.is_hetero else self.manifest.task
        if task is None or "train" not in self.own.splits:
            return None
        if task not in ("multiclass", "binary"):
            raise ConfigError(
                f"`mutual` compares columns with classes, and the labels of {self.path} are those of a {task} task"
            )
        splits = [name for name in arrays_in(self.root / self._path("")) if name == "split" or name.startswith("split_")]
        training, stored = (
            training_rows(self.root, splits, self._path),
            whole(open_zarr_rows(self.root, self._path("y"), "mmap")),
        )

        def of(first: int, last: int) -> NDArray[np.int64]:
            return np.where(training(first, last), np.asarray(stored[first:last], np.int64), -1)

        return of


def _decoded(rows: Any, encoding: Encoding) -> Iterator[nodes.Block]:
    """The values of stored rows, a block at a time, compared with their checksums."""
    for raw in blocks(rows):
        values = np.empty(raw.shape, encoding.dtype)
        encoding.gather(raw, np.arange(len(raw)), values)
        yield values.reshape(len(values), -1)

"""The last steps of every store writer, and writing a whole store from arrays in memory."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores import manifest as names
from ooc.stores.arrays.descriptions import write_placeholder
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.errors import InputError
from ooc.stores.fingerprints import file_crc32c
from ooc.stores.graph import Graph
from ooc.stores.ids import write_ids
from ooc.stores.io.atomic import check_absent, disk_errors, partial_path, publish, remove_unfinished
from ooc.stores.manifest import IdKind, Manifest, Partition, Task, as_targets, label_attributes, label_dtype, write_manifest


def finish_store(partial: Path | str, final: Path | str, manifest: Manifest) -> Path:
    """Write the manifest into `partial`, sync everything and rename it to `final`, which is returned.

    The manifest is written last, so what a killed writer leaves is not a store. Temporary files that a killed attempt left are
    removed. Raises StoreError if `final` exists.

    >>> finish_store("papers.ooc.partial", "papers.ooc", manifest)
    """
    check_absent(final)
    remove_unfinished(partial)
    ids = Path(partial) / names.IDS / "data.mdb"
    if ids.exists():  # the only part of a store without its own checksums
        manifest = manifest.model_copy(update={"fingerprints": {**manifest.fingerprints, names.IDS: file_crc32c(ids)}})
        write_placeholder(ids.parent, "an LMDB environment: external ids to rows, and back")
    write_manifest(partial, manifest)
    return publish(partial, final)


def write_store(
    path: Path | str,
    graph: Graph,
    *,
    x: NDArray[Any] | None = None,
    y: NDArray[Any] | None = None,
    task: Task | None = None,
    num_classes: int | None = None,
    splits: Mapping[str, Any] | None = None,
    external: Sequence[int] | Sequence[str] | None = None,
    arrays: Mapping[str, NDArray[Any]] | None = None,
    **fields: Any,
) -> Path:
    """Write a store of one node type and one edge type from arrays in memory. Returns `path`.

    Args:
        path: Directory of the store.
        graph: The graph.
        x: Features [N, f].
        y: Labels (see `label_dtype`), -1 or NaN for unlabeled nodes.
        task: Task of the labels.
        num_classes: Number of classes; of a regression the columns of y.
        splits: Name -> row ids.
        external: One id per node, all int or all str.
        arrays: Further node arrays, [N, ...].
        **fields: Further fields of the manifest.

    Raises:
        InputError: If an array does not have one row per node, or y has no task.
        StoreError: If `path` exists.

    >>> write_store("tiny.ooc", Graph.from_edges([0, 1], [1, 2], 3), x=np.eye(3, dtype="float32"), splits={"train": [0]})
    """
    if y is not None and task is None:
        raise InputError("labels y need a task: give task='multiclass', 'binary', 'multilabel' or 'regression'")
    labels = None if y is None or task is None else compact_labels(y, task, num_classes or 2)
    if labels is not None and task == "regression":
        num_classes = int(np.prod(labels.shape[1:], dtype=np.int64))
    arrays_by_name = {**(arrays or {}), **{name: array for name, array in (("x", x), ("y", labels)) if array is not None}}
    node_arrays = _one_row_a_node(arrays_by_name | split_arrays(splits or {}, graph.num_nodes), graph.num_nodes)
    kind = None if external is None else _id_kind(external)
    described = _describe(graph, node_arrays, splits or {}, id_kind=kind, task=task, num_classes=num_classes, **fields)
    with _building(path) as partial:
        write_topology(partial, graph)
        for name, array in node_arrays.items():
            described_as = label_attributes(task) if name == "y" and task is not None else {}
            write_array(partial, names.node_array(name), array, described_as)
        if external is not None:
            _write_external(partial / names.IDS, external)
        return finish_store(partial, path, described)


@contextmanager
def _building(path: Path | str) -> Iterator[Path]:
    """Yield a new directory in which the store `path` is built; it is removed on failure."""
    partial = partial_path(path)
    check_absent(path)
    check_absent(partial)
    with disk_errors(path):
        partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _one_row_a_node(arrays: dict[str, NDArray[Any]], num_nodes: int) -> dict[str, NDArray[Any]]:
    for name, array in arrays.items():
        if len(array) != num_nodes:
            raise InputError(f"node array {name!r} has {len(array)} rows; the graph has {num_nodes} nodes")
    return arrays


def _describe(graph: Graph, arrays: Mapping[str, Any], splits: Mapping[str, Any], **fields: Any) -> Manifest:
    return Manifest.homogeneous(
        graph.num_nodes,
        graph.num_edges,
        columns=sorted(graph.columns),
        weighted="weight" in graph.columns,
        has_self_loops=bool(len(graph.self_loops)),
        arrays=list(arrays),
        splits={name: len(np.unique(np.asarray(ids))) for name, ids in splits.items()},
        partition=None if graph.parts is None else judge(graph, graph.parts, "given"),
        **fields,
    )


def judge(graph: Graph, parts: NDArray[np.int64], method: str) -> Partition:
    """Measure the quality of the parts (int64[P+1]) of a graph in memory."""
    of = np.repeat(np.arange(len(parts) - 1), np.diff(parts))
    target = np.repeat(of, np.diff(graph.indptr))
    cut = float(np.mean(of[graph.indices] != target)) if graph.num_edges else 0.0
    size = np.diff(parts)
    return Partition(parts=len(size), method=method, cut=cut, balance=float(size.max() / size.mean()))


def write_topology(group: Path | str, graph: Graph) -> None:
    """Write a graph's arrays into a group; without self-loops or weights, their arrays are omitted."""
    write_array(group, names.INDPTR, graph.indptr)
    write_array(group, names.INDICES, graph.indices)
    for name, array in graph.columns.items():
        write_array(group, names.column(name), array)
    if len(graph.self_loops):
        write_array(group, names.SELF_LOOPS, graph.self_loops)
        if graph.loop_weight is not None:
            write_array(group, names.LOOP_WEIGHT, graph.loop_weight)
    if graph.weight_sum is not None:
        write_array(group, names.WEIGHT_SUM, graph.weight_sum)
    if graph.parts is not None:
        write_array(group, names.PARTS, graph.parts)


def compact_labels(y: NDArray[Any], task: Task, num_classes: int) -> NDArray[Any]:
    """Convert `y` ([N] or [N, C]) to its dtype on disk: -1 for NaN and negatives, numbers of a regression as they are.

    Raises InputError if a label is out of range or infinite.
    """
    y = np.asarray(y)
    if task == "regression":
        targets, infinite = as_targets(y)
        if infinite.any():
            row = int(np.argwhere(infinite)[0][0])
            raise InputError(f"the label of row {row} is {y[infinite][0]}: targets of a regression are finite, NaN if unknown")
        return targets
    known = y >= 0  # false for NaN
    top = num_classes - 1 if task == "multiclass" else 1
    wrong = known & ((y > top) | (y != np.floor(y)))
    if wrong.any():
        row = int(np.argwhere(wrong)[0][0])
        raise InputError(f"the label of row {row} is {y[wrong][0]}: {task} labels are whole numbers 0..{top}")
    return np.where(known, y, -1).astype(label_dtype(task, num_classes))


def split_arrays(splits: Mapping[str, Any], num_nodes: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of splits (name -> row ids): one int8 `split`, or boolean `split_<name>` if splits overlap.

    >>> split_arrays({"train": [0], "test": [2]}, 3)
    {'split': array([ 0, -1,  2], dtype=int8)}
    """
    masks = {name: np.zeros(num_nodes, bool) for name in splits}
    for name, ids in splits.items():
        masks[name][np.asarray(ids, dtype=np.int64)] = True
    if not masks:
        return {}
    if set(masks) - set(names.SPLIT_CODES) or (np.sum(list(masks.values()), axis=0) > 1).any():
        return {f"split_{name}": mask for name, mask in masks.items()}
    codes = np.full(num_nodes, -1, np.int8)
    for name, mask in masks.items():
        codes[mask] = names.SPLIT_CODES[name]
    return {"split": codes}


def _id_kind(external: Sequence[int] | Sequence[str]) -> IdKind:
    return "str" if isinstance(external[0], str) else "int"


def _write_external(path: Path, external: Sequence[int] | Sequence[str]) -> None:
    kind = _id_kind(external)
    keys: list[Any] = [str(each).encode() for each in external] if kind == "str" else list(external)
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    write_ids(path, kind, [([external[row] for row in order], order)], [(list(external), np.arange(len(keys)))])

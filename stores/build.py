"""The last steps of every store writer, and writing a whole store from arrays in memory."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.array_names import HOMOGENEOUS, NODE, EdgeKey, check_type_name, graph_array, show_edge_type
from ooc.stores.arrays.descriptions import write_placeholder
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.errors import InputError
from ooc.stores.fingerprints import file_crc32c
from ooc.stores.graph import Graph
from ooc.stores.ids import write_ids
from ooc.stores.io.atomic import check_absent, disk_errors, partial_path, publish, remove_unfinished
from ooc.stores.labels import Task, as_targets, label_attributes, label_dtype
from ooc.stores.manifest import EdgeTime, EdgeType, IdKind, Manifest, NodeType, Partition
from ooc.stores.metadata import write_manifest


def finish_store(partial: Path | str, final: Path | str, manifest: Manifest) -> Path:
    """Write the manifest into `partial`, sync everything and rename it to `final`, which is returned.

    The manifest is written last, so what a killed writer leaves is not a store. Temporary files that a killed attempt left are
    removed. Raises StoreError if `final` exists.

    >>> finish_store("papers.ooc.partial", "papers.ooc", manifest)
    """
    check_absent(final)
    remove_unfinished(partial)
    for name in (names.IDS, names.GRAPH_IDS):
        ids = Path(partial) / name / "data.mdb"
        if ids.exists():  # the only part of a store without its own checksums
            manifest = manifest.model_copy(update={"fingerprints": {**manifest.fingerprints, name: file_crc32c(ids)}})
            write_placeholder(ids.parent, "an LMDB environment: external ids to rows, and back")
    write_manifest(partial, manifest.as_new())
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
    given = {"x": x, "y": y, "task": task, "num_classes": num_classes, "splits": splits, "external": external}
    nodes = _Nodes.of(NODE, graph.num_nodes, {**given, "arrays": arrays})
    return _write(path, [nodes], {HOMOGENEOUS: graph}, {}, _describe(graph, nodes, **fields))


def write_hetero_store(
    path: Path | str,
    nodes: Mapping[str, Mapping[str, Any]],
    edges: Mapping[EdgeKey, Graph],
    *,
    edge_arrays: Mapping[EdgeKey, Mapping[str, NDArray[Any]]] | None = None,
    reverse_of: Mapping[EdgeKey, EdgeKey] | None = None,
    **fields: Any,
) -> Path:
    """Write a store of several types from arrays in memory. Returns `path`.

    Args:
        path: Directory of the store.
        nodes: Node type -> what there is of its nodes, all of it optional: x, y, task, num_classes, class_names, splits,
            external and arrays as of `write_store`, and num_nodes for a type that is in no edge type.
        edges: Edge type (source type, name, target type) -> its graph, bipartite (`num_sources`) if the types of its ends
            differ. Every node type of an edge type must be one of `nodes`.
        edge_arrays: Edge type -> arrays with a row per edge id.
        reverse_of: Edge type -> the one whose edges these are in the other direction, with the same edge ids.
        **fields: Further fields of the manifest.

    Raises:
        InputError: If an array does not have one row per node, y has no task, or types do not fit.
        StoreError: If `path` exists.

    >>> writes = Graph.from_edges([0, 1], [2, 2], num_nodes=3, num_sources=2)
    >>> write_hetero_store("tiny.ooc", {"author": {}, "paper": {"x": np.eye(3)}}, {("author", "writes", "paper"): writes})
    """
    for node_type in nodes:
        check_type_name(node_type)
    counts = _counts(nodes, edges)
    of_nodes = [_Nodes.of(name, counts[name], given) for name, given in nodes.items()]
    arrays, reverses = edge_arrays or {}, reverse_of or {}
    for key in {*arrays, *reverses, *reverses.values()} - set(edges):
        raise InputError(f"there is no edge type {show_edge_type(key)}: there are {', '.join(map(show_edge_type, edges))}")
    if list(nodes) == [NODE] and list(edges) == [HOMOGENEOUS]:
        described = _describe(edges[HOMOGENEOUS], of_nodes[0], edge_arrays=list(arrays.get(HOMOGENEOUS, {})), **fields)
    else:
        edge_types = [_edge_type(key, graph, arrays.get(key, {}), reverses.get(key)) for key, graph in edges.items()]
        described = Manifest.heterogeneous([each.described() for each in of_nodes], edge_types, **fields)
    return _write(path, of_nodes, edges, arrays, described)


@dataclass(frozen=True)
class _Nodes:
    """What is written of the nodes of a type."""

    name: str
    count: int
    arrays: dict[str, NDArray[Any]]
    splits: dict[str, int]
    """sizes"""
    external: Sequence[int] | Sequence[str] | None
    task: Task | None
    num_classes: int | None
    class_names: list[str] | None

    @classmethod
    def of(cls, name: str, count: int, given: Mapping[str, Any]) -> "_Nodes":
        """From the arguments of `write_store`. Raises InputError as it does."""
        known = {"x", "y", "task", "num_classes", "class_names", "splits", "external", "arrays", "num_nodes"}
        if others := set(given) - known:
            raise InputError(f"node type {name!r}: {', '.join(sorted(others))} is unknown; put other arrays into `arrays`")
        x, y, task, classes = (given.get(each) for each in ("x", "y", "task", "num_classes"))
        if y is not None and task is None:
            raise InputError("labels y need a task: give task='multiclass', 'binary', 'multilabel' or 'regression'")
        labels = None if y is None or task is None else compact_labels(y, task, classes or 2)
        if labels is not None and task == "regression":
            classes = int(np.prod(labels.shape[1:], dtype=np.int64))
        splits = given.get("splits") or {}
        own = {key: array for key, array in (("x", x), ("y", labels)) if array is not None}
        held = _one_row_a_node({**(given.get("arrays") or {}), **own, **split_arrays(splits, count)}, count)
        sizes = {split: len(np.unique(np.asarray(ids))) for split, ids in splits.items()}
        return cls(name, count, held, sizes, given.get("external"), task, classes, given.get("class_names"))

    @property
    def id_kind(self) -> IdKind | None:
        return None if self.external is None else _id_kind(self.external)

    def described(self) -> NodeType:
        """The manifest's entry of a heterogeneous store."""
        labels = {"task": self.task, "num_classes": self.num_classes, "class_names": self.class_names}
        known: dict[str, Any] = {"arrays": sorted(self.arrays), "splits": self.splits, "id_kind": self.id_kind, **labels}
        return NodeType(name=self.name, count=self.count, **known)


def _counts(nodes: Mapping[str, Mapping[str, Any]], edges: Mapping[EdgeKey, Graph]) -> dict[str, int]:
    """Number of nodes of each type. Raises InputError unless it is known, and the same for all edge types."""
    found = {name: int(given["num_nodes"]) for name, given in nodes.items() if given.get("num_nodes") is not None}
    for key, graph in edges.items():
        source, name, target = key
        check_type_name(name, "edge type")
        if key == HOMOGENEOUS and (len(edges) > 1 or len(nodes) > 1):
            raise InputError(f"edge type {show_edge_type(key)} is that of graphs of one type: call it something else")
        if (graph.sources is None) != (source == target):
            raise InputError(f"edge type {show_edge_type(key)}: a graph is bipartite (`num_sources`) if its end types differ")
        for node_type, count in ((source, graph.num_sources), (target, graph.num_nodes)):
            if node_type not in nodes:
                there = ", ".join(nodes)
                raise InputError(f"edge type {show_edge_type(key)}: there is no node type {node_type!r}, only {there}")
            if found.setdefault(node_type, count) != count:
                raise InputError(f"edge type {show_edge_type(key)} has {count} nodes of {node_type!r}, not {found[node_type]}")
    for name, given in nodes.items():
        held = [*(given.get("arrays") or {}).values(), *(given[each] for each in ("x", "y", "external") if each in given)]
        if name not in found and not held:
            raise InputError(f"node type {name!r}: give num_nodes, as nothing says how many nodes there are")
        found.setdefault(name, len(held[0]) if held else 0)
    return found


def _edge_type(key: EdgeKey, graph: Graph, arrays: Mapping[str, Any], reverse_of: EdgeKey | None) -> EdgeType:
    time = graph.columns.get("time")
    dtype: Any = None if time is None else str(time.dtype)
    return EdgeType(
        source=key[0],
        name=key[1],
        target=key[2],
        count=graph.num_edges,
        arrays=sorted(arrays),
        columns=sorted(graph.columns),
        has_self_loops=bool(len(graph.self_loops)),
        weighted="weight" in graph.columns,
        time=None if time is None else EdgeTime(dtype=dtype),
        reverse_of=reverse_of,
    )


def _write(
    path: Path | str,
    nodes: Sequence[_Nodes],
    edges: Mapping[EdgeKey, Graph],
    edge_arrays: Mapping[EdgeKey, Mapping[str, NDArray[Any]]],
    described: Manifest,
) -> Path:
    """Write a store of any types."""
    with _building(path) as partial:
        for key, graph in edges.items():
            write_topology(partial, graph, key)
            for name, array in edge_arrays.get(key, {}).items():
                write_array(partial, names.edge_array(name, key), array)
        for each in nodes:
            for name, array in each.arrays.items():
                described_as = label_attributes(each.task) if name == "y" and each.task is not None else {}
                write_array(partial, names.node_array(name, each.name), array, described_as)
            if each.external is not None:
                _write_external(partial / names.IDS, each.external, each.name)
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


def _describe(graph: Graph, nodes: _Nodes, **fields: Any) -> Manifest:
    return Manifest.homogeneous(
        graph.num_nodes,
        graph.num_edges,
        columns=sorted(graph.columns),
        weighted="weight" in graph.columns,
        has_self_loops=bool(len(graph.self_loops)),
        arrays=list(nodes.arrays),
        splits=nodes.splits,
        partition=None if graph.parts is None else judge(graph, graph.parts, "given"),
        id_kind=nodes.id_kind,
        task=nodes.task,
        num_classes=nodes.num_classes,
        **{"class_names": nodes.class_names, **fields},
    )


def judge(graph: Graph, parts: NDArray[np.int64], method: str) -> Partition:
    """Measure the quality of the parts (int64[P+1]) of a graph in memory."""
    of = np.repeat(np.arange(len(parts) - 1), np.diff(parts))
    target = np.repeat(of, np.diff(graph.indptr))
    cut = float(np.mean(of[graph.indices] != target)) if graph.num_edges else 0.0
    size = np.diff(parts)
    return Partition(parts=len(size), method=method, cut=cut, balance=float(size.max() / size.mean()))


def write_topology(group: Path | str, graph: Graph, key: EdgeKey = HOMOGENEOUS) -> None:
    """Write the arrays of an edge type's graph into a group; without self-loops or weights, their arrays are omitted."""
    loop_weight = graph.loop_weight if len(graph.self_loops) else None
    derived = {"loop_weight": loop_weight, "weight_sum": graph.weight_sum, "parts": graph.parts}
    if len(graph.self_loops):
        derived["self_loops"] = graph.self_loops
    for name, array in {"indptr": graph.indptr, "indices": graph.indices, **graph.columns, **derived}.items():
        if array is not None:
            write_array(group, graph_array(name, key), array)


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


def _write_external(path: Path, external: Sequence[int] | Sequence[str], node_type: str) -> None:
    kind = _id_kind(external)
    keys: list[Any] = [str(each).encode() for each in external] if kind == "str" else list(external)
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    write_ids(path, kind, [([external[row] for row in order], order)], [(list(external), np.arange(len(keys)))], node_type)

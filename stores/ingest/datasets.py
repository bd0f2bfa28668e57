"""Whole data sets (npz, OGB's raw layout, arrays in memory), converted to the inputs that plain files would give."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.array_names import SPLIT_CODES, EdgeKey
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import graphbolt, ogb
from ooc.stores.ingest.arrays import (
    KEYS,
    Arrays,
    extras_of,
    is_taken,
    lazy_arrays,
    part_of,
    save_arrays,
    sparse_adjacency,
)
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.inputs import Inputs, open_lazy
from ooc.stores.ingest.lazy import LazyArray
from ooc.stores.ingest.sources import (
    Table,
    TableFile,
    arrow_type,
    check_edges,
    find,
    kind_of,
    open_array,
    open_table,
    stage_edge_array,
    unpack_npz,
)
from ooc.stores.ingest.spec import OF_EVENTS, IngestSpec
from ooc.stores.ingest.typed_settings import EDGE_LABELS

OF_GRAPHS = "graphs."
"""prefix of the names of arrays with a row per graph, and of the graphs' offsets `ptr`, among arrays in memory"""
ARRAYS = "arrays"
"""folder of arrays in memory"""
Lazy = Mapping[str, LazyArray]
"""arrays that are read as they are needed, by the file that each would be"""


def gather_typed(
    spec: IngestSpec, of_type: str | EdgeKey, duck: Duck, stage: Path, arrays: Arrays | None, progress: Progress
) -> Inputs:
    """Find, check and unpack the inputs of one type of nodes or edges; `arrays` are its own."""
    if spec.ogb is not None:
        raw = ogb.OgbFolder(spec.ogb, duck, stage, progress)
        return raw.of_nodes(of_type) if isinstance(of_type, str) else raw.of_edges(of_type)
    if arrays is None:
        return _from_files(spec, duck, stage, progress)
    shown, lazy = f"{spec.pyg or 'data'}[{of_type!r}]", lazy_arrays(arrays, stage / ARRAYS)
    paths = save_arrays(arrays, stage / ARRAYS, lazy)
    if isinstance(of_type, tuple):
        return _from_edge_arrays(paths, shown, spec.time, spec.weight, stage, lazy)
    inputs = Inputs(Table((), {}, text=False))
    if "num_nodes" in paths:
        inputs.num_nodes = _count(
            open_array(Path(paths["num_nodes"])), f"{shown}[num_nodes]", "the type: leave out one without any"
        )
    return _with_arrays(inputs, paths, shown, lazy)


def gather(spec: IngestSpec, duck: Duck, stage: Path, arrays: Arrays | None, progress: Progress) -> Inputs:
    """Find, check and unpack the inputs of `spec` (an append may lack edges); `arrays` are those of a data set in memory."""
    if arrays is not None:
        shown, lazy = spec.pyg or "arrays", lazy_arrays(arrays, stage / ARRAYS)
        paths = save_arrays(arrays, stage / ARRAYS, lazy)
        if spec.time is not None:
            return _from_edge_arrays(paths, shown, spec.time, None, stage, lazy)
        if spec.time_unit != "s":
            raise ConfigError(f"`time_unit` says what the times' numbers mean, but {shown} has no times: leave it out")
        of_graphs = {name.removeprefix(OF_GRAPHS): path for name, path in paths.items() if name.startswith(OF_GRAPHS)}
        of_nodes = {name: path for name, path in paths.items() if not name.startswith(OF_GRAPHS)}
        inputs = _from_npys(of_nodes, shown, stage, lazy)
        inputs.graphs = of_graphs
        inputs.shown |= {path: f"{shown}[{name}]" for name, path in of_graphs.items()}
        return inputs
    if spec.npz is not None:
        paths = {key: str(path) for key, path in unpack_npz(spec.npz, stage / "npz").items()}
        return _from_npys(paths, str(spec.npz), stage, {})
    if spec.ogb is not None:
        return _from_ogb(spec.ogb, duck, stage, progress)
    if spec.graphbolt is not None:
        return _from_graphbolt(spec.graphbolt, duck, stage, progress)
    return _from_files(spec, duck, stage, progress)


def refuse_files_twice(specs: Mapping[str, IngestSpec], field: str, columns: Sequence[str]) -> None:
    """Raise InputError if a file is given twice with the same columns: `specs` by type, files in `field`."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, spec in specs.items():
        pattern = getattr(spec, field)
        for path in [] if pattern is None else find(pattern):
            key = path.resolve(), *(getattr(spec, column) for column in columns)
            if key in seen:
                of = f", of {seen[key]}" if seen[key] == name else f", of {seen[key]} and of {name}"
                raise InputError(f"{path} is listed twice as `{field}`{of if name else ''}: leave one of them out")
            seen[key] = name


def input_files(spec: IngestSpec) -> list[Path]:
    """Return every file the spec names, for the fingerprint. Raises InputError for a missing one."""
    patterns = [spec.edges, spec.nodes, spec.graphs, *spec.feature_globs().values()]
    patterns += [pattern for pattern in spec.edge_feature_patterns().values() if pattern.endswith(".npy")]
    patterns += [str(path) for path in (spec.labels, spec.train, spec.val, spec.test, spec.npz) if path is not None]
    files = [path for pattern in patterns if pattern is not None for path in find(pattern)]
    if spec.graphbolt is not None:
        files += graphbolt.files_of(spec.graphbolt, graphbolt.read_metadata(spec.graphbolt))
    if spec.ogb is not None:
        files += ogb.files_of(spec.ogb)
    return files


def _from_files(spec: IngestSpec, duck: Duck, stage: Path, progress: Progress) -> Inputs:
    inputs = Inputs(Table((), {}, text=False)) if spec.edges is None else _edge_files(spec, duck, stage, progress)
    inputs.num_nodes = spec.num_nodes or inputs.num_nodes
    if spec.nodes is not None:
        wanted = tuple(each for each in (spec.id, *(spec.label or "").split(","), *(spec.split or "").split(",")) if each)
        inputs.nodes = open_table(duck, spec.nodes, stage / "nodes", spec.header, wanted, progress)
    for feature, pattern in spec.feature_globs().items():
        inputs.features[feature] = [str(path) for path in find(pattern, natural=True)]
    inputs.labels = None if spec.labels is None else str(spec.labels)
    given = {"train": spec.train, "val": spec.val, "test": spec.test}
    splits = {split: str(path) for split, path in given.items() if path is not None}
    if spec.graph_id is None:
        inputs.splits = splits
        return inputs
    inputs.graphs = splits
    if spec.graphs is not None:
        wanted = tuple(each for each in (spec.graph_id, *(spec.graph_label or "").split(",")) if each)
        inputs.graph_table = open_table(duck, spec.graphs, stage / "graphs", spec.header, wanted, progress)
    return inputs


def _edge_files(spec: IngestSpec, duck: Duck, stage: Path, progress: Progress) -> Inputs:
    assert spec.edges is not None
    paths = find(spec.edges)
    refuse_files_twice({"": spec}, "edges", ())
    kinds = {kind_of(path) for path in paths}
    if not kinds & {".npy", ".npz"}:
        table = open_table(duck, spec.edges, stage / "edges", spec.header, (spec.src, spec.dst), progress)
        return Inputs(table, weight=spec.weight)
    if len(kinds) > 1:
        raise InputError(f"{spec.edges} matches files of several kinds ({', '.join(sorted(kinds))}): give one kind")
    if spec.weight is not None:
        raise InputError(f"`weight` names a column of a table, and {paths[0]} is an array: give a table")
    return _edge_arrays(spec.edges, paths, stage)


def _edge_arrays(pattern: str, paths: list[Path], stage: Path) -> Inputs:
    """Edges from npy or npz files, the latter possibly with weights or as a sparse matrix."""
    files: list[TableFile] = []
    kinds: set[str | None] = set()
    count = None
    for index, path in enumerate(paths):
        found = {"edge_index": path}
        if path.suffix.lower() == ".npz":
            unpacked = {key: str(each) for key, each in unpack_npz(path, stage / f"unpacked{index}").items()}
            unpacked = sparse_adjacency(unpacked, str(path), stage / f"sparse{index}")
            found = {key: Path(each) for key, each in unpacked.items()}
        if "num_nodes" in found and len(paths) == 1:
            count = _count(open_array(found["num_nodes"]), str(path))
        weight = open_array(found["edge_weight"], str(path)).reshape(-1) if "edge_weight" in found else None
        kinds.add(None if weight is None else arrow_type(weight.dtype))
        edges = open_array(_pick(found, "edges", path), str(path))
        files.append(stage_edge_array(edges, str(path), stage / "edges" / f"{index:05d}.parquet", _columns(weight=weight)))
    if len(kinds) > 1:
        raise InputError(f"{pattern} matches files with and without weights, or with weights of several types: save them alike")
    (kind,) = kinds
    columns = {"src": "int64", "dst": "int64"} | ({} if kind is None else {"weight": kind})
    return Inputs(Table(tuple(files), columns, text=False), weight=None if kind is None else "weight", num_nodes=count)


def _pick(found: dict[str, Path], part: str, shown: Path) -> Path:
    for key in KEYS[part]:
        if key in found:
            return found[key]
    raise InputError(f"{shown} has no array {' or '.join(KEYS[part])}: it has {', '.join(found) or 'none'}")


def _from_npys(paths: dict[str, str], shown: str, stage: Path, lazy: Lazy) -> Inputs:
    paths = sparse_adjacency(paths, shown, stage / "sparse")
    parts = {part: part_of(paths, part) for part in KEYS}
    if parts["edges"] is None:
        raise InputError(f"{shown} has no edge_index (or edges): it has {', '.join(paths) or 'nothing'}")
    names = {path: f"{shown}[{key}]" for key, path in paths.items()}
    weight = None if parts["weight"] is None else open_array(Path(parts["weight"]), names[parts["weight"]]).reshape(-1)
    table = _edge_table(parts["edges"], shown, stage, _columns(weight=weight), lazy)
    inputs = Inputs(table, weight=None if weight is None else "weight")
    if parts["num_nodes"] is not None:
        shown_count = names[parts["num_nodes"]]
        inputs.num_nodes = _count(open_array(Path(parts["num_nodes"]), shown_count), shown_count)
    return _with_arrays(inputs, paths, shown, lazy)


def _edge_table(path: str, shown: str, stage: Path, columns: dict[str, NDArray[Any]], lazy: Lazy) -> Table:
    """The table of edges that are an array, and of their weights or times (`columns`).

    Without these, edges that are read as they are needed are not staged: DuckDB reads them as a view.
    """
    edges = open_lazy(lazy, path, shown)
    kinds = {"src": arrow_type(edges.dtype), "dst": arrow_type(edges.dtype)}
    if isinstance(edges, LazyArray) and not columns:
        check_edges(edges, shown)
        return Table((TableFile(shown, path, edges.size // 2),), kinds, text=False, view=f"array {shown}")
    file = stage_edge_array(edges, shown, stage / "edges" / "00000.parquet", columns)
    return Table((file,), kinds | {name: arrow_type(values.dtype) for name, values in columns.items()}, text=False)


def _from_edge_arrays(
    paths: dict[str, str], shown: str, time: str | None, weight: str | None, stage: Path, lazy: Lazy
) -> Inputs:
    """Edges in memory: edge_index, num_nodes, times, weights, and arrays with a row per edge, which become edge features."""
    names = {path: f"{shown}[{key}]" for key, path in paths.items()}
    opened: dict[str, Any] = {key: open_lazy(lazy, path, names[path]) for key, path in paths.items()}
    count = opened.pop("num_nodes", None)
    del opened["edge_index"]
    columns = {column: opened.pop(key) for column, key in (("weight", weight), (time, time)) if column and key}
    columns = {column: values.reshape(-1) if column == "weight" else values for column, values in columns.items()}
    table = _edge_table(paths["edge_index"], shown, stage, columns, lazy)
    inputs = Inputs(table, weight="weight" if weight else None, shown=names)
    inputs.num_nodes = None if count is None else _count(count, f"{shown}[num_nodes]")
    if count is None:  # one type of several, and no stream of events
        opened = _without_labels(inputs, opened, paths)
    left_out = []
    for key, array in opened.items():
        fits = array.ndim in (1, 2) and len(array) == table.rows and array.size
        if fits and key.isidentifier() and key not in OF_EVENTS and not (count is None and is_taken(key)):
            inputs.edge_features[key] = [paths[key]]
        else:
            left_out.append(f"{key} ({array.dtype} {list(array.shape)})")
    if left_out:
        what = "events" if count is not None else "edges, or have a name that the store takes"
        inputs.notes.append(f"{shown}: left out, as they are no columns of {what}: {', '.join(left_out)}")
    return inputs


def _without_labels(inputs: Inputs, opened: dict[str, Any], paths: dict[str, str]) -> dict[str, Any]:
    """The arrays of edges without their labels and splits, which `inputs` gets."""
    label = next((key for key in EDGE_LABELS if key in opened), None)
    inputs.edge_labels = None if label is None else paths[label]
    masks = {split: mask for split in SPLIT_CODES for mask in (f"edge_{split}_mask", f"{split}_mask") if mask in opened}
    inputs.edge_splits = {split: paths[mask] for split, mask in masks.items()}
    return {key: array for key, array in opened.items() if key not in (label, *masks.values())}


def _columns(**columns: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    return {name: values for name, values in columns.items() if values is not None}


def _with_arrays(inputs: Inputs, paths: dict[str, str], shown: str, lazy: Lazy) -> Inputs:
    """Put arrays other than the edges to the features, labels and splits of `inputs`."""
    parts = {part: part_of(paths, part) for part in KEYS}
    names = {path: f"{shown}[{key}]" for key, path in paths.items()}
    opened = {part: open_lazy(lazy, path, names[path]) for part, path in parts.items() if path is not None}
    inputs.features = {} if parts["x"] is None else {"x": [parts["x"]]}
    inputs.labels = parts["y"]
    inputs.splits = {split: path for split in ("train", "val", "test") if (path := parts[split]) is not None}
    count = inputs.num_nodes or next((len(opened[part]) for part in ("x", "y") if part in opened and opened[part].ndim), None)
    inputs.edge_labels = parts["edge_y"]
    inputs.edge_splits = {split: path for split in SPLIT_CODES if (path := parts[f"edge_{split}"]) is not None}
    extras = extras_of(paths, shown, count, inputs.edges.rows, lazy)
    inputs.extra = list(extras.nodes)
    inputs.features |= {name: [path] for name, path in extras.nodes.items()}
    inputs.edge_features = {name: [path] for name, path in extras.edges.items()}
    if extras.left_out:
        inputs.notes.append(f"{shown}: left out, as they are neither of nodes nor of edges: {', '.join(extras.left_out)}")
    inputs.shown = names
    return inputs


def _from_graphbolt(folder: Path, duck: Duck, stage: Path, progress: Progress) -> Inputs:
    found = graphbolt.read_metadata(folder)
    edges = found["graph"]["edges"][0]
    path = folder / edges["path"]
    if edges.get("format") == "numpy":
        file = stage_edge_array(open_array(path, str(path)), str(path), stage / "edges" / "00000.parquet")
        table = Table((file,), {"src": "int64", "dst": "int64"}, text=False)
    else:
        table = open_table(duck, str(path), stage / "edges", None, ("src", "dst"), progress)
    paths, notes = graphbolt.arrays_of(folder, found, stage / "arrays")
    inputs = Inputs(table, num_nodes=int(found["graph"]["nodes"][0]["num"]), notes=notes)
    return _with_arrays(inputs, paths, str(folder), {})


def _count(array: NDArray[Any], shown: str, of: str = "the one graph") -> int:
    """The one number of an array, of the nodes of something. Raises InputError if it is none, or there are several."""
    values = array.reshape(-1)
    if len(values) != 1 or values.dtype.kind not in "iuf" or not 1 <= values[0] < np.inf or values[0] != np.floor(values[0]):
        held = values[:3].tolist() if values.dtype.kind in "iufb" else str(values.dtype)
        raise InputError(f"{shown} holds {held}: it must be one whole number, at least 1, the nodes of {of}")
    return int(values[0])


def _from_ogb(folder: Path, duck: Duck, stage: Path, progress: Progress) -> Inputs:
    raw, found = folder / "raw", ogb.OgbFolder(folder, duck, stage, progress)
    if not (raw / "data.npz").exists():
        return found.inputs()
    paths = {key: str(path) for key, path in unpack_npz(raw / "data.npz", stage / "npz").items()}
    if (raw / "node-label.npz").exists():
        labels = unpack_npz(raw / "node-label.npz", stage / "labels")
        paths["node_label"] = str(_pick(labels, "y", raw / "node-label.npz"))
    inputs = _from_npys(paths, str(raw / "data.npz"), stage, {})
    found.put_splits(inputs)
    return inputs

"""Whole data sets (npz, OGB's raw layout, arrays in memory), converted to the inputs that plain files would give."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import graphbolt
from ooc.stores.ingest.arrays import EDGE_FEATURES, KEYS, Arrays, extras_of, part_of, save_arrays, sparse_adjacency
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.sources import (
    Table,
    TableFile,
    arrow_type,
    find,
    kind_of,
    open_array,
    open_table,
    stage_edge_array,
    unpack_npz,
)
from ooc.stores.ingest.spec import OF_EVENTS, IngestSpec
from ooc.stores.manifest import SPLIT_CODES

_TABLES = ("edges", "nodes", "label_table", "graph_table")
OF_GRAPHS = "graphs."
"""prefix of the names of arrays with a row per graph, and of the graphs' offsets `ptr`, among arrays in memory"""


@dataclass
class Inputs:
    """The inputs after unpacking, as read by later steps; converts to and from JSON for the journal."""

    edges: Table
    nodes: Table | None = None
    weight: str | None = None
    features: dict[str, list[str]] = field(default_factory=dict)
    """name -> npy files, to be concatenated"""
    feature_tables: dict[str, Table] = field(default_factory=dict)
    labels: str | None = None
    label_table: Table | None = None
    splits: dict[str, str] = field(default_factory=dict)
    """train, val, test -> npy of ids or a mask"""
    num_nodes: int | None = None
    extra: list[str] = field(default_factory=list)
    """features that nobody asked for by name: stored as they are"""
    edge_features: dict[str, list[str]] = field(default_factory=dict)
    """the same as features, by edge"""
    edge_tables: dict[str, Table] = field(default_factory=dict)
    graphs: dict[str, str] = field(default_factory=dict)
    """of many graphs: ptr, y, train, val, test and others by graph -> npy file"""
    graph_table: Table | None = None
    """a row per graph"""
    edge_labels: str | None = None
    """npy of them, by edge"""
    edge_splits: dict[str, str] = field(default_factory=dict)
    """train, val, test -> npy of edge positions or a mask"""
    notes: list[str] = field(default_factory=list)
    """what is left out"""
    shown: dict[str, str] = field(default_factory=dict)
    """unpacked file -> its name in messages"""

    def of_graphs(self, spec: IngestSpec) -> bool:
        """Whether there are many graphs, whose arrays of one dimension stay so, as in the batches of PyG's DataLoader."""
        return spec.graph_id is not None or bool(self.graphs)

    def name(self, path: str) -> str:
        return self.shown.get(path, path)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        tables: dict[str, Any] = {key: Table.from_json(value[key]) for key in _TABLES if value[key]}
        for part in ("feature_tables", "edge_tables"):
            tables[part] = {key: Table.from_json(table) for key, table in value[part].items()}
        return cls(**{**value, **tables})


def gather_typed(
    spec: IngestSpec, of_edges: bool, duck: Duck, stage: Path, arrays: Arrays | None, shown: str, progress: Progress
) -> Inputs:
    """Find, check and unpack the inputs of one type of nodes or edges; `arrays`, called `shown`, are its own."""
    if arrays is None:
        return _from_files(spec, duck, stage, progress)
    paths = save_arrays(arrays, stage / "arrays")
    if of_edges:
        return _from_edge_arrays(paths, shown, spec.time, spec.weight, stage)
    inputs = Inputs(Table((), {}, text=False))
    if "num_nodes" in paths:
        inputs.num_nodes = _count(open_array(Path(paths["num_nodes"])), f"{shown}[num_nodes]")
    return _with_arrays(inputs, paths, shown)


def gather(spec: IngestSpec, duck: Duck, stage: Path, arrays: Arrays | None, progress: Progress) -> Inputs:
    """Find, check and unpack the inputs of `spec` (an append may lack edges); `arrays` are those of a data set in memory."""
    if arrays is not None:
        shown, paths = spec.pyg or "arrays", save_arrays(arrays, stage / "arrays")
        if spec.time is not None:
            return _from_edge_arrays(paths, shown, spec.time, None, stage)
        if spec.time_unit != "s":
            raise ConfigError(f"`time_unit` says what the times' numbers mean, but {shown} has no times: leave it out")
        of_graphs = {name.removeprefix(OF_GRAPHS): path for name, path in paths.items() if name.startswith(OF_GRAPHS)}
        inputs = _from_npys({name: path for name, path in paths.items() if not name.startswith(OF_GRAPHS)}, shown, stage)
        inputs.graphs = of_graphs
        inputs.shown |= {path: f"{shown}[{name}]" for name, path in of_graphs.items()}
        return inputs
    if spec.npz is not None:
        paths = {key: str(path) for key, path in unpack_npz(spec.npz, stage / "npz").items()}
        return _from_npys(paths, str(spec.npz), stage)
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
        if not (spec.ogb / "raw").is_dir():
            raise InputError(f"{spec.ogb} has no folder raw/: give the data set's folder, as ogb unpacks it")
        files += sorted(path for path in spec.ogb.rglob("*") if path.is_file() and path.suffix in (".gz", ".npz", ".csv"))
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


def _from_npys(paths: dict[str, str], shown: str, stage: Path) -> Inputs:
    paths = sparse_adjacency(paths, shown, stage / "sparse")
    parts = {part: part_of(paths, part) for part in KEYS}
    if parts["edges"] is None:
        raise InputError(f"{shown} has no edge_index (or edges): it has {', '.join(paths) or 'nothing'}")
    names = {path: f"{shown}[{key}]" for key, path in paths.items()}
    opened = {part: open_array(Path(path), names[path]) for part, path in parts.items() if path is not None}
    weight = opened["weight"].reshape(-1) if "weight" in opened else None
    file = stage_edge_array(opened["edges"], shown, stage / "edges" / "00000.parquet", _columns(weight=weight))
    columns = {"src": "int64", "dst": "int64"} | ({} if weight is None else {"weight": arrow_type(weight.dtype)})
    inputs = Inputs(Table((file,), columns, text=False), weight=None if weight is None else "weight")
    if parts["num_nodes"] is not None:
        inputs.num_nodes = _count(opened["num_nodes"], names[parts["num_nodes"]])
    return _with_arrays(inputs, paths, shown)


def _from_edge_arrays(paths: dict[str, str], shown: str, time: str | None, weight: str | None, stage: Path) -> Inputs:
    """Edges in memory: edge_index, num_nodes, times, weights, and arrays with a row per edge, which become edge features."""
    names = {path: f"{shown}[{key}]" for key, path in paths.items()}
    opened = {key: open_array(Path(path), names[path]) for key, path in paths.items()}
    edges, count = opened.pop("edge_index"), opened.pop("num_nodes", None)
    columns = {column: opened.pop(key) for column, key in (("weight", weight), (time, time)) if column and key}
    columns = {column: values.reshape(-1) if column == "weight" else values for column, values in columns.items()}
    file = stage_edge_array(edges, shown, stage / "edges" / "00000.parquet", columns)
    kinds = {"src": "int64", "dst": "int64", **{column: arrow_type(values.dtype) for column, values in columns.items()}}
    inputs = Inputs(Table((file,), kinds, text=False), weight="weight" if weight else None, shown=names)
    inputs.num_nodes = None if count is None else _count(count, f"{shown}[num_nodes]")
    if count is None:  # one type of several, and no stream of events
        opened = _without_labels(inputs, opened, paths)
    left_out = []
    for key, array in opened.items():
        fits = array.ndim in (1, 2) and len(array) == file.rows and array.size
        if fits and key.isidentifier() and key not in OF_EVENTS:
            inputs.edge_features[key] = [paths[key]]
        else:
            left_out.append(f"{key} ({array.dtype} {list(array.shape)})")
    if left_out:
        what = "events" if time is not None else "edges"
        inputs.notes.append(f"{shown}: left out, as they are no columns of {what}: {', '.join(left_out)}")
    return inputs


def _without_labels(inputs: Inputs, opened: dict[str, NDArray[Any]], paths: dict[str, str]) -> dict[str, NDArray[Any]]:
    """The arrays of edges without their labels and splits, which `inputs` gets."""
    label = next((key for key in ("edge_y", "y") if key in opened), None)
    inputs.edge_labels = None if label is None else paths[label]
    masks = {split: mask for split in SPLIT_CODES for mask in (f"edge_{split}_mask", f"{split}_mask") if mask in opened}
    inputs.edge_splits = {split: paths[mask] for split, mask in masks.items()}
    return {key: array for key, array in opened.items() if key not in (label, *masks.values())}


def _columns(**columns: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
    return {name: values for name, values in columns.items() if values is not None}


def _with_arrays(inputs: Inputs, paths: dict[str, str], shown: str) -> Inputs:
    """Put arrays other than the edges to the features, labels and splits of `inputs`."""
    parts = {part: part_of(paths, part) for part in KEYS}
    names = {path: f"{shown}[{key}]" for key, path in paths.items()}
    opened = {part: open_array(Path(path), names[path]) for part, path in parts.items() if path is not None}
    inputs.features = {} if parts["x"] is None else {"x": [parts["x"]]}
    inputs.labels = parts["y"]
    inputs.splits = {split: path for split in ("train", "val", "test") if (path := parts[split]) is not None}
    count = inputs.num_nodes or next((len(opened[part]) for part in ("x", "y") if part in opened and opened[part].ndim), None)
    inputs.edge_labels = parts["edge_y"]
    inputs.edge_splits = {split: path for split in SPLIT_CODES if (path := parts[f"edge_{split}"]) is not None}
    extras = extras_of(paths, shown, count, inputs.edges.rows)
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
    return _with_arrays(inputs, paths, str(folder))


def _count(array: NDArray[Any], shown: str) -> int:
    """The one number of an array. Raises InputError if it is none, or there are several."""
    values = array.reshape(-1)
    if len(values) != 1 or values.dtype.kind not in "iuf" or not 1 <= values[0] < np.inf or values[0] != np.floor(values[0]):
        held = values[:3].tolist() if values.dtype.kind in "iufb" else str(values.dtype)
        raise InputError(f"{shown} holds {held}: it must be one whole number, at least 1, the nodes of the one graph")
    return int(values[0])


def _from_ogb(folder: Path, duck: Duck, stage: Path, progress: Progress) -> Inputs:
    raw = folder / "raw"
    if (raw / "data.npz").exists():
        paths = {key: str(path) for key, path in unpack_npz(raw / "data.npz", stage / "npz").items()}
        if (raw / "node-label.npz").exists():
            labels = unpack_npz(raw / "node-label.npz", stage / "labels")
            paths["node_label"] = str(_pick(labels, "y", raw / "node-label.npz"))
        inputs = _from_npys(paths, str(raw / "data.npz"), stage)
    else:
        inputs = _ogb_tables(raw, duck, stage, progress)
    inputs.splits = _ogb_splits(folder, duck, stage, progress)
    inputs.shown |= {path: f"{folder}/split/*/{Path(path).stem}.csv.gz" for path in inputs.splits.values()}
    return inputs


def _ogb_tables(raw: Path, duck: Duck, stage: Path, progress: Progress) -> Inputs:
    def table(name: str) -> Table | None:
        for path in (raw / f"{name}.csv.gz", raw / f"{name}.csv"):
            if path.exists():
                return open_table(duck, str(path), stage / name, False, (), progress)
        return None

    edges = table("edge")
    if edges is None:
        raise InputError(f"{raw} has neither edge.csv.gz nor data.npz: it is not OGB's raw layout of a node data set")
    inputs = Inputs(edges, label_table=table("node-label"))
    counts = table("num-node-list")
    if counts is not None:
        values = duck.rows(f"SELECT {counts.whole('column0')} FROM {counts.relation()}")
        if len(values) != 1 or values[0][0] is None:
            raise InputError(f"{counts.shown} must hold one number, the nodes of the one graph; it has {len(values)} rows")
        inputs.num_nodes = int(values[0][0])
    if (features := table("node-feat")) is not None:
        inputs.feature_tables["x"] = features
    label_rows = inputs.label_table
    count = inputs.num_nodes or next((each.rows for each in (features, label_rows) if each is not None), None)
    for name in sorted({path.name.split(".")[0] for path in (*raw.glob("*.csv.gz"), *raw.glob("*.csv"))} - set(_OGB)):
        if (extra := table(name)) is not None:
            _place_extra(inputs, name.replace("-", "_"), extra, count)
    return inputs


_OGB = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")
"""tables of OGB's raw layout with a meaning of their own"""


def _place_extra(inputs: Inputs, name: str, table: Table, num_nodes: int | None) -> None:
    """Put another table of OGB's to the features of edges or of nodes, by its rows."""
    name = EDGE_FEATURES.get(name, name)
    if name.isidentifier() and table.rows == inputs.edges.rows and (table.rows != num_nodes or "edge" in name):
        inputs.edge_tables[name] = table
    elif name.isidentifier() and table.rows == num_nodes:
        inputs.feature_tables[name] = table
        inputs.extra.append(name)
    else:
        inputs.notes.append(f"{table.shown}: left out, as its {table.rows:,} rows are neither of nodes nor of edges")


def _ogb_splits(folder: Path, duck: Duck, stage: Path, progress: Progress) -> dict[str, str]:
    found = sorted(path for path in (folder / "split").glob("*") if path.is_dir())
    if len(found) > 1:
        listed = ", ".join(path.name for path in found)
        raise InputError(f"{folder}/split has several splits ({listed}): leave the one you want")
    splits = {}
    for ours, theirs in (("train", "train"), ("val", "valid"), ("test", "test")):
        for path in (part / f"{theirs}.csv.gz" for part in found):
            if not path.exists():
                continue
            table = open_table(duck, str(path), stage / f"split-{theirs}", False, (), progress)
            target = stage / f"{theirs}.npy"
            _save_numbers(duck, table, target)
            splits[ours] = str(target)
    return splits


def _save_numbers(duck: Duck, table: Table, path: Path) -> None:
    """Write a table's only column as npy int64[rows] in batches. Raises InputError if it has other values than integers."""
    at = 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (table.rows,)})
        for batch in duck.stream(f"SELECT {table.whole('column0')} AS n FROM {table.relation()}"):
            column = batch.column(0)
            if column.null_count:
                bad = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
                raise InputError(f"{table.where(at + bad)}: not a whole number")
            file.write(column.to_numpy().astype("<i8", copy=False).data)
            at += len(column)


__all__ = ["Inputs", "TableFile", "gather", "input_files"]

"""Folders in OGB's raw layout of csv files: of one graph, with several types too (ogbn-mag), or of many graphs (ogbg-*)."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ooc.stores.array_names import EdgeKey, check_type_name
from ooc.stores.errors import InputError
from ooc.stores.ingest.arrays import EDGE_FEATURES, RowBlocks, save_arrays
from ooc.stores.ingest.columns import table_rows
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.sources import Table, TableFile, open_table
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.typed_settings import MASKS, typed_settings
from ooc.stores.ingest.typed_spec import HeteroSpec

_SPLIT_FILES = {"train": "train", "val": "valid", "test": "test"}
_KNOWN = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")
"""tables with a meaning of their own"""
_TRIPLES, _COUNTS = "triplet-type-list", "num-node-dict"
_MOST_TYPES = 10_000
_MOST_OF_A_GRAPH = 2**40
"""more nodes or edges of one graph of many are a mistake"""


def files_of(folder: Path) -> list[Path]:
    """Every file of a data set that may be read. Raises InputError if the folder is not OGB's."""
    if not (folder / "raw").is_dir():
        raise InputError(f"{folder} has no folder raw/: give the data set's folder, as ogb unpacks it")
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".gz", ".npz", ".csv"))


def typed(spec: IngestSpec) -> IngestSpec | HeteroSpec:
    """Return `spec` or, if the graph of its `ogb` has several types, the specification by type.

    Raises InputError if the lists of types are damaged, ConfigError for settings of one type.
    """
    folder = spec.ogb
    if folder is None or _file(folder / "raw", _TRIPLES) is None:
        return spec
    raw, counts = folder / "raw", _counts(folder / "raw")
    edges: dict[EdgeKey, tuple[str, ...]] = dict.fromkeys(_triples(raw, counts), ())
    nodes = {name: _parts(folder, name) for name in sorted(counts)}
    return typed_settings(spec, nodes, edges)


def _parts(folder: Path, name: str) -> tuple[str, ...]:
    """Names of what there is of a node type, as those of a data set in memory."""
    raw = folder / "raw"
    x = ("x",) if _file(raw / "node-feat" / name, "node-feat") else ()
    y = ("y",) if _file(raw / "node-label" / name, "node-label") else ()
    return x + y + (MASKS if any((each / name).is_dir() for each in _split_folders(folder)) else ())


def _triples(raw: Path, counts: dict[str, int]) -> list[EdgeKey]:
    """The edge types, sorted. Raises InputError for one that is no triple, ends in no node type, or comes twice."""
    path = _file(raw, _TRIPLES)
    assert path is not None
    found: list[EdgeKey] = []
    for number, row in enumerate(_lines(path), 1):
        if len(row) != 3:
            raise InputError(f"{path} line {number}: an edge type is a source type, a name and a target type, not {row[:4]}")
        source, name, target = (each.strip() for each in row)
        for end in (source, target):
            if end not in counts:
                raise InputError(f"{path} line {number}: there is no node type {end!r}, only {', '.join(counts)}")
        key = source, check_type_name(name, "edge type"), target
        if key in found:
            raise InputError(f"{path} line {number}: the edge type stands there already; leave one of them out")
        found.append(key)
    if not found:
        raise InputError(f"{path} lists no edge type")
    return sorted(found)


def _counts(raw: Path) -> dict[str, int]:
    """Number of nodes of each type. Raises InputError if it is none, or there are several graphs."""
    path = _file(raw, _COUNTS)
    if path is None:
        raise InputError(f"{raw} has no {_COUNTS}.csv.gz, which says how many nodes each type has: download it again")
    rows = list(_lines(path))
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        raise InputError(f"{path} must hold the node types and, in one more line, their numbers of nodes, of one graph")
    found: dict[str, int] = {}
    for name, text in zip(*rows, strict=True):
        if not text.strip().isdecimal() or not 1 <= int(text) < 2**62:
            raise InputError(f"{path}: {text[:20]!r} nodes of type {name!r}: it must be a whole number, at least 1")
        found[check_type_name(name.strip())] = int(text)
    return found


def _file(folder: Path, name: str) -> Path | None:
    """The csv file of that name, packed or not."""
    return next((path for path in (folder / f"{name}.csv.gz", folder / f"{name}.csv") if path.is_file()), None)


def _lines(path: Path) -> Iterator[list[str]]:
    """The fields of the lines of a short file. Raises InputError if it is damaged."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from (row for row in islice(csv.reader(file), _MOST_TYPES) if row)
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        raise InputError(f"{path} is damaged: {str(error)[:100]}; download it again") from None


def _split_folders(folder: Path) -> list[Path]:
    """The only folder in split/. Raises InputError if there are several, of which one must be chosen."""
    found = sorted(path for path in (folder / "split").glob("*") if path.is_dir())
    if len(found) > 1:
        listed = ", ".join(path.name for path in found)
        raise InputError(f"{folder}/split has several splits ({listed}): leave the one you want")
    return found


class OgbFolder:
    """A data set in OGB's raw layout; tables are staged below `stage`.

    >>> OgbFolder(Path("data/ogbn_arxiv"), duck, stage).inputs().label_table.rows
    169343
    """

    def __init__(self, folder: Path, duck: Duck, stage: Path, progress: Progress) -> None:
        self.folder, self.raw = folder, folder / "raw"
        self._duck, self._stage, self._progress = duck, stage, progress

    def inputs(self) -> Inputs:
        """The inputs of one graph, or of many."""
        edges = self._table("edge")
        if edges is None:
            raise InputError(f"{self.raw} has neither edge.csv.gz, {_TRIPLES}.csv.gz nor data.npz: it is not OGB's raw layout")
        inputs = Inputs(edges, label_table=self._table("node-label"), feature_tables=self._features())
        counts = self._numbers("num-node-list", 1)
        if counts is not None and (len(counts) > 1 or self._graph_labels is not None):
            self._put_graphs(inputs, counts)
        elif counts is not None:
            inputs.num_nodes = int(counts.sum())
        held = (*inputs.feature_tables.values(), inputs.label_table)
        rows = inputs.num_nodes or next((each.rows for each in held if each is not None), None)
        self._put_extras(inputs, rows, *([] if not inputs.graphs else ["graph-label"]))
        self.put_splits(inputs)
        return inputs

    def of_nodes(self, name: str) -> Inputs:
        """The inputs of a node type."""
        labels = self._table("node-label", "node-label", name)
        inputs = Inputs(Table((), {}, text=False), label_table=labels, feature_tables=self._features("node-feat", name))
        inputs.num_nodes = _counts(self.raw)[name]
        self._put_extras(inputs, inputs.num_nodes, folder=("node-feat", name))
        self.put_splits(inputs, name)
        return inputs

    def of_edges(self, key: EdgeKey) -> Inputs:
        """The inputs of an edge type."""
        folder = "relations", "___".join(key)
        edges = self._table("edge", *folder)
        if edges is None:
            raise InputError(f"{self.raw.joinpath(*folder)} has no edge.csv.gz: download the data set again")
        inputs = Inputs(edges)
        self._put_extras(inputs, None, folder=folder)
        return inputs

    def _table(self, name: str, *folder: str) -> Table | None:
        path = _file(self.raw.joinpath(*folder), name)
        return None if path is None else open_table(self._duck, str(path), self._stage / name, False, (), self._progress)

    def _features(self, *folder: str) -> dict[str, Table]:
        found = self._table("node-feat", *folder)
        return {} if found is None else {"x": found}

    def _numbers(self, name: str, least: int) -> NDArray[np.int64] | None:
        """A number per graph. Raises InputError for one below `least`, or none."""
        table = self._table(name)
        if table is None:
            return None
        path = self._stage / f"{name}.npy"
        self._save_numbers(table, path)
        found: NDArray[np.int64] = np.load(path)
        if (wrong := (found < least) | (found > _MOST_OF_A_GRAPH)).any():
            at = int(np.argmax(wrong))
            raise InputError(
                f"{table.where(at)}: graph {at} has {found[at]} {name.split('-')[1]}s: at least {least}; correct it"
            )
        return found

    @cached_property
    def _graph_labels(self) -> Table | None:
        return self._table("graph-label")

    def _put_graphs(self, inputs: Inputs, nodes: NDArray[np.int64]) -> None:
        """Make the nodes of many graphs rows of one table, and take what is of graphs."""
        edges = self._numbers("num-edge-list", 0)
        if edges is None:
            raise InputError(f"{self.raw} has {len(nodes)} graphs and no num-edge-list.csv.gz, their numbers of edges")
        if len(edges) != len(nodes) or edges.sum() != inputs.edges.rows:
            raise InputError(
                f"{self.raw}/num-edge-list.csv.gz has {len(edges)} graphs and {edges.sum()} edges, num-node-list.csv.gz "
                f"{len(nodes)} graphs and edge.csv.gz {inputs.edges.rows} edges: they must agree"
            )
        ptr, first = (np.concatenate([[0], np.cumsum(each)]) for each in (nodes, edges))
        inputs.num_nodes, inputs.edges = int(ptr[-1]), self._in_one_table(inputs.edges, ptr, first)
        arrays: dict[str, NDArray[np.int64] | RowBlocks] = {"ptr": ptr}
        if self._graph_labels is not None:
            rows = table_rows(self._duck, self._graph_labels, list(self._graph_labels.columns))
            shape = (rows.count,) if len(self._graph_labels.columns) == 1 else (rows.count, len(self._graph_labels.columns))
            arrays["y"] = RowBlocks(shape, rows.dtype, rows.blocks)
        inputs.graphs = save_arrays(arrays, self._stage / "graphs")
        inputs.shown |= {path: f"{self.raw}/graph-label.csv.gz" for name, path in inputs.graphs.items() if name == "y"}

    def _in_one_table(self, edges: Table, ptr: NDArray[np.int64], first: NDArray[np.int64]) -> Table:
        """The edges, whose ends are numbers within their graphs, with rows of all nodes instead."""
        path, done = self._stage / "edges" / "00000.parquet", 0
        path.parent.mkdir(parents=True, exist_ok=True)
        ends = ", ".join(edges.whole(column) for column in list(edges.columns)[:2])
        schema = pa.schema([("src", pa.int64()), ("dst", pa.int64())])
        with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
            for batch in self._duck.stream(f"SELECT {ends} FROM {edges.relation()}"):
                graph = np.searchsorted(first, np.arange(done, done + len(batch)), side="right") - 1
                src, dst = (column.fill_null(-1).to_numpy() for column in batch.columns)
                size = ptr[graph + 1] - ptr[graph]
                if (wrong := (src < 0) | (src >= size) | (dst < 0) | (dst >= size)).any():
                    at = int(np.argmax(wrong))
                    where = edges.where(done + at)
                    raise InputError(f"{where}: an end is none of graph {graph[at]}'s nodes, 0..{size[at] - 1}; correct it")
                writer.write_table(pa.table([src + ptr[graph], dst + ptr[graph]], schema=schema))
                done += len(batch)
        file = TableFile(edges.shown, str(path.resolve()), done, edges.files[0].first_line)
        return Table((file,), {"src": "int64", "dst": "int64"}, text=False)

    def _put_extras(self, inputs: Inputs, num_nodes: int | None, *known: str, folder: tuple[str, ...] = ()) -> None:
        """Put the other tables of a folder to the features of edges or of nodes, by their rows."""
        there = self.raw.joinpath(*folder)
        names = {path.name.split(".")[0] for path in (*there.glob("*.csv.gz"), *there.glob("*.csv"))}
        for name in sorted(names - {*_KNOWN, *known}):
            if (table := self._table(name, *folder)) is not None:
                _place_extra(inputs, name.replace("-", "_"), table, num_nodes)

    def _splits(self, name: str = "") -> dict[str, str]:
        """train, val, test -> npy of rows."""
        found = {}
        for folder in _split_folders(self.folder):
            for ours, theirs in _SPLIT_FILES.items():
                if (path := _file(folder / name, theirs)) is not None:
                    table = open_table(self._duck, str(path), self._stage / f"split-{theirs}", False, (), self._progress)
                    found[ours] = str(self._stage / f"{theirs}.npy")
                    self._save_numbers(table, Path(found[ours]))
        return found

    def put_splits(self, inputs: Inputs, name: str = "") -> None:
        """Put the splits to those of nodes, of a node type if one is named, or of graphs."""
        found = self._splits(name)
        for other in (
            [] if found else sorted(path for folder in _split_folders(self.folder) for path in folder.glob("*.pt"))[:1]
        ):
            inputs.notes.append(f"{other}: left out, as splits are read from csv.gz files of rows")
        (inputs.graphs if inputs.graphs else inputs.splits).update(found)
        inputs.shown |= {path: f"{self.folder}/split/*/{Path(name, Path(path).stem)}.csv.gz" for path in found.values()}

    def _save_numbers(self, table: Table, path: Path) -> None:
        """Write a table's first column as npy int64[rows] in batches. Raises InputError for what is no whole number."""
        at, (column, *_) = 0, table.columns
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (table.rows,)})
            for batch in self._duck.stream(f"SELECT {table.whole(column)} AS n FROM {table.relation()}"):
                numbers = batch.column(0)
                if numbers.null_count:
                    bad = int(np.flatnonzero(numbers.is_null().to_numpy(zero_copy_only=False))[0])
                    raise InputError(f"{table.where(at + bad)}: not a whole number")
                file.write(numbers.to_numpy().astype("<i8", copy=False).data)
                at += len(numbers)


def _place_extra(inputs: Inputs, name: str, table: Table, num_nodes: int | None) -> None:
    """Put another table to the features of edges or of nodes, by its rows."""
    name = EDGE_FEATURES.get(name, name)
    if name.isidentifier() and table.rows == inputs.edges.rows and (table.rows != num_nodes or "edge" in name):
        inputs.edge_tables[name] = table
    elif name.isidentifier() and table.rows == num_nodes:
        inputs.feature_tables[name] = table
        inputs.extra.append(name)
    else:
        inputs.notes.append(f"{table.shown}: left out, as its {table.rows:,} rows are neither of nodes nor of edges")

"""A sequence of PyG graphs as the arrays of an ingest, written to files graph by graph in bounded memory."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data, Dataset
from torch_geometric.data.data import BaseData

from ooc.pyg.data_arrays import DataArrays, arrays_of, as_array, edges_of, in_memory
from ooc.stores.array_names import SPLIT_CODES
from ooc.stores.errors import InputError
from ooc.stores.ingest.arrays import Array, RowBlocks, is_taken
from ooc.stores.ingest.datasets import OF_GRAPHS
from ooc.stores.io.working import scratch_folder

_FLUSH_BYTES = 8 << 20
_HEADER_BYTES = 128
_ANY = frozenset(("node", "edge", "graph"))
_OF_STORE = ("ptr", "edge_ptr", *SPLIT_CODES)
"""names that attributes of graphs cannot have"""
_OF_NODES = frozenset(("x", "pos", "z", "node_species"))
"""attributes that are of nodes where their size fits graphs of one node as well"""


@contextmanager
def arrays_for(data: Any, name: str, out: Path) -> Iterator[DataArrays]:
    """The arrays of a graph or a stream (see `arrays_of`) or, until the block ends, of many graphs (see `staged_graphs`).

    out: the store to build, on whose disk the latter are staged.
    """
    many = _many(data)
    if many is None:
        yield arrays_of(data, name)
        return
    above = next(folder for folder in out.absolute().parents if folder.is_dir())
    with scratch_folder(above, "ooc-graphs") as folder:
        yield staged_graphs(many, name, folder)


def single(data: Any) -> Any:
    """The only item of a PyG data set of one; other data as they are."""
    return data[0] if isinstance(data, Dataset) and len(data) == 1 else data


def _many(data: Any) -> Iterable[Any] | Mapping[str, Iterable[Any]] | None:
    """The graphs of a `Batch`, a data set, a sequence or an iterator, or these by split; None for anything else."""
    if isinstance(data, Batch):
        return (data.get_example(at) for at in range(data.num_graphs))
    if isinstance(data, BaseData):
        return None
    return data if isinstance(data, Iterable) or hasattr(data, "__getitem__") else None


def staged_graphs(graphs: Iterable[Any] | Mapping[str, Iterable[Any]], name: str, folder: Path) -> DataArrays:
    """Write graphs as npy files in `folder` and return these as the arrays of an ingest, with what is left out.

    Args:
        graphs: `Data` objects, or split -> these.
        name: What they are called in messages.
        folder: An empty folder, whose files the ingest takes over.

    Raises:
        InputError: If there is no graph, one has no nodes or an edge to a node that it lacks, or attributes differ.

    >>> arrays, left_out, _ = staged_graphs(TUDataset("data", "MUTAG"), "MUTAG", folder)
    >>> sorted(arrays)
    ['edge_attr', 'edge_index', 'graphs.ptr', 'graphs.y', 'num_nodes', 'x']
    """
    staging, splits, counts = _Staging(name, folder), dict[str, tuple[int, int]](), 0
    for split, part in graphs.items() if isinstance(graphs, Mapping) else (("", graphs),):
        if split and split not in SPLIT_CODES:
            raise InputError(f"{name} has a split {split!r}: name the data sets train, val and test")
        for data in part:
            staging.add(data)
        splits[split], counts = (counts, staging.count), staging.count
    arrays, left_out = staging.finish()
    for split, (first, stop) in splits.items():
        if split:
            arrays[f"{OF_GRAPHS}{split}"] = np.arange(first, stop)
    return DataArrays(arrays, left_out)


@dataclass
class _Attribute:
    """One attribute of all graphs, [rows, ...], and what it may be of."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """of a row"""
    of: frozenset[str] = _ANY
    rows: int = 0
    waiting: list[Array] = field(default_factory=list)
    waiting_bytes: int = 0

    def add(self, values: Array) -> None:
        self.waiting.append(values)
        self.waiting_bytes += values.nbytes
        self.rows += len(values)
        if self.waiting_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        with self.path.open("ab") as file:
            if not file.tell():
                file.write(bytes(_HEADER_BYTES))
            if self.waiting:
                np.ascontiguousarray(np.concatenate(self.waiting), self.dtype).tofile(file)
        self.waiting, self.waiting_bytes = [], 0

    def finish(self, transposed: bool = False) -> Path:
        """Write what waits and the header: of the rows, or of their transposed array."""
        self.flush()
        shape = (*self.shape, self.rows) if transposed else (self.rows, *self.shape)
        text = repr({"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": transposed, "shape": shape})
        size = _HEADER_BYTES - 10
        with self.path.open("r+b") as file:
            file.write(b"\x93NUMPY\x01\x00" + size.to_bytes(2, "little") + text.ljust(size - 1).encode() + b"\n")
        return self.path


class _Staging:
    """Attributes of graphs that come one by one."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.count = self._nodes = 0
        self._ptr = _Attribute(folder / "ptr.npy", np.dtype(np.int64), ())
        self._edges = _Attribute(folder / "edge_index.npy", np.dtype(np.int64), (2,))
        self._found: dict[str, _Attribute] = {}
        self._left_out: dict[str, str] = {}
        self._ptr.add(np.zeros(1, np.int64))

    def add(self, data: Any) -> None:
        """Take the next graph in."""
        here = f"{self.name} graph {self.count}"
        if not isinstance(data, Data):
            raise InputError(f"{here} is a {type(data).__name__}: it must be a Data, a graph of one type of nodes and edges")
        edges, weight = edges_of(data, here)
        nodes = _num_nodes(data, edges)
        if nodes < 1:
            raise InputError(f"{here} has no nodes: leave it out")
        if edges.size and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
            raise InputError(f"{here}: edge_index has node {int(edges.max())}, and the graph has {nodes}; correct it")
        self._edges.add(np.ascontiguousarray(edges.T, np.int64) + self._nodes)
        sizes = {"node": nodes, "edge": edges.shape[1], "graph": 1}
        values = dict(_attributes(data, self._left_out))
        if weight is not None:
            values["edge_weight"] = weight
        if self.count and values.keys() != self._found.keys():
            odd = sorted(values.keys() ^ self._found.keys())[0]
            has, others = ("has", "lack") if odd in values else ("has no", "have")
            raise InputError(f"{here} {has} {odd}, which the graphs before it {others}: give all graphs the same attributes")
        for key, array in values.items():
            self._take(key, array, sizes, here)
        self.count += 1
        self._nodes += nodes
        self._ptr.add(np.array([self._nodes]))

    def _take(self, key: str, array: Array, sizes: dict[str, int], here: str) -> None:
        if key not in self._found:
            self._found[key] = _Attribute(self.folder / f"of-{key}.npy", array.dtype, array.shape[1:])
        known = self._found[key]
        if array.shape[1:] != known.shape or array.dtype != known.dtype:
            raise InputError(
                f"{here}: {key} is {array.dtype}{list(array.shape)}, those before it {known.dtype}[.., "
                f"{', '.join(map(str, known.shape))}]: give all graphs the same"
            )
        fits = frozenset(what for what, size in sizes.items() if len(array) == size)
        known.of &= fits
        known.add(array)

    def finish(self) -> tuple[dict[str, Array | RowBlocks | Path], list[str]]:
        if not self.count:
            raise InputError(f"{self.name} has no graphs: give one at least")
        arrays: dict[str, Array | RowBlocks | Path] = {
            "edge_index": self._edges.finish(transposed=True),
            "num_nodes": np.array(self._nodes),
            f"{OF_GRAPHS}ptr": self._ptr.finish(),
        }
        for key, each in self._found.items():
            what = _chosen(key, each.of)
            if what is None or len(each.shape) > 1 or not each.rows:
                if key == "y":
                    shape = ", ".join(map(str, ("rows", *each.shape)))
                    raise InputError(f"{self.name}: y [{shape}] has no row per graph, node or edge; give [1, C] for a graph")
                self._left_out[key] = f"{each.dtype}, neither a row per node, edge nor graph"
                continue
            if what == "graph" and key != "y" and (is_taken(key) or key in _OF_STORE):
                self._left_out[key] = "the store has another array of that name"
                continue
            arrays[f"{OF_GRAPHS}{key}" if what == "graph" else key] = each.finish()
        return arrays, [f"{key} ({why})" for key, why in self._left_out.items()]


def _chosen(key: str, of: frozenset[str]) -> str | None:
    """What an attribute is of, among what its sizes allow."""
    if "edge" in key and "edge" in of:
        return "edge"
    if key in _OF_NODES and "node" in of:
        return "node"
    return next((what for what in ("graph", "node", "edge") if what in of), None)


def _num_nodes(data: Data, edges: Array) -> int:
    if data.x is not None:
        return int(data.x.shape[0])
    given = data.num_nodes
    return int(edges.max()) + 1 if given is None and edges.size else int(given or 0)


def _attributes(data: Data, left_out: dict[str, str]) -> Iterator[tuple[str, Array]]:
    """(name, rows) of what is stored of a graph besides its edges; a number is a row."""
    for key, value in data.to_dict().items():
        if value is None or key in ("edge_index", "adj_t", "num_nodes", "batch", "ptr"):
            continue
        array = _as_rows(value)
        if array is None or not key.isidentifier() or "index" in key or key == "face":
            left_out.setdefault(key, type(value).__name__)
        else:
            yield key, array


def _as_rows(value: Any) -> Array | None:
    if isinstance(value, Number) and not isinstance(value, complex):
        value = torch.tensor(value)
    array = in_memory(as_array(value))
    if isinstance(array, RowBlocks):
        blocks = list(array.blocks())
        array = np.concatenate(blocks) if blocks else None
    return array if array is None or array.ndim else array.reshape(1)

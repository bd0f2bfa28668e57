"""Arrays of a data set (npz, OGB's data.npz, arrays in memory): what each of them is, and which are left out."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import InputError
from ooc.stores.ingest.lazy import LazyArray
from ooc.stores.ingest.sources import open_array

KEYS = {
    "x": ("x", "node_features", "node_feat", "features", "attr_matrix"),
    "y": ("y", "node_labels", "node_label", "labels"),
    "edges": ("edge_index", "edges"),
    "train": ("train_mask", "train_masks", "train_idx"),
    "val": ("val_mask", "val_masks", "valid_idx", "val_idx"),
    "test": ("test_mask", "test_masks", "test_idx"),
    "num_nodes": ("num_nodes", "num_nodes_list"),
    "weight": ("edge_weight",),
    "edge_y": ("edge_y",),
    "edge_train": ("edge_train_mask",),
    "edge_val": ("edge_val_mask",),
    "edge_test": ("edge_test_mask",),
}
"""names of the arrays in npz files (PyG's, OGB's, and those of the heterophilous-graphs collection)"""
EDGE_FEATURES = {"edge_feat": "edge_attr", "edge_features": "edge_attr"}
"""other names of PyG's edge_attr"""
_COUNTS = ("num_edges", "num_edges_list", "num_graphs")
"""arrays that hold nothing else"""
_PIECE = 1 << 20

Array = NDArray[Any]


@dataclass(frozen=True)
class RowBlocks:
    """An array that is made a block of rows at a time, any number of times."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Callable[[], Iterator[Array]]


Arrays = Mapping[str, Array | RowBlocks | LazyArray | Path]
"""arrays by name; a path is an npy file of the caller's own, which is linked instead of copied"""


@dataclass(frozen=True)
class Extras:
    """Arrays besides x, y, edges and splits: name -> npy file, and a line about what is left out."""

    nodes: dict[str, str]
    edges: dict[str, str]
    left_out: list[str]


def is_taken(name: str) -> bool:
    """Whether labels, splits or first times have the name of an array of nodes, edges or graphs."""
    return name in ("y", "split", "birth") or name.startswith("split_")


def lazy_arrays(arrays: Arrays, folder: Path) -> dict[str, LazyArray]:
    """The arrays that are read as they are needed, by the file in `folder` that each would be: edges, and features.

    Labels, splits, weights and counts are small beside these, and read more often.
    """
    staged = {name for part, names in KEYS.items() if part not in ("x", "edges") for name in names}
    lazy = {key: array for key, array in arrays.items() if isinstance(array, LazyArray) and key not in staged}
    return {str(folder / f"{key}.npy"): array for key, array in lazy.items()}


def save_arrays(arrays: Arrays, folder: Path, lazy: Collection[str] = ()) -> dict[str, str]:
    """Write arrays as npy files and return them by name; `lazy` are files that are not written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for key, array in arrays.items():
        paths[key] = str(folder / f"{key}.npy")
        if paths[key] in lazy:
            continue
        if isinstance(array, RowBlocks | LazyArray):
            _save_blocks(Path(paths[key]), array)
        elif isinstance(array, Path):
            _link(array, Path(paths[key]))
        else:
            np.save(paths[key], array, allow_pickle=False)
    return paths


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def blocks_of(array: Array | RowBlocks | LazyArray) -> Iterator[Array]:
    """An array's bytes, block by block; of one that is read as it is needed, a sample of them."""
    if isinstance(array, LazyArray):
        yield from array.sample()
    elif isinstance(array, RowBlocks):
        yield from array.blocks()
    elif not array.ndim:
        yield array.reshape(1)
    else:
        step = max(1, _PIECE // max(1, int(np.prod(array.shape[1:], dtype=np.int64))))
        for first in range(0, len(array), step):
            yield np.asarray(array[first : first + step])


def _save_blocks(path: Path, array: RowBlocks | LazyArray) -> None:
    descr = np.lib.format.dtype_to_descr(array.dtype)
    with path.open("wb") as file:
        header = {"descr": descr, "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in array.blocks():
            np.ascontiguousarray(block, array.dtype).tofile(file)


def part_of(paths: Mapping[str, str], part: str) -> str | None:
    """The file of x, y, edges, ... by any of its names."""
    return next((paths[key] for key in KEYS[part] if key in paths), None)


def extras_of(
    paths: Mapping[str, str], shown: str, num_nodes: int | None, num_edges: int, lazy: Mapping[str, LazyArray]
) -> Extras:
    """Sort the remaining arrays by their first dimension into those of nodes and of edges; others are left out.

    `lazy` are those that are read as they are needed, by path.
    """
    found = Extras({}, {}, [])
    used = {part_of(paths, part) for part in KEYS}
    for key, path in paths.items():
        if path in used or key in _COUNTS:
            continue
        name, array = EDGE_FEATURES.get(key, key), lazy[path] if path in lazy else _opened(path, f"{shown}[{key}]")
        of_nodes, of_edges = _rows_of(array, num_nodes), _rows_of(array, num_edges)
        plain = array is not None and array.ndim in (1, 2) and array.dtype.kind in "fiub" and name.isidentifier()
        if array is None or not plain or not array.size or not (of_nodes or of_edges) or is_taken(name):
            kind = "no numbers" if array is None else f"{array.dtype} {list(array.shape)}"
            found.left_out.append(f"{key} ({kind})")
        elif of_edges and (not of_nodes or "edge" in key):
            found.edges[name] = path
        else:
            found.nodes[name] = path
    return found


def _opened(path: str, shown: str) -> Array | None:
    try:
        return open_array(Path(path), shown)
    except InputError:
        return None


def _rows_of(array: Array | LazyArray | None, count: int | None) -> bool:
    return array is not None and array.ndim > 0 and count is not None and len(array) == count


def sparse_adjacency(paths: dict[str, str], shown: str, folder: Path) -> dict[str, str]:
    """Replace a SciPy sparse matrix (save_npz, or arrays adj_data, adj_indices, ...) by edge_index, edge_weight and num_nodes.

    Entry (i, j) is an edge from i to j; its value is the edge's weight, unless all are 1. A matrix attr_data, ... becomes x.
    Raises InputError for a matrix that is not square, or of another format than csr, csc and coo.
    """
    prefix = next((each for each in ("", "adj_") if {f"{each}indptr", f"{each}shape"} <= set(paths)), None)
    if prefix is None and {"row", "col", "shape"} <= set(paths):
        prefix = ""
    if prefix is None or part_of(paths, "edges") is not None:
        return paths
    own = {key.removeprefix(prefix): path for key, path in paths.items() if key.startswith(prefix)}
    kept = {key: path for key, path in paths.items() if prefix and not key.startswith(prefix)}
    if {"attr_data", "attr_indices", "attr_indptr", "attr_shape"} <= set(kept):
        parts = {name: f"attr_{name}" for name in ("data", "indices", "indptr", "shape")}
        opened = {name: np.asarray(open_array(Path(kept.pop(key)), f"{shown}[{key}]")) for name, key in parts.items()}
        data, indices, indptr = opened["data"], opened["indices"], opened["indptr"]
        shape = _shape_of(opened["shape"], shown)
        _check_compressed(data, indices, indptr, shape, f"{shown}, attr_data")
        kept |= save_arrays({"x": dense_rows(data, indices, indptr, shape)}, folder)
    arrays = {name: open_array(Path(path), f"{shown}[{prefix}{name}]") for name, path in own.items()}
    return kept | save_arrays(_edges_of(arrays, shown), folder)


def _edges_of(arrays: dict[str, Array], shown: str) -> dict[str, Array | RowBlocks]:
    form = str(np.asarray(arrays.get("format", "csr")).astype("U")) if "row" not in arrays else "coo"
    shape, data = _shape_of(arrays["shape"], shown), arrays.get("data")
    if shape[0] != shape[1]:
        raise InputError(f"{shown} holds a sparse matrix of shape {list(shape)}: an adjacency matrix is square")
    if form == "coo":
        ends = arrays["row"], arrays["col"]
        if ends[0].shape != ends[1].shape or ends[0].ndim != 1 or any(end.dtype.kind not in "iu" for end in ends):
            raise InputError(f"{shown} is damaged: row and col are not as many whole numbers each")
        if data is not None and data.shape != ends[0].shape:
            raise InputError(f"{shown} is damaged: it has {data.size} values for {len(ends[0])} entries")
    elif form in ("csr", "csc"):
        indptr, indices = np.asarray(arrays["indptr"]), arrays["indices"]
        _check_compressed(data, indices, indptr, (shape[0], None), shown)
        major = np.repeat(np.arange(shape[0]), np.diff(indptr))
        ends = (major, indices) if form == "csr" else (indices, major)
    else:
        raise InputError(f"{shown} holds a sparse matrix of format {form}: save it as csr, csc or coo (matrix.tocsr())")
    count = len(ends[0])
    edges = RowBlocks((2, count), np.dtype(np.int64), lambda: (np.asarray(end, np.int64)[None] for end in ends))
    found: dict[str, Array | RowBlocks] = {"edge_index": edges, "num_nodes": np.array(shape[0])}
    if data is not None and data.dtype != bool and not np.all(data == 1):
        found["edge_weight"] = data
    return found


def _shape_of(array: Array, shown: str) -> tuple[int, int]:
    """Rows and columns of a sparse matrix. Raises InputError for anything else."""
    shape = np.asarray(array).reshape(-1)
    if len(shape) != 2 or shape.dtype.kind not in "iu" or (shape < 0).any():
        raise InputError(f"{shown} holds a sparse matrix of shape {shape.tolist()}: rows and columns are wanted")
    return int(shape[0]), int(shape[1])


def _check_compressed(data: Array | None, indices: Array, indptr: Array, shape: tuple[int, int | None], shown: str) -> None:
    """Raise InputError unless these are a matrix in CSR format; shape: rows, and columns if the indices are to be compared."""
    rows, width = shape
    whole = indices.dtype.kind in "iu" and indptr.dtype.kind in "iu" and indices.ndim == 1
    fits = whole and indptr.shape == (rows + 1,) and indptr[0] == 0 and indptr[-1] == len(indices)
    if not fits or (indptr[1:] < indptr[:-1]).any():
        raise InputError(f"{shown} is damaged: its indptr does not fit {rows} rows and {indices.size} entries")
    if data is not None and (data.shape != indices.shape or data.dtype.kind not in "biufc"):
        raise InputError(f"{shown} is damaged: it has {data.size} values ({data.dtype}) for {indices.size} entries")
    if width is not None and len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < width:
        raise InputError(f"{shown} is damaged: an index is out of range 0..{width - 1}")


def dense_rows(data: Array, indices: Array, indptr: Array, shape: Any) -> RowBlocks:
    """A CSR matrix as dense rows, a block at a time; entries of one place are added."""
    rows, width = (int(size) for size in np.asarray(shape).reshape(-1))
    dtype = np.dtype(np.float32) if data.dtype == bool else data.dtype
    step = max(1, (16 << 20) // max(1, width * dtype.itemsize))

    def blocks() -> Iterator[Array]:
        for first in range(0, rows, step):
            stop = min(first + step, rows)
            begin, end = int(indptr[first]), int(indptr[stop])
            block = np.zeros((stop - first, width), dtype)
            row = np.repeat(np.arange(stop - first), np.diff(indptr[first : stop + 1]))
            np.add.at(block, (row, indices[begin:end]), data[begin:end])
            yield block

    return RowBlocks((rows, width), dtype, blocks)

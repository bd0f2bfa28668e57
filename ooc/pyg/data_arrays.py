"""The arrays of a PyG `Data` or `TemporalData`: what has a row per node, edge or event, and a line about what has not."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.stores.errors import InputError
from ooc.stores.ingest.arrays import Array, RowBlocks, dense_rows
from ooc.stores.ingest.lazy import LazyArray

_STEP_BYTES = 16 << 20
TIME = "t"
"""a TemporalData's times"""


class DataArrays(NamedTuple):
    """The arrays of a graph or a stream by name, what is left out, and the name of the times of a stream's events."""

    arrays: Mapping[str, Array | RowBlocks | LazyArray | Path]
    left_out: list[str]
    time: str | None = None


def arrays_of(data: Any, name: str) -> DataArrays:
    """Return the arrays of a `Data` (x, y, edge_index, edge_weight, masks, num_nodes, all other tensors and arrays), or of a
    `TemporalData` (edge_index of src and dst, t, num_nodes, all others), and what is left out.

    Tensors of any device, layout and dtype, numpy arrays and memory maps are taken; bfloat16 becomes float32 and sparse rows
    dense, a block at a time. Raises InputError for a graph without edges or with several types, or a stream without events.
    """
    from torch_geometric.data import TemporalData

    if isinstance(data, TemporalData):
        return _events_of(data, name)
    check_data(data, name)
    arrays: dict[str, Array | RowBlocks | LazyArray | Path] = {}
    left_out: list[str] = []
    for key, value in data.to_dict().items():
        if key == "adj_t" and data.edge_index is None:
            arrays |= _transposed(value, name)
        elif key == "adj_t":
            left_out.append("adj_t (edge_index has the edges)")
        elif (array := as_array(value, f"{name}.{key}")) is not None:
            arrays[key] = array
        elif key != "num_nodes" and value is not None:
            left_out.append(f"{key} ({type(value).__name__})")
    if "edge_index" not in arrays:
        raise InputError(f"{name} has no edge_index: it cannot be ingested as a graph")
    count = data.x.shape[0] if "x" in arrays else data.num_nodes
    arrays["num_nodes"] = np.array(count, dtype=np.int64)
    return DataArrays(arrays, left_out)


def check_data(data: Any, name: str) -> None:
    """Raise InputError unless `data` is a graph or a stream of PyG."""
    from torch_geometric.data import Data, HeteroData, TemporalData

    if not isinstance(data, Data | HeteroData | TemporalData):
        kinds = "a Data, a HeteroData, a TemporalData, or a data set or a list of Data"
        raise InputError(f"{name} is a {type(data).__name__}: it must be {kinds}")


def edges_of(data: Any, name: str) -> tuple[Array, Array | None]:
    """The edges of a `Data`, integers [2, e], and the weights of those in `adj_t`. Raises InputError without edges."""
    if "edge_index" in data:
        found, weight = in_memory(as_array(data["edge_index"])), None
    elif "adj_t" in data:
        arrays = _transposed(data.adj_t, name)
        found, weight = arrays["edge_index"], arrays.get("edge_weight")
    else:
        raise InputError(f"{name} has no edge_index: it cannot be ingested as a graph")
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.ndim != 2 or len(found) != 2:
        raise InputError(f"{name}: edge_index must be whole numbers [2, e]")
    assert not isinstance(weight, RowBlocks)
    return found, weight


def _events_of(data: Any, name: str) -> DataArrays:
    """The arrays of a `TemporalData`. Raises InputError where src, dst and t do not make events."""
    found = {key: in_memory(as_array(value)) for key, value in data.to_dict().items() if value is not None}
    arrays: dict[str, Any] = {key: array for key, array in found.items() if array is not None}
    ends = [arrays.pop(key, None) for key in ("src", "dst")]
    shapes = {None if each is None or isinstance(each, RowBlocks) else each.shape for each in (*ends, arrays.get(TIME))}
    whole = all(isinstance(each, np.ndarray) and each.dtype.kind in "iu" for each in ends)
    if len(shapes) > 1 or not whole or shapes in ({(0,)}, {()}):
        raise InputError(f"{name} has no events: src, dst (whole numbers) and t need the same length, at least 1")
    src, dst = (np.asarray(each, np.int64) for each in ends)
    arrays["edge_index"] = RowBlocks((2, len(src)), np.dtype(np.int64), lambda: (end[None] for end in (src, dst)))
    arrays["num_nodes"] = np.array(1 + max(int(src.max()), int(dst.max())), dtype=np.int64)
    left_out = [f"{key} ({type(data[key]).__name__})" for key, array in found.items() if array is None]
    return DataArrays(arrays, left_out, TIME)


def as_array(value: Any, name: str = "an array") -> Array | RowBlocks | LazyArray | None:
    """A tensor, numpy array, SciPy matrix, or an object with shape, dtype and slices, as an array of rows; else None.

    name: what it is called in messages.
    """
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "fiub" else None
    if hasattr(value, "tocsr"):  # SciPy, which need not be installed
        matrix = value.tocsr()
        return dense_rows(matrix.data, matrix.indices, matrix.indptr, matrix.shape)
    if not isinstance(value, Tensor):
        return LazyArray(value, name) if LazyArray.fits(value) else None
    if value.is_complex():
        return None
    value = value.detach()
    if value.layout != torch.strided:
        return _sparse_rows(value)
    if value.dtype == torch.bfloat16:
        return _converted(value)
    array: NDArray[Any] = value.numpy(force=True)
    return array


def in_memory(array: Array | RowBlocks | LazyArray | None) -> Array | RowBlocks | None:
    """An array that is read by slices, read whole; others as they are."""
    return array.whole() if isinstance(array, LazyArray) else array


def _sparse_rows(value: Tensor) -> RowBlocks | None:
    if value.dim() != 2:
        return None
    held = value.to_sparse_csr() if value.layout != torch.sparse_csr else value
    number = held.values().float() if held.dtype == torch.bfloat16 else held.values()
    data, indices, indptr = (part.numpy(force=True) for part in (number, held.col_indices(), held.crow_indices()))
    return dense_rows(data, indices, indptr, tuple(value.shape))


def _converted(value: Tensor) -> RowBlocks:
    """bfloat16, which numpy lacks, as float32."""
    step = max(1, _STEP_BYTES // (4 * max(1, value[:1].numel())))

    def blocks() -> Iterator[Array]:
        for first in range(0, len(value), step):
            yield value[first : first + step].float().numpy(force=True)

    return RowBlocks(tuple(value.shape), np.dtype(np.float32), blocks)


def _transposed(adj_t: Any, name: str) -> dict[str, Array | RowBlocks]:
    """The edges of PyG's `adj_t` (row: destination, column: source) as edge_index and edge_weight."""
    if isinstance(adj_t, Tensor) and adj_t.layout != torch.strided:
        held = adj_t.to_sparse(layout=torch.sparse_coo).coalesce()
        target, source = held.indices().unbind(0)
        number = held.values()
    elif hasattr(adj_t, "coo"):  # torch_sparse's SparseTensor
        target, source, number = adj_t.coo()
    else:
        raise InputError(f"{name}.adj_t is a {type(adj_t).__name__}: it must be a sparse tensor")
    found: dict[str, Array | RowBlocks] = {"edge_index": torch.stack([source, target]).numpy(force=True)}
    if number is not None and not bool((number == 1).all()):
        found["edge_weight"] = number.numpy(force=True)
    return found

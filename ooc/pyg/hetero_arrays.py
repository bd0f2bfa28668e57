"""The arrays of a PyG `HeteroData` by type, and the specification that ingests them."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ooc.pyg.data_arrays import as_array, edges_of
from ooc.stores.array_names import EdgeKey, check_type_name
from ooc.stores.errors import InputError
from ooc.stores.ingest import HeteroSpec, IngestSpec
from ooc.stores.ingest.arrays import Array, RowBlocks
from ooc.stores.ingest.lazy import LazyArray
from ooc.stores.ingest.typed_settings import MASKS, typed_settings
from ooc.stores.ingest.typed_spec import REVERSE

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

Arrays = dict[str, Array | RowBlocks | LazyArray | Path]


class HeteroArrays(NamedTuple):
    """The arrays of a heterogeneous graph by type, what is left out, and the specification of its ingest."""

    arrays: dict[str | EdgeKey, Arrays]
    left_out: list[str]
    spec: HeteroSpec


def is_hetero(data: Any) -> bool:
    """Whether `data` is a `HeteroData`."""
    from torch_geometric.data import HeteroData

    return isinstance(data, HeteroData)


def hetero_arrays_of(data: "HeteroData", spec: IngestSpec) -> HeteroArrays:
    """Return the arrays of a `HeteroData`, of which `spec` has the settings of an ingest of its arrays.

    Of nodes x, y and masks become features, labels and splits, of edges `edge_weight` the weights and `time` the times; every
    other tensor with a row per node or edge is stored by its name. An edge type "rev_" + name is known as the reverse of
    another one if its edges are those in the other direction. Random splits are of the types with labels.

    Raises InputError for a type without edges or a number of nodes, ConfigError for settings of one type.

    >>> arrays, left_out, spec = hetero_arrays_of(OGB_MAG("data")[0], IngestSpec(out="mag.ooc", pyg="data"))
    >>> arrays["paper"].keys(), spec.reverse_of
    """
    left_out: list[str] = []
    of_nodes = {name: _node_arrays(data, name, left_out) for name in data.node_types}
    of_edges = {key: _edge_arrays(data, key, left_out) for key in data.edge_types}
    if not of_edges:
        raise InputError("data has no edge types: it cannot be ingested as a graph")
    for key in of_edges:
        for end in (key[0], key[2]):
            if end not in of_nodes:
                raise InputError(f"data[{key!r}] has ends of type {end!r}, which has no nodes: set data[{end!r}].num_nodes")
    if spec.random_split is not None:
        of_nodes = {name: {key: each for key, each in own.items() if key not in MASKS} for name, own in of_nodes.items()}
    made = typed_settings(spec, of_nodes, of_edges, _reverses(of_edges))
    return HeteroArrays({**of_nodes, **of_edges}, left_out, made)


def _node_arrays(data: "HeteroData", name: str, left_out: list[str]) -> Arrays:
    store = data[check_type_name(name)]
    arrays = _as_arrays(store, f"data[{name!r}]", left_out)
    with warnings.catch_warnings():  # PyG takes the largest node of the edges where nothing else says how many there are
        warnings.simplefilter("ignore")
        x = arrays.get("x")
        count = len(x) if isinstance(x, LazyArray) else store.num_nodes
    if count is None:
        raise InputError(f"data[{name!r}] has neither x nor num_nodes: say how many nodes it has by num_nodes")
    return {**arrays, "num_nodes": np.array(int(count), dtype=np.int64)}


def _edge_arrays(data: "HeteroData", key: EdgeKey, left_out: list[str]) -> Arrays:
    store, shown = data[key], f"data[{key!r}]"
    arrays = _as_arrays(store, shown, left_out)
    found, weight = edges_of(store, shown)
    return {**arrays, "edge_index": found, **({} if weight is None else {"edge_weight": weight})}


def _as_arrays(store: Any, shown: str, left_out: list[str]) -> Arrays:
    arrays: Arrays = {}
    for name, value in store.items():
        if name in ("adj_t", "edge_index", "num_nodes") or value is None:
            continue
        if (array := as_array(value, f"{shown}.{name}")) is not None:
            arrays[name] = array
        else:
            left_out.append(f"{shown}.{name} ({type(value).__name__})")
    return arrays


def _reverses(edges: dict[EdgeKey, Arrays]) -> dict[EdgeKey, EdgeKey]:
    """Edge type -> the one that it is the reverse of, edge by edge."""
    found = {}
    for key, arrays in edges.items():
        source, name, target = key
        forth = target, name.removeprefix(REVERSE), source
        if name.startswith(REVERSE) and forth in edges:
            own, its = (np.asarray(each["edge_index"]) for each in (arrays, edges[forth]))
            if own.shape == its.shape and np.array_equal(own[0], its[1]) and np.array_equal(own[1], its[0]):
                found[key] = forth
    return found

"""Arguments of PyG's ready models (GraphSAGE, GCN, GAT, GIN, PNA, EdgeCNN), where their names or values differ from ours."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn.models import PNA
from torch_geometric.nn.models.basic_gnn import BasicGNN

from ooc.stores.graph import Graph

_NORMS: dict[str, dict[str, Any]] = {"batch": {"allow_single_element": True}, "layer": {"mode": "node"}}
"""arguments of PyG's norms by which they are ours: a batch of one row has a norm, and a row's norm depends on no other row"""
_PNA = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}
"""as published (Corso et al., "Principal Neighbourhood Aggregation for Graph Nets", NeurIPS 2020)"""
_AT_ONCE = 2**20


def pyg_arguments(cls: type[nn.Module], arguments: dict[str, Any], degrees: Callable[[], Tensor] | None) -> dict[str, Any]:
    """Return the constructor's arguments for one of PyG's ready models; those of other classes are returned unchanged.

    Args:
        cls: The class.
        arguments: The arguments with our values; `norm` is "none", "batch" or "layer".
        degrees: Returns the histogram of in-degrees that PNA scales by.

    >>> pyg_arguments(GraphSAGE, {"norm": "layer"}, None)
    {'norm': 'layer', 'norm_kwargs': {'mode': 'node'}}
    """
    if not issubclass(cls, BasicGNN):
        return arguments
    found = dict(arguments)
    if found.get("norm") == "none":
        found["norm"] = None
    if found.get("norm") in _NORMS:
        found = {"norm_kwargs": _NORMS[found["norm"]], **found}
    if issubclass(cls, PNA):
        found = {**_PNA, **found}
        if degrees is not None and "deg" not in found:
            found["deg"] = degrees()
        found["deg"] = torch.as_tensor(found.get("deg", [0, 1]))
    return found


def degree_histogram(graph: Graph) -> Tensor:
    """Return how many nodes have 0, 1, 2, ... in-edges, int64[largest in-degree + 1]; PNA's `deg`.

    >>> degree_histogram(ds.graph)
    tensor([  0, 485, 583, ...])
    """
    counts = np.zeros(1, np.int64)
    for first in range(0, graph.num_nodes, _AT_ONCE):
        found = np.bincount(np.diff(graph.indptr[first : first + _AT_ONCE + 1]))
        if len(found) > len(counts):
            found, counts = counts, found
        counts[: len(found)] += found
    return torch.from_numpy(counts.astype(np.int64))

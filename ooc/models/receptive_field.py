"""How many hops the outputs of a model with its own forward depend on, found by trying it on a small graph."""

from copy import deepcopy
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ooc.models.builders import full_blocks
from ooc.models.layers import evaluating
from ooc.models.user_models import forward_batch, kind_of
from ooc.stores.errors import ConfigError

MOST = 64
"""hops at most"""
_TOLERANCE = 1e-11
"""relative, of float64 outputs"""
_TOLERANCE_32 = 1e-5
"""of models that do not run in float64"""


def hops_of(model: nn.Module, in_channels: int, weighted: bool = False, num_layers: int | None = None) -> int:
    """Return over how many hops of full neighborhoods a node's output is the one on the whole graph.

    A forward(x, edge_index) is tried: the output of one node of a small graph on neighborhoods of 1, 2, ... hops is compared
    with the one on the whole graph. That counts what cannot be seen from outside, such as the degrees of sources by which
    GCNConv divides, which need one hop more than it has layers. A forward(x, blocks) needs as many hops as it takes blocks.

    Args:
        model: A module with its own forward.
        in_channels: Number of features.
        weighted: Whether edges have weights.
        num_layers: As many blocks as the model takes; by default its attribute `num_layers`.

    Raises:
        ConfigError: If no number of hops is enough, or `num_layers` is needed and unknown.

    >>> hops_of(torch_geometric.nn.GraphSAGE(128, 256, 2, 32), 128), hops_of(torch_geometric.nn.GCN(128, 256, 2, 32), 128)
    (2, 3)
    """
    name = type(model).__name__
    if kind_of(model) == "blocks":
        found = num_layers or getattr(model, "num_layers", None)
        if not isinstance(found, int):
            raise ConfigError(f"{name} has its own forward(x, blocks): give num_layers, as many as it takes blocks")
        return found
    with evaluating(model):
        tried, dtype, tolerance = _in_float64(model, in_channels, weighted)
        whole = _output(tried, in_channels, weighted, None, dtype)
        for hops in range(1, MOST + 1):
            found_rows = _output(tried, in_channels, weighted, hops, dtype)
            if found_rows.shape == whole.shape and (found_rows - whole).abs().max() <= tolerance * whole.abs().max():
                return hops
    raise ConfigError(
        f"the output of {name} for a node depends on nodes more than {MOST} hops away or on edges that leave its neighborhood, "
        "as with a norm over all nodes: it cannot be computed on batches"
    )


def _in_float64(model: nn.Module, in_channels: int, weighted: bool) -> tuple[nn.Module, torch.dtype, float]:
    """(model, dtype of x, tolerance): a copy of the model in float64 if it can be copied and runs, else the model itself."""
    try:
        wide = deepcopy(model).double()
        _output(wide, in_channels, weighted, 1, torch.float64)
        return wide, torch.float64, _TOLERANCE
    except Exception:  # a user's code may raise anything
        return model, torch.float32, _TOLERANCE_32


def _output(model: nn.Module, in_channels: int, weighted: bool, hops: int | None, dtype: torch.dtype) -> Tensor:
    """The output of node 0 from its in-neighbors over `hops` hops, None for the whole graph; with three x: [3, channels]."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    edge_index = _graph()
    features = torch.randn(3, int(edge_index.max()) + 1, in_channels, generator=generator, dtype=torch.float64)
    weights = torch.rand(edge_index.size(1), generator=generator, dtype=torch.float64) + 0.5
    if hops is not None:  # nodes up to that depth, and the in-edges of those before it
        kept = edge_index[1] <= 2 * (hops - 1)
        edge_index, weights, features = edge_index[:, kept], weights[kept], features[:, : 2 * hops + 1]
    weight = weights.to(device, dtype) if weighted else None
    blocks = full_blocks(edge_index.to(device), features.size(1), 1, weight, dtype)
    batch = SimpleNamespace(edge_index=blocks[0].edge_index, blocks=blocks, batch_size=1)
    rows = []
    for x in features:
        batch.x = x.to(device, dtype)
        rows.append(forward_batch(model, batch)[:1].reshape(1, -1))
    return torch.cat(rows).double()


def _graph() -> Tensor:
    """Edges, int64[2, e], of a graph on which cutting a neighborhood at any depth changes rows and degrees.

    Nodes 2 d - 1 and 2 d are at depth d, in-neighbors of the former at depth d - 1 (of node 0 for d = 1). Node 0 is on a cycle,
    and every node has an edge to the last node, which is not in the neighborhood of node 0.
    """
    depth = torch.arange(1, MOST + 3)
    node, parent = 2 * depth - 1, (2 * depth - 3).clamp(min=0)
    last = 2 * len(depth) + 1
    inward = torch.stack([torch.stack([node, node + 1], 1).view(-1), parent.repeat_interleave(2)])
    everyone = torch.arange(last)
    outward = torch.stack([everyone, torch.full_like(everyone, last)])
    return torch.cat([inward, torch.tensor([[0], [1]]), outward], dim=1)

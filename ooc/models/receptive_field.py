"""How many hops the outputs of a model with its own forward depend on, found by trying it on a small graph."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from ooc.models.builders import full_blocks
from ooc.models.layers import evaluating, looks_up
from ooc.models.user_models import edge_features_for, forward_batch, kind_of
from ooc.stores.arrays.rows import Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError

MOST = 64
"""hops at most"""
_TOLERANCE = 1e-11
"""relative, of float64 outputs"""
_TOLERANCE_32 = 1e-5
"""of models that do not run in float64"""
_SAMPLE = 1024
"""rows of a store whose values are tried"""


def hops_on(model: nn.Module, dataset: Dataset, num_layers: int | None = None) -> int:
    """Return `hops_of` a model for the features and the weights of a store.

    >>> hops_on(torch_geometric.nn.GraphSAGE(128, 256, 2, 32), ds)
    2
    """
    weighted = dataset.graph.weight_sum is not None
    rows = partial(_sampled_rows, dataset.rows("x"))
    features = [_sampled_rows(dataset.edge_features(name)) for name in edge_features_for(model, dataset)]
    return hops_of(model, dataset.num_features, weighted, num_layers, rows, *features)


def _sampled_rows(rows: Rows) -> Tensor:
    """Rows from all over an array, [k, channels]."""
    ids = np.unique(np.linspace(0, max(0, rows.shape[0] - 1), min(_SAMPLE, rows.shape[0])).astype(np.int64))
    out = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
    rows.read(ids, out)
    return torch.from_numpy(out.reshape(len(ids), -1))


def hops_of(
    model: nn.Module,
    in_channels: int,
    weighted: bool = False,
    num_layers: int | None = None,
    rows: Callable[[], Tensor] | None = None,
    edge_rows: Tensor | None = None,
) -> int:
    """Return over how many hops of full neighborhoods a node's output is the one on the whole graph.

    A forward(x, edge_index) is tried: the output of one node of a small graph on neighborhoods of 1, 2, ... hops is compared
    with the one on the whole graph. That counts what cannot be seen from outside, such as the degrees of sources by which
    GCNConv divides, which need one hop more than it has layers. A forward(x, blocks) needs as many hops as it takes blocks.

    Args:
        model: A module with its own forward.
        in_channels: Number of features.
        weighted: Whether edges have weights.
        num_layers: As many blocks as the model takes; by default its attribute `num_layers`.
        rows: Returns features [k, in_channels] whose values are tried if the model looks some up in an Embedding, which not
            every number is in; other models are tried on random numbers.
        edge_rows: Edge features [k, channels], k at least 1, whose values are tried for a model that takes some.

    Raises:
        ConfigError: If no number of hops is enough, the model fails or does not give finite numbers, or `num_layers` is needed
            and unknown.

    >>> hops_of(torch_geometric.nn.GraphSAGE(128, 256, 2, 32), 128), hops_of(torch_geometric.nn.GCN(128, 256, 2, 32), 128)
    (2, 3)
    """
    name = type(model).__name__
    if kind_of(model) == "blocks":
        own = getattr(model, "layers", None)
        found = num_layers or getattr(model, "num_layers", None) or (len(own) if isinstance(own, nn.ModuleList) else None)
        if not isinstance(found, int):
            raise ConfigError(f"{name} has its own forward(x, blocks): give num_layers, as many as it takes blocks")
        return found
    values = rows() if rows is not None and looks_up(model) else None
    try:
        with evaluating(model):
            return _found_by_trying(model, in_channels, weighted, values, edge_rows)
    except ConfigError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"{name} fails on a small graph: {type(error).__name__}: {error}") from error


def _found_by_trying(
    model: nn.Module, in_channels: int, weighted: bool, values: Tensor | None, edge_rows: Tensor | None
) -> int:
    name = type(model).__name__
    trial, tolerance = _in_float64(_SmallGraph(model, in_channels, weighted, values, edge_rows))
    whole = trial.output(None)
    if not whole.isfinite().all():
        raise ConfigError(f"{name} gives infinite numbers or NaN on a small graph: check its parameters")
    for hops in range(1, MOST + 1):
        cut = trial.output(hops)
        if cut.shape == whole.shape and (cut - whole).abs().max() <= tolerance * whole.abs().max():
            return hops
    raise ConfigError(
        f"the output of {name} for a node depends on nodes more than {MOST} hops away or on edges that leave its neighborhood, "
        "as with a norm over all nodes: it cannot be computed on batches"
    )


@dataclass(frozen=True)
class _SmallGraph:
    """A model on the small graph, with weights and x in `dtype`; values: what x is made of, [k, in_channels], or None;
    edge_rows: what edge features are drawn from, [k, channels], or None."""

    model: nn.Module
    in_channels: int
    weighted: bool
    values: Tensor | None
    edge_rows: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def output(self, hops: int | None) -> Tensor:
        """Rows of node 0 for three x, [3, channels]: from its in-neighbors over `hops` hops, None for the whole graph."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        edge_index = _graph()
        features = self._features(int(edge_index.max()) + 1, generator)
        weights = torch.rand(edge_index.size(1), generator=generator, dtype=torch.float64) + 0.5
        edge_attr = None
        if self.edge_rows is not None:
            edge_attr = self.edge_rows[torch.randint(len(self.edge_rows), (edge_index.size(1),), generator=generator)]
        if hops is not None:  # nodes up to that depth, and the in-edges of those before it
            kept = edge_index[1] <= 2 * (hops - 1)
            edge_index, weights, features = edge_index[:, kept], weights[kept], features[:, : 2 * hops + 1]
            edge_attr = None if edge_attr is None else edge_attr[kept]
        weight = weights.to(device, self.dtype) if self.weighted else None
        edge_attr = None if edge_attr is None else edge_attr.to(device)
        blocks = full_blocks(edge_index.to(device), features.size(1), 1, weight, self.dtype, edge_attr)
        batch = SimpleNamespace(edge_index=blocks[0].edge_index, blocks=blocks, batch_size=1)
        rows = []
        for x in features:
            batch.x = x.to(device, self.dtype if x.is_floating_point() else None)
            rows.append(forward_batch(self.model, batch)[:1].reshape(1, -1))
        return torch.cat(rows).double()

    def _features(self, nodes: int, generator: torch.Generator) -> Tensor:
        """Three x of random numbers, or of the values of each column, each as likely as another: [3, nodes, in_channels]."""
        shape = 3, nodes
        if self.values is None:
            return torch.randn(*shape, self.in_channels, generator=generator, dtype=torch.float64)
        columns = [torch.unique(column) for column in self.values.unbind(1)]
        drawn = [column[torch.randint(len(column), shape, generator=generator)] for column in columns]
        return torch.stack(drawn, dim=2)


def _in_float64(trial: _SmallGraph) -> tuple[_SmallGraph, float]:
    """(trial, tolerance): a copy of the model in float64 if it can be copied and runs, else the model itself."""
    try:
        wide = replace(trial, model=deepcopy(trial.model).double(), dtype=torch.float64)
        wide.output(1)
        return wide, _TOLERANCE
    except Exception:  # a user's code may raise anything
        return trial, _TOLERANCE_32


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

"""Models of whole graphs: layers over all nodes of a batch, a virtual node between them, pooling, an output a graph."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.nn import aggr
from torch_geometric.utils.sparse import index2ptr

from ooc.graph.blocks import Block
from ooc.models.builders import Model, build_model, full_blocks
from ooc.models.dropout import Of, dropout, rows_of_nodes
from ooc.models.layers import DenseLayer
from ooc.models.user_models import parameters_of, shown
from ooc.stores.errors import ConfigError

MOST_NODES = 2**24
"""of a graph, whose rows have positions of their own then"""
Pooling = Literal["mean", "sum", "max", "attention"]


def make_pooling(name: str, channels: int) -> nn.Module:
    """Return the pooling of that name, a PyG aggregation `(x [n, channels], ptr=int64[b + 1]) -> [b, channels]`.

    "attention" is a softmax over each graph's nodes of a learned score (Li et al., 2016). Raises ConfigError for another name.

    >>> make_pooling("mean", 64)(x, ptr=batch.ptr).shape
    torch.Size([32, 64])
    """
    if name not in get_args(Pooling):
        raise ConfigError(f"pooling {name!r} is unknown: use {', '.join(get_args(Pooling))}")
    made: nn.Module
    if name == "attention":
        made = aggr.AttentionalAggregation(nn.Linear(channels, 1))
    else:
        made = {"mean": aggr.MeanAggregation, "sum": aggr.SumAggregation, "max": aggr.MaxAggregation}[name]()
    return made


class VirtualNode(nn.Module):
    """A node joined to all nodes of its graph, between layers (Gilmer et al., 2017; as in OGB's models).

    Before layer l > 0 its state is added to every node's row, and is then a perceptron of itself and the sum of these rows.
    The state begins as a learned row, zeros at first, for every graph.
    """

    def __init__(self, channels: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.first = nn.Parameter(torch.zeros(1, channels))
        self.perceptrons = nn.ModuleList(
            nn.Sequential(nn.Linear(channels, 2 * channels), nn.ReLU(), nn.Linear(2 * channels, channels), nn.ReLU())
            for _ in range(max(0, layers - 2))
        )
        self.sum = aggr.SumAggregation()

    def forward(self, rows: Tensor, state: Tensor | None, layer: int, ptr: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the rows [n, channels] for layer `layer`, from 1 on, the states [b, channels]).

        `state` is that of the layer before, None for the first.
        """
        if state is None:
            state = self.first.expand(len(ptr) - 1, -1)
        else:
            state = dropout(self.perceptrons[layer - 2](state), self.dropout, self.training, of="graphs")
        rows = rows + state.index_select(0, batch)
        return rows, state + self.sum(rows, ptr=ptr)


class GraphModel(nn.Module):
    """A model of nodes, whose rows are pooled graph by graph and mapped to an output for each graph.

    Args:
        nodes: A model whose layers take and give rows of `channels` columns, but for the first layer's input.
        channels: Columns of its output.
        out_channels: Outputs for each graph.
        pooling: "mean", "sum", "max" or "attention".
        virtual_node: Whether a virtual node joins all nodes of a graph between layers.
        dropout: On the pooled rows.

    >>> model = build_graph_model("gin", in_channels=9, hidden_channels=64, out_channels=1, num_layers=3)
    >>> model(batch.x, batch.edge_index, batch.batch).shape
    torch.Size([32, 1])
    """

    def __init__(
        self,
        nodes: Model,
        channels: int,
        out_channels: int,
        pooling: str = "mean",
        virtual_node: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.nodes = nodes
        self.virtual_node = VirtualNode(channels, len(nodes.layers), dropout) if virtual_node else None
        self.pooling = make_pooling(pooling, channels)
        self.readout = DenseLayer(channels, out_channels, dropout, of="graphs")

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        batch: Tensor | None = None,
        edge_weight: Tensor | None = None,
        ptr: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Return an output for each graph, [b, out_channels].

        Args:
            x: Features of all nodes [n, in_channels], graph by graph.
            edge_index: int64[2, e].
            batch: int64[n], the graph of each node, ascending; None: one graph.
            edge_weight: float32[e], or None.
            ptr: int64[b + 1], the first node of each graph, if it is known.
            edge_attr: Edge features [e, ...] of a model that takes them (gine).
        """
        if batch is None:
            batch = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if ptr is None:
            ptr = index2ptr(batch, int(batch[-1]) + 1 if len(batch) else 0)
        block = full_blocks(edge_index, len(x), 1, edge_weight, edge_attr=edge_attr if self.needs_edge_attr else None)[0]
        rows = self.rows(x.view(len(x), -1), block, batch, ptr)
        out: Tensor = self.readout(self.pooling(rows, ptr=ptr))
        return out

    @property
    def needs_edge_attr(self) -> bool:
        """Whether the layers take edge features."""
        return any(getattr(module, "needs_edge_attr", False) for module in self.nodes.modules())

    def rows(self, x: Tensor, block: Block, batch: Tensor, ptr: Tensor) -> Tensor:
        """Return the rows of all nodes before pooling, [n, channels]."""
        model, state, kept = self.nodes, None, list[Tensor]()
        rows: Tensor = x if model.encoder is None else model.encoder(x)
        initial = rows
        for number, layer in enumerate(model.layers):
            if self.virtual_node is not None and number:
                rows, state = self.virtual_node(rows, state, number, ptr, batch)
            rows = layer(rows, block, initial) if getattr(layer, "needs_initial", False) else layer(rows, block)
            kept.append(rows)
        rows = rows if model.jump is None else model.jump(kept)
        return rows if model.decoder is None else model.decoder(rows)


def build_graph_model(
    name: str,
    in_channels: int,
    hidden_channels: int | Sequence[int],
    out_channels: int,
    num_layers: int,
    dropout: float = 0.0,
    pooling: str = "mean",
    virtual_node: bool = False,
    **options: Any,
) -> GraphModel:
    """Build a model of whole graphs: `build_model(name, ...)` with `hidden_channels` outputs a node, pooling and a linear map.

    Args:
        name: As of `build_model`.
        in_channels, num_layers, dropout: As of `build_model`.
        hidden_channels: As of `build_model`; of several, one behind each layer, the last of which is pooled.
        out_channels: Outputs for each graph.
        pooling: "mean", "sum", "max" or "attention".
        virtual_node: Whether a virtual node joins all nodes of a graph between layers; of gcn, gin, sage, gat and gcnii.
        options: Further arguments of `build_model`.

    Raises:
        ConfigError: If a value is invalid.

    >>> build_graph_model("gin", 9, 64, 1, num_layers=3, pooling="sum", virtual_node=True)
    """
    if virtual_node and name in ("appnp", "sgc"):
        raise ConfigError(f"{name} propagates rows without layers that a virtual node could join: leave virtual_node out")
    if name.startswith("rev"):
        raise ConfigError(f"{name} is a model of nodes: for whole graphs use gin, gcn, sage, gat, ...")
    hidden, pooled = hidden_channels, hidden_channels if isinstance(hidden_channels, int) else hidden_channels[-1]
    if not isinstance(hidden, int):
        if virtual_node and len(set(hidden)) > 1:
            raise ConfigError(
                "virtual_node joins layers of one width, and hidden has several: give one, or leave virtual_node out"
            )
        hidden = hidden if options.get("jk", "none") != "none" else hidden[:-1]
    nodes = build_model(name, in_channels, hidden, pooled, num_layers, dropout, **options)
    return GraphModel(nodes, pooled, out_channels, pooling, virtual_node, dropout)


def fields_taken(model: nn.Module) -> set[str] | None:
    """Return the fields of a batch that a model's forward takes (see `forward_graphs`); None where it may take any."""
    parameters = parameters_of(model).values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    unused = {"edge_attr"} if isinstance(model, GraphModel) and not model.needs_edge_attr else set()
    return {parameter.name for parameter in parameters} - unused


def _positions(batch: Any) -> dict[Of, NDArray[np.int64]] | None:
    """Where the rows of a batch of graphs are among those of all, which dropout depends on; see `rows_of_nodes`."""
    if "graph_id" not in batch or batch.graph_id.device.type != "cpu":
        return None
    graph, of = batch.graph_id, batch.batch
    inside = torch.arange(len(of)) - batch.ptr[of]
    return {"graphs": graph.numpy(), "sources": (graph[of] * MOST_NODES + inside).numpy()}


def forward_graphs(model: nn.Module, batch: Any) -> Tensor:
    """Return a model's outputs for the graphs of a PyG `Batch`, [b, channels].

    The forward's parameters that are called as fields of the batch (x, edge_index, edge_attr, batch, z, pos, ...) receive
    these, and `batch_size` or `num_graphs` the number of graphs. Raises ConfigError where another one has no default.

    >>> forward_graphs(model, next(iter(ooc.GraphLoader(ds, 32))))
    """
    given: dict[str, Any] = {}
    for parameter in parameters_of(model).values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.name in batch:
            given[parameter.name] = batch[parameter.name]
        elif parameter.name in ("batch_size", "num_graphs"):
            given[parameter.name] = batch.num_graphs
        elif parameter.default is parameter.empty:
            fields = ", ".join(sorted(batch.keys()))
            raise ConfigError(
                f"{type(model).__name__}.forward takes {parameter.name!r}, and batches of graphs have {fields}: name its "
                "parameters so, or give defaults"
            )
    with rows_of_nodes(_positions(batch) if model.training else None):
        out: Tensor = model(**given)
    if isinstance(out, Tensor) and out.dim() < 2:
        out = out.reshape(-1, 1)
    if not isinstance(out, Tensor) or len(out) != batch.num_graphs:
        what = f"{type(model).__name__} returns {shown(out)} for {batch.num_graphs} graphs"
        raise ConfigError(f"{what}: return a tensor with a row for each, as by global_mean_pool")
    return out

"""Models of windows: convolutions on a window's edges, with state carried from window to window.

Recurrent: a GNN followed by a GRU between its rows and each node's previous ones (GCRN, Seo et al., 2018; T-GCN, Zhao et al.,
2019). ROLAND (You et al., KDD 2022): every layer's rows are updated with those of the previous window. EvolveGCN-O (Pareja et
al., AAAI 2020): the weights, not the nodes, carry state, updated by a GRU. The first two use any of our convolutions.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ooc.graph.blocks import Block
from ooc.models.builders import build_model
from ooc.models.convs import narrow_first, propagated
from ooc.models.dropout import dropout
from ooc.models.user_models import forward_batch, kind_of, load_model
from ooc.stores.errors import ConfigError

Family = Literal["recurrent", "roland", "evolvegcn"]
Update = Literal["gru", "mlp", "average"]
Conv = Literal["gcn", "sage", "gat", "gin"]
WindowRows = tuple[Tensor, list[Tensor]]
"""a window's rows [n, out_channels], and the rows that its nodes carry to the next one"""
_HEADS = 4


class WindowModel(nn.Module):
    """Base class of window models; `widths` are those of the rows a node carries.

    `forward(x [n, f], block, carried, weights)` returns (rows [n, out_channels], new carried rows). All n nodes are source and
    destination of the block; `carried` are float32[n, widths[i]], zeros for new nodes; `weights` are the result of `weights`,
    called once per window. After the window `keep` receives them detached, so the backward pass ends at the window's start.

    >>> weights = model.weights()
    >>> rows, carried = model(x, block, carried, weights)
    >>> model.keep(weights)
    """

    widths: tuple[int, ...] = ()

    def weights(self) -> list[Tensor]:
        """Return the weights for this window, evolved from those of the previous one; empty if none evolve."""
        return []

    def keep(self, weights: Sequence[Tensor]) -> None:
        """Store the weights of the window."""

    def begin(self) -> None:
        """Reset the weights' state; the next window is the first one."""


class Recurrent(WindowModel):
    """A GNN of `num_layers` layers on the window, then a GRU with the node's rows of its previous window."""

    def __init__(self, conv: Conv, in_channels: int, channels: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = _layers(conv, in_channels, channels, num_layers, dropout)
        self.cell = nn.GRUCell(channels, channels)
        self.widths = (channels,)

    def forward(self, x: Tensor, block: Block, carried: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> WindowRows:
        for layer in self.layers:
            x = layer(x, block)
        rows = self.cell(x, carried[0])
        return rows, [rows]


class OwnGNN(WindowModel):
    """A user-defined GNN in place of `Recurrent`'s: [n, in_channels] -> [n, channels].

    `gnn` is any model that `ooc.models.user_models.load_model` accepts. Raises ConfigError for rows of another shape.
    """

    def __init__(self, gnn: nn.Module, channels: int, num_layers: int) -> None:
        super().__init__()
        self.gnn, self.num_layers = gnn, num_layers
        self.cell = nn.GRUCell(channels, channels)
        self.widths = (channels,)

    def forward(self, x: Tensor, block: Block, carried: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> WindowRows:
        blocks = [block] * self.num_layers
        batch = SimpleNamespace(x=x, blocks=blocks, edge_index=block.edge_index, batch_size=len(x))
        rows, expected = forward_batch(self.gnn, batch), (len(x), *self.widths)
        if rows.shape != expected:
            name = type(self.gnn).__name__
            raise ConfigError(f"model {name} returned {tuple(rows.shape)}: it must return rows {expected} for all nodes")
        state = self.cell(rows, carried[0])
        return state, [state]


def own_window_model(
    name: str,
    offered: Mapping[str, Any],
    required: Mapping[str, Any],
    requested: Collection[str],
    apart_from: Iterable[Path] = (),
    degrees: Callable[[], Tensor] | None = None,
) -> WindowModel:
    """Construct the user's class "package.module:Class": a `WindowModel`, or a GNN as in `OwnGNN`.

    `offered` are in_channels, hidden_channels, out_channels, num_layers and dropout; see `ooc.models.user_models.load_model`.
    """
    model = load_model(name, offered, required, requested, apart_from, degrees)
    if isinstance(model, WindowModel):
        return model
    kind_of(model)
    return OwnGNN(model, int(offered["hidden_channels"]), int(offered["num_layers"]))


class Roland(WindowModel):
    """Updates every layer's rows: H_t = update(H of the node's previous window, the layer's output).

    `update` is "gru", "mlp" (of both concatenated) or "average" (H_{t-1} weighted by the share of the node's earlier edges,
    which takes one more number per node).
    """

    def __init__(
        self, conv: Conv, in_channels: int, channels: int, num_layers: int, update: Update = "gru", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = _layers(conv, in_channels, channels, num_layers, dropout)
        self.update = update
        made: dict[str, Callable[[], nn.Module]] = {
            "gru": lambda: nn.GRUCell(channels, channels),
            "mlp": lambda: _Mixed(channels),
            "average": nn.Identity,
        }
        self.updates = nn.ModuleList(made[update]() for _ in range(num_layers))
        self.widths = (channels,) * num_layers + ((1,) if update == "average" else ())

    def forward(self, x: Tensor, block: Block, carried: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> WindowRows:
        now: list[Tensor] = []
        if self.update == "average":
            before, new = carried[-1], block.degree.to(carried[-1].dtype).unsqueeze(1)
            share = before / (before + new).clamp(min=1)
        for layer, update, old in zip(self.layers, self.updates, carried, strict=False):
            x = layer(x, block)
            x = share * old + (1 - share) * x if self.update == "average" else update(x, old)
            now.append(x)
        return x, [*now, before + new] if self.update == "average" else now


class _Mixed(nn.Module):
    """A perceptron of a layer's output and the node's previous rows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nn = nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels))

    def forward(self, x: Tensor, old: Tensor) -> Tensor:
        out: Tensor = self.nn(torch.cat([x, old], dim=1))
        return out


class Evolving(nn.Module):
    """A GCN layer whose weight matrix is the GRU's output for the previous one, columns being both input and hidden state."""

    carried: Tensor
    begun: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.initial = nn.Parameter(torch.empty(in_channels, out_channels))
        nn.init.xavier_uniform_(self.initial)
        self.cell = nn.GRUCell(in_channels, in_channels)
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.register_buffer("carried", torch.zeros(in_channels, out_channels))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))
        self._begun: bool | None = False
        """`begun`, so that no step waits for it; None where a state was loaded"""
        self.register_load_state_dict_post_hook(_begun_is_unknown)  # type: ignore[no-untyped-call]

    def set_begun(self, begun: bool) -> None:
        """Say whether `carried` are weights of a window."""
        self.begun.fill_(begun)
        self._begun = begun

    def weight(self) -> Tensor:
        """Weights of the next window, [in_channels, out_channels]."""
        if self._begun is None:
            self._begun = bool(self.begun)
        columns = (self.carried if self._begun else self.initial).t()
        out: Tensor = self.cell(columns, columns).t()
        return out

    def forward(self, x: Tensor, block: Block, weight: Tensor) -> Tensor:
        if narrow_first(block, *self.initial.shape):
            return propagated(x @ weight, block, rescale=True) + self.bias
        return propagated(x, block, rescale=True) @ weight + self.bias


def _begun_is_unknown(layer: Evolving, _: Any) -> None:
    layer._begun = None


class EvolveGCN(WindowModel):
    """GCN layers with evolving weights (EvolveGCN-O), stored in buffers so that checkpoints include them."""

    def __init__(self, in_channels: int, channels: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [in_channels, *[channels] * num_layers]
        self.layers: Any = nn.ModuleList(map(Evolving, widths[:-1], widths[1:]))
        self.dropout = dropout

    def weights(self) -> list[Tensor]:
        return [layer.weight() for layer in self.layers]

    def keep(self, weights: Sequence[Tensor]) -> None:
        with torch.inference_mode(False):  # training may continue from them
            for layer, weight in zip(self.layers, weights, strict=True):
                layer.carried = weight.detach().clone()  # not in place: backward needs the old ones
                layer.set_begun(True)

    def begin(self) -> None:
        for layer in self.layers:
            layer.set_begun(False)

    def forward(self, x: Tensor, block: Block, carried: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> WindowRows:
        last = len(self.layers) - 1
        for index, (layer, weight) in enumerate(zip(self.layers, weights, strict=True)):
            x = layer(dropout(x, self.dropout if index else 0.0, self.training), block, weight)
            x = x if index == last else torch.relu(x)
        return x, []


def _layers(conv: str, in_channels: int, channels: int, num_layers: int, dropout: float) -> nn.ModuleList:
    """Layers of a model of `ooc.models.builders`, all of one width, without a final activation."""
    if conv not in get_args(Conv):
        raise ConfigError(f"conv {conv!r} is unknown: use {', '.join(get_args(Conv))}")
    if conv == "gat" and channels % _HEADS:
        raise ConfigError(f"{channels} channels are the width of all {_HEADS} heads together: use a multiple of {_HEADS}")
    return build_model(conv, in_channels, channels, channels, num_layers, dropout, heads=_HEADS, input_dropout=0.0).layers


def window_model(
    family: Family,
    in_channels: int,
    channels: int,
    num_layers: int,
    *,
    conv: Conv = "sage",
    update: Update = "gru",
    dropout: float = 0.0,
) -> WindowModel:
    """Build the window model "recurrent", "roland" or "evolvegcn". Raises ConfigError for an unknown name.

    `conv` applies to "recurrent" and "roland", `update` to "roland".
    """
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers} is invalid: a model has at least one layer")
    if family == "recurrent":
        return Recurrent(conv, in_channels, channels, num_layers, dropout)
    if family == "roland":
        if update not in get_args(Update):
            raise ConfigError(f"update {update!r} is unknown: use {', '.join(get_args(Update))}")
        return Roland(conv, in_channels, channels, num_layers, update, dropout)
    if family == "evolvegcn":
        return EvolveGCN(in_channels, channels, num_layers, dropout)
    raise ConfigError(f"model {family!r} is unknown: use {', '.join(get_args(Family))}")

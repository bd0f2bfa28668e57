"""Models of windows: convolutions on a window's edges, and what is carried from window to window.

Three families. A recurrent network: a GNN on the window, then a GRU between its rows and what each node carried (GCRN, Seo et
al., 2018; T-GCN, Zhao et al., 2019). ROLAND (You et al., KDD 2022): every layer's rows are updated by those of the same layer
in the node's earlier window. EvolveGCN-O (Pareja et al., AAAI 2020): nothing is carried by nodes; the weights are, changed by
a GRU from window to window. The first two take any convolution that `ooc.models.builders` has.
"""

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ooc.graph.blocks import Block
from ooc.models.builders import build_model
from ooc.models.convs import narrow_first, propagated
from ooc.models.dropout import dropout
from ooc.models.user import forward_batch, kind_of, make_module
from stores.errors import ConfigError

Family = Literal["recurrent", "roland", "evolvegcn"]
Update = Literal["gru", "mlp", "average"]
Conv = Literal["gcn", "sage", "gat", "gin"]
_HEADS = 4
"""of attention"""


class WindowModel(nn.Module):
    """What models of windows have in common: `widths` of the rows that a node carries, and `forward`.

    forward(x [n, f], block, carried, weights) -> (rows [n, out_channels], carried now): all n nodes are source and
    destination of the block; carried: [n, widths[i]] float32, zeros for a node that was in no window yet. weights: what
    `weights` gave, once a window. After the window `keep` takes them, detached: backward ends at the window's beginning.

    >>> weights = model.weights()
    >>> rows, carried = model(x, block, carried, weights)
    >>> model.keep(weights)
    """

    widths: tuple[int, ...] = ()

    def weights(self) -> list[Tensor]:
        """The weights of the window that comes now, as they follow from those of the window before; none where none evolve."""
        return []

    def keep(self, weights: Sequence[Tensor]) -> None:
        """These were the window's."""

    def begin(self) -> None:
        """The next window is a first one."""


class Recurrent(WindowModel):
    """A GNN of `num_layers` on the window, then a GRU with the node's rows of its earlier window.

    >>> model = Recurrent("gcn", 16, 64, num_layers=2)
    >>> rows, (state,) = model(x, block, [torch.zeros(n, 64)])
    """

    def __init__(self, conv: Conv, in_channels: int, channels: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = _layers(conv, in_channels, channels, num_layers, dropout)
        self.cell = nn.GRUCell(channels, channels)
        self.widths = (channels,)

    def forward(
        self, x: Tensor, block: Block, carried: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """See `WindowModel`."""
        for layer in self.layers:
            x = layer(x, block)
        rows = self.cell(x, carried[0])
        return rows, [rows]


class OwnGNN(WindowModel):
    """A GNN of the user's own in the place of `Recurrent`'s: [n, in_channels] -> [n, channels].

    gnn: any that `ooc.models.user.load_model` takes. Raises ConfigError for rows of another shape.

    >>> model = OwnGNN(torch_geometric.nn.GraphSAGE(16, 64, num_layers=2), 64, num_layers=2)
    """

    def __init__(self, gnn: nn.Module, channels: int, num_layers: int) -> None:
        super().__init__()
        self.gnn, self.num_layers = gnn, num_layers
        self.cell = nn.GRUCell(channels, channels)
        self.widths = (channels,)

    def forward(
        self, x: Tensor, block: Block, carried: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """See `WindowModel`."""
        blocks = [block] * self.num_layers
        batch = SimpleNamespace(x=x, blocks=blocks, edge_index=block.edge_index, batch_size=len(x))
        found, wanted = forward_batch(self.gnn, batch), (len(x), *self.widths)
        if found.shape != wanted:
            name = type(self.gnn).__name__
            raise ConfigError(f"model {name} gives {tuple(found.shape)}: rows {wanted} of a window's nodes are wanted")
        rows = self.cell(found, carried[0])
        return rows, [rows]


def own_window_model(name: str, offered: Mapping[str, Any], required: Mapping[str, Any], asked: Collection[str]) -> WindowModel:
    """The user's class "package.module:Class": a `WindowModel`, which says itself what is carried, or a GNN as of `OwnGNN`.

    offered: in_channels, hidden_channels, out_channels, num_layers, dropout; and see `ooc.models.user.load_model`.
    """
    made = make_module(name, offered, required, asked)
    if isinstance(made, WindowModel):
        return made
    kind_of(made)
    return OwnGNN(made, int(offered["hidden_channels"]), int(offered["num_layers"]))


class Roland(WindowModel):
    """Every layer's rows are updated: H_t = update(H of the node's earlier window, the layer's output).

    update: "gru"; "mlp", of both side by side; or "average": H_{t-1} counts for the share of the node's edges that came before
    this window, which takes one more number a node.

    >>> model = Roland("sage", 16, 64, num_layers=2, update="gru")
    >>> rows, carried = model(x, block, [torch.zeros(n, width) for width in model.widths])
    """

    def __init__(
        self, conv: Conv, in_channels: int, channels: int, num_layers: int, update: Update = "gru", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = _layers(conv, in_channels, channels, num_layers, dropout)
        self.update = update
        self.updates = nn.ModuleList(_updating(update, channels) for _ in range(num_layers))
        self.widths = (channels,) * num_layers + ((1,) if update == "average" else ())

    def forward(
        self, x: Tensor, block: Block, carried: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """See `WindowModel`."""
        now: list[Tensor] = []
        if self.update == "average":
            before, new = carried[-1], block.degree.to(carried[-1].dtype).unsqueeze(1)
            share = before / (before + new).clamp(min=1)
        for layer, update, old in zip(self.layers, self.updates, carried, strict=False):
            x = layer(x, block)
            x = share * old + (1 - share) * x if self.update == "average" else update(x, old)
            now.append(x)
        return x, [*now, before + new] if self.update == "average" else now


def _updating(update: Update, channels: int) -> nn.Module:
    if update == "gru":
        return nn.GRUCell(channels, channels)
    return _Mixed(channels) if update == "mlp" else nn.Identity()


class _Mixed(nn.Module):
    """A perceptron of a layer's output and the node's earlier rows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nn = nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels))

    def forward(self, x: Tensor, old: Tensor) -> Tensor:
        """Both [n, channels]."""
        out: Tensor = self.nn(torch.cat([x, old], dim=1))
        return out


class Evolving(nn.Module):
    """A GCN layer whose weight matrix a GRU makes from the earlier window's, its columns as hidden states and as inputs."""

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

    def weight(self) -> Tensor:
        """[in_channels, out_channels]: of the next window."""
        columns = (self.carried if self.begun else self.initial).t()
        out: Tensor = self.cell(columns, columns).t()
        return out

    def forward(self, x: Tensor, block: Block, weight: Tensor) -> Tensor:
        """x: [n, in_channels] -> [n, out_channels]."""
        if narrow_first(block, *self.initial.shape):
            return propagated(x @ weight, block, rescale=True) + self.bias
        return propagated(x, block, rescale=True) @ weight + self.bias


class EvolveGCN(WindowModel):
    """GCN layers whose weights evolve (EvolveGCN-O). They are buffers, so that a checkpoint of the model has them.

    >>> model = EvolveGCN(16, 64, num_layers=2)
    >>> rows, _ = model(x, block, [], model.weights())
    """

    def __init__(self, in_channels: int, channels: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [in_channels, *[channels] * num_layers]
        self.layers = nn.ModuleList(map(Evolving, widths[:-1], widths[1:]))
        self.dropout = dropout

    def weights(self) -> list[Tensor]:
        """See `WindowModel`."""
        return [layer.weight() for layer in self._evolving()]

    def keep(self, weights: Sequence[Tensor]) -> None:
        """See `WindowModel`."""
        with torch.inference_mode(False):  # training may go on from them
            for layer, weight in zip(self._evolving(), weights, strict=True):
                layer.carried = weight.detach().clone()  # not written into the old ones: backward needs them
                layer.begun.fill_(True)

    def begin(self) -> None:
        """See `WindowModel`."""
        for layer in self._evolving():
            layer.begun.fill_(False)

    def forward(
        self, x: Tensor, block: Block, carried: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """See `WindowModel`."""
        last = len(self.layers) - 1
        for index, (layer, weight) in enumerate(zip(self.layers, weights, strict=True)):
            x = layer(dropout(x, self.dropout if index else 0.0, self.training), block, weight)
            x = x if index == last else torch.relu(x)
        return x, []

    def _evolving(self) -> list[Evolving]:
        return [layer for layer in self.layers if isinstance(layer, Evolving)]


def _layers(conv: str, in_channels: int, channels: int, num_layers: int, dropout: float) -> nn.ModuleList:
    """Of a model that `ooc.models.builders` has, all of one width; no activation behind the last."""
    if conv not in get_args(Conv):
        raise ConfigError(f"conv {conv!r} is unknown: use {', '.join(get_args(Conv))}")
    if conv == "gat" and channels % _HEADS:
        raise ConfigError(f"{channels} channels are those of {_HEADS} heads together: use a multiple of {_HEADS}")
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
    """A model of windows by name. conv: of "recurrent" and "roland"; update: of "roland". ConfigError for an unknown name.

    >>> window_model("roland", 16, 64, 2, conv="gcn", update="average").widths
    (64, 64, 1)
    """
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers}: a model has at least one layer")
    if family == "recurrent":
        return Recurrent(conv, in_channels, channels, num_layers, dropout)
    if family == "roland":
        if update not in get_args(Update):
            raise ConfigError(f"update {update!r} is unknown: use {', '.join(get_args(Update))}")
        return Roland(conv, in_channels, channels, num_layers, update, dropout)
    if family == "evolvegcn":
        return EvolveGCN(in_channels, channels, num_layers, dropout)
    raise ConfigError(f"model {family!r} is unknown: use {', '.join(get_args(Family))}")

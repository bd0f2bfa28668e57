"""Built-in models as lists of layers: GraphSAGE, GCN, GAT, GIN, GINE, GCNII, APPNP, SGC and reversible ones.

A model runs on sampled blocks and on the whole graph (`full_blocks`) with the same parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch_geometric.utils import index_sort
from torch_geometric.utils.sparse import index2ptr

from ooc.graph.blocks import Block
from ooc.models.convs import (
    BlockGATConv,
    BlockGCN2Conv,
    BlockGCNConv,
    BlockGINConv,
    BlockGINEConv,
    BlockPropagation,
    BlockSAGEConv,
)
from ooc.models.jumping import Jk, Jump
from ooc.models.layers import Between, DenseLayer, Input, Layer, Norm, run_model
from ooc.models.memory_efficient import Relu
from ooc.models.recomputation import Given
from ooc.models.reversible import NAMES as REVERSIBLE
from ooc.models.reversible import build_reversible
from ooc.stores.errors import ConfigError

ModelName = Literal["sage", "gcn", "gat", "gin", "gine", "gcnii", "appnp", "sgc", "revsage", "revgat", "revgcn"]
PLAIN = ("sage", "gcn", "gat", "gin", "gine")
"""models whose layers are a list of convolutions: widths, `jk` and `blocks` apply to them"""
_PROPAGATING = ("appnp", "sgc")
"""models whose layers have no parameters"""
_OF_BLOCK = {"conv", "norm", "activation", "residual", "dropout", "heads", "mlp"}
_ACTIVATIONS: dict[str, Any] = {
    "relu": Relu,
    "elu": partial(nn.ELU, inplace=True),
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "none": nn.Identity,
}


class Model(nn.Module):
    """A list of layers with an optional encoder before and decoder after it; layer l runs on block l (see `run_layers`).

    `jump` makes what the decoder is given of the rows behind all layers (`ooc.models.jumping.Jump`).

    >>> model = build_model("sage", 128, 256, 32, num_layers=2)
    >>> model(batch.x, batch.blocks).shape
    torch.Size([batch_size, 32])
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        encoder: nn.Module | None = None,
        decoder: nn.Module | None = None,
        jump: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.layers, self.decoder = encoder, nn.ModuleList(layers), decoder
        self.jump = jump

    def forward(self, x: Input, blocks: Sequence[Any], checkpoint: Given = False, between: Between | None = None) -> Tensor:
        """Map x [blocks[0].num_src, in_channels] to [blocks[-1].num_dst, out_channels]; see `run_layers`."""
        out: Tensor = run_model(self, x, blocks, checkpoint, between)
        return out


def build_model(
    name: str,
    in_channels: int,
    hidden_channels: int | Sequence[int],
    out_channels: int,
    num_layers: int,
    dropout: float = 0.0,
    norm: Norm | None = None,
    residual: bool = False,
    heads: int = 8,
    output_heads: int = 1,
    rescale: bool = True,
    input_dropout: float | None = None,
    alpha: float = 0.1,
    theta: float = 0.5,
    edge_dim: int | None = None,
    groups: int = 2,
    jk: Jk = "none",
    blocks: Sequence[Mapping[str, Any]] = (),
) -> Model:
    """Build a model by name.

    Args:
        name: One of "sage", "gcn", "gat", "gin", "gine", "gcnii", "appnp" and "sgc"; or of the reversible ones "revsage",
            "revgat" and "revgcn", whose activations do not grow with `num_layers` (`ooc.models.reversible`).
        in_channels, out_channels: Numbers of input features and of outputs.
        hidden_channels: Width between layers, or one behind each layer but the last, with `jk` behind the last too; of sage,
            gcn, gat, gin and gine. For gat the width of all heads together, a multiple of `heads`.
        num_layers: Number of layers. For appnp and sgc, each layer is one parameter-free propagation step.
        dropout: Dropout on the input of every layer with parameters, and on gat's attention.
        norm: "none", "batch" or "layer": normalization after every layer but the last (after every layer in gcnii; at the
            beginning of every block of a reversible model). Default: "layer" for reversible models, else "none".
        residual: Whether to add each destination's own input to the layer's output.
        heads, output_heads: Attention heads of gat, and those of its last layer, which are averaged.
        rescale: Whether to rescale sums over sampled edges; see `ooc.models.convs`.
        input_dropout: Dropout on the features. Default: `dropout` for gcn, gat, gcnii and appnp, as published, else 0.
        alpha: Weight of the initial rows in every layer of gcnii and appnp.
        theta: Strength of gcnii's weights; see `BlockGCN2Conv`.
        edge_dim: Number of edge features, which gine takes from `Block.edge_attr`; other models take none.
        groups: Groups that a reversible model divides the hidden columns into, 2 or more.
        jk: "cat", "max", "lstm" or "sum" of the rows behind all layers, and a linear map, in place of the last layer's rows; of
            sage, gcn, gat, gin and gine.
        blocks: What differs in each layer, of the same models: a mapping for each, with any of conv (a model's name),
            norm, activation ("relu", "elu", "leaky_relu", "gelu", "tanh" or "none"), residual, dropout, heads (of gat; those of
            the last layer are averaged), and mlp, the inner width of a two-layer perceptron behind the layer.

    Raises:
        ConfigError: If a value is invalid.

    >>> model = build_model("gcn", 1433, 16, 7, num_layers=2, dropout=0.5)
    >>> logits = model(x, full_blocks(edge_index, num_nodes=2708, num_layers=2))
    """
    _check(name, num_layers, dropout, heads, output_heads)
    plain = name not in ("gcnii", *_PROPAGATING, *REVERSIBLE)
    if not plain and (jk != "none" or blocks or not isinstance(hidden_channels, int)):
        raise ConfigError(f"{name} has one width and one kind of layers: leave out jk and blocks, and give one hidden width")
    if norm is None:
        norm = "layer" if name in REVERSIBLE else "none"
    if input_dropout is None:
        input_dropout = dropout if name in ("gcn", "gat", "gcnii", "appnp") else 0.0
    if isinstance(hidden_channels, int) and name in ("gcnii", *_PROPAGATING):
        channels = in_channels, hidden_channels, out_channels
        return _deep(name, channels, num_layers, (input_dropout, dropout), rescale, norm, residual, alpha, theta)
    if isinstance(hidden_channels, int) and name in REVERSIBLE:
        if residual:
            raise ConfigError(f"{name} adds every layer's input to its output in any case: leave residual out")
        make_conv = partial(_conv_of_group, REVERSIBLE[name], heads, rescale)
        sizes = (in_channels, hidden_channels, out_channels), num_layers, groups
        return Model(*build_reversible(name, *sizes, (input_dropout, dropout), norm, make_conv))
    widths = _widths(hidden_channels, num_layers, jk != "none")
    defaults = LayerSettings(name, norm, None, residual, dropout, heads, output_heads, None, rescale, edge_dim or 0)
    settings = _settings(defaults, blocks, num_layers, input_dropout)
    if jk == "none":
        return Model(_layers([in_channels, *widths, out_channels], settings, output=True))
    jump = Jump(jk, widths)
    return Model(_layers([in_channels, *widths], settings, output=False), None, DenseLayer(jump.channels, out_channels), jump)


@dataclass(frozen=True)
class LayerSettings:
    """Of one layer. activation: None for the convolution's own; mlp: inner width of the perceptron behind it."""

    conv: str
    norm: Norm
    activation: str | None
    residual: bool
    dropout: float
    heads: int
    output_heads: int
    mlp: int | None
    rescale: bool
    edge_dim: int


def _widths(hidden: int | Sequence[int], num_layers: int, jumps: bool) -> list[int]:
    """Columns behind each hidden layer. jumps: whether the last layer is one, as the rows of all are given to `Jump`."""
    count = num_layers if jumps else num_layers - 1
    widths = [hidden] * count if isinstance(hidden, int) else list(hidden)
    if len(widths) != count:
        shown = ",".join(map(str, widths))
        raise ConfigError(
            f"hidden {shown} has {len(widths)} width{'s' * (len(widths) != 1)} for {count} hidden layer{'s' * (count != 1)}: "
            "give one for each"
        )
    return widths


def _settings(
    defaults: LayerSettings, blocks: Sequence[Mapping[str, Any]], num_layers: int, input_dropout: float
) -> list[tuple[LayerSettings, frozenset[str]]]:
    """(the settings, the names of those that are its own) of every layer."""
    if blocks and len(blocks) != num_layers:
        raise ConfigError(f"blocks are {len(blocks)} and layers are {num_layers}: give a block for each layer")
    found = []
    for index in range(num_layers):
        own = {name: value for name, value in (blocks[index] if blocks else {}).items() if value is not None}
        if unknown := sorted(own.keys() - _OF_BLOCK):
            raise ConfigError(f"block {index + 1} has {unknown[0]!r}: a block has {', '.join(sorted(_OF_BLOCK))}")
        if own.get("conv", defaults.conv) not in PLAIN:
            raise ConfigError(f"block {index + 1} has conv {own['conv']!r}: use {', '.join(PLAIN)}")
        if "heads" in own:
            if own.get("conv", defaults.conv) != "gat":
                raise ConfigError(f"block {index + 1} has heads, which apply to conv gat: leave them out")
            own["output_heads"] = own["heads"]
        if own.get("activation", "relu") not in _ACTIVATIONS:
            raise ConfigError(f"block {index + 1} has activation {own['activation']!r}: use {', '.join(_ACTIVATIONS)}")
        usual = {"dropout": defaults.dropout if index else input_dropout}
        found.append((replace(defaults, **{**usual, **own}), frozenset(own)))
    return found


def _layers(widths: Sequence[int], settings: list[tuple[LayerSettings, frozenset[str]]], output: bool) -> list[Layer]:
    """Layers between the widths. output: whether the last one's rows are the outputs: without norm and activation, unless its
    block says so."""
    layers = []
    for index, ((width_in, width_out), (own, given)) in enumerate(zip(pairwise(widths), settings, strict=True)):
        last = output and index == len(settings) - 1
        if own.conv == "gat" and not last and width_out % own.heads:
            where = f"block {index + 1}: " if given else ""
            raise ConfigError(
                f"{where}hidden = {width_out} is the width of all {own.heads} heads together: use a multiple of {own.heads}"
            )
        conv = _make_conv(own, width_in, width_out, last)
        options: dict[str, Any] = {"dropout": own.dropout, "residual": own.residual}
        if not last or "norm" in given:
            options["norm"] = own.norm
        if not last or "activation" in given:
            options["activation"] = _activation(own)
        if own.mlp is not None:
            inner = nn.Linear(width_out, own.mlp), _activation(own), nn.Linear(own.mlp, width_out)
            options["mlp"] = nn.Sequential(*inner)
        layers.append(Layer(conv, width_in, width_out, **options))
    return layers


def _activation(own: LayerSettings) -> nn.Module:
    return _ACTIVATIONS[own.activation or ("elu" if own.conv == "gat" else "relu")]()


def _deep(
    name: str,
    channels: tuple[int, int, int],
    num_layers: int,
    dropouts: tuple[float, float],
    rescale: bool,
    norm: Norm,
    residual: bool,
    alpha: float,
    theta: float,
) -> Model:
    """gcnii, appnp or sgc as published. channels: of input, hidden rows, output; dropouts: of the features, of all after."""
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha={alpha} is invalid: give the weight of the initial rows, between 0 and 1")
    if theta <= 0:
        raise ConfigError(f"theta={theta} is invalid: give a positive number")
    if name in _PROPAGATING and (norm != "none" or residual):
        raise ConfigError(f"{name} has no layers to apply norm={norm!r} and residual={residual} to: leave them out")
    (width_in, hidden, width_out), (first, later) = channels, dropouts
    steps = range(num_layers)
    if name == "gcnii":  # layers of the hidden width with ReLU, between two linear maps
        options: dict[str, Any] = {"dropout": later, "norm": norm, "residual": residual}
        convs = (BlockGCN2Conv(hidden, alpha, theta, index + 1, rescale) for index in steps)
        layers = [Layer(conv, hidden, hidden, **options, activation=Relu()) for conv in convs]
        return Model(layers, DenseLayer(width_in, hidden, first, nn.ReLU()), DenseLayer(hidden, width_out, later))
    if name == "appnp":  # a two-layer perceptron, then propagation
        encoder = nn.Sequential(DenseLayer(width_in, hidden, first, Relu()), DenseLayer(hidden, width_out, later))
        layers = [Layer(BlockPropagation(width_out, alpha, rescale), width_out, width_out) for _ in steps]
        return Model(layers, encoder=encoder)
    propagation = (BlockPropagation(width_in, rescale=rescale) for _ in steps)  # sgc: propagation, then one linear map
    layers = [Layer(step, width_in, width_in, dropout=0.0 if index else first) for index, step in enumerate(propagation)]
    return Model(layers, decoder=DenseLayer(width_in, width_out, later))


def _check(name: str, num_layers: int, dropout: float, heads: int, output_heads: int) -> None:
    if name not in get_args(ModelName):
        known = ", ".join(get_args(ModelName))
        raise ConfigError(f"model {name!r} is unknown: use {known}, or package.module:Class for your own")
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers} is invalid: a model has at least one layer")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout={dropout} is invalid: give a probability of at least 0 and below 1")
    if heads < 1 or output_heads < 1:
        raise ConfigError(f"heads={heads}, output_heads={output_heads}: attention has at least one head")


def _make_conv(own: LayerSettings, width_in: int, width_out: int, last: bool) -> nn.Module:
    name, heads = own.conv, own.heads
    if name == "sage":
        return BlockSAGEConv(width_in, width_out)
    if name == "gcn":
        return BlockGCNConv(width_in, width_out, own.rescale)
    if name == "gin":
        # A binary task would otherwise depend on a single hidden unit, which a dead ReLU could silence.
        return BlockGINConv(width_in, width_out, own.rescale, inner=width_in if last else None)
    if name == "gine":
        if not own.edge_dim:
            raise ConfigError(
                "gine takes edge features: give edge_dim, their number, as of a store with the edge feature edge_attr"
            )
        return BlockGINEConv(width_in, width_out, own.edge_dim, own.rescale, inner=width_in if last else None)
    if last:
        return BlockGATConv(width_in, width_out, heads=own.output_heads, concat=False, dropout=own.dropout)
    return BlockGATConv(width_in, width_out // heads, heads=heads, dropout=own.dropout)


def _conv_of_group(name: str, heads: int, rescale: bool, channels: int) -> nn.Module:
    """Of a reversible model. Attention has no dropout of its own, as it is computed again."""
    if name == "gat" and channels % heads:
        raise ConfigError(f"revgat divides the {channels} columns of a group among {heads} heads: give a multiple of them")
    own = LayerSettings(name, "none", None, False, 0.0, heads, 1, None, rescale, 0)
    return _make_conv(own, channels, channels, False)


def full_blocks(
    edge_index: Tensor,
    num_nodes: int,
    num_layers: int,
    weight: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    edge_attr: Tensor | None = None,
) -> list[Block]:
    """Return one block per layer in which every node of the graph is both source and destination.

    The blocks share their tensors, so a model runs on a whole graph as on a sampled batch.

    Args:
        edge_index: int64[2, e], (source, destination) in any order.
        num_nodes, num_layers: Numbers of nodes and of blocks to return.
        weight: Edge weights [e], or None.
        dtype: Floating dtype of the weights.
        edge_attr: Edge features [e, ...], or None.

    >>> blocks = full_blocks(torch.tensor([[0, 1], [1, 0]]), num_nodes=2, num_layers=3)
    >>> model(x, blocks).shape
    torch.Size([2, out_channels])
    """
    target, order = index_sort(edge_index[1], max_value=num_nodes, stable=True)
    edge_index = torch.stack([edge_index[0][order], target])
    source = edge_index[0]
    is_loop = source == target
    # On a GPU nobody asks whether there are loops: the host would wait for the answer.
    has_loops = is_loop.is_cuda or bool(is_loop.any())
    loops = target.new_zeros(num_nodes).index_add_(0, target, is_loop.long()) if has_loops else None
    weight_sum = loop_weight = None
    if weight is not None:
        weight = weight[order].to(dtype)
        weight_sum = weight.new_zeros(num_nodes).index_add_(0, target, weight.masked_fill(is_loop, 0.0))
        loop_weight = last_loop_weight(target, weight, is_loop, num_nodes) if has_loops else None
    indptr = index2ptr(target, num_nodes)
    block = Block(edge_index, indptr, num_nodes, num_nodes, indptr.diff(), loops, weight, weight_sum, loop_weight)
    if edge_attr is not None:
        block = block._replace(edge_attr=edge_attr[order])
    return [block] * num_layers


def last_loop_weight(target: Tensor, weight: Tensor, is_loop: Tensor, num_nodes: int) -> Tensor:
    """Return the weight of each node's last self-loop, [num_nodes], 1 for nodes without one.

    `target` (int64[e]) are the destinations of edges, `weight` ([e]) their weights, `is_loop` (bool[e]) which are self-loops.
    """
    position = torch.arange(len(target), device=target.device).masked_fill(~is_loop, -1)
    last = target.new_full((num_nodes,), -1).scatter_reduce(0, target, position, "amax")
    if not len(weight):
        return weight.new_ones(num_nodes)
    return weight[last.clamp(min=0)].masked_fill(last < 0, 1.0)

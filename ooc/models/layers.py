"""The seam between layers: a model is a list of layers, and each maps a block's source rows to its destination rows.

Dropout, normalisation, residual and activation are inside the layer, so what passes the seam is exactly what a history would
keep, a layer-wise sweep would store, or recomputation would start from. (The list-of-layers view is GNNAutoScale's and DGL's.)
What needs no neighbors stands outside of the list: an encoder of the features before it, a decoder of the seeds' rows after it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint as recompute
from torch_geometric.nn import BatchNorm

from ooc.graph.aggregation import FirstLayerAggregates
from ooc.graph.blocks import Block
from ooc.models.dropout import dropout
from stores.errors import ConfigError, InputError

Norm = Literal["none", "batch", "layer"]


class Layer(nn.Module):
    """dropout -> convolution -> norm -> + residual -> activation, on one block.

    conv: a module (x [num_src, in_channels], block) -> [num_dst, out_channels]; one with a method `pre_aggregation` also takes
    `FirstLayerAggregates` for x, and without dropout so does the layer; one with `needs_initial` takes `initial` too (see
    `run_layers`), and so does the layer. The residual is the destination's own input
    row, through a linear map where the widths differ. The norm is of each row by itself ("layer") or over the rows of the
    batch ("batch"). Raises ConfigError for an unknown norm.

    >>> layer = Layer(BlockGCNConv(128, 256), 128, 256, dropout=0.5, norm="batch", activation=nn.ReLU())
    >>> layer(torch.randn(block.num_src, 128), block).shape
    torch.Size([num_dst, 256])
    """

    def __init__(
        self,
        conv: nn.Module,
        in_channels: int,
        out_channels: int,
        *,
        dropout: float = 0.0,
        norm: Norm = "none",
        residual: bool = False,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv = conv
        self.dropout = dropout
        self.norm = make_norm(norm, out_channels)
        self.residual = residual
        same = in_channels == out_channels
        self.skip = nn.Linear(in_channels, out_channels, bias=False) if residual and not same else nn.Identity()
        self.activation = nn.Identity() if activation is None else activation

    @property
    def needs_initial(self) -> bool:
        """Whether `forward` takes `initial`."""
        return bool(getattr(self.conv, "needs_initial", False))

    def forward(self, x: Tensor | FirstLayerAggregates, block: Block, initial: Tensor | None = None) -> Tensor:
        if not isinstance(x, FirstLayerAggregates):
            x = dropout(x, self.dropout, self.training)
        out = self.convolved(x, block, initial)
        return self.finished(out, x.self_row if isinstance(x, FirstLayerAggregates) else x[: block.num_dst])

    def convolved(self, x: Tensor | FirstLayerAggregates, block: Block, initial: Tensor | None = None) -> Tensor:
        """The convolution alone, of rows that dropout has passed: [num_dst, out_channels]."""
        out: Tensor = self.conv(x, block, initial) if self.needs_initial else self.conv(x, block)
        return out

    def finished(self, out: Tensor, self_row: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """What follows the convolution. self_row: [num_dst, in_channels], the destinations' rows that dropout has passed;
        norm: in place of the layer's own."""
        out = self.norm(out) if norm is None else norm(out)
        if self.residual:
            out = out + self.skip(self_row)
        return self.activation(out)

    def joined(self, neighbor: Tensor, self_row: Tensor, block: Block) -> Tensor:
        """The layer from what the convolution's `narrowed` made of rows that dropout has passed, summed; without a residual."""
        return self.finished(self.conv_joined(neighbor, self_row, block), self_row)

    def conv_joined(self, neighbor: Tensor, self_row: Tensor, block: Block) -> Tensor:
        """As `convolved`, from what `joined` takes."""
        assert not self.residual, "that needs the rows themselves"
        conv: Any = self.conv
        out: Tensor = conv.joined(neighbor, self_row, block)
        return out

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, residual={self.residual}"


class DenseLayer(nn.Module):
    """dropout -> linear map -> activation, row by row: what encoders and decoders are made of.

    >>> DenseLayer(1433, 64, dropout=0.5, activation=nn.ReLU())(torch.randn(10, 1433)).shape
    torch.Size([10, 64])
    """

    def __init__(self, in_channels: int, out_channels: int, dropout: float = 0.0, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.dropout = dropout
        self.lin = nn.Linear(in_channels, out_channels)
        self.activation = nn.Identity() if activation is None else activation

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, in_channels] -> [n, out_channels]."""
        out: Tensor = self.activation(self.lin(dropout(x, self.dropout, self.training)))
        return out

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


def make_norm(norm: str, channels: int) -> nn.Module:
    """The normalisation of that name; PyG's batch norm, because it also takes a batch of one row."""
    if norm == "none":
        return nn.Identity()
    if norm == "batch":
        return BatchNorm(channels, allow_single_element=True)
    if norm == "layer":
        return nn.LayerNorm(channels)
    raise ConfigError(f"norm {norm!r} is unknown: use none, batch or layer")


Between = Callable[[int, Tensor], Tensor]
"""between(l, out [num_dst, g]) -> x of layer l + 1's block; the last layer's output does not pass it"""


def run_layers(
    layers: Sequence[nn.Module] | nn.ModuleList,
    x: Tensor | FirstLayerAggregates,
    blocks: Sequence[Block],
    checkpoint: bool = False,
    *,
    encoder: nn.Module | None = None,
    decoder: nn.Module | None = None,
    between: Between | None = None,
    initial: Tensor | None = None,
) -> Any:
    """Run layer l on block l, input side first, and return the rows of the seeds.

    x: [blocks[0].num_src, f], or `FirstLayerAggregates` for a first layer that takes them; any dtype, converted to the
    parameters' outside of autocast. Returns [blocks[-1].num_dst, g]. encoder, decoder: row by row, of x before the first layer
    and of the last one's rows. A layer that has `needs_initial` is given also the rows of its destinations as they were before
    the first layer, `initial` [num_dst, f0]: destinations are a prefix of the sources in every block, so those rows are a
    prefix too. checkpoint: keep only what passes between the layers and compute the rest again in backward (Chen et al.,
    2016); the same random numbers are drawn and batch statistics are recorded once, so the result does not change. between:
    the hook between two layers (see `Between`): what is pushed and pulled there is pushed and pulled here. Raises ConfigError
    where layers and blocks differ in number or an encoder meets `FirstLayerAggregates`, InputError where x does not fit the
    first block.

    >>> out = run_layers(model.layers, batch.x, batch.blocks)
    >>> out.shape
    torch.Size([batch_size, classes])
    """
    if len(layers) != len(blocks):
        whole = all(block.num_src == block.num_dst for block in blocks)  # of parts, of random subgraphs, of a whole graph
        wanted = f"num_layers={len(layers)}" if whole else f"one fan-out for each layer, {len(layers)} in all"
        raise ConfigError(f"the model has {len(layers)} layers but the batch {len(blocks)} blocks: give {wanted}")
    if x.size(0) != blocks[0].num_src:
        raise InputError(f"x has {x.size(0)} rows but the first block {blocks[0].num_src} sources: pass the rows of batch.n_id")
    out = as_input(x, *(part for part in (encoder, *layers, decoder) if part is not None))
    if encoder is not None:
        if isinstance(out, FirstLayerAggregates):
            raise ConfigError("a model with an encoder needs the rows of x: make no sums for it while loading")
        out = encoder(out)
    if initial is None:
        initial = out.self_row if isinstance(out, FirstLayerAggregates) else out
    for index, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        extra = (initial[: block.num_dst],) if getattr(layer, "needs_initial", False) else ()
        if checkpoint and torch.is_grad_enabled():
            out = recompute(layer, out, block, *extra, use_reentrant=False, context_fn=partial(_contexts, layer))
        else:
            out = layer(out, block, *extra)
        if between is not None and index + 1 < len(layers):
            out = between(index, out)
    return out if decoder is None else decoder(out)


def run_model(
    model: Any,
    x: Tensor | FirstLayerAggregates,
    blocks: Sequence[Block],
    checkpoint: bool = False,
    between: Between | None = None,
) -> Any:
    """`run_layers` of a module's `layers`, with its `encoder` and `decoder` where it has them."""
    encoder, decoder = getattr(model, "encoder", None), getattr(model, "decoder", None)
    return run_layers(model.layers, x, blocks, checkpoint, encoder=encoder, decoder=decoder, between=between)


def as_input(x: Any, *modules: nn.Module) -> Any:
    """x in the dtype that the modules compute in: their parameters', or under autocast any floating dtype as it is."""
    if isinstance(x, FirstLayerAggregates):
        return FirstLayerAggregates(as_input(x.neighbor, *modules), as_input(x.self_row, *modules))
    if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        return x
    parameter = next((p for module in modules for p in module.parameters() if p.is_floating_point()), None)
    return x if parameter is None else x.to(parameter.dtype)


def _contexts(layer: nn.Module) -> tuple[Any, Any]:
    """The contexts of the first computation and of its repetition."""
    return nullcontext(), recording_nothing(layer)


@contextmanager
def recording_nothing(layer: nn.Module) -> Iterator[None]:
    """Batch norms normalise alike but leave their running statistics as they are."""
    norms = [m for m in layer.modules() if isinstance(m, _BatchNorm)]
    before = [(norm.momentum, deepcopy(norm.num_batches_tracked)) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches

"""The seam between layers: a model is a list of layers, and each maps a block's source rows to its destination rows.

Dropout, normalisation, residual and activation are inside the layer, so what passes the seam is exactly what a history would
keep, a layer-wise sweep would store, or recomputation would start from. (The list-of-layers view is GNNAutoScale's and DGL's.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint as recompute
from torch_geometric.nn import BatchNorm

from ooc.batch import Block
from ooc.dropout import dropout
from ooc.sums import Sums
from stores.errors import ConfigError, InputError

Norm = Literal["none", "batch", "layer"]


class Layer(nn.Module):
    """dropout -> convolution -> norm -> + residual -> activation, on one block.

    conv: a module (x [num_src, in_channels], block) -> [num_dst, out_channels]; one with a method `summing` also takes
    `Sums` for x, and without dropout so does the layer. The residual is the destination's own input
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

    def forward(self, x: Tensor | Sums, block: Block) -> Tensor:
        if not isinstance(x, Sums):
            x = dropout(x, self.dropout, self.training)
        out = self.norm(self.conv(x, block))
        if self.residual:
            out = out + self.skip(x.root if isinstance(x, Sums) else x[: block.num_dst])
        return self.activation(out)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, residual={self.residual}"


def make_norm(norm: str, channels: int) -> nn.Module:
    """The normalisation of that name; PyG's batch norm, because it also takes a batch of one row."""
    if norm == "none":
        return nn.Identity()
    if norm == "batch":
        return BatchNorm(channels, allow_single_element=True)
    if norm == "layer":
        return nn.LayerNorm(channels)
    raise ConfigError(f"norm {norm!r} is unknown: use none, batch or layer")


def run_layers(
    layers: Sequence[nn.Module] | nn.ModuleList, x: Tensor | Sums, blocks: Sequence[Block], checkpoint: bool = False
) -> Any:
    """Run layer l on block l, input side first, and return the rows of the seeds.

    x: [blocks[0].num_src, f], or `Sums` for a first layer that takes them; any dtype, converted to the parameters' outside of
    autocast. Returns [blocks[-1].num_dst, g].
    checkpoint: keep only what passes between the layers and compute the rest again in backward (Chen et al., 2016); the same
    random numbers are drawn and batch statistics are recorded once, so the result does not change. Raises ConfigError where
    layers and blocks differ in number, InputError where x does not fit the first block.

    >>> out = run_layers(model.layers, batch.x, batch.blocks)
    >>> out.shape
    torch.Size([batch_size, classes])
    """
    if len(layers) != len(blocks):
        raise ConfigError(
            f"the model has {len(layers)} layers but the batch {len(blocks)} blocks: give one fan-out for each layer"
        )
    if x.size(0) != blocks[0].num_src:
        raise InputError(f"x has {x.size(0)} rows but the first block {blocks[0].num_src} sources: pass the rows of batch.n_id")
    out = as_input(x, layers[0])
    for layer, block in zip(layers, blocks, strict=True):
        if checkpoint and torch.is_grad_enabled():
            out = recompute(layer, out, block, use_reentrant=False, context_fn=partial(_contexts, layer))
        else:
            out = layer(out, block)
    return out


def as_input(x: Any, module: nn.Module) -> Any:
    """x in the dtype that the module computes in: its parameters', or under autocast any floating dtype as it is."""
    if isinstance(x, Sums):
        return Sums(as_input(x.near, module), as_input(x.root, module))
    if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        return x
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    return x if parameter is None else x.to(parameter.dtype)


def _contexts(layer: nn.Module) -> tuple[Any, Any]:
    """The contexts of the first computation and of its repetition."""
    return nullcontext(), _recording_nothing(layer)


@contextmanager
def _recording_nothing(layer: nn.Module) -> Iterator[None]:
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

"""Reversible layers (Li et al., "Training Graph Neural Networks with 1000 Layers", ICML 2021): revsage, revgat and revgcn.

The columns of the rows are divided into groups. A layer adds to each group in turn what a block, norm -> ReLU -> dropout ->
convolution, makes of the group before, and of the first group of the sum of the others. So its input follows from its output,
and is computed from it again in the backward pass: activations do not grow with the number of layers. (PyG's `GroupAddRev`.)

A block reads rows that the same layer has just computed, also those of sources: all layers run on all nodes of a batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.nn.models.rev_gnn import GroupAddRev

from ooc.graph.blocks import Block
from ooc.models.layers import DenseLayer, Norm, dropout_mask, make_norm
from ooc.stores.errors import ConfigError

NAMES = {"revsage": "sage", "revgat": "gat", "revgcn": "gcn"}
"""reversible models, and the convolution of each"""
WIDTHS_ALIVE = {"revsage": 4, "revgat": 8, "revgcn": 4}
"""a batch's rows of the hidden width, in units of what `ooc.loading.batch_bytes` counts for a layer, that training a reversible
model takes at most, however many layers it has: the mask of dropout, the rows, and what one layer saves (measured)"""


class ReversibleBlock(nn.Module):
    """norm -> ReLU -> mask -> convolution, of one group: x [num_src, c] -> [num_dst, c].

    Args:
        conv: A module (x [num_src, c], block) -> [num_dst, c].
        channels: c, columns of the group.
        norm: "none" or "layer".
    """

    def __init__(self, conv: nn.Module, channels: int, norm: Norm = "layer") -> None:
        super().__init__()
        self.norm = make_norm(norm, channels)
        self.conv = conv

    def forward(self, x: Tensor, block: Block, mask: Tensor | None = None) -> Tensor:
        h = F.relu(self.norm(x))
        out: Tensor = self.conv(h if mask is None else h * mask, block)
        return out


class _Inverted(torch.autograd.Function):
    """A reversible layer whose output has the memory of its input. The backward pass runs each block once, on what it read:
    from that follow the layer's input, in the same memory, and the gradients (PyG's function runs it twice).

    Rows of all layers in one place also keep the C library from leaving a hole for each layer.
    """

    @staticmethod
    def forward(ctx: Any, layer: "ReversibleLayer", block: Block, mask: Tensor | None, x: Tensor, *_: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.layer, ctx.block, ctx.mask, ctx.rows = layer, block, mask, x.detach()
        ctx.trained = [[each for each in conv.parameters() if each.requires_grad] for conv in layer.convs]
        groups, masks = layer.groups_of(ctx.rows, mask)
        for group, conv in enumerate(layer.convs):
            groups[group].add_(conv(_read(groups, group), block, masks[group]))
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.rows is None:
            raise RuntimeError("a reversible model is gone through backward once: its rows are changed on the way")
        layer, rows, ctx.rows = ctx.layer, ctx.rows, None
        groups, masks = layer.groups_of(rows, ctx.mask)
        grads = list(grad.chunk(len(groups), dim=1))
        of_parameters: list[Tensor | None] = []
        for group in reversed(range(len(groups))):
            read = _read(groups, group).detach().requires_grad_()
            with torch.enable_grad():
                added = layer.convs[group](read, ctx.block, masks[group])
            of_rows, *of_block = torch.autograd.grad(added, [read, *ctx.trained[group]], grads[group], allow_unused=True)
            groups[group].sub_(added.detach())
            of_parameters = [*of_block, *of_parameters]
            for each in [group - 1] if group else range(1, len(groups)):
                grads[each] = grads[each] + of_rows
        return None, None, None, torch.cat(grads, dim=1), *of_parameters


def _read(groups: Sequence[Tensor], group: int) -> Tensor:
    """What the block of a group reads: the group before, which was added to already; of the first, the sum of the others."""
    return groups[group - 1] if group else sum(groups[2:], start=groups[1])


class ReversibleLayer(GroupAddRev):  # type: ignore[misc]
    """PyG's GroupAddRev of `ReversibleBlock`, on a block whose destinations are all its sources.

    In training its output takes the place of the output of the reversible layer before, which is computed from it again in the
    backward pass: a hook that keeps the output of a layer between sees the rows of later ones.

    Args:
        blocks: A block for each group.
        dropout: Probability with which an element of the shared mask is zero.
        stores: Whether activations are stored instead, as of a plain model; results do not change.

    >>> layer = ReversibleLayer([ReversibleBlock(BlockSAGEConv(32, 32), 32) for _ in range(2)])
    >>> layer(torch.randn(block.num_src, 64), block).shape
    torch.Size([num_src, 64])
    """

    square = True
    """see `ooc.models.layers.run_layers`"""

    def __init__(self, blocks: list[ReversibleBlock], dropout: float = 0.0, stores: bool = False) -> None:
        super().__init__(nn.ModuleList(blocks), disable=stores)
        self.dropout = dropout

    def forward(self, x: Tensor, block: Block, mask: Tensor | None = None) -> Tensor:
        """mask: of `ooc.models.layers.dropout_mask`, [num_src, channels]."""
        out: Tensor
        trained = self.trained()
        if torch.is_grad_enabled() and not self.disable and (trained or x.requires_grad):
            own = isinstance(x.grad_fn, _Inverted._backward_cls) and x.untyped_storage().nbytes() == x.nbytes
            rows = x if own else x.clone()  # others may have what no reversible layer has made, or a view of it
            out = _Inverted.apply(self, block, mask, rows, *trained)  # type: ignore[no-untyped-call]
        else:
            out = self._forward(x, block, mask)
        return out

    def groups_of(self, x: Tensor, mask: Tensor | None) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """The columns of each group, as views, and those of the mask."""
        count = len(self.convs)
        return x.chunk(count, dim=1), count * [None] if mask is None else mask.chunk(count, dim=1)

    def trained(self) -> list[nn.Parameter]:
        """Parameters of the groups in turn, without frozen ones."""
        return [parameter for block in self.convs for parameter in block.parameters() if parameter.requires_grad]

    def steps(self) -> list["GroupStep"]:
        """The layer as one of each group, which any block will do for."""
        return [GroupStep(block, group, len(self.convs), self.dropout) for group, block in enumerate(self.convs)]

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


class GroupStep(nn.Module):
    """One group of a reversible layer as a layer of its own: the rows with that group added to, x [num_src, c] -> [num_dst, c].

    Passes over all nodes go through a reversible model step by step: the next group reads what this one wrote for all nodes.
    """

    draws_as = "reversible"
    """steps of all layers have one mask of dropout; see `ooc.layerwise.ops`"""

    def __init__(self, block: ReversibleBlock, group: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.block, self.group, self.groups, self.dropout = block, group, groups, dropout

    @property
    def conv(self) -> nn.Module:
        return self.block.conv

    def forward(self, x: Tensor, block: Block) -> Tensor:
        return self._with(x, block, self._added(x, block))

    def undone(self, y: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """(the rows that the layer made `y` of, what it makes of `y`), [num_dst, c] each, computed once; y: [num_src, c].

        What is added to a group does not depend on that group, so gradients of the second, with respect to `y` and to
        parameters, are those of the layer at its input. The first has none.
        """
        added = self._added(y, block)
        return self._with(y.detach(), block, -added.detach()), self._with(y, block, added)

    def _added(self, x: Tensor, block: Block) -> Tensor:
        """What is added to the group, [num_dst, c / groups]."""
        mask, read = dropout_mask(x, self.dropout, self.block.training), x.chunk(self.groups, dim=1)
        rows = sum(read[2:], start=read[1]) if self.group == 0 else read[self.group - 1]
        own_mask = None if mask is None else mask.chunk(self.groups, dim=1)[self.group]
        added: Tensor = self.block(rows, block, own_mask)
        return added

    def _with(self, x: Tensor, block: Block, added: Tensor) -> Tensor:
        """The rows of destinations with so much added to the group."""
        parts = list(x[: block.num_dst].chunk(self.groups, dim=1))
        parts[self.group] = parts[self.group] + added
        return torch.cat(parts, dim=1)

    def extra_repr(self) -> str:
        return f"group={self.group}, dropout={self.dropout}"


def build_reversible(
    name: str,
    channels: tuple[int, int, int],
    num_layers: int,
    groups: int,
    dropouts: tuple[float, float],
    norm: Norm,
    make_conv: Any,
) -> tuple[list[ReversibleLayer], nn.Module, nn.Module]:
    """(layers, encoder, decoder) of a reversible model: a linear map, layers of the hidden width, norm -> ReLU -> linear map.

    Args:
        name: "revsage", "revgat" or "revgcn".
        channels: Columns of the input, of the rows, of the output.
        num_layers, groups, norm: As of `ooc.models.build_model`.
        dropouts: Of the features, and of the shared mask.
        make_conv: make_conv(columns) returns a group's convolution.

    Raises:
        ConfigError: If a value is invalid.
    """
    width_in, hidden, width_out = channels
    if groups < 2 or hidden % groups:
        raise ConfigError(
            f"groups = {groups} is invalid: {name} divides its {hidden} hidden columns evenly into 2 or more groups; give a "
            f"number that divides {hidden}"
        )
    if norm == "batch":
        raise ConfigError(f"{name} computes rows twice, which norm='batch' would count twice: use layer or none")
    first, later = dropouts
    own = hidden // groups
    blocks = [[ReversibleBlock(make_conv(own), own, norm) for _ in range(groups)] for _ in range(num_layers)]
    head = nn.Sequential(make_norm(norm, hidden), nn.ReLU(), DenseLayer(hidden, width_out, later))
    return [ReversibleLayer(each, later) for each in blocks], DenseLayer(width_in, hidden, first), head

"""Convolutions of deep models on blocks: the propagation of APPNP and SGC, and GCNII's.

All use GCN's normalized sum and rescaling (see `ooc.models.convs`); PyG's own do not accept bipartite input.
"""

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCN2Conv

from ooc.graph.aggregation import FirstLayerAggregates, Kind, PreAggregation
from ooc.graph.blocks import Block
from ooc.models.convs import propagated


class BlockPropagation(nn.Module):
    """One propagation step of PyG's APPNP (Gasteiger et al., 2019) with teleport probability alpha, on a block.

    With alpha = 0 it is a step of SGConv (Wu et al., 2019). It has no parameters: K steps are K layers.

    >>> rows = BlockPropagation(32, alpha=0.1)(x, block, initial)  # [num_src, 32], [num_dst, 32] -> [num_dst, 32]
    """

    def __init__(self, channels: int, alpha: float = 0.0, rescale: bool = True) -> None:
        super().__init__()
        self.channels, self.alpha, self.rescale = channels, alpha, rescale

    @property
    def needs_initial(self) -> bool:
        """Whether `forward` takes the initial rows."""
        return self.alpha > 0

    sum_kind: Kind = "gcn"

    def pre_aggregation(self) -> PreAggregation | None:
        """See `ooc.models.pre_aggregation_of`."""
        return PreAggregation(self.sum_kind, self.channels) if self.rescale else None

    def forward(self, x: Tensor | FirstLayerAggregates, block: Block, initial: Tensor | None = None) -> Tensor:
        out = propagated(x, block, self.rescale)
        return out if initial is None else (1 - self.alpha) * out + self.alpha * initial

    def extra_repr(self) -> str:
        return f"{self.channels}, alpha={self.alpha}, rescale={self.rescale}"


class BlockGCN2Conv(GCN2Conv):  # type: ignore[misc]
    """PyG's GCN2Conv (GCNII: Chen et al., 2020) with shared weights, on a block.

    `alpha` is the weight of the initial rows; the layer's weight matrix counts for log(theta / layer + 1)(layer from 1).

    >>> conv = BlockGCN2Conv(64, alpha=0.1, theta=0.5, layer=1)
    >>> conv.load_state_dict(GCN2Conv(64, alpha=0.1, theta=0.5, layer=1).state_dict())
    >>> rows = conv(x, block, initial)  # [num_src, 64], [num_dst, 64] -> [num_dst, 64]
    """

    needs_initial = True

    def __init__(self, channels: int, alpha: float, theta: float, layer: int, rescale: bool = True) -> None:
        super().__init__(channels, alpha, theta, layer)
        self.rescale = rescale

    sum_kind: Kind = "gcn"

    def pre_aggregation(self) -> PreAggregation | None:
        """See `ooc.models.pre_aggregation_of`."""
        return PreAggregation(self.sum_kind, self.channels) if self.rescale else None

    def forward(self, x: Tensor | FirstLayerAggregates, block: Block, initial: Tensor) -> Tensor:
        out = (1 - self.alpha) * propagated(x, block, self.rescale) + self.alpha * initial
        return torch.addmm(out, out, self.weight1, beta=1 - self.beta, alpha=self.beta)

"""PyG's convolutions on bipartite blocks, with the same parameters and state-dict names.

Each subclasses PyG's layer with `forward(x [num_src, f], block) -> [num_dst, g]` and equals it on the whole graph if the block
has all in-edges of its destinations. Degrees are those of the whole graph, so sampled blocks are normalized like the graph.

With `rescale=True`, sums over sampled edges are unbiased: each edge is weighted by the inverse of its expected number of
occurrences in the sample (Horvitz-Thompson, as in FastGCN and GraphSAINT). For uniform sampling this is degree / sampled edges
of the destination; for weighted sampling the sampler provides it per edge (`Block.stands_for`). GCN's self-loop term is not
rescaled. `rescale=False` is PyG's layer on the block's own edges. `sum_kind` is the `PreAggregation.kind` of a convolution's
sum over all in-edges.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch_geometric.nn import GATConv, GCN2Conv, GCNConv, GINConv, GINEConv, MessagePassing, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import softmax

from ooc.graph.aggregation import FirstInput, FirstLayerAggregates, Kind, PreAggregation
from ooc.graph.bag_sum import bag_sum
from ooc.graph.blocks import Block
from ooc.graph.shared_edges import SharedEdges, edges_by_source
from ooc.models.dropout import dropout
from ooc.models.edge_messages import relu_message_sum
from ooc.models.kept_sums import neighbor_sum
from ooc.models.memory_efficient import memory_efficient_here, sage_layer, sum_of_products
from ooc.stores.errors import ConfigError
from ooc.stores.jit import kernel

GATHER_COST = 16
"""multiply-adds that cost as much as gathering one number of a neighbor's row (measured on CPU, 32 to 256 float32 per row)"""
EDGES_AT_ONCE = 8192
"""edges processed together in the backward pass of attention, so that their rows stay in the CPU cache"""


class _EdgeSum(torch.autograd.Function):
    """CSR matrix times dense rows, with no value, one per edge, or a differentiable one per edge and head.

    The backward pass is the transposed product.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor | None, edge_index: Tensor, indptr: Tensor, shared: SharedEdges | None
    ) -> Tensor:
        ctx.num_src, ctx.by_head, ctx.shared = x.size(0), value is not None and value.dim() == 2, shared
        ctx.save_for_backward(x if ctx.by_head else None, value, edge_index)
        return _edge_sum(edge_index[0], x, indptr, value, neighbor_sum)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if not (ctx.needs_input_grad[0] or ctx.by_head):
            return None, None, None, None, None
        x, value, edge_index = ctx.saved_tensors
        grad = grad.contiguous()
        pointers, target, ordered = edges_by_source(edge_index, ctx.num_src, value, ctx.shared)
        grad_x = _edge_sum(target, grad, pointers, ordered)
        if not ctx.by_head:
            return grad_x, None, None, None, None
        heads = value.size(1)
        parts = [
            (x.index_select(0, source) * grad.index_select(0, target)).view(-1, heads, x.size(1) // heads).sum(-1)
            for source, target in zip(edge_index[0].split(EDGES_AT_ONCE), edge_index[1].split(EDGES_AT_ONCE), strict=True)
        ]
        return grad_x, torch.cat(parts).to(value.dtype), None, None, None


def _edge_sum(index: Tensor, rows: Tensor, indptr: Tensor, value: Tensor | None, add: Any = bag_sum) -> Tensor:
    """`bag_sum`, or `neighbor_sum` as `add`, per head where `value` is [e, heads]."""
    if value is None or value.dim() == 1:
        return add(index, rows, indptr, value)
    heads = value.size(1)
    parts = rows.view(rows.size(0) * heads, -1)
    sums = [add(index * heads + head, parts, indptr, value[:, head].contiguous()) for head in range(heads)]
    return torch.cat(sums, dim=1)


def weighted_sum(x: Tensor, block: Block, value: Tensor | None = None) -> Tensor:
    """Sum the source rows x [num_src, f] of each destination's in-edges, times its value: [num_dst, f].

    `value` is None, [e], or [e, heads] for each head's share of the columns. Deterministic, also on CUDA. Differentiable in x
    where it requires a gradient, and in values of heads.
    """
    out: Tensor = _EdgeSum.apply(x, value, block.edge_index, block.indptr, block.shared)  # type: ignore[no-untyped-call]
    return out


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which factors of rows are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def expansion(block: Block) -> Tensor:
    """Return float32[e], how many edges of the graph each sampled edge represents; ones if the block has all edges."""
    if block.stands_for is not None:
        return block.stands_for
    count = block.indptr.diff()
    ratio = block.degree[: block.num_dst].float() / count.clamp(min=1)
    return ratio[block.edge_index[1]]


def mean_share(block: Block, dtype: torch.dtype) -> Tensor:
    """The weight of each edge in the mean of its destination's edges, [e]."""
    if dtype == torch.float32 and block.indptr.device.type == "cpu" and not torch.compiler.is_compiling():
        share = torch.empty(block.edge_index.size(1), dtype=dtype)
        _set_shares(block.indptr.numpy(), share.numpy())
        return share
    return block.indptr.diff().clamp(min=1).to(dtype).reciprocal()[block.edge_index[1]]


@kernel
def _set_shares(indptr: NDArray[np.int64], share: NDArray[np.float32]) -> None:
    """Set share[k] to 1 / the number of edges of the destination of edge k."""
    for i in range(len(indptr) - 1):
        for k in range(indptr[i], indptr[i + 1]):
            share[k] = np.float32(1) / np.float32(indptr[i + 1] - indptr[i])


def made_once(block: Block, name: Any, make: Callable[[], Any]) -> Any:
    """What `make` returns; once for all layers that share the block."""
    return make() if block.shared is None else block.shared.once(name, make)


def narrow_first(block: Block, in_channels: int, out_channels: int) -> bool:
    """Whether applying the linear map to every source before summing is cheaper than to every destination after."""
    gathered = block.edge_index.size(1) * (in_channels - out_channels) * GATHER_COST
    return gathered > (block.num_src - block.num_dst) * in_channels * out_channels


def pre_aggregation_for(kind: Kind, in_channels: int, out_channels: int) -> PreAggregation | None:
    """The sum to compute while loading; None if the linear map should come first, assuming one edge per source."""
    early = (in_channels - out_channels) * GATHER_COST > in_channels * out_channels
    return None if early else PreAggregation(kind, out_channels)


class OnBlocks:
    """A convolution of PyG whose own `forward` does without PyG's `propagate`.

    For `propagate` PyG writes a Python module for every class and imports it, which takes the first layer a tenth of a second.
    A PyG that does so by another method than this one only takes that time.
    """

    propagate, edge_updater = MessagePassing.propagate, MessagePassing.edge_updater
    _orig_propagate = _jinja_propagate = MessagePassing.propagate  # PyG's setter of `explain` takes these from the class
    _orig_edge_updater = _jinja_edge_updater = MessagePassing.edge_updater

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Write no module."""


class BlockSAGEConv(OnBlocks, SAGEConv):  # type: ignore[misc]
    """PyG's SAGEConv with mean aggregation (Hamilton et al., 2017) on a block.

    The mean over sampled neighbors is already unbiased, so it is not rescaled; GraphSAINT's subgraphs provide weights
    (`Block.share`). Edge weights are ignored, as in PyG.
    """

    sum_kind: Kind = "mean"

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, aggr="mean")

    def pre_aggregation(self) -> PreAggregation | None:
        """See `ooc.models.pre_aggregation_of`."""
        return pre_aggregation_for(self.sum_kind, self.in_channels, self.out_channels)

    def narrowed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the neighbor and self linear maps to x [n, in_channels]; returns two [n, out_channels]."""
        return F.linear(x, self.lin_l.weight), self.lin_r(x)

    def joined(self, neighbor: Tensor, self_row: Tensor, block: Block) -> Tensor:
        """Combine the neighbors' mean and the self rows of `narrowed`, [num_dst, out_channels] each, into the output."""
        return neighbor + self_row + self.lin_l.bias

    def forward(self, x: FirstInput, block: Block) -> Tensor:
        weights = self.lin_l.weight, self.lin_l.bias, self.lin_r.weight
        if isinstance(x, FirstLayerAggregates):
            if memory_efficient_here(x.neighbor):
                return sum_of_products(self.lin_l.bias, x.neighbor, self.lin_l.weight, x.self_row, self.lin_r.weight)
            return self.lin_l(x.neighbor) + self.lin_r(x.self_row)
        share = block.share
        if share is None:
            share = made_once(block, ("mean", x.dtype), partial(mean_share, block, exact_dtype(x.dtype)))
        early = narrow_first(block, x.size(1), self.out_channels)
        if memory_efficient_here(x) and not early:
            return sage_layer(x, share, (block.edge_index, block.indptr), *weights, block.shared)
        self_row = self.lin_r(x[: block.num_dst])
        if early:
            return self.joined(weighted_sum(F.linear(x, self.lin_l.weight), block, share), self_row, block)
        return self.lin_l(weighted_sum(x, block, share)) + self_row


class BlockGCNConv(OnBlocks, GCNConv):  # type: ignore[misc]
    """PyG's GCNConv (Kipf & Welling, 2017) on a block; PyG's own does not accept bipartite input.

    Self-loops follow `add_remaining_self_loops`: those of the graph are replaced by one per node with weight 1, or the weight
    of its last self-loop in a weighted graph. With `rescale=False` degrees are counted in the block, as in PyG.
    """

    sum_kind: Kind = "gcn"

    def __init__(self, in_channels: int, out_channels: int, rescale: bool = True) -> None:
        super().__init__(in_channels, out_channels)
        self.rescale = rescale

    def pre_aggregation(self) -> PreAggregation | None:
        """See `ooc.models.pre_aggregation_of`; degrees counted in the block are not known in advance."""
        return pre_aggregation_for(self.sum_kind, self.in_channels, self.out_channels) if self.rescale else None

    def narrowed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlockSAGEConv.narrowed`; both results are the same rows."""
        h = self.lin(x)
        return h, h

    def joined(self, neighbor: Tensor, self_row: Tensor, block: Block) -> Tensor:
        """See `BlockSAGEConv.joined`; the block has all edges, or pre-aggregated sums."""
        out: Tensor = with_own_row(neighbor, self_row, block) + self.bias
        return out

    def forward(self, x: FirstInput, block: Block) -> Tensor:
        early = not isinstance(x, FirstLayerAggregates) and narrow_first(block, self.in_channels, self.out_channels)
        out = propagated(self.lin(x) if early else x, block, self.rescale)
        return (out if early else self.lin(out)) + self.bias

    @staticmethod
    def coefficients(block: Block, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the factors of the edges [e] and of the self rows [num_dst]; see `ooc.graph.aggregation.gcn_factors`."""
        loop: Tensor | float = 1.0 if block.loop_weight is None else block.loop_weight.to(dtype)
        if block.weight is not None:
            assert block.weight_sum is not None, "a weighted block needs weight_sum"
            degree = block.weight_sum.to(dtype) + loop
        else:
            degree = (block.degree if block.loops is None else block.degree - block.loops).to(dtype) + loop
        inverse = degree.rsqrt()
        inverse = inverse.masked_fill(~inverse.isfinite(), 0.0)
        source, target = block.edge_index
        value, own = inverse[source] * inverse[target], loop * inverse.square()
        if block.weight is not None:
            value = value * block.weight
            value, own = (each.masked_fill(~each.isfinite(), 0.0) for each in (value, own))
        if block.loops is not None:
            value = value.masked_fill(source == target, 0.0)
        return value * expansion(block), own[: block.num_dst]

    @staticmethod
    def plain_coefficients(block: Block) -> tuple[Tensor, Tensor]:
        """The same from the block's own edges, by PyG's `gcn_norm`."""
        _, weight = gcn_norm(block.edge_index, block.weight, block.num_src, dtype=torch.float32)
        value = weight.new_zeros(block.edge_index.size(1))
        keep = block.edge_index[0] != block.edge_index[1]
        value[keep] = weight[: -block.num_src]
        return value, weight[-block.num_src :][: block.num_dst]


def propagated(x: FirstInput, block: Block, rescale: bool) -> Tensor:
    """Multiply x [num_src, f] by the normalized adjacency with self-loops: [num_dst, f]. See `BlockGCNConv` for `rescale`."""
    if isinstance(x, FirstLayerAggregates):
        return with_own_row(*x, block)
    exact = exact_dtype(x.dtype)
    make = partial(BlockGCNConv.coefficients, block, exact) if rescale else partial(BlockGCNConv.plain_coefficients, block)
    value, self_row = made_once(block, ("gcn", exact, rescale), make)
    return weighted_sum(x, block, value) + self_row.to(x.dtype).unsqueeze(1) * x[: block.num_dst]


def with_own_row(neighbor: Tensor, self_row: Tensor, block: Block) -> Tensor:
    """Add the self rows [num_dst, f], scaled by the graph's degrees, to GCN's neighbor sums [num_dst, f]."""
    own = BlockGCNConv.coefficients(block, exact_dtype(self_row.dtype))[1]
    return neighbor + own.to(self_row.dtype).unsqueeze(1) * self_row


class BlockGINConv(OnBlocks, GINConv):  # type: ignore[misc]
    """PyG's GINConv (Xu et al., 2019) with a two-layer perceptron on a block. Edge weights are ignored, as in PyG.

    `inner` is the width between the perceptron's layers (default: out_channels). Weighted sampling never picks edges of weight
    0, so the rescaled sum covers the others only.
    """

    sum_kind: Kind = "sum"

    def __init__(self, in_channels: int, out_channels: int, rescale: bool = True, inner: int | None = None) -> None:
        inner = out_channels if inner is None else inner
        perceptron = nn.Sequential(nn.Linear(in_channels, inner), nn.ReLU(inplace=True), nn.Linear(inner, out_channels))
        super().__init__(perceptron)
        self.rescale = rescale

    def pre_aggregation(self) -> PreAggregation | None:
        return PreAggregation("expanded" if self.rescale else "sum", self.nn[0].out_features)

    def forward(self, x: FirstInput, block: Block) -> Tensor:
        if isinstance(x, FirstLayerAggregates):
            return self.nn(x.neighbor + (1 + self.eps) * x.self_row)
        neighbor = weighted_sum(x, block, expansion(block) if self.rescale else None)
        return self.nn(neighbor + (1 + self.eps) * x[: block.num_dst])


class BlockGINEConv(OnBlocks, GINEConv):  # type: ignore[misc]
    """PyG's GINEConv (Hu et al., 2020) with a two-layer perceptron on a block: GIN with edge features.

    A message is relu(source row + linear map of the edge's features), `Block.edge_attr` [e, edge_dim] or, for edge_dim 1, [e].
    `inner` is the width between the perceptron's layers (default: out_channels). Raises ConfigError for a block without edge
    features.
    """

    needs_edge_attr = True

    def __init__(
        self, in_channels: int, out_channels: int, edge_dim: int, rescale: bool = True, inner: int | None = None
    ) -> None:
        inner = out_channels if inner is None else inner
        perceptron = nn.Sequential(nn.Linear(in_channels, inner), nn.ReLU(inplace=True), nn.Linear(inner, out_channels))
        super().__init__(perceptron, edge_dim=edge_dim)
        self.edge_dim, self.rescale = edge_dim, rescale

    def forward(self, x: Tensor, block: Block) -> Tensor:
        if block.edge_attr is None:
            raise ConfigError("gine takes edge features, and the batch has none: load it with edge_features='edge_attr'")
        edge_attr = (block.edge_attr.flatten(1) if block.edge_attr.dim() > 1 else block.edge_attr.unsqueeze(1)).to(x.dtype)
        value = expansion(block) if self.rescale else None
        neighbor = relu_message_sum(x, edge_attr, self.lin.weight, self.lin.bias, block, value)
        return self.nn(neighbor + (1 + self.eps) * x[: block.num_dst])


class BlockGATConv(OnBlocks, GATConv):  # type: ignore[misc]
    """PyG's GATConv (Velickovic et al., 2018) on a block; self-loops are replaced by one per destination.

    Attention is normalized over the sampled neighbors, however drawn: nothing is rescaled. Edge weights are ignored, as
    in PyG. Attention scores are computed from x directly, with the attention vectors folded into the weight matrix.
    """

    def forward(self, x: Tensor, block: Block) -> Tensor:
        h = self.lin(x)
        neighbor, own = self.attention(x, block)
        self_row = own.to(h.dtype).unsqueeze(-1) * h[: block.num_dst].view(-1, self.heads, self.out_channels)
        out = weighted_sum(h, block, neighbor).view_as(self_row) + self_row
        return (out.flatten(1) if self.concat else out.mean(dim=1)) + self.bias

    def attention(self, x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Return the attention weights of the edges [e, heads] and of the self rows [num_dst, heads]."""
        weight = self.lin.weight.view(self.heads, self.out_channels, -1)
        to_source, to_target = (torch.einsum("hc,hci->ih", att[0], weight) for att in (self.att_src, self.att_dst))
        exact = exact_dtype(x.dtype)
        from_source, from_target = (x @ to_source).to(exact), (x[: block.num_dst] @ to_target).to(exact)
        source, target = block.edge_index
        score = from_source.index_select(0, source) + from_target.index_select(0, target)
        if block.loops is not None:
            score = score.masked_fill((source == target).unsqueeze(1), -torch.inf)
        score = torch.cat([score, from_source[: block.num_dst] + from_target])
        index = torch.cat([target, torch.arange(block.num_dst, device=target.device)])
        share = softmax(F.leaky_relu(score, self.negative_slope), index, num_nodes=block.num_dst)
        neighbor, own = dropout(share, self.dropout, self.training, of="edges").tensor_split((len(source),))
        return neighbor, own


class BlockPropagation(nn.Module):
    """One propagation step of PyG's APPNP (Gasteiger et al., 2019) with teleport probability alpha, on a block.

    With alpha = 0 it is a step of SGConv (Wu et al., 2019). It has no parameters: K steps are K layers.
    """

    sum_kind: Kind = "gcn"

    def __init__(self, channels: int, alpha: float = 0.0, rescale: bool = True) -> None:
        super().__init__()
        self.channels, self.alpha, self.rescale = channels, alpha, rescale

    @property
    def needs_initial(self) -> bool:
        """Whether `forward` takes the initial rows."""
        return self.alpha > 0

    def pre_aggregation(self) -> PreAggregation | None:
        return PreAggregation(self.sum_kind, self.channels) if self.rescale else None

    def forward(self, x: FirstInput, block: Block, initial: Tensor | None = None) -> Tensor:
        out = propagated(x, block, self.rescale)
        return out if initial is None else (1 - self.alpha) * out + self.alpha * initial

    def extra_repr(self) -> str:
        return f"{self.channels}, alpha={self.alpha}, rescale={self.rescale}"


class BlockGCN2Conv(OnBlocks, GCN2Conv):  # type: ignore[misc]
    """PyG's GCN2Conv (GCNII: Chen et al., 2020) with shared weights, on a block.

    `alpha` is the weight of the initial rows; the layer's weight matrix counts for log(theta / layer + 1)(layer from 1).
    """

    needs_initial = True
    sum_kind: Kind = "gcn"

    def __init__(self, channels: int, alpha: float, theta: float, layer: int, rescale: bool = True) -> None:
        super().__init__(channels, alpha, theta, layer)
        self.rescale = rescale

    def forward(self, x: FirstInput, block: Block, initial: Tensor) -> Tensor:
        out = (1 - self.alpha) * propagated(x, block, self.rescale) + self.alpha * initial
        return torch.addmm(out, out, self.weight1, beta=1 - self.beta, alpha=self.beta)

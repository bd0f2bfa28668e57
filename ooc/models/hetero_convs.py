"""Convolutions on the blocks of a heterogeneous graph: R-SAGE, R-GCN and HGT.

Each maps {node type: rows} to the rows of the destinations of every type, `forward(x, block) -> {node type: [num_dst, g]}`,
and equals PyG's on the whole graph if the blocks have all in-edges of their destinations. Means over sampled neighbors are
unbiased and attention is normalized over them, so nothing is rescaled. Edge weights are ignored, as in PyG.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import HGTConv, RGCNConv
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.utils import softmax

from ooc.graph.aggregation import PreAggregation
from ooc.graph.blocks import Block
from ooc.graph.hetero import EdgeKey, HeteroBlock
from ooc.models.convs import OnBlocks, exact_dtype, narrow_first, pre_aggregation_for, weighted_sum
from ooc.models.memory_efficient import sum_of_products

TypedRows = dict[str, Tensor]
"""node type -> its rows, [n, width of the type]"""
Metadata = tuple[Sequence[str], Sequence[EdgeKey]]
"""PyG's metadata: node types and edge types"""


def neighbor_mean(x: Tensor, block: Block) -> Tensor:
    """Return the mean of the source rows x [num_src, f] over each destination's edges, 0 without edges: [num_dst, f]."""
    if not block.edge_index.size(1):
        return x.new_zeros(block.num_dst, x.size(1))
    share = block.indptr.diff().clamp(min=1).to(exact_dtype(x.dtype)).reciprocal()
    return weighted_sum(x, block, share[block.edge_index[1]])


class _Sums:
    """The output of a layer that adds up linear maps of a node's own row and of the neighbors' mean over each edge type.

    x: rows by node type; bias: of each node type. The map of a mean is applied before or after it, whichever costs less.
    """

    def __init__(self, x: Mapping[str, Tensor], block: HeteroBlock, bias: Mapping[str, Tensor]) -> None:
        self._x, self._block, self._bias = x, block, bias
        self._products: dict[str, list[Tensor]] = {name: [] for name in block.num_dst}
        self._mapped: dict[str, list[Tensor]] = {name: [] for name in block.num_dst}

    def add_own(self, name: str, weight: Tensor) -> None:
        """Add the own rows of a node type's destinations, times weight.T."""
        self._products[name] += [self._x[name][: self._block.num_dst[name]], weight]

    def add_mean(self, key: EdgeKey, weight: Tensor) -> None:
        """Add `neighbor_mean` over an edge type, times weight.T, out of the means in the block if the loader computed them."""
        block, neighbor = self._block.blocks[key], self._block.neighbor
        if neighbor is not None and key in neighbor:
            self._products[key[2]] += [neighbor[key].to(weight.dtype), weight]
        elif narrow_first(block, *weight.t().shape):
            self._mapped[key[2]].append(neighbor_mean(F.linear(self._x[key[0]], weight), block))
        else:
            self._products[key[2]] += [neighbor_mean(self._x[key[0]], block), weight]

    def rows(self) -> TypedRows:
        """The destinations' rows of each node type."""
        out = {name: sum_of_products(self._bias[name], *pairs) for name, pairs in self._products.items()}
        return {name: sum(self._mapped[name], start=rows) for name, rows in out.items()}


def mean_first(widths: Mapping[str, int], out_channels: int) -> PreAggregation | None:
    """The means that a loader can compute for a layer from rows of these widths, by node type; see `ooc.models.convs`."""
    found = [pre_aggregation_for("mean", width, out_channels) for width in widths.values()]
    return found[0] if all(found) else None


class RSAGEConv(nn.Module):
    """GraphSAGE with a linear map for the neighbors' mean of every edge type, and one for a node's own row of every node type.

    PyG's `HeteroConv` of SAGEConv with mean aggregation, summed over edge types, whose maps of the own row are added up to one.
    A node type in which no edge type ends has its own rows mapped.

    Args:
        in_channels: Node type -> width of its rows.
        out_channels: Width of the rows of all types.
        metadata: Node types and edge types.

    >>> conv = RSAGEConv({"paper": 128, "author": 64}, 256, ds.metadata())
    >>> conv(batch.x_dict, batch.blocks[0])["paper"].shape
    torch.Size([num_dst, 256])
    """

    def __init__(self, in_channels: Mapping[str, int], out_channels: int, metadata: Metadata) -> None:
        super().__init__()
        node_types, edge_types = metadata
        self.in_channels, self.out_channels = dict(in_channels), out_channels
        self.neighbor = ModuleDict({key: nn.Linear(in_channels[key[0]], out_channels, bias=False) for key in edge_types})
        self.self_row = ModuleDict({name: nn.Linear(in_channels[name], out_channels) for name in node_types})

    def pre_aggregation(self) -> PreAggregation | None:
        """See `ooc.models.pre_aggregation_of`."""
        return mean_first(self.in_channels, self.out_channels)

    def forward(self, x: Mapping[str, Tensor], block: HeteroBlock) -> TypedRows:
        sums = _Sums(x, block, {name: self.self_row[name].bias for name in block.num_dst})
        for name in block.num_dst:
            sums.add_own(name, self.self_row[name].weight)
        for key in block.blocks:
            sums.add_mean(key, self.neighbor[key].weight)
        return sums.rows()


class BlockRGCNConv(OnBlocks, RGCNConv):  # type: ignore[misc]
    """PyG's RGCNConv (Schlichtkrull et al., 2018) on the blocks of a heterogeneous graph, with its parameters and their names.

    Edge type number r has the weight matrix r; `num_bases` of them are shared bases of all. The rows of all node types have one
    width, and their own rows one matrix.

    >>> conv = BlockRGCNConv(64, 64, ds.edge_types, num_bases=30)
    """

    def __init__(
        self, in_channels: int, out_channels: int, edge_types: Sequence[EdgeKey], num_bases: int | None = None
    ) -> None:
        super().__init__(in_channels, out_channels, len(edge_types), num_bases)
        self.edge_types = list(edge_types)

    def pre_aggregation(self) -> PreAggregation | None:
        """See `ooc.models.pre_aggregation_of`."""
        return mean_first({"": self.in_channels}, self.out_channels)

    def weights(self) -> Tensor:
        """Return the matrix of every edge type, [edge types, in_channels, out_channels]."""
        if self.num_bases is None:
            whole: Tensor = self.weight
            return whole
        shape = self.num_relations, self.in_channels, self.out_channels
        return (self.comp @ self.weight.view(self.num_bases, -1)).view(shape)

    def forward(self, x: Mapping[str, Tensor], block: HeteroBlock) -> TypedRows:
        bias: Any = self.bias
        sums = _Sums(x, block, dict.fromkeys(block.num_dst, bias))
        for name in block.num_dst:
            sums.add_own(name, self.root.t())
        for key, weight in zip(self.edge_types, self.weights().unbind(), strict=True):
            if key in block.blocks:
                sums.add_mean(key, weight.t())
        return sums.rows()


class BlockHGTConv(OnBlocks, HGTConv):  # type: ignore[misc]
    """PyG's HGTConv (heterogeneous graph transformer; Hu et al., 2020) on blocks, with its parameters and their names.

    The maps of an edge type are applied to the destinations' queries and to their sums of values, which are fewer than the
    sources' keys and values; attention and result are the same. A node type in which no edge type ends keeps its rows.

    >>> conv = BlockHGTConv(64, 64, ds.metadata(), heads=4)
    """

    def forward(self, x: Mapping[str, Tensor], block: HeteroBlock) -> TypedRows:
        into: dict[str, list[EdgeKey]] = {name: [] for name in block.num_dst}
        for key, each in block.blocks.items():
            if each.edge_index.size(1):
                into[key[2]].append(key)
        sources = dict.fromkeys(key[0] for keys in into.values() for key in keys)
        keys, values = ({name: self._mapped(name, x[name], part) for name in sources} for part in (0, 2))
        out: TypedRows = {}
        for name, count in block.num_dst.items():
            own = x[name][:count]
            out[name] = self._updated(name, own, self._attended(name, own, into[name], block, keys, values))
        return out

    def _mapped(self, node_type: str, rows: Tensor, part: int) -> Tensor:
        """Keys (part 0), queries (1) or values (2) of a type's rows, [n, out_channels]."""
        lin = self.kqv_lin.lins[node_type]
        first, past = part * self.out_channels, (part + 1) * self.out_channels
        return F.linear(rows, lin.weight[first:past], None if lin.bias is None else lin.bias[first:past])

    def _relation(self, lin: Any, key: EdgeKey) -> Tensor:
        """The matrices of an edge type's heads, [heads, d, d]."""
        shape = self.heads, len(self.edge_types), *lin.weight.shape[1:]
        of_type: Tensor = lin.weight.view(shape)[:, self.edge_types_map[key]]
        return of_type

    def _attended(
        self,
        node_type: str,
        own: Tensor,
        incoming: list[EdgeKey],
        block: HeteroBlock,
        keys: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
    ) -> Tensor:
        """Attention-weighted sums over the in-edges of all types, [num_dst, out_channels]."""
        count, by_head = len(own), (-1, self.heads, self.out_channels // self.heads)
        if not incoming:
            return own.new_zeros(count, self.out_channels)
        query = self._mapped(node_type, own, 1).view(by_head)
        scores = [self._scores(query, keys[key[0]].view(by_head), key, block.blocks[key]) for key in incoming]
        target = torch.cat([block.blocks[key].edge_index[1] for key in incoming])
        share = softmax(torch.cat(scores), target, num_nodes=count).split([len(each) for each in scores])
        parts = []
        for key, each in zip(incoming, share, strict=True):
            summed = weighted_sum(values[key[0]], block.blocks[key], each).view(by_head)
            parts.append(torch.einsum("nhd,hde->nhe", summed, self._relation(self.v_rel, key)).flatten(1))
        return torch.stack(parts).sum(0)

    def _scores(self, query: Tensor, keys: Tensor, key: EdgeKey, block: Block) -> Tensor:
        """Attention before the softmax of an edge type's edges, [e, heads]."""
        source, target = block.edge_index
        asked = torch.einsum("nhe,hde->nhd", query, self._relation(self.k_rel, key))
        score = (asked.index_select(0, target) * keys.index_select(0, source)).sum(-1)
        exact = exact_dtype(score.dtype)
        return score.to(exact) * self.p_rel["__".join(key)].to(exact) / math.sqrt(keys.size(-1))

    def _updated(self, node_type: str, own: Tensor, attended: Tensor) -> Tensor:
        """The output of destinations: their attended rows, mapped, and their own rows by the type's gate."""
        same = own.size(1) == self.out_channels
        if node_type not in self.dst_node_types and same:
            return own
        out: Tensor = self.out_lin.lins[node_type](F.gelu(attended))
        if not same:
            return out
        gate = self.skip[node_type].sigmoid()
        return gate * out + (1 - gate) * own

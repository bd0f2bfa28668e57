"""Decoders: modules that score pairs of nodes by their embeddings.

All broadcast like torch: rows src [..., d] and dst [..., d] give scores [...], so `decoder(src, dst)` scores b pairs and
`decoder(src[:, None], shared[None])` every source against shared destinations, [b, m].
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ooc.stores.errors import ConfigError

PAIRS_AT_ONCE = 2**16
"""pairs that have rows of their own in memory at once; a fixed number, so that scores do not depend on the memory"""
DecoderName = Literal["dot", "mlp", "distmult"]


class DotDecoder(nn.Module):
    """The dot product of two embeddings; no parameters.

    >>> DotDecoder()(torch.ones(3, 8), torch.ones(3, 8))
    tensor([8., 8., 8.])
    """

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor | None = None) -> Tensor:
        return (src * dst).sum(-1)

    def every(self, src: Tensor, dst: Tensor) -> Tensor:
        """Scores of every source [b, d] with every destination [m, d]: [b, m]."""
        return src @ dst.t()


class MLPDecoder(nn.Module):
    """Two linear layers on both embeddings side by side; it tells a link from its reverse.

    Args:
        channels: Width of the embeddings.
        hidden: Width between the layers; None: `channels`.
        dropout: Of the hidden rows, in training.
        out_channels: Outputs of a pair, such as classes, in a last dimension; None: one score.
        edge_dim: Columns of `edge_attr` [..., edge_dim], which is taken too; None: it is not.

    >>> MLPDecoder(8)(torch.ones(3, 8), torch.ones(3, 8)).shape
    torch.Size([3])
    """

    def __init__(
        self,
        channels: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        out_channels: int | None = None,
        edge_dim: int | None = None,
    ) -> None:
        super().__init__()
        hidden, self.scores = channels if hidden is None else hidden, out_channels is None
        self.src, self.dst = nn.Linear(channels, hidden), nn.Linear(channels, hidden, bias=False)
        self.edge = None if edge_dim is None else nn.Linear(edge_dim, hidden, bias=False)
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(hidden, out_channels or 1)

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor | None = None, edge_attr: Tensor | None = None) -> Tensor:
        # One linear layer on the pair is the sum of one on each end: shared destinations are multiplied once.
        hidden = self.src(src) + self.dst(dst)
        if self.edge is not None:
            hidden = hidden + self.edge(edge_attr)
        out: Tensor = self.out(self.dropout(hidden.relu()))
        return out.squeeze(-1) if self.scores else out

    def every(self, src: Tensor, dst: Tensor) -> Tensor:
        """Scores of every source [b, d] with every destination [m, d]: [b, m].

        Hidden rows of `PAIRS_AT_ONCE` pairs are in memory at once, and made again in the backward pass.
        """
        at_once = max(1, PAIRS_AT_ONCE // max(1, len(dst)))
        if len(src) <= at_once:
            return self(src.unsqueeze(1), dst.unsqueeze(0))
        parts = (
            checkpoint(self, some.unsqueeze(1), dst.unsqueeze(0), use_reentrant=False) for some in torch.split(src, at_once)
        )
        return torch.cat([*parts])


class DistMultDecoder(nn.Module):
    """The product of both embeddings and a vector of the relation, summed (Yang et al., 2015); the same in both directions.

    Args:
        channels: Width of the embeddings.
        num_relations: Kinds of links; `relation` int64[...] says which each pair is, None: all are kind 0.

    >>> DistMultDecoder(8, num_relations=2)(torch.ones(3, 8), torch.ones(3, 8), torch.tensor([0, 1, 1])).shape
    torch.Size([3])
    """

    def __init__(self, channels: int, num_relations: int = 1) -> None:
        super().__init__()
        self.relation = nn.Parameter(torch.empty(num_relations, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw near 1, where the decoder is the dot product."""
        nn.init.normal_(self.relation, 1.0, 0.1)

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor | None = None) -> Tensor:
        kind = self.relation[0] if relation is None else self.relation[relation]
        return (src * kind * dst).sum(-1)

    def every(self, src: Tensor, dst: Tensor) -> Tensor:
        """Scores of every source [b, d] with every destination [m, d], of kind 0: [b, m]."""
        return (src * self.relation[0]) @ dst.t()


def scores_of_own(decoder: nn.Module, src: Tensor, rows: Tensor, dst: Tensor) -> Tensor:
    """Scores of sources, each with destinations of its own.

    The destinations' rows of `PAIRS_AT_ONCE` pairs are in memory at once, and gathered again in the backward pass.

    Args:
        decoder: What scores pairs.
        src: Rows of the sources, [b, d].
        rows: Rows that the destinations are among, [n, d].
        dst: Where each source's destinations are in `rows`, int64[b, m].

    Returns:
        The scores, [b, m].

    >>> scores_of_own(DotDecoder(), torch.ones(3, 8), torch.ones(5, 8), torch.tensor([[0, 4], [1, 1], [2, 3]])).shape
    torch.Size([3, 2])
    """

    def scored(some: Tensor, own: Tensor) -> Tensor:
        found: Tensor = decoder(some.unsqueeze(1), rows[own])
        return found

    at_once = max(1, PAIRS_AT_ONCE // max(1, dst.size(1)))
    if len(src) <= at_once:
        return scored(src, dst)
    parts = zip(torch.split(src, at_once), torch.split(dst, at_once), strict=True)
    return torch.cat([checkpoint(scored, some, own, use_reentrant=False) for some, own in parts])


def make_decoder(name: str, channels: int, dropout: float = 0.0) -> nn.Module:
    """The decoder "dot", "mlp" or "distmult" of embeddings of that width. Raises ConfigError for another name."""
    if name == "dot":
        return DotDecoder()
    if name == "mlp":
        return MLPDecoder(channels, dropout=dropout)
    if name == "distmult":
        return DistMultDecoder(channels)
    raise ConfigError(f"decoder {name!r} is unknown: use one of {', '.join(get_args(DecoderName))}")

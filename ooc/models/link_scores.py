"""Score functions of links between rows of embedding tables: matrix factorization and knowledge graph embeddings.

Each scores a link in two parts: `queries` of one end and the relation, and how well rows of the other end answer them. So
losses, ranking and search are written once, and all candidates of a batch are one matrix product where the formula allows it.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ooc.models.edge_decoders import PAIRS_AT_ONCE
from ooc.runtime.keyed_random import keyed_uniform
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import ConfigError

ScorerName = Literal["mf", "distmult", "complex", "transe", "rotate", "simple"]
Distance = Literal["l1", "l2", "squared"]
_LEAST = 1e-12
"""of a squared distance whose root is taken: the gradient is 0 below"""


class LinkScorer(nn.Module):
    """What scores links (head, relation, tail) by rows of head and tail, which are trained beside it, and its own of relations.

    As a module it scores queries against candidates, as the decoders of `ooc.models.edge_decoders` score pairs of embeddings.

    Args:
        width: Columns of a row.
        num_relations: Kinds of links; 0 for a score function without relations.
        reciprocal: Whether a relation has two rows, of which one answers queries for heads (Lacroix et al., 2018).

    Raises:
        ConfigError: The width does not fit the formula.

    >>> scorer = make_scorer("complex", width=8, num_relations=3)
    >>> query = scorer.queries(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1]))
    >>> scorer.score_all(query, torch.randn(100, 8)).shape
    torch.Size([5, 100])
    """

    parts = 1
    """numbers that a row has of each component: 2 for complex ones, whose real parts come first"""
    bound = 1e-3
    """of the initial values of rows, which are uniform in [-bound, bound)"""

    def __init__(self, width: int, num_relations: int = 1, reciprocal: bool = False) -> None:
        super().__init__()
        if width < 1 or width % self.parts:
            raise ConfigError(f"{type(self).__name__.removesuffix('Scorer')} needs rows of an even width, not {width}")
        self.width, self.num_relations, self.reciprocal = width, num_relations, reciprocal and num_relations > 0
        self.relation: nn.Parameter | None = None
        if num_relations:
            self.relation = nn.Parameter(torch.empty(num_relations * (1 + self.reciprocal), self.relation_width))
            self.reset_parameters()

    @property
    def relation_width(self) -> int:
        """Columns of a relation's row."""
        return self.width

    def reset_parameters(self) -> None:
        """Draw the relations' rows anew, from torch's generator."""
        if self.relation is not None:
            nn.init.uniform_(self.relation, -self.bound, self.bound)

    def initial_rows(self, nodes: Ids, stream: int, bound: float | None = None) -> AnyArray:
        """The rows that nodes begin with: a function of `stream` and the node.

        Args:
            nodes: int64[n].
            stream: A key, such as `keyed_random.key(seed, Purpose.TABLE)`.
            bound: Of the values; None: `self.bound`.

        Returns:
            float32[n, width].
        """
        rows = np.empty((len(nodes), self.width), np.float32)
        keyed_uniform(np.uint64(stream), nodes, np.float32(self.bound if bound is None else bound), rows)
        return rows

    def queries(self, rows: Tensor, relation: Tensor | None = None, reverse: bool = False) -> Tensor:
        """What is asked of candidates: tails of (rows, relation), or with `reverse` heads of (relation, rows).

        Args:
            rows: Of the known ends, float[n, width].
            relation: Of each, int64[n]; None: all are relation 0.
            reverse: Whether `rows` are of tails.

        Returns:
            float[n, width].
        """
        if self.relation is None:
            return rows
        at = torch.zeros(len(rows), dtype=torch.int64, device=rows.device) if relation is None else relation
        if self.reciprocal and reverse:
            at, reverse = at + self.num_relations, False
        return self._applied(rows, self.relation[at], reverse)

    def relations_of(self, relation: Tensor, reverse: bool = False) -> Tensor:
        """The relations' rows that queries are made with, [n, relation_width]; what a regularizer is of."""
        assert self.relation is not None
        return self.relation[relation + self.num_relations if self.reciprocal and reverse else relation]

    def score(self, query: Tensor, candidate: Tensor) -> Tensor:
        """Scores of queries [..., width] and a candidate of each [..., width]: [...], broadcast as torch does."""
        return (query * candidate).sum(-1)

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Scores of all queries [n, width] with all candidates [m, width]: [n, m]."""
        return query @ candidates.t()

    def score_relations(self, head: Tensor, tail: Tensor) -> Tensor:
        """Scores of links with each relation, not reversed: rows of heads and tails [n, width] give [n, num_relations]."""
        assert self.relation is not None
        kinds = (row.expand(len(head), -1) for row in self.relation[: self.num_relations])
        return torch.stack([self.score(self._applied(head, kind, False), tail) for kind in kinds], 1)

    def powers(self, rows: Tensor, p: int) -> Tensor:
        """The sum of |x|**p over the components of rows, complex ones by their modulus: a scalar."""
        real, *imaginary = rows.chunk(self.parts, -1)
        square = real.square() + imaginary[0].square() if imaginary else real.square()
        return (square if p == 2 else square.pow(p / 2)).sum()

    def forward(self, query: Tensor, candidate: Tensor, relation: Tensor | None = None) -> Tensor:
        """See `score`."""
        return self.score(query, candidate)

    def every(self, query: Tensor, candidates: Tensor) -> Tensor:
        """See `score_all`."""
        return self.score_all(query, candidates)

    def _applied(self, rows: Tensor, relation: Tensor, reverse: bool) -> Tensor:
        raise NotImplementedError


class DotScorer(LinkScorer):
    """The dot product of two rows: matrix factorization, and LightGCN behind its propagation. There are no relations.

    >>> DotScorer(4).score(torch.ones(2, 4), torch.ones(2, 4))
    tensor([4., 4.])
    """

    bound = 0.17

    def __init__(self, width: int, num_relations: int = 0, reciprocal: bool = False) -> None:
        super().__init__(width, 0)


class DistMultScorer(LinkScorer):
    """The sum of head * relation * tail (Yang et al., 2015); the same in both directions.

    >>> DistMultScorer(4, num_relations=2).queries(torch.ones(3, 4), torch.tensor([0, 1, 1])).shape
    torch.Size([3, 4])
    """

    def _applied(self, rows: Tensor, relation: Tensor, reverse: bool) -> Tensor:
        return rows * relation

    def score_relations(self, head: Tensor, tail: Tensor) -> Tensor:
        assert self.relation is not None
        return (head * tail) @ self.relation[: self.num_relations].t()


class ComplExScorer(LinkScorer):
    """The real part of the sum of head * relation * conj(tail) in complex numbers (Trouillon et al., 2016).

    >>> ComplExScorer(4, num_relations=2).queries(torch.ones(3, 4), torch.tensor([0, 1, 1]), reverse=True).shape
    torch.Size([3, 4])
    """

    parts = 2

    def _applied(self, rows: Tensor, relation: Tensor, reverse: bool) -> Tensor:
        return _product(rows, relation.chunk(2, -1), reverse)

    def score_relations(self, head: Tensor, tail: Tensor) -> Tensor:
        assert self.relation is not None
        return _product(tail, head.chunk(2, -1), True) @ self.relation[: self.num_relations].t()


class SimplEScorer(LinkScorer):
    """The mean of two products, one for each direction of a link (Kazemi and Poole, 2018).

    The first half of a row is the node as head, the second half as tail; those of a relation are of the link and its inverse.

    >>> SimplEScorer(4, num_relations=2).queries(torch.ones(3, 4), torch.tensor([0, 1, 1])).shape
    torch.Size([3, 4])
    """

    parts = 2

    def _applied(self, rows: Tensor, relation: Tensor, reverse: bool) -> Tensor:
        (head, tail), (own, inverse) = rows.chunk(2, -1), relation.chunk(2, -1)
        first, second = (own, inverse) if reverse else (inverse, own)
        return torch.cat([tail * first, head * second], -1) / 2

    def powers(self, rows: Tensor, p: int) -> Tensor:
        return rows.abs().pow(p).sum()

    def score_relations(self, head: Tensor, tail: Tensor) -> Tensor:
        assert self.relation is not None
        (head_of, tail_of), (of_head, of_tail) = head.chunk(2, -1), tail.chunk(2, -1)
        return torch.cat([head_of * of_tail, of_head * tail_of], -1) @ self.relation[: self.num_relations].t() / 2


class DistanceScorer(LinkScorer):
    """Scores that are distances of a query to candidates, taken negative.

    Distances to all candidates come from one matrix product, but for "l1": |q|^2 + |c|^2 - 2 q c, whose rounding is about 1e-7
    of |q|^2 + |c|^2.

    Args:
        width: See `LinkScorer`, as the next two.
        num_relations: Kinds of links.
        reciprocal: Whether a relation has two rows.
        distance: "l1": the sum of the components' absolute values; "l2": the Euclidean distance; "squared": its square.
    """

    bound = 0.05

    def __init__(self, width: int, num_relations: int = 1, reciprocal: bool = False, distance: Distance = "l2") -> None:
        super().__init__(width, num_relations, reciprocal)
        if distance not in get_args(Distance):
            raise ConfigError(f"distance {distance!r} is unknown: use one of {', '.join(get_args(Distance))}")
        self.distance = distance

    def score(self, query: Tensor, candidate: Tensor) -> Tensor:
        return -self._length(query - candidate)

    def score_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        if self.distance == "l1":
            return -self._sums_to_all(query, candidates)
        square = query.square().sum(-1, keepdim=True) + candidates.square().sum(-1) - 2 * (query @ candidates.t())
        return -(square if self.distance == "squared" else square.clamp_min(_LEAST).sqrt())

    def _length(self, difference: Tensor) -> Tensor:
        """Of vectors [..., width]: [...]."""
        if self.distance == "l1":
            return self._sum(difference)
        square = difference.square().sum(-1)
        return square if self.distance == "squared" else square.clamp_min(_LEAST).sqrt()

    def _sum(self, difference: Tensor) -> Tensor:
        """The sum of the components' absolute values."""
        if self.parts == 1:
            return difference.abs().sum(-1)
        real, imaginary = difference.chunk(2, -1)
        return (real.square() + imaginary.square()).clamp_min(_LEAST).sqrt().sum(-1)

    def _sums_to_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """`_sum` of every pair; differences of `PAIRS_AT_ONCE` pairs are in memory, and made again in the backward pass."""
        if self.parts == 1:
            return torch.cdist(query, candidates, p=1.0)

        def some(part: Tensor, candidates: Tensor) -> Tensor:
            return self._sum(part.unsqueeze(1) - candidates)

        at_once = max(1, PAIRS_AT_ONCE // max(1, len(candidates)))
        parts = [checkpoint(some, part, candidates, use_reentrant=False) for part in torch.split(query, at_once)]
        return torch.cat(parts)


class TransEScorer(DistanceScorer):
    """The distance of head + relation to tail (Bordes et al., 2013).

    >>> TransEScorer(4, num_relations=2, distance="l1").score(torch.ones(2, 4), torch.zeros(2, 4))
    tensor([-4., -4.])
    """

    def _applied(self, rows: Tensor, relation: Tensor, reverse: bool) -> Tensor:
        return rows - relation if reverse else rows + relation


class RotatEScorer(DistanceScorer):
    """The distance of the head, turned by the relation's phases, to the tail, in complex numbers (Sun et al., 2019).

    >>> RotatEScorer(4, num_relations=2).relation.shape
    torch.Size([2, 2])
    """

    parts = 2

    @property
    def relation_width(self) -> int:
        return self.width // 2

    def reset_parameters(self) -> None:
        if self.relation is not None:
            nn.init.uniform_(self.relation, -math.pi, math.pi)

    def _applied(self, rows: Tensor, relation: Tensor, reverse: bool) -> Tensor:
        return _product(rows, (relation.cos(), relation.sin()), reverse)


def _product(rows: Tensor, factor: Sequence[Tensor], conjugated: bool) -> Tensor:
    """Complex products of rows and a factor (its real and imaginary part), or the factor's conjugate."""
    (first, second), (real, imaginary) = rows.chunk(2, -1), factor
    if conjugated:
        return torch.cat([first * real + second * imaginary, second * real - first * imaginary], -1)
    return torch.cat([first * real - second * imaginary, second * real + first * imaginary], -1)


_BY_NAME: dict[str, type[LinkScorer]] = {
    "mf": DotScorer,
    "distmult": DistMultScorer,
    "complex": ComplExScorer,
    "transe": TransEScorer,
    "rotate": RotatEScorer,
    "simple": SimplEScorer,
}


def make_scorer(
    name: str, width: int, num_relations: int = 0, reciprocal: bool = False, distance: Distance | None = None
) -> LinkScorer:
    """The score function "mf", "distmult", "complex", "transe", "rotate" or "simple"; for the arguments see `LinkScorer`.

    Raises ConfigError for another name, a width that does not fit, and a distance (by default "l2") of one that has none.

    >>> make_scorer("rotate", 100, num_relations=11, distance="l1").width
    100
    """
    if name not in _BY_NAME:
        raise ConfigError(f"score function {name!r} is unknown: use one of {', '.join(get_args(ScorerName))}")
    kind = _BY_NAME[name]
    if issubclass(kind, DistanceScorer):
        return kind(width, max(1, num_relations), reciprocal, distance or "l2")
    if distance is not None:
        raise ConfigError(f"distance = {distance} does not apply to {name}, whose scores are products: leave it out")
    return kind(width, num_relations if kind is DotScorer else max(1, num_relations), reciprocal)

"""Filtered ranks of links: where the true answer of a query stands among all candidates, without the others that are true too.

Rows of candidates come in blocks from wherever the table is, so it may be larger than memory. Scores are compared as float32,
and equal ones count half: the rank is the mean of those that ties leave open, so constant scores gain nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.models.layers import evaluating
from ooc.models.link_scores import LinkScorer
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.errors import OocError
from ooc.stores.jit import kernel

QUERIES, CANDIDATES = 512, 4096
"""of a tile of scores"""
Allowed = Callable[[Ids], NDArray[np.bool_]]
"""which of nodes, int64[m], are candidates: bool[m]"""
_PASSES = 2
"""over the table: the scores of true answers are known after the first one"""


class RowTable(Protocol):
    """Rows of nodes, wherever they are."""

    def read(self, ids: Ids) -> AnyArray:
        """The rows of nodes: int64[n] give float32[n, width]."""

    def blocks(self) -> Iterator[tuple[Ids, AnyArray]]:
        """All nodes in some order, each once, with their rows: (int64[m], float32[m, width]), the same in every pass."""


class TableInOrder:
    """`Rows` as a `RowTable`: nodes first..last-1 in order of their ids.

    Args:
        rows: The rows of all nodes.
        first: The first node; the one behind the last, `last`: None for the end.
        last: See `first`.
        at_once: Rows of a block.

    >>> table = TableInOrder(ArrayRows(embeddings))
    """

    def __init__(self, rows: Rows, first: int = 0, last: int | None = None, at_once: int = CANDIDATES) -> None:
        self._rows, self._first, self._at_once = rows, first, at_once
        self._last = rows.shape[0] if last is None else last

    def read(self, ids: Ids) -> AnyArray:
        out = np.empty((len(ids), *self._rows.shape[1:]), self._rows.dtype)
        self._rows.read(ids, out)
        return np.asarray(out, np.float32)

    def blocks(self) -> Iterator[tuple[Ids, AnyArray]]:
        for start in range(self._first, self._last, self._at_once):
            ids = np.arange(start, min(start + self._at_once, self._last))
            yield ids, self.read(ids)


class TrueRanks(NamedTuple):
    """Where the true answers of queries stand."""

    above: Ids
    """candidates with a higher score, int64[n]"""
    equal: Ids
    """others with the same score, int64[n]"""

    @property
    def mean(self) -> NDArray[np.float64]:
        """The ranks: the mean of those that ties leave open, from 1 on, float64[n]."""
        return np.asarray(1 + self.above + self.equal / 2)


@dataclass(frozen=True)
class Queries:
    """Queries and their true answers, by the group whose known answers they share.

    >>> Queries(query=torch.randn(3, 8), true=np.array([5, 1, 7]), group=np.array([0, 0, 1]))
    """

    query: Tensor
    """float32[n, width]"""
    true: Ids
    """int64[n], nodes"""
    group: Ids
    """int64[n], of `Answers`"""


@dataclass(frozen=True)
class Answers:
    """Known answers of groups of queries, which do not count in the ranks of others: pairs int64[k] each, in any order."""

    group: Ids
    node: Ids


def filtered_ranks(
    scorer: LinkScorer,
    queries: Queries,
    table: RowTable,
    known: Answers | None = None,
    allowed: Allowed | None = None,
) -> TrueRanks:
    """The ranks of true answers among all candidates, in blocks.

    A true answer's score is that of its place in a block, where it is computed with its neighbors: two rows that are equal
    have equal scores. It is needed from the first block on, so scores of single rows stand in for it, and the few tiles of
    queries in which one of these differs in its last bit go through the table again.

    Args:
        scorer: What scores.
        queries: What is ranked.
        table: Rows of the candidates.
        known: Answers that are left out; None: those of `queries` alone.
        allowed: Which of nodes (int64[m]) are candidates, bool[m]; None: all of the table.

    Returns:
        Counts of candidates above and beside each true answer.

    Raises:
        OocError: A score is NaN.

    >>> filtered_ranks(scorer, queries, TableInOrder(rows), known).mean
    """
    count = len(queries.true)
    own, above, equal = np.empty(count, np.float32), np.zeros(count, np.int64), np.zeros(count, np.int64)
    answers = AnswersByNode.of(queries.true, queries.group, known)
    one = _RankingPass(scorer, queries, table, answers, allowed)
    pending = list(tiles_of(count))
    with evaluating(scorer), torch.no_grad():
        for tile in pending:
            rows = torch.from_numpy(table.read(queries.true[tile]))
            own[tile] = scorer.score(queries.query[tile], rows).float().numpy()
        for _ in range(_PASSES):
            found = own.copy()
            for tile in pending:
                above[tile] = equal[tile] = 0
            if pending:
                one.run(pending, own, found, above, equal)
            pending = [tile for tile in pending if not np.array_equal(found[tile], own[tile])]
            own = found
    return TrueRanks(above, equal)


class AnswersByNode(NamedTuple):
    """Known answers of groups of queries in order of the node, each once."""

    node: Ids
    group: Ids

    @classmethod
    def of(cls, node: Ids, group: Ids, known: Answers | None = None) -> Self:
        if known is not None:
            node, group = np.concatenate([node, known.node]), np.concatenate([group, known.group])
        order = np.lexsort((group, node))
        node, group = node[order], group[order]
        new = np.ones(len(node), bool)
        new[1:] = (node[1:] != node[:-1]) | (group[1:] != group[:-1])
        return cls(node[new], group[new])

    def within(self, ids: Ids) -> tuple[Ids, Ids]:
        """(groups, ascending; places in `ids`) of the answers among `ids` (int64[m])."""
        first, last = (np.searchsorted(self.node, ids, side) for side in ("left", "right"))
        count = last - first
        place = np.repeat(np.arange(len(ids)), count)
        group = self.group[np.repeat(first - (np.cumsum(count) - count), count) + np.arange(len(place))]
        order = np.argsort(group, kind="stable")
        return group[order], place[order]


@dataclass(frozen=True)
class _RankingPass:
    scorer: LinkScorer
    queries: Queries
    table: RowTable
    answers: AnswersByNode
    allowed: Allowed | None

    def run(self, tiles: list[slice], own: NDArray[np.float32], found: NDArray[np.float32], above: Ids, equal: Ids) -> None:
        """Add the candidates above and beside `own` in these tiles; found: receives the scores of true answers in blocks."""
        for ids, rows in candidate_blocks(self.table, self.allowed):
            group, place = self.answers.within(ids)
            at = _places(self.queries.true, ids)
            candidates = torch.from_numpy(rows)
            for tile in tiles:
                scores = self.scorer.score_all(self.queries.query[tile], candidates).float().contiguous().numpy()
                of = self.queries.group[tile]
                begin, end = (np.searchsorted(group, of, side) for side in ("left", "right"))
                if not _count(scores, own[tile], at[tile], begin, end, place, found[tile], above[tile], equal[tile]):
                    raise OocError("a link was scored with NaN: the rows or the relations' rows are not finite")


def candidate_blocks(table: RowTable, allowed: Allowed | None) -> Iterator[tuple[Ids, AnyArray]]:
    """The rows of a table that are candidates, at most `CANDIDATES` at a time."""
    for ids, rows in table.blocks():
        if allowed is not None:
            some = allowed(ids)
            ids, rows = ids[some], rows[some]
        for start in range(0, len(ids), CANDIDATES):
            part = slice(start, start + CANDIDATES)
            yield ids[part], np.ascontiguousarray(rows[part], np.float32)


def tiles_of(count: int) -> Iterator[slice]:
    return (slice(start, min(start + QUERIES, count)) for start in range(0, count, QUERIES))


def _places(wanted: Ids, ids: Ids) -> Ids:
    """Where each of `wanted` is in `ids` (distinct), -1 where it is not."""
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
    found = order[place]
    return np.where(ids[found] == wanted, found, -1)


@kernel
def _count(
    scores: NDArray[np.float32],
    own: NDArray[np.float32],
    true: Ids,
    begin: Ids,
    end: Ids,
    known: Ids,
    found: NDArray[np.float32],
    above: Ids,
    equal: Ids,
) -> bool:
    """Add to `above` and `equal` (int64[b]) how many of scores [b, m] are above and equal to `own`, but for the
    known[begin:end] of each row; found: receives scores[i, true[i]] where true[i] is not negative. False for a NaN."""
    for i in range(scores.shape[0]):
        score, higher, same, finite = own[i], 0, 0, 0
        for j in range(scores.shape[1]):
            each = scores[i, j]
            higher += each > score
            same += each == score
            finite += each == each
        if finite < scores.shape[1]:
            return False
        for k in range(begin[i], end[i]):
            each = scores[i, known[k]]
            higher -= each > score
            same -= each == score
        if true[i] >= 0:
            found[i] = scores[i, true[i]]
        above[i] += higher
        equal[i] += same
    return True

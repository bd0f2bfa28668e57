"""The best answers of queries among all rows of a table, in blocks from wherever it is; and the neighbors of nodes in it."""

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.layerwise.filtered_ranks import Allowed, Answers, AnswersByNode, RowTable, candidate_blocks, tiles_of
from ooc.layerwise.row_norms import with_norms_to
from ooc.layerwise.top_k import TopK, check_k, keep_best
from ooc.models.layers import evaluating
from ooc.models.link_scores import DotScorer, LinkScorer, TransEScorer
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import ConfigError, OocError
from ooc.stores.jit import kernel

Similarity = Literal["cosine", "dot", "l2"]


def best_answers(
    scorer: LinkScorer,
    query: Tensor,
    table: RowTable,
    k: int,
    *,
    source: Ids | None = None,
    known: Answers | None = None,
    group: Ids | None = None,
    allowed: Allowed | None = None,
) -> TopK:
    """The candidates with the highest scores for each query, in one pass over the table.

    Args:
        scorer: What scores.
        query: As `scorer.queries` makes them, float32[n, width].
        table: Rows of the candidates.
        k: Answers to keep for each query, 1 or more.
        source: What `TopK.source` says of each query, int64[n]; None: its number.
        known: Answers that are left out, by groups of queries.
        group: The group of each query, int64[n]; None: its number.
        allowed: Which nodes are candidates; None: all of the table.

    Returns:
        Nodes and scores by query, from the best on; of equal scores the smaller node first. n * k * 12 bytes.

    Raises:
        ConfigError: k is not 1 or more.
        OocError: A score is NaN.

    >>> best_answers(scorer, scorer.queries(rows, relation), table, k=10).item[0]
    """
    check_k(k)
    number = np.arange(len(query))
    best = TopK.empty(number if source is None else source, int(k))
    nothing, none = np.empty(0, np.int64), np.full(len(query), -1)
    answers = AnswersByNode.of(nothing, nothing, known)
    own = number if group is None else group
    with evaluating(scorer), torch.no_grad():
        for ids, rows in candidate_blocks(table, allowed):
            order = np.argsort(ids, kind="stable")
            ids, candidates = ids[order], torch.from_numpy(rows[order])
            left_out, place = answers.within(ids)
            for tile in tiles_of(len(query)):
                scores = scorer.score_all(query[tile], candidates).float().contiguous().numpy()
                if np.isnan(scores).any():
                    raise OocError("an answer was scored with NaN: the rows or the relations' rows are not finite")
                begin, end = (np.searchsorted(left_out, own[tile], side) for side in ("left", "right"))
                _leave_out(scores, begin, end, place)
                indptr = np.zeros(len(scores) + 1, np.int64)
                keep_best(scores, none[tile], ids, indptr, nothing, best.item[tile], best.score[tile])
    return best


def nearest(table: RowTable, ids: Ids, k: int, by: Similarity = "cosine", allowed: Allowed | None = None) -> TopK:
    """The nodes whose rows are most similar to those of nodes `ids`, in one pass over the table.

    Args:
        table: The rows.
        ids: int64[n]; none of them is its own neighbor.
        k: Neighbors of each, 1 or more.
        by: "cosine", "dot" or "l2" (the Euclidean distance, taken negative).
        allowed: Which nodes may be neighbors; None: all of the table.

    Raises:
        ConfigError: `by` is unknown, or k not 1 or more.

    >>> nearest(table, np.array([17]), k=5).item
    """
    if by not in get_args(Similarity):
        raise ConfigError(f"by = {by!r} is unknown: use one of {', '.join(get_args(Similarity))}")
    compared = _Directions(table) if by == "cosine" else table
    rows = torch.from_numpy(compared.read(ids))
    scorer = TransEScorer(rows.shape[1]) if by == "l2" else DotScorer(rows.shape[1])
    return best_answers(scorer, rows, compared, k, source=ids, known=Answers(np.arange(len(ids)), ids), allowed=allowed)


class _Directions:
    """A table whose rows have length 1, but for rows of zeros."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def read(self, ids: Ids) -> AnyArray:
        return with_norms_to(self._table.read(ids), 0)

    def blocks(self) -> Iterator[tuple[Ids, AnyArray]]:
        for ids, rows in self._table.blocks():
            yield ids, with_norms_to(rows, 0)


@kernel
def _leave_out(scores: NDArray[np.float32], begin: Ids, end: Ids, place: Ids) -> None:
    """Set the scores of row i at place[begin[i]:end[i]] to -inf."""
    for i in range(len(begin)):
        for j in range(begin[i], end[i]):
            scores[i, place[j]] = -np.inf

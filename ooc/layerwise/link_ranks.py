"""MRR and Hits@k of links, filtered and both ways: each one's tail among all tails, and its head among all heads."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.layerwise.filtered_ranks import CANDIDATES, Allowed, Answers, Queries, RowTable, filtered_ranks
from ooc.metrics.links import LinkScores
from ooc.models.link_scores import LinkScorer
from ooc.runtime.keyed_random import KeyedPermutation
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_bytes

_ANSWER_BYTES = 96
"""of memory that a known answer takes while those of a pass are put in order"""
_QUERY_BYTES = 128
"""of a query, beside its row and the row of its true answer"""


class LabelledLinks(NamedTuple):
    """Links and the relation of each: int64[k] each."""

    head: Ids
    relation: Ids
    tail: Ids

    def ends(self, reverse: bool) -> tuple[Ids, Ids]:
        """The known ends and the ones asked for: heads and tails, or with `reverse` the other way."""
        return (self.tail, self.head) if reverse else (self.head, self.tail)


@dataclass(frozen=True)
class LinkRanking:
    """Ranks links among all candidates, in bounded memory: one pass over the table for as many queries as `room` holds.

    >>> ranking = LinkRanking(scorer, table, lambda: iter([train, val, test]), room=2**28)
    >>> ranking.scores(test)["mrr"]
    """

    scorer: LinkScorer
    table: RowTable
    known: Callable[[], Iterator[LabelledLinks]]
    """the links that are true, of all splits, piece by piece; they are left out of each other's ranks"""
    room: int
    """bytes for the queries of a pass and their known answers"""
    heads: Allowed | None = None
    """which nodes are candidates for heads; None: all"""
    tails: Allowed | None = None

    def scores(self, links: LabelledLinks, both: bool = True) -> dict[str, float]:
        """The mean over both ways, or that of tails alone: mrr, hits@1, hits@3 and hits@10; empty without links.

        Raises:
            BudgetError: `room` does not hold the known answers of one query.
            OocError: A score is NaN.
        """
        found = LinkScores()
        for reverse in (False, True) if both else (False,):
            for rank in self.ranks(links, reverse):
                found.add_ranks(torch.from_numpy(rank))
        return found.compute()

    def ranks(self, links: LabelledLinks, reverse: bool = False) -> Iterator[NDArray[np.float64]]:
        """The ranks of the tails of links (with `reverse`, of their heads), some links at a time, in order of their keys."""
        source, _ = links.ends(reverse)
        order = np.lexsort((links.relation, source))  # so that queries of a pass share their known answers
        at_once = max(1, self.room // 2 // (8 * self.scorer.width + _QUERY_BYTES))
        waiting = [order[start : start + at_once] for start in range(0, len(order), at_once)]
        while waiting:
            some = waiting.pop(0)
            part = LabelledLinks(*(each[some] for each in links))
            answers = self._answers(part, reverse)
            if answers is None:
                waiting[:0] = np.array_split(some, 2)
                continue
            yield self._ranks(part, reverse, *answers)

    def _ranks(self, part: LabelledLinks, reverse: bool, group: Ids, answers: Answers) -> NDArray[np.float64]:
        source, true = part.ends(reverse)
        device = next((each.device for each in self.scorer.parameters()), torch.device("cpu"))
        with torch.no_grad():
            rows = [torch.from_numpy(self.table.read(source[at : at + CANDIDATES])) for at in range(0, len(source), CANDIDATES)]
            relation = torch.from_numpy(part.relation)
            query = self.scorer.queries(torch.cat(rows).to(device), relation.to(device), reverse).float().cpu()
        allowed = self.heads if reverse else self.tails
        return filtered_ranks(self.scorer, Queries(query, true, group), self.table, answers, allowed).mean

    def _answers(self, part: LabelledLinks, reverse: bool) -> tuple[Ids, Answers] | None:
        """The group of each query and the known answers of groups; None where `room` does not hold them."""
        source, _ = part.ends(reverse)
        base = max(1, self.scorer.num_relations)
        keys, group = np.unique(source * base + part.relation, return_inverse=True)
        most, found = self.room // 2 // _ANSWER_BYTES, [(np.empty(0, np.int64), np.empty(0, np.int64))]
        count = 0
        for links in self.known():
            end, answer = links.ends(reverse)
            key = end * base + links.relation
            place = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            some = keys[place] == key
            found.append((place[some], answer[some]))
            count += int(some.sum())
            if count > most and len(keys) > 1:
                return None
        if count > most:
            need = format_bytes(2 * _ANSWER_BYTES * count)
            raise BudgetError(
                f"node {source[0]} has {count:,} known links of relation {part.relation[0]}, whose ranking takes "
                f"{need} of memory: give more memory"
            )
        return group, Answers(*(np.concatenate(each) for each in zip(*found, strict=True)))


class SampledTable:
    """Some of a table's rows: a sample of candidates, keyed by `key`, that ranks are estimated with.

    Args:
        table: The whole.
        candidates: Nodes to draw from: those that may be heads, and those that may be tails.
        count: How many are drawn from each.
        key: Of the draw.

    >>> LinkRanking(scorer, SampledTable(table, {range(len(ds))}, 1000, key=7), known, room)
    """

    def __init__(self, table: RowTable, candidates: Collection[range], count: int, key: int) -> None:
        drawn = [each.start + KeyedPermutation(len(each), key)[: min(count, len(each))] for each in candidates]
        self._table, self._ids = table, np.unique(np.concatenate(drawn))

    def read(self, ids: Ids) -> AnyArray:
        return self._table.read(ids)

    def blocks(self) -> Iterator[tuple[Ids, AnyArray]]:
        for start in range(0, len(self._ids), CANDIDATES):
            ids = self._ids[start : start + CANDIDATES]
            yield ids, self._table.read(ids)

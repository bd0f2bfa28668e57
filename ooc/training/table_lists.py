"""Lists of the best answers by a trained table, in one pass over it for as many queries as memory has room for."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ooc.config.lightgcn import LightGCNConfig
from ooc.config.tables import TableConfig
from ooc.layerwise.best_answers import best_answers
from ooc.layerwise.filtered_ranks import Answers
from ooc.layerwise.top_k import KnownLinks, TopK
from ooc.loading.relation_links import RelationSplit
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_bytes
from ooc.training.link_ranking import LinkRankings
from ooc.training.mode import Scores
from ooc.training.trained_table import TrainedTable

Listed = TableConfig | LightGCNConfig
_LINK_BYTES = 160
"""of memory that a link of the sources of a pass takes while queries and known answers are made of it"""


class AnswerLists:
    """The best tails of every head, or of every (head, relation) that the store has, without the links that it has.

    Args:
        trained: What was learned.
        k: Tails to keep for each.
        room: Bytes for the queries of a pass over the table, their answers and the links that are left out.

    Raises:
        BudgetError: `room` does not hold those of one head.

    >>> for heads, relations, best in AnswerLists(trained, 10, room=2**28): ...
    """

    def __init__(self, trained: TrainedTable, k: int, room: int) -> None:
        self.trained, self.k, self._room = trained, k, room
        self.queries = 0
        """that were answered so far"""

    def __iter__(self) -> Iterator[tuple[Ids, Ids, TopK]]:
        """(heads, relations, best answers) of some queries after another, by head and relation."""
        for first, stop in self._ranges():
            head, relation, known = self._of(first, stop)
            if not len(head):
                continue
            trained, scorer = self.trained, self.trained.scorer
            with torch.no_grad():
                query = scorer.queries(torch.from_numpy(trained.rows_of(head)), torch.from_numpy(relation))
            options: dict[str, Any] = {"known": known, "allowed": trained.candidates(False), "source": head}
            best = best_answers(scorer, query, trained.table, self.k, **options)
            self.queries += len(head)
            yield head, relation, best

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of heads whose queries and links `room` holds."""
        heads = self.trained.links.heads
        count = np.zeros(len(heads), np.int64)
        for head, _, _ in self.trained.links.pieces():
            np.add.at(count, head - heads.start, 1)
        query = 8 * self.trained.scorer.width + 12 * self.k + 64
        several = self.trained.scorer.num_relations > 0  # then no more queries than links, else one of each head
        need = count * (_LINK_BYTES + query * several) + query * (not several)
        for first, stop in _ranges_within(need, self._room, count, heads.start + np.arange(len(heads)), "top"):
            yield heads.start + first, heads.start + stop

    def _of(self, first: int, stop: int) -> tuple[Ids, Ids, Answers]:
        """(heads, relations, known answers by number of query) of heads first..stop-1."""
        base, found = max(1, self.trained.scorer.num_relations), [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for head, relation, tail in self.trained.links.pieces():
            some = (head >= first) & (head < stop)
            found.append((head[some] * base + (relation[some] if base > 1 else 0), tail[some]))
        key, tail = (np.concatenate(each) for each in zip(*found, strict=True))
        if self.trained.scorer.num_relations:
            keys, group = np.unique(key, return_inverse=True)
        else:
            keys, group = np.arange(first, stop), key - first
        head, relation = np.divmod(keys, base)
        same = np.arange(len(keys))  # a head is no answer to itself, where tails are of its type
        return head, relation, Answers(np.concatenate([group, same]), np.concatenate([tail, head]))


def ranked_scores(
    trained: TrainedTable, split: RelationSplit, wanted: list[str], config: Listed, room: int
) -> dict[str, Scores]:
    """Recall@k and NDCG@k of splits, in lists of all destinations: see `LinkRankings`.

    Args:
        trained: The table, of links without relations.
        split: Which links are of which split.
        wanted: Names of splits that have links.
        config: Names the splits to train and to validate on, and the k.
        room: Bytes for the sources of a pass over the table, their lists and known links.

    Returns:
        Split -> recall@k and ndcg@k for each k.

    Raises:
        BudgetError: `room` does not hold those of one source.

    >>> ranked_scores(trained, split, ["val"], config, 2**26)["val"]["recall@20"]
    0.18
    """
    (part,) = trained.links.parts
    parts = {name: split.members(name)[0] for name in split.names if name != config.train_split}
    rankings = LinkRankings(trained.dataset, part.key, parts, config.val_split, config.ranked_k)
    return rankings.scores(wanted, lambda source, k, known: source_lists(trained, source, k, known, room))


def source_lists(trained: TrainedTable, source: Ids, k: int, known: KnownLinks, room: int) -> Iterator[TopK]:
    """The k best destinations of sources by a table of links without relations, some sources at a time.

    Args:
        trained: The table.
        source: Nodes of the sources' type, int64[n].
        k: Destinations to keep of each.
        known: Links to leave out.
        room: Bytes, as of `ranked_scores`.

    Raises:
        BudgetError: `room` does not hold the known links and the list of one source.

    >>> next(source_lists(trained, np.arange(100), 20, KnownLinks(None), 2**26)).item.shape
    (100, 20)
    """
    count = known.counts(source)
    need = count * _LINK_BYTES + 8 * trained.scorer.width + 12 * k + 64
    for first, stop in _ranges_within(need, room, count, source, "eval_k"):
        yield _best_of(trained, source[first:stop], k, known)


def _best_of(trained: TrainedTable, source: Ids, k: int, known: KnownLinks) -> TopK:
    heads, tails = trained.links.heads, trained.links.tails
    indptr, node = known.of(source)
    group = np.repeat(np.arange(len(source)), np.diff(indptr))
    if heads == tails:  # a source is no destination of its own
        group, node = np.concatenate([group, np.arange(len(source))]), np.concatenate([node, source])
    query = trained.scorer.queries(torch.from_numpy(trained.rows_of(source + heads.start)))
    left_out, allowed = Answers(group, node + tails.start), trained.candidates(False)
    best = best_answers(trained.scorer, query, trained.table, k, source=source, known=left_out, allowed=allowed)
    return TopK(source, np.where(best.item < 0, -1, best.item - tails.start), best.score)


def _ranges_within(need: Ids, room: int, links: Ids, node: Ids, setting: str) -> Iterator[tuple[int, int]]:
    """Ranges of queries' nodes that `room` bytes hold together.

    need: bytes of each, int64[n]; links, node: of each, for people, as `setting`, which makes lists shorter.
    """
    if len(large := np.flatnonzero(need > room)):
        at = large[0]
        raise BudgetError(
            f"the {links[at]:,} links and the lists of node {node[at]} take {format_bytes(int(need[at]))} of memory, more than "
            f"{format_bytes(room)}: give more memory, or a smaller {setting}"
        )
    total, first, before = np.cumsum(need), 0, 0
    while first < len(need):
        stop = int(np.searchsorted(total, before + room, side="right"))
        yield first, stop
        first, before = stop, int(total[stop - 1])

"""Scores of tables: MRR and Hits@k of a split's links, filtered and both ways, among all nodes or a sample of them.

Of links without relations also Recall@k and NDCG@k, in the lists that sources have of all destinations.
"""

from collections.abc import Iterator
from typing import Any

from ooc.config.tables import TableConfig
from ooc.history.bucket_table import BucketTable, TableView
from ooc.layerwise.link_ranks import LabelledLinks, LinkRanking, SampledTable
from ooc.loading.relation_links import RelationLinks, RelationSplit, Triples
from ooc.models.link_scores import LinkScorer
from ooc.runtime.keyed_random import Purpose, key
from ooc.training.mode import Scores
from ooc.training.table_lists import ranked_scores
from ooc.training.table_memory import RANKING_BYTES, TableMemory, lists_bytes
from ooc.training.trained_table import TrainedTable


class TableScores:
    """Ranks links of splits by a table as it is, or as it was kept.

    Args:
        config: The settings.
        model: Scores links by their rows.
        links: All of the store, which are true.
        split: Which of them are of which split.
        memory: Division of the process's.

    >>> TableScores(config, model, links, split, memory).of("val", table)["mrr"]
    0.31
    """

    def __init__(
        self, config: TableConfig, model: LinkScorer, links: RelationLinks, split: RelationSplit, memory: TableMemory
    ) -> None:
        self.config, self.model, self.links, self.split = config, model, links, split
        self.memory, self._lists_bytes = memory.budget.memory, lists_bytes(memory.spare)

    def of(self, split: str, table: BucketTable, kept: str | None = None) -> Scores | None:
        """Return the scores of a split, None where it has no links. kept: a view of the table; None: the rows as they are."""
        if not self.split.count_of(split):
            return None
        config, links = self.config, self.links
        view: Any = TableView(table, kept)
        if config.eval_candidates is not None:
            nodes = {links.heads, links.tails} if config.both_ways else {links.tails}
            view = SampledTable(view, nodes, config.eval_candidates, key(config.seed, Purpose.EVALUATE))
        heads, tails = (_within(nodes, links.num_nodes) for nodes in (links.heads, links.tails))
        ranking = LinkRanking(self.model, view, self._known, RANKING_BYTES, heads, tails)
        own = _labelled(self.split.links(split, self.memory))
        found: Scores = dict(ranking.scores(own, both=config.both_ways))
        if config.ranked_k:
            trained = TrainedTable(links.dataset, links, self.model, TableView(table, kept))
            found |= ranked_scores(trained, self.split, [split], config, self._lists_bytes)[split]
        return found

    def _known(self) -> Iterator[LabelledLinks]:
        """All links, which are true."""
        return map(_labelled, self.links.pieces(memory=self.memory))


def _within(nodes: range, total: int) -> Any:
    """Which nodes are among `nodes`; None where all are."""
    if nodes == range(total):
        return None
    return lambda ids: (ids >= nodes.start) & (ids < nodes.stop)


def _labelled(triples: Triples) -> LabelledLinks:
    return LabelledLinks(*triples)

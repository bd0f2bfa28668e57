"""The loss of a batch of links by the rows of its nodes: what is asked for, among which candidates, and what is added."""

from typing import NamedTuple

import torch
from torch import Tensor

from ooc.config.tables import TableConfig
from ooc.metrics.link_losses import LinkLoss, loss_of_all
from ooc.models.link_scores import LinkScorer
from ooc.models.regularizers import LinkRegularizer


class LinkRows(NamedTuple):
    """The links of a batch, with the rows of all nodes that their scores need."""

    head: Tensor
    """float32[b, width]"""
    tail: Tensor
    """float32[b, width]"""
    relation: Tensor | None
    """int64[b]"""
    tails: "ComparedRows"
    """that tails are compared with"""
    heads: "ComparedRows | None"
    """that heads are; None where none are asked for"""


class ComparedRows(NamedTuple):
    """What the true answers of queries are compared with."""

    rows: Tensor
    """float32[chunks, m, width], of each chunk of links; of 1-vs-all [1, m, width], the true ones among them"""
    true: Tensor
    """of negatives bool[b, m], which of them are a link's own answer; of 1-vs-all int64[b], which is"""


class TableLoss:
    """The training loss of links; see the settings of `TableConfig`.

    Args:
        config: These.
        chunk: Links that share their negatives.
        tails, heads: How many nodes each of these may be.
    """

    def __init__(self, config: TableConfig, chunk: int, tails: int = 0, heads: int = 0) -> None:
        self._all, self._smoothing, self._chunk = config.loss == "all", config.label_smoothing, chunk
        name = "softmax" if self._all else config.loss
        how = {"margin": config.margin, "temperature": config.temperature}
        self._loss = [LinkLoss(name, population=each if config.correct_negatives else None, **how) for each in (tails, heads)]
        weight = config.regularizer_weight
        self._penalty = LinkRegularizer(config.regularizer, weight) if weight else None
        self._relation_weight = config.relation_weight

    def __call__(self, scorer: LinkScorer, links: LinkRows) -> Tensor:
        """Return the mean loss, a scalar with its graph."""
        total = self._one_way(scorer, links, False, links.tails)
        if links.heads is not None:
            total = (total + self._one_way(scorer, links, True, links.heads)) / 2
        if self._penalty is not None:
            ways = (False, True) if scorer.reciprocal and links.heads is not None else (False,)
            each = [self._penalty(scorer, links.head, links.tail, _penalized(scorer, links, way)) for way in ways]
            total = total + torch.stack(each).mean()
        if self._relation_weight and links.relation is not None:
            scores = scorer.score_relations(links.head, links.tail)
            total = total + self._relation_weight * loss_of_all(scores, links.relation)
        return total

    def _one_way(self, scorer: LinkScorer, links: LinkRows, reverse: bool, candidates: ComparedRows) -> Tensor:
        known, asked = (links.tail, links.head) if reverse else (links.head, links.tail)
        query = scorer.queries(known, links.relation, reverse)
        if self._all:
            return loss_of_all(scorer.score_all(query, candidates.rows[0]), candidates.true, self._smoothing)
        parts = zip(torch.split(query, self._chunk), candidates.rows, strict=True)
        negative = torch.cat([scorer.score_all(part, rows) for part, rows in parts])
        return self._loss[reverse](scorer.score(query, asked), negative, candidates.true)


def _penalized(scorer: LinkScorer, links: LinkRows, reverse: bool) -> Tensor | None:
    """The relations' rows of links; None where these are no rows but phases, or there are none."""
    if links.relation is None or scorer.relation is None or scorer.relation_width != scorer.width:
        return None
    return scorer.relations_of(links.relation, reverse)

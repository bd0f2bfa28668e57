"""The loss of a batch of links against plain formulas."""

import math
from pathlib import Path

import pytest
import torch

from ooc.config.tables import TableConfig
from ooc.models.link_scores import make_scorer
from ooc.training.table_losses import ComparedRows, LinkRows, TableLoss

B, M, WIDTH, RELATIONS, NODES = 6, 5, 4, 3, 100


def config(**settings) -> TableConfig:
    return TableConfig(store=Path("s"), out=Path("o"), hidden=WIDTH, **settings)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    scorer = make_scorer("complex", WIDTH, RELATIONS, reciprocal=True)
    torch.nn.init.normal_(scorer.relation)
    head, tail = torch.randn(B, WIDTH), torch.randn(B, WIDTH)
    known = torch.zeros(B, M, dtype=torch.bool)
    known[2, 3] = True
    ways = [ComparedRows(torch.randn(2, M, WIDTH), known), ComparedRows(torch.randn(2, M, WIDTH), known.roll(1, 0))]
    return scorer, LinkRows(head, tail, torch.arange(B) % RELATIONS, *ways)


def one_way(scorer, links, reverse, weight):
    """The softmax of each link among its chunk's negatives, of which each counts `weight` times; a link's mean."""
    known, asked, candidates = (links.tail, links.head, links.heads) if reverse else (links.head, links.tail, links.tails)
    total = 0.0
    for i in range(B):
        query = scorer.queries(known[i : i + 1], links.relation[i : i + 1], reverse)[0]
        true = math.exp(float(query @ asked[i]))
        others = [math.exp(float(query @ row)) for row in candidates.rows[i // 3]]
        others = [score for score, left_out in zip(others, candidates.true[i].tolist(), strict=True) if not left_out]
        total -= math.log(true / (true + weight * sum(others)))
    return total / B


@pytest.mark.parametrize("corrected", [False, True])
def test_softmax_of_both_ways_by_chunks(batch, corrected):
    scorer, links = batch
    found = TableLoss(config(correct_negatives=corrected), 3, tails=NODES, heads=NODES // 2)(scorer, links)
    weights = (NODES / M, NODES / 2 / M) if corrected else (1, 1)
    wanted = sum(one_way(scorer, links, reverse, weight) for reverse, weight in zip((False, True), weights, strict=True)) / 2
    assert found.item() == pytest.approx(wanted, rel=1e-5)


def test_relations_and_penalties_are_added(batch):
    scorer, links = batch
    plain = TableLoss(config(), 3)(scorer, links)
    more = TableLoss(config(regularizer_weight=0.1, relation_weight=0.5), 3)(scorer, links)
    scores = scorer.score_relations(links.head, links.tail)
    relation = -scores.log_softmax(1).gather(1, links.relation[:, None]).mean()
    cubes = [(rows[:, :2] ** 2 + rows[:, 2:] ** 2) ** 1.5 for rows in (links.head, links.tail)]
    kinds = [scorer.relations_of(links.relation, way) for way in (False, True)]
    kinds = [(rows[:, :2] ** 2 + rows[:, 2:] ** 2) ** 1.5 for rows in kinds]
    penalty = 0.1 / B * (sum(cube.sum() for cube in cubes) + sum(cube.sum() for cube in kinds) / 2)
    torch.testing.assert_close(more, plain + 0.5 * relation + penalty)

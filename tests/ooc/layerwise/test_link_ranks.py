"""Filtered MRR and Hits@k both ways against a plain loop over all links and candidates."""

import numpy as np
import pytest
import torch

from ooc.layerwise.filtered_ranks import TableInOrder
from ooc.layerwise.link_ranks import LabelledLinks, LinkRanking, SampledTable
from ooc.models.link_scores import make_scorer
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import BudgetError

NODES, RELATIONS, WIDTH = 60, 3, 8


def graph(seed=0, edges=400):
    draw = np.random.default_rng(seed)
    every = np.unique(draw.integers(0, (NODES, RELATIONS, NODES), (edges, 3)), axis=0)
    draw.shuffle(every)
    return [LabelledLinks(*part.T.copy()) for part in np.split(every, [len(every) - 80, len(every) - 40])]


def model(name, reciprocal):
    torch.manual_seed(1)
    scorer = make_scorer(name, WIDTH, RELATIONS, reciprocal)
    torch.nn.init.normal_(scorer.relation)
    return scorer, np.random.default_rng(2).normal(size=(NODES, WIDTH)).astype(np.float32)


def brute(scorer, rows, splits, links, candidates=range(NODES)):
    """Ranks of both ways from scores in float64, one link at a time."""
    true = {(int(h), int(r), int(t)) for part in splits for h, r, t in zip(*part, strict=True)}
    scorer, table, ranks = scorer.double(), torch.from_numpy(rows).double(), []
    for head, relation, tail in zip(*links, strict=True):
        kind = torch.tensor([relation])
        for reverse in (False, True):
            query = scorer.queries(table[[tail if reverse else head]], kind, reverse)
            score = scorer.score(query, table)
            own = head if reverse else tail
            others = [
                n for n in candidates if n != own and ((n, relation, tail) if reverse else (head, relation, n)) not in true
            ]
            ranks.append(1 + sum(float(score[n] > score[own]) + float(score[n] == score[own]) / 2 for n in others))
    scorer.float()
    return np.array(ranks)


def wanted(ranks):
    return {"mrr": (1 / ranks).mean()} | {f"hits@{k}": (ranks <= k).mean() for k in (1, 3, 10)}


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("name", ["complex", "distmult", "transe", "rotate", "simple"])
def test_scores_are_those_of_a_plain_loop_in_any_room(name, reciprocal):
    splits = graph()
    scorer, rows = model(name, reciprocal)
    expected = wanted(brute(scorer, rows, splits, splits[2]))
    for room in (2**26, 2**15, 2**12):
        ranking = LinkRanking(scorer, TableInOrder(ArrayRows(rows), at_once=17), lambda: iter(splits), room)
        assert ranking.scores(splits[2]) == pytest.approx(expected)


def test_links_of_the_splits_that_are_left_out_raise_the_ranks():
    splits = graph()
    scorer, rows = model("complex", False)
    table = TableInOrder(ArrayRows(rows))
    raw = LinkRanking(scorer, table, lambda: iter(splits[2:]), 2**26).scores(splits[2])
    filtered = LinkRanking(scorer, table, lambda: iter(splits), 2**26).scores(splits[2])
    assert raw == pytest.approx(wanted(brute(scorer, rows, splits[2:], splits[2])))
    assert raw["mrr"] < filtered["mrr"]
    none = LabelledLinks(*np.empty((3, 0), np.int64))
    assert LinkRanking(scorer, table, lambda: iter(splits), 2**26).scores(none) == {}


def test_candidates_of_a_side_are_those_that_are_allowed():
    splits = [LabelledLinks(part.head // 2, part.relation, 30 + part.tail // 2) for part in graph()]
    scorer, rows = model("simple", False)
    ranking = LinkRanking(
        scorer, TableInOrder(ArrayRows(rows)), lambda: iter(splits), 2**26, lambda ids: ids < 30, lambda ids: ids >= 30
    )
    forward = np.concatenate(list(ranking.ranks(splits[2])))
    backward = np.concatenate(list(ranking.ranks(splits[2], reverse=True)))
    assert np.sort(forward).tolist() == np.sort(brute(scorer, rows, splits, splits[2], range(30, 60))[::2]).tolist()
    assert np.sort(backward).tolist() == np.sort(brute(scorer, rows, splits, splits[2], range(30))[1::2]).tolist()


def test_a_sample_of_candidates_is_keyed_and_ranks_are_among_it():
    splits, (scorer, rows) = graph(), model("complex", False)
    table = SampledTable(TableInOrder(ArrayRows(rows)), {range(NODES)}, 10, key=5)
    (drawn, _), *_ = table.blocks()
    assert len(np.unique(drawn)) == 10
    found = LinkRanking(scorer, table, lambda: iter(splits), 2**26).scores(splits[2])
    assert found == pytest.approx(wanted(brute(scorer, rows, splits, splits[2], drawn)))
    other = SampledTable(TableInOrder(ArrayRows(rows)), {range(NODES)}, 10, key=6)
    assert next(other.blocks())[0].tolist() != drawn.tolist()


def test_samples_of_heads_and_of_tails_have_as_many_each():
    table = SampledTable(TableInOrder(ArrayRows(np.ones((NODES, WIDTH), np.float32))), {range(20), range(20, NODES)}, 8, key=5)
    drawn = np.concatenate([ids for ids, _ in table.blocks()])
    assert ((drawn < 20).sum(), (drawn >= 20).sum()) == (8, 8)


def test_known_answers_of_one_query_beyond_the_memory_are_one_line():
    hub = LabelledLinks(np.zeros(50, np.int64), np.zeros(50, np.int64), np.arange(50))
    scorer, rows = model("complex", False)
    ranking = LinkRanking(scorer, TableInOrder(ArrayRows(rows)), lambda: iter([hub]), 2**12)
    with pytest.raises(BudgetError, match="node 0 has 50 known links of relation 0, whose ranking takes"):
        ranking.scores(LabelledLinks(*(each[:1] for each in hub)))

"""Best answers and neighbors against sorting all scores."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.layerwise import filtered_ranks as module
from ooc.layerwise.best_answers import best_answers, nearest
from ooc.layerwise.filtered_ranks import Answers, TableInOrder
from ooc.models.link_scores import make_scorer
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import ConfigError, OocError
from tests.ooc.layerwise.test_filtered_ranks import Shuffled

WIDTH = 4


@given(st.integers(0, 10**6), st.sampled_from(["mf", "complex", "rotate"]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_best_are_those_of_a_sort_of_all_scores_and_then_of_ids(seed, name, shuffled):
    draw = np.random.default_rng(seed)
    nodes, count, k = int(draw.integers(1, 40)), int(draw.integers(0, 15)), int(draw.integers(1, 8))
    rows = draw.integers(-2, 3, (nodes, WIDTH)).astype(np.float32)
    scorer = make_scorer(name, WIDTH, 2, distance="squared" if name == "rotate" else None)
    query = torch.from_numpy(draw.integers(-2, 3, (count, WIDTH)).astype(np.float32))
    group, known = draw.integers(0, 4, count), Answers(draw.integers(0, 4, 20), draw.integers(0, nodes, 20))
    table = Shuffled(rows, seed) if shuffled else TableInOrder(ArrayRows(rows), at_once=7)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "QUERIES", 6)
        patched.setattr(module, "CANDIDATES", 5)
        found = best_answers(scorer, query, table, k, known=known, group=group, allowed=lambda ids: ids % 5 != 3)
    left_out = set(zip(known.group.tolist(), known.node.tolist(), strict=True))
    for i in range(count):
        score = scorer.score(query[i], torch.from_numpy(rows)).tolist()
        there = [n for n in range(nodes) if n % 5 != 3 and (group[i], n) not in left_out]
        wanted = sorted(there, key=lambda n: (-score[n], n))[:k]
        assert found.item[i].tolist() == wanted + [-1] * (k - len(wanted))
        np.testing.assert_array_equal(found.score[i, : len(wanted)], [score[n] for n in wanted])


@pytest.mark.parametrize("by", ["cosine", "dot", "l2"])
def test_neighbors_are_those_of_all_pairs_in_float64(by):
    rows = np.random.default_rng(0).normal(size=(200, WIDTH)).astype(np.float32)
    rows[7] = 0
    ids = np.array([0, 5, 199, 7])
    found = nearest(TableInOrder(ArrayRows(rows), at_once=60), ids, 6, by)
    exact = rows.astype(np.float64)
    if by == "cosine":
        exact /= np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), 1e-30)
    score = exact @ exact.T if by != "l2" else -np.linalg.norm(exact[:, None] - exact, axis=2)
    np.fill_diagonal(score, -np.inf)
    wanted = np.argsort(-score[ids], axis=1, kind="stable")[:, :6]
    np.testing.assert_array_equal(found.source, ids)
    np.testing.assert_array_equal(found.item, wanted)
    np.testing.assert_allclose(found.score, np.take_along_axis(score[ids], wanted, 1), atol=1e-5)


def test_what_does_not_fit_is_refused():
    table = TableInOrder(ArrayRows(np.full((3, WIDTH), np.nan, np.float32)))
    with pytest.raises(ConfigError, match="by = 'manhattan' is unknown"):
        nearest(table, np.array([0]), 1, "manhattan")
    with pytest.raises(ConfigError, match="k must be a whole number of 1 or more"):
        nearest(table, np.array([0]), 0, "dot")
    with pytest.raises(OocError, match="scored with NaN"):
        nearest(table, np.array([0]), 1, "dot")

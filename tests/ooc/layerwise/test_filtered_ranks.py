"""Filtered ranks against every candidate scored one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.layerwise import filtered_ranks as module
from ooc.layerwise.filtered_ranks import Answers, Queries, TableInOrder, filtered_ranks
from ooc.models.link_scores import make_scorer
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import OocError

WIDTH = 4


class Shuffled:
    """A table whose blocks are of nodes in another order and of uneven sizes."""

    def __init__(self, rows, seed):
        draw = np.random.default_rng(seed)
        self.rows, self.order = rows, draw.permutation(len(rows))
        self.cuts = np.sort(draw.integers(0, len(rows) + 1, 3))

    def read(self, ids):
        return self.rows[ids]

    def blocks(self):
        for ids in np.split(self.order, self.cuts):
            yield ids, self.rows[ids]


def brute(scorer, queries, rows, known, allowed):
    """(above, equal) of each query, one candidate at a time."""
    left_out = set(zip(known.group.tolist(), known.node.tolist(), strict=True))
    counts = []
    for query, true, group in zip(queries.query, queries.true, queries.group, strict=True):
        score = [scorer.score(query, torch.from_numpy(row)).item() for row in rows]
        others = [n for n in range(len(rows)) if n != true and (group, n) not in left_out and (allowed is None or n in allowed)]
        # The other true answers of the group are known to it.
        own = {t for t, g in zip(queries.true, queries.group, strict=True) if g == group}
        others = [n for n in others if n not in own]
        counts.append((sum(score[n] > score[true] for n in others), sum(score[n] == score[true] for n in others)))
    return np.array(counts, np.int64).reshape(-1, 2)


@given(st.integers(0, 10**6), st.sampled_from(["mf", "distmult", "complex", "transe", "rotate"]), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ranks_are_those_of_brute_force_to_the_integer(seed, name, shuffled, sampled):
    draw = np.random.default_rng(seed)
    nodes, count = int(draw.integers(2, 40)), int(draw.integers(0, 25))
    rows = draw.integers(-2, 3, (nodes, WIDTH)).astype(np.float32)  # exact in any order of addition, with many ties
    scorer = make_scorer(name, WIDTH, 2, distance="squared" if name in ("transe", "rotate") else None)
    query = torch.from_numpy(draw.integers(-2, 3, (count, WIDTH)).astype(np.float32))
    queries = Queries(query, draw.integers(0, nodes, count), draw.integers(0, 5, count))
    known = Answers(draw.integers(0, 5, 30), draw.integers(0, nodes, 30))
    allowed = set(draw.integers(0, nodes, nodes // 2 + 1).tolist()) if sampled else None
    among = None if allowed is None else lambda ids: np.isin(ids, list(allowed))
    table = Shuffled(rows, seed) if shuffled else TableInOrder(ArrayRows(rows), at_once=7)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "QUERIES", 6)
        patched.setattr(module, "CANDIDATES", 5)
        found = filtered_ranks(scorer, queries, table, known, among)
    wanted = brute(scorer, queries, rows, known, allowed)
    np.testing.assert_array_equal(found.above, wanted[:, 0])
    np.testing.assert_array_equal(found.equal, wanted[:, 1])
    np.testing.assert_array_equal(found.mean, 1 + wanted[:, 0] + wanted[:, 1] / 2)


def test_rows_that_are_equal_are_ties_although_products_of_tiles_round_otherwise(monkeypatch):
    monkeypatch.setattr(module, "QUERIES", 64)
    scorer, width, copies = make_scorer("mf", 33), 33, 5
    rows = torch.randn(100, width).repeat(copies, 1).numpy()
    queries = Queries(torch.randn(200, width), np.arange(200), np.arange(200))
    scored = scorer.score

    def rounded_otherwise(query, candidate):
        return scored(query, candidate) * (1 + 2e-7)

    monkeypatch.setattr(scorer, "score", rounded_otherwise)
    found = filtered_ranks(scorer, queries, TableInOrder(ArrayRows(rows)))
    wanted = (queries.query.double() @ torch.from_numpy(rows[:100]).double().t()).numpy()
    own = wanted[np.arange(200), np.arange(200) % 100]
    np.testing.assert_array_equal(found.above, copies * (wanted > own[:, None]).sum(1))
    np.testing.assert_array_equal(found.equal, copies - 1)


def test_a_table_on_disk_gives_the_ranks_of_one_in_memory(tmp_path):
    rows = np.random.default_rng(0).normal(size=(300, WIDTH)).astype(np.float32)
    scorer = make_scorer("complex", WIDTH, 1)
    queries = Queries(torch.randn(20, WIDTH), np.arange(20), np.zeros(20, np.int64))
    stored = DiskRows.create(tmp_path / "rows", rows.shape, "float32")
    try:
        stored.write(np.arange(300), rows)
        on_disk = filtered_ranks(scorer, queries, TableInOrder(stored, at_once=64))
    finally:
        stored.close()
    in_memory = filtered_ranks(scorer, queries, TableInOrder(ArrayRows(rows)))
    np.testing.assert_array_equal(on_disk.above, in_memory.above)
    part = filtered_ranks(scorer, queries, TableInOrder(ArrayRows(rows), 10, 20))
    assert (part.above <= 10).all()
    assert not part.equal.any()


def test_scores_that_are_nan_are_refused():
    rows = np.full((3, WIDTH), np.nan, np.float32)
    queries = Queries(torch.ones(1, WIDTH), np.array([0]), np.array([0]))
    with pytest.raises(OocError, match="scored with NaN"):
        filtered_ranks(make_scorer("mf", WIDTH), queries, TableInOrder(ArrayRows(rows)))

"""`RelabelTable` against a dict, and the order rows are given up in against a plain loop."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.graph.relabel import RelabelTable, by_last_use


@settings(deadline=None, max_examples=40)
@given(parts=st.lists(st.lists(st.integers(0, 2**62), max_size=60) | st.lists(st.integers(0, 9), max_size=60), max_size=6))
def test_the_union_numbers_nodes_as_they_come(parts):
    union, number = RelabelTable(), {}
    for part in parts:
        expected = [number.setdefault(v, len(number)) for v in part]
        assert union.add(np.array(part, np.int64)).tolist() == expected
    assert union.size == len(number)
    node, rank = union.ascending(union.size)
    assert node.tolist() == sorted(number)
    assert node[rank].tolist() == list(number)


@settings(deadline=None, max_examples=40)
@given(
    parts=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=60) | st.lists(st.integers(0, 9), max_size=60), max_size=6),
    expected=st.integers(0, 100),
)
def test_numbers_go_where_they_are_wanted(parts, expected):
    union, other = RelabelTable(expected), RelabelTable()
    for part in parts:
        number = np.full(len(part), -1, np.int64)
        assert union.add(np.array(part, np.int32), number) is number
        assert number.tolist() == other.add(np.array(part, np.int64)).tolist()
    assert union.nodes().tolist() == other.nodes().tolist()


def test_the_union_of_many_nodes():
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 30_000, 5000) for _ in range(12)]
    union = RelabelTable()
    positions = [union.add(part) for part in parts]
    node, rank = union.ascending(union.size)
    assert np.array_equal(node, np.unique(np.concatenate(parts)))
    for part, position in zip(parts, positions, strict=True):
        assert np.array_equal(node[rank[position]], part)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40))
def test_rows_are_given_up_after_their_last_use(rows):
    last = np.array([batch for batch, _ in rows], np.int32)
    going = np.array([0 if goes else -1 for _, goes in rows], np.int32)
    row, first = np.empty(int((going >= 0).sum()), np.int32), np.zeros(6, np.int64)
    by_last_use(last, going, row, first)
    for k in range(5):
        assert row[first[k] : first[k + 1]].tolist() == [i for i, (batch, goes) in enumerate(rows) if goes and batch == k]

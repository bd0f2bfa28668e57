"""Nodes drawn from buckets: which, and how often."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.sampling.bucket_draws import drawn_nodes


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 60), st.data())
@settings(max_examples=100, deadline=None)
def test_only_nodes_of_the_buckets_are_drawn(buckets: int, first: int, count: int, data: st.DataObject) -> None:
    own = data.draw(st.lists(st.integers(0, buckets - 1), min_size=1, unique=True))
    nodes = range(first, first + count)
    possible = {node for node in nodes if node % buckets in own}
    found = drawn_nodes(3, 500, np.array(own), buckets, nodes)
    assert set(found.tolist()) <= possible
    assert len(found) == (500 if possible else 0)


def test_draws_are_uniform_and_keyed() -> None:
    found = drawn_nodes(11, 60_000, np.array([1, 4, 5]), 6, range(7, 50))
    nodes, counts = np.unique(found, return_counts=True)
    assert set(nodes.tolist()) == {node for node in range(7, 50) if node % 6 in (1, 4, 5)}
    expected = 60_000 / len(nodes)
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()
    assert (found == drawn_nodes(11, 60_000, np.array([1, 4, 5]), 6, range(7, 50))).all()
    assert (found != drawn_nodes(12, 60_000, np.array([1, 4, 5]), 6, range(7, 50))).any()

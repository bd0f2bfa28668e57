"""Temporal sampling against a brute-force reference; nothing of the present or the future is seen."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.sampling.temporal_neighbor import TemporalSampler
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.graph import Graph

LAWS = settings(max_examples=150, deadline=None, derandomize=True)
N = 12


def graph_of(events: list[tuple[int, int, Any]], dtype: Any = np.int64) -> Graph:
    """A graph whose edge ids number its events, (source, destination, time), in time order."""
    src, dst = (np.array([event[k] for event in events], np.int64) for k in (0, 1))
    return Graph.from_edges(src, dst, N, time=np.array([event[2] for event in events], dtype))


EVENTS = st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, N - 1), st.integers(0, 9)), min_size=1, max_size=80).map(
    lambda events: sorted(events, key=lambda event: event[2])
)
QUERIES = st.lists(st.tuples(st.integers(0, N - 1), st.integers(-1, 11)), min_size=1, max_size=6)
FANOUT = st.lists(st.sampled_from([-1, 0, 1, 2, 5]), min_size=1, max_size=3)


def sampled(graph: Graph, queries: list[tuple[int, Any]], fanout: list[int], **settings_: Any) -> Any:
    nodes, times = np.array([q[0] for q in queries]), np.array([q[1] for q in queries])
    return TemporalSampler(graph, fanout, **settings_).sample(nodes, times, key=7)


@LAWS
@given(events=EVENTS, queries=QUERIES, fanout=FANOUT)
def test_the_latest_edges_are_the_reference(events: Any, queries: Any, fanout: Any) -> None:
    """Each entry's edges are the last ones strictly before its time, in time order, ties by edge id."""
    found = sampled(graph_of(events), queries, fanout)
    assert found.node[: len(queries)].tolist() == [q[0] for q in queries]
    assert found.query[: len(queries)].tolist() == list(range(len(queries)))
    entries, at = [(n, t, k) for k, (n, t) in enumerate(queries)], 0
    edge_id = graph_of(events).edge_ids(found.slot)
    for hop, most in enumerate(fanout):
        following = []
        for node, time, query in entries:
            past = [(k, s, t) for k, (s, d, t) in enumerate(events) if d == node and t < time]
            wanted = past if most < 0 else past[max(0, len(past) - most) :]
            edges = slice(at, at + len(wanted))
            assert edge_id[edges].tolist() == [k for k, _, _ in wanted]
            source = found.source[edges]
            assert found.node[source].tolist() == [s for _, s, _ in wanted]
            assert found.time[source].tolist() == [t for _, _, t in wanted]
            assert (found.query[source] == query).all()
            at += len(wanted)
            following += [(s, t, query) for _, s, t in wanted]
        assert found.num_edges[hop] == found.num_nodes[hop + 1] == len(following)
        entries = following
    assert at == len(found.source)
    assert found.indptr[-1] == at
    assert len(found.indptr) == sum(found.num_nodes[:-1]) + 1


@LAWS
@given(events=EVENTS, queries=QUERIES, fanout=FANOUT)
def test_uniform_draws_are_of_the_past_and_distinct(events: Any, queries: Any, fanout: Any) -> None:
    graph = graph_of(events)
    found = sampled(graph, queries, fanout, temporal_strategy="uniform")
    target = np.repeat(np.arange(len(found.indptr) - 1), np.diff(found.indptr))
    edge_id = graph.edge_ids(found.slot)
    assert (found.time[found.source] < found.time[target]).all()
    for i in range(len(found.indptr) - 1):
        hop = int(np.searchsorted(np.cumsum(found.num_nodes), i, side="right"))
        mine = edge_id[found.indptr[i] : found.indptr[i + 1]].tolist()
        past = [k for k, (_, d, t) in enumerate(events) if d == found.node[i] and t < found.time[i]]
        assert set(mine) <= set(past)
        assert mine == sorted(set(mine))
        assert len(mine) == (len(past) if fanout[hop] < 0 else min(fanout[hop], len(past)))


@LAWS
@given(
    events=EVENTS,
    future=EVENTS,
    queries=QUERIES,
    fanout=FANOUT,
    temporal_strategy=st.sampled_from(["last", "uniform"]),
    now=st.integers(0, 9),
)
def test_the_future_changes_nothing(
    events: Any, future: Any, queries: Any, fanout: Any, temporal_strategy: Any, now: int
) -> None:
    """Whatever happens from `now` on: what is drawn for times up to it is the same, to the bit."""
    past = [event for event in events if event[2] < now]
    early = [(node, min(time, now)) for node, time in queries]
    found = []
    for later in ([], future):
        graph = graph_of([*past, *((s, d, t + now) for s, d, t in later)] or [(0, 0, now)])
        one = sampled(graph, early, fanout, temporal_strategy=temporal_strategy)
        found.append((one.node, one.time, one.source, one.indptr, graph.edge_ids(one.slot), one.num_nodes))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_set_is_drawn_alike() -> None:
    events = [(k, 11, k) for k in range(6)]
    graph, counts = graph_of(events), np.zeros(6)
    sampler = TemporalSampler(graph, [2], "uniform")
    for key in range(3000):
        counts[sampler.sample(np.array([11]), np.array([5]), key).node[1:]] += 1
    assert counts[5] == 0
    np.testing.assert_allclose(counts[:5], 1200, atol=110)  # five deviations


def test_times_that_are_fractions() -> None:
    graph = graph_of([(1, 0, 0.5), (2, 0, 0.75), (3, 0, 1.5)], np.float64)
    assert sampled(graph, [(0, 0.75), (0, 0.76)], [-1]).node.tolist() == [0, 0, 1, 1, 2]
    whole = graph_of([(1, 0, 2), (2, 0, 3)])
    assert sampled(whole, [(0, 2.5), (0, 3.0)], [-1]).node.tolist() == [0, 0, 1, 1]


def test_what_does_not_fit_is_refused() -> None:
    graph = graph_of([(1, 0, 1)] * 50)
    with pytest.raises(BudgetError, match=r"hop 1 of fan-out \[-1\] makes 51 queries"):
        sampled(graph, [(0, 2)], [-1], max_bytes=500)
    with pytest.raises(InputError, match=r"query 1 asks about node 12: the graph has nodes 0\.\.11"):
        sampled(graph, [(0, 2), (12, 2)], [-1])
    with pytest.raises(InputError, match="nodes and a time each"):
        TemporalSampler(graph, [1]).sample(np.array([1, 2]), np.array([1]), 0)
    with pytest.raises(ConfigError, match="have no times"):
        TemporalSampler(Graph.from_edges([0], [1], 2), [1])
    with pytest.raises(ConfigError, match="temporal_strategy 'first' is unknown"):
        TemporalSampler(graph, [1], "first")  # type: ignore[arg-type]

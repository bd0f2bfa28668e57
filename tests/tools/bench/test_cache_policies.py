"""Cache policies beside plain ones: an OrderedDict, a list with a hand, and trying every choice."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.loading.read_strategy import ReadStrategy
from tools.bench.sampled import cache_policies as policies
from tools.bench.sampled.trace import Trace
from tools.bench.sampled.trace import settings as trace_settings

TRACES = st.lists(st.integers(0, 11), max_size=60)
SHORT = st.lists(st.integers(0, 5), max_size=11)
CAPACITIES = st.integers(1, 9)


def plain_lru(trace: list[int], capacity: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for v in trace:
        if v in held:
            held.move_to_end(v)
            continue
        misses += 1
        if len(held) == capacity:
            held.popitem(last=False)
        held[v] = None
    return misses


def plain_sieve(trace: list[int], capacity: int) -> int:
    """As in the paper's figure: a list from the oldest to the newest, a bit each, and a hand."""
    queue: list[list[int]] = []
    hand, misses = 0, 0
    for v in trace:
        found = next((entry for entry in queue if entry[0] == v), None)
        if found:
            found[1] = 1
            continue
        misses += 1
        if len(queue) == capacity:
            while queue[hand % len(queue)][1]:
                queue[hand % len(queue)][1] = 0
                hand = hand % len(queue) + 1
            hand %= len(queue)
            del queue[hand]
            if hand == len(queue):
                hand = 0  # past the newest: the next time from the oldest, not from the one that comes now
        queue.append([v, 0])
    return misses


def fewest_misses(trace: list[int], capacity: int) -> int:
    """Over all choices of what to give up."""

    @cache
    def least(at: int, held: frozenset[int]) -> int:
        if at == len(trace):
            return 0
        v = trace[at]
        if v in held:
            return least(at + 1, held)
        if len(held) < capacity:
            return 1 + least(at + 1, held | {v})
        return 1 + min(least(at + 1, held - {gone} | {v}) for gone in held)

    return least(0, frozenset())


@settings(deadline=None)
@given(TRACES, CAPACITIES)
def test_lru_is_an_ordered_dict(trace: list[int], capacity: int) -> None:
    assert policies.lru(np.array(trace, np.int32), 12, capacity) == plain_lru(trace, capacity)


@settings(deadline=None, max_examples=300)
@given(TRACES, CAPACITIES)
def test_sieve_is_a_list_with_a_hand(trace: list[int], capacity: int) -> None:
    assert policies.sieve(np.array(trace, np.int32), 12, capacity) == plain_sieve(trace, capacity)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(SHORT, st.integers(1, 5))
def test_belady_misses_least(trace: list[int], capacity: int) -> None:
    assert policies.belady(np.array(trace, np.int32), 6, capacity) == fewest_misses(trace, capacity)


def test_belady_on_a_long_trace_is_the_plain_rule() -> None:
    """More than 64**2 accesses, so that the set of keys has three levels."""
    trace = np.random.default_rng(0).zipf(1.3, 9000).astype(np.int32) % 500
    held: dict[int, int] = {}
    after = policies.next_uses(trace, 500).tolist()
    misses = 0
    for t, v in enumerate(trace.tolist()):
        if v not in held:
            misses += 1
            if len(held) == 60:
                del held[max(held, key=held.__getitem__)]
        held[v] = after[t]
    assert policies.belady(trace, 500, 60) == misses
    assert misses <= min(policies.lru(trace, 500, 60), policies.sieve(trace, 500, 60))


@pytest.fixture(scope="module")
def strategy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadStrategy]:
    from tools.bench.lib.stores import make_store

    store: Path = tmp_path_factory.mktemp("policies") / "graph.ooc"
    make_store(store, nodes=300, edges=1500, width=4, kind="rmat", seed=1)
    with Trace.of(store, trace_settings(store, "3,2", 6, 10, 0)) as trace:
        yield trace.strategy


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=15), st.integers(8, 60))
def test_look_ahead_lies_between_belady_and_none(strategy: ReadStrategy, sets: list[set[int]], capacity: int) -> None:
    batches = [np.array(sorted(each), np.int32) for each in sets]
    ratios = policies.miss_ratios(batches, 41, capacity, strategy)
    assert ratios["none"] == 1
    assert all(ratios["Belady"] <= ratios[name] <= 1 for name in ("LRU", "SIEVE", "look-ahead"))
    if capacity >= 41 + 8:  # one window
        assert ratios["look-ahead"] == ratios["Belady"]


def test_look_ahead_with_room_for_all_reads_each_row_once(strategy: ReadStrategy) -> None:
    batches = [np.array([1, 2, 3], np.int32), np.array([3, 4], np.int32), np.array([1, 9], np.int32)]
    assert policies.look_ahead(batches, strategy, 20) == 5
    assert policies.look_ahead(batches, strategy, 2) is None  # the first batch does not fit

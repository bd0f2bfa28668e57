"""What keeps a mapped topology small: parts touched are counted, whoever touches them. And when it is read ahead."""

import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.graph.blocks import Subgraph
from ooc.graph.mapped_topology import MappedRanges, Topology, _parts
from ooc.stores.graph import Graph
from ooc.stores.jit import load_numba
from tests.forked import in_child

PART = 2**14


def graph_of(degree: list[int]) -> Graph:
    indptr = np.concatenate([[0], np.cumsum(degree)])
    num_edges = int(indptr[-1])
    return Graph.from_arrays(indptr, np.zeros(num_edges, np.int32), {"weight": np.ones(num_edges, np.float32)})


def subgraph_of(slot: list[int], node: int = 0) -> Subgraph:
    slots = np.array(slot, np.int64)
    ends = np.array([0, len(slot)])
    return Subgraph(np.array([node]), ends, np.zeros(len(slot), np.int64), slots, (1, 0), (len(slot),))


def counting_forgets(graph: Graph, monkeypatch) -> list[Graph]:
    forgotten: list[Graph] = []
    monkeypatch.setattr(Graph, "forget", lambda self: forgotten.append(self))
    return forgotten


def test_slots_are_given_back_once_past_the_bound_by_all_loaders_together(monkeypatch):
    graph = graph_of([4 * PART])
    forgotten = counting_forgets(graph, monkeypatch)
    part_bytes = graph.mapped_bytes(["weight"]) // 4
    assert part_bytes == PART * 8  # int32 indices and float32 weights
    one, other = (Topology(graph, None, 2 * part_bytes, 0, columns=["weight"]) for _ in range(2))
    for _ in range(3):
        one.trim(subgraph_of([0, 5, PART - 1]))
        other.trim(subgraph_of([PART]))
    assert forgotten == []
    one.trim(subgraph_of([2 * PART]))
    assert forgotten == [graph]
    other.trim(subgraph_of([0, PART]))  # counted anew
    assert forgotten == [graph]
    Topology(graph_of([4 * PART]), None, 2 * part_bytes, 0, columns=["weight"]).trim(
        subgraph_of([0])
    )  # another graph's count is its own
    assert forgotten == [graph]


def test_a_topology_that_fits_is_never_given_back(monkeypatch):
    graph = graph_of([3 * PART + 1])
    forgotten = counting_forgets(graph, monkeypatch)
    topology = Topology(graph, None, graph.mapped_bytes([]), 0)
    topology.trim(subgraph_of([0, PART, 2 * PART, 3 * PART]))
    assert forgotten == []


@pytest.mark.parametrize("how", [{"weight": "weight"}, {"weight": None, "all_in_edges": True}])
def test_draws_by_weight_and_by_source_touch_every_slot_of_the_nodes_they_expand(monkeypatch, how):
    graph = graph_of([4 * PART, 10])
    forgotten = counting_forgets(graph, monkeypatch)
    topology = Topology(graph, max_mapped=2 * PART * 8, max_warm=0, **how)
    topology.trim(subgraph_of([4 * PART], node=1))
    assert forgotten == []
    topology.trim(subgraph_of([0], node=0))
    assert forgotten == [graph]


@pytest.mark.parametrize("begun", [True, False])
def test_it_is_read_once_in_a_thread_that_the_first_batch_waits_for(monkeypatch, begun):
    started, goes_on, reads = threading.Event(), threading.Event(), []

    def read(self, weight):
        started.set()
        assert goes_on.wait(60)
        reads.append(weight)
        return 8

    monkeypatch.setattr(Graph, "warm", read)
    topology = Topology(graph_of([3]), "weight", 0, max_warm=PART)
    if begun:
        topology.begin()
        topology.begin()
        assert started.wait(60)
    first = threading.Thread(target=topology.warm)
    first.start()
    assert started.wait(60)
    assert reads == []
    assert first.is_alive()
    goes_on.set()
    first.join(60)
    topology.begin()
    topology.warm()
    assert reads == ["weight"]


def test_every_batch_says_what_could_not_be_read_until_it_can(monkeypatch):
    texts = "a sector is broken", "another one"
    left = list(texts)

    def read(self, weight):
        if left:
            raise OSError(left.pop(0))
        return 8

    monkeypatch.setattr(Graph, "warm", read)
    topology = Topology(graph_of([3]), None, 0, max_warm=PART)
    topology.begin()
    for text in texts:
        with pytest.raises(OSError, match=text):
            topology.warm()
    topology.warm()


def test_it_is_read_by_the_caller_where_there_is_no_thread_left(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    reads = []
    monkeypatch.setattr(Graph, "warm", lambda self, weight: reads.append(weight) or 8)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    Topology(graph_of([3]), None, 0, max_warm=PART).warm()
    assert reads == [None]


def test_a_child_process_reads_what_its_parent_was_reading(monkeypatch):
    started, goes_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def read(self, weight):
        started.set()
        assert os.getpid() != parent or goes_on.wait(60)
        return 8

    monkeypatch.setattr(Graph, "warm", read)
    load_numba()  # which has a lock of its own
    topology = Topology(graph_of([3]), None, 0, max_warm=PART)
    topology.begin()
    waiting = threading.Thread(target=topology.warm)  # has the lock
    waiting.start()
    assert started.wait(60)
    assert in_child(topology.warm) == 0
    goes_on.set()
    waiting.join(60)


def test_a_child_process_records_slots_while_its_parent_does():
    topology = Topology(graph_of([3]), None, 1 << 30, max_warm=PART)

    def record() -> None:
        signal.alarm(30)  # ends a process that waits for ever
        topology.trim_edges(np.array([0]), np.array([0]))
        Topology(graph_of([3]), None, 0, max_warm=PART)

    with topology._touched._lock:
        assert in_child(record) == 0


@given(st.lists(st.tuples(st.integers(0, 5 * PART), st.integers(0, 3 * PART)), max_size=8))
def test_parts_are_those_of_the_ranges(ranges):
    first = np.array([begin for begin, _ in ranges], np.int64)
    size = np.array([size for _, size in ranges], np.int64)
    wanted = {slot // PART for begin, size in ranges for slot in (*range(begin, begin + size, PART), begin + size - 1) if size}
    assert set((_parts(first, first + size) // PART).tolist()) == wanted


@pytest.mark.parametrize("wrong", [-1, 3 * PART])
def test_slots_that_are_not_there_are_refused(wrong):
    """The last part is counted whole."""
    touched = MappedRanges(Graph.from_arrays(np.array([0, 2 * PART + 1]), np.zeros(2 * PART + 1, np.int64)))
    slots = np.array([0, PART - 1, PART, 2 * PART])
    assert [touched.add(slots[: stop + 1], 2) for stop in range(4)] == [False, False, False, True]
    with pytest.raises(IndexError, match="a slot is not there"):
        touched.add(np.array([0, wrong]), 3)

"""The division of memory: nothing is given twice, and what does not fit is refused with a number that does."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.runtime.memory_plan import LEAST_BATCH, RUNTIME_BYTES, BatchRoom, TopologyBytes, divide, words_for
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_bytes, parse_bytes

sizes = st.integers(0, 2**38)


def named_bytes(message: str) -> float:
    """What a refusal says is needed; the parts it lists add up to that."""
    *parts, total = re.findall(r" ([0-9.]+ [kMGT]?B)\b", message.split(": ", 1)[1].split(";")[0])
    size = parse_bytes(total)
    assert sum(map(parse_bytes, parts)) == pytest.approx(size, rel=0.02)
    return size


def advised_in(message: str) -> int:
    return parse_bytes(re.search(r"at least (.*)$", message)[1])


def refusal(memory: int, **parts: Any) -> str:
    """What is said where the memory is refused; else nothing."""
    try:
        divide(memory, **parts)
    except BudgetError as error:
        return str(error)
    return ""


@given(memory=st.integers(1, 2**40), baseline=sizes, topology=sizes, labels=sizes, model=sizes, scratch=sizes)
def test_the_parts_never_exceed_the_whole(memory, baseline, topology, labels, model, scratch):
    parts = {"baseline": baseline, "topology": topology, "labels": labels, "model": model, "scratch": scratch}
    fixed = sum(parts.values()) + RUNTIME_BYTES
    if message := refusal(memory, **parts):
        assert memory - fixed < 5 * LEAST_BATCH
        assert named_bytes(message) == pytest.approx(fixed + 5 * LEAST_BATCH, rel=0.02)
        assert divide(advised_in(message), **parts).max_batch >= LEAST_BATCH
        return
    budget = divide(memory, **parts)
    used = fixed + budget.in_flight + 3 * budget.max_batch  # at the model, sampled ahead, activations
    assert memory - 5 < used <= memory
    assert LEAST_BATCH <= budget.max_batch <= budget.in_flight


def test_the_table_names_every_part():
    table = str(divide(2 * 10**9, baseline=6 * 10**8, topology=10**8, labels=5 * 10**7, model=10**6, origin="(--memory)"))
    assert table.splitlines()[0].split() == ["memory", "(--memory)", "2", "GB"]
    assert "topology" in table
    assert "100 MB" in table
    assert "model" in table


def test_the_refusal_names_what_stays():
    with pytest.raises(
        BudgetError, match=r"500 MB of memory leaves nothing .* process 600 MB, labels 64 MB, libraries 190 MB and .* at least"
    ):
        divide(5 * 10**8, baseline=6 * 10**8, labels=64 * 10**6)


@given(
    memory=st.integers(10**9, 10**11),
    baseline=st.integers(0, 5 * 10**8),
    parts=st.sampled_from([1, 2, 4, 5]),
    need=st.integers(1, 10**11),
)
def test_the_memory_that_a_refusal_names_would_do(memory: int, baseline: int, parts: int, need: int) -> None:
    def room(memory: int) -> BatchRoom:
        budget = divide(memory, baseline=baseline)
        return BatchRoom(budget.batches // parts, parts, budget)

    own = room(memory)
    words = words_for(max(need, own + 1), own)
    enough = re.search(r"about ([0-9.]+) (\w+) would do", words)
    assert enough is not None
    assert room(parse_bytes("".join(enough.groups()))) >= max(need, own + 1)
    assert f" of {format_bytes(own)} (" in words


def test_a_bound_that_is_a_number_is_named_alone() -> None:
    assert words_for(2_000_000, 1_000_000) == "2 MB of 1 MB"


graphs = st.builds(TopologyBytes, st.integers(0, 10**9), st.integers(0, 10**12), st.integers(0, 10**12))


@given(memory=st.integers(1, 10**10), graph=graphs, model=st.integers(0, 10**9))
def test_a_topology_that_grows_with_the_memory_is_part_of_what_would_do(memory: int, graph: TopologyBytes, model: int) -> None:
    stays = {"baseline": 5 * 10**8, "model": model}
    if not (message := refusal(memory, topology=graph, **stays)):
        return
    least, advised = named_bytes(message), advised_in(message)
    assert least < advised < 1.04 * least
    assert not refusal(advised, topology=graph, **stays)
    assert refusal(max(memory, int(0.99 * least)), topology=graph, **stays)


@given(memory=st.integers(10**9, 10**10), nbytes=st.integers(0, 10**10))
def test_tables_that_take_a_quarter_at_most_are_in_ram_whole(memory: int, nbytes: int) -> None:
    plan = divide(memory, baseline=10**8)
    beside = plan.beside_tables(nbytes)
    if nbytes > plan.batches // 4:
        assert beside == plan.beside_history()
        assert beside.table_rows == beside.states // 2
        return
    assert nbytes <= beside.table_rows <= nbytes + 4
    assert beside.batches + beside.table_rows == plan.batches


@given(memory=st.integers(10**9, 10**10), graph=graphs, states=st.booleans(), need=st.integers(1, 10**11))
def test_what_would_do_counts_the_topology_and_the_state_of_nodes(
    memory: int, graph: TopologyBytes, states: bool, need: int
) -> None:
    graph = replace(graph, indptr=graph.indptr % 10**8)

    def room(memory: int) -> BatchRoom:
        budget = divide(memory, baseline=10**8, topology=graph)
        return budget.beside_history().batch if states else budget.batch

    own = room(memory)
    need = max(need, own + 1)
    words = words_for(need, own)
    assert ("beside the state of nodes" in words) == states
    enough = parse_bytes("".join(re.search(r"about ([0-9.]+) (\w+) would do", words).groups()))
    assert room(enough) >= need

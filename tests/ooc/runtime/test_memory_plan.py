"""The division of memory: nothing is given twice, and what does not fit is refused with a number that does."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ooc.runtime.memory_plan import LEAST_BATCH, RUNTIME_BYTES, BatchRoom, divide, words_for
from ooc.stores.errors import BudgetError
from ooc.stores.sizes import format_bytes, parse_bytes

sizes = st.integers(0, 2**38)


@given(memory=st.integers(1, 2**40), baseline=sizes, topology=sizes, labels=sizes, model=sizes, scratch=sizes)
def test_the_parts_never_exceed_the_whole(memory, baseline, topology, labels, model, scratch):
    parts = {"baseline": baseline, "topology": topology, "labels": labels, "model": model, "scratch": scratch}
    fixed = sum(parts.values()) + RUNTIME_BYTES
    try:
        budget = divide(memory, **parts)
    except BudgetError as error:
        assert memory - fixed < 5 * LEAST_BATCH
        advised = parse_bytes(re.search(r"at least (.*)$", str(error))[1])
        assert divide(advised, **parts).max_batch >= LEAST_BATCH
        return
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
        BudgetError, match=r"500 MB of memory leaves nothing .* process 600 MB, labels 64 MB, libraries 150 MB .* at least"
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

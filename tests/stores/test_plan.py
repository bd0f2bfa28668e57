"""Laws of the read planner, and the plan against a brute-force one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stores.plan import ReadPlan, gap_for, plan_reads

REQUESTS = st.fixed_dictionaries(
    {
        "ids": st.lists(st.integers(0, 999), max_size=60),
        "row_bytes": st.sampled_from([1, 3, 8, 100, 512, 516, 4096, 5732, 9000]),
        "gap_bytes": st.sampled_from([0, 1, 4096, 20_000]),
        "max_extent_bytes": st.sampled_from([1, 4096, 30_000, 2**20]),
    }
)


def plan_of(request: dict[str, Any], **more: Any) -> tuple[np.ndarray[Any, Any], ReadPlan]:
    ids = np.array(request["ids"], np.int64)
    options = {key: value for key, value in request.items() if key != "ids"}
    return ids, plan_reads(ids, count=1000, **options, **more)


def reference(request: dict[str, Any], alignment: int = 4096) -> list[tuple[int, int]]:
    """(offset, end) of the extents, by the rules in words: sort, widen to pages, merge what is near."""
    size, extents = request["row_bytes"], list[tuple[int, int]]()
    for row in sorted(set(request["ids"])):
        low, high = row * size // alignment * alignment, -(-(row + 1) * size // alignment) * alignment
        if extents:
            begin, end = extents[-1]
            near = low - end <= request["gap_bytes"] and high - begin <= request["max_extent_bytes"]
            if low < end or near:
                extents[-1] = begin, max(end, high)
                continue
        extents.append((low, high))
    return extents


@given(REQUESTS)
@settings(max_examples=150, deadline=None)
def test_extents_are_those_of_the_reference(request: dict[str, Any]) -> None:
    _, plan = plan_of(request)
    assert list(zip(plan.offset.tolist(), (plan.offset + plan.length).tolist(), strict=True)) == reference(request)


@given(REQUESTS, st.sampled_from([512, 4096]))
@settings(max_examples=150, deadline=None)
def test_laws(request: dict[str, Any], alignment: int) -> None:
    ids, plan = plan_of(request, alignment=alignment)
    end = plan.offset + plan.length
    assert (plan.offset % alignment == 0).all()
    assert (plan.length % alignment == 0).all()
    assert (plan.length > 0).all()
    assert (plan.offset[1:] >= end[:-1]).all()  # sorted and disjoint
    assert plan.nbytes == sum(plan.length.tolist())
    # Every wanted row is served exactly once, whole, by the extent that says so.
    assert sorted(plan.order.tolist()) == list(range(len(ids)))
    assert plan.first[0] == 0
    assert plan.first[-1] == len(ids)
    assert (np.diff(plan.first) > 0).all()  # no extent that nobody wants
    at = np.concatenate([[0], np.cumsum(plan.length)])
    for j in range(len(plan.length)):
        for i in plan.order[plan.first[j] : plan.first[j + 1]]:
            virtual = ids[i] * plan.row_bytes
            assert plan.row_at[i] - at[j] == virtual - plan.offset[j]
            assert plan.offset[j] <= virtual
            assert virtual + plan.row_bytes <= end[j]


@given(REQUESTS)
@settings(max_examples=60, deadline=None)
def test_concatenated_extents_hold_the_rows(request: dict[str, Any]) -> None:
    ids, plan = plan_of(request)
    size = request["row_bytes"]
    data = np.random.default_rng(0).integers(0, 256, 1000 * size + 4096).astype(np.uint8)
    parts = [data[o : o + n] for o, n in zip(plan.offset.tolist(), plan.length.tolist(), strict=True)]
    buffer = np.concatenate([np.empty(0, np.uint8), *parts])
    for i, row in enumerate(ids.tolist()):
        at = plan.row_at[i]
        np.testing.assert_array_equal(buffer[at : at + size], data[row * size : (row + 1) * size])


def test_a_wanted_whole_file_is_a_sequential_scan() -> None:
    ids = np.random.default_rng(0).permutation(8192)
    plan = plan_reads(ids, 512, count=8192, max_extent_bytes=2**20)
    assert plan.length.tolist() == [2**20] * 4


def test_rows_beyond_two_to_the_31_bytes() -> None:
    ids = np.array([2**40, 5, 2**40 + 1])
    plan = plan_reads(ids, 512, count=2**41, gap_bytes=0)
    assert plan.offset.tolist() == [0, 2**49]
    assert plan.row_at.tolist() == [4096, 5 * 512, 4096 + 512]


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_out_of_range_is_named(bad: int) -> None:
    with pytest.raises(IndexError, match=f"row {bad} is out of range: there are 10 rows"):
        plan_reads(np.array([0, bad]), 8, count=10)


@pytest.mark.parametrize("row_bytes", [512, 4096, 20_480])
def test_the_gap_grows_where_a_quarter_of_the_pages_is_wanted(row_bytes):
    count = 4096
    pages, pages_a_row = count * row_bytes // 4096, max(1, row_bytes // 4096)
    dense = pages // 4 // pages_a_row
    gaps = [gap_for(4096, wanted, row_bytes, count) for wanted in (1, dense - 1, dense, count)]
    assert gaps == [4096, 4096, 16384, 16384]
    assert gap_for(0, count, row_bytes, count) == 0

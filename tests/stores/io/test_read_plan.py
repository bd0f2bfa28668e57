"""Laws of the read planner, and the plan against a brute-force one."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.io.read_plan import DEFAULT_COST, GAP_BYTES, MOST_EXTRA, ReadCost, ReadPlan, plan_by_cost, plan_reads

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


COSTS = st.builds(
    ReadCost,
    read_s=st.sampled_from([0.0, 1e-7, 8e-6, 1e-4, 1e-2]),
    byte_s=st.sampled_from([1e-12, 1e-10, 0.625e-9, 1e-8, 1e-6]),
    latency_s=st.sampled_from([0.0, 5e-5, 1e-2]),
)
ROUNDING = 1 + 1e-9


def seconds_of(cost: ReadCost, lengths: list[int]) -> float:
    """The cost of extents, term by term."""
    return max(cost.latency_s, sum(cost.read_s + length * cost.byte_s for length in lengths)) if lengths else 0.0


def wanted_pages(ids: list[int], row_bytes: int) -> list[int]:
    return sorted({page for row in ids for page in range(row * row_bytes // 4096, -(-(row + 1) * row_bytes // 4096))})


def pages_a_row(row_bytes: int) -> int:
    """The most pages that a row lies on."""
    return max(-(-(row + 1) * row_bytes // 4096) - row * row_bytes // 4096 for row in range(4096))


@given(REQUESTS, COSTS)
@settings(max_examples=150, deadline=None)
def test_the_prediction_is_the_sum_over_extents(request: dict[str, Any], cost: ReadCost) -> None:
    _, plan = plan_of(request)
    assert cost.seconds(plan.length) == pytest.approx(seconds_of(cost, plan.length.tolist()), rel=1e-9)


@given(REQUESTS, COSTS)
@settings(max_examples=300, deadline=None)
def test_a_plan_never_costs_more_than_page_by_page_or_a_scan(request: dict[str, Any], cost: ReadCost) -> None:
    _, plan = plan_of({**request, "gap_bytes": cost.gap_bytes})
    predicted = cost.seconds(plan.length)
    pages = wanted_pages(request["ids"], request["row_bytes"])
    assert predicted <= seconds_of(cost, [4096] * len(pages)) * ROUNDING
    # A scan in reads of the largest extent; as extents hold whole rows, less what a row has beyond one page.
    most = request["max_extent_bytes"] // 4096 - pages_a_row(request["row_bytes"]) + 1
    all_pages = 1000 * request["row_bytes"] // 4096 + 1
    for scan in (pages[-1] - pages[0] + 1 if pages else 0, all_pages):
        step = max(1, most)
        reads = [min(step, scan - first) * 4096 for first in range(0, scan, step)]
        assert predicted <= seconds_of(cost, reads) * ROUNDING


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.sampled_from([512, 4096, 5732]),
    COSTS,
)
@settings(max_examples=150, deadline=None)
def test_no_other_choice_of_extents_costs_less(ids: list[int], row_bytes: int, cost: ReadCost) -> None:
    plan = plan_reads(np.array(ids), row_bytes, count=41, gap_bytes=cost.gap_bytes, max_extent_bytes=2**40)
    pages = wanted_pages(ids, row_bytes)
    cheapest = [0.0]  # of the first k pages, over every way to cut them into extents
    for last in range(len(pages)):
        ways = [
            cheapest[first] + cost.read_s + (pages[last] - pages[first] + 1) * 4096 * cost.byte_s for first in range(last + 1)
        ]
        cheapest.append(min(ways))
    assert cost.seconds(plan.length) <= max(cost.latency_s, cheapest[-1]) * ROUNDING


@given(REQUESTS, st.sampled_from([0.0, 0.2, 0.6, 3.0]))
@settings(max_examples=300, deadline=None)
def test_no_more_than_some_is_read_over_and_the_smallest_gaps_first(request: dict[str, Any], most_extra: float) -> None:
    request = {**request, "max_extent_bytes": 2**40}
    ids, plan = plan_of(request, most_extra=most_extra)
    pages = wanted_pages(request["ids"], request["row_bytes"])
    assert plan.nbytes <= (1 + most_extra) * 4096 * len(pages) * ROUNDING
    found = [plan.row_at[np.flatnonzero(ids == row)[0]] for row in set(request["ids"])]
    _, whole = plan_of({**request, "gap_bytes": 2**40})
    base = np.concatenate([np.arange(o, o + n) for o, n in zip(plan.offset, plan.length, strict=True)]) if len(ids) else None
    for row, at in zip(set(request["ids"]), found, strict=True):
        assert base is not None
        assert base[at] == row * request["row_bytes"]  # each row is still where the plan says
    gaps = sorted(4096 * (b - a - 1) for a, b in pairwise(pages) if 0 < 4096 * (b - a - 1) <= request["gap_bytes"])
    runs = 1 + sum(b - a > 1 for a, b in pairwise(pages)) if pages else 0
    affordable = int((np.cumsum(gaps) <= int(most_extra * 4096 * len(pages))).sum())
    assert len(plan.length) == runs - affordable
    assert whole.nbytes == (4096 * (pages[-1] - pages[0] + 1) if pages else 0)


@given(REQUESTS, COSTS)
@settings(max_examples=300, deadline=None)
def test_by_cost_it_is_no_dearer_than_page_by_page_or_a_scan(request: dict[str, Any], cost: ReadCost) -> None:
    size = request["row_bytes"]
    plan = plan_by_cost(np.array(request["ids"], np.int64), size, cost, count=1000)
    pages = wanted_pages(request["ids"], size)
    assert cost.seconds(plan.length) <= seconds_of(cost, [4096] * len(pages)) * ROUNDING
    span = 4096 * (pages[-1] - pages[0] + 1) if pages else 0
    assert cost.seconds(plan.length) <= seconds_of(cost, [min(2**20, span - at) for at in range(0, span, 2**20)]) * ROUNDING
    scan = plan_reads(np.array(request["ids"], np.int64), size, count=1000, gap_bytes=2**62)
    assert plan.nbytes <= (1 + MOST_EXTRA) * 4096 * len(pages) * ROUNDING or plan.length.tolist() == scan.length.tolist()


def test_the_gap_is_where_a_read_costs_as_much_as_its_bytes() -> None:
    assert ReadCost(read_s=1.0, byte_s=1 / 8192).gap_bytes == 8192
    assert ReadCost(read_s=1.0, byte_s=1 / 8191).gap_bytes == 4096
    assert ReadCost(read_s=0.0, byte_s=1e-9).gap_bytes == 0
    assert ReadCost(read_s=1e3, byte_s=1e-300).gap_bytes == 2**60
    assert GAP_BYTES == DEFAULT_COST.gap_bytes == 12_288


def test_dense_rows_are_scanned_and_sparse_ones_are_not() -> None:
    generator = np.random.default_rng(0)
    dense = plan_reads(generator.choice(80_000, 40_000, replace=False), 512, count=80_000, gap_bytes=GAP_BYTES)
    sparse = plan_reads(generator.choice(80_000, 100, replace=False), 512, count=80_000, gap_bytes=GAP_BYTES)
    assert len(dense.length) == 40  # 10,000 pages in extents of 256
    assert sparse.nbytes < 200 * 4096


@pytest.mark.parametrize("values", [(-1e-9, 1e-9, 0.0), (1e-6, 0.0, 0.0), (1e-6, 1e-9, -1.0), (float("nan"), 1e-9, 0.0)])
def test_a_cost_below_nothing_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="read_s must be at least 0"):
        ReadCost(*values)

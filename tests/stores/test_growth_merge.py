"""The planner of growth and its executor against sorting everything anew."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stores.growth import merge
from stores.growth.merge import behind, place_events, put_between, slots_of, spliced

LAW = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
TIMES = st.lists(st.integers(0, 5), max_size=30)


@LAW
@given(old=TIMES, new=TIMES)
def test_events_stand_where_a_stable_sort_of_all_puts_them(old: list[int], new: list[int]) -> None:
    before, after = np.sort(np.array(old, np.int64)), np.array(new, np.int64)
    found = place_events(before, after)
    order = np.argsort(np.concatenate([before, after]), kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    np.testing.assert_array_equal(found.moved(np.arange(len(before))), number[: len(before)])
    np.testing.assert_array_equal(found.number, number[len(before) :])


@LAW
@given(old=TIMES, new=TIMES, block=st.integers(1, 9), piece=st.integers(1, 5))
def test_splicing_gives_the_sorted_rows_in_bounded_blocks(monkeypatch, old, new, block, piece):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(merge, "BLOCK_ROWS", block)
    monkeypatch.setattr(merge, "BLOCK_BYTES", 8 * piece)
    before, after = np.sort(np.array(old, np.int64)), np.array(new, np.int64)
    found = place_events(before, after)
    fresh = after[found.order]
    blocks = [*spliced(lambda a, b: before[a:b], len(before), 8, found.at, lambda a, b: fresh[a:b], np.int64)]
    np.testing.assert_array_equal(np.concatenate(blocks), np.sort(np.concatenate([before, after])))
    assert max(map(len, blocks)) <= min(block, piece) + piece


def test_rows_behind_all_move_none() -> None:
    found = behind(4, 3)
    np.testing.assert_array_equal(found.moved(np.arange(4)), np.arange(4))
    np.testing.assert_array_equal(found.number, [4, 5, 6])


def test_put_between_keeps_the_shape_of_rows_and_takes_the_type_asked_for() -> None:
    found = put_between(np.ones((2, 3), np.int32), np.array([0, 2, 2]), np.zeros((3, 3)), np.dtype(np.int64))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found[:, 0], [0, 1, 1, 0, 0])


def test_an_undirected_edge_has_two_slots_and_a_loop_one() -> None:
    slots = slots_of(np.array([3, 1]), np.array([2, 1]), np.array([5, 4]), {"weight": np.array([7.0, 8.0])}, undirected=True)
    np.testing.assert_array_equal(slots.dst, [1, 2, 3])
    np.testing.assert_array_equal(slots.src, [1, 3, 2])
    np.testing.assert_array_equal(slots.edge_id, [4, 5, 5])
    np.testing.assert_array_equal(slots.rest["weight"], [8, 7, 7])


def test_slots_are_merged_by_destination_and_edge_id(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    keys = np.sort(rng.choice(300, 200, replace=False))
    mine = rng.random(200) < 0.7
    dst, edge_id = np.divmod(keys, 10)
    at = np.empty(int((~mine).sum()), np.int64)
    merge._merge_places(dst[mine], edge_id[mine], dst[~mine], edge_id[~mine], at)
    np.testing.assert_array_equal(at, np.searchsorted(keys[mine], keys[~mine]))

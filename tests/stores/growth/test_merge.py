"""The planner of growth and its executor against sorting everything anew."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.growth import merge
from ooc.stores.growth.merge import Insertion, place_events, put_between, slots_of, spliced
from ooc.stores.growth.sorting import Sorter, room_of
from ooc.stores.io.segments import mapping_of

LAW = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
TIMES = st.lists(st.integers(0, 5), max_size=30)


@LAW
@given(old=TIMES, new=TIMES)
def test_events_stand_where_a_stable_sort_of_all_puts_them(old: list[int], new: list[int]) -> None:
    before, after = np.sort(np.array(old, np.int64)), np.array(new, np.int64)
    mine = np.argsort(after, kind="stable")
    at = place_events(before, after[mine])
    order = np.argsort(np.concatenate([before, after]), kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    np.testing.assert_array_equal(Insertion(at, len(before)).moved(np.arange(len(before))), number[: len(before)])
    np.testing.assert_array_equal(at + np.arange(len(at)), number[len(before) :][mine])


@LAW
@given(old=TIMES, new=TIMES, block=st.integers(1, 9), piece=st.integers(1, 5))
def test_splicing_gives_the_sorted_rows_in_bounded_blocks(monkeypatch, old, new, block, piece):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(merge, "BLOCK_ROWS", block)
    monkeypatch.setattr(merge, "BLOCK_BYTES", 8 * piece)
    before, after = np.sort(np.array(old, np.int64)), np.array(new, np.int64)
    fresh = np.sort(after)
    at = place_events(before, fresh)
    blocks = [*spliced(lambda a, b: before[a:b], len(before), 8, at, lambda a, b: fresh[a:b], np.int64)]
    np.testing.assert_array_equal(np.concatenate([before[:0], *blocks]), np.sort(np.concatenate([before, after])))
    assert max(map(len, blocks), default=0) <= 2 * min(block, piece)


def test_rows_behind_all_move_none() -> None:
    np.testing.assert_array_equal(Insertion(np.full(3, 4), 4).moved(np.arange(4)), np.arange(4))


def test_put_between_keeps_the_shape_of_rows_and_takes_the_type_asked_for() -> None:
    found = put_between(np.ones((2, 3), np.int32), np.array([0, 2, 2]), np.zeros((3, 3)), np.dtype(np.int64))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found[:, 0], [0, 1, 1, 0, 0])


def test_an_undirected_edge_has_two_slots_and_a_loop_one() -> None:
    edges = {"src": [3, 1], "dst": [2, 1], "edge_id": [5, 4], "weight": [7, 8]}
    slots = slots_of({name: np.array(column) for name, column in edges.items()}, undirected=True)
    found = sorted(zip(*(slots[name].tolist() for name in ("dst", "src", "edge_id", "weight")), strict=True))
    assert found == [(1, 1, 4, 8), (2, 3, 5, 7), (3, 2, 5, 7)]
    assert slots_of(slots, undirected=False) is slots


def test_slots_are_merged_by_destination_and_edge_id(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    keys = np.sort(rng.choice(300, 200, replace=False))
    mine = rng.random(200) < 0.7
    dst, edge_id = np.divmod(keys, 10)
    at = np.empty(int((~mine).sum()), np.int64)
    merge._merge_places(dst[mine], edge_id[mine], dst[~mine], edge_id[~mine], at)
    np.testing.assert_array_equal(at, np.searchsorted(keys[mine], keys[~mine]))


RECORDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60, unique=True)


@LAW
@given(records=RECORDS, room=st.integers(1, 900), batch=st.integers(1, 20), last=st.booleans(), one=st.booleans())
def test_records_are_sorted_in_any_room(tmp_path, records, room, batch, last, one):  # type: ignore[no-untyped-def]
    """By one key or two, through runs or none; of those alike in the first key the last one, where only that is wanted."""
    key, turn = np.array(records, np.int64).reshape(-1, 2).T
    key = turn if one else key
    pairs = np.stack([turn, key], axis=1).astype(np.float32)
    sorter = Sorter(
        tmp_path, "s", {"key": (np.int64, ()), "turn": (np.int64, ()), "pair": (np.float32, (2,))}, ("key", "turn"), room, last
    )
    for first in range(0, len(key), batch):
        part = slice(first, first + batch)
        sorter.add({"key": key[part], "turn": turn[part], "pair": pairs[part]})
    found = sorter.finish()
    want = sorted(zip(key.tolist(), turn.tolist(), strict=True))
    if last:
        want = sorted(dict(want).items())
    assert [*zip(*(found[name].read(0, len(want)).tolist() for name in ("key", "turn")), strict=True)] == want
    np.testing.assert_array_equal(found["pair"].map(), np.array([(t, k) for k, t in want], np.float32).reshape(-1, 2))
    assert len(list(tmp_path.iterdir())) == 3
    assert not want or mapping_of(found["key"].map()) is not None  # so that its pages can be given back


def test_the_room_to_sort_in_follows_the_memory_within_bounds() -> None:
    assert [room_of(memory) for memory in (None, 10**12, 10**9, 1)] == [2**28, 2**28, 125_000_000, 2**24]

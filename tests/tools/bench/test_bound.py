"""The bound beside a brute force in sets, and beside figures reckoned by hand."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.bench.lib.disk_rates import Disk
from tools.bench.lib.pages import pages_of
from tools.bench.sampled.bound import Reads, bound, window_bytes, window_reads

BATCHES = st.lists(st.sets(st.integers(0, 300), min_size=1, max_size=20), min_size=1, max_size=12)


def pages_by_bytes(rows: set[int], row_bytes: int) -> set[int]:
    return {byte // 4096 for row in rows for byte in range(row * row_bytes, (row + 1) * row_bytes)}


def windows_by_sets(batches: list[set[int]], most: int) -> Iterator[list[set[int]]]:
    window: list[set[int]] = []
    for batch in batches:
        if window and len(set.union(*window, batch)) > most:
            yield window
            window = []
        window.append(batch)
    yield window


@settings(deadline=None)
@given(st.sets(st.integers(0, 500), max_size=40), st.sampled_from([4, 100, 512, 1000, 4096, 5000, 12288]))
def test_pages_are_those_of_every_byte(rows: set[int], row_bytes: int) -> None:
    assert pages_of(np.array(sorted(rows), np.int32), row_bytes).tolist() == sorted(pages_by_bytes(rows, row_bytes))


@settings(deadline=None)
@given(BATCHES, st.integers(0, 80), st.sampled_from([100, 512, 5000]), st.randoms(use_true_random=False))
def test_windows_are_those_of_a_brute_force(batches: list[set[int]], most: int, row_bytes: int, random: "object") -> None:
    orders = [np.array(random.sample(sorted(batch), len(batch)), np.int32) for batch in batches]  # type: ignore[attr-defined]
    found = list(window_reads(orders, row_bytes, most * row_bytes + row_bytes // 2))
    expected, before = [], set()
    for window in windows_by_sets(batches, most):
        held = set.union(*window)
        page = sorted(pages_by_bytes(held - before, row_bytes))
        span = page[-1] - page[0] + 1 if page else 0
        expected.append(Reads(len(window), len(held), len(held - before), len(page), span))
        before = held
    assert found == expected


def test_the_cheaper_way_is_taken_window_by_window() -> None:
    disk = Disk(sequential_bytes_per_s=4096 * 100, random_pages_per_s=10)
    dense, sparse = Reads(3, 900, 800, pages=90, span_pages=100), Reads(1, 9, 8, pages=5, span_pages=100)
    assert dense.ways(disk) == (1.0, 9.0)
    assert sparse.ways(disk) == (1.0, 0.5)
    found = bound([dense, sparse], disk)
    assert found["seconds_per_batch"] == 1.5 / 4
    assert found["windows"] == 2
    assert found["windows_scanned"] == 1
    assert found["page_bytes"] == 95 * 4096
    assert found["new_rows"] == 808


def test_a_window_read_before_costs_nothing() -> None:
    batch = np.arange(10)
    reads = list(window_reads([batch, batch], 512, 10 * 512))
    assert [each.batches for each in reads] == [2]
    twice = list(window_reads([batch, np.arange(10, 15), batch], 512, 10 * 512))
    assert [each.new_rows for each in twice] == [10, 5, 10]  # only the window before counts as memory


def test_left_is_shared_by_two_windows() -> None:
    assert window_bytes({"memory": 2000, "baseline": 500, "topology": 300, "labels": 400}) == 600
    assert window_bytes({"memory": 700, "baseline": 500, "topology": 300}) == 0


@pytest.mark.parametrize("row_bytes", [512, 700])
def test_no_memory_still_serves_batch_by_batch(row_bytes: int) -> None:
    assert [each.batches for each in window_reads([np.arange(4), np.arange(4)], row_bytes, 0)] == [1, 1]

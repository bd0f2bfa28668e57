"""Copying from pieces of extents to where rows belong, against slices of a whole copy."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.io.disk import MeasuredDepth, least_depth
from ooc.stores.io.engines.deliver import deliver, first_reaching
from ooc.stores.io.engines.tasks import rows_of, whole_extents
from ooc.stores.io.read_plan import ReadPlan, plan_reads

PAGE, ROWS = 4096, 400
UNTOUCHED = 7


def extents_of(plan: ReadPlan, data: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [data[low : low + n] for low, n in zip(plan.offset.tolist(), plan.length.tolist(), strict=True)]


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, ROWS - 1), max_size=60),
    row_bytes=st.sampled_from([1, 7, 512, 3000, 5000]),
    cut=st.sampled_from([1, 100, 512, PAGE, 10**6]),
    shuffled=st.booleans(),
)
def test_pieces_of_any_size_deliver_every_row(ids: list[int], row_bytes: int, cut: int, shuffled: bool) -> None:
    rng = np.random.default_rng(len(ids))
    data = rng.integers(8, 256, -(-ROWS * row_bytes // PAGE) * PAGE, dtype=np.uint8)
    plan = plan_reads(np.array(ids, np.int64), row_bytes, count=ROWS, gap_bytes=PAGE, max_extent_bytes=4 * PAGE)
    at = rng.permutation(2 * len(ids))[: len(ids)] if shuffled else np.arange(len(ids))
    out = np.full(max(1, 2 * len(ids)) * row_bytes, UNTOUCHED, np.uint8)
    buffer = np.full(plan.nbytes, UNTOUCHED, np.uint8)
    for ranges in (rows_of(plan, out, at), whole_extents(plan, buffer)):
        for j, extent in enumerate(extents_of(plan, data)):
            starts = list(range(0, len(extent), cut)) if cut >= 100 else [0, 1, 2, len(extent) // 2]
            for skipped, stop in zip(starts, [*starts[1:], len(extent)], strict=True):
                piece = extent[skipped:stop].copy()
                p = first_reaching(ranges, j, 0, skipped)
                assert all(
                    ranges.source[i] + row_bytes <= ranges.extent_at[j] + skipped for i in ranges.order[ranges.first[j] : p]
                )
                deliver(ranges, j, p, skipped, len(piece), piece.ctypes.data)
    expected = np.full_like(out, UNTOUCHED).reshape(-1, row_bytes)
    expected[at] = data[: ROWS * row_bytes].reshape(ROWS, row_bytes)[ids]
    np.testing.assert_array_equal(out.reshape(-1, row_bytes), expected)
    np.testing.assert_array_equal(buffer, np.concatenate([np.empty(0, np.uint8), *extents_of(plan, data)]))


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1, 1e6)), min_size=1))
def test_the_depth_is_the_least_of_those_nearly_as_fast_as_the_fastest(found: list[tuple[int, float]]) -> None:
    depth = least_depth([MeasuredDepth(depth=depth, reads_per_s=rate) for depth, rate in found])
    fastest = max(rate for _, rate in found)
    assert depth in {d for d, rate in found if rate >= 0.97 * fastest}
    assert all(rate < 0.97 * fastest for d, rate in found if d < depth)

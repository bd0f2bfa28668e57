"""Rows as int8 with a scale a row, against the same arithmetic in numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ooc.history.int8_rows import SCALE_BYTES, as_int8, numbers_of, stored_bytes

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
ROWS = arrays.arrays(np.float32, st.tuples(st.integers(0, 9), st.integers(1, 20)), elements=NUMBERS)


@settings(deadline=None)  # the kernels are compiled
@given(ROWS)
def test_numbers_are_the_nearest_multiples_of_their_rows_scale(rows: np.ndarray) -> None:
    stored = as_int8(rows)
    assert stored is not None
    assert (stored.dtype, stored.shape) == (np.int8, (len(rows), rows.shape[1] + SCALE_BYTES))
    assert stored.nbytes == len(rows) * stored_bytes(rows.shape[1], "int8")
    found = numbers_of(stored)
    most = np.abs(rows).max(1, keepdims=True, initial=0)
    assert (np.abs(found.astype(np.float64) - rows) <= most * (1 / 254 + 1e-6) + 2e-36).all()
    assert np.allclose(numbers_of(as_int8(found)), found, rtol=1e-5, atol=2e-36)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    rows = np.ones((5, 8), np.float32)
    rows[3, 6] = number
    assert as_int8(rows) is None


def test_bytes_that_were_never_written_are_zeros_and_floats_stay_as_they_are() -> None:
    assert np.array_equal(numbers_of(np.zeros((3, 8 + SCALE_BYTES), np.int8)), np.zeros((3, 8), np.float32))
    for dtype in (np.float16, np.float32):
        rows = np.ones((2, 3), dtype)
        assert numbers_of(rows) is rows

"""Sizes as text: three digits that parse to nearly the same number."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ooc.stores.sizes import format_bytes, parse_bytes


@given(st.integers(1, 10**18))
@example(999_500)
@example(999_499_999)
@example(999_500_000)
@example(999_999_999_999_999)
def test_a_size_is_parsed_as_it_was_written(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006, abs=1)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999_700, "1 MB"), (2_500_000, "2.5 MB"), (-1200, "-1.2 kB"), (1234 * 10**12, "1234 TB")],
)
def test_three_digits_and_a_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text

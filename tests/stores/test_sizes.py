"""Sizes as text: three digits that parse to nearly the same number."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ooc.stores.errors import ConfigError
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


@pytest.mark.parametrize(("size", "count"), [(2e9, 2 * 10**9), ("2.5GB", 25 * 10**8), ("1.5 KiB", 1536), (7, 7)])
def test_a_size_may_be_a_number_or_have_a_unit(size: int | str, count: int) -> None:
    assert parse_bytes(size) == count


@pytest.mark.parametrize("size", [2.5, "2.5", "0.5B", True, 0, "-1GB", "many"])
def test_what_can_be_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(ConfigError, match=r"`memory`: '.*' is not a size in bytes: write it like 2GB") as refused:
        parse_bytes(size, "memory")
    assert f"{str(size)!r}" in str(refused.value)

"""`tests.scale`: quick runs try each law, and show every value of every parameter."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import scale
from tests.forked import python
from tests.scale import KILLS, combinations, few, some, some_calls, take_fewer_examples

CASES = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize(("b", "c"), [(1, 1), (1, 2), (2, 1)])
def test_two_axes(a, b, c): pass

@pytest.mark.parametrize("a", range(5))
def test_one_axis(a): pass

@pytest.mark.cases(2)
@pytest.mark.parametrize("a", range(5))
def test_dear(a): pass

def test_none(): pass
"""


@given(st.integers(0, 60))
@settings(deadline=None)
def test_kills_are_spread_evenly_and_come_to_every_call(count: int) -> None:
    found = set[int]()
    for _ in range(400):
        calls = some_calls(count)
        assert len(calls) <= KILLS
        assert all(0 <= each < count for each in calls)
        found |= {*calls}
    assert len(found) == count


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_every_value_comes_up_in_as_few_cases_as_the_longest_axis(a: int, b: int, c: int) -> None:
    cases = [(f"a{i}", f"b{j}", f"c{k}") for i in range(a) for j in range(b) for k in range(c)]
    chosen = [cases[i] for i in combinations(cases)]
    for axis in range(3):
        assert {case[axis] for case in chosen} == {case[axis] for case in cases}
    assert len(chosen) == max(a, b, c)


def test_a_value_of_one_axis_is_not_that_of_another() -> None:
    assert combinations([("x", "y"), ("y", "x")]) == [0, 1]


@pytest.mark.parametrize(("quick", "cases"), [("quick", 11), pytest.param("", 20, marks=pytest.mark.slow)])
def test_a_quick_run_collects_each_test(tmp_path: Path, quick: str, cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cases(n): few of them")
    monkeypatch.setenv("OOC_TESTS", quick)
    done = python("-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path)
    assert f"{cases} passed" in done.stdout, done.stdout + done.stderr


def test_few_and_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "QUICK", True)
    assert few(1, 100) == 1
    assert some(range(16), 3) == [0, 8, 15]
    assert some(range(16), 1) == [0]
    assert some(range(3), 4) == [0, 1, 2]
    monkeypatch.setattr(scale, "QUICK", False)
    assert few(1, 100) == 100
    assert some(range(16), 3) == list(range(16))


def test_laws_take_fewer_examples() -> None:
    tried = []

    @given(st.integers())
    @settings(max_examples=80, deadline=None, database=None)
    def law(x: int) -> None:
        tried.append(x)

    take_fewer_examples(law)
    law()
    assert 0 < len(tried) <= scale.EXAMPLES
    take_fewer_examples(len)

"""The campaign of malformed inputs: what it calls a finding, and that its cases are what they say."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.forked import python
from tools.bench.malformed.campaign import cases, judge
from tools.bench.malformed.cases import Case, nothing

LINE = "note: something\nooc: error: it is wrong; correct it\n"
CASE = Case("a case", ("info", "x"), nothing)


@pytest.mark.parametrize(
    ("code", "peak", "said", "changed", "found"),
    [
        (2, 0, LINE, [], []),
        (None, 0, "", [], ["hang"]),
        (1, 0, "Traceback (most recent call last):\nValueError: no", [], ["traceback: ValueError: no"]),
        (-11, 0, "", [], ["exit code -11: "]),
        (2, 0, "", [], ["0 lines of errors: "]),
        (2, 0, LINE * 2, [], [f"2 lines of errors: {(LINE * 2).strip()}"]),
        (0, 0, "made", [], ["accepted: made"]),
        (2, 5 * 10**9, LINE, [], ["peak of 5.0 GB"]),
        (2, 0, LINE, ["out.partial"], ["left or changed: out.partial"]),
    ],
)
def test_findings(code: int | None, peak: int, said: str, changed: list[str], found: list[str]) -> None:
    assert judge(CASE, code, peak, said, changed) == found


def test_what_must_be_accepted_is_not_to_be_refused() -> None:
    case = Case("a case", ("info", "x"), nothing, "accepted")
    assert judge(case, 0, 0, "made", ["out.ooc"]) == []
    assert judge(case, 2, 0, LINE, []) == ["refused: ooc: error: it is wrong; correct it"]


def test_there_are_many_cases_each_with_a_name_of_its_own() -> None:
    names = Counter(case.name for case in cases(0))
    assert len(names) > 1000
    assert names.most_common(1)[0][1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("only", ["config", "header with complex", "hive"])
def test_a_few_cases(tmp_path: Path, only: str) -> None:
    done = python("-m", "tools.bench.malformed.campaign", tmp_path / "work", "--only", only, "--seconds", "60")
    assert json.loads(done.stdout)["findings"] == []
    assert not (tmp_path / "work").exists()

"""The page about peers' tests names tests of ours that exist, in every row that says "kept"."""

import re

from tools.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "pyg-tests.md").read_text()
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE)
}


def test_every_row_that_is_kept_names_tests_that_exist() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
    kept = [cells[-1] for cells in rows if cells[-1].startswith("kept")]
    assert len(kept) > 30
    for cell in kept:
        named = re.findall(r"`(test_\w+)`", cell)
        assert named, f"this row names no test: {cell}"
        assert {*named} <= DEFINED, f"there is no test {[name for name in named if name not in DEFINED]}"


def test_every_row_says_kept_refused_or_why_not() -> None:
    rows = re.findall(r"\| ([^|]+) \|$", PAGE, re.MULTILINE)
    for cell in rows:
        assert re.match(r"here$|kept|refused|not (kept|needed)", cell.strip()), cell

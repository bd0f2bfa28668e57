"""The messages that the page of errors explains are messages of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tools.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text()
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


@cache
def strings() -> tuple[str, ...]:
    """All strings of the code; what an f-string fills in is `...`."""
    files = [path for top in ("ooc", "stores") for path in (ROOT / top).rglob("*.py")]
    return tuple(text for path in files for node in ast.walk(ast.parse(path.read_text())) for text in _text(node))


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_code(message: str) -> None:
    words = re.compile(".*".join(map(re.escape, message.strip(".").split("..."))), re.DOTALL)
    assert any(words.search(text) for text in strings()), f"no message of the code reads {message!r}"


def test_a_blank_line_is_before_every_heading() -> None:
    assert re.findall(r"[^\n]\n#+ .*", PAGE) == []


def test_every_message_has_a_cause_and_a_remedy() -> None:
    assert len(MESSAGES) > 15
    for part in PAGE.split("\n### ")[1:]:
        assert "\nCause\n: " in part, part
        assert "\nRemedy\n: " in part, part

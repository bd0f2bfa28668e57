"""The diagram in the documentation is that of the code."""

import pytest

from tools.docs.package_diagram import OUT, draw, floors, imports, reduced


def test_the_diagram_is_up_to_date() -> None:
    assert OUT.read_text() == draw(imports()), "run `python -m tools.docs.package_diagram`"


def test_implied_arrows_are_left_out() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}


def test_a_circle_has_no_floors() -> None:
    with pytest.raises(ValueError, match="circle"):
        floors({"a": {"b"}, "b": {"a"}})

"""The figure of the README shows what the benchmarks' page has."""

import pytest

from tools.docs.speed_chart import OUT, SOURCE, draw, measured


def test_the_figure_is_up_to_date() -> None:
    assert OUT.read_text() == draw(measured(SOURCE.read_text())), "run `python -m tools.docs.speed_chart`"


def test_every_arm_is_in_one_of_the_groups() -> None:
    bars = measured(SOURCE.read_text())
    assert sorted(bar.name for bar in bars if bar.from_disk) == ["DGL GraphBolt", "PyTorch Geometric", "ooc"]
    assert sum(not bar.from_disk for bar in bars) == 4


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no heading"):
        measured("# Benchmarks\n")

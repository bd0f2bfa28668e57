"""The page of a memory meter: self-contained, and true to what was measured."""

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
import torch
from torch import nn

from ooc.report.memory_page import LAYERS, layers_shown, step_figure, write_memory_report
from ooc.report.page import STYLE, svg_of
from ooc.runtime.memory import MemoryMeter
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.sizes import format_bytes


def measured(layers: int) -> MemoryMeter:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    with MemoryMeter("a step & <more>", period_s=0.001, model=model) as meter:
        model(torch.zeros(1000, 64)).sum().backward()
    return meter


def test_the_page_holds_what_was_measured_and_loads_nothing(tmp_path: Path) -> None:
    meter = measured(3)
    page = write_memory_report(meter, tmp_path / "memory.html").read_text()
    (step,) = meter.steps
    assert "a step &amp; &lt;more&gt;" in page
    for shown in (meter.reading.peak, step.peak, step.kept or 0, step.lines[0].at_peak):
        assert format_bytes(shown) in page
    assert {f'<td class="text">{layer}</td>' in page for layer in ("0", "1", "2")} == {True}
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Over time", "The step", "By layer", "Line by line"]
    assert page.count("<svg") == 3
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(http", page)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.html"]


def test_without_a_model_it_has_the_process_alone(tmp_path: Path) -> None:
    with MemoryMeter("block") as meter:
        pass
    page = write_memory_report(meter, tmp_path / "memory.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["Over time"]
    assert "operations were not recorded" in page


def test_many_layers_are_told_apart_as_far_as_there_are_colors() -> None:
    (step,) = measured(LAYERS + 5).steps
    names = layers_shown(step)
    assert len(names) == LAYERS
    with matplotlib.rc_context(STYLE):
        text = "".join(ElementTree.fromstring(svg_of(step_figure(step, names))).itertext())
    assert "others" in text


def test_a_meter_that_measured_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'idle' has measured nothing yet"):
        write_memory_report(MemoryMeter("idle"), tmp_path / "memory.html")
    with pytest.raises(ConfigError, match=r"of an `ooc.MemoryMeter`, not list"):
        write_memory_report([], tmp_path / "memory.html")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreError, match=f"cannot write {tmp_path}/none/x.html: No such file"):
        write_memory_report(measured(1), tmp_path / "none" / "x.html")


def test_texts_of_the_table_wrap(tmp_path: Path) -> None:
    """Long names of modules and files would push the numbers out of sight."""
    page = write_memory_report(measured(1), tmp_path / "memory.html").read_text()
    assert re.search(r"td\.text \{[^}]*white-space: normal; overflow-wrap: anywhere", page)
    assert page.count('<td class="text">') == 3 * page.count("<tr><td")

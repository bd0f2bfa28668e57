"""The event stream's benchmark: what a pass counts."""

from argparse import Namespace
from pathlib import Path

import pytest

from tests.ooc.temporal_stores import Edges
from tools.bench.io.events import stream


@pytest.mark.parametrize("columns", ["msg", ""])
def test_a_pass_goes_through_the_events_asked_for(tmp_path: Path, columns: str) -> None:
    edges = Edges(count=600)
    asked = Namespace(child=edges.store(tmp_path), limit="", memory="", pass_events=150, batch_size=40, neighbors=2)
    found = stream(Namespace(**vars(asked), columns=columns))
    assert (found["of_events"], found["events"]) == (600, 150)
    assert 0 < found["past_per_event"] <= 3 * 2
    assert found["events_per_s"] == found["events"] / found["seconds"]

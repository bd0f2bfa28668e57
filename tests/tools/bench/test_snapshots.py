"""The windows' benchmark: what a pass counts, and its ratio to the disk."""

from argparse import Namespace
from pathlib import Path

import pytest

from tests.ooc.temporal_stores import Edges
from tools.bench.io.snapshots import share_of_disk, stream


def test_a_speed_beside_the_mean_of_the_disk_before_and_after() -> None:
    assert share_of_disk(1e9, 1e9, 3e9) == 0.5
    assert share_of_disk(3e9, 1e9, 1e9) == 3.0


@pytest.mark.parametrize(
    ("window", "most", "events", "windows"), [("150", None, 400, 3), ("150", 2, 300, 2), ("20m", None, 400, 1)]
)
def test_a_pass_counts_every_event_once(tmp_path: Path, window: str, most: int | None, events: int, windows: int) -> None:
    store = Edges(count=400).store(tmp_path)
    found = stream(Namespace(child=store, limit="", memory="", window=window, most=most))
    assert (found["events"], found["windows"]) == (events, windows)
    assert found["bytes"] == events * (4 + 4 + 8 + 3 * 4)
    assert found["bytes_per_s"] == found["bytes"] / found["seconds"]
    assert 0 < found["nodes_per_window"] <= 30

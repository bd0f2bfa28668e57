"""The script that users copy: on a store, and resumed with more epochs."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ooc.examples.train_events import main
from ooc.stores.ingest import IngestSpec, ingest
from ooc.training.checkpoint import read_metrics
from tests.forked import python

COLUMNS = {"src": "column0", "dst": "column1", "time": "column2"}


def test_the_script_ingests_trains_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    ends, times = rng.integers(0, 20, (400, 2)), np.sort(rng.integers(0, 6 * 86_400, 400))
    edges = tmp_path / "CollegeMsg.txt"
    edges.write_text("".join(f"{a} {b} {t}\n" for (a, b), t in zip(ends, times, strict=True)))
    ingest(IngestSpec(out=tmp_path / "msg.ooc", edges=str(edges), header=False, undirected=True, **COLUMNS))
    for epochs, more in ((1, []), (2, ["--resume"])):
        settings = ["hidden=8", "memory_dim=8", "time_dim=4", "batch_size=50", f"epochs={epochs}"]
        monkeypatch.setattr(sys, "argv", ["train", f"{tmp_path}/msg.ooc", f"{tmp_path}/run", *settings, *more])
        main()
        assert len(read_metrics(tmp_path / "run")[1]) == epochs
    out = capsys.readouterr().out
    assert "test: ap" in out
    assert "test of EdgeBank: ap" in out
    assert "events/s" in out
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("given", "message"), [("epochs", "'epochs' is not a setting: write NAME=VALUE"), ("epochs=0", "epochs")]
)
def test_a_wrong_setting_is_one_line(tmp_path: Path, given: str, message: str) -> None:
    done = python("-m", "ooc.examples.train_events", tmp_path / "s.ooc", tmp_path / "run", given)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "error: " in last
    assert message in last
    assert "Traceback" not in done.stderr

"""The script that users copy: on a store, and resumed with more epochs."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ooc.examples.train_snapshots import main
from ooc.stores.ingest import IngestSpec, ingest
from ooc.training.checkpoint import read_metrics

COLUMNS = {"src": "column0", "dst": "column1", "time": "column2"}


@pytest.mark.slow
def test_the_script_ingests_trains_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    ends, times = rng.integers(0, 20, (600, 2)), np.sort(rng.integers(0, 6 * 86_400, 600))
    edges = tmp_path / "CollegeMsg.txt"
    edges.write_text("".join(f"{a} {b} {t}\n" for (a, b), t in zip(ends, times, strict=True)))
    ingest(IngestSpec(out=tmp_path / "msg.ooc", edges=str(edges), header=False, undirected=True, **COLUMNS))
    for epochs, more in ((1, []), (2, ["--resume"])):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "train",
                f"{tmp_path}/msg.ooc",
                f"{tmp_path}/run",
                "window=4h",
                "hidden=8",
                "negatives=historical",
                f"epochs={epochs}",
                *more,
            ],
        )
        main()
        assert len(read_metrics(tmp_path / "run")[1]) == epochs
    out = capsys.readouterr().out
    assert "test: ap" in out
    assert "test of EdgeBank: ap" in out
    assert "historical negatives: " in out
    assert (tmp_path / "run" / "report.html").exists()

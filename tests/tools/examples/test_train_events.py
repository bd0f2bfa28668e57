"""The script that users copy: on a known file, and resumed with more epochs."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ooc.training.checkpoint import read_metrics
from tools.examples.train_events import main
from tools.graphs.temporal import one_line_errors


def test_the_script_ingests_trains_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    ends, times = rng.integers(0, 20, (400, 2)), np.sort(rng.integers(0, 6 * 86_400, 400))
    (tmp_path / "CollegeMsg.txt").write_text("".join(f"{a} {b} {t}\n" for (a, b), t in zip(ends, times, strict=True)))
    for epochs, more in ((1, []), (2, ["--resume"])):
        settings = ["hidden=8", "memory_dim=8", "time_dim=4", "batch_size=50", f"epochs={epochs}"]
        monkeypatch.setattr(sys, "argv", ["train", f"{tmp_path}/CollegeMsg.txt", f"{tmp_path}/run", *settings, *more])
        main()
        assert len(read_metrics(tmp_path / "run")[1]) == epochs
    out = capsys.readouterr().out
    assert "test: ap" in out
    assert "test of EdgeBank: ap" in out
    assert "events/s" in out
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(("given", "message"), [("epochs", "'epochs' is no setting: write NAME=VALUE"), ("epochs=0", "epochs")])
def test_a_wrong_setting_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path / "s.ooc"), str(tmp_path / "run"), given])
    with pytest.raises(SystemExit) as ended, one_line_errors():
        main()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]

"""The engines' benchmark on a small file: what it counts, how it sums up, that it leaves nothing behind."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ooc.stores.io.engines import open_engine
from ooc.stores.io.segments import Segments
from tools.bench.io import engines

NBYTES = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    engines.make_file(tmp_path / "data", NBYTES)
    return tmp_path / "data"


def test_a_file_of_random_bytes(file: Path) -> None:
    data = np.fromfile(file, np.uint8)
    assert len(data) == NBYTES
    assert np.bincount(data, minlength=256).min() > 0.8 * NBYTES / 256


@pytest.mark.parametrize("name", engines.ENGINES)
def test_reads_are_those_of_whole_requests(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(name, Segments((file,), np.array([NBYTES])))
    plans = []
    gather = engine.gather
    monkeypatch.setattr(engine, "gather", lambda plan, out: plans.append(plan) or gather(plan, out))
    figures = engines.measure(engine, file, NBYTES, 4096, 1e-9, 0)
    engine.close()
    assert len(plans) == 1
    assert len(plans[0].length) == NBYTES // 4096 // 2  # no two blocks merged into one read
    assert set(plans[0].length.tolist()) == {4096}
    assert figures["reads_per_s"] > 0
    assert figures["core"] >= 0


def test_ratios_are_taken_within_a_round() -> None:
    rounds = [
        {"fio": {"reads_per_s": fio, "core": 0.5}, "uring": {"reads_per_s": own, "core": core}}
        for fio, own, core in [(100, 90, 0.1), (10, 20, 0.3), (50, 50, 0.2)]
    ]
    summary = engines.summarize(rounds)
    assert summary["fio"] == {"reads_per_s": 50, "core": 0.5}
    assert summary["uring"] == {"reads_per_s": 50, "core": 0.2, "of_fio": 1.0, "worst_of_fio": 0.9, "best_of_fio": 2.0}
    assert "of_fio" not in engines.summarize([{"uring": rounds[0]["uring"]}])["uring"]


def test_the_whole_without_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = f"engines {tmp_path} --size 1MiB --seconds 0.001 --rounds 2 --blocks 4096 16384 --plot {tmp_path / 'p.png'}"
    monkeypatch.setattr(sys, "argv", words.split())
    engines.main()
    found = json.loads(capsys.readouterr().out)
    assert found["fio"].startswith("not installed")
    assert list(found["blocks"]) == ["4096", "16384"]
    assert set(found["blocks"]["4096"]) == {*engines.ENGINES, engines.STRAIGHT}
    assert set(found["engines"]) == set(engines.ENGINES)
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]

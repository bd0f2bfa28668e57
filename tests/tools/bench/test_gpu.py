"""The benchmarks of a GPU run end to end on the CPU, and on a pretended device, and leave nothing but their figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ooc.runtime import device_reads
from ooc.runtime.restoring import settings_restored
from tests.pretended_cuda import pretended_cuda
from tools.bench.gpu import device, rates, training
from tools.bench.io import engines

SIZES = {"nodes": 600, "edges": 6000, "width": 8, "hidden": 8, "batch-size": 64, "batches": 4, "counted": 2, "warm": 2}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", size)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_reads, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(engines, "REQUEST_BYTES", 2**20)
    monkeypatch.setattr(training, "_READY", 3)


def called(main: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *map(str, arguments)])
    with settings_restored():
        main()


def test_rates_of_engines_stand_beside_the_disk_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ("--size", "16MB", "--seconds", "0.01", "--rounds", "2", "--device", "cpu")
    called(rates.main, monkeypatch, tmp_path / "work", "--out", tmp_path / "out", *how)
    found = json.loads((tmp_path / "out" / "rates.json").read_text())
    assert found["disk_bytes_per_s"] > 0
    assert found["engines"].keys() == {"uring", "pread"}
    assert all(each["of_disk"] > 0 for each in found["engines"].values())
    assert found["notes"]["gds"] == "not measured: the device is no GPU"
    assert not list((tmp_path / "work").iterdir())
    assert capsys.readouterr().out.startswith("| | rate | of the disk's |")


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_training_is_timed_by_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    arguments = (tmp_path, "--out", tmp_path / "out", "--fanout", "3,3", *TINY, "--memory", "2GB", "--device", name)
    if name == "cpu":
        called(training.main, monkeypatch, *arguments)
    else:
        with pretended_cuda():
            called(training.main, monkeypatch, *arguments)
    found = json.loads((tmp_path / "out" / "training-3-3.json").read_text())
    arms = {"rows in RAM", "rows on disk", training.GATHERED}
    assert found["arms"].keys() == (arms if name == "cpu" else {*arms, *training.ARMS})
    assert all(each["seconds_per_batch"] > 0 for each in found["arms"].values())
    assert found["losses_equal"]
    assert not found["refused"]
    assert found["delivered"]["copies"]["of_pinned"] > 0
    assert found["delivered"]["loader"]["seconds_per_batch"] > 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("rows in RAM: ") and "sample " in line and "consumer " in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", f"rmat-{SIZES['nodes']}.ooc"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    with pytest.raises(SystemExit, match="torch sees no CUDA device here"):
        device.device_of("cuda")
    with device.counted_waits(torch.device("cpu")) as waits:
        assert waits.count == 0


def test_an_arm_that_is_refused_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(training.ARMS, "rows on disk", {"gpu_memory": "1GB"})
    monkeypatch.setattr(training, "_OF_GPUS", {"tf32", "precision", "sample_device"})
    monkeypatch.delitem(training.ARMS, "rows in RAM, few on the GPU")
    monkeypatch.delitem(training.ARMS, "rows on disk, few on the GPU")
    called(training.main, monkeypatch, tmp_path, "--out", tmp_path / "out", "--fanout", "3,3", *TINY, "--device", "cpu")
    found = json.loads((tmp_path / "out" / "training-3-3.json").read_text())
    assert found["arms"].keys() == {"rows in RAM", training.GATHERED}
    assert found["refused"].keys() == {"rows on disk"}
    assert "rows on disk: refused, " in capfd.readouterr().out

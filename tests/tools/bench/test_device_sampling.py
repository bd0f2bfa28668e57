"""Sampling by torch operations beside the kernels."""

import pytest

from tests.conftest import MakeStore
from tests.pretended_cuda import pretended_cuda
from tools.bench.sampled import device_sampling


@pytest.mark.parametrize("stored", [False, True])
def test_every_arm_has_a_line(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stored: bool
) -> None:
    graph = [str(make_store())] if stored else ["--nodes", "500", "--edges", "4000"]
    monkeypatch.setattr("sys.argv", ["x", *graph, "--fanout", "3,3", "--batch-size", "8", "--batches", "2", "--rounds", "1"])
    device_sampling.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].split(",")[0] for row in rows][:2] == ["kernels", "torch"]
    assert all(float(cell) >= 0 for row in rows for cell in row[1:])


def test_a_gpu_has_two_arms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    graph = ["--nodes", "500", "--edges", "4000"]
    monkeypatch.setattr("sys.argv", ["x", *graph, "--fanout", "3,3", "--batch-size", "8", "--batches", "2", "--rounds", "1"])
    with pretended_cuda():
        device_sampling.main()
    rows = [line.strip("| ").split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[2:] == ["torch, pretended", "torch, pretended, edges in the host's memory"]

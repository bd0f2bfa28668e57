"""Gradients that two processes exchange in fewer bytes: what they give, how runs go on, and that one process has none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ooc.cli.main import main
from ooc.config.nodes import TrainConfig
from ooc.runtime.ranks import ranks_now
from ooc.training.checkpoint import read_metrics
from ooc.training.compressed_gradients import WHOLE_STEPS, CompressedGradients
from tests.conftest import MakeStore
from tests.ooc.process_groups import in_processes
from tests.ooc.ranks import run_ranks

FLAGS = ["--fanout", "4,4", "--hidden", "64", "--threads", "1", "--seed", "5", "--no-plan", "--batch-size", "8"]


def trained(store: Path, out: Path, *flags: str, count: int = 2) -> list[float]:
    """Losses of the steps of two processes."""
    done = run_ranks(count, "-m", "ooc", "train", store, "--out", out, *flags)
    assert [each.returncode for each in done] == [0] * count, [each.stderr for each in done]
    steps, _ = read_metrics(out)
    return [line["loss"] for line in steps]


def exchanged(how: Any) -> dict[str, Any]:
    """The gradient of each step of a linear map, in one of two processes, and the state behind them."""
    ranks = ranks_now()
    config = TrainConfig(store=Path("a.ooc"), out=Path("run"), compress_gradients=how)
    compressed, module = CompressedGradients(config, ranks), nn.Linear(40, 32, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    parallel = DistributedDataParallel(module, find_unused_parameters=True)
    compressed.register(parallel)
    found = []
    for step in range(WHOLE_STEPS + 30):
        module.zero_grad()
        x = torch.randn(64, 40, generator=torch.Generator().manual_seed(1000 * step + ranks.rank))
        target = x @ torch.linspace(-1, 1, 40 * 32).view(40, 32).sin()
        ((parallel(x) - target) ** 2).mean().backward()
        assert module.weight.grad is not None
        found.append(module.weight.grad.clone().numpy())
    state = compressed.state()
    left_out = [] if state is None else [each[0].numpy().reshape(32, 40) for each in state["left_out"]]
    return {"gradients": np.array(found), "left_out": left_out}


@pytest.mark.slow
def test_short_floats_round_the_mean_gradient_and_powersgd_sends_one_of_low_rank() -> None:
    whole, half, low = (in_processes(2, exchanged, how) for how in ("none", "fp16", "powersgd"))
    exact = whole[0]["gradients"]
    assert 0 < np.abs(half[0]["gradients"] - exact).max() < 2e-3 * np.abs(exact).max()
    np.testing.assert_array_equal(half[0]["gradients"], half[1]["gradients"])
    gradients = low[0]["gradients"]
    np.testing.assert_array_equal(gradients, low[1]["gradients"])
    np.testing.assert_array_equal(gradients[:WHOLE_STEPS], exact[:WHOLE_STEPS])
    assert [np.linalg.matrix_rank(each, tol=1e-4 * np.linalg.norm(each)) for each in gradients[WHOLE_STEPS:]] == [2] * 30
    np.testing.assert_array_equal(low[0]["left_out"], low[1]["left_out"])  # of both processes, in each
    sent = gradients[WHOLE_STEPS:].sum(axis=0)
    np.testing.assert_allclose(
        sent + np.mean(low[0]["left_out"], axis=0), exact[WHOLE_STEPS:].sum(axis=0), atol=1e-4
    )  # nothing is lost


@pytest.mark.slow
def test_runs_with_short_gradients_are_close_to_the_exact_ones(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=203, num_edges=1500)
    exact = trained(store, tmp_path / "exact", *FLAGS, "--epochs", "2")
    losses = trained(store, tmp_path / "fp16", *FLAGS, "--epochs", "2", "--compress-gradients", "fp16")
    assert losses != exact
    assert losses == pytest.approx(exact, abs=0.05)
    done = run_ranks(2, "-m", "ooc", "train", store, "--out", tmp_path / "bf16", *FLAGS, "--compress-gradients", "bf16")
    assert [each.returncode for each in done] == [2, 2]
    assert "is for GPUs, whose processes NCCL joins: use fp16 or powersgd on the CPU" in done[0].stderr
    assert not (tmp_path / "bf16").exists()


@pytest.mark.slow
def test_a_run_with_powersgd_goes_on_as_it_would_have(make_store: MakeStore, tmp_path: Path) -> None:
    store, powersgd = make_store(num_nodes=203, num_edges=1500), ["--compress-gradients", "powersgd", "--powersgd-rank", "1"]
    whole = trained(store, tmp_path / "whole", *FLAGS, *powersgd, "--epochs", "4")
    assert len(whole) > WHOLE_STEPS + 8
    exact = trained(store, tmp_path / "exact", *FLAGS, "--epochs", "4")
    assert whole[:WHOLE_STEPS] == exact[:WHOLE_STEPS]
    assert whole != exact
    stopped = WHOLE_STEPS + 5
    trained(store, tmp_path / "run", *FLAGS, *powersgd, "--epochs", "4", "--max-steps", str(stopped))
    again = trained(store, tmp_path / "run", *FLAGS, *powersgd, "--max-steps", "1000", "--resume")
    assert again == whole
    trained(store, tmp_path / "more", *FLAGS, *powersgd, "--epochs", "4", "--max-steps", str(stopped))
    flags = [*FLAGS, *powersgd, "--max-steps", "1000", "--resume"]
    other = trained(store, tmp_path / "more", *flags, count=4)
    assert len(other) == len(whole)
    assert other == pytest.approx(whole, abs=0.1)
    assert json.loads((tmp_path / "more" / "summary.json").read_text())["world_size"] == 4


def test_one_process_has_nothing_to_compress(make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = make_store(), tmp_path / "run"
    assert main(["train", str(store), "--out", str(out), *FLAGS, "--compress-gradients", "fp16"]) == 2
    error = capsys.readouterr().err.strip()
    assert "is of what processes send to each other, and there is one: leave it out" in error
    assert len(error.splitlines()) == 1
    assert not out.exists()
    assert main(["train", str(store), "--out", str(out), *FLAGS, "--powersgd-rank", "3"]) == 2
    assert "powersgd-rank applies to" in capsys.readouterr().err.replace("powersgd_rank", "powersgd-rank")

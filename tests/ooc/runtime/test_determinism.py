"""Where deterministic kernels are on, and that counts of scores take any."""

import pytest
import torch

from ooc.config.nodes import TrainConfig
from ooc.metrics import nodes
from ooc.metrics.nodes import Scores
from ooc.runtime.determinism import order_free, use_deterministic_kernels
from ooc.runtime.restoring import settings_restored
from ooc.stores.errors import ConfigError
from ooc.training.build import use_tf32
from tests.pretended_cuda import pretended_cuda


def deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def test_kernels_are_deterministic_and_memory_is_not_filled() -> None:
    with settings_restored():
        use_deterministic_kernels(torch.device("cpu"))
        assert deterministic()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        with order_free():
            assert not deterministic()
        with pytest.raises(ValueError, match="x"), order_free():
            raise ValueError("x")
        assert deterministic()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    with order_free():
        assert not deterministic()


def test_scores_are_counted_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = nodes.ClassCounts.update
    monkeypatch.setattr(nodes.ClassCounts, "update", lambda *given: (seen.append(deterministic()), real(*given))[1])
    with settings_restored():
        use_deterministic_kernels(torch.device("cpu"))
        scores = Scores("multiclass", 3, 8)
        scores.update(torch.randn(8, 3), torch.arange(8) % 3)
        scores.compute()
        assert deterministic()
    assert seen == [False]


def test_tf32_is_of_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ConfigError, match=r"`tf32` is of GPUs, and this run computes on the CPU: leave it out"):
        use_tf32(torch.device("cpu"))
    with pretended_cuda(), settings_restored():
        use_tf32(torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == "high"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
        with pytest.raises(ConfigError, match=r"`tf32` is not of pretended: leave it out"):
            use_tf32(torch.device("cuda"))
        monkeypatch.undo()
    assert torch.get_float32_matmul_precision() == before


def test_threads_may_change_when_a_run_is_resumed_and_tf32_not() -> None:
    one = TrainConfig(store="a.ooc", out="run")  # type: ignore[arg-type]
    other = TrainConfig(store="a.ooc", out="run", sample_threads=3, read_threads=4, tf32=True)  # type: ignore[arg-type]
    assert one.differences(other) == ["tf32"]
    with pytest.raises(ValueError, match="read_threads does not apply to mode cluster"):
        TrainConfig(store="a.ooc", out="run", mode="cluster", read_threads=4)  # type: ignore[arg-type]

"""What a call of the Python API leaves behind in the process that called it: nothing."""

import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.models.layers import evaluating
from ooc.runtime import memory
from tests.conftest import MakeStore
from tests.ooc.temporal_stores import Edges

SMALL: dict[str, Any] = {"hidden": 8, "fanout": [3, 3], "batch_size": 16, "plan": False, "epochs": 1}


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def state() -> dict[str, Any]:
    """Settings of the process, and of the libraries that a run uses."""
    return {
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": [np.asarray(each).tolist() for each in np.random.get_state()[1:]],  # type: ignore[index]
        "Python's generator": random.getstate(),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "default type": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "freed blocks": list(memory._policy),
        "signals": {each: signal.getsignal(each) for each in signal.valid_signals()},
        "hooks": (sys.excepthook, threading.excepthook, sys.getswitchinterval(), sys.getrecursionlimit()),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "logging": [(each, list(logging.getLogger(each).handlers)) for each in (None, "ooc", "torch", "zarr")],
        "umask": umask(),
        "folder": os.getcwd(),
        "numpy": np.geterr(),
        "threads": sorted(each.name for each in threading.enumerate() if each.name.startswith("ooc")),
    }


@pytest.fixture(autouse=True)
def _settings_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None of them is what a run sets, or the default."""
    threads, policy = torch.get_num_threads(), list(memory._policy)
    torch.manual_seed(12345)
    torch.set_num_threads(3)
    memory.keep_large_blocks(False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    yield
    torch.set_num_threads(threads)
    memory.keep_large_blocks(policy[0] if policy else True)


def assert_unchanged(call: Callable[[], Any]) -> Any:
    before = state()
    result = call()
    after = state()
    for name, was in before.items():
        assert after[name] == was, name
    return result


def test_verbs_on_nodes_restore_the_settings(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, run = make_store(), tmp_path / "run"
    monkeypatch.setattr("ooc.training.loop.PLAN_SECONDS", 0.1)
    assert_unchanged(lambda: ooc.train(store=store, out=run, threads=1, **SMALL))
    assert_unchanged(lambda: ooc.train(out=run, resume=True, epochs=2))
    assert_unchanged(lambda: ooc.plan(store=store, mode="sampled", threads=1, **SMALL))
    assert_unchanged(lambda: ooc.infer(run, store).close())
    assert_unchanged(lambda: ooc.embed(run, store, tmp_path / "x.zarr"))


@pytest.mark.slow
def test_verbs_on_stores_restore_the_settings(make_store: MakeStore, tmp_path: Path) -> None:
    store, run = make_store(), tmp_path / "run"
    ooc.train(store=store, out=run, **SMALL)
    assert_unchanged(lambda: ooc.write_report(run))
    np.save(tmp_path / "edges.npy", np.array([[0, 1], [2, 3]]))
    assert_unchanged(lambda: ooc.append(store, edges=tmp_path / "edges.npy"))
    assert_unchanged(lambda: ooc.compact(store))
    assert_unchanged(lambda: ooc.verify(store))
    assert_unchanged(lambda: ooc.ingest(edges=tmp_path / "edges.npy", out=tmp_path / "s.ooc"))


@pytest.mark.parametrize(
    "more",
    [{"mode": "full", "model": "gcn"}, {"mode": "history", "parts": 4, "parts_per_batch": 2}, {"mode": "saint"}],
    ids=lambda more: str(more["mode"]),
)
def test_modes_restore_the_settings(make_store: MakeStore, tmp_path: Path, more: dict[str, Any]) -> None:
    settings = {name: SMALL[name] for name in ("hidden", "epochs")}
    assert_unchanged(lambda: ooc.train(store=make_store(), out=tmp_path / "run", threads=1, **settings, **more))


def test_runs_on_events_restore_the_settings(tmp_path: Path) -> None:
    store = Edges(span=3000).store(tmp_path, undirected=True)
    more: dict[str, Any] = {"mode": "events", "hidden": 8, "epochs": 1, "threads": 1}
    assert_unchanged(lambda: ooc.train(store=store, out=tmp_path / "run", **more))


class _Fails(ooc.Callback):
    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        assert torch.are_deterministic_algorithms_enabled()
        raise ZeroDivisionError


def test_settings_are_restored_after_an_error(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()

    def fails() -> None:
        with pytest.raises(ZeroDivisionError):
            ooc.train(store=store, out=tmp_path / "run", threads=1, callbacks=[_Fails()], **SMALL)

    def refused() -> None:
        with pytest.raises(ooc.ConfigError):
            ooc.train(store=store, out=tmp_path / "other", model="no_such_module:Net", threads=1, **SMALL)

    assert_unchanged(fails)
    assert_unchanged(refused)


class Net(nn.Module):
    """A model whose first layer is frozen in evaluation mode, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.last = nn.Dropout(0.5).eval(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_modules_that_were_in_evaluation_mode_stay_there() -> None:
    model = Net()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert (model.training, model.frozen.training, model.last.training) == (True, False, True)

"""kill -9 of runs on a GPU: what goes on has the losses and the model of a run that was not killed, to the bit.

On a pretended device anywhere (`tests.pretended_cuda`), and on CUDA where torch sees it.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import MakeStore
from tests.forked import Python
from tests.ooc.runs import curve

STEPS = 12
RUN = """
import json, os, signal, sys
from contextlib import nullcontext
from ooc.config.modes import class_of
from ooc.training.loop import train
from ooc.training.watchers import LineWatcher
from tests.pretended_cuda import pretended_cuda

given, resume, kill_at, pretended = json.loads(sys.argv[1])

class Kill(LineWatcher):
    def step(self, epoch, step, total_steps, loss):
        if total_steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

with pretended_cuda() if pretended else nullcontext():
    train(class_of(given)(**given), resume=resume, watcher=Kill())
"""
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]
"""marks of what needs a real one"""


def run(given: dict[str, Any], pretended: bool, resume: bool = False, kill_at: int = -1) -> int:
    """The exit code of a process that trains, killed after so many steps."""

    done = Python("-c", RUN, json.dumps([given, resume, kill_at, pretended])).wait()
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def tensors(value: Any) -> Iterator[Tensor]:
    """All in a checkpoint."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)


def model_of(out: Path) -> list[Tensor]:
    saved = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=False)
    return [*tensors(saved["model"]), *tensors(saved["optimizer"])]


@pytest.mark.parametrize("pretended", [True, pytest.param(False, marks=ON_CUDA)], ids=["pretended", "cuda"])
@pytest.mark.parametrize("mode", ["full", pytest.param("sampled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["sage", pytest.param("gcn", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(
    make_store: MakeStore, tmp_path: Path, model: str, mode: str, pretended: bool
) -> None:
    store = make_store(num_nodes=300, num_edges=3000)
    given: dict[str, Any] = {"store": str(store), "model": model, "mode": mode, "device": "cuda", "hidden": 8, "seed": 5}
    given |= {"threads": 1, "dropout": 0.3, "checkpoint_every": 2, "plan": False}
    if mode == "sampled":
        given |= {"fanout": [3, 3], "batch_size": 45, "epochs": 3}
    else:
        given |= {"layers": 2, "epochs": STEPS}
    assert run({**given, "out": str(tmp_path / "whole")}, pretended) == 0
    killed = {**given, "out": str(tmp_path / "killed")}
    for kill_at in (3, 7):  # between checkpoints
        assert run(killed, pretended, kill_at > 3, kill_at) == -signal.SIGKILL
    assert run(killed, pretended, resume=True) == 0
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    found, wanted = model_of(tmp_path / "killed"), model_of(tmp_path / "whole")
    assert len(found) == len(wanted) > 4
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))

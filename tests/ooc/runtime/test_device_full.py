"""Where a GPU's memory is full, the message has the numbers, and what the mode accepts."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ooc.config.modes import class_of
from ooc.config.nodes import OWN
from ooc.runtime.device_full import device_full
from ooc.runtime.memory_plan import DevicePlan
from ooc.stores.errors import BudgetError
from ooc.training.loop import train
from ooc.training.registry import MODES
from tests.conftest import MakeStore
from tests.pretended_cuda import pretended_cuda

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.12 GiB is free. "
    "Including non-PyTorch memory, this process has 78.02 GiB memory in use. Of the allocated memory 70.50 GiB is allocated by "
    "PyTorch, and 6.03 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)


def test_the_numbers_of_the_moment_and_of_the_plan_are_named() -> None:
    plan = DevicePlan.of(8 * 10**9, 10**9, "(gpu_memory)").with_states(3 * 10**6)
    said = device_full(torch.OutOfMemoryError(MESSAGE), plan, "a smaller `hidden`")
    assert said == (
        "the GPU has no memory left: 2.15 GB were asked for, and 1.2 GB of 85 GB are free; torch has 75.7 GB in use; of 8 GB "
        "(gpu_memory) the plan booked libraries 500 MB, model 1 GB, rows of histories or of node memory 3 MB; give a smaller "
        "`hidden`"
    )
    said = device_full(torch.OutOfMemoryError("CUDA error: out of memory. Further"), None, "it more")
    assert said == "the GPU has no memory left (CUDA error: out of memory); give it more"


@pytest.mark.parametrize(("task", "mode"), MODES, ids=" ".join)
def test_only_settings_are_advised_that_the_mode_accepts(task: str, mode: str) -> None:
    advised, fields = re.findall("`(.*?)`", MODES[task, mode].saves_device), class_of({"task": task, "mode": mode}).model_fields
    assert "hidden" in advised
    others = {name for other, own in OWN.items() if other != mode for name in own} - set(OWN.get(mode, ()))
    if mode == "full":  # a class of its own
        others = set()
    assert set(advised) <= set(fields) - others - ({"fanout", "batch_size"} if mode in set(OWN) - {"sampled"} else set())


@pytest.mark.parametrize(
    ("mode", "advised"), [("sampled", "gpu_memory"), ("cluster", "parts_per_batch"), ("full", "gpu_memory")]
)
def test_a_run_that_meets_it_ends_in_one_line(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, advised: str
) -> None:
    def step(*_: Any) -> None:
        raise torch.OutOfMemoryError(MESSAGE)

    given: dict[str, Any] = {"mode": mode, "store": make_store(), "out": tmp_path / "run", "layers": 2, "epochs": 1}
    given |= {"parts": 3} if mode == "cluster" else {}
    monkeypatch.setattr(MODES["node", mode], "step", step)
    with (
        pretended_cuda(),
        pytest.raises(BudgetError, match=f"2.15 GB were asked for, and 1.2 GB of 85 GB are free.*`{advised}`") as error,
    ):
        train(class_of(given)(**given, device="cuda"))
    assert ("the plan booked libraries" in str(error.value)) == (mode != "cluster")
    assert ("gpu_memory`" in str(error.value)) == (mode != "cluster")

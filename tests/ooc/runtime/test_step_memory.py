"""The line-by-line view of a step against allocations whose layer, size and life are known."""

import gc
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ooc.models.builders import build_model, full_blocks
from ooc.runtime import step_memory
from ooc.runtime.memory import MOST_SAMPLES, MemoryMeter
from ooc.runtime.step_memory import OUTSIDE, StepMemory
from ooc.stores.errors import ConfigError
from tests.ooc.live_bytes import LiveBytes

ROWS, WIDE = 1000, 50
MATRIX = 4 * ROWS * WIDE


class Squares(nn.Module):
    """Keeps its input, and makes a temporary twice as large."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x])
        return x * x + both[: len(x)]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Squares(), nn.Sequential(Squares())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_storages_are_booked_to_layers_lines_and_passes() -> None:
    model, x = Two(), torch.randn(ROWS, WIDE, requires_grad=True)
    with StepMemory(model) as step:
        out = model(x * 1)
        out.sum().backward()
    lines = {(line.layer, line.op.rpartition(" ")[2], line.backward): line for line in step.lines}
    cat = lines["first", "aten.cat", False]
    assert (cat.calls, cat.allocated, cat.kept) == (1, 2 * MATRIX, 0)
    assert "test_step_memory.py" in cat.line
    assert "(forward)" in cat.line
    assert lines["first", "aten.mul.Tensor", False].kept == 0, "its product was added and is gone"
    assert lines[OUTSIDE, "aten.mul.Tensor", False].kept == MATRIX, "the first layer's input"
    assert lines["first", "aten.add.Tensor", False].kept == MATRIX, "the second one's"
    backward = {line.layer for line in step.lines if line.backward}
    assert {"first", "second.0", OUTSIDE} <= backward
    assert all(line.line == "backward" for line in step.lines if line.backward)
    assert step.kept == sum(line.kept for line in step.lines) == 3 * MATRIX + 8, "inputs, outputs, the sum and its gradient"
    assert step.peak == sum(line.at_peak for line in step.lines) == max(sum(point.bytes.values()) for point in step.timeline)
    assert step.by_layer()["first"][1] == MATRIX


def test_the_peak_is_that_of_a_known_program() -> None:
    with StepMemory() as step:
        one = torch.zeros(ROWS, WIDE)
        two = torch.zeros(2 * ROWS, WIDE)
        view, again = one[:10], one.add_(1)
        del one, view, again
        three = torch.zeros(ROWS, WIDE)
    assert (step.peak, step.kept) == (3 * MATRIX, 3 * MATRIX)
    assert [sum(point.bytes.values()) // MATRIX for point in step.timeline] == [1, 3, 3]
    assert len(two) + len(three) == 3 * ROWS


def test_storages_that_are_resized_count_what_they_have() -> None:
    """Emptied, filled again, grown and gone: no operation tells, and the line that made one has its bytes."""
    with StepMemory() as step:
        one, two = torch.zeros(ROWS, WIDE), torch.zeros(ROWS, WIDE)
        one.untyped_storage().resize_(0)
        two.untyped_storage().resize_(MATRIX // 2)
        three = torch.zeros(ROWS, WIDE)
        one.untyped_storage().resize_(4 * MATRIX)
        three.add_(1)
        del one
        torch.zeros(1)
    zeros = [line for line in step.lines if line.op == "aten.zeros"]
    assert step.peak == 4 * MATRIX + MATRIX // 2 + MATRIX
    assert step.kept == MATRIX // 2 + MATRIX
    assert sum(line.at_peak for line in zeros) == step.peak
    assert sum(line.allocated for line in zeros) == 3 * MATRIX + 4 * MATRIX + 4
    assert [sum(point.bytes.values()) * 2 // MATRIX for point in step.timeline] == [2, 4, 3, 11, 3]


def reversible_step(layers: int) -> tuple[StepMemory, int, int]:
    """A step of a reversible model by the meter, and what an independent count has between the passes and at most."""
    torch.manual_seed(0)
    blocks, x = full_blocks(torch.randint(0, 400, (2, 2000)), 400, 1), torch.randn(400, 10)
    model = build_model("revsage", 10, 32, 2, num_layers=layers, dropout=0.3, norm="layer")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # else those of this step count
    model(x, blocks)  # what blocks make once
    with LiveBytes(each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)) as live:
        loss = model(x, blocks).square().mean()
        kept = live.now()
        loss.backward()
    meter = MemoryMeter("step", model=model)
    with meter:
        loss = model(x, blocks).square().mean()
        loss.backward()
    return meter.steps[0], kept, live.peak


def test_a_reversible_model_is_flat_in_its_depth() -> None:
    """Its layers empty the storages of their inputs, and fill them again in the backward pass."""
    (seven, *counts), (many, *counts_of_many) = reversible_step(7), reversible_step(28)
    for step, (kept, peak) in ((seven, counts), (many, counts_of_many)):
        assert (step.kept, step.peak) == (kept + 4, peak), "kept with the loss's gradient, which begins the backward pass"
    assert many.kept == pytest.approx(seven.kept, rel=0.05)
    assert many.peak == pytest.approx(seven.peak, rel=0.05)


def test_a_layers_own_hooks_are_not_used_and_results_do_not_change() -> None:
    """A layer with hooks would not do the next one's dropout with its ReLU."""
    torch.manual_seed(0)
    blocks = full_blocks(torch.randint(300, (2, 2000)), 300, 2)
    model, x = build_model("sage", 16, 32, 4, num_layers=2, dropout=0.5), torch.randn(300, 16)
    found = []
    for measured in (False, True):
        torch.manual_seed(1)
        meter = MemoryMeter("step", model=model if measured else None)
        model.zero_grad()
        with meter:
            loss = F.cross_entropy(model(x, blocks), torch.zeros(300, dtype=torch.int64))
            loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)
    (step,) = meter.steps
    assert {"layers.0.conv", "layers.1.conv"} <= step.by_layer().keys()
    assert any("_ReluDropout" in line.op or "memory_efficient" in line.line for line in step.lines)


def test_a_long_block_has_a_bounded_timeline_with_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "MOST_POINTS", 50)
    with StepMemory() as step:
        for number in range(1000):
            rows = torch.zeros(100 if number != 777 else 100_000)
    assert len(rows) == 100
    assert len(step.timeline) <= 50
    assert max(sum(point.bytes.values()) for point in step.timeline) == step.peak >= 400_000


def test_a_block_that_fails_leaves_no_hook_and_no_mode() -> None:
    hooks = torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks
    before, threads = [len(each) for each in hooks], threading.active_count()
    meter = MemoryMeter("fails", model=Two())
    with pytest.raises(ZeroDivisionError), meter:
        1 / 0  # noqa: B018
    assert [len(each) for each in hooks] == before
    assert threading.active_count() == threads
    assert len(meter.steps) == len(meter.readings) == len(meter.samples) == 1
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_meter_shows_what_it_has_measured_and_takes_modules_only() -> None:
    meter = MemoryMeter("step", model=Two())
    assert repr(meter) == "MemoryMeter('step', no readings)"
    for _ in range(2):
        with meter:
            torch.zeros(ROWS, WIDE)
    assert re.fullmatch(
        r"MemoryMeter\('step', 2 readings, the latest: process at most [\d.]+ [MG]B, tensors 200 kB, between the passes 0 B\)",
        repr(meter),
    )
    for model in (3, Two):
        with pytest.raises(ConfigError, match=r"^`model` of a memory meter is a torch module"):
            MemoryMeter("x", model=model)


def test_a_meter_keeps_samples_and_decorates_calls() -> None:
    model = Two()
    meter = MemoryMeter("calls", period_s=0.001, model=model)

    @meter
    def forward() -> Tensor:
        return model(torch.zeros(ROWS, WIDE))

    forward()
    forward()
    assert len(meter.readings) == len(meter.steps) == 2
    for samples, reading in zip(meter.samples, meter.readings, strict=True):
        assert 2 <= len(samples) <= MOST_SAMPLES
        assert samples[0].process == reading.before
        assert [s.seconds for s in samples] == sorted(s.seconds for s in samples)
    group = Path("/proc/self/cgroup").exists() and meter.reading.group_peak
    assert group == 0 or meter.reading.group_peak >= meter.reading.group_before > 0

"""Steps that are killed go on from their last note, and come to the same gradients, to the bit."""

from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ooc.fullgraph import resume as notes
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.resume import StepLog
from ooc.fullgraph.step import FullGraph
from ooc.fullgraph.value_store import ValueStore
from ooc.layerwise import executor as layerwise_executor
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import LossOf, cut_into, gradients, make, store_of
from tests.ooc.runs import Killed
from tests.scale import some

MIXED = {
    "near0": TensorPlacement.RETAINED,
    "rows1": TensorPlacement.RETAINED,
    "near1": TensorPlacement.RECOMPUTED,
    "saved1": TensorPlacement.RETAINED,
}
CASES: list[tuple[str, dict[str, Any], dict[str, TensorPlacement], TensorPlacement]] = [
    ("sage", {"dropout": 0.4}, {}, TensorPlacement.DISK),
    ("sage", {"dropout": 0.4, "norm": "batch", "residual": True}, {}, TensorPlacement.DISK),
    ("sage", {"dropout": 0.4}, MIXED, TensorPlacement.DISK),
    ("gcnii", {"dropout": 0.3, "norm": "batch"}, {}, TensorPlacement.DISK),
    ("gcn", {}, {}, TensorPlacement.RECOMPUTED),
    ("gat", {"dropout": 0.3, "norm": "batch", "residual": True}, {}, TensorPlacement.DISK),
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts, and a note after each that can have one."""
    cut_into(9, monkeypatch)
    monkeypatch.setattr(notes, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(layerwise_executor, "UNIT_CELLS", 2)


def once(
    ds: Dataset,
    folder: Path,
    made: nn.Module,
    placements: dict[str, TensorPlacement],
    other: TensorPlacement,
    room: int = 430_000,
) -> float:
    with closing(FullGraph(made, ds, folder, room=room)) as full:
        placed = {
            v.name: placements.get(v.name, other if other in v.placements else TensorPlacement.DISK)
            for v in full.program.values
        }
        full.placement = Placement(placed)
        torch.manual_seed(11)
        return full.step(LossOf(ds))


def killing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, after: bool) -> None:
    """Ends the run at the call number `at` of a method, before or behind what it does."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(at + 1))

    def call(*arguments: Any, **keywords: Any) -> Any:
        last = next(calls) == at
        if last and not after:
            raise Killed
        found = real(*arguments, **keywords)
        if last:
            raise Killed
        return found

    monkeypatch.setattr(owner, name, call)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("name", "settings", "placements", "other"), CASES)
def test_a_killed_step_goes_on(
    make_store: MakeStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, Any],
    placements: dict[str, TensorPlacement],
    other: TensorPlacement,
) -> None:
    with Dataset.open(store_of(make_store)) as ds:
        whole = make(name, **settings)
        expected = once(ds, tmp_path / "whole", whole, placements, other)
        went_on = 0
        for number, (owner, method, at, after) in enumerate(
            [
                (StepLog, "keep", 0, True),
                (StepLog, "keep", 4, True),
                (ValueStore, "put", 43, False),
                (ValueStore, "put", 107, True),
            ]
        ):
            folder = tmp_path / str(number)
            with monkeypatch.context() as patched, suppress(Killed):
                killing(patched, owner, method, at, after)
                once(ds, folder, make(name, **settings), placements, other)
            went_on += (folder / notes.NOTE).exists()
            model = make(name, **settings)
            assert once(ds, folder, model, placements, other) == expected
            for key, gradient in gradients(whole).items():
                assert torch.equal(gradients(model)[key], gradient), key
            for (key, buffer), wanted in zip(model.named_buffers(), whole.buffers(), strict=True):
                assert torch.equal(buffer, wanted), key
            assert not (folder / notes.NOTE).exists()
        assert went_on >= 2


def test_a_step_of_another_stream_of_dropout_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its rows would be dropped by other numbers than their gradients."""
    model = make("sage", dropout=0.4)
    torch.manual_seed(11)
    now = notes.key_of(model, "data")
    assert notes.key_of(model, "data") == now
    monkeypatch.setattr(notes, "STREAM", notes.STREAM - 1)
    assert notes.key_of(model, "data") != now


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_step_that_gathers_goes_on_behind_a_range(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings, placements, other = CASES[-1]
    room, kept, keep = 415_000, [0], StepLog.keep
    with Dataset.open(store_of(make_store)) as ds:
        whole = make(name, **settings)
        with monkeypatch.context() as patched:
            patched.setattr(StepLog, "keep", lambda *arguments: kept.append(kept[-1] + 1) or keep(*arguments))
            expected = once(ds, tmp_path / "whole", whole, placements, other, room)
        assert kept[-1] > 8
        for at in some(range(0, kept[-1], 2), 4):
            folder = tmp_path / str(at)
            with monkeypatch.context() as patched, suppress(Killed):
                killing(patched, StepLog, "keep", at, True)
                once(ds, folder, make(name, **settings), placements, other, room)
            assert (folder / notes.NOTE).exists()
            model = make(name, **settings)
            assert once(ds, folder, model, placements, other, room) == expected
            for key, gradient in gradients(whole).items():
                assert torch.equal(gradients(model)[key], gradient), (at, key)


@pytest.mark.usefixtures("eager")
def test_other_parameters_begin_anew(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Dataset.open(store_of(make_store)) as ds:
        with monkeypatch.context() as patched, suppress(Killed):
            killing(patched, StepLog, "keep", 2, True)
            once(ds, tmp_path / "full", make("sage"), {}, TensorPlacement.DISK)
        assert (tmp_path / "full" / notes.NOTE).exists()
        other = make("sage")
        with torch.no_grad():
            next(other.parameters()).mul_(2)
        again = make("sage")
        again.load_state_dict(other.state_dict())
        assert once(ds, tmp_path / "full", other, {}, TensorPlacement.DISK) == once(
            ds, tmp_path / "fresh", again, {}, TensorPlacement.DISK
        )
        assert all(torch.equal(one, gradients(again)[key]) for key, one in gradients(other).items())


@pytest.mark.cases(1)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=["sums", "gathers"])
@pytest.mark.parametrize("room", [415_000, 600_000])
def test_a_step_goes_on_in_another_memory_and_skips_nothing(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...], room: int
) -> None:
    name, settings, placements, other = case
    with Dataset.open(store_of(make_store)) as ds:
        whole = make(name, **settings)
        expected = once(ds, tmp_path / "whole", whole, placements, other, room)
        for at in (1, 4):
            folder = tmp_path / str(at)
            with monkeypatch.context() as patched, suppress(Killed):
                killing(patched, StepLog, "keep", at, True)
                once(ds, folder, make(name, **settings), placements, other)
            assert (folder / notes.NOTE).exists()
            model = make(name, **settings)
            assert once(ds, folder, model, placements, other, room) == expected
            for key, gradient in gradients(whole).items():
                assert torch.equal(gradients(model)[key], gradient), key


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_damaged_note_is_no_note(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds:
        expected = once(ds, tmp_path / "whole", make("gcn"), {}, TensorPlacement.DISK)
        for number, content in enumerate([b"", b"no pickle at all", b"\x80\x05nor this"]):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / notes.NOTE).write_bytes(content)
            assert once(ds, folder, make("gcn"), {}, TensorPlacement.DISK) == expected

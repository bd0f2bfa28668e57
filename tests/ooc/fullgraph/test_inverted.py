"""Exact steps of reversible models whose rows are made again from outputs: gradients, bytes by depth, and killed steps."""

from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ooc.fullgraph import resume
from ooc.fullgraph.placement.step_plan import alike
from ooc.fullgraph.placement.step_profile import plan_full
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.resume import StepLog
from ooc.fullgraph.step import FullGraph
from ooc.fullgraph.value_store import ValueStore
from ooc.models.builders import build_model
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import CLASSES, FEATURES, NODES, LossOf, agree, cut_into, gradients, store_of, whole
from tests.ooc.runs import Killed

RETAINED, DISK, INVERTED = TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.INVERTED
ROOM = 430_000


def reversible(name: str, layers: int, groups: int = 2, hidden: int = 16, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    given = {"groups": groups, "heads": 2, "dropout": 0.3, "norm": "layer", **settings}
    return build_model(name, FEATURES, hidden, CLASSES, layers, **given)


def without_hubs(make_store: MakeStore) -> Path:
    """A random graph of five edges a node."""
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, NODES, (2, 5 * NODES))
    arrays = {"x": rng.standard_normal((NODES, FEATURES), dtype=np.float32), "y": rng.integers(0, CLASSES, NODES)}
    return make_store(num_nodes=NODES, src=src, dst=dst, num_classes=CLASSES, **arrays)


def stepped(
    model: nn.Module,
    ds: Dataset,
    folder: Path,
    *wanted: TensorPlacement,
    room: int = ROOM,
    seen: Callable[[FullGraph], None] = lambda full: None,
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of a step with rows INVERTED and other values at the first of `wanted` that they may be at."""
    with closing(FullGraph(model, ds, folder, room=room)) as full:
        full.placement = alike(full.program, INVERTED, *wanted)
        model.zero_grad()
        torch.manual_seed(7)
        loss = full.step(LossOf(ds))
        seen(full)
        return loss, gradients(model)


@pytest.mark.cases(1)
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("name", ["revsage", "revgat", "revgcn"])
def test_gradients_are_those_of_the_model_in_memory(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, groups: int
) -> None:
    cut_into(9, monkeypatch)
    with Dataset.open(store_of(make_store)) as ds:
        model = reversible(name, 3, groups).double()
        loss, expected = whole(model, ds, torch.float64)
        for where in (RETAINED, DISK):
            found_loss, found = stepped(model, ds, tmp_path / where, where, room=2 * ROOM)
            assert found_loss == pytest.approx(loss, rel=1e-12)
            agree(found, expected, 1e-9)


def test_rows_are_inverted_from_rows_that_stand_wherever_those_are(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows are kept, and those below them are never needed, or made again from them."""
    cut_into(4, monkeypatch)
    with Dataset.open(store_of(make_store)) as ds:
        model = reversible("revsage", 4).double()
        loss, expected = whole(model, ds, torch.float64)
        with closing(FullGraph(model, ds, tmp_path / "full", room=2 * ROOM)) as full:
            placed = alike(full.program, INVERTED, RETAINED)
            other = {"rows2": RETAINED, "saved2": RETAINED, "rows5": DISK, "saved5": DISK}
            full.placement = Placement({**placed.placements, **other}, {"rows0": DISK, "rows1": RETAINED, "rows6": DISK})
            assert full.program.allows(full.placement)
            uses = full.program.uses(full.placement)
            assert [name for name in ("rows0", "rows1", "rows3", "rows4", "rows6") if not uses[name]] == [
                "rows0",
                "rows3",
                "rows6",
            ]
            model.zero_grad()
            torch.manual_seed(7)
            assert full.step(LossOf(ds)) == pytest.approx(loss, rel=1e-12)
            agree(gradients(model), expected, 1e-9)


def test_what_autograd_keeps_of_inverted_rows_is_recomputed(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds, closing(FullGraph(reversible("revgcn", 2), ds, None, room=10**8)) as full:
        placed = alike(full.program, INVERTED, RETAINED)
        assert full.program.allows(placed)
        for name in ("saved0", "saved2"):
            assert not full.program.allows(Placement({**placed.placements, name: RETAINED}, placed.passing))
        allowed = {value.name: value.placements for value in full.program.values}
        assert allowed["rows2"] == (RETAINED, DISK, INVERTED)
        assert allowed["rows3"] == (RETAINED, DISK), "the last layer's rows: what those below are made again from"


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", [RETAINED, DISK])
def test_bytes_do_not_grow_with_depth(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: TensorPlacement
) -> None:
    """Of the values that stand at a time, in RAM or on disk, as a step counts them; rows that are kept grow with the layers."""
    cut_into(2, monkeypatch)
    found: dict[bool, list[int]] = {True: [], False: []}
    with Dataset.open(store_of(make_store)) as ds:
        for layers in (4, 16):
            with closing(FullGraph(reversible("revsage", layers), ds, tmp_path / str(layers), room=10**8)) as full:
                placed = alike(full.program, INVERTED, where)
                kept = {name: where if at is INVERTED else at for name, at in placed.placements.items()}
                for inverts in (True, False):
                    full.placement = placed if inverts else Placement(kept)
                    full.step(LossOf(ds))
                    found[inverts].append(max(s.memory if where is RETAINED else s.disk for s in full.traffic.samples))
    assert found[True][0] == found[True][1]
    assert found[False][1] > 3 * found[False][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["revsage", "revgat", "revgcn"])
def test_112_layers_take_the_bytes_of_7_and_have_the_gradient(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    """Beside plain autograd, with all activations stored. In float32 a few ReLUs differ, as between float32 and float64."""
    most: list[int] = []
    with Dataset.open(without_hubs(make_store)) as ds:
        for layers in (7, 112):
            model = reversible(name, layers, dropout=0.2, hidden=32).double()
            seen = lambda full: most.append(peak(full))  # noqa: E731
            loss, found = stepped(model, ds, tmp_path / str(layers), RETAINED, room=10**8, seen=seen)
            for layer in model.layers:
                layer.disable = True
            expected_loss, expected = whole(model, ds, torch.float64)
            assert loss == pytest.approx(expected_loss, rel=1e-12)
            exact, own = (torch.cat([each[key].flatten() for key in sorted(each)]) for each in (expected, found))
            assert float((own - exact).norm() / exact.norm()) < 1e-12
    assert most[1] <= 1.05 * most[0]


def peak(full: FullGraph) -> int:
    return max(sample.memory for sample in full.traffic.samples)


@pytest.mark.slow
@pytest.mark.parametrize("where", [DISK, RETAINED])
def test_a_killed_step_goes_on_to_the_bit(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: TensorPlacement
) -> None:
    cut_into(4, monkeypatch)
    monkeypatch.setattr(resume, "LEAST_SECONDS", 0.0)
    kept, keep, put, puts = [0], StepLog.keep, ValueStore.put, [0]
    with Dataset.open(store_of(make_store)) as ds:
        with monkeypatch.context() as patched:
            patched.setattr(StepLog, "keep", lambda *arguments: kept.append(kept[-1] + 1) or keep(*arguments))
            patched.setattr(ValueStore, "put", lambda *arguments: puts.append(puts[-1] + 1) or put(*arguments))
            expected = stepped(reversible("revsage", 3), ds, tmp_path / "whole", where)
        assert (kept[-1] > 20) == (where is DISK), "rows that are in memory alone are not made again from the first layer on"
        ends = [
            *((StepLog, "keep", at) for at in range(0, kept[-1], 5)),
            *((ValueStore, "put", at) for at in range(3, puts[-1], 9)),
        ]
        for number, (owner, method, at) in enumerate(ends):
            folder = tmp_path / str(number)
            with monkeypatch.context() as patched, suppress(Killed):
                killing(patched, owner, method, at)
                stepped(reversible("revsage", 3), ds, folder, where)
                raise AssertionError("not killed")
            found = stepped(reversible("revsage", 3), ds, folder, where)
            assert found[0] == expected[0], (method, at)
            assert all(torch.equal(found[1][key], gradient) for key, gradient in expected[1].items()), (method, at)


def killing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Ends the run behind the call number `at` of a method."""
    real, calls = getattr(owner, name), iter(range(at + 1))

    def call(*arguments: Any, **keywords: Any) -> Any:
        last = next(calls) == at
        found = real(*arguments, **keywords)
        if last:
            raise Killed
        return found

    monkeypatch.setattr(owner, name, call)


@pytest.mark.slow
def test_steps_without_a_plan_keep_all_rows_where_they_fit_and_invert_them_elsewhere(
    make_store: MakeStore, tmp_path: Path
) -> None:
    places = []
    with Dataset.open(without_hubs(make_store)) as ds:
        for room in (10**8, 400_000, 100_000):
            with closing(FullGraph(reversible("revsage", 6), ds, tmp_path / str(room), room=room)) as full:
                places.append((full.placement.of("rows4"), full.placement.standing("rows4")))
                assert full.program.allows(full.placement)
                full.step(LossOf(ds))
                assert room == 10**8 or peak(full) <= room // 2
    assert places == [(RETAINED, RETAINED), (INVERTED, RETAINED), (INVERTED, DISK)]


def test_a_plan_inverts_rows_where_memory_is_short(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds:
        with closing(FullGraph(reversible("revsage", 6), ds, None, room=10**8)) as full:
            total = full.most_bytes
        with closing(FullGraph(reversible("revsage", 6), ds, tmp_path / "full", room=total // 3)) as full:
            plan = plan_full(full, tmp_path / "full", 0)
            assert INVERTED in plan.placement.placements.values()
            assert plan.peak[0] <= total // 3
            full.placement = plan.placement
            full.step(LossOf(ds))
            assert peak(full) <= plan.peak[0]

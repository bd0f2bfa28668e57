"""The profile of exact steps and plans of real models: nothing of it is left in a run, and a step goes as it was planned."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.fullgraph.activation_offload import PendingChunk
from ooc.fullgraph.placement.costs import Ranges
from ooc.fullgraph.placement.op_costs import OpCost, RangeBytes, Speed, StepProfile
from ooc.fullgraph.placement.step_plan import TierRoom, plan_step, predict
from ooc.fullgraph.placement.step_profile import plan_full, profile
from ooc.fullgraph.program import Placement, Program, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.layerwise.shape import gather_ranges
from ooc.models.builders import build_model
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import NAMES, LossOf, agree, cut_into, gradients, make, store_of, whole

MODELS = [*((name, {}) for name in NAMES), ("sage", {"norm": "batch", "residual": True}), ("gat", {"norm": "batch"})]


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "settings"), MODELS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_a_planned_step_is_the_step(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    cut_into(5, monkeypatch)
    with Dataset.open(store_of(make_store)) as ds:
        model = make(name, dropout=0.3, **settings)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        value, expected = whole(model, ds, torch.float32)
        model.load_state_dict(state)
        for room in (90_000, 400_000) if name != "gat" else (500_000, 800_000):
            with closing(FullGraph(model, ds, tmp_path / f"full-{room}", room=room)) as full:
                model.zero_grad()
                plan = plan_full(full, tmp_path / f"full-{room}", 10**9)
                assert all(parameter.grad is None for parameter in model.parameters())
                assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
                assert plan.peak[0] <= room
                full.placement = plan.placement
                full.room += 130_000  # pieces of 32 rows are mostly the room between them
                torch.manual_seed(7)
                assert full.step(LossOf(ds)) == pytest.approx(value, rel=1e-5)
                agree(gradients(model), expected, 1e-5)
                model.load_state_dict(state)


def made_up(program: Program, rng: np.random.Generator) -> StepProfile:
    gathering: dict[str, Any] = {"gathered": RangeBytes(320.0, 160.0), "kept": RangeBytes(80.0, 40.0), "hub": 4096}
    ops = {op.name: OpCost(*rng.integers(0, 8, 3).tolist(), **(gathering if op.kind == "gather" else {})) for op in program.ops}
    return StepProfile(ops, {TensorPlacement.DISK: Speed(2.0**18, 2.0**17)}, 0.5)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "settings"), MODELS, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_no_placement_drawn_at_random_is_faster(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    cut_into(5, monkeypatch)
    rng = np.random.default_rng(4)
    model = make(name, dropout=0.3, **settings)
    with Dataset.open(store_of(make_store)) as ds, closing(FullGraph(model, ds, tmp_path / "full", room=10**6)) as full:
        program = full.program
    total = sum(value.nbytes for value in program.values)
    for share in (0.2, 0.5, 0.8):
        costs, room, tried = made_up(program, rng), TierRoom(int(total * share), 0, total), 0
        plan = plan_step(program, costs, room)
        assert plan.exact or name == "gat"  # of rows that are gathered again the search thinks a little better than it should
        for _ in range(150):
            placements = {value.name: value.placements[rng.integers(len(value.placements))] for value in program.values}
            passing = {
                value.name: (TensorPlacement.RETAINED, TensorPlacement.DISK)[rng.integers(2)] for value in program.values
            }
            try:
                drawn = predict(program, costs, Placement(placements, passing), room)
            except BudgetError:
                continue
            tried += 1
            assert plan.seconds <= drawn.seconds
        assert tried


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", [TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.RECOMPUTED])
def test_a_step_moves_the_bytes_that_were_predicted(make_store: MakeStore, tmp_path: Path, where: TensorPlacement) -> None:
    path = make_store(num_nodes=30_000, num_edges=240_000, x=np.ones((30_000, 32), np.float32))
    with Dataset.open(path) as ds:
        torch.manual_seed(1)
        model = build_model("sage", 32, 32, 4, 3)
        with closing(FullGraph(model, ds, tmp_path / "full", room=40_000_000)) as full:
            placements = {v.name: where if where in v.placements else TensorPlacement.DISK for v in full.program.values}
            full.placement = Placement(placements)
            costs = profile(full, tmp_path / "full")  # for what autograd keeps
            plan = predict(full.program, costs, full.placement, TierRoom(full.room, 0, 10**9))
            loss = Labelled(ds)
            full.step(loss)  # makes what is constant
            before = full.traffic.bytes_read, full.traffic.bytes_written
            full.step(loss)
            read, written = (after - first for after, first in zip(_moved(full), before, strict=True))
            predicted = plan.moved(TensorPlacement.DISK)
            assert read == pytest.approx(predicted[0], rel=0.1, abs=10**5)
            assert written == pytest.approx(predicted[1], rel=0.1, abs=10**5)
            names = [name for name in full.traffic.seconds if not name.startswith("edges")]
            assert sorted(names) == sorted({run.name for run in plan.runs})


def _moved(full: FullGraph) -> tuple[int, int]:
    return full.traffic.bytes_read, full.traffic.bytes_written


class Labelled:
    """The sum of some rows: a loss."""

    def __init__(self, ds: Dataset) -> None:
        self._nodes = ds.num_nodes

    def __call__(self, first: int, logits: torch.Tensor) -> torch.Tensor:
        return logits.square().sum() / self._nodes


def test_the_profile_measures_what_autograd_keeps_and_every_op(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_into(3, monkeypatch)
    folder = tmp_path / "full"
    with Dataset.open(store_of(make_store)) as ds, closing(FullGraph(make("gin"), ds, folder, room=10**6)) as full:
        found = profile(full, tmp_path / "full")
        assert set(found.ops) == {op.name for op in full.program.ops}
        assert all(cost.rows_s > 0 for cost in found.ops.values())
        costs = [found.ops[op.name] for op in full.program.ops if op.summed]
        assert all(cost.sums_s + cost.pass_s > 0 for cost in costs)
        saved = [value for value in full.program.values if value.kind == "saved"]
        assert all(found.nbytes[value.name] > 0 for value in saved)  # the perceptron's inner rows
        assert min(found.tiers[TensorPlacement.DISK].read, found.tiers[TensorPlacement.DISK].written) > 1e6
        assert 0 <= found.hidden <= 1
        assert not (tmp_path / "full" / "profile").exists()
        assert profile(full, None).tiers == {}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("where", "at_once"), [(TensorPlacement.RETAINED, 0), (TensorPlacement.DISK, 2), (TensorPlacement.RECOMPUTED, 1)]
)
def test_ranges_of_a_layer_that_gathers_leave_room_for_what_autograd_keeps(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: TensorPlacement, at_once: int
) -> None:
    nodes, room, kept, held, events = 20_000, 50_000_000, list[int](), dict[int, int](), list[tuple[int, int]]()

    def noted(method: str) -> None:
        """After each call: (ranges whose backward is done, bytes that autograd keeps in memory)."""
        real = getattr(PendingChunk, method)

        def call(live: PendingChunk, *arguments: Any) -> Any:
            if method == "backward":
                kept.append(held[id(live)])
            found = real(live, *arguments)
            held[id(live)] = sum(tensor.nbytes for tensor in live._kept if isinstance(tensor, torch.Tensor))
            events.append((len(kept), sum(held.values())))
            return found

        monkeypatch.setattr(PendingChunk, method, call)

    torch.manual_seed(1)
    path = make_store(num_nodes=nodes, num_edges=10 * nodes, x=np.ones((nodes, 32), np.float32))
    with (
        Dataset.open(path) as ds,
        closing(FullGraph(build_model("gat", 32, 32, 4, 2, heads=2), ds, tmp_path / "full", room=room)) as full,
    ):
        costs = profile(full, tmp_path / "full")
        placement = Placement({v.name: where if v.kind == "saved" else TensorPlacement.DISK for v in full.program.values})
        full.room = room + costs.nbytes["saved0"] * (where is TensorPlacement.RETAINED)
        full.placement = predict(full.program, costs, placement, TierRoom(full.room, 0, 10**9)).placement
        memory = full.placement.ranges["layer0"]
        ranges = len(list(gather_ranges(ds.graph, full.shape.layers[0], memory, 0)))
        for method in ("__init__", "fetch", "backward"):
            noted(method)
        full.step(Labelled(ds))
    above, kept = len(kept) - ranges, kept[-ranges:]  # layer 0 is the last of the backward pass
    assert ranges > 1
    assert 0.9 < (memory + at_once * max(kept)) / room < 1.02
    if at_once:
        assert max(nbytes for number, nbytes in events if number > above) <= at_once * max(kept)
    source, own = costs.ops["layer0"].kept
    meetings = float(Ranges(nodes, 1.0, met=10.0).meetings(ranges))
    assert sum(kept) == pytest.approx(nodes * (own + source * meetings), rel=0.02)

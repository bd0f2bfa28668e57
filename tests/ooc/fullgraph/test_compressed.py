"""What autograd keeps of exact steps, compressed: the same loss, gradients but for the rounding, less memory, and its plan."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ooc.config.modes import load_config
from ooc.config.nodes import FullConfig
from ooc.fullgraph.executor import Executor
from ooc.fullgraph.placement.step_plan import StepPlan
from ooc.fullgraph.placement.step_profile import plan_full
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.models import compression
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.loop import train
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import LossOf, cut_into, gradients, make, store_of
from tests.ooc.runs import KillAt, Killed, curve


@pytest.fixture(autouse=True)
def _small_matrices_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "LEAST", 64)
    monkeypatch.setattr(compression, "NARROW", 8)


def step(full: FullGraph, ds: Dataset, saved: TensorPlacement, seed: int = 7) -> tuple[float, Tensor]:
    """(loss, gradients in one vector)."""
    full.placement = Placement({v.name: saved if v.kind == "saved" else TensorPlacement.RETAINED for v in full.program.values})
    full.model.zero_grad()
    torch.manual_seed(seed)
    loss = full.step(LossOf(ds))
    return loss, torch.cat([grad.flatten() for grad in gradients(full.model).values()])


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["sage", "gin", "gcn", "gat"])
def test_a_compressed_step_has_the_loss_and_nearly_the_gradient(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cut_into(3, monkeypatch)
    errors, pending = [], []

    def forward(self: Executor, *args: Any) -> Any:
        found = run(self, *args)
        pending[-1] = max(pending[-1], self.pending_bytes)
        return found

    run = Executor._forward
    monkeypatch.setattr(Executor, "_forward", forward)
    with Dataset.open(store_of(make_store)) as ds:
        for compress in ("int8", "int2"):
            with closing(FullGraph(make(name, dropout=0.3), ds, tmp_path / compress, room=10**8, compress=compress)) as full:  # type: ignore[arg-type]
                pending += [0]
                loss, exact = step(full, ds, TensorPlacement.RETAINED)
                pending += [0]
                again, found = step(full, ds, TensorPlacement.COMPRESSED)
                assert again == loss
                assert torch.equal(step(full, ds, TensorPlacement.COMPRESSED)[1], found)
                errors.append(float((found - exact).norm() / exact.norm()))
    assert 0 < errors[0] < 0.05
    assert errors[0] < errors[1]
    assert pending[1] < pending[0]
    assert pending[3] < pending[1]


def test_a_plan_compares_it_and_is_no_slower_than_plans_that_treat_all_alike(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds:
        for compress in (None, "int4"):
            with closing(FullGraph(make("gin"), ds, tmp_path / f"{compress}", room=10**7, compress=compress)) as full:  # type: ignore[arg-type]
                plan = plan_full(full, tmp_path / f"{compress}", 10**9)
                assert ("all compressed" in plan.static) == (compress is not None)
                assert plan.seconds <= min(each for each in plan.static.values() if each is not None)
                assert StepPlan.of(plan.asdict()).placement == plan.placement


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_bit_by_its_plan(make_store: MakeStore, tmp_path: Path) -> None:
    store = store_of(make_store, x=torch.randn(203, 12, generator=torch.Generator().manual_seed(1)).numpy())

    def config(name: str, **more: Any) -> FullConfig:
        given: dict[str, Any] = {"store": store, "out": tmp_path / name, "epochs": 5, "hidden": 16, "threads": 1, "seed": 3}
        return FullConfig(**given, checkpoint_every=2, **{"compress": "int4", "placement": "compressed", **more})

    train(config("whole"))
    train(config("plain", compress=None, placement="planned"))
    assert curve(tmp_path / "whole") != curve(tmp_path / "plain")
    with pytest.raises(Killed):
        train(config("cut"), watcher=KillAt(3))
    train(config("cut"), resume=True)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    planned = train(config("planned", placement="planned"))
    assert planned["full"] is not None
    assert (tmp_path / "planned" / "plan.json").exists(), "a choice of the plan: it is made without --plan"


def test_it_has_to_be_allowed() -> None:
    with pytest.raises(ConfigError, match="placement = compressed needs to know how: give compress = int8, int4 or int2 too"):
        load_config(None, {"store": "s", "out": "o", "mode": "full", "placement": "compressed"})

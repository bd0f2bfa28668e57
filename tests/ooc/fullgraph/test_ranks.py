"""Exact steps over ranks against those of one process."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ooc.fullgraph.halo import exchange
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.dataset import Dataset
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import NAMES, LossOf, agree, cut_into, gradients, make, store_of
from tests.ooc.fullgraph.over_ranks import run_over

ROOM = 10**9
SETTINGS: list[dict[str, Any]] = [{}, {"dropout": 0.5}, {"norm": "batch", "residual": True, "dropout": 0.3}]
WHERE = [TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.RECOMPUTED]
EPOCHS = 2
Found = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]


def trained(
    ranks: Ranks, store: Path, name: str, settings: dict[str, Any], where: TensorPlacement, folder: Path, room: int = ROOM
) -> Found:
    """Losses and gradients of two epochs, and the parameters and buffers behind them."""
    with Dataset.open(store) as ds:
        model = make(name, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, grads = [], []
        with closing(FullGraph(model, ds, folder / f"rank{ranks.rank}", room=room, ranks=ranks)) as full:
            placed = {v.name: where if where in v.placements else TensorPlacement.DISK for v in full.program.values}
            full.placement = Placement(placed)
            for epoch in range(EPOCHS):
                torch.manual_seed(epoch)
                losses.append(full.step(LossOf(ds)))
                grads.append(gradients(model))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return losses, grads, {name: value.clone() for name, value in model.state_dict().items()}


def all_trained(ranks: Ranks, cases: list[tuple[Any, ...]], parts: int = 16) -> list[Found]:
    """Of each case, in chunks of a few rows and exchanges of a few rows at a time."""
    with pytest.MonkeyPatch.context() as patch:
        cut_into(parts, patch)
        patch.setattr(exchange, "PIECE_BYTES", 2048)
        return [trained(ranks, *case) for case in cases]


def equal_one_process(cases: list[tuple[Any, ...]], world_size: int, folder: Path) -> None:
    expected = all_trained(ALONE, [(*case, folder / f"alone{number}") for number, case in enumerate(cases)])
    given = [(*case, folder / f"case{number}") for number, case in enumerate(cases)]
    ranks = run_over(world_size, all_trained, given, folder=folder)
    for case, (losses, grads, state), *found in zip(cases, expected, *ranks, strict=True):
        for rank in found:
            np.testing.assert_allclose(rank[0], losses, rtol=1e-6, atol=1e-6, err_msg=str(case))
            for ours, theirs in zip(rank[1], grads, strict=True):
                agree(ours, theirs, 1e-5)
            assert rank[0] == found[0][0], "the same on every rank"
            assert all(torch.equal(value, found[0][2][name]) for name, value in rank[2].items())
            for name, value in state.items():
                torch.testing.assert_close(rank[2][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_equal_one_process(make_store: MakeStore, tmp_path: Path) -> None:
    cases = [(store_of(make_store, weighted=True), "gcn", SETTINGS[2], TensorPlacement.DISK)]
    equal_one_process(cases, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_one_process(make_store: MakeStore, tmp_path: Path, world_size: int) -> None:
    """All built-in models, with dropout, batch norm and residuals, wherever values stand."""
    plain, weighted = (store_of(make_store, weighted=each, name=f"{each}.ooc") for each in (False, True))
    cases: list[tuple[Any, ...]] = []
    for name in NAMES:
        for number, settings in enumerate(SETTINGS[: 2 if name in ("appnp", "sgc") else None]):
            cases.append((weighted if number == 1 else plain, name, settings, WHERE[len(cases) % len(WHERE)]))
    equal_one_process(cases if world_size == 2 else cases[::4], world_size, tmp_path)
